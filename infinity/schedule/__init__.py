"""Pure decisions: which bytes are where, and when. No tensor, no disk, no clock."""

from infinity.schedule.budget import MemoryNeeds, MemorySplit, advice_on_unit, raise_memory, split_memory
from infinity.schedule.cycle import Cycle
from infinity.schedule.plan import AheadLimit, Plan, make_plan

__all__ = [
    "AheadLimit",
    "Cycle",
    "MemoryNeeds",
    "MemorySplit",
    "Plan",
    "advice_on_unit",
    "make_plan",
    "raise_memory",
    "split_memory",
]
