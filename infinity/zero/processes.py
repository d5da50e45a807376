"""Which processes the ranks are, so that one can see that a neighbour on its machine has ended."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.telemetry.tasks import read_task


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        machine: the same for those that share a machine's memory, containers included.
        namespace: of process ids.
        started: when, in the kernel's clock, since ids are used again.
    """

    machine: str
    namespace: str
    pid: int
    started: str

    @property
    def has_ended(self) -> bool:
        """It is known to have; never of a process that cannot be seen from here."""
        here = this_process()
        if (self.machine, self.namespace) != (here.machine, here.namespace):
            return False
        try:
            task = read_task(Path(f"/proc/{self.pid}"))
        except FileNotFoundError:
            return True
        except (OSError, ValueError, IndexError):
            return False
        return task.state in "ZX" or str(task.started) != self.started


def this_process() -> Process:
    namespace = started = ""
    with suppress(OSError, ValueError, IndexError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  (its target is no path)
        started = str(read_task(Path("/proc/self")).started)
    return Process(_machine(), namespace, os.getpid(), started)


def _machine() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
