"""`install()`: have `import deepspeed` give infinity's in this process.

A folder for `sys.path` has a package `deepspeed` that is infinity; `infinity run` puts it on its processes' path.
Beside the package, whose modules deepspeed/finder.py makes, there is a distribution that libraries ask for its version:
a file (`.egg-info`), since builders of wheels leave such folders out.
"""

from __future__ import annotations

import sys
from importlib import invalidate_caches
from pathlib import Path

from infinity.errors import ConfigError

FOLDER = Path(__file__).parent / "deepspeed" / "sys_path"


def install() -> None:
    """Have `import deepspeed` give infinity's in this process; before anything has asked whether there is one.

    Raises:
        ConfigError: another one is imported already.
    """
    imported = sys.modules.get("deepspeed")
    if imported is not None:
        where = Path(str(imported.__file__)).parents[1]
        if where == FOLDER:
            return
        raise ConfigError(
            f"deepspeed is imported already, from {where}, and cannot be infinity's as well: start the script with "
            "`infinity run`, or call install() first"
        )
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
        invalidate_caches()
