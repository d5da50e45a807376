"""What a benchmark moves, how long blocks took, and that a drive which loses or moves pages is found out."""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError, StorageError
from infinity.io import IoOptions, Priority, probe_backends
from infinity.io.bench import BenchSession, bench_file, ring_bytes, run_together
from infinity.io.drives import Drive, cautions, filesystem_of
from infinity.io.latency import Histogram
from infinity.io.pages import huge_page_bytes
from infinity.io.patterns import OPERATIONS, is_random, moves, pass_bytes, scatters
from infinity.io.sweep import best_for_all, best_point, expected_s, sweep
from infinity.io.sweep_log import SweepLog
from infinity.io.sweep_plan import SweepPlan, SweepPoint, plan_sweep
from infinity.io.verify import verify
from infinity.memory.filled import random_memory

MIB = 1 << 20
OPTIONS = IoOptions(128 << 10, 8, 4)
BACKENDS = [status.name for status in probe_backends() if status.available]


# What is moved #


@given(
    operation=st.sampled_from(OPERATIONS),
    blocks=st.integers(2, 200),
    rest=st.integers(0, 4095),
    request_blocks=st.integers(1, 16),
)
def test_a_pass_moves_every_whole_block_once(operation, blocks, rest, request_blocks) -> None:
    found = moves(operation, blocks * 4096 + rest, 4096, request_blocks * 4096)
    offsets = [offset for move in found for offset in range(move.offset, move.offset + move.nbytes, 4096)]
    moved = blocks // 2 * 2 if operation == "mixed" else blocks
    assert sorted(offsets) == [number * 4096 for number in range(moved)]
    assert pass_bytes(operation, blocks * 4096 + rest, 4096) == moved * 4096
    if is_random(operation):
        found = scatters(operation, blocks * 4096 + rest, 4096, request_blocks * 4096)
        assert sorted(offset for one in found for offset in one.offsets.tolist()) == sorted(offsets)
        assert {len(one.offsets) for one in found[:-1]} <= {request_blocks}
        assert {one.operation for one in found} == {operation.removeprefix("rand")}
    if operation == "mixed":
        written = [move.offset for move in found if move.operation == "write"]
        assert min(written) == blocks // 2 * 4096
        assert max(move.offset for move in found if move.operation == "read") < min(written)
    else:
        assert {move.operation for move in found} == {operation.removeprefix("rand")}


def test_mixed_takes_turns() -> None:
    kinds = [move.operation for move in moves("mixed", 16 * MIB, MIB, 2 * MIB)]
    assert kinds == ["read", "write"] * 4


# Latency #


