from infinity.integrations.deepspeed.optimizers import ZeROOptimizer
from infinity.optim.optimizer import TieredOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
