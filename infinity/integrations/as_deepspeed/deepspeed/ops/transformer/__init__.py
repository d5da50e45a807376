raise ImportError("deepspeed.ops.transformer is not supported by infinity: use the model's own layers")
