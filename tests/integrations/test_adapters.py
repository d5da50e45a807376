"""Adapters go to and from PEFT's files, and into exports of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import infinity
from infinity.integrations import load_adapters, pretrained_model, save_adapters, save_pretrained
from infinity.integrations.deepspeed.values import full_fp32_values
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2, tiny_llama, train_on

peft = pytest.importorskip("peft")

FP32, BF16 = Recipe(), Recipe("bf16")
IN_MEMORY = Placement()
MERGED = [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]}]


def wrapped(model: nn.Module, **more: Any) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"]} | more))


def engine_of(
    model: nn.Module, recipe: Recipe = FP32, placement: Placement = IN_MEMORY, **more: Any
) -> infinity.Engine:
    return infinity.initialize(model, config=recipe.config(placement), **more)[0]


def masters(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    get = full_fp32_values
    return {name: get(param) for name, param in engine.module.named_parameters()}


def test_adapters_are_saved_as_peft_saves_them(tmp_path) -> None:
    base = tiny_llama()
    with engine_of(wrapped(base, modules_to_save=["lm_head"]), FP32) as engine:
        train_on(engine, batches(3))
        save_adapters(engine, tmp_path / "ours")
        values = masters(engine)
    plain = wrapped(tiny_llama(), modules_to_save=["lm_head"])
    plain.load_state_dict(values)
    plain.save_pretrained(str(tmp_path / "theirs"))
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    configs = [json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs")]
    assert configs[0] == configs[1]
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "ours"))
    ids = batches(1)[0]
    assert torch.equal(loss_of(loaded, ids), loss_of(plain, ids))


def test_a_failure_leaves_the_adapters_that_were_there(tmp_path, monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    with engine_of(wrapped(tiny_llama())) as engine:
        save_adapters(engine, tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        train_on(engine, batches(1))
        monkeypatch.setattr("peft.peft_model.safe_save_file", full)
        with pytest.raises(infinity.CheckpointError, match="cannot be written: SafetensorError: No space left"):
            save_adapters(engine, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("dtype", ["float32", torch.int8])
def test_what_weights_cannot_be_rounded_to_is_refused(dtype, tmp_path) -> None:
    with engine_of(wrapped(tiny_llama())) as engine:
        for save in (save_adapters, save_pretrained):
            with pytest.raises(infinity.ConfigError, match="give a floating-point dtype of torch"):
                save(engine, tmp_path / "out", dtype=dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("in_place", [True, False])
def test_adapters_come_back_exactly(in_place, tmp_path) -> None:
    tiny_llama().bfloat16().save_pretrained(tmp_path / "base")
    placement = Placement("nvme", "nvme", tmp_path / "swap")
    losses = []
    for saved in (False, True):
        model, weights = pretrained_model(tmp_path / "base", in_place=in_place)
        torch.manual_seed(int(saved))
        with engine_of(wrapped(model), BF16, placement, weights=weights) as engine:
            if saved:
                load_adapters(engine, tmp_path / "adapter")
            else:
                train_on(engine, batches(3))
                save_adapters(engine, tmp_path / "adapter")
            with torch.no_grad():
                losses.append(loss_of(engine, batches(1)[0]).item())
            values = {name: value for name, value in masters(engine).items() if "lora_" in name}
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert {name.replace(".default.", "."): value.tolist() for name, value in values.items()} == {
            key: value.tolist() for key, value in stored.items()
        }
    assert losses[0] == losses[1]


def test_a_second_adapter_has_a_folder_of_its_own(tmp_path) -> None:
    model = wrapped(tiny_llama())
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    model.set_adapter("second")
    with engine_of(model) as engine:
        train_on(engine, batches(2))
        save_adapters(engine, tmp_path, adapter="second", dtype=torch.bfloat16)
        stored = load_file(tmp_path / "second" / "adapter_model.safetensors")
        assert {value.dtype for value in stored.values()} == {torch.bfloat16}
        load_adapters(engine, tmp_path, adapter="second")
        assert all(
            torch.equal(value.bfloat16().float(), value)
            for name, value in masters(engine).items()
            if ".second." in name
        )
        with pytest.raises(infinity.ConfigError, match="has no adapter 'third'; it has default, second"):
            save_adapters(engine, tmp_path, adapter="third")


def test_files_of_other_adapters_are_refused_by_name(tmp_path) -> None:
    with engine_of(wrapped(tiny_llama())) as engine:
        with pytest.raises(infinity.CheckpointError, match=r"has no adapter_model\.safetensors"):
            load_adapters(engine, tmp_path)
        save_adapters(engine, tmp_path)
        before = masters(engine)
        file = tmp_path / "adapter_model.safetensors"
        stored = load_file(file)
        key = next(iter(stored))
        for changed, words in (
            ({name: value for name, value in stored.items() if name != key}, "it is of another adapter"),
            (stored | {key: stored[key][:2].clone()}, r"in shape \(2, .*; the model has \(4, "),
            (stored | {"more": stored[key].clone()}, r"has more, which the model's adapter does not have \(1 such\)"),
        ):
            save_file(changed, file)
            with pytest.raises(infinity.CheckpointError, match=words):
                load_adapters(engine, tmp_path)
        file.write_bytes(b"damaged")
        with pytest.raises(infinity.CheckpointError, match=r"adapter_model\.safetensors is damaged"):
            load_adapters(engine, tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in masters(engine).items())
    with (
        engine_of(tiny_llama()) as engine,
        pytest.raises(infinity.ConfigError, match="is a LlamaForCausalLM and has no adapters"),
    ):
        save_adapters(engine, tmp_path)


@pytest.mark.parametrize("more", MERGED, ids=["lora", "dora", "head"])
def test_an_export_has_the_adapters_merged(more, tmp_path) -> None:
    with engine_of(wrapped(tiny_llama(), **more)) as engine:
        train_on(engine, batches(3))
        save_pretrained(engine, tmp_path / "merged", dtype=torch.float32, max_shard_size="60KB")
        values = masters(engine)
        train_on(engine, batches(1))  # the model goes on unmerged
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    plain = wrapped(tiny_llama(), **more)
    plain.load_state_dict(values)
    expected = plain.merge_and_unload()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(loaded) is type(expected)
    found = loaded.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-7), name


def test_an_export_on_a_base_in_place_has_the_adapters_merged(tmp_path) -> None:
    tiny_llama().bfloat16().save_pretrained(tmp_path / "base")
    model, weights = pretrained_model(tmp_path / "base", in_place=True)
    with engine_of(wrapped(model), BF16, Placement("nvme", "nvme", tmp_path / "swap"), weights=weights) as engine:
        train_on(engine, batches(3))
        save_pretrained(engine, tmp_path / "merged")
        values = masters(engine)
    plain = wrapped(tiny_llama())
    plain.load_state_dict(values)
    expected = plain.merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_tied_weights_with_an_adapter_on_one_are_refused(tmp_path) -> None:
    model = wrapped(tiny_gpt2(), target_modules=["lm_head"])
    with (
        engine_of(model) as engine,
        pytest.raises(infinity.ConfigError, match=r"is tied to another parameter and has an adapter"),
    ):
        save_pretrained(engine, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_an_export_of_a_training_in_bf16_has_the_masters(dtype, tmp_path) -> None:
    """Tied embeddings are there once."""
    with engine_of(tiny_gpt2(), BF16) as engine:
        train_on(engine, batches(3))
        save_pretrained(engine, tmp_path / "out", dtype=dtype)
        values = masters(engine)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in values.items():
        assert torch.equal(stored[name], value.to(dtype or torch.bfloat16)), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {param.dtype for param in loaded.parameters()} == {dtype or torch.bfloat16}
    with pytest.raises(infinity.ConfigError, match="max_shard_size"), engine_of(tiny_gpt2()) as engine:
        save_pretrained(engine, tmp_path / "out", max_shard_size="many")


def _on_two(path: Path) -> list[float]:
    with engine_of(wrapped(tiny_llama()), FP32, Placement("nvme", "nvme", path / "swap")) as engine:
        train_on(engine, batches(4)[torch.distributed.get_rank() :: 2])
        save_adapters(engine, path / "adapter")
        save_pretrained(engine, path / "merged")
        load_adapters(engine, path / "adapter")
        values = masters(engine)
    if torch.distributed.get_rank() == 0:
        torch.save(values, path / "values")
    return []


def test_ranks_save_and_load_together(tmp_path) -> None:
    (tmp_path / "swap").mkdir()
    run_ranks(2, _on_two, tmp_path, path=tmp_path)
    values = torch.load(tmp_path / "values")
    plain = wrapped(tiny_llama())
    plain.load_state_dict(values)
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "adapter"))
    ids = batches(1)[0]
    expected = loss_of(plain, ids).item()
    assert loss_of(loaded, ids).item() == expected
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loss_of(merged, ids).item() == pytest.approx(expected, rel=1e-5)


def _named_on_rank_0(path: Path) -> list[str]:
    model = wrapped(tiny_llama(), modules_to_save=["lm_head"])
    with engine_of(model, FP32, Placement("nvme", "nvme", path)):
        values = model.state_dict()
        found = {}
        if torch.distributed.get_rank() == 0:
            found = peft.get_peft_model_state_dict(model, values, save_embedding_layers=False)
        torch.distributed.barrier()
        assert all(value.isfinite().all() for value in found.values())
        return sorted(found)


def test_rank_0_alone_can_name_what_peft_saves_beside_adapters(tmp_path) -> None:
    """As Trainer saves, whose other ranks have given their values by then."""
    names, none = run_ranks(2, _named_on_rank_0, tmp_path, path=tmp_path)
    assert "base_model.model.lm_head.weight" in names
    assert none == []