@given(st.lists(st.integers(1, 10**10), min_size=1, max_size=300))
def test_percentiles_are_those_of_the_samples(samples) -> None:
    histogram = Histogram(tuple((value / 1e9, samples.count(value)) for value in set(samples)))
    assert histogram.samples == len(samples)
    ordered = sorted(samples)
    assert histogram.percentile_s(0.5) == ordered[(len(ordered) + 1) // 2 - 1] / 1e9
    assert histogram.percentile_s(1.0) == ordered[-1] / 1e9
    assert histogram.plus(histogram).since(histogram).percentile_s(0.5) == histogram.percentile_s(0.5)


@pytest.mark.parametrize(
    ("samples", "known"),
    [
        (10, []),
        (20, ["p50"]),
        (999, ["p50", "p90"]),
        (1000, ["p50", "p90", "p99"]),
        (10_000, [*["p50", "p90", "p99", "p999"]]),
    ],
)
def test_a_percentile_is_given_with_ten_samples_above_it(samples, known) -> None:
    assert list(Histogram(((1e-3, samples),)).percentiles_s()) == known


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_timed_under_load(backend, tmp_path) -> None:
    with (
        random_memory(ring_bytes(OPTIONS)) as buffers,
        bench_file(tmp_path, 16 * MIB) as path,
        BenchSession(path, 16 * MIB, backend, OPTIONS, buffers) as session,
    ):
        session.fill()
        start_s = time.perf_counter()
        run = session.run("mixed", passes=2)
        longest_s = time.perf_counter() - start_s
    assert run.nbytes == 32 * MIB
    assert run.latencies.read.samples == run.latencies.write.samples == run.blocks // 2
    if backend != "aiofiles":  # which moves requests whole
        assert run.blocks == 32 * MIB // OPTIONS.block_size_bytes
    for seen in (run.latencies.read, run.latencies.write):
        assert 0 < seen.percentile_s(0.5) <= seen.percentile_s(1.0) < longest_s * 1.02
    # All that was in flight, for all the time: a block that takes long is one of a full queue.
    busy_s = sum(taken_s * count for taken_s, count in (*run.latencies.read.counts, *run.latencies.write.counts))
    assert busy_s < longest_s * OPTIONS.queue_depth * 1.02
    assert run.cpu_s > 0
    assert run.caller_s is not None
    assert run.caller_s <= run.cpu_s * 1.01 + 1e-3


@pytest.mark.skipif(not set(BACKENDS) - {"aiofiles"}, reason="the extension is not built")
def test_what_is_stamped_agrees_with_the_clock(tmp_path) -> None:
    """One block at a time: the sum of their times is the time that passed, but for what happens between them.

    A busy machine may hold the caller between two blocks. So only one of several runs must show this.
    """
    options = IoOptions(MIB, 1, 1)
    with (
        random_memory(ring_bytes(options)) as buffers,
        bench_file(tmp_path, 64 * MIB) as path,
        BenchSession(path, 64 * MIB, "threads", options, buffers) as session,
    ):
        session.fill()
        shares = []
        while not shares or (shares[-1] <= 0.4 and len(shares) < 20):
            run = session.run("read", passes=2)
            shares.append(sum(taken_s * count for taken_s, count in run.latencies.read.counts) / run.seconds)
    assert max(shares) <= 1.02
    assert shares[-1] > 0.4, shares


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("block", "depth"), [(128 << 10, 1), (128 << 10, 3), (MIB, 4)])
def test_blocks_pass_through_as_much_memory_as_is_in_flight(operation, block, depth, tmp_path, monkeypatch) -> None:
    """As fio's do; requests are longer than that where they would be many."""
    options = IoOptions(block, depth, 1)
    seen: list[tuple[int, int]] = []
    with (
        random_memory(ring_bytes(options)) as buffers,
        bench_file(tmp_path, 16 * MIB) as path,
        BenchSession(path, 16 * MIB, "auto", options, buffers) as session,
    ):
        for name in ("read", "write"):
            begin = getattr(session.engine, name)

            def noted(file, offset, span, priority, *, nbytes, begin=begin):  # type: ignore[no-untyped-def]
                seen.append((span.address - buffers.address, span.nbytes))
                return begin(file, offset, span, priority, nbytes=nbytes)

            monkeypatch.setattr(session.engine, name, noted)
        begin_blocks = session.engine.move_blocks

        def noted_blocks(write, file, offsets, block_bytes, span, priority):  # type: ignore[no-untyped-def]
            seen.append((span.address - buffers.address, span.nbytes))
            return begin_blocks(write, file, offsets, block_bytes, span, priority)

        monkeypatch.setattr(session.engine, "move_blocks", noted_blocks)
        assert session.run(operation).nbytes == session.pass_bytes(operation)
    request = 2 * MIB if depth * block > 2 * MIB and not operation.startswith("rand") else 0
    assert max(start + nbytes for start, nbytes in seen) <= depth * block + request
    assert len({start for start, _ in seen}) <= depth


# Verifying #


@pytest.mark.parametrize("operation", ["write", "mixed", "randwrite"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_written_is_found_again(operation, backend, tmp_path) -> None:
    with (
        random_memory(ring_bytes(OPTIONS)) as buffers,
        bench_file(tmp_path, 16 * MIB) as path,
        BenchSession(path, 16 * MIB, backend, OPTIONS, buffers) as session,
    ):
        assert verify(session, operation) == (8 if operation == "mixed" else 16) * MIB


class _Liar:
    """An engine whose file is changed between the writes and the reads."""

    def __init__(self, session: BenchSession, spoil) -> None:
        self._engine = session.engine
        self._spoil = spoil

    def write(self, *request, **more):
        return self._engine.write(*request, **more)

    def read(self, *request, **more):
        if self._spoil is not None:
            self._spoil()
            self._spoil = None
        return self._engine.read(*request, **more)


def _swap_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192], data[40960:45056] = data[40960:45056], data[4096:8192]
    path.write_bytes(data)


def _flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * MIB + 2000)
        byte = file.read(1)[0]
        file.seek(3 * MIB + 2000)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(("spoil", "offset"), [(_swap_pages, 4096), (_flip_a_bit, 3 * MIB + 2000)])
