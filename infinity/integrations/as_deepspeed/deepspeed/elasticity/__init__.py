raise ImportError("deepspeed.elasticity is not supported by infinity: resume a checkpoint on any number of ranks")
