"""The float32 weights of a checkpoint come back exactly, by DeepSpeed's names."""

from __future__ import annotations

import runpy

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.integrations.deepspeed import values, zero_to_fp32
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
        infinity.CheckpointError, match=r"is of another model: `model\.embed_tokens\.weight` is a parameter"
    ):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(tiny_llama(), path)
    with pytest.raises(infinity.CheckpointError, match="has no checkpoint"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(infinity.ConfigError, match="max_shard_size is 1KB"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path, max_shard_size="1KB")
    with pytest.raises(infinity.ConfigError, match="lazy_mode is not supported"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(path, lazy_mode=True)
