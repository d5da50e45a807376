"""DeepSpeed's op builders by name: what its scripts ask is whether an op is there. Nothing is built at run time."""

from __future__ import annotations

from infinity.integrations.dialect.refused import refused_class

AsyncIOBuilder = refused_class("AsyncIOBuilder", NAME="async_io")
CPUAdagradBuilder = refused_class("CPUAdagradBuilder", NAME="cpu_adagrad")
CPUAdamBuilder = refused_class("CPUAdamBuilder", NAME="cpu_adam")
CPULionBuilder = refused_class("CPULionBuilder", NAME="cpu_lion")
FusedAdamBuilder = refused_class("FusedAdamBuilder", NAME="fused_adam")
FusedLambBuilder = refused_class("FusedLambBuilder", NAME="fused_lamb")
FusedLionBuilder = refused_class("FusedLionBuilder", NAME="fused_lion")
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


def compatible_ops() -> dict[str, bool]:
    """Whether what an op of DeepSpeed does is there, by the op's name."""
    return dict.fromkeys(_THERE, True) | dict.fromkeys(_NOT_THERE, False)
