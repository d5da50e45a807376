"""Replays a scenario on the real engine, in one thread, and compares what the scheduler is told and asks for.

The engine trains blocks of the scenario's sizes within its budgets, in one of the worlds of tests/action_logs. The
simulation runs in the same world: there, too, an operation ends when somebody looks at it, or not before somebody waits
for it. What a scenario has beyond that is left out first; `expressed` says what.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import CapacityError
from infinity.schedule.actions import Action, Event
from infinity.schedule.needs import STAGING_UNITS
from infinity.schedule.scheduler import Scheduler
from infinity.simulation import performer
from infinity.simulation.clock import Clock, Operation, Tempo
from infinity.simulation.invariants import violate
from infinity.simulation.model import Call, Change, Drain, Look, Pass, Scenario, Step, ZeroGrad
from infinity.simulation.run import Outcome, simulate, with_last
from infinity.tiers import GradHomes, Memory, SameMemory
from infinity.zero import build, sizing
from tests.action_logs.worlds import world_of

PROMPT, LATE = Tempo(), Tempo(0.0, 10**6)
_WORLDS = {PROMPT: "prompt", LATE: "late"}
_NUMEL = 4096  # of a parameter whose unit has one byte in the scenario
_SIZE = 4 * _NUMEL  # in bytes
_LARGE, _GRADS = 1 << 28, 1 << 24  # bytes
_NORM = 1.0  # gradients are clipped to this
_SCALES = {"quiet": 1e-6, "clipped": 1e6, "overflow": float("inf")}  # of a loss

Decision = tuple[Event, tuple[Action, ...]]


@dataclass
class Log:
    """What a scheduler was told and has asked for.

    Attributes:
        error: what ended it; "" if nothing did.
    """

    decisions: list[Decision] = field(default_factory=list)
    error: str = ""


def _by_number(decided: Any) -> Any:
    """An event or an action with its unit's number, which both worlds share, in the place of the unit."""
    return replace(decided, unit=decided.unit.index) if hasattr(decided, "unit") else decided


@contextmanager
def _recording() -> Iterator[Log]:
    """Of schedulers that decide inside; events that lead to nothing are left out."""
    log, on = Log(), Scheduler.on

    def recorded(self: Scheduler, event: Event) -> Iterator[Action]:
        actions: list[Action] = []
        at = len(log.decisions)  # others may follow while these are performed
        for action in on(self, event):
            if not actions:
                log.decisions.insert(at, (_by_number(event), ()))
            actions.append(_by_number(action))
            log.decisions[at] = _by_number(event), tuple(actions)
            yield action

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Scheduler, "on", recorded)
        yield log


# What can be expressed #


def expressed(scenario: Scenario) -> tuple[Scenario, list[str]]:
    """The scenario as far as the engine can be made to have it, and what is left out, in words."""
    config, left_out = scenario.config, []

    def leave(what: str, found: bool) -> bool:
        if found:
            left_out.append(what)
        return found

    leave("other ranks than the first", len(config.ranks) > 1)
    tempo = config.ranks[0].tempo
    speculative, apart = config.schedule == "speculative", config.staging_bytes > 0
    if leave("an order that is drawn: operations end when they are looked at", tempo not in _WORLDS):
        tempo = PROMPT
    if leave("operations of a device that end late", apart and tempo is not PROMPT):
        tempo = PROMPT
    # Where updates are speculative, states are on the drives, and their writes are not simulated.
    if leave("speculative updates whose writes end late", speculative and tempo is not PROMPT):
        tempo = PROMPT
    leave("states on the device", any(unit.on_device for unit in config.units))
    leave("steps that stay on the drives", config.keeps)
    leave("gradients in shared memory", any(unit.grads == "shared" for unit in config.units))
    units = tuple(
        replace(
            unit,
            grads=unit.grads and ("slot" if unit.grads == "slot" else "own"),
            on_device=False,
            old_params="slots" if speculative and unit.offloaded and unit.grads else "",
            is_double_buffered=speculative and unit.offloaded,
            tiles=1,
            reversible=1,
            reconstructs=False,
            made=unit.offloaded and not apart,
            streams=apart,
            host=unit.host and not speculative,
            parts=False,
            on_drive=(),
            saves=(),
            comes=False,
        )
        for unit in config.units
    )
    leave("states that come to the device", any(unit.comes for unit in config.units))
    leave("saved activations", config.saved > 0)
    leave("gradients that come in parts", any(unit.parts for unit in config.units))
    leave("where speculative updates keep old parameters", speculative and units != config.units)
    if leave("a model of frozen units alone", not any(unit.grads for unit in units)):
        old_params = "slots" if units[0].is_double_buffered else ""
        units = (replace(units[0], grads="own", old_params=old_params), *units[1:])
    calls = tuple(_expressed_calls(scenario, leave))
    config = replace(
        config,
        units=units,
        ranks=(replace(config.ranks[0], tempo=tempo),),
        shared_bytes=0,
        keeps=False,
        images=0,
        ahead_bytes=0,
        staging_bytes=STAGING_UNITS * max(unit.nbytes for unit in units) if apart else 0,
        saved=0,
        device_bytes=0,
    )
    return Scenario(config, calls, scenario.seed), list(dict.fromkeys(left_out))


