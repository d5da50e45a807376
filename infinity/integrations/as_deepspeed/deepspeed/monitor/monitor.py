from infinity.integrations.deepspeed.monitor import MonitorMaster

__all__ = ["MonitorMaster"]
