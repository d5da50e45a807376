"""Aligned memory: an arena with leases, stable buffers, and ledgers of budgets."""

from infinity.memory.arena import ALIGN_BYTES, Arena, FreeList, Lease, aligned
from infinity.memory.available import (
    DeviceLevel,
    available_memory_bytes,
    device_level,
    free_bytes,
    memory_limit_bytes,
)
from infinity.memory.budget import Budget, Ledger, Level
from infinity.memory.critical_section import CriticalSection
from infinity.memory.mapping import FRESH_BYTES
from infinity.memory.scratch import Loan, Scratch, scratch_on
from infinity.memory.stable import SparePages, StableBuffer, StableMemory, stable_memory

__all__ = [
    "FRESH_BYTES",
    "ALIGN_BYTES",
    "Arena",
    "Budget",
    "DeviceLevel",
    "FreeList",
    "CriticalSection",
    "Lease",
    "Ledger",
    "Level",
    "Loan",
    "Scratch",
    "SparePages",
    "aligned",
    "StableBuffer",
    "StableMemory",
    "available_memory_bytes",
    "device_level",
    "free_bytes",
    "memory_limit_bytes",
    "scratch_on",
    "stable_memory",
]
