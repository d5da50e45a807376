"""Aligned memory: one arena, leases on it, stable ranges, and the ledger of a budget."""

from infinity.memory.arena import Arena, FreeList, Lease
from infinity.memory.available import available_memory_bytes, free_bytes, memory_limit_bytes
from infinity.memory.budget import Budget, Ledger, Level
from infinity.memory.scratch import Loan, Scratch, scratch_on
from infinity.memory.stable import StableBuffer, StableMemory, stable_memory

__all__ = [
    "Arena",
    "Budget",
    "FreeList",
    "Lease",
    "Ledger",
    "Level",
    "Loan",
    "Scratch",
    "StableBuffer",
    "StableMemory",
    "available_memory_bytes",
    "free_bytes",
    "memory_limit_bytes",
    "scratch_on",
    "stable_memory",
]
