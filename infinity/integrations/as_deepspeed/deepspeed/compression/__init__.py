raise ImportError("deepspeed.compression is not supported by infinity: quantise the model with torchao")
