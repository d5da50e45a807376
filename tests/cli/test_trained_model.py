"""`infinity train` without a configuration file, and the model that it leaves: plain transformers loads it."""

from __future__ import annotations

import errno
import json
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity
from infinity.cli.main import main
from infinity.cli.training import loop, precision
from infinity.cli.training.models import model_directory
from infinity.cli.training.schedule import Schedule
from infinity.errors import ConfigError
from tests.behaviour.reference import tiny_llama
from tests.cli.test_commands import ROOT, workspace
from tests.prepared import Child

__all__ = ["workspace"]

SENTENCE = "the quick brown fox jumps over the lazy dog\n"


def arguments(workspace: Path, *more: str) -> list[str]:
    drive = ["--nvme", str(workspace / "swap"), "--precision", "fp32", "--seq-len", "64"]
    return ["train", "gpt2:tiny", str(workspace / "text.txt"), *drive, "--output", str(workspace / "trained"), *more]


def continued(directory: Path, prompt: str, tokens: int) -> str:
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(written[0]))


def test_no_configuration_is_needed_and_the_model_continues_a_text(workspace, capsys) -> None:
    options = ["--steps", "80", "--lr", "0.01", "--micro-batch-size", "2", "--accumulation", "2", "--warmup", "4"]
    assert main(arguments(workspace, *options, "--host-memory", "2.5MiB")) == 0
    shown = capsys.readouterr().err
    assert "model: gpt2:tiny, 132,864 parameters, random weights" in shown
    assert "80 steps of 256 tokens" in shown
    assert "learning rate: 0.01, warm-up over 4 steps, then linear decay to step 80; AdamW in fp32" in shown
    assert "tiers: 2.50 MiB of host memory; " in shown
    assert "on NVMe in " in shown
    trained = workspace / "trained"
    assert f"the trained model is in {trained}" in shown
    assert continued(trained, "the quick brown ", 8) == "the quick brown fox jump"
    assert load_file(trained / "model.safetensors")["transformer.wte.weight"].dtype is torch.float32


@pytest.mark.parametrize(("bf16_s", "chosen"), [(1.2, "bf16"), (4.0, "fp32")])
def test_the_precision_is_measured_where_nobody_names_one(bf16_s, chosen, workspace, monkeypatch, capsys) -> None:
    def products(device, dtype):
        return [lambda: 1.0 if dtype is torch.float32 else bf16_s]

    monkeypatch.setattr(precision, "_layer", products)
    auto = {"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 1}
    (workspace / "auto.json").write_text(json.dumps(auto))
    command = ["train", "gpt2:tiny", str(workspace / "text.txt"), "--steps", "1", "--seq-len", "64", "--no-save"]
    for configured in (["--nvme", str(workspace / "swap")], ["--config", str(workspace / "auto.json")]):
        assert main([*command, *configured]) == 0
        assert f"AdamW in {chosen}" in capsys.readouterr().err


def test_a_text_survives_the_tokenizer_of_bytes(workspace) -> None:
    assert main(arguments(workspace, "--steps", "1")) == 0
    tokenizer = AutoTokenizer.from_pretrained(workspace / "trained")
    text = " naïve 日本語\t\n\x00 "
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_the_model_though_it_ends_who_reads_the_output(number, code, workspace) -> None:
    process = Child(["-m", "infinity.cli.main", *arguments(workspace, "--steps", "100000", "--json")], cwd=ROOT)
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(number)
    process.stdout.close()  # such as `tee`
    name = "Ctrl-C" if code == 130 else number.name
    assert next(line for line in process.stderr if f"{name}: stopping after this step, then saving the model" in line)
    process.stderr.close()
    assert process.wait(timeout=60) == code
    assert len(continued(workspace / "trained", "the", 5)) == 8


def test_without_a_name_each_run_has_a_directory_of_its_own(workspace, monkeypatch) -> None:
    monkeypatch.chdir(workspace)
    command = ["train", "--model", "gpt2:tiny", "--data", "text.txt", "--nvme", "swap", "--seq-len", "64"]
    for _ in range(2):
        assert main([*command, "--steps", "1"]) == 0
    assert main([*command, "--steps", "1", "--no-save"]) == 0
    assert sorted(path.name for path in (workspace / "trained").iterdir()) == ["gpt2-tiny", "gpt2-tiny-2"]


def test_a_pretrained_model_keeps_how_it_generates_and_is_not_overwritten(workspace, tmp_path, capsys) -> None:
    model = tmp_path / "model"
    tiny = tiny_llama()
    tiny.resize_token_embeddings(256)
    tiny.bfloat16().save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "max_new_tokens": 7}))
    command = ["train", str(model), *arguments(workspace, "--steps", "1", "--seq-len", "32")[2:]]
    assert main(command) == 0
    assert f"pretrained weights of {model}" in capsys.readouterr().err
    written = json.loads((workspace / "trained" / "generation_config.json").read_text())
    assert (written["temperature"], written["max_new_tokens"]) == (0.5, 7)
    assert main([*command, "--output", str(model)]) == 2
    assert "is the directory of --model" in capsys.readouterr().err
    assert main([*command[:2], str(tmp_path), *command[3:], "--output", f"{tmp_path}/."]) == 2
    assert "is also given as data" in capsys.readouterr().err


