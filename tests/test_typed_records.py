"""Files with right checksums and wrong contents: an error that names the file, from whichever field, or no harm."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint.format import MANIFEST, _checksum, read_manifest
from infinity.errors import InfinityError
from infinity.io.sweep_log import SweepLog
from infinity.planner.rates import rates_of
from infinity.planner.work import Product
from infinity.profiling import read_profile
from infinity.profiling.record import new_record
from infinity.tiers.run_files import read_record
from infinity.tuning.record import Duel, Record, Run
from infinity.tuning.record import read_record as read_search
from infinity.tuning.space import Setting
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2

DROPPED = object()
MANY = ("facts", "configuration", "ranks", "steps", "tensors", "model", "modules")  # all of a kind
WRONG = (DROPPED, None, "x", -1, 1 << 70, ["x"], {"x": 1}, True, 0.5)


def mutants(value: Any, path: str = "", levels: int = 6) -> Iterator[tuple[str, Any]]:
    """Copies of nested values with one field changed, and which; of several alike, the first is changed."""
    if levels and isinstance(value, dict):
        many = path.rpartition(".")[2] in MANY
        for key, each in list(value.items())[: 1 if many else None]:
            for wrong in WRONG:
                rest = {k: v for k, v in value.items() if k != key}
                yield f"{path}.{key} {wrong!r}", rest if wrong is DROPPED else rest | {key: wrong}
            for name, changed in mutants(each, f"{path}.{key}", levels - 1):
                yield name, {**value, key: changed}
    elif levels and isinstance(value, list) and value:
        for wrong in WRONG:
            yield f"{path}.0 {wrong!r}", [*([] if wrong is DROPPED else [wrong]), *value[1:]]
        for name, changed in mutants(value[0], f"{path}.0", levels - 1):
            yield name, [changed, *value[1:]]


def refused(path: Path, name: str, read: Callable[[], object]) -> bool:
    """Whether it was, by an error that names the file; any other error fails the test under the mutant's name."""
    error: Exception | None = None
    try:
        read()
    except Exception as raised:  # a traceback is what is looked for
        error = raised
    named = isinstance(error, InfinityError) and str(path) in str(error)
    assert error is None or named, f"{name}: {type(error).__name__}: {error}"
    return error is not None


# The record of a crash-consistent run #


def config(path: Path) -> dict[str, Any]:
    made = Recipe("bf16").config(Placement("nvme", "nvme", path, tile_size="64KiB"))
    made["zero_optimization"]["stage"] = 3
    made["tiering"]["crash_consistent"] = True
    return made


def start(path: Path) -> infinity.Engine:
    return infinity.initialize(model=tiny_gpt2(), config=config(path))[0]


@pytest.fixture
def stopped(tmp_path) -> Path:
    with start(tmp_path / "drive") as engine:
        for ids in batches(2):
            engine.backward(loss_of(engine, ids))
            engine.step()
    return tmp_path / "drive"


