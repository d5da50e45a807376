"""Processes of several ranks end as they should, however late torch's threads are."""

from __future__ import annotations

from tests import prepared

# Gloo's threads get the one core only while the main thread sleeps, which it does not once a collective is over.
LATE_THREADS = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from infinity.zero import ending

ending._PATIENCE_S = 60.0  # those threads may wait for other processes as well
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))  # by now the threads are there, under their names
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for thread in Path("/proc/self/task").iterdir():
    if (thread / "comm").read_text().strip() == "pt_gloo_runloop":
        os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))

late = held = rounds = 0
while rounds < 20 or (not late and rounds < 2000):  # beside other work the core may come free in every round
    rounds += 1
    tensor = torch.ones(4)
    alone = sys.getrefcount(tensor)
    dist.all_reduce(tensor)
    late += sys.getrefcount(tensor) > alone
    ending._let_threads_finish()
    held += sys.getrefcount(tensor) > alone
print(late > 0, held)
"""


def test_threads_let_go_of_the_last_collective_before_the_interpreter_ends() -> None:
    done = prepared.run(["-c", LATE_THREADS], timeout=100)
    assert done.stdout.split() == ["True", "0"], (done.stdout, done.stderr)