def _expressed_calls(scenario: Scenario, leave: Callable[[str, bool], bool]) -> Iterator[Call]:
    """Each step has as many passes as the first, which the engine is told before."""
    passes, most = 0, 0
    for call in scenario.calls:
        match call:
            case Pass():
                leave("exceptions within a pass", call.stop is not None)
                leave("layer-major micro-batches", bool(call.micro_batches))
                leave("modules with parameters of several units", any(len(use) > 1 for use in call.uses))
                leave("forward passes that run again within backward", call.segment > 0)
                uses = tuple((unit,) for use in call.uses for unit in use)
                if not call.evaluates:
                    passes += 1
                    if most and leave("steps of other numbers of micro-batches", passes > most):
                        continue
                yield Pass(uses, evaluates=call.evaluates, looks=call.looks)
            case Step():
                if leave("steps of other numbers of micro-batches", passes < (most or 1)):
                    continue
                most, passes = most or passes, 0
                yield call
            case Look() | Change() | ZeroGrad() | Drain():
                yield call
            case _:
                leave("failures and crashes", True)


# The simulation in one thread #


class _OneThread(Clock):
    """Operations end when somebody looks at them (`prompt`), or not before somebody waits for them (`late`)."""

    world = "prompt"

    def __init__(self, random: Random, tempo: Tempo, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(random, tempo, trace)
        self._left: list[Operation] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._left)

    def start(
        self, kind: str, unit: int, end: Callable[[Operation], None] | None = None, tiles: Sequence[int] = ()
    ) -> Operation:
        operation = _Looked(kind, unit, end)
        operation.clock = self
        self._left.append(operation)
        if kind == "pick" and self.world == "prompt":  # whoever submits an update has it computed
            self.wait(operation)
            while (following := self._of_worker()) is not None:
                self.wait(following)
        return operation

    def _of_worker(self) -> Operation | None:
        return next((each for each in self._left if each.kind in ("pick", "update") or each.then is not None), None)

    def tick(self) -> None:
        self.now += 1

    def wait(self, operation: Operation) -> None:
        if operation in self._left:
            self._left.remove(operation)
            self._end(operation)

    def wait_for_next(self) -> None:
        if not self._left:
            violate("progress", "a thread waits, but no operation is in flight")
        self.wait(self._of_worker() or self._left[0])


class _Looked(Operation):
    """An operation that knows whether somebody looks."""

    __slots__ = ("_done", "clock")
    clock: _OneThread

    @property
    def done(self) -> bool:
        if not self._done and self.clock.world == "prompt" and self.kind not in ("pick", "update"):
            self.clock.wait(self)
        return self._done

    @done.setter
    def done(self, value: bool) -> None:
        self._done = value


def in_one_thread(scenario: Scenario) -> Outcome:
    """Runs the scenario as far as it can be expressed."""
    scenario, _ = expressed(scenario)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_OneThread, "world", _WORLDS[scenario.config.ranks[0].tempo])
        monkeypatch.setattr(performer, "Clock", _OneThread)
        return simulate(scenario)


def simulated(scenario: Scenario) -> Log:
    """What the simulation does in an `expressed` scenario."""
    with _recording() as log:
        violation = in_one_thread(scenario).violation
    log.error = "" if violation is None else str(violation)
    return log


# The engine #


class _Block(nn.Module):
    def __init__(self, numel: int, *, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel), requires_grad=not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean() + 1e-3 * x


