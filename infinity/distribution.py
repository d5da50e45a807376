"""Checks of what pip has installed: another project of the same name, and the packages of the extras."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

# infinity-tiering is on no package index, so messages name the packages of an extra, not the extra. The packages can
# always be installed, whether infinity came from a checkout, a wheel or an image.
EXTRAS = {
    "train": ("transformers>=4.45", "tokenizers>=0.20", "accelerate>=1.1", "peft>=0.14"),
    "plot": ("matplotlib>=3.7",),
    "checksum": ("xxhash>=3.5",),
    "examples": ("datasets>=4.7", "ray[train]>=2.40", "trl>=1.0"),
}


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f"python -m pip install {' '.join(repr(package) for package in EXTRAS[extra])}"


def warn_of_namesake(site: Path) -> None:
    """Warn if the distribution `infinity` of PyPI, which is another project, is installed in the same directory.

    Both are `import infinity`. The order of their installation decides which one a program imports, and to uninstall
    one removes files of the other.

    Args:
        site: the directory that holds this package.
    """
    found = next((name for name in _names(site) if _is_namesake(name)), None)
    if found is not None:
        warnings.warn(
            f"{site / found} is another project whose module is called infinity, too: both cannot be used in one "
            "environment. Keep one: python -m pip uninstall infinity infinity-tiering, then install the one that you "
            "want",
            RuntimeWarning,
            stacklevel=3,
        )


def _names(site: Path) -> list[str]:
    try:
        return os.listdir(site)  # noqa: PTH208  (names are enough, and cheaper)
    except OSError:  # for example inside a zip file
        return []


def _is_namesake(name: str) -> bool:
    is_record = name.startswith("infinity-") and name.endswith((".dist-info", ".egg-info"))
    return name == "infinity.py" or is_record
