"""Models of transformers from their directories, without the whole model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from infinity.checkpoint import PretrainedWeights
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.optim.optimizer import TieredOptimizer
from infinity.setup import ConfigSource, initialize
from infinity.zero.meta import construct_on_meta


def from_pretrained(
    path: str | Path, config: ConfigSource, *, model_class: Any | None = None, **more: Any
) -> tuple[Engine, TieredOptimizer, Any | None, Any | None]:
    """Train a model of transformers from its saved weights.

    The model is built without memory; its safetensors are read one unit at a time, straight into the tiers.

    Args:
        path: a directory that `save_pretrained` or `Engine.save_16bit_model` wrote.
        config: as for `initialize`.
        model_class: a class of transformers; by default the architecture that the directory names.
        more: further arguments of `initialize`.

    Returns:
        What `initialize` returns.

    Raises:
        ConfigError: it is no such directory, or its weights do not fit the architecture.
        CheckpointError: a file of weights is missing or damaged.
    """
    model, weights = pretrained_model(path, model_class=model_class)
    return initialize(model=model, config=config, weights=weights, **more)


def pretrained_model(path: str | Path, *, model_class: Any | None = None) -> tuple[nn.Module, PretrainedWeights]:
    """A model on the meta device, and where its weights are: the arguments `model` and `weights` of `initialize`.

    For those who change the model in between, for example to freeze a part of it. Arguments and errors are those of
    `from_pretrained`.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is no directory of a transformers model: it has no config.json")
    try:
        architecture = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of what is written there
        raise ConfigError(f"{path} has a config.json that transformers does not take: {error}") from error
    if getattr(architecture, "quantization_config", None) is not None:
        raise ConfigError(f"{path} has quantised weights, which cannot be trained; take the original model")
    architecture.dtype = None  # masters keep what is stored; the engine chooses what it computes in
    try:
        with construct_on_meta():
            model = _build(architecture, model_class or _class_of(path, architecture))
    except ValueError as error:
        raise ConfigError(f"{path} has a model that transformers does not build: {error}") from error
    weights = PretrainedWeights(path, model)
    weights.load_buffers(model)
    return model, weights


def _class_of(path: Path, architecture: PretrainedConfig) -> Any:
    names = architecture.architectures or []
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    raise ConfigError(f"{path} names the architecture {names or None}, which transformers has not: give model_class")


def _build(architecture: PretrainedConfig, model_class: Any) -> nn.Module:
    model: nn.Module
    if hasattr(model_class, "from_config"):  # one of the Auto classes, which otherwise ask on standard input
        model = model_class.from_config(architecture, trust_remote_code=False)
    else:
        model = getattr(model_class, "_from_config", model_class)(architecture)
    return model
