"""Ctrl-C at every line of a training step: the engine refuses to go on, or nothing has happened.

The interrupt is raised by a trace function, which may stop the interpreter before any line, those of `except` and
`finally` included, and those of torch's that take modes off its stack and put them back. It may even stop it between
the body of a `with` and the exit, which no signal can; so `with` lines are left out.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

import infinity
from infinity.integrations.deepspeed import parameters as deepspeeds
from infinity.schedule.unit_state import Residency
from infinity.telemetry import StallCause
from infinity.tiers import GradStore, Link, Params, SameMemory, UnitGrads
from infinity.tiers.copies import Move
from infinity.tiers.unit_params import UnitParams
from infinity.zero import GatheredParameters, hooks
from infinity.zero.executor import Executor
from infinity.zero.foresight import Foresight
from infinity.zero.in_flight import InFlight
from infinity.zero.unit import Unit
from tests.api.sequences import WIDTH, Blocks

STEPS, AT = 12, 2  # interrupts come from the third step on
EVERY = int(os.environ.get("INTERRUPT_EVERY", "5"))  # of the lines; 1 takes minutes
ROOT = str(Path(infinity.__file__).parent)
MODES = str(Path(torch.overrides.__file__))  # where torch takes a mode off while the mode's function runs


@pytest.fixture(autouse=True)
def torch_functions_stay_enabled() -> Iterator[None]:
    """An interrupt at the end of a `with` skips its `__exit__`: no mode of torch's may depend on it."""
    yield
    assert not torch._C._is_torch_function_all_disabled()


@dataclass(frozen=True)
class Case:
    """A placement whose steps take different ways."""

    schedule: str
    offload: str
    stage: int = 3
    accumulation: int = 1
    host_memory: int | None = None
    discrete: bool = False
    clipping: float = 0.1

    @property
    def link(self) -> Link | None:
        return SameMemory() if self.discrete else None

    def config(self, path: Path) -> dict[str, Any]:
        home = {"device": self.offload}
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 100}
        if self.stage == 3:
            zero |= {"offload_param": home, "offload_optimizer": home}
        tiering: dict[str, Any] = {"update_schedule": self.schedule, "tile_size": 4096}
        if self.offload == "nvme":
            tiering["nvme"] = [{"path": str(path)}]
        if self.host_memory is not None:
            tiering["host_memory"] = self.host_memory
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0 if self.schedule == "backward" else self.clipping,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": zero,
            "tiering": tiering,
        }


CASES = {
    "deferred-nvme": Case("deferred", "nvme"),
    "backward-nvme": Case("backward", "nvme"),
    "stage-0": Case("auto", "none", stage=0, accumulation=2),
}


def data(step: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + micro_batch))


def one_step(engine: infinity.Engine, step: int) -> None:
    for micro_batch in range(engine.config.gradient_accumulation_steps):
        engine.backward(engine(data(step, micro_batch)))
        engine.step()


@dataclass(frozen=True)
class State:
    weights: dict[str, torch.Tensor]
    lr: list[float]

    @staticmethod
    def of(engine: infinity.Engine) -> State:
        return State(dict(engine.named_parameters()), engine.get_lr())

    def equals(self, other: State) -> bool:
        return self.lr == other.lr and all(torch.equal(other.weights[n], w) for n, w in self.weights.items())


Line = tuple[str, int]


