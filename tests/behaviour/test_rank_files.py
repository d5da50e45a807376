"""Every rank writes and reads its own part of a checkpoint, in one directory that they share or in several."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.checkpoint import convert
from infinity.checkpoint.blocks import OutputFile
from infinity.checkpoint.inspection import verify
from infinity.checkpoint.tensors import RangeReader
from infinity.zero import shared_directory
from infinity.zero.ranks import Ranks
from tests.api.small_models import CONFIG, weights
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import assert_same_weights, tiny_llama

WIDE = 512  # so that headers are little beside it


def wide(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)))


def engine_of(stage: int = 3, seed: int = 0) -> infinity.Engine:
    config = CONFIG | {"zero_optimization": {"stage": stage}, "communication": {"timeout": 30}}
    return infinity.initialize(model=wide(seed), config=config)[0]


def train(engine: infinity.Engine, steps: int = 1) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        engine.backward(engine(torch.randn(4, WIDE, generator=generator)).square().mean())
        engine.step()


# How much each rank does #


def count_bytes(directory: str, stage: int) -> tuple[int, int]:
    """Bytes that this rank writes, and reads in each of the two passes of a load."""
    written = read = 0
    write, reads = OutputFile.write, RangeReader.read

    def count_write(self: Any, data: memoryview, offset: int) -> None:
        nonlocal written
        written += len(data)
        write(self, data, offset)

    def count_read(self: Any, name: str, start: int, nbytes: int, key: str) -> bytearray:
        nonlocal read
        read += nbytes
        return reads(self, name, start, nbytes, key)

    with engine_of(stage) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputFile, "write", count_write)
        patch.setattr(RangeReader, "read", count_read)
        engine.save_checkpoint(directory, tag="tag")
        engine.load_checkpoint(directory)
        return written, read // 2


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_writes_its_share_and_reads_what_it_needs(stage, tmp_path) -> None:
    (tmp_path / "ranks").mkdir()
    counts = run_ranks(4, count_bytes, str(tmp_path / "saved"), stage, path=tmp_path / "ranks")
    total = verify(tmp_path / "saved")[1].nbytes
    for written, read in counts:
        assert written <= total / 4 * 1.01, counts
        assert read <= (total if stage == 0 else total / 4) * 1.01, counts


# One directory for each machine #


def save_own(directories: list[str]) -> dict[str, torch.Tensor]:
    with engine_of() as engine:
        train(engine)
        engine.save_checkpoint(directories[dist.get_rank()], tag="tag")
        return weights(engine)


def load_own(directories: list[str]) -> tuple[str | None, dict[str, torch.Tensor]]:
    with engine_of(seed=5) as engine:
        message = None
        try:
            engine.load_checkpoint(directories[dist.get_rank()])
        except infinity.CheckpointError as error:
            message = str(error)
        return message, weights(engine)


def test_machines_that_share_no_directory_save_and_load_their_own_files(tmp_path) -> None:
    """Ranks 0 and 1 share one, rank 2 has its own; then two machines change places, and one rank loads alone."""
    for part in "abc":
        (tmp_path / part).mkdir()
    first, second = tmp_path / "first", tmp_path / "second"
    saved = run_ranks(3, save_own, [str(first), str(first), str(second)], path=tmp_path / "a")
    for directory, ranks in ((first, {0, 1}), (second, {2})):
        names = {path.name for path in (directory / "tag").glob("unit-*")}
        assert {int(name[-17:-12]) for name in names} == ranks, names
        assert sorted(path.name for path in directory.iterdir()) == ["latest", "tag"]
    assert (first / "tag" / "manifest.json").read_bytes() == (second / "tag" / "manifest.json").read_bytes()
    for message, loaded in run_ranks(3, load_own, [str(first), str(first), str(second)], path=tmp_path / "b"):
        assert message is None
        assert_same_weights(loaded, saved[0])
    for message, _ in run_ranks(3, load_own, [str(second), str(first), str(first)], path=tmp_path / "c"):
        assert message is not None
        assert "-rank-00000.safetensors cannot be read: No such file or directory. Rank 0 of the run that" in message
    with engine_of(seed=5) as engine:
        with pytest.raises(infinity.CheckpointError, match=r"Rank 2 of the run that saved .*: copy it here"):
            engine.load_checkpoint(first)
        shutil.copytree(second / "tag", first / "tag", dirs_exist_ok=True)
        engine.load_checkpoint(first)
        assert_same_weights(weights(engine), saved[0])
        convert(first, tmp_path / "whole")
        assert len(list((tmp_path / "whole" / "tag").glob("unit-*"))) == 4
        engine.load_checkpoint(tmp_path / "whole")
        assert_same_weights(weights(engine), saved[0])


def leaders(directories: list[str]) -> list[int]:
    ranks = Ranks.of_group()
    return shared_directory.directory_leaders(ranks, Path(directories[ranks.rank]))


def test_the_lowest_rank_of_every_directory_leads_there(tmp_path) -> None:
    for name in "abr":
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    directories = [str(tmp_path / name) for name in ("a", "b", "link", "b")]
    assert run_ranks(4, leaders, directories, path=tmp_path / "r") == [[0, 1, 0, 1]] * 4
    assert not [path for name in "ab" for path in (tmp_path / name).iterdir()]


# A rank that fails or ends #


def save_and_die(directory: str, victim: int, moment: str) -> None:
    """Rank `victim` is killed while the second checkpoint of a tag is saved; the other leaves what it is told."""
    with engine_of() as engine, pytest.MonkeyPatch.context() as patch:
        engine.save_checkpoint(directory, tag="tag")
        train(engine)
        if dist.get_rank() == victim:
            patch.setattr(moment, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(infinity.InfinityError) as told:
            engine.save_checkpoint(directory, tag="tag")
        Path(f"{directory}-told").write_text(str(told.value))
        os.kill(os.getpid(), signal.SIGKILL)  # what it did now would wait for the one that has died


@pytest.mark.parametrize(
    ("victim", "moment"),
    [(1, "infinity.checkpoint.session.write_shards"), (0, "infinity.checkpoint.save.write_file")],
)
def test_a_rank_that_is_killed_in_a_save_is_named_and_the_old_checkpoint_stays(victim, moment, tmp_path) -> None:
    (tmp_path / "ranks").mkdir()
    directory = tmp_path / "saved"
    run_ranks(2, save_and_die, str(directory), victim, moment, path=tmp_path / "ranks", killed=(0, 1))
    told = Path(f"{directory}-told").read_text()
    assert f"rank {victim} (process " in told, told
    assert "has ended" in told
    with engine_of(seed=5) as engine:
        engine.load_checkpoint(directory)
        assert engine.global_steps == 0
        assert_same_weights(weights(engine), dict(wide(0).state_dict()))
        engine.save_checkpoint(directory, tag="next")
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "next", "tag"]


def fail_to_write(directory: str) -> list[str]:
    """The shards of rank 1 cannot be written."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", f"{directory}/file")

    with engine_of() as engine, pytest.MonkeyPatch.context() as patch:
        engine.save_checkpoint(directory, tag="tag")
        if dist.get_rank() == 1:
            patch.setattr("infinity.checkpoint.session.write_shards", refuse)
        with pytest.raises(infinity.InfinityError) as told:
            engine.save_checkpoint(directory, tag="new")
        train(engine)  # it still works
        return [type(told.value).__name__, str(told.value)]


