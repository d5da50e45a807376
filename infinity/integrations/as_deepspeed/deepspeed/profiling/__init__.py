raise ImportError("deepspeed.profiling is not supported by infinity: use torch.profiler, or tiering.timeline")
