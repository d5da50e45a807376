from infinity.integrations.deepspeed.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"]
