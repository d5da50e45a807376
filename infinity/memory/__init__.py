"""Aligned memory: one arena, leases on it, stable ranges, and the ledger of a budget."""

from infinity.memory.arena import Arena, FreeList, Lease
from infinity.memory.available import available_memory_bytes, free_bytes, memory_limit_bytes
from infinity.memory.budget import Budget, Ledger
from infinity.memory.stable import StableBuffer, StableMemory, stable_memory

__all__ = [
    "Arena",
    "Budget",
    "FreeList",
    "Lease",
    "Ledger",
    "StableBuffer",
    "StableMemory",
    "available_memory_bytes",
    "free_bytes",
    "memory_limit_bytes",
    "stable_memory",
]
