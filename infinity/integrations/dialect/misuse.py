"""What DeepSpeed asserts: scripts that expect its AssertionError get one, with words."""

from __future__ import annotations

from infinity.errors import ConfigError


class AssertedConfigError(ConfigError, AssertionError):
    """A wrong argument where DeepSpeed has an `assert`."""