def traced(
    action: Callable[[], None], line: Callable[[Line], None], within: str | tuple[str, ...] = (ROOT, MODES)
) -> None:
    """Run `action` with `line` called before every line of such files in this thread."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(within) else None

    sys.settrace(enter)
    try:
        action()
    finally:
        sys.settrace(None)


def engine_at(case: Case, path: Path) -> infinity.Engine:
    """One that has made the steps before the interrupt."""
    engine = infinity.initialize(model=Blocks(), config=case.config(path), link=case.link)[0]
    for step in range(AT):
        one_step(engine, step)
    return engine


@cache
def reference(case: Case) -> list[State]:
    """The state before each step, and after the last."""
    with (
        tempfile.TemporaryDirectory() as path,
        infinity.initialize(model=Blocks(), config=case.config(Path(path)), link=case.link)[0] as engine,
    ):
        states = [State.of(engine)]
        for step in range(STEPS):
            one_step(engine, step)
            states.append(State.of(engine))
    return states


@cache
def with_lines(file: str) -> frozenset[int]:
    """Lines on which a `with` statement begins."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return frozenset(node.lineno for node in ast.walk(tree) if isinstance(node, ast.With))


@cache
def lines_of_a_step(case: Case) -> Counter[Line]:
    """How often each line runs in the step that is interrupted and the next forward, under which updates may run."""
    seen: Counter[Line] = Counter()

    def line(where: Line) -> None:
        if where[1] not in with_lines(where[0]):
            seen[where] += 1

    with tempfile.TemporaryDirectory() as path, engine_at(case, Path(path)) as engine:
        traced(lambda: run_interrupted(engine), line)
    return seen


def run_interrupted(engine: infinity.Engine) -> None:
    step = engine.global_steps
    one_step(engine, step)
    engine(data(step + 1, 0))


@dataclass
class Victim:
    """An engine that is interrupted in one step after the other, until it refuses to go on; then a fresh one is.

    Attributes:
        states: before each step, and after the last.
    """

    case: Case
    path: Path
    states: list[State]
    engine: infinity.Engine | None = None

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def interrupt_at(self, where: Line, occurrence: int) -> str:
        """What became of the engine: "refused", or "nothing" with all its numbers right."""
        self.engine = engine = self.engine or engine_at(self.case, self.path)
        step, left = engine.global_steps, [occurrence]

        def line(here: Line) -> None:
            if here == where:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt

        try:
            traced(lambda: run_interrupted(engine), line, where[0])
        except KeyboardInterrupt:
            pass
        else:
            self.close()
            return "not reached"  # the order of asynchronous work differs from run to run
        try:
            finish_or_drop(engine)
            state = State.of(engine)
        except infinity.InfinityError as error:
            if "has stopped after an error" not in str(error):
                raise
            with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
                engine.save_checkpoint(self.path / "saved")
            self.close()
            return "refused"
        assert not _get_current_function_mode_stack(), "torch is left in the engine's mode"
        assert state.equals(self.states[engine.global_steps]), f"not the state after {engine.global_steps} steps"
        assert engine.global_steps in (step, step + 1)
        assert engine.skipped_steps == 0
        if engine.micro_steps % self.case.accumulation:  # an interrupt between two micro-batches leaves the count
            while engine.micro_steps % self.case.accumulation:
                engine.step()
            one_step(engine, engine.global_steps)
            self.close()
        elif engine.global_steps == STEPS - 1:
            self.finish()
        return "nothing"

    def interrupt_last(self, where: Line, occurrence: int) -> str:
        """As `interrupt_at`, or at an earlier time if this step runs the line less often."""
        outcome = "not reached"
        for earlier in range(occurrence, 0, -1):
            outcome = self.interrupt_at(where, earlier)
            if outcome != "not reached":
                break
        return outcome

    def finish(self) -> None:
        """Make a step that is not interrupted."""
        if self.engine is not None:
            one_step(self.engine, self.engine.global_steps)
            assert State.of(self.engine).equals(self.states[self.engine.global_steps]), "the step afterwards differs"
            self.close()


def finish_or_drop(engine: infinity.Engine) -> None:
    """What a user does who has caught the interrupt: the step is done over, unless only its `step()` is left."""
    try:
        engine.zero_grad()
    except infinity.InfinityError as error:
        if "have updated parameters already" not in str(error):
            raise
        engine.step()


FIRST, LAST = 0, 1


