"""Checkpoints: written and read tile by tile, replaced atomically, stored by parameter name."""

from infinity.checkpoint.conversion import convert
from infinity.checkpoint.directory import latest_tag
from infinity.checkpoint.extra import Parts
from infinity.checkpoint.pretrained import PretrainedWeights
from infinity.checkpoint.runs import Run
from infinity.checkpoint.save import Options
from infinity.checkpoint.session import Session

__all__ = ["Options", "Parts", "PretrainedWeights", "Run", "Session", "convert", "latest_tag"]
