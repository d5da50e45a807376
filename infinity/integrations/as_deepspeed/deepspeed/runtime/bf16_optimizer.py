from infinity.integrations.deepspeed.optimizers import BF16_Optimizer

__all__ = ["BF16_Optimizer"]
