raise ImportError("deepspeed.inference is not supported by infinity: use the model under torch.no_grad()")
