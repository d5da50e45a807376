"""Measurements of the optimizer kernels, their peers and the memory bandwidth, for `infinity bench-adam`.

All contenders take turns, one step each per round, so that other programs on the machine affect all of them equally.
The roofline is `bare_loop`: the reads and writes of fp32 Adam with almost no arithmetic. The triad of McCalpin's
STREAM, a = b + s * c, shows the bandwidth of a program that only streams: it reads two arrays and writes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from infinity.kernels import Hyper, bare_loop, set_threads
from infinity.memory import ALIGN_BYTES, Arena
from infinity.optim.formats import init_states, state_layout, update
from infinity.tiers.state_layout import StateLayout

ROOFLINE = "bare loop"
TRIAD = "triad"
_LR = 1e-3
_FP32_BYTES = 28  # read p, g, m, v; write p, m, v
TRIAD_BYTES = 12  # of float32

Step = Callable[[], float]  # does one step and returns its seconds


@dataclass(frozen=True)
class Peer:
    """An fp32 optimizer of another library.

    Attributes:
        start: returns a context of its step, for (parameters, threads). The step is valid inside of the context.
    """

    name: str
    start: Callable[[int, int], AbstractContextManager[Step]]


@dataclass(frozen=True)
class AdamBenchJob:
    """Settings of a measurement.

    Attributes:
        formats: state formats. Gradients have the dtype of the format's parameter.
        peers: "torch fused" and "torch foreach", or one of them, or none.
        other: a further contender; None for none.
    """

    numel: int
    threads: int
    formats: tuple[str, ...]
    peers: tuple[str, ...]
    other: Peer | None
    rounds: int


@dataclass(frozen=True)
class AdamBenchResult:
    """One contender's steps.

    Attributes:
        bytes_per_param: memory traffic of a step: each byte that must be read or written, counted once.
        seconds: duration of each measured round, in order.
    """

    name: str
    bytes_per_param: float
    seconds: tuple[float, ...]

    def params_per_s(self, numel: int) -> float:
        return numel / sorted(self.seconds)[len(self.seconds) // 2]

    def ratio(self, other: AdamBenchResult) -> tuple[float, float, float]:
        """Return the speed relative to `other`: lower quartile, median and upper quartile over the rounds."""
        ratios = sorted(b / a for a, b in zip(self.seconds, other.seconds, strict=True))
        return tuple(ratios[round(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))  # type: ignore[return-value]

    def bandwidth_ratio(self, other: AdamBenchResult) -> tuple[float, float, float]:
        """Return the quartiles of the bandwidth relative to `other`."""
        low, median, high = self.ratio(other)
        more = self.bytes_per_param / other.bytes_per_param
        return low * more, median * more, high * more


def run_adam_bench(job: AdamBenchJob, progress: Callable[[str], None]) -> list[AdamBenchResult]:
    """Measure all contenders of a job; the roofline comes first."""
    set_threads(job.threads)
    torch.set_num_threads(job.threads)
    contenders: list[tuple[str, float, Step, list[float]]] = []
    with ExitStack() as stack:
        for name, bytes_per_param, step in _contenders(job, stack):
            progress(f"{job.numel:,} parameters: preparing {name}")
            step()  # the first step touches new memory and, in a peer, may compile
            contenders.append((name, bytes_per_param, step, []))
        for round_index in range(job.rounds):
            progress(f"{job.numel:,} parameters: round {round_index + 1} of {job.rounds}")
            for _, _, step, seconds in contenders:
                seconds.append(step())
    return [AdamBenchResult(name, traffic, tuple(seconds)) for name, traffic, _, seconds in contenders]


def _contenders(job: AdamBenchJob, stack: ExitStack) -> Iterator[tuple[str, float, Step]]:
    """Yield name, bytes of traffic per parameter, and step of every contender.

    The kernels use an arena with huge pages, as in training. The peers use torch's memory. The bare loop, which does
    not change values, shares the arena's fp32 tensors.
    """
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(job.numel, generator=generator, dtype=torch.float32)
    for name in ("fp32", *(other for other in job.formats if other != "fp32")):
        layout = state_layout(name)
        lengths = {"param": job.numel * layout.param_dtype.itemsize, "states": layout.tile_bytes(job.numel)}
        arena = Arena(2 * lengths["param"] + lengths["states"] + 4 * ALIGN_BYTES)
        stack.callback(arena.close)
        leases = [stack.enter_context(arena.lease(lengths[name])) for name in ("param", "param", "states")]
        param, grad = (lease.tensor(layout.param_dtype, job.numel) for lease in leases[:2])
        states = layout.views(leases[2].tensor(torch.uint8), job.numel)
        init_states(layout, source, param, states)
        grad.copy_(source)
        if name == "fp32":
            roofline = partial(bare_loop, param, states["exp_avg"], states["exp_avg_sq"], grad)
            yield ROOFLINE, _FP32_BYTES, _timed(roofline)
        if name in job.formats:
            yield name, _traffic(layout), _format_step(layout, param, states, grad)
    yield TRIAD, TRIAD_BYTES, triad(source)
    for name in job.peers:
        yield name, _FP32_BYTES, _torch_step(name, source)
    if job.other is not None:
        yield job.other.name, _FP32_BYTES, stack.enter_context(job.other.start(job.numel, job.threads))


def triad(values: torch.Tensor) -> Step:
    """Return a step that makes one pass over arrays as long as these values."""
    first, second, out = values.clone(), values.clone(), torch.zeros_like(values)
    return _timed(lambda: torch.add(first, second, alpha=3.0, out=out))


def _timed(body: Callable[[], object]) -> Step:
    def step() -> float:
        start_s = time.perf_counter()
        body()
        return time.perf_counter() - start_s

    return step


def _traffic(layout: StateLayout) -> float:
    """Return the bytes read and written per parameter: states and parameter in place, and the gradient, read once."""
    return 2 * (layout.bytes_per_param + layout.param_dtype.itemsize) + layout.param_dtype.itemsize


def _format_step(layout: StateLayout, param: torch.Tensor, states: dict[str, torch.Tensor], grad: torch.Tensor) -> Step:
    steps = count(1)

    def body() -> None:
        hyper = Hyper(_LR, 0.9, 0.999, 1e-8, 0.01, next(steps), decoupled=True)
        update(layout, param, states, grad, hyper)

    return _timed(body)


def _torch_step(name: str, values: torch.Tensor) -> Step:
    parameter = torch.nn.Parameter(values)
    parameter.grad = values.clone()
    fused = name == "torch fused"
    return _timed(torch.optim.AdamW([parameter], lr=_LR, fused=fused, foreach=not fused).step)