class _Model(nn.Module):
    """Goes through its blocks as a scenario's pass does.

    Attributes:
        look: does what the user's code does between two blocks.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            _Block(_NUMEL * unit.nbytes, frozen=not unit.grads) for unit in scenario.config.units
        )
        self.look: Callable[[tuple[int, ...]], None] = lambda _: None

    def forward(self, call: Pass) -> torch.Tensor:
        x = torch.ones(2, requires_grad=True)
        for position, (unit,) in enumerate(call.uses):
            for at, other in call.looks:
                if at == position:
                    self.look((other,))
            x = self.blocks[unit](x)
        return x.sum()


@contextmanager
def _laid_out(scenario: Scenario) -> Iterator[None]:
    """What engines have inside: the scenario's budgets, units that stay, and homes of gradients."""
    config = scenario.config
    split_memory, place, device_budgets = build.split_memory, build.place, build.device_budgets
    flat_spec, param_bytes = sizing._flat_spec, sizing.param_bytes

    def split(needs: Any, *args: Any) -> Any:
        homes_bytes = _SIZE * (config.staging_bytes + sum(unit.nbytes for unit in config.units if unit.host))
        made = replace(split_memory(needs, *args), grads_bytes=_GRADS, images_bytes=0, homes_bytes=homes_bytes)
        return replace(made, states_bytes=0) if config.schedule == "speculative" else made

    def budgets(*args: Any) -> Any:
        made = device_budgets(*args)
        made.params.capacity_bytes = _SIZE * config.ranks[0].capacity
        made.sums.capacity_bytes = 0  # gradients of each micro-batch leave the device
        return made

    def sizes(*args: Any) -> Any:
        return replace(param_bytes(*args), staging=_SIZE * config.staging_bytes)

    def homes(rules: Any, specs: Any, shards: Any, split: Any) -> Any:
        slots = [unit for unit, spec in enumerate(config.units) if spec.grads == "slot"]
        own = tuple(unit for unit in range(len(config.units)) if unit not in slots)
        homes = GradHomes(own, tuple(slots), config.slots if slots else 0)
        made = place(rules, specs, shards, split)
        params = tuple(
            (Memory.HOST if unit.host else Memory.NVME) if unit.offloaded else home
            for home, unit in zip(made.params, config.units, strict=True)
        )
        return replace(made, grad_homes=homes, params=params)

    def spec(unit: Any, *args: Any, **options: Any) -> Any:
        stays = not config.units[unit.index].offloaded
        return flat_spec(replace(unit, persistent=stays), *args, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(build, "split_memory", split)
        monkeypatch.setattr(build, "device_budgets", budgets)
        monkeypatch.setattr(build, "place", homes)
        monkeypatch.setattr(sizing, "param_bytes", sizes)
        monkeypatch.setattr(sizing, "_flat_spec", spec)
        yield


def on_engine(scenario: Scenario) -> Log:
    """What the engine does in an `expressed` scenario; an error ends it."""
    config, calls = scenario.config, scenario.calls
    micro = next((count for count in _passes(calls)), 1)
    world = _WORLDS[config.ranks[0].tempo]
    with tempfile.TemporaryDirectory() as path, world_of(world), _laid_out(scenario), ExitStack() as stack:
        values = _configuration(Path(path), config.schedule, micro)
        with _recording() as log:
            try:
                where: dict[str, Any] = {"link": SameMemory()} if config.staging_bytes else {"device": "cpu"}
                engine = infinity.initialize(model=_Model(scenario), config=values, **where)[0]
                _Loop(engine, calls, config.schedule).run()
                stack.callback(engine.close)
            except Exception as error:  # what a planted fault leads to
                log.error = f"{type(error).__name__}: {error}"
    return log


def _passes(calls: tuple[Call, ...]) -> Iterator[int]:
    """Training passes of each step."""
    passes = 0
    for call in calls:
        passes += isinstance(call, Pass) and not call.evaluates
        if isinstance(call, Step):
            yield passes
            passes = 0


def _configuration(path: Path, schedule: str, micro: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.0 if schedule == "backward" else _NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {
            "nvme": [{"path": str(path)}],
            "tile_size": "16MiB",
            "update_schedule": schedule,
            "host_memory": _LARGE,
            "device_memory": _LARGE,
            "fill_device": False,
        },
    }


class _Loop:
    """The training loop of a scenario."""

    def __init__(self, engine: infinity.Engine, calls: tuple[Call, ...], schedule: str) -> None:
        self._engine = engine
        self._calls = calls
        self._schedule = schedule
        self._has_gradients = False
        self._executor = engine._runtime.executor
        engine.module.look = self._look

    def run(self) -> None:
        """Call what the scenario calls; what a rank of the simulation passes over is passed over here."""
        norms = _norms(self._calls, clips=self._schedule != "backward")
        for (call, last), norm in zip(with_last(self._calls), norms, strict=True):
            match call:
                case Step():
                    self._engine.step()
                    self._has_gradients = False
                    if self._schedule == "barrier":
                        self._check_at_rest()
                case Drain():
                    self._drain()
                case _ if self._engine._step.updates.under_way:
                    pass
                case Pass(evaluates=True):
                    with torch.no_grad():
                        self._engine.eval()(call)
                    self._engine.train()
                case Pass():
                    self._engine.backward(self._engine(call) * _SCALES[norm])
                    self._has_gradients = True
                    if not last:
                        self._engine.step()
                case Look(units):
                    self._look(units)
                case Change(unit) if not self._has_gradients:
                    with self._executor.changing(self._executor.units[unit]) as flat:
                        flat.mul_(0.5)
                case ZeroGrad():
                    self._zero_grad()
        if not self._engine._step.updates.under_way:
            self._zero_grad()
        self._drain()

    def _drain(self) -> None:
        self._executor.drain()
        self._check_at_rest()

    def _check_at_rest(self) -> None:
        if self._executor.in_flight.is_busy:
            raise RuntimeError("updates are left behind")

    def _zero_grad(self) -> None:
        self._engine.zero_grad()
        self._has_gradients = False

    def _look(self, units: tuple[int, ...]) -> None:
        with ExitStack() as looks:
            try:
                for unit in units:
                    looks.enter_context(self._executor.resident(self._executor.units[unit]))
            except CapacityError:
                pass  # as refused in the simulation


def _norms(calls: tuple[Call, ...], *, clips: bool) -> list[str]:
    """The norm of the step that each call belongs to."""
    norms, norm = [], "quiet"
    for call in reversed(calls):
        norm = call.norm if isinstance(call, Step) else norm
        norms.append(norm if clips else "quiet")
    return norms[::-1]
