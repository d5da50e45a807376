from infinity.integrations.dialect.optimizers import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
