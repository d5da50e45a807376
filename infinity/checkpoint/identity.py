"""Record and compare the identity of a model, beyond the names and shapes of its parameters.

Two models with the same shapes may compute different results: with eight attention heads instead of four, or another
activation. So a checkpoint stores the configuration of a transformers model, and the classes and plain attributes of
all other modules. Values that may change between two runs of one model (dropout, caches, versions, paths) are left out.
Settings that only one side has are not compared, because libraries add settings with new versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from infinity.checkpoint.files import brief

_VOLATILE = frozenset(
    {
        "architectures",
        "auto_map",
        "chunk_size_feed_forward",
        "epoch",
        "forward",
        "global_step",
        "id2label",
        "inplace",
        "label2id",
        "loss_type",
        "momentum",
        "p",
        "problem_type",
        "return_dict",
        "step",
        "training",
        "transformers_version",
    }
)
_VOLATILE_PARTS = (
    "_token_id",
    "attn_implementation",
    "cache",
    "checkpoint",
    "drop",
    "dtype",
    "init",
    "output_",
    "path",
)
_PASSIVE = frozenset({"Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"})
_MAX_ITEMS = 64
_NONE = object()  # stands for a value that is not compared


def model_identity(model: nn.Module) -> dict[str, Any]:
    """Return the values that `first_difference` compares, as plain JSON values."""
    config = _configuration(model)
    libraries = ("transformers.", "torch.") if config else ()  # the configuration describes the modules of these
    modules = {
        name: {"class": type(module).__name__, **_attributes(vars(module))}
        for name, module in model.named_modules()
        if name == "" or not type(module).__module__.startswith(libraries)
    }
    if config:
        modules[""] = {"class": modules[""]["class"]}
    return json.loads(json.dumps({"config": config, "modules": modules}))  # type: ignore[no-any-return]


def unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity `before` without the attributes that training has changed (a counter, a list of losses)."""
    return {
        key: unchanged(value, now[key]) if isinstance(value, dict) and isinstance(now.get(key), dict) else value
        for key, value in before.items()
        if isinstance(value, dict) or (key in now and value == now[key])  # a list that has grown long is not in `now`
    }


def first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Describe the first difference between two models; None if they are alike."""
    found = _difference("config", _mapping(saved.get("config")), _mapping(here.get("config")))
    if found is not None:
        return found
    there, ours = _mapping(saved.get("modules")), _mapping(here.get("modules"))
    for name in dict.fromkeys((*ours, *there)):
        if name in ours and name in there:
            found = _difference(name or "the model", _mapping(there[name]), _mapping(ours[name]))
            if found is not None:
                return found
            continue
        kind = _mapping((ours if name in ours else there)[name]).get("class")
        if kind not in _PASSIVE:
            side = "is only in this model" if name in ours else "is only in the checkpoint's model"
            return f"module `{name}` ({brief(kind)}) {side}"
    return None


def _difference(where: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for key in here:
        if key not in saved or saved[key] == here[key]:
            continue
        if isinstance(saved[key], dict) and isinstance(here[key], dict):
            found = _difference(f"{where}.{key}", saved[key], here[key])
            if found is not None:
                return found
            continue
        return f"`{key}` of {where} is {brief(saved[key])} in the checkpoint and {brief(here[key])} here"
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _configuration(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return {}
    try:
        content = config.to_dict()
    except Exception:  # a `config` of some other kind, with a method of this name
        return {}
    return _attributes(content) if isinstance(content, dict) else {}


def _attributes(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the attributes that are plain values and not volatile."""
    found = {}
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith("_") or key in _VOLATILE:
            continue
        if any(part in key for part in _VOLATILE_PARTS):
            continue
        plain = _plain(value)
        if plain is not _NONE:
            found[key] = plain
    return found


def _plain(value: Any) -> Any:
    """Return a value as a plain JSON value; `_NONE` if it is too large or of another kind."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, FunctionType | BuiltinFunctionType):  # such as an activation
        return value.__name__
    if isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        return _attributes(value)
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        items = [_plain(item) for item in value]
        return _NONE if any(item is _NONE for item in items) else items
    return _NONE
