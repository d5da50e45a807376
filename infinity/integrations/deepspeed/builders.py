"""DeepSpeed's op builders by name: what its scripts ask is whether an op is there. Nothing is built at run time."""

from __future__ import annotations

from typing import NoReturn

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.refused import REFUSED, refused_class


class _Op:
    """What `load()` gives: nothing had to be built, and what DeepSpeed's op has in it is not there."""

    def __init__(self, builder: str) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself asks
            raise AttributeError(name)
        raise ConfigError(f"deepspeed.{self._builder}().load().{name} is not supported: {REFUSED[self._builder]}")


class OpBuilder:
    """Of an op whose work is done by what came with the package.

    Scripts load it to have the op built before they train: here that is done already.

    Attributes:
        NAME: the op.
    """

    NAME = ""

    def absolute_name(self) -> str:
        """As `NAME`."""
        return self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """It is there."""
        return True

    def load(self, verbose: bool = True) -> _Op:
        """An object whose attributes are refused, by what to use instead."""
        return _Op(type(self).__name__)


def _there(name: str, op: str) -> type[OpBuilder]:
    return type(name, (OpBuilder,), {"NAME": op, "__doc__": f"Of `{op}`: nothing is to be built."})


AsyncIOBuilder = _there("AsyncIOBuilder", "async_io")
CPUAdagradBuilder = _there("CPUAdagradBuilder", "cpu_adagrad")
CPUAdamBuilder = _there("CPUAdamBuilder", "cpu_adam")
CPULionBuilder = _there("CPULionBuilder", "cpu_lion")
FusedAdamBuilder = _there("FusedAdamBuilder", "fused_adam")
FusedLambBuilder = refused_class("FusedLambBuilder", NAME="fused_lamb")
FusedLionBuilder = _there("FusedLionBuilder", "fused_lion")
InferenceBuilder = refused_class("InferenceBuilder", NAME="transformer_inference")
QuantizerBuilder = refused_class("QuantizerBuilder", NAME="quantizer")
TransformerBuilder = refused_class("TransformerBuilder", NAME="transformer")
UtilsBuilder = refused_class("UtilsBuilder", NAME="utils")

_THERE = ("async_io", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion")
_NOT_THERE = (
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


# Whether what an op of DeepSpeed does is there, by the op's name.
__compatible_ops__ = dict.fromkeys(_THERE, True) | dict.fromkeys(_NOT_THERE, False)
