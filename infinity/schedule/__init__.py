"""Pure decisions: which bytes are where, and when. No tensor, no disk, no clock."""

from infinity.schedule.budget import MemoryNeeds, MemorySplit, alone, raise_memory, split_memory
from infinity.schedule.cycle import Cycle
from infinity.schedule.next_use import NextUse
from infinity.schedule.plan import Ahead, Plan, PlanStep, make_plan

__all__ = [
    "Ahead",
    "Cycle",
    "MemoryNeeds",
    "MemorySplit",
    "NextUse",
    "Plan",
    "PlanStep",
    "alone",
    "make_plan",
    "raise_memory",
    "split_memory",
]
