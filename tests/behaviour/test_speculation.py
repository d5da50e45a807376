"""Speculative updates, committed or rolled back, give the bits of updates inside `step()`."""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import InfinityError, StorageError
from infinity.kernels import Lost
from infinity.optim import pipeline, rollback
from infinity.schedule.actions import ParametersStale
from infinity.tiers import GradStore, StateStore, UnitGrads
from infinity.tiers.unit_params import UnitParams
from infinity.zero.foresight import Foresight
from infinity.zero.gathering import Gathering
from infinity.zero.speculation import Speculation
from infinity.zero.unit import Unit
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import ARCHITECTURES, Placement, Recipe, batches, least_memory, loss_of

STEPS = 6
DATA = batches(STEPS)
NEVER, SOMETIMES, ALWAYS = 100.0, -1.0, 0.1  # SOMETIMES: at a norm that half of the steps exceed

Disturb = Callable[[infinity.Engine], None]
_TRAINED = {"architecture", "clipping", "precision", "accumulation"}  # options that change the result


@pytest.fixture
def eager(monkeypatch) -> None:
    """Updates are speculative in every step, whatever happened in the last one."""
    monkeypatch.setattr(Foresight, "speculates", True)


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """A list that grows by the outcome of each speculative update: "committed" or "reverted"."""
    told: list[str] = []
    commit, roll_back = Speculation.commit, Speculation.roll_back

    def committed(self: Speculation, row: Unit) -> None:
        told.append("committed")
        commit(self, row)

    def rolled_back(self: Speculation, rows: list[Unit], free: Callable[[Unit], bool], *, grads: bool) -> list[Unit]:
        told.extend("reverted" for _ in rows)
        return roll_back(self, rows, free, grads=grads)

    monkeypatch.setattr(Speculation, "commit", committed)
    monkeypatch.setattr(Speculation, "roll_back", rolled_back)
    return told


@pytest.fixture
def gradients(monkeypatch) -> Counter[str]:
    """How many units' gradients were left to their updates, and how many a rollback reconstructed."""
    told: Counter[str] = Counter()
    left, restore = GradStore.drop_reconstructable, GradStore.restore

    def leave(self: GradStore, each: UnitGrads) -> None:
        told["left"] += 1
        left(self, each)

    def come_back(self: GradStore, each: UnitGrads) -> torch.Tensor | None:
        buffer = restore(self, each)
        told["restored"] += buffer is not None
        return buffer

    monkeypatch.setattr(GradStore, "drop_reconstructable", leave)
    monkeypatch.setattr(GradStore, "restore", come_back)
    return told


@contextmanager
def engine_of(
    path: Path,
    schedule: str,
    *,
    architecture: str = "gpt2",
    clipping: float = NEVER,
    precision: str = "bf16",
    accumulation: int = 1,
    host_memory: int | None = None,
    params: str = "nvme",
    offload: str = "nvme",
    tile_size: str = "64KiB",
    **tiering: Any,
) -> Iterator[infinity.Engine]:
    path.mkdir(exist_ok=True)
    if clipping == SOMETIMES:
        clipping = middle_norm(architecture, precision, accumulation)
    recipe = Recipe(precision, accumulation, clipping)
    if host_memory is None and offload == "nvme":
        host_memory = least_budget(architecture, precision, accumulation) * 5 // 4
    config = recipe.config(Placement(params, offload, path, tile_size, host_memory, schedule))
    config["tiering"] |= tiering
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}
    with infinity.initialize(model=model_of(architecture), config=config)[0] as engine:
        yield engine


def model_of(architecture: str) -> torch.nn.Module:
    model = ARCHITECTURES[architecture](0)
    if architecture == "llama":
        model.get_input_embeddings().requires_grad_(False)  # a frozen unit
        model.model.layers[1].mlp.requires_grad_(False)  # and one with both kinds
    return model


@cache
def least_budget(architecture: str, precision: str, accumulation: int, params: str = "nvme") -> int:
    """Return the smallest budget; with it, nearly all states are on the drive."""
    with tempfile.TemporaryDirectory() as path:
        placement = Placement(params, "nvme", Path(path), "64KiB", schedule="deferred")
        return least_memory(model_of(architecture), Recipe(precision, accumulation, NEVER).config(placement))


