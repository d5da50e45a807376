raise ImportError(
    "deepspeed.runtime.data_pipeline is not supported by infinity: give training_data an order of its own"
)
