"""The command line does the job, says what it did, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from infinity import Engine
from infinity.cli.main import main
from infinity.cli.training import precision
from infinity.cli.training.loop import _slow_precision
from infinity.cli.training.models import build_model
from infinity.cli.training.precision import faster_precision, product_seconds
from infinity.errors import StorageError
from tests.prepared import Child

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A directory with a swap directory, some text and a configuration."""
    (tmp_path / "swap").mkdir()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    write_config(tmp_path)
    return tmp_path


def write_config(workspace: Path, **changes: Any) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 1000,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {"nvme": [{"path": str(workspace / "swap")}], "tile_size": "64KiB", "host_memory": "1MiB"},
    }
    (workspace / "config.json").write_text(json.dumps(config | changes))


def train_arguments(workspace: Path, *more: str) -> list[str]:
    return [
        *("train", "--model", "gpt2:tiny", "--data", str(workspace / "text.txt"), "--seq-len", "64", "--json"),
        *("--config", str(workspace / "config.json"), "--save-dir", str(workspace / "saved"), "--no-save", *more),
    ]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def train(workspace: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(train_arguments(workspace, *more)) == 0
    assert not list((workspace / "swap").iterdir())
    return lines(capsys.readouterr().out)


def test_train_learns_and_reports_every_step(workspace, capsys) -> None:
    steps = train(workspace, capsys, "--steps", "30")
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    for what in ("nvme_read_bytes", "nvme_write_bytes"):  # what a step reads ahead may be the next one's
        assert sum(step[what] > 0 for step in steps) > 20
    for step in steps[2:]:
        assert step["step_s"] >= step["forward_s"] + step["backward_s"]
        assert 0 < step["peak_host_bytes"] <= 1 << 20
        assert step["peak_device_bytes"] == 0
        assert step["tokens_per_s"] > 0
        assert step["grad_norm"] > 0
        assert isinstance(step["stall_s"], dict)


@pytest.mark.parametrize("more", [[], ["--checkpoint-activations"]], ids=["saved", "recomputed"])
def test_layer_major_micro_batches_report_the_losses_of_the_ordinary_order(more, workspace, capsys) -> None:
    runs = {}
    for order in ("micro_batch", "layer"):
        write_config(workspace, gradient_accumulation_steps=4, bf16={"enabled": False})
        config = json.loads((workspace / "config.json").read_text())
        config["tiering"] |= {"accumulation": order, "activations": "nvme", "activation_memory": "256KiB"}
        config["tiering"]["host_memory"] = "1280KiB"
        (workspace / "config.json").write_text(json.dumps(config))
        runs[order] = train(workspace, capsys, "--steps", "6", *more)
    ordinary, ours = runs["micro_batch"], runs["layer"]
    assert [step["step"] for step in ours] == [1, 2, 3, 4, 5, 6]
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in ordinary], rel=1e-5)
    assert ours[0].keys() == ordinary[0].keys()
    boundaries = 4 * 2 * 2 * 64 * 64 * 4  # micro-batches x blocks x samples x tokens x width x bytes
    assert (ours[-1]["device_to_host_bytes"] <= 6 * boundaries) == bool(more)  # 5 are the head's
    resumed = train(workspace, capsys, "--steps", "3", "--save-every", "3", *more)
    resumed += train(workspace, capsys, "--steps", "6", "--resume", *more)
    assert [step["loss"] for step in resumed] == [step["loss"] for step in ours]


def test_save_exit_resume_continues_bit_for_bit(workspace, capsys) -> None:
    whole = train(workspace, capsys, "--steps", "20")
    train(workspace, capsys, "--steps", "10", "--save-every", "10")
    resumed = train(workspace, capsys, "--steps", "20", "--resume")
    assert [step["step"] for step in resumed] == list(range(11, 21))
    assert [step["loss"] for step in resumed] == [step["loss"] for step in whole[10:]]


def test_resume_with_another_batch_size_goes_on_at_the_same_sample(workspace, capsys) -> None:
    """With a learning rate of 0, a loss tells which samples it is of."""
    whole = train(workspace, capsys, "--steps", "8", "--lr", "0")
    train(workspace, capsys, "--steps", "4", "--lr", "0", "--save-every", "4")
    train(workspace, capsys, "--steps", "5", "--lr", "0", "--save-every", "4", "--resume", "--micro-batch-size", "4")
    resumed = train(workspace, capsys, "--steps", "7", "--lr", "0", "--resume")
    assert [step["loss"] for step in resumed] == [step["loss"] for step in whole[6:]]


def test_a_checkpoint_is_saved_at_the_end(workspace, capsys) -> None:
    train(workspace, capsys, "--steps", "5", "--save-every", "2")
    assert sorted(path.name for path in (workspace / "saved").iterdir()) == [
        *("global_step2", "global_step4", "global_step5", "latest")
    ]


