"""What a run tells `infinity top`: told as it trains, gone when it ends, noticed if it is killed; never in the way."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.cli.main import main, make_parser
from infinity.cli.watching.tables import table
from infinity.setup import initialize
from infinity.telemetry import status
from infinity.telemetry.status import Publisher, read_runs
from infinity.telemetry.tasks import read_task
from tests.behaviour.reference import Placement, Recipe, batches, tiny_gpt2
from tests.test_typed_records import mutants

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """A directory of the test's own, and no other."""
    monkeypatch.setattr(status, "directories", lambda: [tmp_path / "status"])
    monkeypatch.setattr(status, "PERIOD_S", 0.01)
    return tmp_path / "status"


def eventually(found, what: str):
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return value


def test_an_engine_tells_what_it_does_until_it_is_closed(tmp_path, place) -> None:
    """As a script of the Python API trains, with its states on a drive."""
    config = Recipe().config(Placement("nvme", "nvme", tmp_path))
    engine, *_ = initialize(model=tiny_gpt2(), config=config)
    losses = []
    for ids in batches(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.synchronize()
    engine.tell(steps=7, tokens=100)  # what is told with it was looked at when all was at rest
    wanted = (3, 7)
    run = eventually(
        lambda: next((run for run in read_runs() if (run.facts["step"], run.facts["steps"]) == wanted), None), "no word"
    )
    facts = run.facts
    assert run.alive
    assert not run.silent
    assert run.pid == os.getpid()
    assert facts["loss"] == pytest.approx(losses[-1])
    assert facts["lr"] == engine.get_lr()[0]
    assert facts["tokens_per_s"] == pytest.approx(100 / facts["step_s"])
    assert facts["tiers"]["host"] == {
        "used_bytes": engine.tiers()["host"].used_bytes,
        "peak_bytes": engine.stats().peak_bytes["host"],
        "capacity_bytes": engine.tiers()["host"].capacity_bytes,
    }
    assert 0 < facts["tiers"]["nvme"]["used_bytes"] <= facts["tiers"]["nvme"]["capacity_bytes"]
    assert facts["in_flight"] == {"read_bytes": 0, "write_bytes": 0}
    assert [drive["paths"] for drive in facts["drives"]] == [[str(tmp_path)]]
    assert facts["stall_s"] == engine.stats().stall_s
    assert place.stat().st_mode & 0o777 == 0o700
    engine.close()
    assert not list(place.iterdir())


def test_nothing_is_told_where_the_configuration_says_so(place) -> None:
    config = Recipe().config(Placement())
    config.setdefault("tiering", {})["status"] = False
    engine, *_ = initialize(model=tiny_gpt2(), config=config)
    engine.close()
    assert not place.exists()


def test_a_run_that_is_killed_counts_as_gone_and_its_file_goes(place) -> None:
    script = f"""
import time
from pathlib import Path
from infinity.telemetry import status
status.directories = lambda: [Path({str(place)!r})]
publisher = status.Publisher(lambda: {{"step": 5}})
time.sleep({TIMEOUT_S})
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        (run,) = eventually(read_runs, "no word")
        assert run.alive
        assert run.facts["step"] == 5
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
    (run,) = read_runs()
    assert not run.alive
    os.utime(run.path, (0, time.time() - 3600))
    status.forget_ended()
    assert not list(place.glob("*.json"))


def test_what_fails_in_publishing_stays_there(place) -> None:
    """A sample that fails, and a directory that goes away, cost a word or two, and no more."""
    calls = []

    def sample() -> dict[str, int]:
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("changed size during iteration")
        return {"step": len(calls)}

    publisher = Publisher(sample)
    eventually(lambda: read_runs(), "no word after an error")
    for path in place.iterdir():
        path.unlink(missing_ok=True)
    eventually(lambda: read_runs(), "no word after the file went")
    publisher.close()
    assert not list(place.iterdir())
    publisher.close()


def test_directories_that_others_may_write_to_are_neither_written_nor_read(place) -> None:
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    told = []
    publisher = Publisher(lambda: told.append(1) or {"step": 1})
    eventually(lambda: len(told) > 2, "no sample")
    publisher.close()
    assert not list(place.iterdir())
    (place / "1-1.json").write_text("{}")
    assert read_runs() == []


@pytest.mark.timeout(30)
def test_what_is_no_file_is_left_out_and_named_and_nobody_waits_for_it(two_runs, place, capsys) -> None:
    os.mkfifo(place / "1-1.json")
    (place / "2-1.json").mkdir()
    (place / "3-1.json").symlink_to("/dev/zero")
    (place / "4-1.json").write_text("{")
    assert main(["top", "--once"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:3]] == ["pid", "11", "4194304"]
    assert sorted(Path(line.split()[0]).name for line in shown[3:]) == [f"{number}-1.json" for number in range(1, 5)]
    assert all("is no status of a run, and is left out:" in line for line in shown[3:])


def test_a_status_of_any_wrong_field_is_shown_or_left_out(place, capsys) -> None:
    place.mkdir(mode=0o700)
    path = place / "1-1.json"
    parser, _ = make_parser()  # once, which takes longer than what is called
    calls = [parser.parse_args(["top", *more]) for more in (["--once"], ["--once", "11"], ["--once", "x"], ["--json"])]
    for name, facts in mutants({**FACTS, "pid": 11, "started": 1}):
        path.write_text(json.dumps(facts))
        for arguments in calls:
            assert arguments.run(arguments) == 0, name
    assert "is no status of a run" in capsys.readouterr().out


def test_a_command_line_of_others_moves_no_cursor(place, capsys) -> None:
    place.mkdir(mode=0o700)
    hostile = "\x1b]0;title\x07\x1b[2J\u202e"
    facts = {**FACTS, "pid": 11, "started": 1, "command": [hostile], "directory": hostile}
    (place / "1-1.json").write_text(json.dumps({**facts, "phase": hostile, "stall_s": {hostile: 1.0}}))
    assert main(["top", "--once"]) == 0
    assert main(["top", "--once", "11"]) == 0
    assert main(["top", "--json", "no-such"]) == 2
    shown = "".join(capsys.readouterr()).replace("\n", "")
    assert "\\x1b]0;title\\x07" in shown
    assert shown.isprintable()


def test_arguments_of_any_bytes_are_told(place, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", os.fsdecode(b"--data=\xff")])
    publisher = Publisher(lambda: {"step": 1})
    (run,) = eventually(read_runs, "no word")
    publisher.close()
    assert run.facts["command"] == ["train.py", "--data=\\udcff"]


def test_a_name_that_the_system_cuts_within_a_character_is_no_error(place) -> None:
    """As that of a script `обучение_модели.py`, of which the system keeps 15 bytes."""
    set_name, task = 15, Path("/proc/self")
    before = read_task(task).name
    libc = ctypes.CDLL(None)
    libc.prctl(set_name, "обучение_модели.py".encode(), 0, 0, 0)
    try:
        assert read_task(task).name.startswith("обучени")
        publisher = Publisher(lambda: {"step": 1})
        (run,) = eventually(read_runs, "no word")
        publisher.close()
    finally:
        libc.prctl(set_name, before.encode(), 0, 0, 0)
    assert run.alive


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"version": 99, "pid": 1}'])
def test_files_that_are_something_else_are_left_out(text, place) -> None:
    place.mkdir(mode=0o700)
    (place / "1-1.json").write_text(text)
    assert read_runs() == []


def test_a_run_in_another_container_lives_as_long_as_it_speaks(place) -> None:
    place.mkdir(mode=0o700)
    path = place / "1-1.json"
    path.write_text(json.dumps({"version": 1, "pid": 1, "started": 7, "namespace": -1, "began_unix_s": 0}))
    assert [run.alive for run in read_runs()] == [True]
    os.utime(path, (0, time.time() - 2 * status.SILENT_S))
    assert [run.alive for run in read_runs()] == [False]


FACTS = {
    "version": 1,
    "namespace": -1,
    "began_unix_s": 1.0,
    "command": ["train.py", "--model", "x" * 100],
    "directory": "/somewhere",
    "rank": 0,
    "ranks": 2,
    "step": 123456,
    "steps": 1000000,
    "phase": "backward",
    "loss": 12.3456,
    "lr": 1e-4,
    "grad_norm": 1.5,
    "step_s": 123.45,
    "tokens_per_s": 123456.0,
    "phase_s": {"forward": 1.0, "backward": 2.0, "update": 1.0},
    "stall_s": {"disk_read": 1.0, "optimizer": 0.2},
    "waiting": {"cause": "disk_read", "for_s": 0.5},
    "tiers": {"host": {"used_bytes": 1 << 30, "peak_bytes": 1 << 30, "capacity_bytes": 2 << 30}},
    "drives": [{"paths": ["/nvme0"], "read_bytes_per_s": 2e9, "write_bytes_per_s": 1e9}],
    "in_flight": {"read_bytes": 3 << 20, "write_bytes": 1 << 20},
}


@pytest.fixture
def two_runs(place) -> None:
    place.mkdir(mode=0o700)
    for pid in (11, 4194304):
        (place / f"{pid}-1.json").write_text(json.dumps({**FACTS, "pid": pid, "started": 1}))


def test_top_prints_a_row_a_run_that_fits(two_runs, capsys) -> None:
    assert main(["top", "--once"]) == 0
    wide = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in wide] == ["pid", "11", "4194304"]
    for word in ("123456/1000000", "12.3456", "50%", "2.00", "30% disk read 25%", "123.5k", "train.py"):
        assert word in wide[1]
    for columns in (30, 40, 80, 120):
        lines = table(read_runs(), columns)
        assert max(len(line) for line in lines) <= columns
        assert "step" in lines[0]


def test_a_process_that_is_there_and_says_nothing_is_called_silent(place, capsys) -> None:
    place.mkdir(mode=0o700)
    me = {"pid": os.getpid(), "started": status._started(os.getpid()), "namespace": status._namespace()}
    path = place / "1-1.json"
    path.write_text(json.dumps({**FACTS, **me}))
    os.utime(path, (0, time.time() - 60))
    (run,) = read_runs()
    assert (run.alive, run.silent) == (True, True)
    assert main(["top", "--once"]) == 0
    assert "silent for 60 s" in capsys.readouterr().out
    path.write_text(json.dumps({**FACTS, **me, "started": me["started"] - 1}))  # another process had this number
    assert [run.alive for run in read_runs()] == [False]


def test_top_tells_all_of_one_run(two_runs, capsys) -> None:
    assert main(["top", "--once", "4194304"]) == 0
    shown = capsys.readouterr().out
    assert "pid 4194304  rank 0 of 2  runs (backward)" in shown
    assert "pid 11" not in shown
    assert "waits: 30% disk read 25%, optimizer 5%; now for disk read, 0.5 s" in shown
    assert "in flight: 3.00 MiB to read, 1.00 MiB to write" in shown
    assert main(["top", "--once", "no-such"]) == 0
    assert "no-such has ended" in capsys.readouterr().out
    assert main(["top", "--json", "no-such"]) == 2
    assert "no run is called no-such; there are: 11 (train.py" in capsys.readouterr().err


def test_top_as_json(two_runs, capsys) -> None:
    assert main(["top", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["pid"] for run in runs] == [11, 4194304]
    assert runs[0] == {**FACTS, "pid": 11, "started": 1, "alive": True, "silent": False, "age_s": runs[0]["age_s"]}


def test_top_of_nothing(capsys) -> None:
    assert main(["top", "--once"]) == 0
    assert "no training of this user runs" in capsys.readouterr().out
