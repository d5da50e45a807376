"""Find out from the environment how this process was started: alone, or by a launcher as one of several ranks.

[Note: what means several processes]
If `WORLD_SIZE` is set, it decides: torchrun and `infinity run` set it, and with 1 the process trains alone, whatever
other variables are set. Without it, mpirun's variables contain the number of its processes, and srun's variables the
number of tasks of a job step. `SLURM_NTASKS` alone is not enough: a batch script, the shell of salloc and a shell of
`srun --pty` have it, and each of them is one process. If a launcher started several processes, but a process does not
know where they meet, each of them would train alone as rank 0. Such a process is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.errors import ConfigError

_PORT = 29500  # torchrun's
_HOW = (
    "start it with `infinity run --ranks N script.py` or torchrun, which set all of them; under srun or mpirun with "
    "one task a rank, export MASTER_ADDR (the first node's host name) and MASTER_PORT for all tasks; or set "
    "WORLD_SIZE=1 if every process is to train a model of its own"
)


@dataclass(frozen=True)
class Launch:
    """This process among the processes that were started together.

    Attributes:
        rank, size: number of this process, and number of all processes.
        local_rank: number of this process among the processes on this machine.
        local_size: number of processes on this machine, if the launcher says it; else 1.
        address: where the processes meet, as torch's `init_method`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str


@dataclass(frozen=True)
class _Launcher:
    """The names of a launcher's variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_TORCHRUN = _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = (
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_STEP = _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
_OLD_STEP = _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Return how a process with this environment was started; None if it is alone.

    Raises:
        ConfigError: several processes were started, but they cannot meet: a variable is missing, or is no number.
    """
    launcher = _launcher(environment)
    if launcher is None:
        return None
    needed = [launcher.rank, launcher.size, "MASTER_ADDR", *(["MASTER_PORT"] if launcher is _TORCHRUN else [])]
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        there = ", ".join(f"{name}={environment[name]}" for name in needed if environment.get(name))
        raise ConfigError(
            f"this is one process of several, as the environment says ({there}), but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so they cannot meet and each would train alone: {_HOW}"
        )
    rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
    if not 0 <= rank < size:
        raise ConfigError(f"{launcher.rank} is {rank} but {launcher.size} is {size}: ranks count from 0; {_HOW}")
    return Launch(
        rank,
        size,
        _number(environment, launcher.local_rank, rank),
        _number(environment, launcher.local_size, 1),
        "env://" if launcher is _TORCHRUN else _address(environment),
    )


def local_size(environment: Mapping[str, str]) -> int:
    """Return the number of processes that were started on this machine; 1 if the environment does not say it."""
    launcher = _launcher(environment) or _TORCHRUN
    return max(1, _number(environment, launcher.local_size, 1))


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that started this process as one of several; None if it is alone.

    See [Note: what means several processes].
    """
    if environment.get("WORLD_SIZE") or _number(environment, "RANK", 0) > 0:
        return _TORCHRUN if _number(environment, "WORLD_SIZE", 2) > 1 else None
    for launcher in _MPI:
        if _number(environment, launcher.size, 1) > 1 or _number(environment, launcher.rank, 0) > 0:
            return launcher
    if environment.get("SLURM_PTY_PORT"):  # a shell, whatever the other variables are
        return None
    if environment.get(_STEP.size):
        return _STEP if _number(environment, _STEP.size) > 1 else None
    # Larger numbers are not of job steps, but of the batch script and of the interactive shell.
    step = environment.get("SLURM_STEP_ID", "")  # may be a word
    in_step = step.isdecimal() and int(step) < 1 << 31
    several = _number(environment, _OLD_STEP.size, 1) > 1
    return _OLD_STEP if _number(environment, _OLD_STEP.rank, 0) > 0 or (in_step and several) else None


def _address(environment: Mapping[str, str]) -> str:
    host = environment["MASTER_ADDR"]
    return f"tcp://{f'[{host}]' if ':' in host else host}:{_number(environment, 'MASTER_PORT', _PORT)}"


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable's number, or the default if it is not set."""
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"the environment variable {name} is {text!r}, which is no number: {_HOW}") from error