def test_training_goes_on_while_a_checkpoint_is_saved(workspace, capsys) -> None:
    shown = [
        argument for argument in train_arguments(workspace, "--steps", "8", "--save-every", "5") if argument != "--json"
    ]
    assert main(shown) == 0
    told = re.findall(r"^(step \d|saved .*global_step\d)", capsys.readouterr().err, re.MULTILINE)
    first = told.index(f"saved {workspace / 'saved' / 'global_step5'}")
    assert told[first - 1] == "step 6"  # the next step wrote it
    assert told[-1] == f"saved {workspace / 'saved' / 'global_step8'}"
    assert len(told) == 10


def test_resume_on_other_data_warns(workspace, capsys) -> None:
    train(workspace, capsys, "--steps", "2", "--save-every", "2")
    (workspace / "text.txt").write_text("five boxing wizards jump quickly at dawn\n" * 400)
    capsys.readouterr()
    assert main(train_arguments(workspace, "--steps", "3", "--resume")) == 0
    assert "was trained on other data" in capsys.readouterr().err


@pytest.mark.parametrize(("clipping", "message"), [(1.0, "the last 30 steps were skipped"), (0.0, "the loss of step")])
def test_endless_nan_ends_with_an_error(clipping, message, workspace, capsys) -> None:
    """With clipping such steps are skipped (`deferred`), without it the first one ends the run (`backward`)."""
    write_config(workspace, gradient_clipping=clipping)
    assert main(train_arguments(workspace, "--steps", "100", "--lr", "1e30")) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert len(lines(captured.out)) < 100
    assert not list((workspace / "swap").iterdir())


def test_a_checkpoint_that_cannot_be_written_is_not_reported_as_saved(workspace, capsys, monkeypatch) -> None:
    def finish(*_: Any) -> None:
        raise StorageError(errno.ENOSPC, "No space left on device", "saved", None)

    monkeypatch.setattr("infinity.checkpoint.background.Saving.finish", finish)
    assert main(train_arguments(workspace, "--steps", "100", "--save-every", "1")) == 2
    captured = capsys.readouterr()
    assert "error: [Errno 28] the checkpoint of step 1" in captured.err
    assert f"saved {workspace}" not in captured.err
    assert len(lines(captured.out)) < 100


def test_resume_without_a_checkpoint_starts_afresh(workspace, capsys) -> None:
    assert [s["step"] for s in train(workspace, capsys, "--steps", "2", "--resume")] == [1, 2]


def test_the_learning_rate_of_the_command_line_wins(workspace, capsys) -> None:
    assert train(workspace, capsys, "--steps", "1", "--lr", "0.5")[0]["lr"] == 0.5


@pytest.mark.parametrize("schedule", [None, {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}])
def test_the_learning_rate_of_the_command_line_wins_on_resume(schedule, workspace, capsys) -> None:
    if schedule is not None:
        write_config(workspace, scheduler=schedule)
    train(workspace, capsys, "--steps", "4", "--save-every", "4")
    kept = train(workspace, capsys, "--steps", "6", "--resume")
    changed = train(workspace, capsys, "--steps", "6", "--resume", "--lr", "0.5")
    assert [step["lr"] for step in changed] == [pytest.approx(step["lr"] * 0.5 / 3e-3) for step in kept]
    assert changed[0]["loss"] == kept[0]["loss"]
    assert changed[1]["loss"] != kept[1]["loss"]


def test_batch_and_device_of_the_command_line(workspace, capsys) -> None:
    one, four = (
        train(workspace, capsys, "--steps", "1", "--micro-batch-size", size, "--device", "cpu")[0]
        for size in ("1", "4")
    )
    tokens = [step["tokens_per_s"] * step["step_s"] for step in (one, four)]
    assert tokens == [pytest.approx(64), pytest.approx(256)]


@pytest.mark.parametrize(("name", "params"), [("llama:125m", 125e6), ("llama:4b", 4.05e9), ("llama:1.3b", 1.35e9)])
def test_sizes_are_what_they_are_called(name, params) -> None:
    model, weights = build_model(name)
    assert weights is None
    assert all(param.is_meta for param in model.parameters())
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(params, rel=0.01)


