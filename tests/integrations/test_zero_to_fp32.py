"""The float32 weights of a checkpoint come back exactly, by DeepSpeed's names."""

from __future__ import annotations

import runpy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.integrations.deepspeed import values, zero_to_fp32
from infinity.integrations.deepspeed.engine import initialize
from tests.behaviour.reference import batches, loss_of, tiny_gpt2, tiny_llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints")
    model = tiny_gpt2()
    model.transformer.wpe.requires_grad_(False)
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        engine.step()
        engine.save_checkpoint(path)
        return path, {name: values.full_fp32_values(param) for name, param in model.named_parameters()}


def test_masters_are_read_exactly(saved, tmp_path) -> None:
    path, masters = saved
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(path)
    assert all(torch.equal(state[name], value) for name, value in masters.items())
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    tiny_gpt2(seed=1).load_state_dict(state, strict=True)
    assert "transformer.wpe.weight" not in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        path, exclude_frozen_parameters=True
    )
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(tiny_gpt2(seed=1), path)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(torch.equal(param, masters[name]) for name, param in model.named_parameters())
    live = tiny_gpt2(seed=1)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
    with infinity.initialize(model=live, config=config)[0]:  # its parameters stay the engine's
        assert zero_to_fp32.load_state_dict_from_zero_checkpoint(live, path) is live
        assert all(
            torch.equal(values.full_fp32_values(param), masters[name]) for name, param in live.named_parameters()
        )
    for safe, read in ((True, load_file), (False, torch.load)):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path, safe_serialization=safe)
        file = tmp_path / ("model.safetensors" if safe else "pytorch_model.bin")
        assert all(torch.equal(read(file)[name], value) for name, value in masters.items())
        assert ("lm_head.weight" in read(file)) is not safe  # which transformers ties again


class Sharing(nn.Module):
    """Two layers share a module that has parameters and buffers, and one buffer has two names."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(4)
        self.first = nn.Sequential(nn.Linear(4, 4), shared)
        self.second = nn.Sequential(nn.Linear(4, 4), shared)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("factor", self.scale)
        self.register_buffer("cache", self.scale, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


@pytest.mark.usefixtures("ends_process_group")
@pytest.mark.parametrize("stage", [2, 3])
def test_shared_modules_have_all_of_their_names(stage, tmp_path) -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize(model=Sharing(), config=config)
    engine.backward(engine(torch.randn(4, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path)
    newest = engine.module.state_dict()
    assert newest.keys() == Sharing().state_dict().keys()
    for state in (
        engine._zero3_consolidated_16bit_state_dict(),
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path),
        zero_to_fp32.load_state_dict_from_zero_checkpoint(Sharing(), tmp_path).state_dict(),
    ):
        torch.testing.assert_close(state, newest, rtol=0, atol=0)
    Sharing().load_state_dict(torch.load(tmp_path / "pytorch_model.bin"), strict=True)
    engine.module.first[1].requires_grad_(False)
    others = {name for name in newest if not name.endswith(("1.weight", "1.bias"))}
    for state in (engine._zero3_consolidated_16bit_state_dict(True), engine.module_state_dict(None, "", False, True)):
        assert state.keys() == others
    engine.destroy()


@pytest.mark.usefixtures("ends_process_group")
def test_everything_that_has_numbers_is_float32(tmp_path) -> None:
    """Buffers that the training holds in 16 bits, too; integers stay what they are."""
    model = Sharing()
    model.first[0].requires_grad_(False)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}
    engine, *_ = initialize(model=model, config=config)
    engine.save_checkpoint(tmp_path)
    assert model.scale.dtype is torch.bfloat16
    engine.destroy()
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state.keys() == Sharing().state_dict().keys()
    assert {n: v.dtype for n, v in state.items()} == {n: v.dtype for n, v in Sharing().state_dict().items()}
    assert torch.equal(state["factor"], torch.full((4,), 2.0))


def test_the_script_beside_checkpoints_needs_a_public_module_alone(saved, tmp_path, monkeypatch) -> None:
    """Checkpoints outlive versions, so the script may import nothing that moves: this name is DeepSpeed's own."""
    path, masters = saved
    assert zero_to_fp32.SCRIPT == "from infinity.utils.zero_to_fp32 import main\n\nmain()\n"
    script = tmp_path / zero_to_fp32.SCRIPT_NAME
    script.write_text(zero_to_fp32.SCRIPT)
    monkeypatch.setattr("sys.argv", [str(script), str(path), str(tmp_path), "--safe_serialization"])
    runpy.run_path(str(script), run_name="__main__")
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, masters[name]) for name, value in weights.items())


def test_what_is_no_checkpoint_of_the_model_is_refused(saved, tmp_path) -> None:
    path, _ = saved
    with pytest.raises(
        infinity.CheckpointError,
        match=r"is of another model: the checkpoint has no parameter `model\.embed_tokens\.weight`",
    ):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(tiny_llama(), path)
    with pytest.raises(infinity.CheckpointError, match="has no checkpoint"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(infinity.ConfigError, match="max_shard_size is 1KB"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path, max_shard_size="1KB")
    with pytest.raises(infinity.ConfigError, match="max_shard_size: 'big' is not a size"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path, max_shard_size="big")
    with pytest.raises(infinity.ConfigError, match="lazy_mode is not supported"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(path, lazy_mode=True)
