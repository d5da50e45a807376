raise ImportError("deepspeed.monitor is not supported by infinity: log engine.stats() from the training loop")