@cache
def middle_norm(architecture: str, precision: str, accumulation: int) -> float:
    """Return the median norm of the steps of a training."""
    norms = []
    recipe = Recipe(precision, accumulation, NEVER)
    with infinity.initialize(model=model_of(architecture), config=recipe.config(Placement()))[0] as engine:
        for ids in batches(STEPS * accumulation):
            engine.backward(loss_of(engine, ids))
            engine.step()
            norms.append(engine.get_global_grad_norm())
    return statistics.median(norms[accumulation - 1 :: accumulation])


def states_of(engine: infinity.Engine) -> list[torch.Tensor]:
    """Return parameters and moments."""
    weights = [param.detach().clone() for _, param in engine.named_parameters()]
    moments = [
        infinity.utils.safe_get_full_optimizer_state(param, name)
        for param in engine.module.parameters()
        if param.requires_grad
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return weights + [moment for moment in moments if moment is not None]


def train(engine: infinity.Engine, disturb: Disturb | None = None, steps: int = STEPS) -> list[float]:
    losses = []
    accumulation = engine.gradient_accumulation_steps()
    for index, ids in enumerate(batches(STEPS * accumulation)[: steps * accumulation]):
        loss = loss_of(engine, ids)
        engine.backward(loss)
        if disturb is not None and index == 2:
            disturb(engine)
        engine.step()
        losses.append(loss.item())
    return losses


@cache
def expected(
    disturb: Disturb | None = None,
    architecture: str = "gpt2",
    clipping: float = NEVER,
    precision: str = "bf16",
    accumulation: int = 1,
) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and final states of a training whose updates run inside `step()`, with all states in memory."""
    changes = {"architecture": architecture, "clipping": clipping, "precision": precision, "accumulation": accumulation}
    with (
        tempfile.TemporaryDirectory() as path,
        engine_of(Path(path), "barrier", params="cpu", offload="cpu", fill_device=False, **changes) as engine,
    ):
        return train(engine, disturb), states_of(engine)


def same_bits(path: Path, disturb: Disturb | None = None, *, neutral: bool = False, **changes: Any) -> None:
    """Train with speculative updates, and compare losses and states with `expected`.

    Args:
        neutral: the disturbance changes no number, so that the reference is trained without it.
    """
    trained = {name: value for name, value in changes.items() if name in _TRAINED}
    losses, states = expected(None if neutral else disturb, **trained)
    with engine_of(path, "speculative", **changes) as engine:
        assert train(engine, disturb) == losses
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(states_of(engine), states, strict=True))
        assert engine.skipped_steps == 0 or changes.get("precision") == "fp16"


@pytest.mark.parametrize(
    ("architecture", "accumulation", "clipping"),
    [
        ("gpt2", 1, NEVER),
        ("gpt2", 2, SOMETIMES),
        ("gpt2", 1, ALWAYS),
        ("llama", 1, SOMETIMES),
        ("llama", 2, NEVER),
    ],
)
def test_the_bits_are_those_of_updates_that_wait(
    architecture, accumulation, clipping, eager, seen, gradients, tmp_path
) -> None:
    same_bits(tmp_path, architecture=architecture, clipping=clipping, accumulation=accumulation)
    outcomes = set(seen)
    assert outcomes == {NEVER: {"committed"}, SOMETIMES: {"committed", "reverted"}, ALWAYS: {"reverted"}}[clipping]
    assert (gradients["left"] > 0) == (accumulation == 1)  # else they are held in float32
    if clipping != NEVER:
        assert gradients["restored"] > 0 or accumulation > 1


@pytest.mark.parametrize("share", [1.0, 1.6, 2.2, 3.0])
def test_at_any_budget(share, eager, seen, tmp_path) -> None:
    """Gradients spill, tiles lie in memory and on the drive, units are fetched and evicted."""
    same_bits(tmp_path, clipping=SOMETIMES, host_memory=int(least_budget("gpt2", "bf16", 1) * share))
    assert set(seen) == {"committed", "reverted"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("clipping", [NEVER, SOMETIMES, ALWAYS])
@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_in_memory_old_values_are_kept(offload, clipping, precision, eager, seen, tmp_path) -> None:
    """Parameters are in memory; states are in memory, too, or double-buffered on the drive."""
    memory = None if offload == "cpu" else 1 << 30
    same_bits(tmp_path, clipping=clipping, precision=precision, params="none", offload=offload, host_memory=memory)
    assert set(seen) >= {NEVER: {"committed"}, SOMETIMES: {"committed", "reverted"}, ALWAYS: {"reverted"}}[clipping]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_with_an_undo_log_for_some_units(share, eager, seen, tmp_path) -> None:
    """Of some units only a part of the tiles is updated speculatively, of others none."""
    with engine_of(tmp_path, "deferred", params="none", offload="cpu") as engine:
        train(engine, steps=1)
        most = engine.stats().peak_bytes["host"]
        states = sum(param.numel() for param in engine.module.parameters()) * 12
    budget = most + int(share * states)
    same_bits(tmp_path, clipping=SOMETIMES, params="none", offload="cpu", host_memory=budget)
    assert set(seen) == {"committed", "reverted"}
    with engine_of(tmp_path, "speculative", params="none", offload="cpu", host_memory=budget) as engine:
        train(engine)
        assert engine.stats().peak_bytes["host"] <= budget


@pytest.fixture
def slow(monkeypatch) -> None:
    """Delay the optimizer at each tile until backward is over, or for 0.3 s."""
    update, prefer = pipeline.update, pipeline.UpdatePipeline.prefer
    over = threading.Event()

    def waits(*arguments: Any, **options: Any) -> Any:
        over.wait(0.3)
        return update(*arguments, **options)

    def told(self: pipeline.UpdatePipeline, *, begun: bool) -> None:
        over.clear() if begun else over.set()
        prefer(self, begun=begun)

    monkeypatch.setattr(pipeline, "update", waits)
    monkeypatch.setattr(pipeline.UpdatePipeline, "prefer", told)


@pytest.fixture
def withdrawn(monkeypatch) -> list[int]:
    """Units whose speculative updates were withdrawn to make room for others."""
    units: list[int] = []
    withdraw = pipeline.UpdatePipeline.withdraw

    def told(self: pipeline.UpdatePipeline, ticket: pipeline.UpdateTicket) -> bool:
        done = withdraw(self, ticket)
        units.extend([ticket.unit] * done)
        return done

    monkeypatch.setattr(pipeline.UpdatePipeline, "withdraw", told)
    return units


@pytest.mark.parametrize("clipping", [NEVER, SOMETIMES])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_update_of_a_unit_needed_later_is_withdrawn(
    accumulation, clipping, eager, slow, seen, withdrawn, tmp_path
) -> None:
    """The undo log has room for a block or two: those that backward reaches last, as forward needs them first."""
    budget = room_for_a_block(tmp_path, accumulation)
    changes = {"clipping": clipping, "params": "none", "offload": "cpu", "accumulation": accumulation}
    same_bits(tmp_path, host_memory=budget, **changes)
    assert withdrawn
    assert 0 not in withdrawn  # the embedding, which is needed first
    assert set(seen) == {NEVER: {"committed"}, SOMETIMES: {"committed", "reverted"}}[clipping]


def room_for_a_block(path: Path, accumulation: int = 1) -> int:
    """Return a budget with an undo log for a block or two."""
    with engine_of(path, "deferred", params="none", offload="cpu", accumulation=accumulation) as engine:
        train(engine, steps=1)
        most = engine.stats().peak_bytes["host"]
    return most + largest_block("gpt2") * 14  # states and parameters, rounded up


def largest_block(architecture: str) -> int:
    """Return the number of its parameters."""
    return max(sum(p.numel() for p in block.parameters()) for block in model_of(architecture).transformer.h)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_precisions(precision, eager, seen, tmp_path) -> None:
    same_bits(tmp_path, precision=precision, clipping=SOMETIMES)
    assert "reverted" in seen


def test_a_skipped_step_leaves_what_was(eager, seen, tmp_path) -> None:
    """Under fp16 other blocks are updated before an overflow in the last block is known."""

    def spoil(engine: infinity.Engine) -> None:
        parameter = next(iter(engine.module.parameters()))
        gradient = infinity.utils.safe_get_full_grad(parameter)
        assert gradient is not None
        infinity.utils.safe_set_full_grad(parameter, torch.full_like(gradient, float("inf")))

    same_bits(tmp_path, spoil, precision="fp16")
    assert "reverted" in seen


def lower_rate(engine: infinity.Engine) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5


def look(engine: infinity.Engine) -> None:
    for parameter in engine.module.parameters():
        with infinity.zero.GatheredParameters(parameter):
            assert not parameter.isnan().any()


def change_gradients(engine: infinity.Engine) -> None:
    for parameter in engine.module.parameters():
        gradient = infinity.utils.safe_get_full_grad(parameter)
        if gradient is not None:
            infinity.utils.safe_set_full_grad(parameter, gradient * 0.25)


def again(engine: infinity.Engine) -> None:
    """A second backward pass of the same step, which adds to the first."""
    engine.backward(loss_of(engine, DATA[0]))


def drop(engine: infinity.Engine) -> None:
    engine.zero_grad()
    engine.backward(loss_of(engine, DATA[1]))


def evaluate(engine: infinity.Engine) -> None:
    engine.eval()
    with torch.no_grad():
        loss_of(engine, DATA[3])
    engine.train()


def fail(engine: infinity.Engine) -> None:
    """A backward pass that ends half way takes the step's gradients with it; it is run again."""

    def interrupt(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("stop")

    loss = loss_of(engine, DATA[2])
    handle = engine.module.transformer.h[0].ln_1.weight.register_hook(interrupt)
    with pytest.raises(ValueError, match="stop"):
        engine.backward(loss)
    handle.remove()
    engine.backward(loss_of(engine, DATA[2]))


@pytest.mark.parametrize("disturb", [lower_rate, look, change_gradients, again, drop, evaluate, fail])
def test_what_comes_between_backward_and_step(disturb, eager, seen, tmp_path) -> None:
    same_bits(tmp_path, disturb, neutral=disturb in (look, evaluate, fail))
    assert {"reverted", "committed"} == set(seen)


def test_values_between_backward_and_step_are_the_old_ones(eager, tmp_path) -> None:
    with engine_of(tmp_path, "speculative") as engine:
        train(engine, steps=2)
        before = [param.detach().clone() for _, param in engine.named_parameters()]
        engine.backward(loss_of(engine, DATA[2]))
        for param, old in zip(engine.module.parameters(), before, strict=True):
            with infinity.zero.GatheredParameters(param):
                assert torch.equal(param, old)
        engine.step()
        after = [param.detach().clone() for _, param in engine.named_parameters()]
        assert not all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def _train_two_graphs(engine: infinity.Engine) -> list[torch.Tensor]:
    """Two forward passes, and then their backward passes. The second goes through a graph of the values that the
    speculative updates of the first have replaced."""
    for first, second in zip(DATA[::2], DATA[1::2], strict=True):
        for loss in [loss_of(engine, first), loss_of(engine, second)]:
            engine.backward(loss)
        engine.step()
    return states_of(engine)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_a_second_backward_pass_through_a_graph_of_the_old_values(home, eager, seen, tmp_path) -> None:
    results = []
    for schedule in ("barrier", "speculative"):
        with engine_of(tmp_path, schedule, params="none", offload=home, host_memory=1 << 30) as engine:
            results.append(_train_two_graphs(engine))
    assert all(map(torch.equal, *results))
    assert "reverted" in seen


def test_a_graph_that_would_read_hidden_parameters_fails(eager, seen, tmp_path) -> None:
    """The loss itself uses a parameter, so autograd reads it before any hook can roll its update back. The NaN would
    skip the step."""
    with engine_of(tmp_path, "speculative", params="none", offload="cpu") as engine:
        weight = engine.module.transformer.ln_f.weight
        losses = [loss_of(engine, ids) + weight.pow(3).mean() for ids in DATA[:2]]
        losses[0].backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()
        engine.step()
        assert engine.skipped_steps == 0
        assert seen
        train(engine, steps=2)


@pytest.mark.parametrize("clipping", [NEVER, SOMETIMES, ALWAYS])
def test_with_crash_consistent_steps(clipping, eager, tmp_path) -> None:
    """Two versions are enough for a committed step and a speculative one."""
    with engine_of(tmp_path, "auto", clipping=clipping, crash_consistent=True) as engine:
        losses = train(engine, steps=3)
        engine.backward(loss_of(engine, DATA[3]))  # of a step that never ends
    with engine_of(tmp_path, "auto", clipping=clipping, crash_consistent=True) as engine:
        assert engine.resume()[0] is not None
        assert engine.global_steps == 3
        for ids in DATA[3:]:
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses == expected(clipping=clipping)[0]
        states = expected(clipping=clipping)[1]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(states_of(engine), states, strict=True))
        engine.end_run()


def test_a_save_that_training_does_not_wait_for(eager, seen, tmp_path) -> None:
    """It reads the tiles of a unit in order; until it ends no update is speculative."""
    budget = int(least_budget("gpt2", "bf16", 1) * 1.6)  # some tiles of a unit stay in memory
    with engine_of(tmp_path / "swap", "speculative", host_memory=budget) as engine:
        train(engine, steps=2)
        engine.save_checkpoint(tmp_path / "saved", "two", blocking=False)
        expected = states_of(engine)
        losses = []
        for ids in DATA[2:]:
            losses.append(loss_of(engine, ids))
            engine.backward(losses[-1])
            engine.step()
    assert "committed" in seen
    with engine_of(tmp_path / "swap", "deferred", host_memory=budget) as engine:
        engine.load_checkpoint(tmp_path / "saved", "two")
        assert all(torch.equal(a, b) for a, b in zip(states_of(engine), expected, strict=True))
        for ids, loss in zip(DATA[2:], losses, strict=True):
            found = loss_of(engine, ids)
            engine.backward(found)
            engine.step()
            assert found.item() == loss.item()


def test_a_drive_that_fails_in_a_speculative_update_stops_the_engine(eager, tmp_path, monkeypatch) -> None:
    with engine_of(tmp_path, "speculative") as engine:
        train(engine, steps=2)

        def broken(self: StateStore, *_: Any) -> Any:
            raise StorageError(5, "broken", "drive", 0)

        monkeypatch.setattr(StateStore, "write", broken)
        with pytest.raises((StorageError, InfinityError)):
            train(engine, steps=2)
        monkeypatch.undo()
        with pytest.raises(InfinityError, match="close it"):
            train(engine, steps=1)


# Gradients that are reconstructed from the states #


@pytest.mark.parametrize("params", ["nvme", "none"])
@pytest.mark.parametrize("many", [False, True])
def test_elements_that_cannot_be_reconstructed_are_kept(
    many, params, eager, seen, gradients, monkeypatch, tmp_path
) -> None:
    """One by one, or all of a unit's gradients where these are many."""
    update, calls = pipeline.update, []

    def loses(*arguments: Any, **options: Any) -> Lost | None:
        before = arguments[1].view(torch.uint16).tolist()
        lost = update(*arguments, **options)
        if lost is None:
            return None
        calls.append(len(lost.params))
        grads = None if many and len(calls) % 3 == 0 else sorted({*(lost.grads or ()), 0, len(calls) % len(before)})
        places = sorted({*lost.params, len(calls) % len(before)}) if options["params"] else []
        return Lost(grads, places, [before[place] for place in places])

    monkeypatch.setattr(pipeline, "update", loses)
    same_bits(tmp_path, clipping=SOMETIMES, params=params, host_memory=least_budget("gpt2", "bf16", 1, params))
    assert calls
    assert gradients["restored"] > 0
    assert set(seen) == {"committed", "reverted"}


@pytest.mark.parametrize("clipping", [NEVER, SOMETIMES, ALWAYS])
@pytest.mark.parametrize("params", ["none", "cpu"])
def test_parameters_in_memory_are_reconstructed_from_states_on_a_drive(
    params, clipping, eager, seen, gradients, tmp_path
) -> None:
    same_bits(tmp_path, clipping=clipping, params=params, host_memory=least_budget("gpt2", "bf16", 1, params))
    assert set(seen) >= {NEVER: {"committed"}, SOMETIMES: {"committed", "reverted"}, ALWAYS: {"reverted"}}[clipping]
    assert gradients["left"] > 0


def test_speculative_updates_spill_no_gradients(eager, gradients, tmp_path) -> None:
    written = {}
    for schedule in ("deferred", "speculative"):
        with engine_of(tmp_path, schedule, host_memory=least_budget("gpt2", "bf16", 1)) as engine:
            train(engine, steps=2)
            steps = []
            for ids in DATA[2:]:
                engine.backward(loss_of(engine, ids))
                engine.step()
                steps.append(engine.stats().tier_bytes["nvme_write"])
            written[schedule] = statistics.fmean(steps)  # a tile more or less may be written in the step after its own
            trained = sum(param.numel() for param in engine.module.parameters())
    assert gradients["left"] > 0
    assert written["speculative"] < written["deferred"]
    assert written["speculative"] < 13 * trained, "states and parameters; gradients would make it 14"


# Parameters that stay in memory #


@pytest.fixture
def fetched(monkeypatch) -> list[int]:
    """Units that were fetched for a rollback of their updates."""
    units: list[int] = []
    needs_memory = Speculation.needs_memory

    def told(self: Speculation, row: Unit) -> bool:
        needed = needs_memory(self, row)
        units.extend([row.index] * needed)
        return needed

    monkeypatch.setattr(Speculation, "needs_memory", told)
    return units


def room_for_params(architecture: str = "gpt2") -> int:
    """Return a budget with which all parameters stay in memory, and no states."""
    return least_budget(architecture, "bf16", 1) * 3 // 2


@pytest.mark.parametrize("clipping", [NEVER, ALWAYS])
def test_parameters_that_stay_in_memory_are_not_written(clipping, eager, monkeypatch, tmp_path) -> None:
    written: list[str] = []
    write = UnitParams.write

    def told(self: UnitParams, start: int, numel: int) -> Any:
        written.append(self.spec.name)
        return write(self, start, numel)

    monkeypatch.setattr(UnitParams, "write", told)
    with engine_of(tmp_path, "speculative", clipping=clipping, host_memory=room_for_params()) as engine:
        train(engine, steps=2)  # in the first step it is unknown that they stay
        engine.synchronize()
        assert written
        written.clear()
        train(engine, steps=4)
        engine.synchronize()
        assert not written


def leave(engine: infinity.Engine) -> None:
    """Evict all units that no update pins."""
    executor = engine._runtime.executor
    while executor.in_flight.finish_one():
        pass
    for row in tuple(executor._scheduler.in_memory):
        if not row.is_pinned:
            executor._report(ParametersStale(row))


@pytest.mark.parametrize("clipping", [NEVER, SOMETIMES, ALWAYS])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_unit_with_a_speculative_update_may_be_evicted(architecture, clipping, eager, fetched, tmp_path) -> None:
    budget = room_for_params(architecture)
    same_bits(tmp_path, leave, neutral=True, architecture=architecture, clipping=clipping, host_memory=budget)
    assert bool(fetched) == (clipping != NEVER)


@pytest.mark.parametrize("clipping", [NEVER, SOMETIMES])
def test_parameters_that_cannot_be_reconstructed_are_written_again(
    clipping, eager, seen, monkeypatch, tmp_path
) -> None:
    """Once more elements are lost than can be kept, parameters are written again, for two steps."""

    losses, states = expected(clipping=clipping)
    with engine_of(tmp_path, "speculative", clipping=clipping, host_memory=room_for_params()) as engine:
        most = rollback._MOST_LOST_PARAMS
        for step, ids in enumerate(DATA):
            monkeypatch.setattr(rollback, "_MOST_LOST_PARAMS", 0 if step in (2, 3) else most)
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            assert loss.item() == losses[step]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(states_of(engine), states, strict=True))
    assert "committed" in seen


