"""The examples that are loops of one's own run on small data, in this process, to the losses of plain loops."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from infinity.config import with_values
from tests.integrations.processes import ROOT, output, script

EXAMPLES = ROOT / "examples"

Run = Callable[..., list[float]]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="Z", pad_token="Y")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example in a directory with texts; gives the losses that it prints."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text((ROOT / "README.md").read_text())
    monkeypatch.chdir(tmp_path)

    def run_example(name: str, *arguments: str) -> list[float]:
        monkeypatch.setattr(sys, "argv", [name, "--data", "texts", *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return [float(found) for found in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]

    return run_example


def test_pretraining_goes_on_where_it_stopped(run, tmp_path) -> None:
    config = with_values(ROOT / "configs/nvme.json", {"tiering.host_memory": "2MiB", "tiering.tile_size": "64KiB"})
    (tmp_path / "nvme.json").write_text(json.dumps(config | {"gradient_accumulation_steps": 2}))
    options = ["--config", "nvme.json", "--length", "32", "--layers", "2", "--width", "64", "--save-every", "2"]
    whole = run("pretrain_gpt2.py", *options, "--steps", "4", "--out", "whole")
    assert run("pretrain_gpt2.py", *options, "--steps", "2") == whole[:2]
    assert run("pretrain_gpt2.py", *options, "--steps", "4", "--resume") == whole[2:]
    assert len(set(whole)) == 4
    weights = [(tmp_path / out / "weights" / "model.safetensors").read_bytes() for out in ("whole", "pretrained")]
    assert weights[0] == weights[1]


def test_adapters_are_trained_beside_a_base_that_stays_in_its_files(run, tmp_path) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256, dtype=torch.bfloat16)).bfloat16().save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    options = ["--model", "model", "--config", str(ROOT / "configs/nvme.json"), "--length", "32", "--steps", "2"]
    losses = run("finetune_lora.py", *options)
    assert len(losses) == 2
    assert run("finetune_lora.py", *options, "--copy", "--out", "copied") == losses
    assert run("finetune_lora.py", *options, "--from-adapters", "adapters")[0] < losses[0]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


def test_a_plain_loop_has_the_same_losses_with_its_moments_on_the_drive(run, tmp_path) -> None:
    options = ["--steps", "4", "--length", "32", "--width", "32", "--layers", "1", "--batch", "2"]
    in_memory = run("plain_loop_nvme_adamw.py", *options, "--out", "memory.pt")
    on_drive = run("plain_loop_nvme_adamw.py", *options, "--nvme", str(tmp_path))
    assert len(on_drive) == 4
    assert on_drive == pytest.approx(in_memory, abs=2e-4)
    ours, theirs = torch.load("letters.pt")["optimizer"]["state"], torch.load("memory.pt")["optimizer"]["state"]
    assert ours.keys() == theirs.keys()
    for key, state in theirs.items():
        torch.testing.assert_close(ours[key]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-6)


BOTH = """
import os, runpy, sys
from accelerate.state import AcceleratorState, GradientState

example, config, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = example
runpy.run_path(example, run_name="__main__")
AcceleratorState._reset_state(reset_partial_state=True)
GradientState._reset_state()
os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=config)
sys.argv += ["--out", "on-drive"]
runpy.run_path(example, run_name="__main__")
"""


def test_a_loop_over_accelerate_has_the_same_losses_with_its_states_on_the_drive(tmp_path) -> None:
    """In one process: first as it is, then as `infinity run accelerate launch` has it."""
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(**shape, vocab_size=256)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    kinds = {"page": ROOT / "README.md", "code": ROOT / "infinity" / "engine.py"}
    lines = [
        json.dumps({"text": line[:60], "label": label})
        for label, file in kinds.items()
        for line in [line for line in file.read_text().splitlines() if line.strip()][:40]
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    (tmp_path / "both.py").write_text(BOTH)
    paths = ["--model", "model", "--data", "lines.jsonl", "--epochs", "2", "--lr", "1e-3"]
    config = EXAMPLES / "accelerate_nvme.json"
    printed = output(script("both.py", EXAMPLES / "accelerate_nlp.py", config, *paths, where=tmp_path))
    epochs = re.findall(r"epoch \d: loss ([0-9.]+), (\d+) of 8 right", printed)
    assert len(epochs) == 4
    for (loss, right), (plain_loss, plain_right) in zip(epochs[2:], epochs[:2], strict=True):
        assert float(loss) == pytest.approx(float(plain_loss), abs=2e-4)
        assert right == plain_right
    assert int(epochs[1][1]) > 4
    for out in ("classifier", "on-drive"):
        assert (tmp_path / out / "model.safetensors").is_file()
