"""A checkpoint written again for another number of ranks: the files that these would have written, and every bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.checkpoint import convert, latest_tag
from infinity.checkpoint.format import Manifest, read_manifest
from infinity.checkpoint.inspection import verify
from infinity.checkpoint.load import _slices
from infinity.checkpoint.stored import StoredReader, StoredTensor
from infinity.checkpoint.tensors import read_header
from infinity.zero.partition import ParamInfo, ParamPart
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, train_on
from tests.checkpoint.common import make_engine
from tests.checkpoint.test_convert import build


def save(path: str, state_format: str, load: str | None = None) -> None:
    """Train and save, or load and save again."""
    recipe = Recipe("bf16", clipping=0.5, extra={"tiering": {"tile_size": "64KiB", "state_format": state_format}})
    with make_engine(Placement(), recipe, build=build) as engine:
        if load is None:
            train_on(engine, batches(3))
        else:
            engine.load_checkpoint(load)
        engine.save_checkpoint(path)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / str(latest_tag(directory))
    tensors = read_manifest(path).tensors
    with StoredReader(path, tensors) as reader:
        return {key: reader.read(key, 0, tensor.numel) for key, tensor in tensors.items()}


def layout(directory: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes in every file."""
    path = directory / str(latest_tag(directory))
    names = read_manifest(path).files
    return {name: {key: entry.shape for key, entry in read_header(path / name).items()} for name in sorted(names)}


@pytest.mark.parametrize("state_format", ["int8"])
def test_it_is_as_those_ranks_would_have_written_it(state_format, tmp_path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    save(str(one), state_format)
    run_ranks(2, save, str(two), state_format, str(one), path=tmp_path)
    convert(one, tmp_path / "resharded", ranks=2)
    assert layout(tmp_path / "resharded") == layout(two)
    assert layout(tmp_path / "resharded") != layout(one)
    convert(two, tmp_path / "whole")
    assert layout(tmp_path / "whole") == layout(one)
    values = stored(one)
    for name in ("two", "resharded", "whole"):
        found = stored(tmp_path / name)
        assert found.keys() == values.keys()
        assert all(torch.equal(found[key], value) for key, value in values.items()), name


@pytest.mark.parametrize("ranks", [7])
def test_any_number_of_ranks_loads_the_same(ranks, tmp_path) -> None:
    save(str(tmp_path / "one"), "split")
    path = convert(tmp_path / "one", tmp_path / "many", ranks=ranks)
    assert verify(path)[1].ranks == ranks
    save(str(tmp_path / "again"), "split", str(tmp_path / "many"))
    values, found = stored(tmp_path / "one"), stored(tmp_path / "again")
    assert all(torch.equal(found[key], value) for key, value in values.items())
    convert(tmp_path / "many", tmp_path / "again", ranks=1)
    assert (tmp_path / "one" / path.name / "extra.pt").read_bytes() == (path / "extra.pt").read_bytes()


def test_what_is_checked_of_a_part_begins_where_its_scales_do() -> None:
    """As it is read: another format's shard may begin between elements that share a scale."""
    tensors = {"master.w": StoredTensor("F32", (1000,), ())}
    manifest = Manifest("int8", ("exp_avg", "exp_avg_sq"), tensors, {}, {}, 0)
    part = ParamPart(ParamInfo("w", (1000,), 1000, 0, trainable=True, group=0), 0, 500, 300)
    found = {key: (first, count) for key, first, count in _slices(part, manifest, moments=True)}
    assert found.pop("master.w") == (300, 500)
    moments, scales = (256, 544), (1, 3)
    assert [found[f"{name}.w"] for name in ("exp_avg", "exp_avg_sq")] == [moments] * 2
    assert [found[f"{name}_scales.w"] for name in ("exp_avg", "exp_avg_sq")] == [scales] * 2


def test_no_ranks_are_refused(tmp_path) -> None:
    with pytest.raises(infinity.ConfigError, match="of 0 ranks"):
        convert(tmp_path, tmp_path, ranks=0)