def test_a_drive_that_cannot_say_what_was_before_stops_the_engine(eager, monkeypatch, tmp_path) -> None:
    def broken(self: StateStore, *_: Any) -> Any:
        raise StorageError(5, "broken", "drive", 0)

    with engine_of(tmp_path, "speculative", clipping=ALWAYS) as engine:
        monkeypatch.setattr(StateStore, "read_before", broken)
        with pytest.raises((StorageError, InfinityError)):
            train(engine)
        monkeypatch.undo()
        with pytest.raises(InfinityError, match="close it"):
            train(engine, steps=1)


def test_a_skipped_step_does_not_ask_for_gradients(eager, seen, gradients, tmp_path) -> None:
    with engine_of(tmp_path, "speculative", precision="fp16") as engine:
        train(engine, steps=2)
        engine.backward(loss_of(engine, DATA[2]) * torch.inf)
        before = gradients["restored"]
        engine.step()
        assert engine.skipped_steps > 0
        assert gradients["restored"] == before
        train(engine, steps=1)


# Ranks #


def _train_on_rank(path: Path, home: str) -> list[list[float]]:
    Foresight.speculates = True  # type: ignore[assignment, method-assign]
    results = []
    for schedule in ("deferred", "speculative"):
        with engine_of(path, schedule, clipping=SOMETIMES, params=home, offload=home) as engine:
            losses = train(engine)
            results.append([*losses, *(float(param.double().sum()) for _, param in engine.named_parameters())])
    return results


