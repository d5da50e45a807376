from infinity.integrations.deepspeed.optimizers import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