@pytest.mark.parametrize("in_place", [True, False])
def test_lora_leaves_the_merged_model_and_the_adapters(in_place, workspace, tmp_path, capsys) -> None:
    peft = pytest.importorskip("peft")
    model = tmp_path / "model"
    tiny = tiny_llama()
    tiny.resize_token_embeddings(256)
    tiny.to(torch.float32 if in_place else torch.bfloat16).save_pretrained(model)
    text = str(workspace / "text.txt")
    common = ["--nvme", str(workspace / "swap"), "--precision", "fp32", "--seq-len", "32", "--lora", "4"]
    output = workspace / "trained"
    command = ["train", str(model), text, *common, "--steps", "3", "--lr", "0.01", "--output", str(output)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of names that transformers gives up
        assert main([*command, "--checkpoint-activations"]) == 0
    assert "LoRA of rank 4" in capsys.readouterr().err
    ids = torch.arange(16).view(1, -1)
    merged = AutoModelForCausalLM.from_pretrained(output)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: nn.Module = peft.PeftModel.from_pretrained(base, output / "adapter")
    with torch.no_grad():
        assert (merged(ids).logits - adapted(ids).logits).abs().max() < 1e-4
    before, after = (load_file(path / "model.safetensors") for path in (model, output))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[name].float(), after[name])


def test_lora_needs_a_pretrained_model(workspace, capsys) -> None:
    assert main(arguments(workspace, "--lora")) == 2
    assert "--lora 16 adapts a pretrained model, and --model gpt2:tiny is a size" in capsys.readouterr().err


def test_epochs_count_the_steps(workspace, capsys) -> None:
    assert main(arguments(workspace, "--epochs", "0.1", "--micro-batch-size", "3", "--json", "--no-save")[:-1]) == 0
    samples = 400 * len(SENTENCE) // 64
    assert len(capsys.readouterr().out.splitlines()) == -(-samples // 10 // 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-save"], "both --output and --no-save are given"),
        (["--epochs", "0"], "--epochs is 0.0; it must be a number above 0"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--model", "gpt2"], "--model is given twice"),
        (["--wandb", "mine"], "--wandb mine needs the package wandb: python -m pip install wandb"),
    ],
)
def test_options_that_cannot_work(options, message, workspace, capsys, monkeypatch) -> None:
    monkeypatch.setattr("infinity.cli.training.configuration.find_spec", lambda name: None)
    assert main(arguments(workspace, *options)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--output"], ["--no-save", "--save-every", "1", "--save-dir"]], ids=lambda o: o[-1]
)
def test_a_directory_that_cannot_be_made_is_refused_before_the_first_step(options, workspace, capsys) -> None:
    command = ["train", "gpt2:tiny", str(workspace / "text.txt"), "--nvme", str(workspace / "swap"), "--steps", "1"]
    assert main([*command, *options, str(workspace / "text.txt" / "inside")]) == 2
    shown = capsys.readouterr().err
    assert f"{options[-1]} {workspace}/text.txt/inside: {workspace}/text.txt is no directory" in shown
    assert "step 1" not in shown


