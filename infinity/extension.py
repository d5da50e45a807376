"""Find the native extensions if the package is a source tree, and explain why one is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from filecmp import cmp
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_NAMES = ("_adam", "_aio")


def installed_package(places: Sequence[str] | None = None) -> Path | None:
    """Return the installed package whose extensions a source tree without its own can use; None if there is none.

    Python that is started in the checkout imports the tree, although `pip install .` has put the extensions elsewhere.
    They fit if their stubs, which describe their interface, equal those of the tree.

    Args:
        places: directories to search; `sys.path` by default.
    """
    if _has_extensions(_PACKAGE):
        return None
    for place in sys.path if places is None else places:
        package = Path(place, _PACKAGE.name).resolve()
        if package != _PACKAGE and _has_extensions(package):
            return package if _same_stubs(package) else None
    return None


def _has_extensions(package: Path) -> bool:
    return any(Path(package, _NAMES[0] + suffix).is_file() for suffix in EXTENSION_SUFFIXES)


def _same_stubs(package: Path) -> bool:
    stubs = [f"{name}.pyi" for name in _NAMES]
    return all((package / stub).is_file() and cmp(_PACKAGE / stub, package / stub, shallow=False) for stub in stubs)


def missing_extension(name: str) -> str:
    """Return why an extension is missing, and what to do.

    Args:
        name: name of the extension module within the package.
    """
    if list(_PACKAGE.glob(f"{name}.*.so")):
        return f"{_PACKAGE} has {name} for another Python, or a broken one; build it again: python -m pip install ."
    if (_PACKAGE.parent / "CMakeLists.txt").is_file():
        return (
            f"{_PACKAGE} is the source tree, where {name} is not built, and no installed infinity has one that fits: "
            f"run python -m pip install {_PACKAGE.parent}, or build it in place: python -m pip install -e "
            f"{_PACKAGE.parent}"
        )
    return f"{name} was not built; install infinity with a C++ compiler at hand: python -m pip install ."