def with_head(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    length = struct.unpack("<Q", content[8:16])[0]
    head = json.dumps(change(json.loads(content[16 : 16 + length]))).encode()
    made = content[:8] + struct.pack("<Q", len(head)) + head + content[16 + length : -32]
    return made + hashlib.sha256(made).digest()


def test_a_run_record_of_any_wrong_field_is_refused_by_name(stopped, tmp_path) -> None:
    (record,) = stopped.glob("*.record")
    content, kept = record.read_bytes(), tmp_path / "kept"
    shutil.copytree(stopped, kept)
    length = struct.unpack("<Q", content[8:16])[0]
    taken = []
    for name, head in mutants(json.loads(content[16 : 16 + length]), levels=6):
        record.write_bytes(with_head(content, lambda _, head=head: head))
        if not refused(record, name, lambda: read_record(record)):
            taken.append((name, head))
    for name, head in taken:  # what might be of another run or configuration
        shutil.rmtree(stopped)
        shutil.copytree(kept, stopped)
        record.write_bytes(with_head(content, lambda _, head=head: head))

        def resume() -> None:
            with start(stopped) as engine:
                engine.resume()

        refused(stopped, name, resume)


def test_slots_and_extras_of_a_record_are_refused_by_name(stopped) -> None:
    (record,) = stopped.glob("*.record")
    content = record.read_bytes()
    made = read_record(record)
    newest = made.generations[0]

    def resume() -> None:
        with start(stopped) as engine:
            engine.resume()

    for slots, extra in ((newest.slots[:-1], newest.extra), (b"\7" * len(newest.slots), newest.extra)):
        changed = type(newest)(newest.sequence, newest.state, slots, extra)
        record.write_bytes(type(made)(**{**vars(made), "generations": [changed]}).to_bytes())
        assert refused(record, "slots", resume)
    record.write_bytes(content)
    for key, value in (("optimizer", {"param_groups": [{"lr": "x"}]}), ("loss_scale", {"value": "x"})):
        wrong = _with_extra(newest.extra, key, value)
        changed = type(newest)(newest.sequence, newest.state, newest.slots, wrong)
        record.write_bytes(type(made)(**{**vars(made), "generations": [changed]}).to_bytes())
        assert refused(record, key, resume), key


def _with_extra(content: bytes, key: str, value: dict[str, Any]) -> bytes:
    extra = torch.load(io.BytesIO(content), weights_only=True)
    if key == "optimizer":
        extra[key]["param_groups"][0] |= value["param_groups"][0]
    else:
        extra[key] |= value
    made = io.BytesIO()
    torch.save(extra, made)
    return made.getvalue()


# Others #


def test_a_manifest_of_any_wrong_field_is_refused_by_name(tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=Recipe().config(Placement()))[0] as engine:
        path = Path(engine.save_checkpoint(tmp_path))
    content = json.loads((path / MANIFEST).read_bytes())
    content.pop("crc")
    for name, changed in mutants(content):
        (path / MANIFEST).write_text(json.dumps({**changed, "crc": _checksum(changed)}))
        refused(path / MANIFEST, name, lambda: read_manifest(path))


def test_a_search_of_any_wrong_field_is_refused_by_name(tmp_path) -> None:
    setting = Setting(
        ("nvme", "nvme"), "split", "barrier", 1 << 20, (1 << 20, 8, "threads"), (1, 1, "micro"), (1, None)
    )
    run = Run(setting, (1.0, 2.0), took_s=3.0)
    path = tmp_path / "out.search.json"
    Record({"model": "gpt2"}, path, {"cores": 2}, 1.0, [run], [Duel(setting, setting, (0.5,), won=True)]).write()
    assert read_search(path, {"model": "gpt2"}).runs == [run]
    for name, changed in mutants(json.loads(path.read_text())):
        path.write_text(json.dumps(changed))

        def read() -> None:
            found = read_search(path, {"model": "gpt2"})
            found.median_s(found.holder(setting))

        refused(path, name, read)


def test_a_profile_of_any_wrong_field_is_refused_by_name(tmp_path) -> None:
    rates = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "mixed_bytes_per_s": 1e9}
    ways = ("to_device", "to_host", "both_to_device", "both_to_host")
    product = {"device": "cpu", "dtype": "float32", "layout": "nt", "rows": 64, "flop_per_s": 1e9}
    parts = {
        "drives": [{"path": "/drive", **rates}],
        "drives_together": rates,
        "contention": [{"part": "disk", "beside": ["optimizer"], "rows": None, "share": 0.5}],
        "optimizer": [{"format": "split", "threads": 1, "params_per_s": 1e9, "bytes_per_s": 1e9}],
        "memory": [{"threads": 1, "triad_bytes_per_s": 1e9, "in_place_bytes_per_s": 1e9, "fresh_bytes_per_s": 1e9}],
        "matmul": [{"device": "cpu", "dtype": "float32", "rows": 64, "flop_per_s": 1e9}],
        "products": [product, {**product, "rows": 1024}],
        "operations": [{"device": "cpu", "operation_s": 1e-6}],
        "link": {"device": "cuda", **{f"{way}_bytes_per_s": 1e9 for way in ways}},
        "ranks": {"all_gather_bytes_per_s": 1e9, "reduce_scatter_bytes_per_s": 1e9},
    }
    whole = json.loads(json.dumps(new_record("0", 1.0, 1.0, parts)))
    path = tmp_path / "profile.json"

    def read() -> None:
        found = read_profile(path)
        try:
            rates = rates_of(found, dtype="float32", state_format="split")
            rates.left("disk", frozenset({"optimizer"}), 100)
            rates._product_rate(Product("nt", 100))
        except InfinityError as error:  # it has no such device
            raise InfinityError(f"{path}: {error}") from error

    path.write_text(json.dumps(whole))
    assert not refused(path, "whole", read)
    for name, changed in mutants(whole):
        path.write_text(json.dumps(changed))
        refused(path, name, read)


def test_a_sweep_of_any_wrong_field_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "sweep"
    facts = {"size": 1}
    SweepLog(path, facts)
    line = {
        "path": "/drive",
        "op": "read",
        "pass_bytes": 4096,
        "block_size_bytes": 4096,
        "queue_depth": 1,
        "bytes_per_s": 1e9,
        "written_bytes": 0,
    }
    head = path.read_text()
    for name, changed in mutants([line]):
        path.write_text(head + "".join(json.dumps(each) + "\n" for each in changed))
        refused(path, name, lambda: SweepLog(path, facts).pass_bytes("/drive", "read"))
