from infinity.integrations.dialect.monitor import MonitorMaster

__all__ = ["MonitorMaster"]
