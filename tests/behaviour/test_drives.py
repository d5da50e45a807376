"""Training over several directories and with checksums: the same numbers, and an error where a drive lies."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.errors import StorageError
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2, train_on

RECIPE = Recipe("bf16", clipping=1.0)


def config(paths: list[Path], **tiering: Any) -> dict[str, Any]:
    values = RECIPE.config(Placement("nvme", "nvme", paths[0], host_memory="2MiB"))
    rates = ("1GB", "2GB", "4GB")
    nvme = [{"path": str(path), "bandwidth": rate} for path, rate in zip(paths, rates, strict=False)]
    values["tiering"] |= {"nvme": nvme, **tiering}
    return values


def losses(values: dict[str, Any]) -> list[float]:
    seen, read = [], 0
    with infinity.initialize(model=tiny_gpt2(), config=values)[0] as engine:
        for ids in batches(8):
            seen += train_on(engine, [ids])
            read += engine.stats().tier_bytes.get("nvme_read", 0)  # a step may find all of its reads in the one before
    assert read > 0
    return seen


@pytest.mark.parametrize("tiering", [{}, {"checksum": True}, {"io_backend": "threads", "checksum": "true"}])
def test_three_paths_train_as_one_does(tiering, tmp_path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    assert losses(config(paths, **tiering)) == losses(config(paths[:1]))


def test_a_bit_that_a_drive_flips_stops_the_training(tmp_path) -> None:
    engine, *_ = infinity.initialize(model=tiny_gpt2(), config=config([tmp_path], checksum=True))
    (swap,) = tmp_path.glob("infinity-*.swap")
    with pytest.raises(StorageError, match="not those that were written") as damaged:  # noqa: PT012
        for ids in batches(4):
            with swap.open("r+b") as raw:
                content = bytearray(raw.read())
                content[::4096] = bytes(byte ^ 64 for byte in content[::4096])
                raw.seek(0)
                raw.write(content)
            engine.backward(loss_of(engine, ids))
            engine.step()
            engine.synchronize()
    assert damaged.value.errno == errno.EBADMSG
    assert damaged.value.filename == str(swap)
    engine.close()
    assert not list(tmp_path.iterdir())
