"""The tiered memory manager: where each field lives, and what moves it."""

from infinity.tiers.grads import GradLease, GradStore
from infinity.tiers.params import FlatSpec, ParamStore, Residency, UnifiedParams
from infinity.tiers.states import StateStore, Tile
from infinity.tiers.swap import Extent, SwapPath, SwapSpace

__all__ = [
    "Extent",
    "FlatSpec",
    "GradLease",
    "GradStore",
    "ParamStore",
    "Residency",
    "StateStore",
    "SwapPath",
    "SwapSpace",
    "Tile",
    "UnifiedParams",
]
