from infinity.integrations.dialect.builders import (
    AsyncIOBuilder,
    CPUAdamBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
)

__all__ = ["AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "FusedLambBuilder"]
