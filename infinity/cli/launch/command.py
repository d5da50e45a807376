"""The script of a rank that runs a command: of the package that it lies in, whatever the working directory has."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[3])
del sys.path[0]  # this file's directory
if _ROOT not in sys.path:  # it was not installed
    sys.path.insert(0, _ROOT)

from infinity.cli.main import main  # noqa: E402

sys.argv[0] = "infinity"  # as `infinity top` shows it
sys.exit(main())
