"""Checkpoints: written and read tile by tile, replaced atomically, stored by parameter name."""

from infinity.checkpoint.directory import latest_tag
from infinity.checkpoint.load import load_checkpoint
from infinity.checkpoint.save import save_checkpoint

__all__ = ["latest_tag", "load_checkpoint", "save_checkpoint"]
