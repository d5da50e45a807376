from infinity.optim.named import FusedAdam

__all__ = ["FusedAdam"]
