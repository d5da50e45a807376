from infinity.integrations.dialect.optimizers import ZeROOptimizer
from infinity.optim.optimizer import TieredOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
