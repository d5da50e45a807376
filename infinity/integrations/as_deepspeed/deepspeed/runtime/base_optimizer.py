from infinity.optim.optimizer import TieredOptimizer as DeepSpeedOptimizer
from infinity.optim.optimizer import TieredOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
