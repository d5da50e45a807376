__all__ = ["MIN_SWAPPABLE_BYTES"]

MIN_SWAPPABLE_BYTES = 1 << 20  # below this DeepSpeed leaves a tensor in memory; here a tensor of any size is moved
