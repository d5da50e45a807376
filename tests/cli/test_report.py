"""`infinity report` says what a run was, from its log: the numbers, and a page that needs nothing else."""

from __future__ import annotations

import json
import os
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import main
from infinity.cli.pages.charts import Series, axis, chart, thinned
from infinity.cli.reporting.lanes import lanes
from infinity.cli.reporting.read import read_log
from infinity.telemetry import Lane
from infinity.telemetry.timeline_summary import Ran
from tests.cli.browser import in_chromium
from tests.cli.test_commands import train_arguments, workspace, write_config
from tests.cli.test_timeline import trace
from tests.test_typed_records import mutants

__all__ = ["trace", "workspace"]  # fixtures

VOID = {"meta", "br"}


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 4.0 / number,
        "step_s": 2.0,
        "tokens_per_s": 100.0,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "skipped": False,
        "forward_s": 0.5,
        "backward_s": 1.0,
        "update_s": 0.3,
        "stall_s": {"disk_read": 0.4, "optimizer": 0.2},
        "nvme_read_bytes": 1 << 30,
        "peak_host_bytes": 3 << 20,
        "tiers": {"host": {"used_bytes": 2 << 20, "peak_bytes": 3 << 20, "capacity_bytes": 4 << 20}},
        **changes,
    }


