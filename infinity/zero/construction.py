"""Build a model that does not fit in memory: its parameters are in files until `initialize`.

A parameter is moved into a file when it is registered in its module. The file has no name and is mapped shared, so code
can write to the parameter as to any tensor. If memory is short, the kernel writes pages to the file and drops them.
The file is deleted with the tensor.
"""

from __future__ import annotations

import errno
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from infinity.config import Config, load_config
from infinity.config.load import ConfigSource
from infinity.errors import StorageError
from infinity.io.directory import allocate, how_to_grow
from infinity.zero.ranks import world_size

FILE_BYTES = 256 << 10  # smaller parameters stay in memory: a mapping for each would cost more than it saves

_made = WeakTensorKeyDictionary()  # parameters that modules took inside of an `Init`; used as a set


class Init:
    """A context in which modules are built with their parameters in files, until `initialize` moves them to a tier.

    The model has the same values as a model that is built in memory from the same seed. The files are unnamed and
    memory-mapped, and are deleted with the parameters. They are in the first directory of the configuration's NVMe
    tier, otherwise in the system's directory for temporary files (`TMPDIR`). If memory is short, the kernel writes
    pages to them. Parameters below 256 KiB, and buffers, stay in memory.

    Args:
        config: the configuration that `initialize` will get. It is checked here, before the model is built.
            `config_dict_or_path` is another name of it.
        enabled: False to build in memory.

    Raises:
        ConfigError: the configuration cannot work.
        StorageError: inside the context, the drive has no room for the files.
    """

    def __init__(
        self,
        config: ConfigSource | Config | None = None,
        *,
        config_dict_or_path: ConfigSource | None = None,
        enabled: bool = True,
    ) -> None:
        config = config_dict_or_path if config is None else config
        if config is not None and not isinstance(config, Config):
            config = load_config(config, world_size=world_size())
        paths = [] if config is None else [nvme.path for nvme in config.tiering.nvme]
        self._directory = next((path for path in paths if path.is_dir()), None)
        self._enabled = enabled
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._undo.enter_context(register_module_parameter_registration_hook(self._adopt))

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    @torch.no_grad()
    def _adopt(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is not nn.Parameter or made_in_files(param):
            return
        _made[param] = None
        if _can_move(param):
            param.data = _in_file(param.detach(), self._directory, f"{type(module).__name__}.{name}", param.dtype)


def made_in_files(param: nn.Parameter) -> bool:
    """Whether a module took the parameter inside of an `Init`."""
    return param in _made


@torch.no_grad()
def convert(param: nn.Parameter, dtype: torch.dtype, directory: Path | None, name: str) -> None:
    """Convert the parameter's values to another dtype. Large parameters are then in a new file.

    Raises:
        StorageError: the drive has no room for the file.
    """
    values = param.detach()
    param.data = _in_file(values, directory, name, dtype) if _can_move(param) else values.to(dtype)


def _can_move(param: nn.Parameter) -> bool:
    """Whether the parameter is large, contiguous and in host memory, and no other tensor uses its memory."""
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
            allocate(file.fileno(), nbytes)  # a full disk is an error here, not a signal at a later write
            path = f"/proc/self/fd/{file.fileno()}"
            mapped = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
    except OSError as error:
        raise StorageError(
            error.errno or errno.EIO,
            f"zero.Init cannot keep {name} ({nbytes} bytes) in a file: {error.strerror}; "
            f"{how_to_grow(error)}, set TMPDIR, or give Init a configuration with another nvme_path",
            str(directory or tempfile.gettempdir()),
            0,
        ) from error
    return mapped.view(dtype).view(values.shape).copy_(values)
