from infinity.errors import ConfigError as DeepSpeedConfigError
from infinity.integrations.deepspeed.config import DeepSpeedConfig, get_gradient_clipping

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "SGD_OPTIMIZER",
    "get_gradient_clipping",
]

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LION_OPTIMIZER, SGD_OPTIMIZER = "lion", "sgd"
LAMB_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER = "lamb", "onebitadam"  # which are refused