def test_a_unit_whose_update_may_be_speculative_is_unsharded_again_on_all_ranks(eager, monkeypatch, tmp_path) -> None:
    """Whether its rank had room or not: else some ranks would unshard fewer units than others, and hang."""
    changed: set[int] = set()
    monkeypatch.setattr(Speculation, "can_speculate", lambda *_: False)
    monkeypatch.setattr(Gathering, "changed", lambda _, row: changed.add(row.index))
    with engine_of(tmp_path, "speculative") as engine:
        engine.backward(loss_of(engine, DATA[0]))
        trained = {unit.index for unit in engine._runtime.partition.units if unit.trainable_numel}
        assert changed == trained
        engine.step()


@pytest.mark.parametrize("home", ["nvme", "cpu"])
def test_ranks(home, tmp_path) -> None:
    for waiting, ahead in run_ranks(2, _train_on_rank, tmp_path, home, path=tmp_path):
        assert waiting == ahead


def _train_with_a_second_pass(path: Path) -> list[tuple[list[float], float | None, int]]:
    """Memory for reconstructed gradients holds old values, which no sum may include."""
    Foresight.speculates = True  # type: ignore[assignment, method-assign]
    restore, restored = GradStore.restore, 0

    def filled(self: GradStore, each: UnitGrads) -> torch.Tensor | None:
        nonlocal restored
        buffer = restore(self, each)
        restored += buffer is not None
        return None if buffer is None else buffer.fill_(1000.0)

    GradStore.restore = filled  # type: ignore[method-assign]
    results = []
    for schedule in ("deferred", "speculative"):
        with engine_of(path, schedule) as engine:
            losses = train(engine, lambda engine: engine.backward(loss_of(engine, DATA[0])), steps=3)
            results.append((losses, engine.get_global_grad_norm(), restored))
    return results


