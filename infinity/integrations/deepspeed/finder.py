"""Make the modules of the table in `namespace.py` when they are imported, below `deepspeed` and below `infinity`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, cast

from infinity.integrations.deepspeed.namespace import MODULES, Home, Module, Refused
from infinity.integrations.deepspeed.refused import refused, refused_class


class Finder(MetaPathFinder):
    """Finds the modules of the table below the packages that were given to `serve`, the roots.

    It is the last finder, and only finds modules below a root or below a module that it has found: `infinity.zero` has
    files, and another package `deepspeed` has its own modules.
    """

    def __init__(self) -> None:
        self._roots: dict[str, ModuleType] = {}

    def serve(self, root: ModuleType) -> None:
        """Find the modules of the table below this package, too."""
        self._roots[root.__name__] = root
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        row = MODULES.get(name)
        if row is None or not self._found(fullname.rpartition(".")[0]):
            return None
        origin = f"{fullname.replace('.', '/')}.py"  # no file: the name of the program under `python -m`
        return ModuleSpec(fullname, Maker(root, name), origin=origin, is_package=row.is_package)

    def _found(self, parent: str) -> bool:
        """Whether the parent is a root, or a module that this finder has found."""
        module = sys.modules.get(parent)
        if module is None:
            return False
        return self._roots.get(parent) is module or isinstance(getattr(module.__spec__, "loader", None), Maker)


class Maker(Loader):
    """Makes one module.

    Args:
        root: name of the package below which the module is.
        name: name of the module in the table.
    """

    def __init__(self, root: str, name: str) -> None:
        self._root, self._name = root, name

    def exec_module(self, module: ModuleType) -> None:
        fill(module, self._root, self._name)

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m` runs: a call of the function `main`, if the module offers one."""
        home = MODULES[self._name].names.get("main")
        program = "" if home is None else f"from importlib import import_module\nimport_module({fullname!r}).main()"
        return compile(program, f"<{fullname}>", "exec")


def fill(module: ModuleType, root: str, name: str) -> None:
    """Set the attributes of a module as in the table. Raise ImportError for a module that is not supported."""
    row = MODULES[name]
    if row.instead:
        raise ImportError(f"deepspeed.{name} is not supported by infinity: {row.instead}")
    for offered_as, offered in row.names.items():
        setattr(module, offered_as, _value(root, offered))
    if row.fallback is not None:
        vars(module)["__getattr__"] = _value(root, row.fallback)
    for submodule in row.submodules:
        import_module(f"{module.__name__}.{submodule}")
    vars(module)["__all__"] = sorted([*row.names, *row.submodules])
    if row.source:
        exec(_code(row), vars(module))


def _value(root: str, offered: Any) -> Any:
    if isinstance(offered, Home):
        where = f"{root}.{offered.module[1:]}" if offered.module.startswith("/") else offered.module
        return getattr(import_module(where, __package__), offered.attribute)
    if isinstance(offered, Refused):
        return refused_class(offered.name) if offered.is_class else refused(offered.name)
    return offered


def _code(row: Module) -> CodeType:
    spec = find_spec(f".{row.source}", __package__)
    assert spec is not None
    code = cast(InspectLoader, spec.loader).get_code(spec.name)
    assert code is not None
    return code


FINDER = Finder()