def test_without_a_drive_and_a_file_the_message_names_both(workspace, capsys) -> None:
    assert main(["train", "gpt2:tiny", str(workspace / "text.txt"), "--no-save"]) == 2
    shown = capsys.readouterr().err
    assert "give --nvme DIRECTORY" in shown
    assert "or --config" in shown


def test_tensorboard_has_the_losses(workspace) -> None:
    pytest.importorskip("tensorboard")
    events = workspace / "events"
    assert main(arguments(workspace, "--steps", "2", "--tensorboard", str(events))) == 0
    assert list(events.glob("events.out.tfevents.*"))


# Values that a file leaves "auto" #


def auto_config(workspace: Path, **sections: object) -> str:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    }
    path = workspace / "auto.json"
    path.write_text(json.dumps(config | sections))
    return str(path)


def test_auto_values_are_filled_or_asked_for_by_name(workspace, capsys) -> None:
    command = ["train", "gpt2:tiny", str(workspace / "text.txt"), "--seq-len", "64", "--no-save", "--json"]
    command += ["--steps", "6", "--config", auto_config(workspace)]
    assert main(command) == 2
    assert 'optimizer.params.lr is "auto" in' in capsys.readouterr().err
    assert main([*command, "--lr", "0.01", "--warmup", "2"]) == 0
    rates = [json.loads(line)["lr"] for line in capsys.readouterr().out.splitlines()]
    assert max(rates) == pytest.approx(0.01)
    assert rates[-1] < 0.01


def test_a_required_rate_of_a_cycle_is_asked_for(workspace, capsys) -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": "auto", "cycle_max_lr": 0.1}}
    command = ["train", "gpt2:tiny", str(workspace / "text.txt"), "--seq-len", "64", "--no-save", "--lr", "1"]
    config = auto_config(workspace, scheduler=cycle)
    assert main([*command, "--config", config]) == 2
    assert 'scheduler.params.cycle_min_lr is "auto"' in capsys.readouterr().err
    assert main([*command, "--config", config, "--warmup", "3"]) == 2
    assert "which has no warm-up" in capsys.readouterr().err
    assert main([*command, "--config", config, "--schedule", "cosine", "--steps", "2"]) == 0


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_no_update_has_a_rate_of_zero(kind) -> None:
    factors = [Schedule(kind, 3, 10).factor(update) for update in range(10)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:] == sorted(factors[3:], reverse=True)


