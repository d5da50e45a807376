from infinity.integrations.deepspeed.engine import get_state_devices

__all__ = ["get_state_devices"]
