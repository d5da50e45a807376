"""A rank holds the bytes that the ZeRO paper gives it; a run of one case of the benchmark that measures all."""

import pytest

from benchmarks.memory_per_rank import TOLERANCE, Case, run_case


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_rank_holds_is_what_the_paper_says(stage) -> None:
    row = run_case(Case(2, stage, "bf16", 1))
    assert abs(row["ratio"] - 1) < TOLERANCE
    assert min(row["params"], row["grads"], row["states"]) > 0.9
