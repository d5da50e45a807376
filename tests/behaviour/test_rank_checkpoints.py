"""Checkpoints, gathered parameters and exports of several ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.checkpoint import PretrainedWeights
from tests.api.small_models import weights
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import ARCHITECTURES, Placement, Recipe, assert_same_weights, batches, train_on
from tests.behaviour.test_ranks import Case

STEPS = 3


def case_on(path: Path, stage: int = 3, state_format: str = "auto") -> Case:
    placement = Placement("nvme", "nvme", path, "64KiB") if stage == 3 else Placement()
    return Case(stage, placement, Recipe("bf16", clipping=0.5, extra={}), "llama")


def start(case: Case, state_format: str = "auto") -> infinity.Engine:
    model = ARCHITECTURES[case.architecture](seed=7)
    model.get_input_embeddings().requires_grad_(False)  # a frozen unit
    model.model.layers[1].mlp.requires_grad_(False)  # and one with both kinds
    config = case.config()
    config["tiering"]["state_format"] = state_format
    return infinity.initialize(model=model, config=config)[0]


def data_of(rank: int, size: int) -> list[torch.Tensor]:
    return batches(2 * STEPS * size)[rank::size]


def save_and_go_on(case: Case, directory: str, state_format: str) -> tuple[Any, Any]:
    """Weights when saved, and after as many steps again."""
    with start(case, state_format) as engine:
        data = data_of(dist.get_rank(), dist.get_world_size())
        train_on(engine, data[:STEPS])
        engine.save_checkpoint(directory, client_state={"epoch": 3})
        saved = weights(engine)
        engine.save_16bit_model(f"{directory}/export")
        train_on(engine, data[STEPS:])
        return saved, weights(engine)


def load_and_go_on(case: Case, directory: str, state_format: str) -> tuple[Any, Any]:
    with start(case, state_format) as engine:
        path, client_state = engine.load_checkpoint(directory)
        assert path is not None
        assert client_state == {"epoch": 3}
        assert engine.global_steps == STEPS
        loaded = weights(engine)
        size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        train_on(engine, data_of(rank, size)[STEPS:])
        return loaded, weights(engine)


@pytest.mark.parametrize("state_format", ["int8"])
def test_a_checkpoint_of_two_ranks_goes_on_with_one_two_or_three(state_format, tmp_path) -> None:
    swap, directory = tmp_path / "swap", str(tmp_path / "checkpoint")
    swap.mkdir()
    case = case_on(swap)
    for part in "abc":
        (tmp_path / part).mkdir()
    saved = run_ranks(2, save_and_go_on, case, directory, state_format, path=tmp_path / "a")
    for at_save, _ in saved:
        assert_same_weights(at_save, saved[0][0])
    for size, path in ((2, "b"), (3, "c")):
        other = dataclasses.replace(case, stage=2, placement=Placement()) if size == 3 else case
        for loaded, after in run_ranks(size, load_and_go_on, other, directory, state_format, path=tmp_path / path):
            assert_same_weights(loaded, saved[0][0])
            if size == 2:
                assert_same_weights(after, saved[0][1])
    loaded, _ = load_and_go_on(case, directory, state_format)
    assert_same_weights(loaded, saved[0][0])
    exported = PretrainedWeights(Path(directory) / "export", ARCHITECTURES["llama"]())
    for name, values in saved[0][0].items():
        assert torch.equal(exported.read(name), values), name


def damage_is_told_to_all(case: Case, directory: str) -> str:
    with start(case) as engine:
        with pytest.raises(infinity.CheckpointError) as caught:
            engine.load_checkpoint(directory)
        train_on(engine, data_of(dist.get_rank(), dist.get_world_size())[:1])  # it still works
        with pytest.raises((infinity.CheckpointError, infinity.StorageError)):
            engine.save_checkpoint("/proc/nowhere")
        train_on(engine, data_of(dist.get_rank(), dist.get_world_size())[:1])
        return str(caught.value)


def save(case: Case, directory: str) -> None:
    with start(case) as engine:
        engine.save_checkpoint(directory)


def test_every_rank_hears_of_a_damaged_checkpoint_and_of_a_save_that_fails(tmp_path) -> None:
    directory = tmp_path / "checkpoint"
    for part in "ab":
        (tmp_path / part).mkdir()
    case = case_on(tmp_path, stage=2)
    run_ranks(2, save, case, str(directory), path=tmp_path / "a")
    file = next(directory.rglob("unit-00001-rank-00001.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for message in run_ranks(2, damage_is_told_to_all, case, str(directory), path=tmp_path / "b"):
        assert "is damaged" in message


def change_on_rank_1(case: Case) -> dict[str, torch.Tensor]:
    with start(case) as engine:
        model: Any = engine.module
        head, frozen = model.lm_head.weight, model.get_input_embeddings().weight
        with infinity.zero.GatheredParameters([head, frozen], modifier_rank=1):
            assert head.isfinite().all()
            if dist.get_rank() == 1:
                head.data.fill_(0.5)
                frozen.data[3] = 2.0
        train_on(engine, data_of(dist.get_rank(), dist.get_world_size())[:1])
        return weights(engine)


def test_what_one_rank_changes_is_changed_on_all(tmp_path) -> None:
    (tmp_path / "swap").mkdir()
    first, second = run_ranks(2, change_on_rank_1, case_on(tmp_path / "swap"), path=tmp_path)
    assert_same_weights(second, first)
    assert (first["lm_head.weight"].float() - 0.5).abs().max() < 0.01
    assert (first["model.embed_tokens.weight"][3] == 2.0).all()
