"""`infinity profile`: every rate is there, a drive is not filled, and ranks measure what they exchange."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.cli.main import main
from infinity.errors import ConfigError, StorageError
from infinity.io import IoOptions
from infinity.optim.formats import FORMATS
from infinity.profiling import ProfileJob, measure, planned_write_bytes, processor, products, read_profile
from infinity.profiling.contention import Busy, busy_optimizer, contention, with_those_of_ranks
from infinity.profiling.drives import drive_rates
from infinity.profiling.processor import matmul_rates, thread_counts, threads, timed
from tests.integrations.processes import output, ranks

MIB = 1 << 20
SMALL = ("--size", "8MiB", "--seconds", "0.05", "--params", "65536")


def have_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take most of the time. The one whose rate is looked at has its size."""
    monkeypatch.setattr(products, "_WIDTH", 64)
    monkeypatch.setattr(products, "_WEIGHTS_BYTES", 1 << 16)
    monkeypatch.setattr(products, "_TOKENS", 32)
    monkeypatch.setattr(products, "_LEAST_S", 1e-3)
    monkeypatch.setattr(processor, "_MATMUL_S", 1e-3)
    monkeypatch.setattr(processor, "FRESH_BYTES", MIB)


@pytest.fixture
def small_products(monkeypatch) -> None:
    have_small_products(monkeypatch)


def shares_of(found: list[dict[str, Any]]) -> dict[tuple[str, tuple[str, ...], int | None], float]:
    return {(entry["part"], tuple(entry["beside"]), entry["rows"]): entry["share"] for entry in found}


def all_shares(parts: Sequence[str]) -> set[tuple[str, tuple[str, ...], int | None]]:
    """Every part beside one and beside all others, with products of few and of many rows where they take part."""
    return {
        (part, tuple(other for other in busy if other != part), rows)
        for size in range(2, len(parts) + 1)
        for busy in itertools.combinations(parts, size)
        for part in busy
        for rows in ((16, 256) if "compute" in busy else (None,))
    }


def test_what_ranks_have_measured_together_takes_the_place_of_what_has_it_in_it() -> None:
    found = [
        {"part": part, "beside": others, "rows": rows, "share": 0.9}
        for part, others, rows in all_shares(("compute", "optimizer", "disk"))
    ]
    of_ranks = [{"part": "compute", "beside": ["optimizer"], "rows": 16, "share": 0.5}]
    left = shares_of(with_those_of_ranks(found, of_ranks))
    assert left.pop(("compute", ("optimizer",), 16)) == 0.5
    assert {frozenset({part, *others}) for part, others, _ in left} == {
        frozenset({"compute", "disk"}),
        frozenset({"optimizer", "disk"}),
    }


