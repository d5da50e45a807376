"""Every second that the compute thread waits has the cause that it waited for, and no second is counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import infinity
from infinity.kernels import Lost
from infinity.memory import StableBuffer
from infinity.optim import pipeline
from infinity.telemetry import Counters, StallCause, StepStats, Times, Waits
from infinity.tiers import Link, SameMemory, Transfer, to_host
from tests.behaviour.disks import SlowDisk, swap_on
from tests.behaviour.reference import Placement, Recipe, batches, least_memory, loss_of, tiny_llama

DELAY_S = 0.02
# The longer delays are for a busy machine, on which waits for the processor hide a short one, or take as long.
DELAYS_S = (DELAY_S, 4 * DELAY_S, 16 * DELAY_S)
MOST_STEPS = 16

fast_update, fast_allocate = pipeline.update, StableBuffer.allocate


class UnclearError(AssertionError):
    """The delay did not stand out among the other waits."""


def with_longer_delays(test: Callable[[float], None]) -> None:
    """Call `test(delay_s)` until a delay stands out."""
    for delay_s in DELAYS_S[:-1]:
        try:
            return test(delay_s)
        except UnclearError:
            pass
    return test(DELAYS_S[-1])


class SlowLink(SameMemory):
    """A device with a bus that takes its time, in one direction."""

    def __init__(self, upload_s: float = 0.0, download_s: float = 0.0) -> None:
        self._upload_s, self._download_s = upload_s, download_s

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        return _Late(super().upload(target, source), self._upload_s)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        return _Late(super().download(target, source), self._download_s)


class _Late:
    def __init__(self, token: Transfer, delay_s: float) -> None:
        self._token = token
        self._due_s = time.perf_counter() + delay_s

    def done(self) -> bool:
        return time.perf_counter() >= self._due_s

    def times(self) -> Times | None:
        return self._token.times() if self.done() else None

    def result(self) -> None:
        time.sleep(max(0.0, self._due_s - time.perf_counter()))


def train(config: dict, link: Link | None = None, steps: int = 4) -> list[tuple[StepStats, float]]:
    """Statistics and wall seconds, measured from outside, of the steps after the first two."""
    measured = []
    with infinity.initialize(model=tiny_llama(), config=config, link=link, device="cpu")[0] as engine:
        for ids in batches(steps + 2):
            start_s = time.perf_counter()
            engine.backward(loss_of(engine, ids))
            engine.step()
            measured.append((engine.stats(), time.perf_counter() - start_s))
    return measured[2:]


def seconds_queued() -> float:
    """How long this thread has been ready to run, and waited for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def assert_the_cause_is(cause: StallCause, measured: list[tuple[StepStats, float]], at_least_s: float) -> None:
    """Most of what a step waited was for `cause`, and no step waited longer than it took.

    One step is enough: on a busy machine others also wait for the processor, which counts as the worker's work.

    Raises:
        UnclearError: in no step.
    """
    for stats, wall_s in measured:
        assert sum(stats.stall_s.values()) <= sum(stats.phase_s.values()) <= wall_s
        assert "collective" not in stats.stall_s  # on one process
    stalls = [stats.stall_s for stats, _ in measured]
    if not any(s.get(cause.value, 0.0) >= max(at_least_s, 0.6 * sum(s.values())) for s in stalls):
        raise UnclearError(stalls)


@pytest.fixture
def slow_disk(monkeypatch) -> Callable[[float, float], None]:
    return lambda read_s, write_s: swap_on(monkeypatch, lambda engine: SlowDisk(engine, read_s, write_s))


def slow_optimizer(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    def slow(*args, **options) -> Lost | None:
        time.sleep(delay_s)
        return fast_update(*args, **options)

    monkeypatch.setattr(pipeline, "update", slow)


@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier"])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_reading_states_late_is_the_disk_and_not_the_optimizer(schedule, params, slow_disk, tmp_path) -> None:
    """The compute thread waits for the worker, which waits for the disk."""
    config = Recipe("bf16").config(Placement(params, "nvme", tmp_path, "64KiB", schedule=schedule))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")
    with_longer_delays(partial(reads_are_the_cause, config, slow_disk))


def reads_are_the_cause(config: dict, slow_disk: Callable[[float, float], None], delay_s: float) -> None:
    slow_disk(delay_s, 0.0)
    assert_the_cause_is(StallCause.DISK_READ, train(config), at_least_s=delay_s / 2)


def test_reading_parameters_late_is_the_disk(slow_disk, tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "cpu", tmp_path))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")
    with_longer_delays(partial(reads_are_the_cause, config, slow_disk))