def test_a_drive_that_lies_is_found_out(spoil, offset, tmp_path, monkeypatch) -> None:
    options = IoOptions(128 << 10, 8, 4, direct=False)
    with (
        random_memory(ring_bytes(options)) as buffers,
        bench_file(tmp_path, 4 * MIB) as path,
        BenchSession(path, 4 * MIB, "auto", options, buffers) as session,
    ):
        monkeypatch.setattr(session, "engine", _Liar(session, lambda: spoil(path)))
        with pytest.raises(StorageError, match="what was read back is not what was written") as found:
            verify(session, "randwrite")
        monkeypatch.undo()
    assert found.value.errno == errno.EBADMSG
    assert offset // MIB * MIB <= found.value.offset < offset + 3 * MIB


def test_an_old_write_that_was_never_replaced_is_found_out(tmp_path, monkeypatch) -> None:
    """A pass whose writes are lost leaves pages that an earlier pass stamped with the right places."""
    with (
        random_memory(ring_bytes(OPTIONS)) as buffers,
        bench_file(tmp_path, 4 * MIB) as path,
        BenchSession(path, 4 * MIB, "auto", OPTIONS, buffers) as session,
    ):
        verify(session, "write")
        before = path.read_bytes()
        monkeypatch.setattr(session, "engine", _Liar(session, lambda: path.write_bytes(before)))
        with pytest.raises(StorageError, match="what was read back"):
            verify(session, "write")
        monkeypatch.undo()


# Several at once #


def test_paths_are_busy_at_the_same_time(tmp_path) -> None:
    with random_memory(2 * ring_bytes(OPTIONS)) as buffers:
        half = buffers.nbytes // 2
        spans = [type(buffers)(buffers.address + i * half, half, buffers.owner) for i in range(2)]
        with (
            bench_file(tmp_path, 4 * MIB) as one,
            bench_file(tmp_path, 4 * MIB) as other,
            BenchSession(one, 4 * MIB, "auto", OPTIONS, spans[0]) as first,
            BenchSession(other, 4 * MIB, "auto", OPTIONS, spans[1]) as second,
        ):
            start_s = time.perf_counter()
            runs = run_together([first, second], "write", 0.3)
            assert time.perf_counter() - start_s < 30
    assert all(0.2 < run.seconds < 15 and run.nbytes >= 4 * MIB for run in runs)


def test_an_error_on_one_path_is_raised(tmp_path) -> None:
    with (
        random_memory(ring_bytes(OPTIONS)) as buffers,
        bench_file(tmp_path, 4 * MIB) as one,
        bench_file(tmp_path, 4 * MIB) as other,
        BenchSession(one, 4 * MIB, "auto", OPTIONS, buffers) as first,
        BenchSession(other, 4 * MIB, "auto", OPTIONS, buffers) as second,
    ):
        os.truncate(other, MIB)
        with pytest.raises(StorageError, match="end of the file"):
            run_together([first, second], "read", 0.2)


# Sweeps #


def sweep_plan(operation: str, size_bytes: int, base: IoOptions, **more: float) -> SweepPlan:
    asked = {"passes": 3, "seconds": 0.5, "memory_bytes": 1 << 30, "most_written_bytes": 0, **more}
    return plan_sweep(operation, size_bytes, base, **asked)


def test_a_sweep_writes_no_more_than_it_may() -> None:
    for most in (16 << 30, 30 << 30, 1 << 40):
        plan = sweep_plan("write", 1 << 30, IoOptions(), most_written_bytes=most)
        assert plan.written_bytes <= most
        assert plan.pass_bytes <= 1 << 30
        assert plan.most_passes == 1
    reads = sweep_plan("read", 1 << 30, IoOptions())
    assert reads.pass_bytes == 1 << 30
    assert reads.most_passes is None
    with pytest.raises(
        ConfigError, match=r"--max-write leaves 1.00 GiB for this sweep of write, which writes at least"
    ):
        sweep_plan("write", 1 << 30, IoOptions(), most_written_bytes=1 << 30)


def test_the_default_is_among_the_settings_where_it_fits() -> None:
    odd = IoOptions(3 * MIB, 5)
    assert sweep_plan("read", 1 << 30, odd).default == odd
    assert odd in sweep_plan("read", 1 << 30, odd).settings
    assert sweep_plan("read", 16 * MIB, odd).default is None


def test_no_setting_takes_more_memory_than_there_is() -> None:
    plan = sweep_plan("read", 1 << 30, IoOptions(), passes=1, memory_bytes=64 * MIB)
    assert plan.settings
    assert max(map(ring_bytes, plan.settings)) <= 64 * MIB


