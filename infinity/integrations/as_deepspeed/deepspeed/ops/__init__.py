from infinity.integrations.deepspeed.builders import compatible_ops as _compatible_ops

from . import adagrad, adam, aio, lion, op_builder

__all__ = ["__compatible_ops__", "adagrad", "adam", "aio", "lion", "op_builder"]

__compatible_ops__ = _compatible_ops()
