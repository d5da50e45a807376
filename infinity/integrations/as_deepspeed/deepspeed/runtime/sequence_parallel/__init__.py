raise ImportError("deepspeed.runtime.sequence_parallel is not supported by infinity: there is no sequence parallelism")
