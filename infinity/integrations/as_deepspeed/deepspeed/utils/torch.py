from infinity.integrations.deepspeed.logs import required_torch_version

__all__ = ["required_torch_version"]
