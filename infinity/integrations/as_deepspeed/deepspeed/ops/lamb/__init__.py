raise ImportError("deepspeed.ops.lamb is not supported by infinity: choose Adam, AdamW, Adagrad, Lion or SGD")
