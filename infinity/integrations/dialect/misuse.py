"""What DeepSpeed asserts: scripts that expect its AssertionError get one, with words."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class AssertedConfigError(ConfigError, AssertionError):
    """A wrong argument where DeepSpeed has an `assert`."""


class AssertedError(InfinityError, AssertionError):
    """A call at a moment when DeepSpeed has an `assert` against it."""