def sweep(
    case: Case, path: Path, every: int, within: str = "", occurrences: tuple[int, ...] = (FIRST, LAST)
) -> Counter[str]:
    """Interrupt at the first and the last time of every n-th line of files with such a path."""
    victim = Victim(case, path, reference(case))
    outcomes: Counter[str] = Counter()
    lines = sorted((where, times) for where, times in lines_of_a_step(case).items() if within in where[0])
    for index, (where, times) in enumerate(lines):
        if index % every:
            continue
        for occurrence in {(1, times)[which] for which in occurrences}:
            try:
                outcomes[victim.interrupt_last(where, occurrence)] += 1
            except BaseException as error:
                raise AssertionError(f"interrupted at {where[0]}:{where[1]}, time {occurrence} of {times}") from error
    victim.finish()
    return outcomes


def test_an_interrupt_where_torch_takes_modes_off_its_stack_is_refused_or_nothing(tmp_path) -> None:
    outcomes = sweep(Case("deferred", "cpu"), tmp_path, 2, MODES)
    assert outcomes["nothing"] > 10


class Other(TorchFunctionMode):
    """A mode of the user's, around the engine or left in it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("left", ["engine's mode is off", "user's mode is on"])
def test_a_failed_forward_takes_no_other_mode_off_the_stack(left, tmp_path) -> None:
    def fail(*_: Any) -> None:
        if left == "engine's mode is off":
            _pop_mode()
        else:
            _push_mode(inner)
        raise KeyboardInterrupt

    outer, inner = Other(), Other()
    with engine_at(Case("deferred", "cpu"), tmp_path) as engine, outer:
        handle = engine.module.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            engine(data(AT, 0))
        handle.remove()
        stack = _get_current_function_mode_stack()
        assert stack == ([outer] if left == "engine's mode is off" else [outer, inner])
        if inner in stack:
            _pop_mode()
        one_step(engine, AT)
        assert _get_current_function_mode_stack() == [outer]


def test_an_interrupt_between_instructions_that_order_hooks_loses_none(tmp_path) -> None:
    """Python takes signals also within a line. The user's newer hooks are moved before the engine's in each step."""
    left = [0]

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not hooks._move_to_end.__code__:
            return None
        frame.f_trace_opcodes = True
        return local

    def step_with_new_hooks(engine: infinity.Engine, step: int, instruction: int) -> bool:
        """Whether the step was interrupted, and made again."""
        block = engine.module.blocks[1]
        modules = [engine.module, block]
        handles = [each.register_forward_hook(lambda *_: None) for each in modules]
        handles += [p.register_post_accumulate_grad_hook(lambda _: None) for p in block.parameters()]
        left[0] = instruction
        sys.settrace(enter)
        try:
            one_step(engine, step)
        except KeyboardInterrupt:
            sys.settrace(None)
            engine.zero_grad()
            one_step(engine, step)
            return True
        finally:
            sys.settrace(None)
            for handle in handles:
                handle.remove()
        return False

    case = Case("deferred", "cpu")
    with engine_at(case, tmp_path) as engine:
        hooks_before = [len(each._forward_hooks) for each in engine.module.modules()]
        step = AT
        while step_with_new_hooks(engine, step, 1 + 3 * (step - AT)):
            step += 1
        assert step - AT > 20
        assert [len(each._forward_hooks) for each in engine.module.modules()] == hooks_before
        interrupted = State.of(engine)
    with engine_at(case, tmp_path) as engine:
        for each in range(AT, step + 1):
            one_step(engine, each)
        assert State.of(engine).equals(interrupted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_is_refused_or_nothing(case, tmp_path) -> None:
    outcomes = sweep(CASES[case], tmp_path, EVERY)
    assert outcomes["nothing"] > 0
    assert outcomes["refused"] > 0


@pytest.mark.parametrize(
    ("states", "file"),
    [
        ("cpu", "tiers/params.py"),
        ("cpu", "tiers/unit_params.py"),
        ("cpu", "zero/in_flight.py"),
        ("none", "tiers/device_grads.py"),
        ("none", "tiers/params.py"),
        ("none", "zero/in_flight.py"),
    ],
)
@pytest.mark.slow
def test_an_interrupt_on_a_device_with_memory_of_its_own_is_refused_or_nothing(states, file, tmp_path) -> None:
    outcomes = sweep(Case("backward" if states == "cpu" else "deferred", states, discrete=True), tmp_path, EVERY, file)
    assert outcomes["nothing"] + outcomes["refused"] > 0  # of some files every fifth line is within an update


def test_later_work_does_not_hide_an_interrupted_ownership_transfer(tmp_path, monkeypatch) -> None:
    """Other units' values come to the device before anybody looks."""
    send_up, left = Params._upload_newest, [KeyboardInterrupt()]

    def interrupted(params: Params, each: Any) -> None:
        if left:
            raise left.pop()
        send_up(params, each)

    with engine_at(Case("deferred", "cpu", discrete=True), tmp_path) as engine:
        one_step(engine, 0)
        engine.synchronize()
        params = engine._runtime.params
        monkeypatch.setattr(Params, "_upload_newest", interrupted)
        for unit in params.units[:2]:
            assert params.open_host(unit)
            for move in params.begin_change(unit):
                move.transfer.result()
            with suppress(KeyboardInterrupt):
                params.end_change(unit)
        assert not left
        with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
            one_step(engine, 1)


