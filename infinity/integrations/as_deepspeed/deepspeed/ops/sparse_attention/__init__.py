raise ImportError(
    "deepspeed.ops.sparse_attention is not supported by infinity: use the model's attention implementation"
)
