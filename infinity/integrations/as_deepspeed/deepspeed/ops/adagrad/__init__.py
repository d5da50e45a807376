from infinity.optim.named import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
