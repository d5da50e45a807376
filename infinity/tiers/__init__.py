"""The tiered memory manager: which memory holds each field, and the transfers between memories."""

from infinity.tiers.activation_file import ActivationFiles
from infinity.tiers.activations import ActivationStore
from infinity.tiers.copies import Field, Memory, Move, Transfer
from infinity.tiers.device_grads import DeviceGrads, DeviceSums
from infinity.tiers.grads import ARRIVING_UNITS, GradHomes, GradStore, UnitGrads
from infinity.tiers.link import (
    AcceleratorLink,
    HostMemory,
    Link,
    SameMemory,
    accelerator,
    carried_stream,
    compute_device,
    to_host,
)
from infinity.tiers.norms import Norms
from infinity.tiers.params import Params
from infinity.tiers.sharding import WHOLE, Piece, Sharding, overlap
from infinity.tiers.state_layout import DeviceStates, Fields
from infinity.tiers.states import StateStore
from infinity.tiers.swap import SwapSpace, open_swap
from infinity.tiers.unit_params import Device, FlatSpec, FrozenReader
from infinity.tiers.weight_files import FileRun, StoredTensor, WeightFile, WeightFiles, lay_out_image

__all__ = [
    "ARRIVING_UNITS",
    "WHOLE",
    "AcceleratorLink",
    "ActivationFiles",
    "ActivationStore",
    "Device",
    "DeviceGrads",
    "DeviceStates",
    "DeviceSums",
    "Field",
    "Fields",
    "FileRun",
    "FlatSpec",
    "FrozenReader",
    "GradHomes",
    "GradStore",
    "HostMemory",
    "Link",
    "Memory",
    "Move",
    "Norms",
    "Params",
    "Piece",
    "SameMemory",
    "Sharding",
    "StateStore",
    "StoredTensor",
    "SwapSpace",
    "Transfer",
    "UnitGrads",
    "WeightFile",
    "WeightFiles",
    "accelerator",
    "compute_device",
    "carried_stream",
    "lay_out_image",
    "open_swap",
    "overlap",
    "to_host",
]
