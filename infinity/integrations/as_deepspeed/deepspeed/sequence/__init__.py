raise ImportError("deepspeed.sequence is not supported by infinity: there is no sequence parallelism")
