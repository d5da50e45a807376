"""The search, with measurements that are made up: whom it asks, whom it believes, and what it hands out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.config import edited, load_config
from infinity.errors import ConfigError
from infinity.planner import Drive, decoder_of, shape_of
from infinity.tuning import (
    Bounds,
    Limits,
    Outlook,
    Record,
    Run,
    Search,
    choices_of,
    keys_of,
    read_record,
    reasons,
    setting_of,
)
from tests.tuning.simulated import simulated_search
from tests.tuning.test_space import VALUES

NO_LIMITS = Limits()
GOOD = (1 << 20, 32, "auto")
BAD = (16 << 10, 1, "auto")


def profile() -> dict:
    """Of a machine that computes 100 GFLOP/s, updates 1e8 parameters a second and moves 1 GB/s."""
    layouts = ("nn", "nt", "tn", "attention")
    products = [
        {"device": "cpu", "dtype": "bfloat16", "layout": name, "rows": 1, "flop_per_s": 1e11} for name in layouts
    ]
    disk = {f"{name}_bytes_per_s": 1e8 for name in ("read", "write", "mixed")}
    formats = ("fp32", "split", "master", "bf16", "int8")
    return {
        "products": products,
        "optimizer": [{"format": name, "threads": 1, "params_per_s": 1e8, "bytes_per_s": 1e9} for name in formats],
        "memory": [{"threads": 1, "triad_bytes_per_s": 1e10, "in_place_bytes_per_s": 1e10, "fresh_bytes_per_s": 1e10}],
        "ranks": None,
        "link": None,
        "operations": [],
        "drives": [disk],
        "drives_together": None,
        "contention": None,
    }


MACHINE = {"profile": profile(), "aio": [[*BAD, 1e8], [*GOOD, 1e9]], "device": None, "device_bytes": None}


def outlook_of(tmp_path: Path, changes=None, limits=NO_LIMITS) -> Outlook:
    values = edited(VALUES, {"tiering.nvme": [{"path": str(tmp_path)}], **(changes or {})})
    return Outlook(decoder_of(shape_of(20e6)), values, MACHINE, Bounds(limits, 64 << 30, 300 << 20), 64)


@pytest.fixture(scope="module")
def outlook(tmp_path_factory) -> Outlook:
    """Shared, since it remembers what it has predicted. A third of the states fit into memory."""
    return outlook_of(tmp_path_factory.mktemp("drive"), {"tiering.host_memory": "160MiB"})


class Machine:
    """Takes so long for a setting as the plan says, times a factor, and counts time by that."""

    def __init__(self, outlook: Outlook, factor=lambda setting: 1.0, steps: int = 4) -> None:
        self.outlook, self.factor, self.steps = outlook, factor, steps
        self.now_s = 0.0
        self.asked: list = []

    def measure(self, setting, stop_above_s: float, within_s: float) -> Run:
        step_s = self.outlook.of(setting).step_s * self.factor(setting)
        self.asked.append(setting)
        count = 2 if step_s > stop_above_s else self.steps
        took_s = 5 + (count + 2) * step_s
        stopped = count < self.steps
        if took_s > within_s:
            took_s, count, stopped = within_s, 0, True
        self.now_s += took_s
        return Run(setting, (step_s,) * count, took_s=took_s, stopped=stopped)

    def clock(self) -> float:
        return self.now_s


def search_of(outlook: Outlook, machine: Machine, record: Record, budget_s: float = 1e9, **more) -> Search:
    choices = choices_of(outlook.config, Limits(), aio=[GOOD], **more)
    return Search(outlook, choices, record, machine.measure, budget_s, clock=machine.clock)


def test_a_bad_configuration_ends_at_the_best_of_all(outlook) -> None:
    machine = Machine(outlook)
    search = search_of(outlook, machine, Record({}))
    outcome = search.run()
    assert machine.asked[0] == outlook.given
    assert outcome.ending == "nothing is left that could win"
    assert outcome.ratio < 0.5
    assert outcome.best.aio == GOOD
    assert outcome.best.schedule == "backward"
    best_s = min(outlook.of(setting).step_s for setting in machine.asked)
    assert outlook.of(outcome.best).step_s <= 1.05 * best_s


def test_nothing_beats_a_configuration_that_is_the_best(outlook) -> None:
    best = search_of(outlook, Machine(outlook), Record({})).run().best
    path = outlook.config.tiering.nvme[0].path
    outlook = outlook_of(path, {"tiering.host_memory": "160MiB", **keys_of(outlook.config, best)})
    machine = Machine(outlook, lambda setting: 1.0 if setting == outlook.given else 1.2)
    outcome = search_of(outlook, machine, Record({})).run()
    assert outcome.best == outcome.given == outlook.given
    assert outcome.ratio == 1.0


def test_a_plan_that_is_wrong_is_not_believed(outlook) -> None:
    """Whatever is no barrier takes ten times as long as predicted: a barrier wins."""
    machine = Machine(outlook, lambda setting: 1.0 if setting.schedule == "barrier" else 10.0)
    outcome = search_of(outlook, machine, Record({})).run()
    assert outcome.best.schedule == "barrier"
    assert outcome.ratio < 1.0


def test_what_fails_is_told_and_does_not_end_the_search(outlook) -> None:
    machine = Machine(outlook)
    record = Record({})

    def measure(setting, stop_above_s, within_s) -> Run:
        if setting.schedule == "backward":
            machine.now_s += 3
            return Run(setting, error="CapacityError: no", took_s=3.0)
        return machine.measure(setting, stop_above_s, within_s)

    choices = choices_of(outlook.config, Limits(), aio=[GOOD])
    outcome = Search(outlook, choices, record, measure, 1e9, clock=machine.clock).run()
    assert outcome.best.schedule == "deferred"
    assert any(duel.why == "CapacityError: no" and not duel.won for duel in record.duels)
    why = {reason.knob: reason.why for reason in reasons(outcome.best, outlook, choices, record)}
    assert "cannot run: CapacityError: no" in why["schedule"] or "measured" in why["schedule"]


def test_a_given_configuration_that_does_not_run_is_replaced_by_one_that_does(outlook) -> None:
    machine = Machine(outlook)

    def measure(setting, stop_above_s, within_s) -> Run:
        if setting == outlook.given:
            return Run(setting, error="it does not fit")
        return machine.measure(setting, stop_above_s, within_s)

    choices = choices_of(outlook.config, Limits(), aio=[GOOD])
    outcome = Search(outlook, choices, Record({}), measure, 1e9, clock=machine.clock).run()
    assert outcome.best != outlook.given
    assert outcome.ratio == 0.0


@pytest.mark.parametrize("budget_s", [1.0, 30.0, 60.0, 120.0, 300.0])
def test_the_budget_is_kept_and_the_result_is_never_worse(budget_s, outlook) -> None:
    machine = Machine(outlook)
    record = Record({})
    outcome = search_of(outlook, machine, record, budget_s).run()
    assert outlook.of(outcome.best).step_s <= outlook.of(outcome.given).step_s
    assert machine.now_s <= budget_s * 1.05
    assert machine.asked[0] == outlook.given


def test_noise_between_pairs_does_not_make_a_winner(outlook) -> None:
    """Everything takes the same time; one run of the holder was slow. The next pair says so."""
    machine = Machine(outlook)
    slow = iter([2.0])

    def measure(setting, stop_above_s, within_s) -> Run:
        machine.now_s += 10
        return Run(setting, (next(slow, 1.0),) * 4, took_s=10.0)

    choices = choices_of(outlook.config, Limits(), aio=[GOOD])
    outcome = Search(outlook, choices, Record({}), measure, 1e9, clock=machine.clock).run()
    assert outcome.best == outlook.given


def test_one_slow_run_does_not_make_a_loser(outlook) -> None:
    """All but the given one is faster, and takes longer in its first run: nobody knows yet how much runs differ."""
    now_s, seen = 0.0, set()

    def measure(setting, stop_above_s, within_s) -> Run:
        nonlocal now_s
        now_s += 10
        step_s = 1.0 if setting == outlook.given else 0.8 if setting in seen else 1.2
        seen.add(setting)
        return Run(setting, (step_s,) * 4, took_s=10.0)

    choices = choices_of(outlook.config, Limits(), aio=[GOOD])
    outcome = Search(outlook, choices, Record({}), measure, 100.0, clock=lambda: now_s).run()
    assert outcome.best != outlook.given


@pytest.mark.parametrize("seed", range(6))
def test_within_five_percent_of_an_exhaustive_search(seed, outlook) -> None:
    choices = choices_of(outlook.config, NO_LIMITS, aio=[GOOD], keep=["batch"])
    found = simulated_search(outlook, choices, seed, noise=0.02)
    assert found.over_best <= 1.05
    assert found.over_given <= 1.0
    assert found.measured < found.settings


def test_the_benchmark_simulates_searches(outlook, tmp_path, monkeypatch, capsys) -> None:
    from benchmarks import tune  # noqa: PLC0415  (it imports this module)

    def remembered(path: Path, changes: object) -> Outlook:
        assert changes == {"tiering.host_memory": "160MiB"}
        return outlook

    monkeypatch.setattr(tune, "outlook_of", remembered)
    monkeypatch.setattr(sys, "argv", ["tune.py", "--simulate", "1", "--nvme", str(tmp_path)])
    tune.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 4
    for _, within, worst, kept, ran, settings in rows:
        assert (within.strip() == "100%") is (float(worst) <= 1.05)
        assert kept.strip() == "100%"
        assert 1 < int(ran) < int(settings)


def test_what_fails_in_its_second_run_does_not_win(outlook) -> None:
    machine, seen = Machine(outlook), list[object]()

    def measure(setting, stop_above_s, within_s) -> Run:
        machine.now_s += 10
        seen.append(setting)
        if setting != outlook.given and seen.count(setting) > 1:
            return Run(setting, error="it was killed", took_s=10.0)
        return Run(setting, (1.0 if setting == outlook.given else 0.7,) * 4, took_s=10.0)

    choices = choices_of(outlook.config, Limits(), aio=[GOOD])
    outcome = Search(outlook, choices, Record({}), measure, 1e9, clock=machine.clock).run()
    assert outcome.best == outlook.given


def test_a_winner_that_was_luck_loses_against_the_given_one_in_the_end(outlook) -> None:
    machine = Machine(outlook)
    record = Record({})
    begun: list = []

    def measure(setting, stop_above_s, within_s) -> Run:
        machine.now_s += 10
        begun.append(setting)
        lucky = 0.9 ** list(dict.fromkeys(begun)).index(setting)
        step_s = 1.0 if setting == outlook.given else lucky if len(begun) < 12 else 1.1
        return Run(setting, (step_s,) * 4, took_s=10.0)

    choices = choices_of(outlook.config, Limits(), aio=[GOOD])
    outcome = Search(outlook, choices, record, measure, 400.0, clock=machine.clock).run()
    assert record.duels[-1].why == "compared once more in the end"
    assert outcome.best == outlook.given


# Going on #


def test_an_interrupted_search_goes_on_where_it_was(outlook, tmp_path) -> None:
    whole = search_of(outlook, Machine(outlook), Record({})).run()
    path, machine = tmp_path / "out.search.json", Machine(outlook)
    asked = {"config": {"a": [1, 2]}, "model": "m"}
    record = Record(asked, path)

    def measure(setting, stop_above_s, within_s) -> Run:
        if len(machine.asked) == 6:
            raise KeyboardInterrupt
        return machine.measure(setting, stop_above_s, within_s)

    choices = choices_of(outlook.config, Limits(), aio=[GOOD])
    search = Search(outlook, choices, record, measure, 1e9, clock=machine.clock)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    so_far = search.outcome("interrupted")
    assert outlook.of(so_far.best).step_s <= outlook.of(so_far.given).step_s
    again = read_record(path, asked)
    assert again.runs == record.runs
    assert again.duels == record.duels
    later = Machine(outlook)
    outcome = search_of(outlook, later, again).run()
    assert outcome.best == whole.best
    challenged = {duel.challenger for duel in record.duels}
    assert not challenged & set(later.asked) - {outcome.best, so_far.best, outlook.given}
    assert again.spent_s > record.spent_s


def test_a_search_of_something_else_is_refused_by_what_differs(tmp_path) -> None:
    path = tmp_path / "out.search.json"
    Record({"model": "gpt2", "seq_len": 64}, path).write()
    with pytest.raises(ConfigError, match="it was begun with another seq_len"):
        read_record(path, {"model": "gpt2", "seq_len": 128})
    path.write_text(json.dumps({"format": "infinity-profile"}))
    with pytest.raises(ConfigError, match="holds no search"):
        read_record(path, {})
    with pytest.raises(ConfigError, match="No such file"):
        read_record(tmp_path / "nothing.json", {})


# Limits #


def test_disk_and_memory_limits_prune_with_words(tmp_path) -> None:
    outlook = outlook_of(tmp_path, limits=Limits(disk_bytes=1 << 20))
    assert "more than --max-disk 1.00 MiB" in outlook.of(outlook.given).refused
    assert "more than --max-disk 1.00 MiB" in outlook.no_room(outlook.given)
    in_memory = replace(outlook.given, placement=("none", "none"))
    assert not outlook.of(in_memory).refused
    machine = Machine(outlook)
    record = Record({})
    outcome = search_of(outlook, machine, record).run()
    assert outcome.best.placement == ("none", "none")
    assert "--max-disk" in record.runs[0].error
    assert all(outlook.of(setting).nvme_bytes <= 1 << 20 for setting in machine.asked)


def test_a_drive_that_fills_up_meanwhile_ends_no_search(outlook, monkeypatch) -> None:
    """What does not fit beside what others have written is not even begun."""
    monkeypatch.setattr("infinity.tuning.outlook.drives_here", lambda config: [Drive("there", 4 << 20)])
    machine, record = Machine(outlook), Record({})
    outcome = search_of(outlook, machine, record).run()
    assert "the drives have 3.80 MiB to spare" in record.runs[0].error
    assert outcome.best.placement == ("none", "none") or not machine.asked


def test_a_device_of_its_own_has_more_placements(tmp_path) -> None:
    facts = json.loads(json.dumps(MACHINE).replace('"cpu"', '"cuda"'))
    both = ("to_device", "to_host", "both_to_device", "both_to_host")
    facts["profile"]["link"] = {"device": "cuda", **{f"{name}_bytes_per_s": 1e10 for name in both}}
    facts |= {"device": "cuda", "device_bytes": 2 << 30}
    values = edited(VALUES, {"tiering.nvme": [{"path": str(tmp_path)}]})
    outlook = Outlook(decoder_of(shape_of(20e6)), values, facts, Bounds(NO_LIMITS, 64 << 30, 300 << 20), 64)
    choices = choices_of(outlook.config, NO_LIMITS, aio=[GOOD], discrete=True)
    assert ("cpu", "nvme") in choices["placement"]
    best = outlook.best(choices)
    assert best.placement == ("none", "none")
    assert outlook.of(best).parts["link"] == 0.0
    assert outlook.of(best).step_s < outlook.of(outlook.given).step_s


def test_settings_are_those_of_their_files(outlook) -> None:
    for setting in outlook.neighbours(outlook.given, choices_of(outlook.config, Limits(), aio=[GOOD])):
        values = outlook.values_of(setting)
        assert setting_of(load_config(values)) == setting
        assert values["train_batch_size"] == 8
        assert load_config(values).train_batch_size == 8
        assert values["optimizer"] == VALUES["optimizer"]
