"""Checkpoints: written and read tile by tile, replaced atomically, stored by parameter name."""

from infinity.checkpoint.conversion import convert
from infinity.checkpoint.directory import latest_tag
from infinity.checkpoint.export import export_16bit
from infinity.checkpoint.extra import Parts, apply_extra, check_extra, collect_extra
from infinity.checkpoint.load import Loaded, load_tensors, open_checkpoint
from infinity.checkpoint.pretrained import PretrainedWeights
from infinity.checkpoint.runs import Run
from infinity.checkpoint.save import save_checkpoint

__all__ = [
    "Loaded",
    "Parts",
    "PretrainedWeights",
    "Run",
    "apply_extra",
    "check_extra",
    "collect_extra",
    "convert",
    "export_16bit",
    "latest_tag",
    "load_tensors",
    "open_checkpoint",
    "save_checkpoint",
]