def test_another_rate_at_resume_leaves_a_schedule_where_it_is() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = Schedule("linear", 0, 4).made(optimizer)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    expected = [group["lr"] for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 9.0  # the checkpoint's
    loop._set_lr(SimpleNamespace(lr_scheduler=schedule, optimizer=optimizer), 0.5)  # type: ignore[arg-type]
    assert [group["lr"] for group in optimizer.param_groups] == expected == [0.25]


def test_a_warm_up_that_is_longer_than_the_run_is_called_so() -> None:
    assert Schedule("linear", 1, 5).words() == "warm-up over 1 step, then linear decay to step 5"
    assert Schedule("linear", 10, 5).words() == "warm-up over 10 steps, which does not end in 5"


# Hugging Face's cache #


def test_a_model_in_the_cache_is_found_by_its_name(tmp_path, monkeypatch) -> None:
    cache = tmp_path / "hub"
    repository = cache / "models--owner--tiny"
    commit = "0" * 40
    snapshot = repository / "snapshots" / commit
    tiny_llama().save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_directory("owner/tiny") == snapshot
    (snapshot / "model.safetensors").unlink()
    assert model_directory("owner/tiny", weights=False) == snapshot
    for name in ("owner/tiny", "owner/other"):
        with pytest.raises(ConfigError, match=f"--model {name} is no directory, is not in Hugging Face's cache"):
            model_directory(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "--model ./nowhere is no model directory and no known size"),
        ("owner/a--b", "--model owner/a--b is no directory and no Hugging Face name: "),
        ("empty", "--model empty is a directory without config.json"),
        ("text.txt", "--model text.txt is a file"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(name, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    with pytest.raises(ConfigError, match=f"^{message}"):
        model_directory(name)


# infinity checkpoint export #


def exported(workspace: Path, *more: str) -> int:
    command = ["checkpoint", "export", str(workspace / "checkpoints"), str(workspace / "exported"), *more]
    return main(command)


def test_an_exported_checkpoint_is_the_trained_model(workspace, capsys) -> None:
    saved = ["--save-every", "2", "--save-dir", str(workspace / "checkpoints")]
    assert main(arguments(workspace, "--steps", "2", *saved)) == 0
    assert exported(workspace) == 0
    directories = workspace / "trained", workspace / "exported"
    trained, again = (AutoModelForCausalLM.from_pretrained(directory) for directory in directories)
    assert again.dtype is torch.float32
    for name, value in trained.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert continued(workspace / "exported", "the", 5) == continued(workspace / "trained", "the", 5)
    capsys.readouterr()
    assert exported(workspace, "--model", "llama:160m") == 2
    assert "is the checkpoint of another model" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_written_is_told_in_words(workspace, monkeypatch, capsys) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    out, saved = workspace / "out", ["--save-dir", str(workspace / "checkpoints")]
    assert main(arguments(workspace, "--steps", "1", "--output", str(out), *saved)) == 2
    assert f"{out} cannot be written: Exception: No space left on device" in capsys.readouterr().err
    assert not list(out.glob(".tmp*"))


def test_a_model_that_cannot_be_written_is_kept_as_a_checkpoint(workspace, monkeypatch, capsys) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    options = ["--steps", "2", "--save-dir", str(workspace / "checkpoints")]
    with monkeypatch.context() as patched:
        patched.setattr("infinity.checkpoint.export.publish", full)
        assert main(arguments(workspace, *options)) == 2
        shown = capsys.readouterr().err
        assert f"saved {workspace}/checkpoints/global_step2" in shown
        assert f"`infinity checkpoint export {workspace}/checkpoints DIRECTORY` creates it from the checkpoint" in shown
        assert "error: [Errno 28] the model cannot be written: No space left on device; free some space" in shown
        patched.setattr("infinity.checkpoint.directory._swap", full)
        assert main(arguments(workspace, *options, "--save-dir", str(workspace / "full"))) == 2
        assert "the trained model cannot be written, nor can a checkpoint: [Errno 28]" in capsys.readouterr().err
    assert exported(workspace) == 0
    assert continued(workspace / "exported", "the", 5)


def test_a_checkpoint_that_does_not_name_its_model_is_exported_with_a_note(workspace, tmp_path, capsys) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    with infinity.initialize(model=model, config={"optimizer": {"type": "AdamW"}})[0] as engine:
        engine.save_checkpoint(workspace / "checkpoints")
    assert exported(workspace) == 0
    assert "give --model DIRECTORY" in capsys.readouterr().err
    assert not (workspace / "exported" / "config.json").exists()
    assert exported(workspace, "--model", str(tmp_path / "model"), "--dtype", "bfloat16") == 0
    assert AutoModelForCausalLM.from_pretrained(workspace / "exported").dtype is torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_are_exported_for_peft(precision, workspace, tmp_path, capsys) -> None:
    peft = pytest.importorskip("peft")
    model = tmp_path / "model"
    tiny = tiny_llama()
    tiny.resize_token_embeddings(256)
    tiny.save_pretrained(model)
    saved = ["--save-every", "1", "--save-dir", str(workspace / "checkpoints"), "--lora", "2", "--seq-len", "32"]
    command = ["train", str(model), *arguments(workspace, "--steps", "1", *saved, "--precision", precision)[2:]]
    assert main(command) == 0
    capsys.readouterr()
    assert exported(workspace) == 0
    assert "adapter_model.safetensors" in capsys.readouterr().out
    by_training, by_export = workspace / "trained" / "adapter", workspace / "exported"
    before, after = (load_file(path / "adapter_model.safetensors") for path in (by_training, by_export))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    settings = [json.loads((path / "adapter_config.json").read_text()) for path in (by_training, by_export)]
    assert settings[0] == settings[1]
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted: nn.Module = peft.PeftModel.from_pretrained(base, by_export)
    assert any(bool(value.any()) for name, value in adapted.named_parameters() if "lora_B" in name)
    assert exported(workspace, "--model", "gpt2:tiny") == 2
    assert "of another adapter or model" in capsys.readouterr().err
