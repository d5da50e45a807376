from infinity.integrations.dialect.optimizers import BF16_Optimizer

__all__ = ["BF16_Optimizer"]
