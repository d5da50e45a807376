"""DeepSpeed's op builders, for scripts that check whether an op is available. Nothing is built at run time."""

from __future__ import annotations

from typing import NoReturn

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.refused import REFUSED, refused_class


class _Op:
    """The result of `load()`. Every attribute of DeepSpeed's op is refused."""

    def __init__(self, builder: str) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # accessed by Python itself
            raise AttributeError(name)
        raise ConfigError(f"deepspeed.{self._builder}().load().{name} is not supported: {REFUSED[self._builder]}")


class OpBuilder:
    """The builder of an op that infinity has a replacement of.

    Scripts call `load()` to build the op before training. Here, there is nothing to build.

    Attributes:
        NAME: name of the op.
    """

    NAME = ""

    def absolute_name(self) -> str:
        """Return `NAME`."""
        return self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: the op is available."""
        return True

    def load(self, verbose: bool = True) -> _Op:
        """Return an object whose attributes raise errors that say what to use instead."""
        return _Op(type(self).__name__)


def _builder(name: str, op: str) -> type[OpBuilder]:
    return type(name, (OpBuilder,), {"NAME": op, "__doc__": f"The builder of `{op}`, which needs no build."})


AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
FusedLambBuilder = refused_class("FusedLambBuilder", NAME="fused_lamb")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion")
InferenceBuilder = refused_class("InferenceBuilder", NAME="transformer_inference")
QuantizerBuilder = refused_class("QuantizerBuilder", NAME="quantizer")
TransformerBuilder = refused_class("TransformerBuilder", NAME="transformer")
UtilsBuilder = refused_class("UtilsBuilder", NAME="utils")

_AVAILABLE = ("async_io", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion")
_UNAVAILABLE = (
    "fused_lamb",
    "transformer",
    "transformer_inference",
    "stochastic_transformer",
    "sparse_attn",
    "evoformer_attn",
    "inference_core_ops",
    "cutlass_ops",
    "ragged_ops",
    "quantizer",
    "fp_quantizer",
    "random_ltd",
    "spatial_inference",
    "gds",
    "deepspeed_ccl_comm",
    "deepspeed_shm_comm",
    "deepspeed_not_implemented",
    "utils",
)


# Whether an op of DeepSpeed has a replacement here, by the op's name.
__compatible_ops__ = dict.fromkeys(_AVAILABLE, True) | dict.fromkeys(_UNAVAILABLE, False)
