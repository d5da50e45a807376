from infinity.integrations.deepspeed.builders import (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    InferenceBuilder,
    QuantizerBuilder,
    TransformerBuilder,
    UtilsBuilder,
)

__all__ = [
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "InferenceBuilder",
    "QuantizerBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
]
