"""Models go to and from transformers' directories without ever being whole in memory."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import infinity
from infinity.checkpoint.export import plan_shards
from infinity.cli.main import main
from infinity.integrations import pretrained_model
from infinity.integrations.pretrained import pretrained_shape
from tests.behaviour.disks import mounted
from tests.behaviour.reference import (
    ARCHITECTURES,
    Placement,
    Recipe,
    batches,
    loss_of,
    tiny_gpt2,
    tiny_llama,
    train_on,
)


def tiny_qwen(seed: int = 0) -> nn.Module:
    """Tied embeddings, biases in the attention."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def tiny_mixtral(seed: int = 0) -> nn.Module:
    """Experts as one parameter, which transformers stores under other names."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=128,
    )
    return MixtralForCausalLM(config)


BUILDERS = {**ARCHITECTURES, "qwen": tiny_qwen}
FP32, BF16 = Recipe(), Recipe("bf16")


def engine_of(model: nn.Module, recipe: Recipe = BF16) -> infinity.Engine:
    return infinity.initialize(model=model, config=recipe.config(Placement()))[0]


def saved(tmp_path: Path, model: nn.Module, **options: object) -> Path:
    model.save_pretrained(tmp_path / "model", **options)
    return tmp_path / "model"


# From a directory #


@pytest.mark.parametrize("placement", ["none", "nvme"])
@pytest.mark.parametrize("name", BUILDERS)
def test_training_from_a_directory_is_training_from_the_model(name, placement, tmp_path) -> None:
    model = BUILDERS[name]()
    path = saved(tmp_path, model, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    swap = tmp_path / "swap"
    swap.mkdir()
    config = BF16.config(Placement(placement, placement, swap))
    with infinity.initialize(model=model, config=config)[0] as engine:
        expected = train_on(engine, batches(5))
        weights = dict(engine.named_parameters())
    torch.manual_seed(99)
    engine, optimizer, _, _ = infinity.from_pretrained(path, config)
    with engine:
        assert type(engine.module) is type(model)
        assert optimizer is engine.optimizer
        assert train_on(engine, batches(5)) == expected
        for key, value in engine.named_parameters():
            assert torch.equal(value, weights[key]), key


def test_sixteen_bit_weights_become_exact_masters(tmp_path) -> None:
    path = saved(tmp_path, tiny_llama().bfloat16())
    with infinity.from_pretrained(path, FP32.config(Placement()))[0] as engine:
        stored = load_file(path / "model.safetensors")
        for name, value in engine.named_parameters():
            assert value.dtype == torch.float32
            assert torch.equal(value, stored[name].float()), name


def test_a_base_model_gets_a_new_head_and_a_head_is_left_out(tmp_path, caplog) -> None:
    path = saved(tmp_path, tiny_llama())
    weights = load_file(path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        model, source = pretrained_model(path, model_class=AutoModel)
    assert "tensors that the model does not use, such as lm_head.weight" in caplog.text
    config = FP32.config(Placement())
    with infinity.initialize(model=model, config=config, weights=source)[0] as engine:
        for name, value in engine.named_parameters():
            assert torch.equal(value, weights[f"model.{name}"]), name

    only_base = saved(tmp_path / "base", AutoModel.from_pretrained(path))
    with infinity.from_pretrained(only_base, config, model_class=LlamaForSequenceClassification)[0] as engine:
        assert "parameter `score.weight` is not among the stored weights: it is newly initialised" in caplog.text
        for name, value in engine.named_parameters():
            if name == "score.weight":
                assert 0 < float(value.std()) < 0.1
            else:
                assert torch.equal(value, weights[name]), name


def test_a_model_may_be_changed_before_it_is_placed(tmp_path) -> None:
    path = saved(tmp_path, tiny_gpt2())
    model, weights = pretrained_model(path)
    model.transformer.wte.weight.requires_grad_(False)
    assert all(param.is_meta for param in model.parameters())
    with infinity.initialize(model=model, config=BF16.config(Placement()), weights=weights)[0] as engine:
        before = dict(engine.named_parameters())
        train_on(engine, batches(3))
        for name, value in engine.named_parameters():
            assert torch.equal(value, before[name]) == (name == "transformer.wte.weight"), name


def test_persistent_buffers_come_with_the_weights(tmp_path) -> None:
    path = saved(tmp_path, tiny_gpt2())
    tensors = load_file(path / "model.safetensors")
    model, weights = pretrained_model(path)
    model.register_buffer("scale", torch.zeros(3))
    model.register_buffer("rates", torch.tensor([0.1]), persistent=False)
    stored = {**tensors, "scale": torch.arange(3.0), "rates": torch.tensor([0.1]).bfloat16()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    again = type(weights)(path, model)
    again.load_buffers(model)
    assert model.scale.tolist() == [0, 1, 2]
    assert torch.equal(model.rates, torch.tensor([0.1]))  # as torch and transformers leave it
    save_file({**stored, "scale": torch.zeros(1)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(infinity.ConfigError, match=r"has scale in shape \(1,\); the model has \(3,\)"):
        type(weights)(path, model)


def test_the_command_line_trains_from_a_directory(tmp_path, capsys) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    (tmp_path / "config.json").write_text(json.dumps(BF16.config(Placement())))
    options = ["--data", str(tmp_path / "text.txt"), "--config", str(tmp_path / "config.json"), "--seq-len", "32"]
    options += ["--output", str(tmp_path / "trained")]
    few_tokens = saved(tmp_path / "few", tiny_llama())
    assert main(["train", "--model", str(few_tokens), *options, "--steps", "1", "--json"]) == 2
    assert "the tokenizer has 256 tokens, more than" in capsys.readouterr().err

    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=32))
    path = saved(tmp_path, model)
    first = []
    for seed in ("1", "1", "2"):
        assert main(["train", "--model", str(path), *options, "--steps", "30", "--json", "--seed", seed]) == 0
        steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert steps[-1]["loss"] < steps[0]["loss"]
        first.append(steps[0]["loss"])
    assert first[0] == first[1]
    assert first[0] == pytest.approx(first[2], rel=0.05)  # other samples, the same weights


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: (d / "config.json").unlink(), infinity.ConfigError, "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), infinity.ConfigError, "that transformers does not take"),
        (
            lambda d: rewrite(d, num_hidden_layers=1e7),
            infinity.ConfigError,
            r"num_hidden_layers is 10000000\.0; at most",
        ),
        (lambda d: rewrite(d, vision={"num_experts": 20_000}), infinity.ConfigError, r"vision\.num_experts is 20000;"),
        (lambda d: rewrite(d, intermediate_size=1 << 40), infinity.ConfigError, "intermediate_size is 1099511627776;"),
        (lambda d: remove(d / "model.safetensors"), infinity.CheckpointError, "has neither model.safetensors nor"),
        (lambda d: truncate(d / "model.safetensors"), infinity.CheckpointError, "is truncated: tensor"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), infinity.CheckpointError, "it has 1 bytes, too few"),
        (lambda d: edit(d, pop="model.norm.weight", add="norm"), infinity.ConfigError, "of another architecture"),
        (lambda d: edit(d, shape="model.norm.weight"), infinity.ConfigError, r"in shape \(1,\); the model has \(64,\)"),
        (lambda d: edit(d, integer="model.norm.weight"), infinity.ConfigError, "quantised weights cannot be trained"),
        (lambda d: index(d, {"weight_map": {"a": "../b"}}), infinity.CheckpointError, "leaves the directory"),
        (lambda d: index(d, {"weight_map": {"a": "model.safetensors"}}), infinity.CheckpointError, "tensor a, but it"),
        (lambda d: index(d, []), infinity.CheckpointError, "index.json is damaged"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(damage, error, message, tmp_path) -> None:
    path = saved(tmp_path, tiny_llama())
    damage(path)
    with pytest.raises(error, match=message):
        infinity.from_pretrained(path, BF16.config(Placement()))


def test_a_value_that_counts_nothing_may_be_any_number(tmp_path) -> None:
    path = saved(tmp_path, tiny_llama())
    rewrite(path, note=float("nan"))
    assert pretrained_shape(path).config.num_hidden_layers == tiny_llama().config.num_hidden_layers


def rewrite(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def edit(directory: Path, *, pop: str = "", add: str = "", shape: str = "", integer: str = "") -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(pop, None)
    if add:
        tensors[add] = torch.zeros(1)
    if shape:
        tensors[shape] = torch.zeros(1)
    if integer:
        tensors[integer] = tensors[integer].to(torch.int8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def index(directory: Path, content: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


# To a directory #


@pytest.mark.parametrize("recipe", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*BUILDERS, "mixtral"])
def test_transformers_loads_what_was_saved(name, recipe, tmp_path) -> None:
    model = (BUILDERS | {"mixtral": tiny_mixtral})[name]()
    with engine_of(model, recipe) as engine:
        train_on(engine, batches(3))
        assert engine.save_16bit_model(tmp_path / "out", max_shard_size="100KB") == tmp_path / "out"
        weights = dict(engine.named_parameters())
        ids = batches(1, seed=7)[0]
        expected = loss_of(engine.eval(), ids).item()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16}
    for key, value in loaded.named_parameters():
        assert torch.equal(value, weights[key].bfloat16()), key
    assert loss_of(loaded, ids).item() == pytest.approx(expected, rel=0 if recipe is BF16 else 0.02)


def test_one_small_file_needs_no_index_and_replaces_an_earlier_export(tmp_path) -> None:
    with engine_of(tiny_gpt2()) as engine:
        engine.save_16bit_model(tmp_path, max_shard_size="100KB")
        assert (tmp_path / "model.safetensors.index.json").exists()
        (tmp_path / "tokenizer.json").write_text("{}")
        engine.save_16bit_model(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


def test_a_saved_model_trains_on(tmp_path) -> None:
    with engine_of(tiny_gpt2()) as engine:
        train_on(engine, batches(3))
        engine.save_16bit_model(tmp_path)
        weights = dict(engine.named_parameters())
    with infinity.from_pretrained(tmp_path, BF16.config(Placement()))[0] as engine:
        for name, value in engine.named_parameters():
            assert torch.equal(value, weights[name]), name
        losses = train_on(engine, batches(10))
        assert losses[-1] < losses[0]


def test_a_model_without_a_configuration_is_saved_as_tensors(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with engine_of(model) as engine:
        engine.save_16bit_model(tmp_path)
        weights = dict(engine.named_parameters())
    tensors = load_file(tmp_path / "model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}
    assert tensors.keys() == {*weights, "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert tensors["1.num_batches_tracked"].dtype == torch.int64


def test_a_failed_export_leaves_the_old_one(tmp_path) -> None:
    with mounted(tmp_path / "small", "size=500k") as disk:
        with engine_of(tiny_gpt2()) as engine:
            engine.save_16bit_model(disk)
            before = (disk / "model.safetensors").read_bytes()
            train_on(engine, batches(2))
            with pytest.raises(infinity.StorageError, match="No space left"):
                engine.save_16bit_model(disk)
        assert (disk / "model.safetensors").read_bytes() == before
        assert not (disk / ".tmp-export").exists()


def test_shards_hold_every_tensor_once_and_respect_their_size() -> None:
    specs = {f"t{n}": (torch.bfloat16, (n % 7, 10)) for n in range(50)}
    shards = plan_shards(specs, 300)
    assert [name for shard in shards.values() for name in shard] == list(specs)
    for shard in shards.values():
        assert sum(20 * shape[0] for _, shape in shard.values()) <= 300
    assert list(plan_shards({"a": (torch.float32, (1000,)), "b": (torch.float32, (1,))}, 10)) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_size_that_is_none_is_refused(tmp_path) -> None:
    with engine_of(tiny_gpt2()) as engine, pytest.raises(infinity.ConfigError, match="max_shard_size: 'big'"):
        engine.save_16bit_model(tmp_path, max_shard_size="big")


# Memory #


def test_neither_way_has_the_model_in_memory(tmp_path) -> None:
    """150 MB of float32 weights pass through a process that may hold 40 MiB of them."""
    config = GPT2Config(n_layer=24, n_embd=360, n_head=4, vocab_size=256, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="40MB")
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size > 140e6
    (tmp_path / "swap").mkdir()
    training = FP32.config(Placement("nvme", "nvme", tmp_path / "swap", "1MiB", "40MiB"))
    (tmp_path / "config.json").write_text(json.dumps(training))
    script = """
import sys
from pathlib import Path
import torch, transformers

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

directory = Path(sys.argv[1])
tiny = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8)
transformers.AutoModelForCausalLM.from_config(tiny)(torch.zeros(1, 1, dtype=torch.long))  # what it imports
import infinity.setup, infinity.integrations
before = resident()
engine = infinity.from_pretrained(directory / "model", directory / "config.json")[0]
loaded = resident()
engine.save_16bit_model(directory / "out", max_shard_size="20MB")
print(loaded - before, resident() - before)
engine.close()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    for grown in done.stdout.split():
        assert int(grown) < 100e6, done.stdout
    saved_bytes = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert saved_bytes == pytest.approx(size / 2, rel=0.01)
    shutil.rmtree(tmp_path / "model")
