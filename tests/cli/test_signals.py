"""Ctrl-C is answered at once, wherever the main thread is."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from infinity.cli.training.progress import Progress
from infinity.cli.training.signals import StopSignals
from tests.prepared import ROOT, Child

TIMEOUT_S = 90

STUCK = """
import hashlib
import threading
from infinity.cli.training import signals
from infinity.cli.training.progress import Progress

signals._GRACE_S = 0.1
with signals.StopSignals(Progress(1, json_lines=False), saves=True):
    # Once the call has begun: before it, Python would run its handler, and end by KeyboardInterrupt.
    threading.Timer(0.2, print, ["ready"], {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)  # minutes in one call, as a backward pass
"""


def test_a_call_of_minutes_delays_neither_the_answer_nor_the_end(tmp_path: Path) -> None:
    with Child(["-c", STUCK], cwd=ROOT) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        answer = process.stderr.readline()
        assert answer == "Ctrl-C: stopping after this step, then saving the model (Ctrl-C again: leave at once)\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) == 130


def test_two_signals_during_one_call_are_two() -> None:
    with pytest.raises(KeyboardInterrupt):
        _receive_two_in_a_call()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_is_one_signal_or_none(ignored, monkeypatch) -> None:
    """The kernel sends it and the shell does; under nohup neither is to end the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopSignals(Progress(1, json_lines=True), saves=False) as stop:
            for _ in range(2):
                signal.raise_signal(signal.SIGHUP)
            assert stop.first == (0 if ignored else signal.SIGHUP)
            assert not stop.twice
            if not ignored:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_that_cannot_be_written_does_not_end_the_run(monkeypatch) -> None:
    progress = Progress(1, json_lines=False)
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"), os.fdopen(writer, "w")):
        monkeypatch.setattr("sys.stderr", stream)
        if stream.name == writer:
            with pytest.raises(BrokenPipeError):
                progress.note("a step")
            progress.stopping = True
        progress.note("saving the model")
        with suppress(OSError):
            stream.close()


def _receive_two_in_a_call() -> None:
    def send() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)

    sender = threading.Thread(target=send)
    with StopSignals(Progress(1, json_lines=True), saves=False):
        sender.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # in which Python calls no handler
        sender.join()
