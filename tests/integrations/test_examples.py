"""The examples run on small data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from infinity.config import with_values
from infinity.distribution import install_command
from tests.integrations.processes import ROOT, output, plainly, script

EXAMPLES = ROOT / "examples"


def test_a_deepspeed_script_runs_as_it_is_and_with_one_line_changed(tmp_path) -> None:
    source = EXAMPLES / "from_deepspeed"
    options = ["--deepspeed_config", source / "ds_config.json", "--epochs", "2"]
    as_it_is = output(script(source / "train.py", *options, where=tmp_path))
    assert as_it_is.count("loss") == 2
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step32"

    lines = (source / "infinity.diff").read_text().splitlines()
    removed = [line[1:] for line in lines if line.startswith("-") and not line.startswith("---")]
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert (removed, added) == (["import deepspeed"], ["import infinity as deepspeed"])
    content = (source / "train.py").read_text()
    assert content.count("import deepspeed\n") == 1
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "train.py").write_text(content.replace("import deepspeed\n", "import infinity as deepspeed\n"))
    assert output(script("train.py", *options, namespace=False, where=changed)) == as_it_is


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a small model, texts and a configuration."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="Z").save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256, max_position_embeddings=64)).save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text((ROOT / "README.md").read_text())
    shutil.copy(EXAMPLES / "trainer_nvme.json", tmp_path)
    return tmp_path


def test_a_trainer_fine_tunes_adapters_of_a_model_on_the_drive(place) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    options = ["--deepspeed", "trainer_nvme.json", "--lora", "4", "--steps", "2", "--length", "32"]
    example = EXAMPLES / "finetune_trainer.py"
    paths = ["--model", "model", "--data", "texts"]
    assert "'train_loss'" in output(script(example, *paths, *options, where=place))
    assert (place / "finetuned" / "adapter_model.safetensors").is_file()
    assert (place / "finetuned" / "checkpoint-2" / "global_step2" / "manifest.json").is_file()


def test_lightning_trains_a_model_on_the_drive(place) -> None:
    pytest.importorskip("lightning")
    options = ["--model", "model", "--data", "texts", "--config", "trainer_nvme.json", "--steps", "2", "--length", "32"]
    printed = output(script(EXAMPLES / "lightning_clm.py", *options, "--accumulate", "2", namespace=False, where=place))
    assert "'loss': 5." in printed


def test_ray_goes_on_from_the_last_checkpoint_when_a_worker_is_lost(place, monkeypatch) -> None:
    pytest.importorskip("ray", reason=install_command("examples"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    config = with_values(ROOT / "configs/nvme.json", {"tiering.host_memory": "64MiB"})
    (place / "nvme.json").write_text(json.dumps(config))
    shape = ["--steps", "6", "--length", "32", "--layers", "2", "--width", "64"]
    options = ["--data", "texts", "--config", "nvme.json", *shape, "--save-every", "2", "--lose-at", "5"]
    ended = plainly(EXAMPLES / "ray_train.py", *options, where=place)
    steps = re.findall(r"step (\d): loss ([0-9.]+)", output(ended))
    assert [int(step) for step, _ in steps] == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert steps[5:8] == steps[2:5]
    assert (place / "trained" / "weights" / "model.safetensors").is_file()


def test_trl_fine_tunes_adapters_of_a_model_on_the_drive(place) -> None:
    pytest.importorskip("trl", reason=install_command("examples"))
    lines = [json.dumps({"prompt": f"{n} and one are", "completion": f" {n + 1}"}) for n in range(20)]
    (place / "sums.jsonl").write_text("\n".join(lines))
    losses = []
    for file in (["--deepspeed", "trainer_nvme.json"], []):
        options = ["--model", "model", "--data", "sums.jsonl", "--steps", "3", "--lora", "4", *file]
        printed = output(script(EXAMPLES / "sft_trl.py", *options, namespace=bool(file), where=place))
        losses.append([float(found) for found in re.findall(r"'loss': '?([0-9.]+)", printed)])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert (place / "tuned" / "adapter_model.safetensors").is_file()
