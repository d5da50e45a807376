"""Weights that are used where they lie: LoRA on them and inference from them, with no copy on any drive."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache

import infinity
from infinity.checkpoint import PretrainedWeights
from infinity.integrations import pretrained_model
from infinity.integrations.inference import CACHE_ARGUMENT
from infinity.tiers import Memory, SameMemory, StoredTensor, WeightFile, lay_out_image
from infinity.zero import GatheredParameters
from infinity.zero.initial_values import InitialValues
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    Placement,
    Recipe,
    batches,
    loss_of,
    named_budget,
    tiny_llama,
    train_on,
    train_plainly,
)

peft = pytest.importorskip("peft")

BF16 = Recipe("bf16", steps=6)
BLOCK = 4096


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, in several files, none of which ends at a block's end."""
    path = tmp_path_factory.mktemp("base") / "llama"
    tiny_llama().bfloat16().save_pretrained(path, max_shard_size="100KB")
    files = list(path.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size % BLOCK for file in files)
    return path


def content(path: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}


def config(path: Path, host_memory: str | int | None = None, **tiering: Any) -> dict[str, Any]:
    path.mkdir(exist_ok=True)
    found = BF16.config(Placement("nvme", "nvme", path, host_memory=host_memory))
    found["tiering"] |= tiering
    return found