def test_lines_for_people_end_with_what_moved_where(workspace, capsys) -> None:
    arguments = [argument for argument in train_arguments(workspace, "--steps", "3") if argument != "--json"]
    assert main(arguments) == 0
    shown = capsys.readouterr().err
    assert "step 3/3" in shown
    for row in ("nvme read", "nvme write", "peak host", "loss"):
        assert row in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_training_after_the_step(number, code, workspace) -> None:
    process = Child(["-m", "infinity.cli.main", *train_arguments(workspace, "--steps", "100000")], cwd=ROOT)
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert not list((workspace / "swap").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt3"], "did you mean gpt2"),
        (["--data", "/does/not/exist"], "--data /does/not/exist does not exist"),
        (["--micro-batch-size", "0"], "--micro-batch-size is 0; it must be at least 1"),
        (["--seq-len", "0"], "--seq-len is 0"),
        (["--steps", "-1"], "--steps is -1"),
        (["--save-every", "0"], "--save-every is 0"),
        (["--lr", "nan"], "--lr is nan"),
        (["--device", "tpu"], "tpu"),
        (["--device", "meta"], "device meta is not available; torch sees "),
        (["--seed", str(10**25)], "it must be between"),
        (["--data", "x" * 300], "x: File name too long"),
        (["--seq-len", "100000"], "takes at most 256 tokens"),
        (["--tokenizer", "/does/not/exist"], "--tokenizer /does/not/exist cannot be loaded"),
        (["--config", "/does/not/exist.json"], "cannot read the configuration"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message, workspace, capsys) -> None:
    assert main(train_arguments(workspace, "--steps", "1", *arguments)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimisation": {}}, "did you mean `zero_optimization`"),
        ({"tiering": {"nvme": [{"path": "/dev/null/below"}]}}, "cannot use this nvme path"),
        ({"tiering": {"nvme": [{"path": "."}], "host_memory": "10KiB"}}, "needs at least"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.5}}}, "which offloads nothing"),
    ],
)
def test_bad_configurations_are_one_clear_line(changes, message, workspace, capsys) -> None:
    write_config(workspace, **changes)
    assert main(train_arguments(workspace, "--steps", "1")) == 2
    assert message in capsys.readouterr().err
    assert not list((workspace / "swap").iterdir())


def test_env_tells_what_is_here(tmp_path, capsys) -> None:
    assert main(["env", "--path", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["io"]["chosen_by_auto"] in ("io_uring", "threads", "aiofiles")
    path = report["paths"][str(tmp_path)]
    assert path["writable"] is True
    assert isinstance(path["direct_io"], bool)
    assert 0 < path["free_bytes"] < path["total_bytes"]
    assert report["memory"]["total_bytes"] > report["memory"]["available_bytes"] > 0
    assert report["processor"]["optimizer_threads"] >= 1
    assert main(["env", "--path", "/does/not/exist"]) == 0
    assert "no such directory" in capsys.readouterr().out


def test_a_mistyped_option_is_named_with_the_one_that_it_resembles(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "gpt2:tiny", "--stesp", "4"])
    assert "infinity train: error: unrecognized arguments: --stesp 4 (did you mean --steps?)" in capsys.readouterr().err


def test_a_home_directory_is_expanded_in_a_model_and_a_tokenizer(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for option in ("--model", "--tokenizer"):
        assert main(["train", f"{option}=~/mine", "--data", __file__, "--nvme", str(tmp_path), "--no-save"]) == 2
        assert f"{option} {tmp_path}/mine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("streams", "code", "shown"),
    [
        (">/dev/full", 2, "error: the output cannot be written: No space left on device"),
        (">&-", 0, ""),
        ("2>&- >&- <&-", 0, ""),
    ],
)
def test_standard_streams_that_are_full_or_closed(streams, code, shown) -> None:
    script = """
import os, sys
from infinity.cli import configs, main
listing = configs.run
def run(args):
    low = os.open("/dev/null", os.O_RDONLY)
    assert low > 2  # a file with the number of a standard stream would get what libraries write to it
    return listing(args)
configs.run = run
sys.exit(main.main(["configs"]))
"""
    command = ["bash", "-c", f'"$0" -c "$1" {streams}', sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (code, shown, "")


def test_help_is_quick_and_needs_no_torch() -> None:
    script = """
import sys
from infinity.cli.main import main
try:
    main(["--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("seconds", "told"), [(0.9, False), (1.2, False), (4.0, True)])
def test_a_precision_that_the_processor_computes_slowly_is_told(seconds, told, monkeypatch) -> None:
    monkeypatch.setattr(precision, "_layer", lambda device, dtype: [lambda: 1.0 if dtype is torch.float32 else seconds])

    def words(name: str, device: str) -> str:
        engine = SimpleNamespace(config=SimpleNamespace(precision=name), device=torch.device(device))
        return "".join(_slow_precision(cast(Engine, engine)))

    assert words("fp32", "cpu") == words("bf16", "meta") == ""
    for name in ("bf16", "fp16"):
        assert (f"matrix products in {name} take 4.0 times as long" in words(name, "cpu")) == told
    assert faster_precision(product_seconds(torch.device("cpu"), ("fp32", "bf16"))) == ("fp32" if told else "bf16")
