from infinity.integrations.deepspeed.optimizers import FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