@pytest.mark.parametrize(("block", "depth"), [(8 * MIB, 64), (128 << 10, 1), (MIB, 8)])
def test_the_ring_holds_what_is_in_flight(block, depth) -> None:
    options = IoOptions(block, depth)
    assert block * depth < ring_bytes(options) <= max(8 * MIB, 4 * block, 1.5 * block * depth)


def test_a_sweep_goes_on_where_it_stopped(tmp_path) -> None:
    plan = sweep_plan("read", 2 * MIB, OPTIONS, passes=2, seconds=0.002, memory_bytes=16 * MIB)
    kept = tmp_path / "kept.jsonl"
    with random_memory(16 * MIB) as buffers, bench_file(tmp_path, 2 * MIB) as path:
        states = sweep(path, plan, "auto", buffers, SweepLog(kept, {"size_bytes": 2 * MIB}))
        seen = [next(states) for _ in range(5)][-1]
        states.close()
        with kept.open("a") as file:
            file.write('{"path": "cut o')  # as a crash may leave it
        first, *rest = sweep(path, plan, "auto", buffers, SweepLog(kept, {"size_bytes": 2 * MIB}))
        again = list(sweep(path, plan, "auto", buffers, SweepLog(kept, {"size_bytes": 2 * MIB})))
    assert first.done == seen.done == 4
    assert first.points == seen.points
    assert first.left_s > 0
    assert rest[-1].done == rest[-1].total <= plan.measurements
    assert [state.done for state in rest] == sorted(state.done for state in rest)
    assert again[-1].points == rest[-1].points  # nothing was left to measure
    assert len(kept.read_text().splitlines()) == 1 + rest[-1].done
    with pytest.raises(ConfigError, match=r"its sweep has size_bytes 2097152, this one has 5: use another file"):
        SweepLog(kept, {"size_bytes": 5})


def test_the_default_is_kept_unless_another_setting_wins_by_more_than_the_spread() -> None:
    default = IoOptions()

    def points(*finals: float) -> list[SweepPoint]:
        kept = SweepPoint(default, (100, 101, 99), (100, 104, 98, 101, 99))
        shallow = SweepPoint(IoOptions(MIB, 1), (60, 60, 60))
        return [shallow, kept, SweepPoint(IoOptions(4 * MIB, 32), (130, 130, 130), finals)]

    assert best_point(points(111, 112, 113, 113, 114), default).options == default  # 13% faster, and beyond the spread
    assert best_point(points(99, 99, 118, 119, 120), default).options == default  # 18% faster, which varies by 20%
    assert best_point(points(30, 117, 118, 119, 120), default).options == IoOptions(4 * MIB, 32)  # one pause
    assert best_point(points(116, 117, 118, 119, 120), default).options == IoOptions(4 * MIB, 32)
    assert best_point(points(90, 111, 112, 113, 114), default).options == default
    for finals in ((111, 112, 113, 113, 114), (116, 117, 118, 119, 120)):  # of one sweep, all agree
        assert best_for_all([points(*finals)], default).options == best_point(points(*finals), default).options
    assert best_point(points(), default).options == default  # it stood out, and was not compared in turn
    assert best_point(points()[:1], default).options == IoOptions(MIB, 1)  # there is no default


def test_ten_sweeps_of_a_noisy_drive_choose_the_default() -> None:
    """Each of its settings is as fast as any other, within 10%; among the fastest some other would win each time."""
    rng = random.Random(0)
    chosen = set()
    for _ in range(10):
        rates = {
            IoOptions(block * MIB, depth): [rng.gauss(1.0, 0.05) for _ in range(3)]
            for block in (1, 2, 4, 8)
            for depth in (1, 4, 8, 16, 32, 64)
        }
        best = sorted(rates, key=lambda options: -sorted(rates[options])[1])[:3]
        finals = {options: tuple(rng.gauss(1.0, 0.05) for _ in range(5)) for options in [*best, IoOptions()]}
        points = [SweepPoint(options, tuple(seen), finals.get(options, ())) for options, seen in rates.items()]
        chosen.add(best_point(points, IoOptions()).options)
    assert chosen == {IoOptions()}


def test_the_time_of_a_measurement_is_its_own_or_that_of_what_it_may_write() -> None:
    reads = sweep_plan("read", 1 << 30, IoOptions())
    assert expected_s(reads, IoOptions(MIB, 32), 32 * MIB) == pytest.approx(0.5 + 1.5)
    writes = sweep_plan("write", 1 << 30, IoOptions(), most_written_bytes=1 << 40)
    assert expected_s(writes, IoOptions(MIB, 1), 10 * (1 << 30)) == pytest.approx(0.1)


