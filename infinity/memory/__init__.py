"""Aligned memory: one arena, leases on it, stable ranges, and the ledger of a budget."""

from infinity.memory.arena import Arena, FreeList, Lease
from infinity.memory.available import available_memory_bytes, memory_limit_bytes
from infinity.memory.budget import Budget
from infinity.memory.stable import StableBuffer, StableMemory, stable_memory

__all__ = [
    "Arena",
    "Budget",
    "FreeList",
    "Lease",
    "StableBuffer",
    "StableMemory",
    "available_memory_bytes",
    "memory_limit_bytes",
    "stable_memory",
]
