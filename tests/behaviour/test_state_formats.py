"""Lossy formats train, and keep every promise but exactness: placements agree, resuming continues."""

from __future__ import annotations

import pytest

import infinity
from tests.behaviour.reference import (
    Placement,
    Recipe,
    assert_same_bits,
    batches,
    tiny_llama,
    train,
    train_on,
    trained_on,
)
from tests.behaviour.test_parity import STEPS, in_memory

BYTES = {"bf16": 6, "int8": 4 + 8 / 256}


def recipe(state_format: str) -> Recipe:
    class Formatted(Recipe):
        def config(self, placement: Placement) -> dict:
            config = super().config(placement)
            config["tiering"]["state_format"] = state_format
            return config

    return Formatted("bf16", clipping=0.5, steps=STEPS)


@pytest.mark.parametrize("state_format", BYTES)
def test_placements_and_tiles_agree_and_the_loss_follows_the_exact_one(state_format, tmp_path) -> None:
    memory = train(tiny_llama(), recipe(state_format), Placement())
    for tile_size, budget in (("64KiB", "760KiB"), ("1MiB", "2MiB")):
        placed = train(tiny_llama(), recipe(state_format), Placement("nvme", "nvme", tmp_path, tile_size, budget))
        assert_same_bits(placed, memory)
    exact = in_memory("llama", "bf16", 1, 0.5)
    assert memory.losses == pytest.approx(exact.losses, rel=0.02)
    assert memory.losses != exact.losses


@pytest.mark.parametrize("state_format", BYTES)
def test_resuming_continues_bit_for_bit(state_format, tmp_path) -> None:
    data = batches(10)
    config = recipe(state_format).config(Placement())
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        train_on(engine, data[:5])
        engine.save_checkpoint(tmp_path)
        uninterrupted = trained_on(engine, data[5:])
    with infinity.initialize(model=tiny_llama(5), config=config)[0] as engine:
        engine.load_checkpoint(tmp_path)
        assert_same_bits(trained_on(engine, data[5:]), uninterrupted)


def test_a_checkpoint_of_one_format_loads_into_another(tmp_path) -> None:
    with infinity.initialize(model=tiny_llama(), config=recipe("split").config(Placement()))[0] as engine:
        engine.save_checkpoint(tmp_path)
        saved = dict(engine.named_parameters())
    for state_format in BYTES:
        config = recipe(state_format).config(Placement())
        with infinity.initialize(model=tiny_llama(5), config=config)[0] as engine:
            engine.load_checkpoint(tmp_path)
            assert all((value == saved[name]).all() for name, value in engine.named_parameters())


@pytest.mark.parametrize(("precision", "state_format"), [("fp32", "int8"), ("fp32", "split"), ("bf16", "fp32")])
def test_a_format_that_does_not_serve_the_precision_is_refused(precision, state_format) -> None:
    config = Recipe(precision).config(Placement())
    config["tiering"]["state_format"] = state_format
    with pytest.raises(infinity.ConfigError, match=f"state_format '{state_format}' does not fit {precision}"):
        infinity.initialize(model=tiny_llama(), config=config)