def test_a_rank_that_cannot_write_is_named_on_all_and_nothing_is_left(tmp_path) -> None:
    (tmp_path / "ranks").mkdir()
    first, second = run_ranks(2, fail_to_write, str(tmp_path / "saved"), path=tmp_path / "ranks")
    assert first[0] == "CheckpointError"
    assert first[1].startswith("rank 1: [Errno 28] No space left on device")
    assert second[0] == "StorageError"
    assert "free some space or save elsewhere" in second[1]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["latest", "tag"]
    assert json.loads((tmp_path / "saved" / "tag" / "manifest.json").read_text())["ranks"] == 2


# The weights that a training begins with #


def _load_on_rank(base: str, other: str) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Elements that this rank is sent, bytes that it reads, and what it has then."""
    sent, read = [], []
    broadcast, read_range = Ranks.broadcast, RangeReader.read

    def counted(self: Ranks, tensor: torch.Tensor, source: int = 0) -> None:
        sent.append(tensor.numel())
        broadcast(self, tensor, source)

    def counted_read(self: RangeReader, name: str, start: int, nbytes: int, key: str) -> bytearray:
        read.append(nbytes)
        return read_range(self, name, start, nbytes, key)

    Ranks.broadcast, RangeReader.read = counted, counted_read  # type: ignore[method-assign]
    mine = base if not dist.is_initialized() or dist.get_rank() == 0 else other
    config = CONFIG | {"zero_optimization": {"stage": 3}, "communication": {"timeout": 30}}
    with infinity.integrations.from_pretrained(mine, config)[0] as engine:
        engine_read = sum(read)
        return sum(sent), engine_read, weights(engine)


def test_ranks_read_their_own_parts_of_the_weights(tmp_path) -> None:
    base, other = str(tmp_path / "a"), str(tmp_path / "b")
    tiny_llama(0).save_pretrained(base)
    tiny_llama(1).save_pretrained(other)
    meetings = [tmp_path / str(index) for index in range(3)]
    for meeting in meetings:
        meeting.mkdir()
    _, whole, expected = run_ranks(1, _load_on_rank, base, "", path=meetings[0])[0]
    for sent, read, found in run_ranks(2, _load_on_rank, base, base, path=meetings[1]):
        assert sent < 100  # a buffer
        assert read < 0.6 * whole + 200_000  # and a sample of each tensor, by which they are compared
        assert_same_weights(found, expected)
    for sent, _, found in run_ranks(2, _load_on_rank, base, other, path=meetings[2]):
        assert sent > 100_000
        assert_same_weights(found, expected)
