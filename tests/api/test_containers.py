"""What a container's limit leaves is what there is, on either version of control groups."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from torch import nn

from infinity.cli.main import main
from infinity.config import load_config
from infinity.memory import available_memory_bytes, memory_limit_bytes
from infinity.planner import plan_training
from infinity.zero.budgets import auto_bytes
from tests.behaviour.control_groups import control_group

MIB = 1 << 20
NO_LIMIT = 9223372036854771712  # as version 1 writes it


class Groups:
    """Control groups as files: a mount point, and the membership of a process."""

    def __init__(self, directory: Path, version: int) -> None:
        self.version = version
        self.mount = directory / "cgroup"
        self.root = self.mount / "memory" if version == 1 else self.mount
        self.root.mkdir(parents=True)
        self.membership = directory / "membership"
        self.enter("/")

    def enter(self, path: str) -> None:
        first = "11:blkio:/elsewhere\n7:cpu,memory:" if self.version == 1 else "0::"
        self.membership.write_text(f"{first}{path}\n")

    def limit(self, group: str, limit: int | str, used: int, inactive: int = 0, active: int = 0) -> None:
        directory = self.root / group
        directory.mkdir(parents=True, exist_ok=True)
        old = self.version == 1
        (directory / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{limit}\n")
        (directory / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
        prefix = "total_" if old else ""
        stat = f"anon 5\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\n"
        (directory / "memory.stat").write_text(stat)

    def available(self) -> int:
        return available_memory_bytes(self.mount, self.membership)


@pytest.fixture(params=[1, 2])
def groups(request, tmp_path) -> Groups:
    return Groups(tmp_path, request.param)


def is_all_that_is_free(available: int) -> bool:
    return abs(available - psutil.virtual_memory().available) < 512 * MIB


def test_a_limit_counts_what_is_used_but_not_cached_files(groups) -> None:
    groups.limit("", 64 * MIB, 40 * MIB, inactive=10 * MIB, active=4 * MIB)
    assert groups.available() == (64 - 40 + 10 + 2) * MIB


def test_a_group_above_may_leave_less(groups) -> None:
    groups.enter("/pod/container")
    groups.limit("pod", 50 * MIB, 40 * MIB)
    groups.limit("pod/container", 64 * MIB, 10 * MIB)
    assert groups.available() == 10 * MIB


def test_in_a_container_the_hosts_path_is_mounted_as_the_root(groups) -> None:
    groups.enter("/docker/0123456789ab")
    groups.limit("", 64 * MIB, 24 * MIB)
    assert groups.available() == 40 * MIB


def test_a_path_outside_of_the_namespace_is_not_followed(groups, tmp_path) -> None:
    groups.enter("/../../outside")
    groups.limit("", 64 * MIB, 24 * MIB)
    assert groups.available() == 40 * MIB


def test_more_used_than_allowed_leaves_nothing(groups) -> None:
    groups.limit("", 64 * MIB, 65 * MIB)
    assert groups.available() == 0


@pytest.mark.parametrize("limit", ["max", NO_LIMIT])
def test_without_a_limit_the_machine_counts(limit, groups) -> None:
    groups.limit("", limit, 24 * MIB)
    assert is_all_that_is_free(groups.available())
    assert memory_limit_bytes(groups.mount, groups.membership) is None


def test_without_control_groups_the_machine_counts(tmp_path) -> None:
    assert is_all_that_is_free(available_memory_bytes(tmp_path, tmp_path / "missing"))


def test_memory_high_is_a_limit(tmp_path) -> None:
    groups = Groups(tmp_path, 2)
    groups.limit("", 64 * MIB, 24 * MIB)
    (groups.root / "memory.high").write_text(f"{32 * MIB}\n")
    assert groups.available() == 8 * MIB
    assert memory_limit_bytes(groups.mount, groups.membership) == 32 * MIB


def test_what_is_no_number_is_no_limit(groups) -> None:
    groups.limit("", "a lot", 24 * MIB)
    assert is_all_that_is_free(groups.available())


# The budget, and the command that shows it #


def test_an_automatic_budget_is_a_share_of_what_is_left(monkeypatch) -> None:
    monkeypatch.setattr("infinity.zero.budgets.available_memory_bytes", lambda: 48 * MIB)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    config = load_config(
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_param.device": "nvme",
            "zero_optimization.offload_optimizer.device": "nvme",
            "tiering.nvme": [{"path": "."}],
            "tiering.tile_size": "1MiB",
            "gradient_clipping": 0,
        }
    )
    assert plan_training(model, config).host_bytes == 24 * MIB


def test_an_automatic_budget_leaves_room_for_the_process_in_a_small_container(groups, monkeypatch) -> None:
    """Of what a control group of 700 MiB leaves to a process that has loaded its libraries."""
    groups.limit("", 700 * MIB, 400 * MIB)
    assert auto_bytes(groups.available(), 1) == 150 * MIB
    groups.limit("", 1024 * MIB, 400 * MIB)
    assert auto_bytes(groups.available(), 1) == (624 - 256) * MIB
    assert auto_bytes(groups.available(), 2) == 156 * MIB
    assert auto_bytes(4096 * MIB, 1) == int(0.8 * 4096 * MIB)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A real control group of 700 MiB."""
    with ExitStack() as made:
        try:
            group = made.enter_context(control_group(700 * MIB))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield group


def test_a_real_limit_is_seen(small_group) -> None:
    script = f"""
import os
from pathlib import Path
Path({str(small_group / "cgroup.procs")!r}).write_text(str(os.getpid()))
from infinity.memory.available import available_memory_bytes, memory_limit_bytes
print(available_memory_bytes(), memory_limit_bytes())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    available, limit = map(int, done.stdout.split())
    assert 0 < available < 700 * MIB
    assert limit == 700 * MIB


def test_train_is_refused_where_the_container_would_kill_it(tmp_path, monkeypatch, capsys) -> None:
    """What a control group of 700 MiB leaves, in which this training was killed at its first step."""
    for user in ("infinity.cli.training.room", "infinity.zero.budgets"):
        monkeypatch.setattr(f"{user}.available_memory_bytes", lambda: 412 * MIB)
    (tmp_path / "text.txt").write_text("a tier is a memory " * 200)
    model = ["train", "llama:160m", str(tmp_path / "text.txt"), "--nvme", str(tmp_path / "swap"), "--precision", "bf16"]
    for budget in ([], ["--host-memory", "210MiB"]):
        assert main([*model, "--steps", "1", "--no-save", *budget]) == 2
        assert "host memory is too small: the processes of a machine take" in capsys.readouterr().err


def test_env_shows_the_limit(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("infinity.memory.memory_limit_bytes", lambda: 700 * MIB)
    monkeypatch.setattr("infinity.memory.available_memory_bytes", lambda: 300 * MIB)
    assert main(["env", "--json", "--path", str(tmp_path)]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["container_limit_bytes"] == 700 * MIB
    assert memory["available_bytes"] == 300 * MIB