def write(path: Path, *rows: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return path


@pytest.fixture
def log(tmp_path) -> Path:
    rows = [{"run": {"model": "a <b>", "resume": False}}, *(step(number) for number in range(1, 5))]
    return write(tmp_path / "run.jsonl", *rows, {"step": 4, "eval_loss": 1.5, "eval_tokens": 9, "eval_s": 1.0})


def facts(capsys, *arguments: str) -> dict[str, Any]:
    assert main(["report", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


class Page(HTMLParser):
    """Every element is closed, and nothing is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href", "onload"} & {name for name, _ in attrs}
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Page:
    parser = Page()
    parser.feed(page)
    parser.close()
    assert not parser.open
    assert "nan" not in page.lower()
    return parser


def test_the_numbers(log, capsys) -> None:
    found = facts(capsys, str(log))
    assert (found["first_step"], found["last_step"], found["skipped"], found["resumed"]) == (1, 4, 0, [])
    assert (found["first_loss"], found["last_loss"], found["least_loss"]) == (4.0, 1.0, 1.0)
    assert (found["eval_loss"], found["least_eval_step"]) == (1.5, 4)
    assert (found["train_s"], found["step_s"], found["tokens_per_s"]) == (8.0, 2.0, 100.0)
    assert found["stall_share"] == {"disk_read": pytest.approx(0.2), "optimizer": pytest.approx(0.1)}
    assert found["bytes_a_step"]["nvme_read"] == 1 << 30
    assert found["peak_bytes"]["host"] == 3 << 20
    assert not log.with_suffix(".html").exists()
    assert main(["report", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "waits            30.0% of the time: disk read 20.0%, optimizer 10.0%" in shown
    assert f"written to {log.with_suffix('.html')}" in shown


def test_the_page_is_whole_and_loads_nothing(log, trace, tmp_path) -> None:
    assert main(["report", str(log), "--timeline", str(trace), "--html", str(tmp_path / "out.html")]) == 0
    text = (tmp_path / "out.html").read_text()
    page = check(text)
    assert page.seen.count("svg") == 8
    assert "a &lt;b&gt;" in text
    assert "prefers-color-scheme: dark" in text
    for words in (
        "compute 60%",
        "waits for disk read 20%",
        "outside of its phases 10%",
        "evaluation after step 4: 1.5",
    ):
        assert words in text
    assert "prefetch 25%" in text


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_runs_of_any_length_are_drawn(count, tmp_path) -> None:
    rows = [step(number, loss=None, lr=0.0, grad_norm=None, stall_s={}) for number in range(1, count + 1)]
    log = write(tmp_path / "run.jsonl", *rows)
    assert main(["report", str(log)]) == 0
    text = log.with_suffix(".html").read_text()
    check(text)
    assert len(text) < 200_000
    assert "No loss of this run was finite" in text


def test_a_run_that_was_begun_again_is_one(tmp_path, capsys) -> None:
    """Steps after the checkpoint are trained again, and count as they were then; an earlier run in the file is none."""
    again = [step(number, loss=9.0) for number in (3, 4, 5)]
    first = [{"run": {"resume": False}}, step(1), step(2), step(3), step(4)]
    log = write(tmp_path / "run.jsonl", {"run": {"resume": False}}, step(7), *first, {"run": {"resume": True}}, *again)
    found = facts(capsys, str(log))
    assert (found["first_step"], found["last_step"], found["resumed"]) == (1, 5, [3])
    assert (found["first_loss"], found["last_loss"], found["least_loss"]) == (4.0, 9.0, 2.0)


def test_a_long_run_is_read_in_linear_time(tmp_path) -> None:
    log = write(tmp_path / "run.jsonl", *({"step": number, "step_s": 1, "tokens_per_s": 1} for number in range(10_000)))
    start_s = time.process_time()
    for line in log.read_text().splitlines():
        json.loads(line)
    loaded_s = time.process_time()
    assert len(read_log(log).steps) == 10_000
    assert time.process_time() - loaded_s < 25 * max(loaded_s - start_s, 0.02)


def test_a_half_line_at_the_end_is_left_out(tmp_path, capsys) -> None:
    log = write(tmp_path / "run.jsonl", step(1), end='{"step": 2, "lo')
    assert facts(capsys, str(log))["last_step"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no step of training"),
        ('{"run": {}}\n', "has no step of training"),
        (
            '{"step": 1, "step_s": 1.0, "tokens_per_s": 1}\nnonsense\n',
            "run.jsonl:2 is no line of `infinity train --log`",
        ),
        ("[1]\n", "run.jsonl:1 is no line"),
        ('{"step": "1", "step_s": 1}\n', "run.jsonl:1 is no line"),
    ],
)
def test_files_that_are_no_logs_are_refused(text, message, tmp_path, capsys) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    assert main(["report", str(tmp_path / "run.jsonl")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.timeout(30)
def test_pipes_are_refused_without_waiting(log, tmp_path, capsys) -> None:
    os.mkfifo(tmp_path / "pipe")
    for arguments in (["report", "pipe"], ["report", "run.jsonl", "--timeline", "pipe"], ["timeline", "pipe"]):
        assert main([str(tmp_path / word) if (tmp_path / word).exists() else word for word in arguments]) == 2
        assert "it is no regular file" in capsys.readouterr().err


def test_a_line_of_any_wrong_field_is_refused_or_reported(log, capsys) -> None:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    codes = set()
    for index in (0, 1, len(rows) - 1):
        for name, changed in mutants(rows[index]):
            write(log, *rows[:index], changed, *rows[index + 1 :])
            code = main(["report", str(log)])
            codes.add(code)
            assert code == 0 or f"{log}:{index + 1} is no line" in capsys.readouterr().err, name
    assert codes == {0, 2}


def test_text_of_a_log_moves_no_cursor(tmp_path, capsys) -> None:
    assert main(["report", str(write(tmp_path / "run.jsonl", step(1, stall_s={"\x1b[2J": 1.0})))]) == 0
    (tmp_path / "run.jsonl").write_text("\x1b[2J\n")
    assert main(["report", str(tmp_path / "run.jsonl")]) == 2
    shown = "".join(capsys.readouterr()).replace("\n", "")
    assert "x1b[2J" in shown
    assert shown.isprintable()


def test_a_name_that_is_not_utf8_is_shown(tmp_path, capsys) -> None:
    write(tmp_path / "run\udcff.jsonl", step(1))
    assert main(["report", str(tmp_path / "run\udcff.jsonl")]) == 0
    assert "<svg" in (tmp_path / "run\udcff.html").read_text()
    assert "run\\udcff.html" in capsys.readouterr().out


def test_places_that_cannot_be_are_refused(log, tmp_path, capsys) -> None:
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "missing cannot be read" in capsys.readouterr().err
    assert main(["report", str(log), "--html", str(log)]) == 2
    assert "is the log itself" in capsys.readouterr().err
    assert main(["report", str(log), "--html", str(tmp_path / "no" / "such")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_train_logs_is_reported(workspace, capsys) -> None:
    """With the timeline that it has recorded; what --json prints is enough for the same numbers."""
    tiering = json.loads((workspace / "config.json").read_text())["tiering"]
    write_config(workspace, tiering={**tiering, "timeline": str(workspace / "trace.json")})
    log, printed = workspace / "run.jsonl", workspace / "printed.jsonl"
    assert main(train_arguments(workspace, "--steps", "3", "--save-every", "3", "--log", str(log))) == 0
    assert main(train_arguments(workspace, "--steps", "5", "--resume", "--log", str(log))) == 0
    printed.write_text(capsys.readouterr().out)
    found = facts(capsys, str(log))
    assert (found["first_step"], found["last_step"], found["resumed"]) == (1, 5, [4])
    assert found["capacity_bytes"]["host"] == 1 << 20
    assert 0 < found["peak_bytes"]["host"] <= 1 << 20
    without = facts(capsys, str(printed))
    for key in ("first_loss", "last_loss", "step_s", "stall_share", "bytes_a_step"):
        assert without[key] == found[key]
    assert main(["report", str(log)]) == 0
    page = (workspace / "run.html").read_text()
    check(page)
    assert "gpt2:tiny" in page
    assert "<h2>Timeline</h2>" in page
    assert main(train_arguments(workspace, "--steps", "1", "--log", str(workspace))) == 2
    assert "--log" in capsys.readouterr().err
    assert not list((workspace / "swap").iterdir())


def test_charts_keep_what_they_are_given() -> None:
    assert thinned([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert thinned([1.0, 2.0], 5) == [1.0, 2.0]
    assert thinned([]) == []
    drawn = chart(axis("x", [0, 1]), axis("y", [0, 2]), [Series("a", [(0, 1), (1, 2)], dots=False, base=[0, 1])])
    (polygon,) = [line for line in drawn.splitlines() if line.startswith("<polygon")]
    assert polygon.count(",") == 4


def test_pages_open_in_a_browser(log, tmp_path) -> None:
    """In Chromium, where it is installed: the page draws all of its curves."""
    assert main(["report", str(log)]) == 0
    dom = in_chromium(log.with_suffix(".html"), tmp_path / "profile", "--dump-dom")
    assert dom.count("</svg>") == 7
    assert "compute 60%" in dom


def test_nothing_of_a_file_is_taken_for_html() -> None:
    """Whatever a reader of files lets through, texts are escaped where the page is made."""
    planted: Any = "<script>alert(1)</script>"
    spans = [Ran(Lane.PHASE, name, at, at + 1, 0, planted) for at, name in enumerate(("forward", "update"))]
    drawn = lanes([*spans, Ran(Lane.PREFETCH, planted, 0.5, 1.5, 0, planted)])
    assert "<script" not in drawn
    assert drawn.count("&lt;script&gt;") >= 3


@pytest.mark.parametrize("change", [{"step": "<script>"}, {"step": None}, {"bytes": "1"}, {"step": 1.5}])
def test_a_timeline_of_other_values_is_refused(change, trace, log, tmp_path, capsys) -> None:
    events = json.loads(trace.read_text())
    for event in events:
        if "args" in event and event["ph"] == "X":
            event["args"] |= change
    trace.write_text(json.dumps(events))
    assert main(["report", str(log), "--timeline", str(trace), "--html", str(tmp_path / "out.html")]) == 2
    assert "is no timeline" in capsys.readouterr().err
