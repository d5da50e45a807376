"""Pure decisions: which bytes are where, and when. No tensor, no disk, no clock."""

from infinity.schedule.budget import MemoryNeeds, MemorySplit, alone, split_memory
from infinity.schedule.plan import Plan, PlanStep, make_plan
from infinity.schedule.trace import Trace

__all__ = ["MemoryNeeds", "MemorySplit", "Plan", "PlanStep", "Trace", "alone", "make_plan", "split_memory"]
