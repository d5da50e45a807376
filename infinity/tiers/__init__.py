"""The tiered memory manager: where each field lives, and what moves it."""

from infinity.tiers.activation_file import ActivationFiles
from infinity.tiers.activations import ActivationStore
from infinity.tiers.discrete import DiscreteParams
from infinity.tiers.grad_spill import SpillingGradStore, choose_spilled
from infinity.tiers.grads import GradLease, GradStore
from infinity.tiers.link import CudaLink, Link, SameMemory, to_host
from infinity.tiers.params import Arrival, FlatSpec, ParamStore, Residency, UnifiedParams
from infinity.tiers.sharding import WHOLE, Piece, Sharding, overlap
from infinity.tiers.states import StateStore, Tile, cut_into_tiles, resident_tiles
from infinity.tiers.swap import Extent, SwapPath, SwapSpace, open_swap

__all__ = [
    "WHOLE",
    "ActivationFiles",
    "ActivationStore",
    "Arrival",
    "CudaLink",
    "DiscreteParams",
    "Extent",
    "FlatSpec",
    "GradLease",
    "GradStore",
    "Link",
    "ParamStore",
    "Piece",
    "Residency",
    "SameMemory",
    "Sharding",
    "SpillingGradStore",
    "StateStore",
    "SwapPath",
    "SwapSpace",
    "Tile",
    "UnifiedParams",
    "choose_spilled",
    "cut_into_tiles",
    "open_swap",
    "overlap",
    "resident_tiles",
    "to_host",
]
