"""Building a model that does not fit memory."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from infinity.config import Config, load_config
from infinity.config.load import ConfigSource
from infinity.zero.meta import construct_on_meta


class Init:
    """Parameters that are created inside this context take no memory; `infinity.initialize` makes them in their tier.

    There, unit by unit, they get the values of their module's own initialisation: transformers' rule for the
    architecture, `reset_parameters()`, or the `init_function` given to `initialize`. Values that a constructor writes
    into its parameters after that are not kept; put them into one of these three. Buffers are real at once.

    Args:
        config: the configuration that will be used, checked here, before the time is spent.
        enabled: False to build in memory.

    Raises:
        ConfigError: the configuration cannot work.
    """

    def __init__(self, config: ConfigSource | Config | None = None, *, enabled: bool = True) -> None:
        if config is not None and not isinstance(config, Config):
            load_config(config)
        self._enabled = enabled
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._undo.enter_context(construct_on_meta())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
