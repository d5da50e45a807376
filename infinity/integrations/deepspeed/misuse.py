"""What DeepSpeed asserts or checks: scripts that expect its AssertionError or RuntimeError get one, with words."""

from __future__ import annotations

from infinity.errors import ConfigError, InfinityError


class AssertedConfigError(ConfigError, AssertionError):
    """A wrong argument where DeepSpeed has an `assert`."""


class ModifiedError(InfinityError, RuntimeError):
    """A change where DeepSpeed's checks have a RuntimeError against it."""


class AssertedError(InfinityError, AssertionError):
    """A call at a moment when DeepSpeed has an `assert` against it."""
