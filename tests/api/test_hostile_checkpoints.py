"""Whatever somebody puts where a checkpoint is read or saved: an error that names it, and nothing waits or is lost."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import infinity
from infinity.checkpoint import convert, latest_tag
from infinity.cli.main import main
from tests.api.small_models import engine_of, reseal, train, weights

pytestmark = pytest.mark.timeout(30)  # a pipe that is waited for is a failure, not a hang

DEEP = b'{"a":' * 100_000
LONG = b'{"format": ' + b"9" * 5000 + b"}"


@pytest.fixture
def saved(tmp_path) -> Path:
    with engine_of() as engine:
        train(engine)
        return engine.save_checkpoint(tmp_path / "saved", tag="tag")


def with_header(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    """Write a safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    change(manifest)
    reseal(manifest, directory)


def overlap(directory: Path) -> None:
    """Two tensors of one file share their bytes, in the header as in the manifest."""
    file = directory / "unit-00000.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header["exp_avg.mix.weight"]["data_offsets"] = header["master.mix.weight"]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    shift = len(text) - length

    def change(manifest: dict[str, Any]) -> None:
        for tensor in manifest["tensors"].values():
            for part in tensor["parts"]:
                if part["file"] == file.name:
                    part["start"] += shift
        manifest["tensors"]["exp_avg.mix.weight"] = manifest["tensors"]["master.mix.weight"]

    edit_manifest(directory, change)


MASTER = "master.mix.weight"
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda d: pipe(d / "manifest.json"), r"manifest\.json cannot be read: it is no plain file"),
    (lambda d: pipe(d / "extra.pt"), r"extra\.pt cannot be read: it is no plain file"),
    (lambda d: pipe(d / "unit-00000.safetensors"), r"unit-00000\.safetensors cannot be read: it is no plain file"),
    (lambda d: (d / "manifest.json").write_bytes(b'\xff{"format": 2}'), r"manifest\.json is damaged: UnicodeDecode"),
    (lambda d: (d / "manifest.json").write_bytes(DEEP), r"manifest\.json is damaged: .*nested too deeply"),
    (lambda d: (d / "manifest.json").write_bytes(LONG), r"manifest\.json is damaged: ValueError"),
    (lambda d: (d / "manifest.json").write_bytes(b'{"format": 2, "format": 2}'), "an object has a key twice"),
    (
        lambda d: edit_manifest(d, lambda m: m["tensors"][MASTER]["parts"][0].update(file="a\0b.safetensors")),
        "file name 'a.*leaves",
    ),
    (
        lambda d: edit_manifest(d, lambda m: m["tensors"][MASTER]["parts"][0].update(file="\ud800.safetensors")),
        "leaves the check",
    ),
    (
        lambda d: edit_manifest(d, lambda m: m["tensors"][MASTER]["parts"][0].update(file="manifest.json")),
        "or is none of tensors",
    ),
    (lambda d: edit_manifest(d, lambda m: m["tensors"][MASTER]["parts"][0].update(start=1 << 63)), "is no count"),
    (lambda d: edit_manifest(d, lambda m: m["tensors"][MASTER].update(shape=[10**4000, 0])), "is no count"),
    (lambda d: edit_manifest(d, lambda m: m.update(run=["a"])), "`run` is no name"),
    (lambda d: edit_manifest(d, lambda m: m.update(model="a")), "`model` is no object"),
    (lambda d: with_header(d / "unit-00000.safetensors", {}, length=1 << 63), "its header has length 9223372036854775"),
    (lambda d: with_header(d / "unit-00000.safetensors", {}, length=99 << 20), "its header has length 1038"),
    (lambda d: with_header(d / "unit-00000.safetensors", DEEP), "its header is no JSON: it is nested too deeply"),
    (lambda d: with_header(d / "unit-00000.safetensors", LONG), "its header is no JSON: Exceeds the limit"),
    (lambda d: with_header(d / "unit-00000.safetensors", b'{"a\xff": 1}'), "its header is no JSON: 'utf-8' codec"),
    (overlap, r"unit-00000\.safetensors is damaged: tensor \S+ overlaps"),
    (lambda d: append(d / "unit-00000.safetensors"), "its last 1 bytes belong to no tensor"),
    (lambda d: (d.parent / "latest").write_bytes(b"\xff"), "latest is damaged"),
    (lambda d: (d.parent / "latest").write_bytes(b"a\0b"), "latest is damaged: checkpoint tag"),
    (lambda d: (d.parent / "latest").write_bytes(b"../saved/tag"), "latest is damaged: checkpoint tag"),
    (lambda d: (d.parent / "latest").write_bytes(b"a" * 5000), "latest is damaged: it has 5000 bytes"),
    (lambda d: pipe(d.parent / "latest"), "latest cannot be read: it is no plain file"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_broken_file_of_a_checkpoint_is_refused_by_name(damage, message, saved, tmp_path, capsys) -> None:
    damage(saved)
    with engine_of(seed=5) as engine:
        before = weights(engine)
        with pytest.raises(infinity.CheckpointError, match=message):
            engine.load_checkpoint(saved.parent)
        for name, value in engine.named_parameters():
            assert torch.equal(value, before[name]), name
        train(engine)
    with pytest.raises(infinity.CheckpointError, match=message):
        convert(saved.parent, tmp_path / "new", state_format="fp32")
    assert main(["checkpoint", "reshard", str(saved.parent), str(tmp_path / "new"), "--state-format", "fp32"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update(rng_of_ranks="abc"), "has no random state"),
        (lambda e: e.update(rng_of_ranks=[{"torch": torch.zeros(3)}]), "has no random state"),
        (lambda e: e["rng_of_ranks"][0]["torch"].fill_(255), "does not fit this run"),
        (lambda e: e["buffers"].update(mask=1), "buffer mask"),
    ],
)
def test_what_comes_with_the_tensors_is_not_trusted(change, message, saved) -> None:
    extra = torch.load(saved / "extra.pt", weights_only=True)
    change(extra)
    torch.save(extra, saved / "extra.pt")
    edit_manifest(saved, lambda m: m.update(extra_crc=zlib.crc32((saved / "extra.pt").read_bytes())))
    with engine_of(seed=5) as engine, pytest.raises(infinity.CheckpointError, match=message):
        engine.load_checkpoint(saved.parent)


