"""Let `import deepspeed` import infinity's DeepSpeed interface in this process.

`install` adds a folder to `sys.path` that has a package `deepspeed`, whose modules deepspeed/finder.py makes; `infinity
run` adds it for its processes. The folder also has the metadata of a distribution, because libraries look up its
version. It is a file (`.egg-info`), because builders of wheels leave out such folders.
"""

from __future__ import annotations

import sys
from importlib import invalidate_caches
from pathlib import Path

from infinity.errors import ConfigError

FOLDER = Path(__file__).parent / "deepspeed" / "sys_path"


def install() -> None:
    """Let `import deepspeed` import infinity's. Call this before another library looks for deepspeed.

    Raises:
        ConfigError: another package `deepspeed` is imported already.
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
