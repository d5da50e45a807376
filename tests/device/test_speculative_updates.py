"""The tests of speculative updates on a CPU also hold on a device whose copies take time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from infinity.tiers import Params
from infinity.tiers.unit_params import UnitParams
from tests.behaviour.test_speculation import (  # noqa: F401
    eager,
    engine_of,
    fetched,
    gradients,
    room_for_a_block,
    seen,
    slow,
    test_a_unit_with_a_speculative_update_may_be_evicted,
    test_an_update_of_a_unit_needed_later_is_withdrawn,
    test_at_any_budget,
    test_parameters_that_cannot_be_reconstructed_are_written_again,
    test_parameters_that_stay_in_memory_are_not_written,
    test_what_comes_between_backward_and_step,
    test_with_an_undo_log_for_some_units,
    train,
    withdrawn,
)
from tests.device import target
from tests.device.training import SPEEDS


@pytest.fixture(autouse=True)
def _slow_link() -> Iterator[None]:
    """Copies take so long that a missing wait reads old values."""
    with target.configured(**SPEEDS["slow_link"]):
        yield


def test_a_withdrawn_update_uploads_nothing(eager, slow, withdrawn, monkeypatch, tmp_path) -> None:  # noqa: F811
    uploads: Counter[str] = Counter()
    schedule = ""
    send_up = Params._upload_newest

    def counted(self: Params, each: UnitParams) -> None:
        uploads[schedule] += 1
        send_up(self, each)

    monkeypatch.setattr(Params, "_upload_newest", counted)
    budget = room_for_a_block(tmp_path)
    for schedule in ("deferred", "speculative"):
        options: dict[str, Any] = {"params": "none", "offload": "cpu", "host_memory": budget, "fill_device": False}
        with engine_of(tmp_path, schedule, **options) as engine:
            train(engine)
            engine.synchronize()
    assert withdrawn
    assert uploads["deferred"] == uploads["speculative"]
