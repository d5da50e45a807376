raise ImportError(
    "deepspeed.compile is not supported by infinity: call torch.compile on the model or its blocks before initialize"
)
