"""Whatever ends `infinity train`, the next run goes on with the same numbers and nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infinity.cli.main import main
from infinity.cli.training.data import Samples
from tests.cli.test_commands import ROOT, lines, train_arguments, workspace, write_config
from tests.prepared import Child

__all__ = ["workspace"]  # a fixture

TIMEOUT_S = 90


def running(workspace: Path, *more: str) -> Child:
    """`infinity train` in a process of its own."""
    return Child(["-m", "infinity.cli.main", *train_arguments(workspace, *more)], cwd=ROOT)


def wait_for(condition: Callable[[], bool], process: Child) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def catches_sigterm(process: Child) -> bool:
    """The training loop has begun, in a run without swap files: nothing else takes this signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("steps_before", [1, 4])
def test_kill_9_and_resume_continue_bit_for_bit(steps_before, workspace, capsys) -> None:
    with running(workspace, "--steps", "100000", "--save-every", "1") as process:
        for _ in range(steps_before):
            process.stdout.readline()
        wait_for((workspace / "saved" / "latest").exists, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    assert list((workspace / "swap").iterdir()), "a killed run cannot clean up"
    saved = int((workspace / "saved" / "latest").read_text().removeprefix("global_step"))
    steps = str(saved + 3)
    assert main(train_arguments(workspace, "--steps", steps, "--save-every", "1", "--resume")) == 0
    resumed = {step["step"]: step["loss"] for step in lines(capsys.readouterr().out)}
    assert list(resumed) == [saved + 1, saved + 2, saved + 3]
    assert not list((workspace / "swap").iterdir())
    assert not list((workspace / "saved").glob(".tmp*"))
    assert main(train_arguments(workspace, "--steps", steps, "--save-dir", str(workspace / "other"))) == 0
    whole = {step["step"]: step["loss"] for step in lines(capsys.readouterr().out)}
    assert resumed == {step: whole[step] for step in resumed}


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, {130}), (signal.SIGTERM, {143, -signal.SIGTERM})])
def test_a_signal_while_the_model_is_placed_leaves_nothing_behind(number, codes, workspace) -> None:
    write_config(workspace, tiering={"nvme": [{"path": str(workspace / "swap")}]})
    with running(workspace, "--model", "gpt2") as process:
        wait_for(lambda: any((workspace / "swap").iterdir()), process)
        process.send_signal(number)
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode in codes, errors
        assert output == ""
        assert "Traceback" not in errors
    assert not list((workspace / "swap").iterdir())


def test_a_signal_saves_what_was_trained(workspace, capsys) -> None:
    with running(workspace, "--steps", "100000", "--save-every", "100000") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 143
    last = max([1, *(step["step"] for step in lines(output))])
    assert sorted(path.name for path in (workspace / "saved").iterdir()) == [f"global_step{last}", "latest"]
    assert main(train_arguments(workspace, "--steps", str(last + 1), "--resume")) == 0
    assert [step["step"] for step in lines(capsys.readouterr().out)] == [last + 1]


def test_the_second_sigint_does_not_wait_for_the_step(workspace) -> None:
    write_config(workspace, gradient_accumulation_steps=100_000, zero_optimization={"stage": 3}, tiering={})
    with running(workspace) as process:
        wait_for(lambda: catches_sigterm(process), process)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)  # it is still in its step, which takes minutes
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130, errors
        assert output == ""
        assert "Traceback" not in errors


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_second_sigint_is_not_lost_with_what_it_raises(workspace, monkeypatch, capsys) -> None:
    """Python ignores what is raised in a `__del__`, and a collection may run any library's at any time."""
    batch, taken = Samples.batch, []

    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def take(self: Samples, first: int, size: int) -> dict[str, torch.Tensor]:
        taken.append(first)
        if len(taken) == 2:
            signal.raise_signal(signal.SIGINT)
        if len(taken) == 3:
            Interrupted()
        return batch(self, first, size)

    monkeypatch.setattr(Samples, "batch", take)
    write_config(workspace, gradient_accumulation_steps=100_000, zero_optimization={"stage": 3}, tiering={})
    assert main(train_arguments(workspace)) == 130
    assert len(taken) == 3
    assert "interrupted" in capsys.readouterr().err


def test_what_a_signal_interrupts_is_reported_as_json_lines_only(workspace) -> None:
    with running(workspace, "--steps", "100000") as process:
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        numbers = [first["step"], *(step["step"] for step in lines(output))]
        assert numbers == list(range(1, len(numbers) + 1))


def test_steps_on_the_drives_are_resumed_without_a_checkpoint(workspace, capsys) -> None:
    swap = workspace / "swap"
    assert main(train_arguments(workspace, "--steps", "6")) == 0
    whole = lines(capsys.readouterr().out)
    write_config(workspace, tiering={"nvme": [{"path": str(swap)}], "tile_size": "64KiB", "crash_consistent": True})
    assert main(train_arguments(workspace, "--steps", "3")) == 0
    captured = capsys.readouterr()
    assert "step 3 stays in" in captured.err
    assert main(train_arguments(workspace, "--steps", "6")) == 2
    assert "at step 3" in capsys.readouterr().err
    assert main(train_arguments(workspace, "--steps", "6", "--resume", "--save-every", "6")) == 0
    losses = [step["loss"] for step in lines(captured.out) + lines(capsys.readouterr().out)]
    assert losses == [step["loss"] for step in whole]
    assert not list(swap.iterdir())
    assert main(train_arguments(workspace, "--steps", "7", "--resume")) == 0  # from the checkpoint
    assert [step["step"] for step in lines(capsys.readouterr().out)] == [7]
