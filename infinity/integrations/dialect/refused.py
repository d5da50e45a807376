"""What DeepSpeed has and infinity has not, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from infinity.errors import ConfigError

REFUSED = {
    "init_inference": "use the model under torch.no_grad(), or engine(...) of an engine without an optimizer",
    "InferenceEngine": "use the model under torch.no_grad(), or engine(...) of an engine without an optimizer",
    "tp_model_init": "divide the model with torch.distributed.tensor.parallel",
    "set_autotp_mode": "divide the model with torch.distributed.tensor.parallel",
    "PipelineModule": "use torch.distributed.pipelining, see engine.driven_step()",
    "PipelineEngine": "use torch.distributed.pipelining, see engine.driven_step()",
    "OnDevice": "build the model under torch.device('meta') or zero.Init",
    "DeepSpeedHybridEngine": "generate with the model itself",
    "DeepSpeedTransformerLayer": "use the model's own layers",
    "replace_transformer_layer": "use the model's own layers",
}


def refused(name: str) -> Callable[..., NoReturn]:
    """A function in the place of something that is not there; it says so when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"deepspeed.{name} is not supported by infinity: {REFUSED[name]}")

    refuse.__name__ = name
    return refuse
