"""Parameters that lie in files while a model is built: real values, and memory that the kernel can have back.

A parameter is moved at the moment when its module takes it, into a file without a name that is mapped shared. What its
constructor, or anybody else, writes to it is then kept as in any tensor, and where memory is short the kernel writes
its pages to the file and drops them. The file goes with the tensor.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.errors import StorageError

FILE_BYTES = 256 << 10  # smaller parameters stay in memory: a mapping each would cost more than it saves

# By identity, because tensors compare element by element.
_made: dict[int, weakref.ref[nn.Parameter]] = {}


def made_in_files(param: nn.Parameter) -> bool:
    """The parameter was taken by its module inside `construct_in_files`."""
    made = _made.get(id(param))
    return made is not None and made() is param


@contextmanager
def construct_in_files(directory: Path | None) -> Iterator[None]:
    """Have parameters that modules take inside the context lie in files.

    Args:
        directory: where; None for the system's directory for temporary files.

    Raises:
        StorageError: there is no room for a parameter, inside the context.
    """

    def settle(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is not nn.Parameter or made_in_files(param):
            return
        _made[id(param)] = weakref.ref(param, partial(_forget, id(param)))
        if _can_move(param):
            with torch.no_grad():
                param.data = _in_file(param.detach(), directory, f"{type(module).__name__}.{name}", param.dtype)

    handle = register_module_parameter_registration_hook(settle)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def convert(param: nn.Parameter, dtype: torch.dtype, directory: Path | None, name: str) -> None:
    """Have the parameter's values in another dtype; large ones lie in a file of that size again.

    Raises:
        StorageError: there is no room for it.
    """
    values = param.detach()
    param.data = _in_file(values, directory, name, dtype) if _can_move(param) else values.to(dtype)


def _forget(key: int, _: object) -> None:
    _made.pop(key, None)


def _can_move(param: nn.Parameter) -> bool:
    """It is large, in memory of the host, in order, and nobody else writes to its memory."""
    if param.device.type != "cpu" or param.layout is not torch.strided or not param.is_contiguous():
        return False
    storage: Any = param.untyped_storage()
    if storage.nbytes() < FILE_BYTES or storage.nbytes() != param.numel() * param.itemsize:
        return False
    users: Any = getattr(torch._C, "_storage_Use_Count", None)
    return users is not None and bool(users(storage._cdata) <= 2)  # the parameter, and `storage`


def _in_file(values: torch.Tensor, directory: Path | None, name: str, dtype: torch.dtype) -> torch.Tensor:
    nbytes = values.numel() * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an error here, not a signal at a later write
            path = f"/proc/self/fd/{file.fileno()}"
            mapped = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
    except OSError as error:
        raise StorageError(
            error.errno or errno.EIO,
            f"zero.Init cannot keep {name} ({nbytes} bytes) in a file: {error.strerror}; free space there, set TMPDIR, "
            "or give Init a configuration with another nvme_path",
            str(directory or tempfile.gettempdir()),
            0,
        ) from error
    return mapped.view(dtype).view(values.shape).copy_(values)