@pytest.mark.parametrize("schedule", ["backward", "barrier"])
def test_writing_states_late_is_the_disk(schedule, slow_disk, tmp_path) -> None:
    config = Recipe("bf16").config(Placement("cpu", "nvme", tmp_path, "64KiB", schedule=schedule))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")

    def writes_are_the_cause(delay_s: float) -> None:
        slow_disk(0.0, delay_s)
        assert_the_cause_is(StallCause.DISK_WRITE, train(config), at_least_s=delay_s / 2)

    with_longer_delays(writes_are_the_cause)


@pytest.mark.parametrize("schedule", ["backward", "barrier"])
def test_a_slow_update_is_the_optimizer(schedule, monkeypatch) -> None:
    config = Recipe("bf16").config(Placement("cpu", "cpu", schedule=schedule))

    def updates_are_the_cause(delay_s: float) -> None:
        slow_optimizer(monkeypatch, delay_s)
        assert_the_cause_is(StallCause.OPTIMIZER, train(config), at_least_s=delay_s / 2)

    with_longer_delays(updates_are_the_cause)


@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier"])
@pytest.mark.parametrize("slow", [StallCause.DISK_READ, StallCause.DISK_WRITE, StallCause.OPTIMIZER])
def test_the_seconds_by_cause_add_up_to_what_a_step_waits(slow, schedule, slow_disk, monkeypatch, tmp_path) -> None:
    """Measured from outside: the seconds in which the compute thread does not compute."""
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB", schedule=schedule))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")

    def add_up(delay_s: float) -> None:
        if slow is StallCause.OPTIMIZER:
            slow_optimizer(monkeypatch, delay_s)
        else:
            slow_disk(delay_s * (slow is StallCause.DISK_READ), delay_s * (slow is StallCause.DISK_WRITE))
        assert_causes_add_up(config, slow)

    with_longer_delays(add_up)


def assert_causes_add_up(config: dict, slow: StallCause) -> None:
    """One step is enough: on a busy machine the thread waits for the processor, too, in a stall or not.

    Raises:
        UnclearError: in no step.
    """
    shares: list[tuple[float, float, float]] = []
    with infinity.initialize(model=tiny_llama(), config=config, device="cpu")[0] as engine:
        for ids in batches(MOST_STEPS):
            start_s, computing_s, queued_s = time.perf_counter(), time.thread_time(), seconds_queued()
            engine.backward(loss_of(engine, ids))
            engine.step()
            wall_s = time.perf_counter() - start_s
            away_s = wall_s - (time.thread_time() - computing_s)
            waited_s = away_s - (seconds_queued() - queued_s)
            stalls = engine.stats().stall_s
            assert sum(stalls.values()) <= wall_s
            shares.append(
                (sum(stalls.values()) / waited_s, sum(stalls.values()) / away_s, stalls.get(slow.value, 0.0) / away_s)
            )
            least, most, of_cause = shares[-1]
            if len(shares) > 2 and least > 0.9 and most < 1.1 and of_cause > 0.5:
                return
    raise UnclearError(f"no step waited as long as its causes: {shares}")


def test_a_gradient_that_is_still_being_written_is_no_read(slow_disk, tmp_path) -> None:
    """Spilled gradients whose update comes before their write is over: the states are in memory, so all writes are
    theirs and the parameters'."""
    config = Recipe("bf16", clipping=0.5).config(Placement("nvme", "cpu", tmp_path, schedule="deferred"))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")

    def writes_are_no_reads(delay_s: float) -> None:
        slow_disk(0.0, delay_s)
        measured = train(config)
        assert_the_cause_is(StallCause.DISK_WRITE, measured, at_least_s=delay_s / 2)
        if not any(stats.stall_s.get("disk_read", 0.0) < delay_s / 2 for stats, _ in measured):
            raise UnclearError([stats.stall_s for stats, _ in measured])

    with_longer_delays(writes_are_no_reads)


@pytest.mark.parametrize(
    ("device", "uploads", "downloads"),
    [("cpu", 1, 0), ("nvme", 1, 0), ("nvme", 0, 4)],  # the last runs under backward
    ids=["upload", "staged-upload", "download"],
)
def test_a_slow_link_is_the_link(device, uploads, downloads, tmp_path) -> None:
    """Also where the optimizer's thread waits for a download before it can update."""
    config = Recipe("bf16").config(Placement(device, device, tmp_path, "64KiB", schedule="backward"))
    config["tiering"]["device_memory"] = least_memory(
        tiny_llama(), config, "device_memory", link=SlowLink(), device="cpu"
    )

    def copies_are_the_cause(delay_s: float) -> None:
        link = SlowLink(uploads * delay_s, downloads * delay_s)
        assert_the_cause_is(StallCause.HOST_LINK, train(config, link), at_least_s=delay_s / 2)

    with_longer_delays(copies_are_the_cause)


def test_slow_memory_is_the_allocator(monkeypatch, tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "cpu", tmp_path))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")

    def allocations_are_the_cause(delay_s: float) -> None:
        def slow(buffer: StableBuffer) -> None:
            time.sleep(delay_s)
            fast_allocate(buffer)

        monkeypatch.setattr(StableBuffer, "allocate", slow)
        assert_the_cause_is(StallCause.ALLOCATOR, train(config), at_least_s=delay_s)

    with_longer_delays(allocations_are_the_cause)


