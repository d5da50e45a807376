"""Ctrl-C, SIGTERM and SIGHUP during training: the first signal ends the run after its step, the second at once.

SIGHUP never counts as the second signal: when a terminal closes, both the kernel and the shell send it, and at a logout
it follows SIGTERM. Under nohup it stays ignored.

Python calls a handler between two bytecodes of the main thread, and only once for several pending signals. The main
thread may be in a backward pass for minutes. So the handler in C also writes a byte for each signal into a pipe, which
a thread reads.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from infinity.cli.training.progress import Progress

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END = b"\0"  # ends the thread; no signal has this number
_GRACE_S = 3.0  # time for the main thread to leave after the second signal


class StopSignals:
    """The signals that this process received. A context manager, for the main thread.

    Args:
        progress: shows what the first signal does.
        saves: whether the model is written after the last step.
    """

    def __init__(self, progress: Progress, *, saves: bool) -> None:
        self._progress = progress
        self._saves = saves
        self._handled: list[int] = []  # signals that Python's handler received
        self._read: list[int] = []  # signals that the thread received
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="infinity-signals", daemon=True)

    def __enter__(self) -> StopSignals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        if self._before[signal.SIGHUP] is signal.SIG_IGN:
            del self._before[signal.SIGHUP]
        for number in self._before:
            signal.signal(number, self._handle)
        self._fd_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        self._restore()
        signal.set_wakeup_fd(self._fd_before)
        os.write(self._write_end, _END)
        self._thread.join()
        os.close(self._write_end)
        os.close(self._read_end)

    @property
    def first(self) -> int:
        """The signal that asks the loop to stop after its step; 0 for none."""
        return next(iter(self._handled or self._read), 0)

    @property
    def twice(self) -> bool:
        """Whether to end at once. The loop checks this, too: an exception of the handler is lost inside a `__del__`."""
        return max(len(self._handled), len(self._read)) > 1

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._counts(signum, self._handled) and self.twice:
            self._restore()
            signal.raise_signal(signum)

    def _counts(self, signum: int, received: list[int]) -> bool:
        """Add a signal to `received`. Return False for a SIGHUP that is not the first signal, which is ignored."""
        if signum == signal.SIGHUP and received:
            return False
        self._progress.stopping = True
        received.append(signum)
        return True

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        """Announce the first signal. After the second, end the process if the main thread does not leave in time."""
        while (byte := os.read(self._read_end, 1)) != _END:
            if byte[0] not in self._before or not self._counts(byte[0], self._read):
                continue
            name = "Ctrl-C" if byte[0] == signal.SIGINT else signal.Signals(byte[0]).name
            if len(self._read) == 1:
                then = ", then saving the model" if self._saves else ""
                self._progress.note(f"{name}: stopping after this step{then} ({name} again: leave at once)")
            elif len(self._read) == 2 and not self._left.wait(_GRACE_S):
                self._progress.close()  # otherwise the terminal's cursor would stay hidden
                os._exit(128 + byte[0])