@pytest.mark.usefixtures("small_products")
def test_a_profile_has_every_rate(tmp_path, capsys) -> None:
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    output = tmp_path / "profile.json"
    paths = [argument for place in places for argument in ("--path", str(place))]
    assert main(["profile", *paths, *SMALL, "--json", "--output", str(output)]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert profile == read_profile(output)
    assert [drive["path"] for drive in profile["drives"]] == [str(place) for place in places]
    for rates in (*profile["drives"], profile["drives_together"]):
        assert all(rates[f"{operation}_bytes_per_s"] > 1e6 for operation in ("read", "write", "mixed"))
    parts = ["optimizer", "disk"] if torch.accelerator.is_available() else ["compute", "optimizer", "disk"]
    shares = shares_of(profile["contention"])
    assert set(shares) <= all_shares(parts)
    assert all(0 < share <= 1 for share in shares.values())
    assert {rates["format"] for rates in profile["optimizer"]} == set(FORMATS)
    counts = {memory["threads"] for memory in profile["memory"]}
    assert {rates["threads"] for rates in profile["optimizer"]} == counts
    for memory in profile["memory"]:
        assert all(memory[f"{name}_bytes_per_s"] > 0 for name in ("triad", "in_place", "fresh"))
    assert {product["dtype"] for product in profile["matmul"]} == {"float32", "bfloat16", "float16"}
    assert profile["ranks"] is None
    assert (profile["link"] is None) == (not torch.accelerator.is_available())
    assert not [file for place in places for file in place.iterdir()]


@pytest.mark.usefixtures("small_products")
def test_people_get_a_table(tmp_path, capsys) -> None:
    assert main(["profile", "--path", str(tmp_path), *SMALL]) == 0
    shown = capsys.readouterr()
    assert "writes at most 152.00 MiB" in shown.err
    for words in ("optimizer, split", "memory, triad", "matmul cpu float32", "optimizer beside disk"):
        assert words in shown.out


@pytest.mark.usefixtures("small_products")
def test_no_drive_is_touched_if_none_is_wanted(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--without-drives", *SMALL, "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert profile["drives"] is None
    assert all("disk" not in (entry["part"], *entry["beside"]) for entry in profile["contention"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--size", "100TiB"), "would fill the drive"),
        (("--seconds", "0"), "more than 0"),
        (("--output", "/does/not/exist.json"), "no such directory"),
        (("--output", "/tmp"), "is a directory: give a file"),
        (("--path", "/does/not/exist"), "/does/not/exist is no directory"),
        (("--params", "1"), "at least 2048"),
    ],
)
def test_what_cannot_be_is_refused(options, words, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measure, "optimizer_rates", None)  # nothing is measured before
    assert main(["profile", "--path", str(tmp_path), *SMALL, *options]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_more_is_written_than_was_said(tmp_path, monkeypatch) -> None:
    written = []
    options = IoOptions(128 << 10, 8, 4)

    class Counted(infinity_session()):  # type: ignore[misc]
        def __exit__(self, *error: object) -> None:
            written.append(self.engine.stats().bytes_written)
            super().__exit__(*error)

    monkeypatch.setattr("infinity.profiling.drives.BenchSession", Counted)
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    drive_rates(places, 4 * MIB, options, "auto", 5.0, 4096, lambda _: None)
    assert 0 < sum(written) <= planned_write_bytes(ProfileJob(tuple(places), 4 * MIB, options, "auto"))


def infinity_session() -> type:
    from infinity.io.bench import BenchSession  # noqa: PLC0415

    return BenchSession


def test_a_profile_that_is_none_is_refused(tmp_path) -> None:
    path = tmp_path / "p.json"
    for text, words in (
        ("{", "p.json"),
        ("[]", "is no profile"),
        ('{"format": "infinity-profile", "version": 99}', "has version 99"),
        ('{"format": "infinity-profile", "version": 4, "drives": []}', "lacks drives_together"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_profile(path)


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    with threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 4, 6]
    assert thread_counts(8) == [1, 2, 4, 8]


def test_the_rate_of_a_product_is_that_of_its_operations() -> None:
    """Twice the cube of the rows, over the time that torch takes for it."""
    (rates,) = matmul_rates(torch.device("cpu"), (torch.float32,))
    rows = rates["rows"]
    one = torch.ones(rows, rows)
    torch.mm(one, one)
    seconds = min(timed(lambda: torch.mm(one, one)) for _ in range(5))
    assert 0.05 < rates["flop_per_s"] * seconds / (2 * rows**3) < 5


def test_parts_of_a_machine_leave_one_another_a_share() -> None:
    found = contention(4096, lambda seconds: time.sleep(seconds) or 1e9, 0.1, computes_here=True)
    shares = shares_of(found)
    assert set(shares) == all_shares(("compute", "optimizer", "disk"))
    assert all(0 < share <= 1 for share in shares.values())
    assert {share for (part, *_), share in shares.items() if part == "disk"} == {1.0}
    elsewhere = contention(4096, None, 0.05, computes_here=False)
    assert elsewhere == [], "one part has nobody beside it"


def test_a_part_slower_than_the_measurement_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr("infinity.profiling.contention._products", lambda _: Busy(lambda _: time.sleep(0.03), 1))
    found = contention(4096, None, 0.002, computes_here=True)
    assert set(shares_of(found)) == all_shares(("compute", "optimizer"))
    assert all(entry["share"] > 0 for entry in found)


def test_the_busy_optimizer_works_while_it_is_to() -> None:
    with busy_optimizer(4096) as optimizer:
        for _ in range(2):
            with optimizer.working():
                while not optimizer.steps:
                    time.sleep(0.001)
        ended = optimizer.steps
        time.sleep(0.01)
        assert optimizer.steps == ended


def test_a_drive_that_fails_is_named(tmp_path) -> None:
    with pytest.raises(StorageError, match="missing"):
        drive_rates([tmp_path / "missing"], MIB, IoOptions(), "auto", 0.1, 4096, lambda _: None)


_ON_A_RANK = """
import sys
import pytest
from infinity.cli.main import main
from tests.cli.test_profile import have_small_products

with pytest.MonkeyPatch.context() as monkeypatch:
    have_small_products(monkeypatch)
    sys.exit(main(sys.argv[1:]))
"""


def test_ranks_measure_what_they_exchange(tmp_path) -> None:
    done = ranks(2, "-c", _ON_A_RANK, "profile", "--without-drives", *SMALL, "--json", namespace=False, where=tmp_path)
    found = json.loads(output(done))["ranks"]
    assert found["count"] == found["on_this_machine"] == 2
    assert "gloo" in found["backend"]
    assert 1e6 < found["all_gather_bytes_per_s"] < 1e12
    assert 1e6 < found["reduce_scatter_bytes_per_s"] < 1e12


def test_infinity_run_starts_these_ranks(monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: started.append(command))
    main(["run", "--ranks", "2", "profile", "--without-drives"])
    (command,) = started
    assert "--nproc-per-node=2" in command
    assert Path(command[-3]).is_file()
    assert command[-2:] == ["profile", "--without-drives"]