def test_reconstructed_gradients_of_ranks_have_zeros_where_there_is_no_gradient(tmp_path) -> None:
    for waiting, ahead in run_ranks(2, _train_with_a_second_pass, tmp_path, path=tmp_path):
        assert waiting[:2] == ahead[:2]
        assert ahead[2] > 0


# When #


def test_updates_are_speculative_after_quiet_steps() -> None:
    foresight = Foresight()
    ran = []
    for quiet in [False, True, True, False, True, True, True, True, True]:
        ran.append(foresight.speculates)
        if foresight.speculates:
            foresight.speculated()
        foresight.after_step(quiet=quiet)
    #              clipped, quiet; ahead, ahead and wrong; two quiet ones, ahead
    assert ran == [False, False, True, True, False, False, True, True, True]


def test_where_every_step_clips_no_update_is_speculative(seen, tmp_path) -> None:
    same_bits(tmp_path, clipping=ALWAYS)
    assert not seen


def test_where_no_update_can_be_speculative_a_warning_says_why(seen, tmp_path, caplog) -> None:
    with engine_of(tmp_path, "speculative", params="none", precision="fp16") as engine:
        train(engine, steps=3)
    assert "no parameters live on a drive" in caplog.text
    assert not seen


def test_double_buffering_takes_twice_the_space_at_most(tmp_path) -> None:
    sizes = {}
    for schedule in ("deferred", "speculative"):
        with engine_of(tmp_path, schedule) as engine:
            train(engine, steps=1)
            sizes[schedule] = engine.stats().peak_bytes["nvme"]
    assert sizes["deferred"] < sizes["speculative"] <= 2 * sizes["deferred"]
