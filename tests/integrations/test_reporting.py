"""A Trainer's logs have what moved and what was waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

import infinity
from infinity.integrations import report_tiers
from tests.behaviour.reference import Placement, Recipe, batches, tiny_llama, train_on


class Reporter(TrainerCallback):
    """Stands where TensorBoard's and others' do."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def logged(handler: CallbackHandler, state: TrainerState, logs: dict[str, float]) -> None:
    state.log_history.append(dict(logs))  # as Trainer.log does
    handler.on_log(None, state, TrainerControl(), logs)


def test_logs_have_the_means_of_the_steps_since_the_last_log(tmp_path) -> None:
    model, reporter, state = tiny_llama(), Reporter(), TrainerState()
    handler = CallbackHandler([reporter], model, None, None, None)
    report_tiers(SimpleNamespace(callback_handler=handler))
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB", "900KB"))
    read, waited = [], []
    with infinity.initialize(model, config=config)[0] as engine:
        for count in (3, 1):
            for ids in batches(count):
                train_on(engine, [ids])
                read.append(engine.stats().tier_bytes.get("nvme_read", 0))
                waited.append(engine.stats().stall_s.get("disk_read", 0.0))
                handler.on_step_end(None, state, TrainerControl())
            logged(handler, state, {"loss": 1.0})
        logged(handler, state, {"eval_loss": 1.0})
        peak = engine.stats().peak_bytes["host"]
    first, second, evaluation = reporter.seen
    assert first["loss"] == 1.0
    assert first["tiers/nvme_read_gb"] == pytest.approx(sum(read[:3]) / 3e9)
    assert first.get("tiers/disk_read_wait_s", 0.0) == pytest.approx(sum(waited[:3]) / 3)
    assert second.get("tiers/nvme_read_gb", 0.0) == pytest.approx(read[3] / 1e9)  # all of it may be read ahead
    assert second["tiers/peak_host_gb"] == pytest.approx(peak / 1e9)
    assert evaluation == {"eval_loss": 1.0}
    assert state.log_history == reporter.seen


def test_a_trainer_without_an_engine_logs_what_it_always_does() -> None:
    reporter, state = Reporter(), TrainerState()
    handler = CallbackHandler([reporter], tiny_llama(), None, None, None)
    report_tiers(SimpleNamespace(callback_handler=handler))
    handler.on_step_end(None, state, TrainerControl())
    logged(handler, state, {"loss": 1.0})
    assert reporter.seen == [{"loss": 1.0}]
