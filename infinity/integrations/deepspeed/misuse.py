"""Errors that are also an AssertionError or a RuntimeError, because scripts expect these from DeepSpeed."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class AssertedConfigError(ConfigError, AssertionError):
    """A wrong argument that DeepSpeed refuses by an `assert`."""


class ModifiedError(InfinityError, RuntimeError):
    """A change that DeepSpeed refuses by a RuntimeError."""


class AssertedError(InfinityError, AssertionError):
    """A call at a wrong time, which DeepSpeed refuses by an `assert`."""
