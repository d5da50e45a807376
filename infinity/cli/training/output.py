"""Writes the trained model as a directory that transformers loads: weights, configuration, tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.checkpoint.export import files_of_library
from infinity.cli.training.tokenizers import byte_tokenizer
from infinity.config import format_size
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.integrations import save_adapters, save_pretrained
from infinity.zero.sizing import compute_dtype

ADAPTERS = "adapter"  # the directory of LoRA adapters, within the trained model's
_FOLDER = "trained"


def output_directory(asked: Path | None, model: str, source: Path | None, data: Sequence[Path]) -> Path:
    """Return the directory for the trained model: that of the command line, or a new one below `trained`.

    Args:
        model: its name on the command line.
        source: the directory that its weights are read from.
        data: files and directories that training reads.

    Raises:
        ConfigError: the directory is that of the initial model, or of data.
    """
    if asked is None:
        return _unused(Path(_FOLDER) / Path(model).name.replace(":", "-"))
    real = os.path.realpath(asked)
    if source is not None and real == os.path.realpath(source):
        raise ConfigError(
            f"--output {asked} is the directory of --model, whose weights training begins with: give another directory"
        )
    if real in map(os.path.realpath, data):
        raise ConfigError(
            f"--output {asked} is also given as data, so the trained model's files would lie among the data: give "
            "another directory"
        )
    return asked


def _unused(directory: Path) -> Path:
    """Return this directory if it does not exist, or else the first name with a number that does not exist."""
    number, found = 1, directory
    while found.exists():
        number += 1
        found = directory.with_name(f"{directory.name}-{number}")
    return found


def check_room(directory: Path, engine: Engine, params: int) -> None:
    """Check before the first step that the drive has space for the trained model.

    Args:
        params: number of parameters of the written model.

    Raises:
        ConfigError: the free space is too small.
    """
    needed = params * compute_dtype(engine.config).itemsize
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"the trained model needs {format_size(needed)}, and {place} has {format_size(free)} free: give --output "
            "DIRECTORY on another drive, or --no-save"
        )


def save_trained(engine: Engine, directory: Path, tokenizer: Any | None) -> None:
    """Write the model in the dtype of the training. All ranks must call this together; rank 0 writes.

    LoRA adapters are merged into the weights, and also written separately.

    Args:
        tokenizer: None for bytes: then a tokenizer is written whose tokens are bytes.

    Raises:
        InfinityError: writing failed; raised on all ranks. An earlier model in the directory is kept.
    """

    def write_tokenizer() -> None:
        with files_of_library(directory) as new:
            (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(new)

    save_pretrained(engine, directory)
    if hasattr(engine.module, "peft_config"):
        save_adapters(engine, directory / ADAPTERS)
    engine.begin_gathering("the end of infinity train", stores=False).ranks.on_rank_0(write_tokenizer)
