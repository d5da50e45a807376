"""Refuse "auto" values of infinity's own keys in configurations for transformers and accelerate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from infinity.errors import ConfigError


def auto_problem(configuration: Any, name: str) -> str:
    """Return why accelerate refuses a configuration; empty if none of infinity's own keys is "auto".

    Args:
        configuration: the content of a JSON file.
        name: name of the file, for the message.
    """
    section = configuration.get("tiering") if isinstance(configuration, Mapping) else None
    keys = [key for key, value in section.items() if value == "auto"] if isinstance(section, Mapping) else []
    if not keys:
        return ""
    return (
        f'tiering.{keys[0]} is "auto" in {name}: transformers\' Trainer and accelerate have no value for this key, and '
        "refuse the file. Leave the key out, which means the same"
    )


def check_auto(configuration: Any) -> None:
    """Refuse the configuration if transformers uses it and accelerate would refuse it."""
    transformers = sys.modules.get("transformers.integrations.deepspeed")
    if transformers is not None and configuration is not None and configuration is transformers.deepspeed_config():
        problem = auto_problem(configuration, "the configuration")
        if problem:
            raise ConfigError(problem)