# Where one is saved #


def plant(kind: str, path: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "precious").write_text("mine")
    if kind == "file":
        path.write_text("planted")
    elif kind == "directory":
        path.mkdir()
        (path / "planted").write_text("planted")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        path.hardlink_to(elsewhere / "precious")
    elif kind == "dangling link":
        path.symlink_to(elsewhere / "nowhere")
    else:
        path.symlink_to(elsewhere if kind == "link" else elsewhere / "precious")


KINDS = ["file", "directory", "pipe", "link", "link to a file", "dangling link"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".tmp-new-tag", ".tmp-new-other", ".tmp-old-tag", ".tmp-old-", ".tmp-latest"])
def test_leftovers_and_what_looks_like_them_do_not_keep_anybody_from_saving(name, kind, tmp_path) -> None:
    directory = tmp_path / "saved"
    directory.mkdir()
    plant(kind, directory / name, tmp_path / "elsewhere")
    with engine_of() as engine:
        for _ in range(2):
            engine.save_checkpoint(directory, tag="tag")
        assert latest_tag(directory) == "tag"
        engine.load_checkpoint(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "tag"]
    assert (tmp_path / "elsewhere" / "precious").read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_a_tag_that_is_no_checkpoint_is_refused_and_left_alone(kind, tmp_path) -> None:
    directory = tmp_path / "saved"
    directory.mkdir()
    plant(kind, directory / "tag", tmp_path / "elsewhere")
    with engine_of() as engine:
        with pytest.raises(infinity.CheckpointError, match=r"saved/tag is (a|no) .*remove it, or choose another tag"):
            engine.save_checkpoint(directory, tag="tag")
        assert [path.name for path in directory.iterdir() if path.name != ".run-lock"] == ["tag"]
        engine.save_checkpoint(directory, tag="other")
    (tmp_path / "source").mkdir()
    (directory / "other").rename(tmp_path / "source" / "tag")
    with pytest.raises(infinity.CheckpointError, match="choose another tag"):
        convert(tmp_path / "source" / "tag", directory, state_format="fp32")
    assert os.path.lexists(directory / "tag")
    assert (tmp_path / "elsewhere" / "precious").read_text() == "mine"


def test_a_directory_in_the_place_of_latest_is_refused_before_anything_is_written(tmp_path) -> None:
    (tmp_path / "latest").mkdir()
    with engine_of() as engine:
        with pytest.raises(infinity.CheckpointError, match="latest is a directory, where the last tag is noted"):
            engine.save_checkpoint(tmp_path, tag="tag")
        assert not (tmp_path / "tag").exists()
        engine.save_checkpoint(tmp_path, tag="tag", save_latest=False)


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "link to a file", "dangling link", "hard link"])
def test_what_is_no_lock_is_refused_by_name(kind, tmp_path) -> None:
    directory = tmp_path / "saved"
    directory.mkdir()
    plant(kind, directory / ".run-lock", tmp_path / "elsewhere")
    with (
        engine_of() as engine,
        pytest.raises(infinity.CheckpointError, match=r"\.run-lock is no plain file: remove it"),
    ):
        engine.save_checkpoint(directory)
    assert (tmp_path / "elsewhere" / "precious").read_text() == "mine"


