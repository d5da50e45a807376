"""Save: one unit at a time, one tile at a time."""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.directory import check_tag, replacing
from infinity.checkpoint.files import write_file
from infinity.checkpoint.format import (
    EXTRA,
    FROZEN_FIELD,
    MANIFEST,
    MASTER,
    Manifest,
    check_replaceable,
    read_manifest,
    stored_fields,
    stored_shape,
)
from infinity.checkpoint.relay import Relay
from infinity.checkpoint.runs import Run
from infinity.checkpoint.tensors import TensorEntry, TensorFile
from infinity.errors import CheckpointError
from infinity.optim.formats import StateLayout, read_master
from infinity.zero.build import Runtime
from infinity.zero.partition import Unit

_log = logging.getLogger(__name__)


def save_checkpoint(
    directory: Path,
    tag: str,
    runtime: Runtime,
    *,
    run: Run,
    steps: Mapping[str, int],
    counters: Mapping[str, int],
    extra: Mapping[str, Any],
    mark_latest: bool = True,
) -> Path:
    """Write a checkpoint, on rank 0 with the other ranks' help; no update may be pending.

    Args:
        run: which the directory belongs to from now on.
        steps: updates that each parameter has had.
        extra: schedules, random states and the client's state: tensors and plain values only.
        mark_latest: make it the one that is loaded by default.

    Returns:
        The checkpoint's directory.

    Raises:
        StorageError: writing failed; an earlier checkpoint of the same tag is still there. The ranks that do not write
            get a CheckpointError.
        CheckpointError: `extra` has something that could not be loaded safely, another run saves in this directory, or
            what has the tag's name is no checkpoint.
    """
    relay = Relay(runtime)
    if runtime.ranks.rank != 0:
        relay.send_all()
        return directory / tag
    with relay, _place(directory, tag, run, mark_latest=mark_latest) as target:
        content = _serialise(extra)
        tensors: dict[str, TensorEntry] = {}
        with Staging() as staging:
            for unit in runtime.partition.units:
                path = target / f"unit-{unit.index:05d}.safetensors"
                tensors.update(_save_unit(path, unit, runtime, relay, staging))
        write_file(target / EXTRA, content)
        layout = runtime.layout
        moments = (layout.first, layout.second)
        crc = zlib.crc32(content)
        Manifest(layout.format, moments, tensors, steps, counters, crc, run.id, run.model).write(target)
    return directory / tag


@contextmanager
def _place(directory: Path, tag: str, run: Run, *, mark_latest: bool) -> Iterator[Path]:
    """`replacing`, in a directory that is this run's alone, and of nothing but a checkpoint."""
    check_tag(tag)
    run.claim(directory)
    check_replaceable(directory / tag)
    if (directory / tag / MANIFEST).exists():
        _tell_of_another_run(directory / tag, run)
    with replacing(directory, tag, mark_latest=mark_latest) as target:
        yield target


def _tell_of_another_run(path: Path, run: Run) -> None:
    try:
        saved_by = read_manifest(path).run
    except CheckpointError:
        return  # a damaged one is no loss
    if saved_by is not None and saved_by != run.id:
        _log.warning("%s is the checkpoint of another run (%s), and is replaced by this run's", path, saved_by)


def _serialise(extra: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(extra), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(
            "client_state and the schedule's state may hold tensors, numbers, strings, lists and dicts only, so that a "
            f"checkpoint can be loaded without running code: {error}"
        ) from error
    return buffer.getvalue()


def _save_unit(path: Path, unit: Unit, runtime: Runtime, relay: Relay, staging: Staging) -> dict[str, TensorEntry]:
    file = TensorFile(path, _tensors_of(unit, runtime.layout), staging)
    layout = runtime.layout
    try:
        for slice_ in relay.slices(unit):
            start = slice_.start
            for part in runtime.partition.parts(unit, start, slice_.stop, rank=slice_.rank):
                low, high = part.start - start, part.stop - start
                if not part.slot.trainable:
                    file.write(f"{FROZEN_FIELD}.{part.slot.name}", slice_.param[low:high])
                    continue
                states = layout.narrow(slice_.fields, low, high)
                file.write(f"{MASTER.name}.{part.slot.name}", read_master(layout, slice_.param[low:high], states))
                for field in layout.moment_fields:
                    file.write(f"{field.name}.{part.slot.name}", states[field.name])
    except BaseException:
        file.abandon()
        raise
    return file.finish()


def _tensors_of(unit: Unit, layout: StateLayout) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a unit, by key."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for slot in unit.slots:
        if slot.trainable:
            for field in stored_fields(layout):
                tensors[f"{field.name}.{slot.name}"] = (field.dtype, stored_shape(field, slot.shape))
        else:
            tensors[f"{FROZEN_FIELD}.{slot.name}"] = (layout.param_dtype, slot.shape)
    return tensors
