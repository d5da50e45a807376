"""What a step cost: bytes moved, seconds stalled, peaks reached."""

from infinity.telemetry.counters import Counters, StallCause, StepStats

__all__ = ["Counters", "StallCause", "StepStats"]
