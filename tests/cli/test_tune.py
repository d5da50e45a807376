"""`infinity tune`: what it writes and says, and the processes that measure for it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.cli.tuning import launcher, worker
from infinity.cli.tuning.launcher import TrialJob, Trials, Workers, measure_in_process
from infinity.config import load_config, read_json
from infinity.errors import InfinityError
from infinity.tuning import Bounds, Limits, MachineJob, Outlook
from tests.cli.test_report import check as check_page
from tests.tuning.test_search import MACHINE
from tests.tuning.test_space import VALUES

# Stands for the process that measures: speaks its language, and needs a moment for what that takes seconds for.
STAND_IN = """
import json, os, sys, time
say = lambda event, **facts: print(json.dumps({"event": event, **facts}), flush=True)
machine = json.loads(%r)
for line in sys.stdin:
    job = json.loads(line)
    say("began", pid=os.getpid())
    if job["kind"] == "machine":
        say("doing", what="the drive")
        say("machine", found=machine)
        say("ended", code=0)
        continue
    tiering = job["values"]["tiering"]
    sys.stdout.buffer.write(b"a library's remark of any bytes: \\xff\\n")
    if tiering.get("accumulation") == "layer":
        say("error", error="no")
        say("ended", code=1)
        continue
    step_s = 1.0 if tiering.get("update_schedule") == "barrier" else 0.5
    if tiering.get("tile_size"):
        step_s *= 4
    say("ready", init_s=0.1)
    for number in range(job["warm_up"] + job["steps"]):
        counts = number >= job["warm_up"]
        say("step", step_s=step_s, counts=counts, peak_host_bytes=1, peak_process_bytes=2, written_bytes=3)
    say("ended", code=0)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Have a script, by default the one above, measure in place of the real one."""
    script = tmp_path / "script.py"
    monkeypatch.setattr(launcher, "_SCRIPT", script)

    def write(text: str) -> None:
        script.write_text(text)

    profile = json.loads(json.dumps(MACHINE).replace("bfloat16", "float32"))
    write(STAND_IN % json.dumps(profile))
    return write


def config_file(tmp_path: Path) -> Path:
    values = {**VALUES, "bf16": {"enabled": False}, "my.notes": None}
    values.pop("my.notes")
    values["tiering"] = {**VALUES["tiering"], "nvme": [{"path": str(tmp_path)}], "timeline": str(tmp_path / "t.json")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return path


def tune(tmp_path: Path, *more: str) -> int:
    arguments = ["tune", str(config_file(tmp_path)), "--model", "gpt2:tiny", "--out", str(tmp_path / "tuned.json")]
    return main([*arguments, "--seq-len", "16", "--keep", "placement", *more])


def test_what_is_written_trains_and_says_why(stand_in, tmp_path, capsys) -> None:
    assert tune(tmp_path, "--keep", "batch", "--html", str(tmp_path / "report.html")) == 0
    out = capsys.readouterr().out
    assert "2.00 times as fast as the given configuration" in out
    assert re.search(r"updates +barrier -> (backward|deferred)", out)
    given, tuned = read_json(config_file(tmp_path)), read_json(tmp_path / "tuned.json")
    assert [key for key in tuned if key in given] == list(given)
    assert load_config(tuned).train_batch_size == load_config(given).train_batch_size
    assert tuned["tiering"]["timeline"] == given["tiering"]["timeline"]
    assert not (tmp_path / "t.json").exists()
    assert set(tuned["tuned"]["why"]) >= {"placement", "schedule", "tile", "aio", "batch", "memory", "state_format"}
    assert tuned["tuned"]["step_s"] == {"given": 1.0, "tuned": 0.5}
    page = (tmp_path / "report.html").read_text()
    check_page(page)
    assert page.count("<svg") >= 2
    assert not re.search(r"https?:|<script|<link|src=|@import|url\(", page)
    assert "barrier" in page


def test_json_and_a_tuned_file_that_is_tuned_again(stand_in, tmp_path, capsys) -> None:
    assert tune(tmp_path, "--json", "--keep", "batch") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["changed"]
    assert facts["ratio"] == pytest.approx(0.5)
    assert facts["tuned"]["batch"] == facts["given"]["batch"]
    assert facts["config"] == read_json(tmp_path / "tuned.json")
    arguments = ["tune", str(tmp_path / "tuned.json"), "--model", "gpt2:tiny", "--out", str(tmp_path / "again.json")]
    assert main([*arguments, "--seq-len", "16", "--json", "--keep", "batch"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert not again["changed"]
    assert "no setting is faster than the given configuration" in again["headline"]
    first, second = read_json(tmp_path / "tuned.json"), read_json(tmp_path / "again.json")
    assert first.pop("tuned") != second.pop("tuned")
    assert first == second


def test_an_auto_budget_is_limited_even_where_nothing_else_changes(stand_in, tmp_path, capsys) -> None:
    keep = [word for knob in ("schedule", "tile", "aio", "batch", "memory") for word in ("--keep", knob)]
    values = read_json(config_file(tmp_path))
    values["tiering"]["host_memory"] = "auto"
    path = tmp_path / "auto.json"
    path.write_text(json.dumps(values))
    out = tmp_path / "tuned.json"
    arguments = ["tune", str(path), "--model", "gpt2:tiny", "--out", str(out), "--seq-len", "16", "--keep", "placement"]
    assert main([*arguments, *keep, "--host-memory", "8MiB"]) == 0
    assert "no setting is faster than the given configuration" in capsys.readouterr().out
    tuned = read_json(out)
    assert tuned["tiering"].pop("host_memory") == "8MiB"
    tuned.pop("tuned")
    values["tiering"].pop("host_memory")
    assert tuned == values


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_best_so_far_and_resume_goes_on(
    number, code, stand_in, tmp_path, monkeypatch, capsys
) -> None:
    measure, asked = Trials.measure, []

    def interrupted(self, setting, *limits):
        asked.append(setting)
        if sum(one.schedule != "barrier" and one.tile is None for one in asked) == 3:  # after it has won
            signal.raise_signal(number)
        return measure(self, setting, *limits)

    monkeypatch.setattr(Trials, "measure", interrupted)
    assert tune(tmp_path, "--json", "--keep", "batch") == code
    facts = json.loads(capsys.readouterr().out)
    assert facts["ending"] == "interrupted; --resume continues"
    assert facts["ratio"] == pytest.approx(0.5)
    assert read_json(tmp_path / "tuned.json") == facts["config"]
    assert tune(tmp_path) == 2
    assert "holds an earlier search: give --resume" in capsys.readouterr().err
    assert tune(tmp_path, "--resume", "--keep", "aio") == 2
    assert "it was begun with another keep" in capsys.readouterr().err
    assert tune(tmp_path, "--resume", "--json", "--keep", "batch") == 0
    later = json.loads(capsys.readouterr().out)
    assert len(later["measured"]) > len(facts["measured"])
    assert later["ending"] == "nothing is left that could win"
    assert asked.count(asked[0]) <= 3, "the given configuration was measured all over again"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq-len", "1024"], "gpt2:tiny takes at most 256 tokens"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--host-memory", "1MiB"], "tiering.host_memory is 1.00 GiB, above --host-memory 1.00 MiB"),
        (["--out", "/nowhere/tuned.json"], "--out /nowhere/tuned.json: there is no such directory"),
        (["--out", "config.json"], "which is not overwritten: name another file"),
        (["--html", "/nowhere/page.html"], "there is no such directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(options, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert tune(tmp_path, *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "tuned.search.json").exists()


def test_one_of_several_ranks_is_refused(tmp_path, monkeypatch, capsys) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert tune(tmp_path) == 2
    assert "not as one of several ranks" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["0", "5x", "-3m"])
def test_a_budget_is_a_time(budget, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        tune(tmp_path, f"--budget={budget}")
    assert "write 90s, 5m or 1.5h" in capsys.readouterr().err


# The processes #


def trials_of(workers: Workers, tmp_path: Path, **more) -> tuple[Trials, Outlook]:
    values = read_json(config_file(tmp_path))
    machine = json.loads(json.dumps(MACHINE).replace("bfloat16", "float32"))
    from infinity.planner import decoder_of, shape_of  # noqa: PLC0415

    outlook = Outlook(decoder_of(shape_of(20e6)), values, machine, Bounds(Limits(), 64 << 30, 300 << 20), 16)
    return Trials(workers, outlook, TrialJob("gpt2:tiny", 16, False, None, 3, **more)), outlook


def test_a_trial_that_cannot_win_is_ended(stand_in, tmp_path) -> None:
    stand_in(STAND_IN.replace('say("step"', 'time.sleep(0.05); say("step"') % json.dumps(MACHINE))
    with Workers() as workers:
        trials, outlook = trials_of(workers, tmp_path)
        assert trials.measure(outlook.given, float("inf"), 60.0).step_s == (1.0,) * 3
        slow = trials.measure(outlook.given, 0.9, 60.0)
        assert slow.stopped
        assert not slow.error
        assert len(slow.step_s) == 2
        far = trials.measure(outlook.given, 0.3, 60.0)
        assert far.stopped
        assert not far.step_s, "not even the steps to warm up were waited for"


def test_the_time_that_is_left_ends_a_trial_and_its_process(stand_in, tmp_path) -> None:
    stand_in(
        "import os, sys, time\nsys.stdin.readline()\n"
        'print(\'{"event": "began", "pid": %d}\' % os.getpid(), flush=True)\ntime.sleep(600)\n'
    )
    with Workers() as workers:
        trials, outlook = trials_of(workers, tmp_path)
        start_s = time.monotonic()
        run = trials.measure(outlook.given, float("inf"), 0.5)
        assert run.stopped
        assert not run.step_s
        assert time.monotonic() - start_s < 10


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("os.kill(os.getpid(), 9)", "killed by the system, usually because memory ran out"),
        ("print('why it was', file=sys.stderr); sys.exit(3)", "it ended with 3: why it was"),
    ],
)
def test_a_process_that_dies_is_told_with_its_last_word(ending, words, stand_in, tmp_path) -> None:
    stand_in(f"import os, sys\nsys.stdin.readline()\n{ending}\n")
    with Workers() as workers:
        trials, outlook = trials_of(workers, tmp_path)
        for _ in range(2):  # the next job starts another one
            assert words in trials.measure(outlook.given, float("inf"), 60.0).error
        with pytest.raises(InfinityError, match="this machine could not be measured: it"):
            measure_in_process(workers, MachineJob((), (4096, 1, "auto"), 1, False, False, "float32"), None, print)


def test_the_word_of_a_process_that_ends_before_it_is_listened_to_is_told(stand_in, monkeypatch, tmp_path) -> None:
    stand_in("import sys\nprint('why it was', file=sys.stderr)\nsys.exit(3)\n")
    start = Workers._start

    def started(self: Workers) -> subprocess.Popen[str]:
        process = start(self)
        process.wait()
        return process

    monkeypatch.setattr(Workers, "_start", started)
    with Workers() as workers:
        trials, outlook = trials_of(workers, tmp_path)
        assert "it ended with 3: why it was" in trials.measure(outlook.given, float("inf"), 60.0).error


def test_a_worker_trains_and_counts_what_it_wrote(tmp_path, capsys) -> None:
    values = read_json(config_file(tmp_path))
    values["tiering"] = {"nvme": [{"path": str(tmp_path)}], "host_memory": "2200KiB"}
    job = {"kind": "train", "model": "gpt2:tiny", "values": values, "seq_len": 8, "checkpointing": True}
    job |= {"device": "cpu", "steps": 2, "warm_up": 1, "least_s": 0.0, "most_s": 60.0}
    assert worker.perform(job) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["ready", "step", "step", "step"]
    assert 0 < events[-1]["peak_host_bytes"] <= 2200 << 10
    assert events[-1]["peak_process_bytes"] > 50 << 20
    values["tiering"]["host_memory"] = "1KiB"
    assert worker.perform(job) == 1
    error = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert error["event"] == "error"
    assert "tiering.host_memory" in error["error"]


def test_the_parent_forks_a_process_for_each_job(tmp_path, monkeypatch) -> None:
    """The real script, once: it loads, forks, ends a trial that is too slow, and leaves no swap file."""
    drive = tmp_path / "drive"
    drive.mkdir()
    values = read_json(config_file(tmp_path))
    values["tiering"] = {"nvme": [{"path": str(drive)}], "host_memory": "2200KiB"}
    config_file(tmp_path)
    with Workers() as workers:
        trials, outlook = trials_of(workers, tmp_path, warm_up=0, least_s=0.0)
        monkeypatch.setattr(outlook, "values_of", lambda setting: values)
        whole = trials.measure(outlook.given, float("inf"), 120.0)
        assert whole.error == ""
        assert len(whole.step_s) >= 3
        ended = trials.measure(outlook.given, 1e-9, 120.0)
        assert ended.stopped
        assert not list(drive.iterdir())
        assert ended.took_s < whole.took_s, "it was loaded all over again"
