"""A process that was started as one of several joins the others, or is refused: it never trains alone by mistake."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

import infinity
from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.schedule import MemoryNeeds
from infinity.zero.budgets import host_capacity
from infinity.zero.launch import Launch, launch_of, local_size
from infinity.zero.ranks import Ranks
from tests.behaviour.ranks import free_port, run_ranks
from tests.behaviour.reference import Placement, Recipe, tiny_gpt2
from tests.prepared import Child

MEETING = {"MASTER_ADDR": "first", "MASTER_PORT": "2345"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # of a batch script
STEP = JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "there", "missing"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2", "RANK and MASTER_ADDR and MASTER_PORT are"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "RANK=0, WORLD_SIZE=2", "MASTER_ADDR and MASTER_PORT are"),
        ({"RANK": "1"} | MEETING, "RANK=1, MASTER_ADDR=first", "WORLD_SIZE is"),
        (TORCHRUN | {"MASTER_ADDR": "first"}, "MASTER_ADDR=first", "MASTER_PORT is"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4", "MASTER_ADDR is"),
        (MPICH, "PMI_RANK=3, PMI_SIZE=4", "MASTER_ADDR is"),
        (STEP, "SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4", "MASTER_ADDR is"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID=1, SLURM_NTASKS=2", "MASTER_ADDR is"),
    ],
)
def test_half_an_environment_is_refused(environment, there, missing, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{missing} not set, so they cannot meet") as refused:
        infinity.initialize(model=tiny_gpt2(), config=Recipe().config(Placement()))
    assert there in str(refused.value)
    assert "infinity run --ranks N" in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (TORCHRUN | MEETING, Launch(1, 2, 1, 2, "env://")),
        (OPEN_MPI | MEETING, Launch(3, 4, 1, 1, "tcp://first:2345")),
        (MPICH | {"MASTER_ADDR": "::1"}, Launch(3, 4, 1, 2, "tcp://[::1]:29500")),
        (STEP | MEETING, Launch(3, 4, 1, 1, "tcp://first:2345")),
        (STEP | MEETING | {"SLURM_NTASKS_PER_NODE": "2"}, Launch(3, 4, 1, 2, "tcp://first:2345")),
        (STEP | TORCHRUN | MEETING, Launch(1, 2, 1, 2, "env://")),  # srun starts torchrun on every node
    ],
)
def test_a_whole_environment_says_which_rank_this_is(environment, launch) -> None:
    assert launch_of(environment) == launch


@pytest.mark.parametrize(
    "environment",
    [
        {},
        MEETING,
        {"WORLD_SIZE": "1", "RANK": "0"} | MEETING,
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        JOB,
        JOB | {"SLURM_STEP_ID": "batch"},
        JOB | {"SLURM_STEP_ID": "4294967291"},  # the batch script's
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # the shell of salloc
        JOB | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # that of an interactive step
        STEP | {"SLURM_PTY_PORT": "12345"},
        STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"WORLD_SIZE": "1"},  # said by hand
    ],
)
def test_one_process_is_not_taken_for_several(environment) -> None:
    assert launch_of(environment) is None


@pytest.mark.parametrize(
    "environment", [{"WORLD_SIZE": "two"}, TORCHRUN | MEETING | {"RANK": "2"}, TORCHRUN | MEETING | {"RANK": "x"}]
)
def test_numbers_that_cannot_be_are_refused_by_name(environment) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is ('two'|2)|RANK is 'x'"):
        launch_of(environment)


SCRIPT = """
import torch.distributed as dist
import infinity
from tests.behaviour.reference import Placement, Recipe, tiny_gpt2

with infinity.initialize(model=tiny_gpt2(), config=Recipe().config(Placement()))[0] as engine:
    print("rank", dist.get_rank(), "of", dist.get_world_size(), engine.config.train_batch_size, flush=True)
"""


def test_tasks_of_srun_join_at_the_address_that_they_were_given() -> None:
    environment = os.environ | STEP | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    step = [environment | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank)} for rank in range(2)]
    with ExitStack() as ended:
        tasks = [ended.enter_context(Child(["-c", SCRIPT], env=one)) for one in step]
        for rank, task in enumerate(tasks):
            output, errors = task.communicate(timeout=120)
            assert f"rank {rank} of 2 4" in output, errors


def shares() -> tuple[int, int]:
    """Ranks that share this machine's memory, and the launcher says nothing."""
    os.environ.pop("LOCAL_WORLD_SIZE")
    needs = MemoryNeeds(*[0] * 3, 1 << 60, *[0] * 7, "")
    ranks = Ranks.of_group()
    return host_capacity(load_config({}), needs, ranks), host_capacity(load_config({}), needs)


def test_ranks_on_one_machine_share_its_memory_without_a_word_of_the_launcher(tmp_path) -> None:
    for shared, alone in run_ranks(2, shares, path=tmp_path):
        assert shared == pytest.approx(alone / 2, rel=0.2)  # others use the memory, too


def test_the_launcher_counts_the_processes_of_a_machine() -> None:
    assert local_size({"LOCAL_WORLD_SIZE": "8"}) == 8
    assert local_size(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 2
    assert local_size(JOB | {"SLURM_NTASKS_PER_NODE": "4"}) == 1
