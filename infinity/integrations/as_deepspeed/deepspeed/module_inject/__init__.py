raise ImportError(
    "deepspeed.module_inject is not supported by infinity: divide the model with torch.distributed.tensor.parallel"
)