def test_an_interrupted_write_of_a_changed_unit_is_waited_for_by_its_next_eviction(tmp_path, monkeypatch) -> None:
    wait, left = UnitParams.wait, [KeyboardInterrupt()]

    def interrupted(params: UnitParams, move: Move) -> None:
        if left and move.cause is StallCause.DISK_WRITE:
            raise left.pop()
        wait(params, move)

    with engine_at(CASES["deferred-nvme"], tmp_path) as engine:
        engine.synchronize()
        executor = engine._runtime.executor
        with executor.changing(executor.units[0]) as flat:
            flat.fill_(7.0)
        monkeypatch.setattr(UnitParams, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor._evict(executor.units[0])
        executor._evict(executor.units[0])
        with executor.resident(executor.units[0]) as flat:
            assert (flat == 7.0).all()
        one_step(engine, AT)


def test_an_interrupted_zero_grad_leaves_no_part_of_the_gradients(tmp_path, monkeypatch) -> None:
    drop, calls = GradStore.drop, []

    def interrupted(grads: GradStore, each: UnitGrads) -> None:
        calls.append(each)
        if len(calls) == 2:
            raise KeyboardInterrupt
        drop(grads, each)

    case = CASES["deferred-nvme"]
    states = reference(case)
    with engine_at(case, tmp_path) as engine:
        engine.backward(engine(data(AT + 1, 0)))
        engine.synchronize()
        monkeypatch.setattr(GradStore, "drop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.zero_grad()
        with pytest.raises(infinity.InfinityError, match="or leave it out with"):
            engine.step()
        one_step(engine, AT)
        assert State.of(engine).equals(states[AT + 1])


def test_an_interrupt_before_stale_copies_are_dropped_stops_the_engine(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Foresight, "speculates", True)
    spill_early, left = Executor._spill_early, [KeyboardInterrupt()]

    def interrupted(executor: Executor) -> None:
        spill_early(executor)
        if left:
            raise left.pop()

    with engine_at(Case("speculative", "nvme", host_memory=106_496, clipping=1e6), tmp_path) as engine:
        one_step(engine, AT)
        engine.backward(engine(data(AT + 1, 0)))
        assert engine._runtime.executor.speculation.undecided
        monkeypatch.setattr(Executor, "_spill_early", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.zero_grad()
        with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
            one_step(engine, AT + 1)


def test_an_interrupt_while_updates_are_drained_leaves_no_unit_pinned(tmp_path, monkeypatch) -> None:
    wait_computed, left = InFlight.wait_computed, [KeyboardInterrupt()]

    def interrupted(in_flight: InFlight, each: Unit) -> None:
        if left:
            raise left.pop()
        wait_computed(in_flight, each)

    with engine_at(Case("deferred", "nvme", host_memory=106_496), tmp_path) as engine:
        executor = engine._runtime.executor
        one_step(engine, AT)
        assert any(row.residency is Residency.STORED for row in executor.in_flight.due)
        monkeypatch.setattr(InFlight, "wait_computed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.synchronize()
        assert all(row.params.compute_copy.pins == int(row.ticket is not None) for row in executor.units)
        engine.synchronize()


# Of the two ways that a speculative update ends, each line is interrupted the first time in one, the last in the other.
OUTCOMES = [pytest.param(0.1, FIRST, id="reverted"), pytest.param(1e6, LAST, id="committed")]


@pytest.mark.parametrize(("clipping", "occurrence"), OUTCOMES)
@pytest.mark.parametrize(
    "file",
    [
        "schedule/scheduler.py",
        "tiers/params.py",
        "zero/executor.py",
        "zero/in_flight.py",
        "zero/speculation.py",
        "zero/unit.py",
        "zero/updates.py",
    ],
)
@pytest.mark.slow
def test_an_interrupt_of_speculative_updates_is_refused_or_leaves_no_trace(
    file, clipping, occurrence, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Foresight, "speculates", True)
    case = Case("speculative", "nvme", host_memory=106_496, clipping=clipping)
    outcomes = sweep(case, tmp_path, EVERY, file, (occurrence,))
    assert outcomes["nothing"] > 0


@pytest.mark.parametrize(("clipping", "occurrence"), OUTCOMES)
@pytest.mark.parametrize("file", ["zero/speculation.py", "optim/pipeline.py", "optim/undo_log.py"])
@pytest.mark.slow
def test_an_interrupt_of_updates_with_an_undo_log_is_refused_or_leaves_no_trace(
    file, clipping, occurrence, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Foresight, "speculates", True)
    case = Case("speculative", "cpu", discrete=True, clipping=clipping)
    outcomes = sweep(case, tmp_path, EVERY, file, (occurrence,))
    assert outcomes["nothing"] + outcomes["refused"] > 0


@pytest.mark.parametrize("file", ["tiers/grads.py", "zero/gradients.py"])
@pytest.mark.slow
def test_an_interrupt_while_gradients_spill_is_refused_or_nothing(file, tmp_path) -> None:
    outcomes = sweep(Case("deferred", "nvme", accumulation=2, host_memory=106_496), tmp_path, EVERY, file)
    assert outcomes["nothing"] > 0


@pytest.mark.parametrize("context", [GatheredParameters, deepspeeds.GatheredParameters])
def test_an_interrupt_on_the_way_into_gathered_parameters_leaves_none_gathered(context, tmp_path) -> None:
    case = Case("deferred", "cpu")
    lines = 0

    def count(where: Line) -> None:
        nonlocal lines
        lines += where[1] not in with_lines(where[0])

    def at(number: int) -> Callable[[Line], None]:
        left = [number]

        def line(where: Line) -> None:
            left[0] -= where[1] not in with_lines(where[0])
            if left[0] == 0:
                left[0] = -1
                raise KeyboardInterrupt

        return line

    with engine_at(case, tmp_path) as engine:
        gathered = context(list(engine.module.parameters()))
        traced(gathered.__enter__, count)
        gathered.__exit__(None, None, None)
        weights = State.of(engine).weights
        for number in range(1, lines, 11):
            gathered = context(list(engine.module.parameters()))
            with suppress(KeyboardInterrupt):
                traced(gathered.__enter__, at(number))
                gathered.__exit__(None, None, None)
            for name, value in State.of(engine).weights.items():
                assert torch.equal(value, weights[name]), f"{name}, interrupted at line {number} of {lines}"
            engine(data(AT, 0))
        one_step(engine, AT)
