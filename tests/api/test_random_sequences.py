"""Whatever a script does between its steps, the numbers are torch's or the engine refuses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.zero.foresight import Foresight
from tests.api.sequences import CASES, OPERATIONS, Case, run_sequence


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    """Under the `speculative` schedule, updates run ahead in every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Foresight, "speculates", True)
        yield


@pytest.mark.slow
@settings(max_examples=50, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=st.sampled_from(CASES),
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=12),
    seed=st.integers(0, 1000),
)
def test_random_operations_match_torch_or_are_refused(case: Case, names: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        outcomes = run_sequence(case, names, seed, Path(path))
    assert outcomes["done"] + outcomes["refused"] > 0


# At the end of a sequence, since the engine may refuse to go on after them.
LAST = ("exception_in_backward", "interrupt_in_backward")
ORDERED = [*sorted(OPERATIONS.keys() - set(LAST)), *LAST]
SEQUENCES = 4  # so that what an operation leaves behind, as `freeze` does, meets a quarter of the others


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", range(SEQUENCES))
def test_each_operation_between_two_steps(case, first, tmp_path) -> None:
    names = ["train"]
    for name in ORDERED[first::SEQUENCES]:
        names += ["train", name]
    outcomes = run_sequence(case, [*names, "train"], 0, tmp_path)
    assert outcomes["done"] + outcomes["refused"] >= len(names), f"the engine has stopped within {names}"