def test_a_directory_that_cannot_be_looked_into_is_not_taken_for_an_empty_one(tmp_path) -> None:
    (tmp_path / "file").write_text("no directory")
    with engine_of() as engine, pytest.raises(infinity.CheckpointError, match="latest cannot be read: Not a directory"):
        engine.load_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_saving_where_a_file_is_says_so(place, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    with engine_of() as engine:
        for save in (engine.save_checkpoint, engine.save_16bit_model):
            with pytest.raises(infinity.CheckpointError, match="is no directory: remove it, or save elsewhere"):
                save(tmp_path / place)


@pytest.mark.parametrize("tag", ["a\0b", "..", ".", "\ud800"])
def test_a_tag_that_no_directory_can_have_is_refused(tag, tmp_path) -> None:
    with engine_of() as engine:
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(infinity.ConfigError, match="must be a plain directory name"):
                call(tmp_path, tag=tag)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_not_kept_from_its_way(kind, tmp_path) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    plant(kind, directory / ".tmp-export", tmp_path / "elsewhere")
    with engine_of() as engine:
        engine.save_16bit_model(directory)
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "elsewhere" / "precious").read_text() == "mine"


# Weights of other tools #


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)).save_pretrained(path)
    return path


def f32(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def index_to(name: str) -> Callable[[Path], object]:
    content = {"weight_map": {"a": name}}
    return lambda d: (d / "model.safetensors.index.json").write_text(json.dumps(content))


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: pipe(d / WEIGHTS), "it is no plain file"),
        (lambda d: os.mkfifo(d / f"{WEIGHTS}.index.json"), "it is no plain file"),
        (lambda d: (d / f"{WEIGHTS}.index.json").symlink_to("nowhere"), "No such file"),
        (
            lambda d: with_header(d / WEIGHTS, {"a": f32(0, 8), "b": f32(4, 12)}, bytes(12)),
            "tensor b overlaps tensor a",
        ),
        (lambda d: with_header(d / WEIGHTS, {"a": f32(0, 8), "b": f32(0, 8)}, bytes(8)), "tensor b overlaps tensor a"),
        (lambda d: with_header(d / WEIGHTS, {"a": f32(0, 4), "b": f32(8, 12)}, bytes(12)), "b leaves a gap after ten"),
        (lambda d: with_header(d / WEIGHTS, {"a": f32(0, 4)}, bytes(12)), "its last 8 bytes belong to no tensor"),
        (lambda d: with_header(d / WEIGHTS, {"a": f32(0, 400)}, bytes(12)), "is truncated: tensor a ends at byte"),
        (lambda d: with_header(d / WEIGHTS, {"a": f32(0, 4) | {"shape": [1 << 70]}}, bytes(4)), "another size"),
        (lambda d: with_header(d / WEIGHTS, {"a": f32(0, 4) | {"shape": [1 << 31, 1 << 31, 1 << 31]}}), "another size"),
        (lambda d: with_header(d / WEIGHTS, {"a": f32(0, 4) | {"dtype": []}}, bytes(4)), "of a kind that cannot be"),
        (lambda d: with_header(d / WEIGHTS, {"a": 9}, bytes(4)), "of a kind that cannot be read: 9"),
        (lambda d: with_header(d / WEIGHTS, b'{"a":{},"a":{}}'), "an object has a key twice"),
        (lambda d: with_header(d / WEIGHTS, DEEP), "nested too deeply"),
        (lambda d: with_header(d / WEIGHTS, LONG), "Exceeds the limit"),
        (lambda d: with_header(d / WEIGHTS, {}, length=1 << 60), "its header has length 1152921504606846976"),
        (lambda d: (d / f"{WEIGHTS}.index.json").write_bytes(b"\xff"), "index.json is damaged"),
        (lambda d: (d / f"{WEIGHTS}.index.json").write_bytes(DEEP), "index.json is damaged: .*nested too deeply"),
        (lambda d: (d / f"{WEIGHTS}.index.json").write_bytes(LONG), "index.json is damaged: .*Exceeds"),
        (index_to("a\0b"), "leaves the directory"),
        (index_to(".."), "leaves the directory"),
        (index_to("\ud800"), "leaves the directory"),
        (index_to("missing.safetensors"), "missing.safetensors cannot be read: No such file"),
    ],
)
def test_broken_pretrained_weights_are_refused_by_name(damage, message, pretrained, tmp_path) -> None:
    path = shutil.copytree(pretrained, tmp_path / "model")
    damage(path)
    with pytest.raises(infinity.CheckpointError, match=message):
        infinity.from_pretrained(path, {"train_micro_batch_size_per_gpu": 1})


@pytest.mark.parametrize("content", [b"\xff", DEEP, b'{"model_type": "gpt2", "n_layer": "x"}', b"[]", LONG])
def test_a_broken_configuration_of_a_model_is_refused_by_name(content, pretrained, tmp_path) -> None:
    path = shutil.copytree(pretrained, tmp_path / "model")
    (path / "config.json").write_bytes(content)
    with pytest.raises(infinity.ConfigError, match=r"config\.json that transformers does not take"):
        infinity.from_pretrained(path, {"train_micro_batch_size_per_gpu": 1})
