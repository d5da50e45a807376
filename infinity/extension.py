"""Why an extension module is missing, in words that lead to one."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def missing_extension(name: str) -> str:
    """What is wrong, and what to do.

    Args:
        name: of the extension module within the package.
    """
    if list(_PACKAGE.glob(f"{name}.*.so")):
        return f"{_PACKAGE} has {name} for another Python, or a broken one; build it again: python -m pip install ."
    if (_PACKAGE.parent / "CMakeLists.txt").is_file():
        return (
            f"{_PACKAGE} is the source tree, where {name} is not built: run python -m pip install . there and start "
            "from another directory, or build it in place: python -m pip install -e ."
        )
    return f"{name} was not built; install infinity with a C++ compiler at hand: python -m pip install ."
