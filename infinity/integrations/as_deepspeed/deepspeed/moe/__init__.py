raise ImportError(
    "deepspeed.moe is not supported by infinity: a mixture-of-experts block of the model itself is one unit"
)