def test_a_file_of_something_else_is_no_sweep(tmp_path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[1, 2]\n{somebody's")
    with pytest.raises(ConfigError, match=r"--resume .*other.json: the file exists and holds no sweep"):
        SweepLog(other, {})
    assert other.read_text() == "[1, 2]\n{somebody's"


def test_the_best_for_several_is_good_for_each() -> None:
    def points(*rates: float) -> list[SweepPoint]:
        return [SweepPoint(IoOptions(MIB, depth), (rate,)) for depth, rate in zip((1, 8, 32), rates, strict=True)]

    assert best_for_all([points(10, 90, 100), points(50, 99, 100)]).options.queue_depth == 32
    assert best_for_all([points(10, 98, 100), points(1.0, 0.99, 0.5)]).options.queue_depth == 8
    default = IoOptions(MIB, 8)
    assert best_for_all([points(10, 98, 100), points(10, 100, 98)], default).options == default
    shallow = [SweepPoint(IoOptions(MIB, 2), (1.0,))]
    with pytest.raises(ConfigError, match="no setting in common"):
        best_for_all([shallow, points(1, 2, 3)])


# Places #


def test_what_is_no_drive_is_said() -> None:
    assert "lies in memory" in cautions(Drive("tmpfs", "", 1), direct=True)[0]
    assert "page cache" in cautions(Drive("ext4", "nvme0n1", 1), direct=False)[0]
    assert "may cache the data" in cautions(Drive("nfs4", "", 1), direct=True)[0]
    assert "a virtual disk" in cautions(Drive("xfs", "vda", 1), direct=True)[0]
    assert "compress" in cautions(Drive("btrfs", "nvme0n1", 1), direct=True)[0]
    assert cautions(Drive("xfs", "nvme0n1p2", 1), direct=True) == []


def test_the_filesystem_is_that_of_the_innermost_mount(tmp_path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "a b"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    mounts.write_text(f"/dev/x / ext4 rw 0 0\n/dev/y {tmp_path} xfs rw 0 0\n/dev/z {escaped} tmpfs rw 0 0\n")
    assert filesystem_of(inner, mounts) == "tmpfs"
    assert filesystem_of(tmp_path, mounts) == "xfs"
    assert filesystem_of(Path("/"), mounts) == "ext4"


def test_mounts_have_names_of_any_bytes(tmp_path) -> None:
    mounts = tmp_path / "mounts"
    for name in ("быстро", "a\u3000b", "c\\d", os.fsdecode(b"\xff")):
        inner = tmp_path / name
        inner.mkdir()
        escaped = os.fsencode(inner).replace(b"\\", rb"\134")
        mounts.write_bytes(b"/dev/x / ext4 rw 0 0\n/dev/y " + escaped + b" tmpfs rw 0 0\n")
        assert filesystem_of(inner, mounts) == "tmpfs"


def test_small_pages_are_small_and_random() -> None:
    with random_memory(8 * MIB, huge_pages=False) as span:
        assert huge_page_bytes(span) in (0, None)
        assert span.address % 4096 == 0


def test_mapped_files_have_names_of_any_bytes(tmp_path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    path.write_bytes(bytes(4096))
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
        random_memory(MIB, huge_pages=False) as span,
    ):
        assert huge_page_bytes(span) in (0, None)


def test_shuffles_differ() -> None:
    random.seed(0)
    first, second = (moves("randread", MIB, 4096, 4096) for _ in range(2))
    assert first != second


def test_requests_take_their_turns_as_in_training_where_they_are_to(tmp_path, monkeypatch) -> None:
    options = IoOptions(128 << 10, 8, 4)
    for as_in_training, expected in ((True, {Priority.PREFETCH, Priority.WRITE_BACK}), (False, {Priority.DEMAND})):
        with (
            random_memory(ring_bytes(options)) as buffers,
            bench_file(tmp_path, 4 * MIB) as path,
            BenchSession(path, 4 * MIB, "threads", options, buffers, as_in_training=as_in_training) as session,
        ):
            seen = set()
            for name in ("read", "write"):
                begin = getattr(session.engine, name)

                def noted(file, offset, span, priority, begin=begin, seen=seen, **more):  # type: ignore[no-untyped-def]
                    seen.add(priority)
                    return begin(file, offset, span, priority, **more)

                monkeypatch.setattr(session.engine, name, noted)
            session.run("mixed")
        assert seen == expected
