"""Measures the rates of a machine in about a minute: drives, host link, processor, memory, ranks."""

from infinity.profiling.measure import ProfileJob, planned_write_bytes, run_profile
from infinity.profiling.record import PROFILE_VERSION, read_profile

__all__ = ["PROFILE_VERSION", "ProfileJob", "planned_write_bytes", "read_profile", "run_profile"]
