"""Load models of transformers from their directories, without the whole model in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from infinity.checkpoint import PretrainedWeights
from infinity.config import Config, load_config, named_size
from infinity.config.read import read_text
from infinity.config.values import shown
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.script_engine import Engine
from infinity.integrations.inference import InferenceEngine, reserve_cache
from infinity.optim.optimizer import TieredOptimizer
from infinity.setup import ConfigSource, initialize
from infinity.tiers import compute_device
from infinity.zero.meta import construct_on_meta
from infinity.zero.ranks import world_size

# Keys of config.json that count modules, and their largest value: DeepNet has 1,000 layers, and the widest mixtures
# have some hundred experts. To build a module takes 0.1 ms or more, even on the meta device.
_COUNT = re.compile(r"(?:.*_)?(?:layers?|blocks?|experts|depth)")
_MOST_MODULES = 10_000
_SIZE = re.compile(r"(?:.*_)?(?:size|dim|model|embd|inner|heads|head|positions?)")
_GENERATION = "generation_config.json"
_MOST_ROWS = 1 << 24  # the largest vocabularies have a million tokens, the longest contexts ten


def from_pretrained(
    path: str | Path,
    config: ConfigSource,
    *,
    model_class: Any | None = None,
    inference: bool = False,
    in_place: bool | None = None,
    kv_cache: int | str | None = None,
    **more: Any,
) -> tuple[Engine, TieredOptimizer | None, Any | None, Any | None]:
    """Load a model of transformers from its safetensors, for training or inference.

    The model is built on the meta device. Its weights are read one unit at a time, directly into the tiers.

    Args:
        path: a directory that `save_pretrained` or `Engine.save_16bit_model` wrote.
        config: as for `initialize`.
        model_class: a class of transformers; by default the architecture that the directory names.
        inference: create no optimizer states and no gradients. The model is frozen, and in evaluation mode.
        in_place: read frozen parameters from these files in every pass, without a copy on a drive. The files must have
            the dtype that the model computes in, and must not change. True by default for inference.
        kv_cache: for inference: the limit of memory for keys and values in `engine.generate`, in bytes or such as
            "1GiB". It is a part of `tiering.host_memory`, or with a device of `tiering.device_memory`.
        more: further arguments of `initialize`.

    Returns:
        What `initialize` returns.

    Raises:
        ConfigError: the directory has no such model, or its weights do not fit the architecture or cannot be used in
            place.
        CheckpointError: a file of weights is missing or damaged.
    """
    if kv_cache is not None and not inference:
        raise ConfigError("kv_cache is for inference=True: in training, keys and values are activations")
    in_place = inference if in_place is None else in_place
    model, weights = pretrained_model(path, model_class=model_class, in_place=in_place)
    kind: dict[str, Any] = {"engine_class": Engine}
    if inference:
        kind = {"trains": False, "engine_class": InferenceEngine}
        model.requires_grad_(False).eval()
    cache_bytes = None
    if kv_cache is not None:
        cache_bytes = named_size("kv_cache", kv_cache)
        ranks = world_size(more.get("process_group"))
        resolved = config if isinstance(config, Config) else load_config(config, world_size=ranks)
        config = reserve_cache(resolved, cache_bytes, on_host=_computes_on_host(more))
    made = initialize(model=model, config=config, weights=weights, **(kind | more))
    if isinstance(made[0], InferenceEngine):
        made[0].cache_bytes = cache_bytes
    return cast(tuple[Engine, TieredOptimizer | None, Any | None, Any | None], made)


def _computes_on_host(more: Mapping[str, Any]) -> bool:
    """Whether `initialize` would compute on the host with these arguments."""
    link = more.get("link")
    if link is not None:
        return not link.discrete
    return compute_device(more.get("device")).type == "cpu"


def pretrained_model(
    path: str | Path, *, model_class: Any | None = None, in_place: bool = False
) -> tuple[nn.Module, PretrainedWeights]:
    """Return a model on the meta device and its stored weights: the arguments `model` and `weights` of `initialize`.

    Between the two calls you can change the model, for example freeze a part of it or add adapters. Arguments and
    errors are those of `from_pretrained`.
    """
    path = Path(path)
    model = pretrained_shape(path, model_class=model_class)
    weights = PretrainedWeights(path, model, in_place=in_place)
    weights.load_buffers(model)
    return model, weights


def pretrained_shape(path: str | Path, *, model_class: Any | None = None) -> nn.Module:
    """Return the model of a directory on the meta device, without reading its weights.

    Arguments and errors are those of `from_pretrained`.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is no directory of a transformers model: it has no config.json")
    _check_counts(path / "config.json")
    try:
        architecture = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises various exceptions for invalid content
        raise ConfigError(f"{path} has a config.json that transformers does not take: {error}") from error
    if getattr(architecture, "quantization_config", None) is not None:
        raise ConfigError(f"{path} has quantised weights, which cannot be trained; take the original model")
    architecture.dtype = None  # masters keep the stored dtype; the engine chooses the compute dtype
    try:
        with construct_on_meta():
            model = _build(architecture, model_class or _class_of(path, architecture))
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # such as of sizes that no tensor can have
        raise ConfigError(f"{path} has a model that transformers does not build: {error}") from error
    _load_generation_config(path, model)
    return model


def _load_generation_config(path: Path, model: nn.Module) -> None:
    """Load the directory's generation settings into the model, so that exports contain them."""
    if not hasattr(model, "generation_config") or not (path / _GENERATION).is_file():
        return
    try:
        found: Any = GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises various exceptions for invalid content
        raise ConfigError(f"{path} has a {_GENERATION} that transformers does not take: {error}") from error
    model.generation_config = found


def _check_counts(path: Path) -> None:
    """Refuse counts of modules and sizes that are too large: to build such a model would take hours, or fail."""
    try:
        values = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return  # transformers reports the problem
    sections = [("", values)]
    for prefix, section in sections:
        for key, value in section.items() if isinstance(section, dict) else ():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                sections.append((f"{name}.", value))
            elif isinstance(value, int | float):
                most = _MOST_MODULES if _COUNT.fullmatch(key) else _MOST_ROWS if _SIZE.fullmatch(key) else None
                if most is not None and not value <= most:
                    raise ConfigError(
                        f"{path}: {name} is {shown(value)}; at most {most:,} can be built, more than any model has: "
                        "correct it"
                    )


def _class_of(path: Path, architecture: PretrainedConfig) -> Any:
    names = architecture.architectures or []
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    raise ConfigError(
        f"{path} names the architecture {names or None}, which transformers does not have: give model_class"
    )


def _build(architecture: PretrainedConfig, model_class: Any) -> nn.Module:
    model: nn.Module
    if hasattr(model_class, "from_config"):  # an Auto class, which by default asks on standard input about remote code
        model = model_class.from_config(architecture, trust_remote_code=False)
    else:
        model = getattr(model_class, "_from_config", model_class)(architecture)
    return model
