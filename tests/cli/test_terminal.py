"""What is drawn on a terminal, looked at on a real one: it fits, and what is left behind is what was meant to stay."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_commands import ROOT, train_arguments, workspace
from tests.prepared import Child

__all__ = ["workspace"]  # a fixture

TIMEOUT_S = 90
HEIGHT = 30
_SIZE = ("COLUMNS", "LINES")  # which would be the size of another terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A tmux server of its own with one terminal, in which one command runs."""

    def __init__(self, directory: Path, columns: int, command: list[str], environment: dict[str, str]) -> None:
        self._socket = directory / "tmux"
        self._code = directory / "code"
        line = f"{shlex.join(command)}; echo $? > {self._code}; sleep {TIMEOUT_S}"
        size = ["-x", str(columns), "-y", str(HEIGHT)]
        self._tmux("-f", os.devnull, "new-session", "-d", *size, line, environment=environment)

    def _tmux(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", str(self._socket), *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**{name: value for name, value in os.environ.items() if name not in _SIZE}, **(environment or {})},
        )
        return done.stdout

    def lines(self) -> list[str]:
        """What is on the screen and above it; lines that the terminal has wrapped are two."""
        return [line for line in self._tmux("capture-pane", "-p", "-S", "-").splitlines() if line.strip()]

    def wait(self, condition: Callable[[list[str]], bool]) -> list[str]:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(lines := self.lines()):
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        return lines

    def ended(self) -> int:
        """Wait for the command's exit code."""
        self.wait(lambda _: self._code.exists() and bool(self._code.read_text().strip()))
        return int(self._code.read_text())

    def cursor_is_shown(self) -> bool:
        return self._tmux("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True, check=False)


@pytest.fixture
def terminal(tmp_path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(columns: int, *arguments: str) -> Terminal:
        command = [sys.executable, "-m", "infinity.cli.main", *arguments]
        (tmp_path / "runtime").mkdir(mode=0o700, exist_ok=True)
        environment = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "TERM": "screen-256color"}
        opened.append(Terminal(tmp_path, columns, command, environment))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def shown(workspace: Path, *more: str) -> list[str]:
    return [argument for argument in train_arguments(workspace, *more) if argument != "--json"]


@pytest.mark.parametrize("columns", [80, 160])
def test_train_leaves_its_notes_one_picture_and_the_sums(columns, terminal, workspace) -> None:
    screen = terminal(columns, *shown(workspace, "--steps", "20", "--save-every", "10"))
    assert screen.ended() == 0
    lines = screen.lines()
    assert max(len(line) for line in lines) <= columns
    assert screen.cursor_is_shown()
    drawn = [index for index, line in enumerate(lines) if line.startswith("step ")]
    assert len(drawn) == 1, lines
    first = drawn[0]
    assert lines[first].startswith("step 20/20 ━")
    assert lines[first].rstrip().endswith("100%  0:00 left")
    for word in ("loss ", " tokens/s", " s/step", "lr 3.00e-03", "norm "):
        assert word in lines[first + 1]
    wide = ["last 20 losses", "host ["] if columns >= 120 else []
    for line, begin in zip(lines[first + 2 :], wide, strict=False):
        assert line.startswith(begin)
    assert lines[first + 2 + len(wide)].startswith("  steps ")
    notes = "".join(lines[:first])  # those that are longer than the terminal go on in the next line
    assert notes.startswith("model: gpt2:tiny, 132,864 parameters, random weights")
    assert notes.count("saved ") == 2
    assert len([line for line in lines if "loss" in line]) == (3 if columns >= 120 else 2)


def test_top_follows_a_run_and_gives_the_screen_back(terminal, workspace, tmp_path) -> None:
    """At 80 columns; the run is started by hand, as a script may be."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    (tmp_path / "runtime").mkdir(mode=0o700)
    steps = train_arguments(workspace, "--steps", "100000")
    with Child(["-m", "infinity.cli.main", *steps], cwd=ROOT, env=environment) as run:
        screen = terminal(80, "top")

        def row(lines: list[str]) -> str:
            return next((line for line in lines if line.split()[0] == str(run.pid)), "")

        screen.wait(lambda lines: "/100000" in row(lines) and int(row(lines).split()[2].split("/")[0]) > 2)
        lines = screen.lines()
        assert lines[0].split()[:4] == ["pid", "rank", "step", "loss"]
        assert max(len(line) for line in lines) <= 80
        run.kill()
        run.communicate(TIMEOUT_S)
        screen.wait(lambda lines: row(lines).endswith("gone"))
        screen.press("C-c")
        assert screen.ended() == 0
        assert not [line for line in screen.lines() if "pid" in line]
        assert screen.cursor_is_shown()


def test_an_error_comes_after_the_picture_and_the_cursor_back(terminal, workspace) -> None:
    config = json.loads((workspace / "config.json").read_text())
    (workspace / "config.json").write_text(json.dumps({**config, "gradient_clipping": 0.0}))
    screen = terminal(80, *shown(workspace, "--steps", "100", "--lr", "1e30"))
    assert screen.ended() == 2
    lines = screen.lines()
    assert len([line for line in lines if line.startswith("step ")]) <= 1
    (place,) = [index for index, line in enumerate(lines) if line.startswith("error: the loss of step")]
    assert not [line for line in lines[place:] if line.startswith(("step ", "loss "))]
    assert screen.cursor_is_shown()


BAR = """
import logging, sys, time
from infinity.cli.progress import Progress
logging.basicConfig(stream=sys.stderr, format="%(message)s")
progress = Progress()
for number in range(5):
    progress.show(f"number {number} " + "x" * 200, number / 5)
    logging.warning("a remark %d", number)
    print("a result", number)
progress.clear()
progress.show("a text without an end " + "x" * 200)
progress.clear()
with progress.following("followed", lambda: 0.5):
    time.sleep(0.6)
print("the end")
"""


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_a_bar_leaves_nothing_but_what_others_have_printed(columns, terminal, tmp_path) -> None:
    (tmp_path / "bar.py").write_text(BAR)
    screen = Terminal(tmp_path, columns, [sys.executable, str(tmp_path / "bar.py")], {"TERM": "screen-256color"})
    try:
        assert screen.ended() == 0
        told = [f"{what} {number}" for number in range(5) for what in ("a remark", "a result")]
        assert screen.lines() == [*told, "the end"]
        assert screen.cursor_is_shown()
    finally:
        screen.close()
