raise ImportError("deepspeed.autotuning is not supported by infinity: use `infinity tune`")
