"""Measurements of a running engine: bytes moved, stalls and memory peaks of each step, and a timeline of operations."""

from infinity.telemetry.counters import Counters, StallCause, StepStats, Waits
from infinity.telemetry.monitor import Monitor
from infinity.telemetry.timeline import Lane, Timed, Timeline, Times, now

__all__ = ["Counters", "Lane", "Monitor", "StallCause", "StepStats", "Timed", "Timeline", "Times", "Waits", "now"]
