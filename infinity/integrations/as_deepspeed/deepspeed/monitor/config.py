from infinity.config import MonitorConfig as DeepSpeedMonitorConfig
from infinity.integrations.deepspeed.monitor import get_monitor_config

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]
