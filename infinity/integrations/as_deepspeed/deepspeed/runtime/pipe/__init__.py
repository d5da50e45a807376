raise ImportError(
    "deepspeed.runtime.pipe is not supported by infinity: use torch.distributed.pipelining, see engine.driven_step()"
)
