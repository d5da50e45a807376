"""What somebody else's `torch.save` wrote, read without running any of it.

torch's restricted unpickler makes tensors and plain containers, and takes no class that it is not told of. Whatever
else a file names gets a stand-in of this file under that name: it keeps what it is given, and does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from infinity.checkpoint.files import brief, open_plain
from infinity.errors import CheckpointError

_PLAIN = (torch.Tensor, str, bytes, int, float, bool, type(None), torch.dtype)


class StandIn:
    """An object of a class that is not known here, or the result of a function.

    Attributes:
        name: of the class or function.
        arguments: that it would have been made of.
        state: that it would have been given.
    """

    name = ""

    def __init__(self, *arguments: Any) -> None:
        """Nothing is done with the arguments; see `__new__`."""

    def __new__(cls, *arguments: Any) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a mapping of its own kind, which nobody asks for."""

    def append(self, value: Any) -> None:
        """Items of a list of its own kind."""

    def extend(self, values: Any) -> None:
        """Likewise."""

    def get(self, name: str) -> Any:
        """An attribute of the object; None if it had none of this name."""
        return self.state.get(name) if isinstance(self.state, Mapping) else None


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary that a file of `torch.save` holds; its tensors stay in the file until they are looked at.

    Raises:
        CheckpointError: it cannot be read, or is no such file.
    """
    open_plain(path).close()
    try:
        names = get_unsafe_globals_in_checkpoint(str(path))
        stand_ins: list[Any] = [(type("StandIn", (StandIn,), {"name": name}), name) for name in names]
        with safe_globals(stand_ins):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(f"{path} cannot be read without running code of it: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the dictionary that a checkpoint is")
    return content


def _reason(error: Exception) -> str:
    """The line that says it, without torch's advice to run what the file says."""
    lines = [line for line in str(error).splitlines() if line.startswith(("Trying", "Unsupported", "Can only"))]
    return lines[0] if lines else f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def stranger(value: Any) -> str | None:
    """Name of the first class in a value that is neither tensor nor plain; None if there is none."""
    if isinstance(value, StandIn):
        return value.name
    if isinstance(value, type):
        return value.__name__ if not issubclass(value, StandIn) else value.name
    if isinstance(value, Mapping):
        return _first(*value.keys(), *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return _first(*value)
    return None if isinstance(value, _PLAIN) else brief(type(value).__name__)


def _first(*values: Any) -> str | None:
    return next((found for value in values if (found := stranger(value)) is not None), None)
