"""Building a model that does not fit memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from infinity.config import Config, load_config
from infinity.config.load import ConfigSource
from infinity.zero.file_backed import construct_in_files
from infinity.zero.ranks import world_size


class Init:
    """Parameters that modules take inside this context lie in files until `infinity.initialize` moves them to a tier.

    They have the values that their constructors give them, the same that a model built in memory gets from the same
    seed. The files have no names and go with the parameters; they are in the first directory of the configuration's
    NVMe tier, or without one where the system has temporary files (`TMPDIR`). The kernel writes them out when memory is
    short. Parameters below 256 KiB, and buffers, are in memory.

    Args:
        config: the configuration that will be used, checked here, before the time is spent; `config_dict_or_path` is
            its other name.
        enabled: False to build in memory.

    Raises:
        ConfigError: the configuration cannot work.
        StorageError: the files have no room, inside the context.
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
        self._directory = _directory(config)
        self._enabled = enabled
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._undo.enter_context(construct_in_files(self._directory))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()


def _directory(config: Config | None) -> Path | None:
    """Of the files: on the drive, if there is one."""
    paths = [] if config is None else [nvme.path for nvme in config.tiering.nvme]
    return next((path for path in paths if path.is_dir()), None)
