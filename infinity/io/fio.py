"""Runs fio on the same work, to be compared with."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from infinity.errors import ConfigError
from infinity.io.bench import BenchRun
from infinity.io.interface import IoOptions

_MODES = {"read": "read", "write": "write", "mixed": "rw", "randread": "randread"}


def fio_version() -> str:
    """The installed fio's version.

    Raises:
        ConfigError: there is none.
    """
    if shutil.which("fio") is None:
        raise ConfigError("fio is not installed; install it (apt-get install fio) or leave --compare-fio out")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run_fio(path: Path, size_bytes: int, operation: str, options: IoOptions, *, runtime_s: float = 0.0) -> BenchRun:
    """One pass of fio (io_uring, O_DIRECT, registered files and buffers) over an existing file.

    The processor seconds are those that fio counts for its job, without its start-up.

    Raises:
        ConfigError: fio is not installed or refuses; the message has its reason.
    """
    command = [
        "fio",
        "--name=bench",
        f"--filename={path}",
        f"--size={size_bytes}",
        f"--rw={_MODES[operation]}",
        f"--bs={options.block_size_bytes}",
        f"--iodepth={options.queue_depth}",
        "--ioengine=io_uring",
        "--direct=1",
        "--registerfiles=1",
        "--fixedbufs=1",
        "--randrepeat=0",
        "--scramble_buffers=0",  # or it spends processor time on changing what it writes, as we do not
        "--output-format=json",
        *([f"--runtime={runtime_s}", "--time_based=1"] if runtime_s else []),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ConfigError("fio is not installed; install it or leave the comparison out") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"fio failed: {error.stderr.strip() or error.stdout.strip()}") from error
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return BenchRun(seconds, job["read"]["io_bytes"] + job["write"]["io_bytes"], cpu_s)
