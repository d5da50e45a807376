"""What `save_16bit_model` leaves is one model, whatever was there before and whenever the process dies."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import infinity
from infinity.checkpoint import PretrainedWeights
from infinity.checkpoint.export import write_model
from tests.api.small_models import Heads, engine_of, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12

EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
FORK = multiprocessing.get_context("fork")
SHARDED, SINGLE = 6000, None


def model(seed: int, heads: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=heads, vocab_size=32, n_positions=8)).bfloat16()


def export(directory: Path, source: nn.Module, shard_bytes: int | None) -> None:
    values = dict(source.named_parameters())
    specs = {name: (value.dtype, tuple(value.shape)) for name, value in values.items()}
    write_model(directory, source, values.items(), specs, dtype=torch.bfloat16, shard_bytes=shard_bytes)


def export_and_die(directory: Path, source: nn.Module, shard_bytes: int | None, fatal: int) -> None:
    """Export; the process kills itself at its `fatal`-th operation on files of the directory."""
    count = 0

    def audit(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(directory) in str(args):
            count += 1
            if count == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    export(directory, source, shard_bytes)
    os._exit(0)


def state(source: nn.Module) -> tuple[int, dict[str, torch.Tensor]]:
    return source.config.n_head, dict(source.named_parameters())


def found_by_transformers(directory: Path) -> tuple[int, dict[str, torch.Tensor]] | None:
    try:
        return state(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))
    except OSError:
        return None


def found_by_infinity(directory: Path, heads: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    target = model(9)
    try:
        stored = PretrainedWeights(directory, target)
    except infinity.CheckpointError:
        return None
    return heads, {name: stored.read(name) for name, _ in target.named_parameters()}


def same(first: tuple[int, dict[str, torch.Tensor]], second: tuple[int, dict[str, torch.Tensor]]) -> bool:
    return first[0] == second[0] and all(torch.equal(value, second[1][name]) for name, value in first[1].items())


@pytest.mark.parametrize(
    ("before", "after", "heads"),
    [
        pytest.param(SHARDED, SHARDED, 4, id="shards by shards"),
        pytest.param(SHARDED, SHARDED, 8, id="shards by shards of another model"),
        pytest.param(SHARDED, SINGLE, 4, id="shards by a file"),
        pytest.param(SINGLE, SHARDED, 4, id="a file by shards"),
        pytest.param(SINGLE, SINGLE, 8, id="a file by a file of another model"),
    ],
)
def test_kill_9_while_an_export_is_replaced_leaves_one_model_or_none(before, after, heads, tmp_path) -> None:
    old, new = model(0), model(1, heads)
    export(tmp_path / "before", old, before)
    seen = []
    for fatal in range(1, 200):
        directory = shutil.copytree(tmp_path / "before", tmp_path / f"killed-{fatal}")
        process = FORK.Process(target=export_and_die, args=(directory, new, after, fatal))
        process.start()
        process.join(60)
        for found in (found_by_transformers(directory), found_by_infinity(directory, 0)):
            if found is None:
                seen.append("none")
                continue
            ours = (0, state(old)[1]), (0, state(new)[1])
            whole = [same(found, each) for each in ((state(old), state(new)) if found[0] else ours)]
            assert any(whole), f"operation {fatal} left weights that neither export had"
            seen.append("old" if whole[0] else "new")
        if process.exitcode == 0:
            break
        export(directory, new, SHARDED)  # the next one cleans up
        assert_only(directory, new)
    else:
        pytest.fail("the export has more operations than the test kills")
    assert seen[0] == "old"
    assert seen[-1] == "new"
    if before == after and heads == 4:
        assert "none" not in seen, "an export of the same model has no moment without one"


def assert_only(directory: Path, source: nn.Module) -> None:
    """The directory loads, and has no file that its index does not name."""
    found = found_by_transformers(directory)
    assert found is not None
    assert same(found, state(source))
    index = (directory / "model.safetensors.index.json").read_text()
    for path in directory.iterdir():
        beside = ("config.json", "generation_config.json", "model.safetensors.index.json")
        assert path.name in beside or path.name in index, path.name


def test_shards_of_two_generations_never_have_one_name(tmp_path) -> None:
    names = []
    for seed in range(3):
        export(tmp_path, model(seed), SHARDED)
        names.append({path.name for path in tmp_path.glob("*-of-*.safetensors")})
        assert_only(tmp_path, model(seed))
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    assert "model-00001-of-00002.safetensors" in names[0], "a first export has the usual names"


# One file #


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.safetensors", "model.pt", "weights"])
@pytest.mark.parametrize("frozen", [True, False])
def test_one_file_has_the_name_and_the_parameters_that_are_asked_for(name, frozen, tmp_path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    net[0].bias.requires_grad_(False)
    with engine_of(net, bf16={"enabled": True}) as engine:
        engine.save_16bit_model(tmp_path, name, exclude_frozen_parameters=not frozen)
        expected = weights(engine)
        expected |= {key: value.to(torch.bfloat16) for key, value in net.named_buffers() if value.is_floating_point()}
        expected["1.num_batches_tracked"] = net[1].num_batches_tracked
    path = tmp_path / name
    stored = load_file(path) if name.endswith(".safetensors") else torch.load(path, weights_only=True)
    if not frozen:
        del expected["0.bias"]
    assert stored.keys() == expected.keys()
    for key, value in stored.items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key]), key
    assert [found.name for found in tmp_path.iterdir()] == [name]


def test_the_one_file_may_be_transformers_own(tmp_path) -> None:
    source = model(0).float()
    export(tmp_path, model(1), SHARDED)
    with engine_of(source, bf16={"enabled": True}) as engine:
        assert engine.save_16bit_model(tmp_path, "model.safetensors", max_shard_size="1KB") == tmp_path
        expected = weights(engine)
    found = found_by_transformers(tmp_path)
    assert found is not None
    assert same(found, (4, expected))
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json", "generation_config.json"}


def test_a_file_of_torch_is_replaced_whole(tmp_path) -> None:
    with engine_of() as engine:
        engine.save_16bit_model(tmp_path, save_filename="pytorch_model.bin")
        train(engine, 2)
        engine.save_16bit_model(tmp_path, save_filename="pytorch_model.bin")
        expected = weights(engine)
    state_dict = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    target = Heads().bfloat16()
    target.load_state_dict(state_dict)
    for key, value in target.named_parameters():
        assert torch.equal(value, expected[key].bfloat16()), key


@pytest.mark.parametrize("name", ["", "../up.bin", "a/b.bin", "a\0.bin", "model.safetensors.index.json"])
def test_a_name_of_no_weights_or_that_leads_elsewhere_is_refused(name, tmp_path) -> None:
    with (
        engine_of() as engine,
        pytest.raises(infinity.ConfigError, match="must be the plain name of a file with weights"),
    ):
        engine.save_16bit_model(tmp_path, name)
    assert not list(tmp_path.iterdir())
