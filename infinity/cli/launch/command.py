"""Runs a command as a rank. It imports the infinity that it belongs to, not one in the working directory."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[3])
del sys.path[0]  # this file's directory
if _ROOT not in sys.path:  # infinity is not installed
    sys.path.insert(0, _ROOT)

from infinity.cli.main import main  # noqa: E402

sys.argv[0] = "infinity"  # as `infinity top` shows it
sys.exit(main())
