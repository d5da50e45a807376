"""Measures how much matrix products, the optimizer and the drives slow one another down when two or three run at once.

They share cores, caches and memory. The cost differs between machines and must be measured: on one machine, a drive at
its full rate takes one core of four, on another none. Products are measured with few rows and with many: with few rows
their time is the time to read the weights, so that other users of the memory slow them down.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import torch

from infinity.kernels import Hyper
from infinity.memory import Arena, aligned
from infinity.optim.formats import init_states, state_layout, update
from infinity.tiers.state_layout import StateLayout
from infinity.zero.ranks import Ranks

_ROUNDS = 2
_ROWS = (16, 256)
_WIDTH, _LAYERS = 1024, 24  # the weights are larger than any cache
_MOST_TIMES = 20  # a measurement may take so many times its length, until each part has done one step
COMPUTE, OPTIMIZER, DISK = "compute", "optimizer", "disk"
RUNS_OF_DRIVES = _ROUNDS * (2 + 2 * len(_ROWS))  # alone, with the optimizer; with products, with both

Found = list[dict[str, Any]]
Move = Callable[[float], float]  # reads and writes for so many seconds; returns bytes per second
_Beside = tuple[str, tuple[str, ...], int | None]  # a part, the parts that run at the same time, rows of the products


def contention(numel: int, move: Move | None, seconds: float, *, computes_here: bool) -> Found:
    """Return the profile's `contention`.

    Args:
        numel: parameters that one step of the optimizer updates.
        move: makes the drives read and write; None without drives.
        seconds: length of one measurement.
        computes_here: whether the compute device is the CPU.
    """
    with busy_optimizer(numel) as optimizer:
        products = {rows: _products(rows) for rows in _ROWS} if computes_here else {}
        parts = [*([COMPUTE] if computes_here else []), OPTIMIZER, *([DISK] if move else [])]
        shares: defaultdict[_Beside, list[float]] = defaultdict(list)
        for _ in range(_ROUNDS):
            alone: dict[tuple[str, int | None], float] = {}
            for together, rows in _sets(parts):
                threads = {OPTIMIZER: optimizer} | ({} if rows is None else {COMPUTE: products[rows]})
                for part, rate in _together(together, threads, move, seconds).items():
                    own = part, rows if part == COMPUTE else None
                    if len(together) == 1:
                        alone[own] = rate
                    elif rate and alone[own]:  # the planner divides by the share, so it must not be 0
                        others = tuple(other for other in together if other != part)
                        shares[part, others, rows].append(rate / alone[own])
    return _entries(shares)


def _sets(parts: Sequence[str]) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """Yield the parts that run at the same time, and the rows of the products, if any. Each part alone comes first."""
    for size in range(1, len(parts) + 1):
        for together in combinations(parts, size):
            yield from ((together, rows) for rows in (_ROWS if COMPUTE in together else (None,)))


def contention_of_ranks(ranks: Ranks, numel: int, seconds: float, *, computes_here: bool) -> Found:
    """Return `contention` without drives, measured while all ranks of the machine run at once, averaged over ranks.

    It includes the contention between ranks. All ranks must call it.
    """
    ranks.barrier()
    found = contention(numel, None, seconds, computes_here=computes_here)
    shares: defaultdict[_Beside, list[float]] = defaultdict(list)
    for entry in (entry for others in ranks.of_all(found) for entry in others):
        shares[entry["part"], tuple(entry["beside"]), entry["rows"]].append(entry["share"])
    return _entries(shares)


def _entries(shares: Mapping[_Beside, list[float]]) -> Found:
    return [
        {"part": part, "beside": list(others), "rows": rows, "share": min(1.0, statistics.fmean(seen))}
        for (part, others, rows), seen in shares.items()
    ]


def with_those_of_ranks(found: Found, of_ranks: Found) -> Found:
    """Replace entries of `found` that contain a pair of parts of `of_ranks`, which all ranks measured at once."""
    pairs = [{entry["part"], *entry["beside"]} for entry in of_ranks]
    others = [entry for entry in found if not any(pair <= {entry["part"], *entry["beside"]} for pair in pairs)]
    return others + of_ranks


def _together(parts: Sequence[str], threads: Mapping[str, Busy], move: Move | None, seconds: float) -> dict[str, float]:
    """Return the rate of each of these parts while all of them run, each in its own unit."""
    busy = {part: threads[part] for part in parts if part in threads}
    with ExitStack() as stack:
        for thread in busy.values():
            stack.enter_context(thread.working())
        found = dict.fromkeys(parts, 0.0)
        start = time.perf_counter()
        if DISK in parts and move is not None:
            found[DISK] = move(seconds)
        else:
            time.sleep(seconds)
        late = start + _MOST_TIMES * seconds
        while not all(thread.steps for thread in busy.values()) and time.perf_counter() < late:
            time.sleep(seconds)  # on a busy machine, a part may not have done one step yet
        elapsed = time.perf_counter() - start
        found.update((part, thread.steps * thread.amount / elapsed) for part, thread in busy.items())
    return found


class Busy:
    """Repeats a step without pause, in a thread of its own.

    Attributes:
        amount: the work of one step.
        steps: steps that have ended since `working` was last entered.

    Args:
        step: does one step; its argument is the number of the call, from 1.
    """

    def __init__(self, step: Callable[[int], object], amount: int) -> None:
        self._step = step
        self.amount = amount
        self.steps = 0
        self._calls = 0
        self._stopped = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Repeat the step while the body of the context runs."""
        self._stopped.clear()
        self.steps = 0
        thread = threading.Thread(target=self._work, name="infinity-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _work(self) -> None:
        while not self._stopped.is_set():
            self._calls += 1
            self._step(self._calls)
            self.steps += 1


def _products(rows: int) -> Busy:
    """Return the matrix products of a model's linear layers, forward and backward."""
    inward, outward = torch.ones(rows, _WIDTH), torch.ones(rows, _WIDTH)
    layers = [torch.ones(_WIDTH, _WIDTH) for _ in range(_LAYERS)]

    def step(count: int) -> None:
        weight = layers[count % _LAYERS]
        torch.mm(inward, weight.t())
        torch.mm(outward, weight)
        torch.mm(outward.t(), inward)

    return Busy(step, 3 * 2 * rows * _WIDTH**2)


@contextmanager
def busy_optimizer(numel: int) -> Iterator[Busy]:
    """Provide repeated AdamW updates of `numel` parameters in format `split`."""
    layout = state_layout("split")
    param_bytes, state_bytes = numel * layout.param_dtype.itemsize, layout.tile_bytes(numel)
    with (
        closing(Arena(2 * aligned(param_bytes) + aligned(state_bytes))) as arena,
        arena.lease(param_bytes) as param_lease,
        arena.lease(param_bytes) as grad_lease,
        arena.lease(state_bytes) as state_lease,
    ):
        param, grad = (lease.tensor(layout.param_dtype, numel) for lease in (param_lease, grad_lease))
        states = layout.views(state_lease.tensor(torch.uint8), numel)
        init_states(layout, torch.ones(numel), param, states)
        grad.fill_(1e-3)
        yield Busy(partial(_adam_step, layout, param, states, grad), numel)


def _adam_step(
    layout: StateLayout, param: torch.Tensor, states: dict[str, torch.Tensor], grad: torch.Tensor, count: int
) -> None:
    update(layout, param, states, grad, Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, count, decoupled=True))