def test_a_gradient_is_copied_over_the_link(monkeypatch) -> None:
    class OnDevice:
        device = torch.device("xpu")
        nbytes = 12

        def cpu(self) -> torch.Tensor:
            time.sleep(DELAY_S)
            return torch.zeros(3)

    idle = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: idle)
    counters = Counters()
    with counters.phase("backward"):
        to_host(OnDevice(), counters)  # type: ignore[arg-type]
    stats = counters.end_step({})
    assert stats.tier_bytes == {"device_to_host": 12}
    assert stats.stall_s["host_link"] >= DELAY_S


# What a step is #


def test_the_first_step_does_not_pay_for_setting_up(tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB", schedule="barrier"))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")
    written = []
    with infinity.initialize(model=tiny_llama(), config=config, device="cpu")[0] as engine:
        params = sum(p.numel() for p in engine.module.parameters())
        for ids in batches(3):
            engine.backward(loss_of(engine, ids))
            engine.step()
            written.append(engine.stats().tier_bytes["nvme_write"])
    # units that setting up left in memory are written when they are first evicted, 2 bytes a parameter
    assert written[2] == written[1] <= written[0] <= written[1] + 2 * params


def test_waits_between_steps_are_no_part_of_a_step(slow_disk, tmp_path) -> None:
    """An evaluation, pending updates that are waited for and a look at the parameters all wait for the disk."""
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB", schedule="deferred"))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")

    def are_no_part(delay_s: float) -> None:
        slow_disk(delay_s, 0.0)
        assert_waits_outside(config, delay_s)

    with_longer_delays(are_no_part)


def assert_waits_outside(config: dict, delay_s: float) -> None:
    with infinity.initialize(model=tiny_llama(), config=config, device="cpu")[0] as engine:
        for ids in batches(3):
            engine.synchronize()
            with torch.no_grad():
                loss_of(engine, ids)
            dict(engine.named_parameters())
            start_s = time.perf_counter()
            engine.backward(loss_of(engine, ids))
            engine.step()
            wall_s = time.perf_counter() - start_s
            stats = engine.stats()
            assert sum(stats.stall_s.values()) <= sum(stats.phase_s.values()) <= wall_s
            if stats.outside_stall_s.get("disk_read", 0.0) < delay_s:
                raise UnclearError(stats.outside_stall_s)


def test_a_checkpoint_is_no_traffic_of_training(tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB", schedule="barrier"))
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")
    moved = []
    with infinity.initialize(model=tiny_llama(), config=config, device="cpu")[0] as engine:
        for step, ids in enumerate(batches(6)):
            if step == 4:
                engine.save_checkpoint(tmp_path / "saved")
            engine.backward(loss_of(engine, ids))
            engine.step()
            moved.append(engine.stats().tier_bytes["nvme_write"])
    assert moved[4] == moved[3]


# The arithmetic #


def test_a_wait_for_a_worker_is_split_by_what_the_worker_waits_for() -> None:
    counters, worker = Counters(), Waits()
    with worker.waiting(StallCause.DISK_WRITE):
        time.sleep(DELAY_S)  # before anybody waits: counts for nobody
    with counters.phase("update"), counters.stalled(StallCause.OPTIMIZER, worker):
        with worker.waiting(StallCause.DISK_READ):
            time.sleep(2 * DELAY_S)
        time.sleep(DELAY_S)
    stats = counters.end_step({})
    assert stats.stall_s["disk_read"] >= 2 * DELAY_S
    assert stats.stall_s["optimizer"] >= DELAY_S
    assert sum(stats.stall_s.values()) <= stats.phase_s["update"]
    assert "disk_write" not in stats.stall_s


def test_a_wait_that_is_still_under_way_counts_up_to_now() -> None:
    worker = Waits()
    with worker.waiting(StallCause.HOST_LINK):
        time.sleep(DELAY_S)
        under_way_s = worker.totals_s()[StallCause.HOST_LINK]
        assert under_way_s >= DELAY_S
        time.sleep(DELAY_S)
    assert worker.totals_s()[StallCause.HOST_LINK] >= under_way_s + DELAY_S


def test_a_wait_within_a_wait_is_counted_once() -> None:
    counters = Counters()
    with counters.phase("update"), counters.stalled(StallCause.DISK_WRITE):
        time.sleep(DELAY_S)
        with counters.stalled(StallCause.ALLOCATOR):
            time.sleep(DELAY_S)
    stats = counters.end_step({})
    assert stats.stall_s["allocator"] >= DELAY_S <= stats.stall_s["disk_write"]
    assert sum(stats.stall_s.values()) <= stats.phase_s["update"]
