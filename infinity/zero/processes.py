"""Which processes the ranks are, so that one can see that a neighbour on its machine has ended."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


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
            state, started = _state(self.pid)
        except FileNotFoundError:
            return True
        except (OSError, ValueError, IndexError):
            return False
        return state in "ZX" or started != self.started


def this_process() -> Process:
    namespace = started = ""
    with suppress(OSError, ValueError, IndexError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  (its target is no path)
        started = _state(os.getpid())[1]
    return Process(_machine(), namespace, os.getpid(), started)


def _machine() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _state(pid: int) -> tuple[str, str]:
    """A process's state, one letter, and when it was started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