def adapters(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def lora(base: Path, swap: Path, *, in_place: bool, link: Any = None, **tiering: Any) -> infinity.Engine:
    model, weights = pretrained_model(base, in_place=in_place)
    torch.manual_seed(3)
    return infinity.initialize(adapters(model), config=config(swap, **tiering), weights=weights, link=link)[0]


def trained(engine: infinity.Engine) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_on(engine, batches(BF16.steps)), dict(engine.named_parameters())


def least_memory(base: Path, swap: Path, key: str, *, in_place: bool, link: Any = None) -> int:
    with pytest.raises(infinity.CapacityError, match=r"to \S+( bytes .*)? or more") as refused:
        lora(base, swap, in_place=in_place, link=link, **{key: 4096})
    return named_budget(refused.value)


# The layout #


@given(st.data())
@settings(max_examples=60)
def test_an_image_has_every_tensor_at_its_place(data: st.DataObject) -> None:
    files = [WeightFile(Path(f"/weights/{index}"), 1, index, 1 << 20, 0, 0) for index in range(2)]
    content = {file: torch.randint(0, 256, (file.size,), dtype=torch.uint8) for file in files}
    tensors = []
    for file in files:
        start = data.draw(st.integers(8, 9000))
        for _ in range(data.draw(st.integers(0, 5))):
            nbytes = data.draw(st.integers(1, 20000))
            tensors.append(StoredTensor(file, start, nbytes, torch.uint8))
            start += nbytes + data.draw(st.sampled_from([0, 0, 2, 5000, 30000]))
    tensors = data.draw(st.permutations(tensors))
    starts, runs = lay_out_image(tensors)
    assert all(run.start % BLOCK == run.nbytes % BLOCK == 0 for run in runs)
    image = torch.cat([content[run.file][run.start : run.start + run.nbytes] for run in runs] or [torch.empty(0)])
    for tensor, start in zip(tensors, starts, strict=True):
        expected = content[tensor.file][tensor.start : tensor.start + tensor.nbytes]
        assert torch.equal(image[start : start + tensor.nbytes], expected)
    blocks = {(t.file, b) for t in tensors for b in range(t.start // BLOCK, (t.start + t.nbytes - 1) // BLOCK + 1)}
    assert len(image) == len(blocks) * BLOCK  # no block is read twice, and none that nobody needs


# LoRA #


@pytest.mark.parametrize("placement", ["roomy", "tight", "device", "tight device"])
def test_lora_in_place_is_lora_on_a_copy_and_writes_nothing_of_the_base(placement, base, tmp_path) -> None:
    link = SameMemory() if "device" in placement else None
    before = content(base)
    with lora(base, tmp_path / "copied", in_place=False) as engine:
        expected, weights = trained(engine)
        copied_bytes = engine._runtime.swap.size_bytes
    budgets: dict[str, Any] = {}
    if "tight" in placement:
        keys = ["device_memory", "host_memory"] if link else ["host_memory"]
        budgets = {key: least_memory(base, tmp_path / "least", key, in_place=True, link=link) for key in keys}
    with lora(base, tmp_path / "in place", in_place=True, link=link, **budgets) as engine:
        losses, found = trained(engine)
        swap_bytes = engine._runtime.swap.size_bytes
        read = engine.stats().tier_bytes.get("nvme_read", 0)
    assert losses == expected
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert content(base) == before
    of_base = sum(value.nbytes for name, value in weights.items() if "lora" not in name)
    assert copied_bytes > of_base
    assert swap_bytes < of_base / 3  # the adapters' states, in whole blocks
    assert (read > of_base) is ("tight" in placement)  # else memory has what was read once


def test_lora_in_place_follows_plain_torch(base, tmp_path) -> None:
    model = tiny_llama()
    model.load_state_dict({k: v for file in base.glob("*.safetensors") for k, v in load_file(file).items()})
    plain = adapters(model)
    with lora(base, tmp_path / "swap", in_place=True) as engine:
        plain.load_state_dict(dict(engine.named_parameters()))
        losses, _ = trained(engine)
    assert losses == pytest.approx(train_plainly(plain, BF16).losses, rel=2e-2)


def _some(base: Path, swap: Path, *, in_place: bool, **tiering: Any) -> infinity.Engine:
    model, weights = pretrained_model(base, in_place=in_place)
    for name, param in model.named_parameters():
        param.requires_grad_("q_proj" in name)
    return infinity.initialize(model, config=config(swap, **tiering), weights=weights)[0]


def _on_two(base: Path, path: Path) -> list[tuple[list[float], list[Memory]]]:
    with pytest.raises(infinity.CapacityError) as refused:
        _some(base, path, in_place=True, host_memory=4096)
    found = []
    for in_place, memory in ((False, None), (True, None), (True, named_budget(refused.value))):
        with _some(base, path, in_place=in_place, host_memory=memory) as engine:
            losses = train_on(engine, batches(6)[torch.distributed.get_rank() :: 2])
            found.append((losses, [unit.home for unit in engine._runtime.params.units]))
    return found


def test_ranks_read_their_shards_of_the_base_where_it_lies(base, tmp_path) -> None:
    for copied, roomy, tight in run_ranks(2, _on_two, base, tmp_path, path=tmp_path):
        assert copied[0] == roomy[0] == tight[0]
        assert Memory.FILE not in roomy[1]  # host memory has what is read once
        assert tight[1].count(Memory.FILE) == 5


def test_ranks_with_different_files_are_refused(base) -> None:
    class OfOthers:
        def of_all(self, value: Any) -> list[Any]:
            return [value, value[1:]]

    model, weights = pretrained_model(base, in_place=True)
    values = InitialValues(model, None, weights)
    with pytest.raises(infinity.InfinityError, match="the ranks read different weights"):
        values.in_files((), OfOthers())


# What cannot be read in place #


def test_weights_of_another_dtype_are_refused_by_name(tmp_path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    with pytest.raises(infinity.ConfigError, match=r"weight` cannot be read in place: .*float32, .* in_place=False"):
        lora(tmp_path / "base", tmp_path / "swap", in_place=True)


def test_weights_at_an_odd_place_are_refused_by_name(tmp_path) -> None:
    header = b'{"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"weight":{"dtype":"BF16","shape":[64,64],'
    header += b'"data_offsets":[1,8193]}}'
    header += b" " * (-len(header) % 8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8193))
    model = nn.Linear(64, 64, bias=False, device="meta")
    weights = PretrainedWeights(tmp_path, model, in_place=True)
    with pytest.raises(infinity.ConfigError, match=r"`weight` .* has 8192 bytes of it from byte \d+.*in_place=False"):
        infinity.initialize(model, config=config(tmp_path / "swap"), weights=weights, trains=False)


def test_parameters_that_stay_in_memory_are_not_read_in_place(base, tmp_path) -> None:
    model, weights = pretrained_model(base, in_place=True)
    with pytest.raises(infinity.ConfigError, match="or pass in_place=False"):
        infinity.initialize(adapters(model), config=BF16.config(Placement()), weights=weights)


def test_a_file_that_is_written_to_stops_the_training_by_name(base, tmp_path) -> None:
    copied = shutil.copytree(base, tmp_path / "base")
    budget = least_memory(copied, tmp_path / "swap", "host_memory", in_place=True)
    with lora(copied, tmp_path / "swap", in_place=True, host_memory=budget) as engine:
        train_on(engine, batches(2))
        for file in copied.glob("*.safetensors"):
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        with pytest.raises(infinity.StorageError, match=r"these weights have changed since .*in_place=False") as error:
            train_on(engine, batches(2))
        assert Path(error.value.filename).parent == copied
        with pytest.raises(infinity.InfinityError, match="the engine has stopped after an error"):
            train_on(engine, batches(1))


def test_a_file_that_is_written_to_and_whose_time_is_put_back_is_refused(base, tmp_path) -> None:
    copied = shutil.copytree(base, tmp_path / "base")
    model, weights = pretrained_model(copied, in_place=True)
    for file in copied.glob("*.safetensors"):
        before = file.stat()
        with file.open("r+b") as opened:
            opened.seek(-2, os.SEEK_END)
            opened.write(b"xx")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(infinity.StorageError, match="these weights have changed since"):
        infinity.initialize(adapters(model), config=config(tmp_path / "swap"), weights=weights)


def test_a_file_that_is_written_to_before_initialize_is_refused(base, tmp_path) -> None:
    copied = shutil.copytree(base, tmp_path / "base")
    model, weights = pretrained_model(copied, in_place=True)
    for file in copied.glob("*.safetensors"):
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    with pytest.raises(infinity.StorageError, match="these weights have changed since"):
        infinity.initialize(adapters(model), config=config(tmp_path / "swap"), weights=weights)
    assert not list((tmp_path / "swap").iterdir())


def test_a_file_that_is_replaced_or_removed_is_read_as_it_was(base, tmp_path) -> None:
    copied = shutil.copytree(base, tmp_path / "base")
    budget = least_memory(copied, tmp_path / "swap", "host_memory", in_place=True)
    with lora(base, tmp_path / "swap", in_place=True) as engine:
        expected, _ = trained(engine)
    with lora(copied, tmp_path / "swap", in_place=True, host_memory=budget) as engine:
        for file in copied.glob("*.safetensors"):
            (copied / "new").write_bytes(b"another model")
            (copied / "new").replace(file)
        assert trained(engine)[0] == expected


def test_frozen_values_in_place_cannot_be_changed(base, tmp_path) -> None:
    with lora(base, tmp_path / "swap", in_place=True) as engine:
        weight = engine.module.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight")
        with (
            pytest.raises(infinity.InfinityError, match=r"unit `.*layers\.0 .*` is read in place from .*llama"),
            GatheredParameters(weight, modifier_rank=0),
        ):
            weight.zero_()
        with GatheredParameters(weight, modifier_rank=0):  # as it is
            assert bool(weight.any())
        engine.module.load_state_dict(engine.module.state_dict())
        train_on(engine, batches(1))


# Checkpoints #


@pytest.mark.parametrize("frozen", [True, False])
def test_checkpoints_go_on_with_a_base_in_place(frozen, base, tmp_path) -> None:
    with lora(base, tmp_path / "swap", in_place=True) as engine:
        train_on(engine, batches(3))
        path = engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=not frozen)
        expected = train_on(engine, batches(3, seed=5))
    size = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert (size > sum(file.stat().st_size for file in base.glob("*.safetensors"))) is frozen
    with lora(base, tmp_path / "swap", in_place=True) as engine:
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=frozen)
        assert train_on(engine, batches(3, seed=5)) == expected


def test_a_checkpoint_on_another_base_is_refused(base, tmp_path) -> None:
    tiny_llama(seed=8).bfloat16().save_pretrained(tmp_path / "other")
    with lora(tmp_path / "other", tmp_path / "swap", in_place=True) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    with (
        lora(base, tmp_path / "swap", in_place=True) as engine,
        pytest.raises(infinity.CheckpointError, match=r"`.*weight` has other values than in .*llama, where it is used"),
    ):
        engine.load_checkpoint(tmp_path / "saved")


# Inference #


def without_optimizer(path: Path, **tiering: Any) -> dict[str, Any]:
    return {key: value for key, value in config(path, **tiering).items() if key != "optimizer"}


ASKED = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("in_place", [True, False])
def test_inference_gives_the_tokens_of_plain_torch_without_training_state(in_place, base, tmp_path) -> None:
    prompts = batches(1)[0][:, :6]
    plain = tiny_llama().bfloat16().eval()
    expected = plain.generate(prompts, **ASKED)
    with pytest.raises(infinity.CapacityError) as refused:
        infinity.from_pretrained(base, without_optimizer(tmp_path, host_memory=4096), inference=True, in_place=in_place)
    least = named_budget(refused.value)
    settings = without_optimizer(tmp_path / "swap", host_memory=least)
    engine, optimizer, *_ = infinity.from_pretrained(base, settings, inference=True, in_place=in_place)
    with engine:
        assert optimizer is None
        assert not engine.module.training
        assert torch.equal(engine.generate(prompts, **ASKED), expected)
        assert torch.equal(engine.module.generate(prompts, **ASKED), expected)
        assert loss_of(engine, prompts).item() == pytest.approx(loss_of(plain, prompts).item(), rel=1e-2)
        assert (engine._runtime.swap.size_bytes == 0) is in_place
        assert engine._runtime.host.peak_bytes <= least


def test_inference_prefetches(base, tmp_path) -> None:
    """From the second token on a plan says what comes, where training has it from the second step on."""
    prompts = batches(1)[0][:, :6]
    with infinity.from_pretrained(base, without_optimizer(tmp_path, host_memory="200KiB"), inference=True)[0] as engine:
        engine.generate(prompts, **ASKED)
        cycle = engine._runtime.executor.cycle
        assert cycle.plan is not None
        assert any(action == "prefetch" for step in cycle.plan.steps for action, _ in step.actions)
        engine.generate(prompts, **ASKED)
        assert cycle.follows_plan


def test_keys_and_values_have_a_budget(base, tmp_path) -> None:
    prompts = batches(1)[0][:, :6]
    expected = tiny_llama().bfloat16().eval().generate(prompts, **ASKED)
    token_bytes = 2 * 2 * 16 * 2 * len(prompts)  # keys and values of 2 heads of 16 elements of 2 bytes, in one layer
    layers, tokens = 3, 6 + 8
    enough = token_bytes * tokens * (layers + 1)
    settings = without_optimizer(tmp_path, host_memory="4MiB")
    with infinity.from_pretrained(base, settings, inference=True, kv_cache=enough)[0] as engine:
        assert torch.equal(engine.generate(prompts, **ASKED), expected)
        assert engine._runtime.host.capacity_bytes == (4 << 20) - enough
        with pytest.raises(infinity.CapacityError, match=r"keys and values of 2 sequences, 6 tokens and 9 new"):
            engine.generate(prompts, **(ASKED | {"max_new_tokens": 9}))
        assert torch.equal(engine.generate(prompts, **ASKED), expected)
        of_the_caller = {CACHE_ARGUMENT: DynamicCache(config=engine.module.config)}  # has no budget
        assert engine.generate(prompts, **(ASKED | {"max_new_tokens": 9}), **of_the_caller).shape[1] == 6 + 9


def test_a_budget_for_keys_and_values_must_leave_one_for_weights(base, tmp_path) -> None:
    with pytest.raises(infinity.ConfigError, match=r"kv_cache is .*taken from tiering\.host_memory, which is"):
        infinity.from_pretrained(base, without_optimizer(tmp_path, host_memory="1MiB"), inference=True, kv_cache="1MiB")
    with pytest.raises(infinity.ConfigError, match="kv_cache is for inference=True"):
        infinity.from_pretrained(base, config(tmp_path), kv_cache="1MiB")
