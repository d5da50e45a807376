raise ImportError("deepspeed.linear is not supported by infinity: use PEFT for adapters")
