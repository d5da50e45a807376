from infinity.integrations.deepspeed.named_optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
