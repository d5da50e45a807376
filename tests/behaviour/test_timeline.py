"""The timeline shows what ran, when it ran, with the bytes that the counters have, and changes nothing."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import infinity
from infinity.telemetry import Lane, Timeline, Times
from infinity.telemetry.timeline_summary import Ran, read_timeline, step_windows, sum_up
from infinity.tiers import Link, SameMemory
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    batches,
    least_memory,
    loss_of,
    tiny_llama,
    trained_on,
)

STEPS = 4
ROUTES = {
    Lane.PREFETCH: "nvme_read",
    Lane.WRITE_BACK: "nvme_write",
    Lane.UPLOAD: "host_to_device",
    Lane.DOWNLOAD: "device_to_host",
}


def on_nvme(path: Path, schedule: str = "backward", **tiering: object) -> dict:
    config = Recipe("bf16").config(Placement("nvme", "nvme", path, "64KiB", schedule=schedule))
    config["tiering"] |= tiering
    return config


def timed_steps(config: dict, link: Link | None) -> list[infinity.StepStats]:
    stats = []
    with infinity.initialize(model=tiny_llama(), config=config, link=link, device="cpu")[0] as engine:
        for ids in batches(STEPS):
            if config["tiering"].get("accumulation") == "layer":
                engine.train_batch([{"input_ids": ids, "labels": ids}])
            else:
                engine.backward(loss_of(engine, ids))
                engine.step()
            stats.append(engine.stats())
    return stats


@pytest.mark.parametrize("schedule", ["backward", "deferred"])
@pytest.mark.parametrize("discrete", [False, True], ids=["cpu", "discrete"])
def test_the_timeline_agrees_with_the_counters(schedule, discrete, tmp_path) -> None:
    """Bytes of every route, and the waits of every step by cause."""
    link = SameMemory() if discrete else None
    config = on_nvme(tmp_path, schedule, timeline=str(tmp_path / "trace.json"))
    for key in ("device_memory", "host_memory") if discrete else ("host_memory",):
        config["tiering"][key] = least_memory(tiny_llama(), config, key, link=link, device="cpu")
    stats = timed_steps(config, link)
    spans = read_timeline(tmp_path / "trace.json")
    for lane, route in ROUTES.items():
        counted = sum(step.tier_bytes.get(route, 0) for step in stats)
        shown = sum(s.nbytes for s in spans if s.lane is lane and s.step <= STEPS)
        assert shown == pytest.approx(counted, abs=64 << 10)  # the worker may be between the two as a step ends
        assert counted > 0 or lane in (Lane.UPLOAD, Lane.DOWNLOAD)
    assert any(span.lane is Lane.UPLOAD for span in spans) == discrete
    for number, step in enumerate(stats, 1):
        waits_s = sum_up(spans, [number]).waits_s
        for cause, seconds in step.stall_s.items():
            assert waits_s[cause] == pytest.approx(seconds, abs=1e-3)
        assert sum(s.end_s - s.start_s for s in spans if s.lane is Lane.UPDATE and s.step == number) == pytest.approx(
            step.optimizer_s, abs=1e-3
        )
    units = {s.name.split()[0] for s in spans if s.lane is Lane.COMPUTE}
    assert units >= {"model.embed_tokens", "model.layers.0", "model.layers.2", "lm_head"}


@pytest.mark.parametrize("accumulation", ["micro_batch", "layer"])
def test_what_computes_does_not_wait(accumulation, tmp_path) -> None:
    """On the CPU one thread does both: together they are the phases."""
    config = on_nvme(tmp_path, timeline=str(tmp_path / "trace.json"), accumulation=accumulation)
    config["tiering"]["host_memory"] = least_memory(tiny_llama(), config, device="cpu")
    timed_steps(config, None)
    spans = read_timeline(tmp_path / "trace.json")
    total = sum_up(spans)
    assert total.lanes[Lane.COMPUTE].busy_s + total.lanes[Lane.WAIT].busy_s <= total.wall_s * 1.001
    compute = sorted((s for s in spans if s.lane is Lane.COMPUTE), key=lambda s: s.start_s)
    assert all(a.end_s <= b.start_s + 1e-6 for a, b in itertools.pairwise(compute))


def test_the_file_is_a_chrome_trace(tmp_path) -> None:
    """One process, named rows in order, and within a row no event that begins before the last is over."""
    path = tmp_path / "trace.json"
    timed_steps(on_nvme(tmp_path, timeline=str(path)), SameMemory())
    events = json.loads(path.read_text())
    assert {event["pid"] for event in events} == {1}
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: defaultdict[int, list[dict]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["args"]["step"] >= 1
            rows[event["tid"]].append(event)
    assert names.keys() == rows.keys()
    lanes = [name for _, name in sorted(names.items()) if "(" not in name]
    assert lanes == [lane.value for lane in Lane if lane.value in lanes]
    for row in rows.values():
        for event, later in itertools.pairwise(row):
            assert event["ts"] + event["dur"] <= later["ts"] + 0.01


@pytest.mark.parametrize("schedule", ["backward", "deferred"])
def test_training_is_the_same_with_a_timeline(schedule, tmp_path) -> None:
    def trained(**tiering: object) -> Result:
        config = on_nvme(tmp_path, schedule, **tiering)
        with infinity.initialize(model=tiny_llama(), config=config, device="cpu")[0] as engine:
            return trained_on(engine, batches(STEPS))

    assert_same_bits(trained(timeline=str(tmp_path / "trace.json"), timeline_steps=2), trained())
    assert set(step_windows(read_timeline(tmp_path / "trace.json"))) == {1, 2}


def test_checkpoints_are_one_span_between_steps(tmp_path) -> None:
    config = on_nvme(tmp_path, timeline=str(tmp_path / "trace.json"))
    with infinity.initialize(model=tiny_llama(), config=config, device="cpu")[0] as engine:
        for ids in batches(2):
            engine.backward(loss_of(engine, ids))
            engine.step()
            engine.save_checkpoint(tmp_path / "saved")
        with torch.no_grad():
            loss_of(engine, ids)
    spans = read_timeline(tmp_path / "trace.json")
    aside = [s for s in spans if s.lane is Lane.PHASE and s.name in ("initialize", "save_checkpoint")]
    assert [s.name for s in sorted(aside, key=lambda s: s.start_s)] == [
        "initialize",
        "save_checkpoint",
        "save_checkpoint",
    ]
    for s in spans:
        inside = [a for a in aside if s not in aside and a.start_s < s.start_s and s.end_s < a.end_s]
        assert not inside, s
    assert any(s.lane is Lane.COMPUTE and s.name.endswith("evaluation") for s in spans)


LATE_S = 0.25


def train_on_rank(path: Path) -> list[infinity.StepStats]:
    """The last rank comes late to every backward pass."""
    config = on_nvme(path, timeline=str(path / "trace.json"))
    stats = []
    with infinity.initialize(model=tiny_llama(), config=config, device="cpu")[0] as engine:
        for ids in batches(STEPS):
            loss = loss_of(engine, ids)
            time.sleep(LATE_S * torch.distributed.get_rank())
            engine.backward(loss)
            engine.step()
            stats.append(engine.stats())
    return stats


def test_every_rank_writes_a_file_of_its_own_and_books_what_it_waits_for_others(tmp_path) -> None:
    on_time, late = run_ranks(2, train_on_rank, tmp_path, path=tmp_path)
    for stats in (*on_time, *late):
        assert sum(stats.stall_s.values()) <= sum(stats.phase_s.values())
    # On a busy machine both wait for each other, too.
    waits_s = [[stats.stall_s["collective"] for stats in of_rank] for of_rank in (on_time, late)]
    assert any(first_s - second_s > 0.6 * LATE_S for first_s, second_s in zip(*waits_s, strict=True)), waits_s
    for rank in range(2):
        path = tmp_path / f"trace.rank{rank}.json"
        assert {event["pid"] for event in json.loads(path.read_text())} == {rank + 1}
        assert "collective" in sum_up(read_timeline(path)).waits_s


def test_a_file_that_cannot_be_written_is_named(tmp_path) -> None:
    path = tmp_path / "missing" / "trace.json"
    with pytest.raises(infinity.ConfigError, match=r"tiering\.timeline: .*missing/trace\.json cannot be written"):
        infinity.initialize(model=tiny_llama(), config=on_nvme(tmp_path, timeline=str(path)), device="cpu")
    assert not list(tmp_path.iterdir())


# The file and its sums #


class Move:
    """Over when it is told to be."""

    def __init__(self) -> None:
        self.ended: Times | None = None

    def times(self) -> Times | None:
        return self.ended


def test_what_is_under_way_is_written_when_it_is_over(tmp_path) -> None:
    timeline = Timeline(tmp_path / "t.json", ["unit"], steps=10)
    first, lost = Move(), Move()
    timeline.record(Lane.PREFETCH, "states", first, 0, 8)
    timeline.record(Lane.WRITE_BACK, "states", lost, 0, 8)
    timeline.end_step()
    first.ended = Times(1.0, 1.5, 2.0)
    timeline.close()
    timeline.record(Lane.PREFETCH, "states", first, 0, 8)  # too late, and no error
    assert read_timeline(tmp_path / "t.json") == [Ran(Lane.PREFETCH, "unit states", 1.5, 2.0, 8, 1)]


def test_overlapping_spans_get_rows_of_their_own(tmp_path) -> None:
    timeline = Timeline(tmp_path / "t.json", [], steps=10)
    for start_s, end_s in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0)):
        timeline.record(Lane.PREFETCH, "", Times(start_s, start_s, end_s))
    timeline.close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert [(e["ts"], e["tid"] % 1000) for e in events if e["ph"] == "X"] == [(0.0, 0), (1e6, 1), (2e6, 0)]


def test_a_full_disk_ends_the_recording_and_not_the_training(caplog) -> None:
    timeline = Timeline(Path("/dev/full"), [], steps=2)
    for start_s in range(3):
        timeline.record(Lane.PREFETCH, "", Times(start_s, start_s, start_s + 1))
        timeline.end_step()
    timeline.close()
    assert "/dev/full ends here: it cannot be written (No space left on device)" in caplog.text
    Timeline(Path("/dev/full"), [], steps=2).close()


def test_a_killed_process_leaves_a_file_that_can_be_read(tmp_path) -> None:
    path = tmp_path / "t.json"
    timeline = Timeline(path, [], steps=10)
    for start_s in range(3):
        timeline.record(Lane.WAIT, "disk_read", Times(start_s, start_s, start_s + 0.5))
        timeline.end_step()
    unfinished = path.read_text()
    assert len(read_timeline(path)) == 2  # of 3: the last line may be half
    timeline.close()
    assert len(read_timeline(path)) == 3
    path.write_text(unfinished[:-10])
    assert len(read_timeline(path)) == 2


@pytest.mark.parametrize("content", ["", "[]]", "{}", '[\n{"ph": "X"}\n]', "\x00\xff"])
def test_other_files_are_refused(content, tmp_path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(infinity.ConfigError, match=r"other (is no timeline|cannot be read)"):
        read_timeline(path)


def phases(step: int, start_s: float, end_s: float) -> list[Ran]:
    middle_s = (start_s + end_s) / 2
    return [
        Ran(Lane.PHASE, "forward", start_s, middle_s, 0, step),
        Ran(Lane.PHASE, "update", middle_s, end_s, 0, step),
    ]


def test_sums_count_overlaps_once_and_spans_across_steps_in_part() -> None:
    spans = [
        *phases(1, 0.0, 2.0),
        *phases(2, 4.0, 6.0),
        Ran(Lane.PHASE, "forward", 7.0, 8.0, 0, 3),  # a step that did not end
        Ran(Lane.PREFETCH, "a", 0.0, 1.0, 100, 1),
        Ran(Lane.PREFETCH, "b", 0.5, 1.5, 100, 1),
        Ran(Lane.PREFETCH, "c", 1.0, 5.0, 400, 1),  # two of its four seconds lie between the steps
        Ran(Lane.WAIT, "disk_read", 4.0, 4.5, 0, 2),
    ]
    total = sum_up(spans)
    assert total.steps == (1, 2)
    assert total.wall_s == 4.0
    assert total.lanes[Lane.PREFETCH].busy_s == 3.0
    assert total.lanes[Lane.PREFETCH].nbytes == 400
    assert total.waits_s == {"disk_read": 0.5}
    assert sum_up(spans, [2]).lanes[Lane.PREFETCH].nbytes == 100
    with pytest.raises(infinity.ConfigError, match="has steps 1 to 2, not steps 2 to 3"):
        sum_up(spans, [2, 3])
    with pytest.raises(infinity.ConfigError, match="has no whole step"):
        sum_up(spans[-4:])


def test_nothing_is_recorded_without_a_timeline(tmp_path, monkeypatch) -> None:
    def record(*args: object) -> None:
        raise AssertionError("recorded")

    monkeypatch.setattr(Timeline, "record", record)
    timed_steps(on_nvme(tmp_path), None)
