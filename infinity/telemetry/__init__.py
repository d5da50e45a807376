"""What a step cost: bytes moved, seconds stalled, peaks reached."""

from infinity.telemetry.counters import Counters, StepStats
from infinity.telemetry.stalls import StallCause, Waits

__all__ = ["Counters", "StallCause", "StepStats", "Waits"]
