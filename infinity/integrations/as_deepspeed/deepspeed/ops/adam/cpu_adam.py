from infinity.optim.named import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
