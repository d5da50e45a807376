"""A missing wait makes training on the emulated device wrong, and the tests notice it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, assert_same_bits
from tests.device import mutants, target
from tests.device.training import CRAWL, SPEEDS, on_cpu_like

pytestmark = target.emulated_only

RECIPE = Recipe("bf16", 1, 0.0, 3)

NVME = {"device_memory": "250KB"}
ACTIVATIONS = {"activations": "nvme", "activation_memory": "1MB"}

CASES = {
    "compute": (mutants.compute_does_not_wait_for_uploads, "nvme", NVME),
    "uploads": (mutants.uploads_do_not_wait_for_compute, "nvme", NVME),
    "marks": (mutants.uploads_wait_for_what_came_before_the_update_alone, "cpu", {}),
    "staging": (mutants.host_memory_is_given_back_under_uploads, "nvme", NVME),
    "parameters": (mutants.downloads_are_used_before_they_are_done, "nvme", NVME),
    "gradients": (mutants.gradients_are_used_before_they_are_done, "cpu", {}),
    "memory of gradients": (mutants.gradients_are_given_back_under_downloads, "cpu", {}),
    "activations": (mutants.downloads_are_used_before_they_are_done, "cpu", ACTIVATIONS),
}


@pytest.mark.parametrize("case", CASES)
def test_a_missing_wait_is_noticed(case, tmp_path) -> None:
    mutant, tier, tiering = CASES[case]
    speeds = CRAWL if case == "staging" else [*SPEEDS, *CRAWL]
    paths = [(speed, tmp_path / f"{speed}-{attempt}") for attempt in range(2) for speed in speeds]  # on a busy machine
    assert any(was_noticed(train(mutant, tier, speed, tiering, path)) for speed, path in paths)


@pytest.mark.parametrize("case", ["compute", "activations"])
@pytest.mark.parametrize("speed", CRAWL)  # test_training.py has the other speeds
def test_nothing_is_noticed_where_nothing_is_missing(case, speed, tmp_path) -> None:
    _, tier, tiering = CASES[case]
    seen = train(mutants.nothing, tier, speed, tiering, tmp_path / speed)
    assert seen is not None
    assert seen["error"] is None
    assert not was_noticed(seen)


def train(mutant: Any, tier: str, speed: str, tiering: dict[str, Any], path: Any) -> dict[str, Any] | None:
    """Return what a separate process saw; None if it died of a segmentation fault."""
    path.mkdir()
    swap = path / "swap"
    swap.mkdir()
    placement = Placement(tier, tier, swap, "64KiB", "900KB" if tier == "nvme" else None)
    tiering = tiering | {"nvme": [{"path": str(swap)}]}
    try:
        return run_ranks(1, mutants.run, mutant.__name__, placement, RECIPE, speed, tiering, path=path, timeout_s=60)[0]
    except AssertionError as error:
        if str(error).startswith(f"[{-signal.SIGSEGV}]"):
            return None
        raise


def was_noticed(seen: dict[str, Any] | None) -> bool:
    if seen is None or seen["error"] is not None or seen["races"]:
        return True
    try:
        assert_same_bits(seen["result"], on_cpu_like(RECIPE))
    except AssertionError:
        return True
    return False
