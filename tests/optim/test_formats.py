"""State formats: what a tile holds, and what an update does to it."""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch

from infinity import kernels
from infinity.errors import ConfigError
from infinity.kernels import AdagradHyper, Dither, Hyper, LionHyper, Rule, SgdHyper
from infinity.optim import formats
from infinity.optim.formats import FORMATS, SHARD_ALIGN, state_layout
from infinity.tiers.state_layout import StateLayout
from tests.kernels.data import same_bits

HYPERS: dict[str, Rule] = {
    "adamw": Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, 1, decoupled=True),
    "adam": Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, 1, decoupled=False),
    "adagrad": AdagradHyper(1e-2, 0.1, 1e-10, 0.1, 1),
    "lion": LionHyper(1e-3, 0.9, 0.99, 0.1, 1),
    "sgd": SgdHyper(1e-2, 0.9, 0.1, 1),
}
NESTEROV = SgdHyper(1e-2, 0.9, 0.0, 1, nesterov=True)
State = tuple[torch.Tensor, dict[str, torch.Tensor]]


def make_tile(layout: StateLayout, numel: int, seed: int = 0) -> State:
    """A tile after its initialisation from random masters."""
    master = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    param = torch.empty(numel, dtype=layout.param_dtype)
    states = {field.name: torch.empty(field.length(numel), dtype=field.dtype) for field in layout.fields}
    formats.init_states(layout, master, param, states)
    return param, states


def gradient(layout: StateLayout, numel: int, step: int) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1000 + step))
    return (values * torch.linspace(0.01, 3, numel)).to(layout.param_dtype)


def train(layout: StateLayout, tile: State, hyper: Rule, steps: int, pieces: tuple[int, ...] = ()) -> None:
    param, states = tile
    numel = param.numel()
    cuts = (0, *pieces, numel)
    for step in range(1, steps + 1):
        grad = gradient(layout, numel, step)
        now = dataclasses.replace(hyper, step=step)  # type: ignore[type-var]
        for start, stop in pairwise(cuts):
            part = layout.narrow(states, start, stop)
            dither = Dither(seed=step, index=start)
            formats.update(layout, param[start:stop], part, grad[start:stop], now, dither)


def assert_same(left: State, right: State) -> None:
    assert same_bits(left[0], right[0])
    for name, tensor in left[1].items():
        assert same_bits(tensor, right[1][name]), name


@pytest.mark.parametrize("name", FORMATS)
def test_a_tile_is_whole_pages_and_its_fields_do_not_overlap(name: str) -> None:
    layout = state_layout(name)
    for numel in (SHARD_ALIGN, 5 * SHARD_ALIGN):
        nbytes = layout.tile_bytes(numel)
        assert nbytes % 4096 == 0
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        views = layout.views(buffer, numel)
        assert list(views) == [field.name for field in layout.fields]
        for number, view in enumerate(views.values(), start=1):
            view.view(torch.uint8).fill_(number)
        used = sum(view.numel() * view.element_size() for view in views.values())
        assert int((buffer != 0).sum()) == used
        assert used <= numel * layout.bytes_per_param


def test_bytes_per_parameter_are_as_documented() -> None:
    numel = 1 << 20
    with_param = {
        name: state_layout(name).tile_bytes(numel) / numel + state_layout(name).param_dtype.itemsize for name in FORMATS
    }
    assert with_param == {"fp32": 12, "split": 12, "master": 14, "bf16": 8, "int8": 6 + 2 * 4 / 256}


@pytest.mark.parametrize("optimizer", HYPERS)
@pytest.mark.parametrize("name", FORMATS)
def test_machine_and_cuts_change_no_bit(name: str, optimizer: str) -> None:
    layout, hyper = state_layout(name, optimizer), HYPERS[optimizer]
    numel = kernels.SCALE_BLOCK * 300 + 77
    kernels.use_instruction_set("baseline")
    kernels.set_threads(1)
    expected = make_tile(layout, numel)
    train(layout, expected, hyper, 3)
    for instruction_set in kernels.instruction_sets():
        kernels.use_instruction_set(instruction_set)
        kernels.set_threads(3)
        tile = make_tile(layout, numel)
        train(layout, tile, hyper, 3, pieces=(kernels.SCALE_BLOCK, kernels.SCALE_BLOCK * 131))
        assert_same(tile, expected)


@pytest.mark.parametrize("optimizer", HYPERS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_an_update_replaces_can_stay(name: str, optimizer: str) -> None:
    """With the same update, whatever stays, of a piece that no page or vector begins with."""
    layout, hyper = state_layout(name, optimizer), HYPERS[optimizer]
    numel, start, stop = kernels.SCALE_BLOCK * 300 + 77, kernels.SCALE_BLOCK * 3, kernels.SCALE_BLOCK * 290 + 31
    grad = gradient(layout, numel, 3)[start:stop]
    now = dataclasses.replace(hyper, step=3)  # type: ignore[type-var]
    old = make_tile(layout, numel)
    train(layout, old, hyper, 2)
    new = copy.deepcopy(old)
    formats.update(layout, new[0][start:stop], layout.narrow(new[1], start, stop), grad, now, Dither(3, start))
    kernels.set_threads(3)
    for instruction_set in kernels.instruction_sets():
        kernels.use_instruction_set(instruction_set)
        for param_stays, fields_stay in [(True, True), (True, False), (False, True)]:
            (param, fields), (old_param, new_fields) = copy.deepcopy(old), copy.deepcopy(old)
            old_param.zero_()
            aside = (
                old_param[start:stop] if param_stays else None,
                layout.narrow(new_fields, start, stop) if fields_stay else None,
            )
            part = layout.narrow(fields, start, stop)
            formats.update(layout, param[start:stop], part, grad, now, Dither(3, start), aside)
            assert_same((param, new_fields if fields_stay else fields), new)
            if fields_stay:
                assert_same((param, fields), (new[0], old[1]))
            if param_stays:
                assert same_bits(old_param[start:stop], old[0][start:stop])
            assert not old_param[:start].any()
            assert not old_param[stop:].any()


def test_what_cannot_stay_is_refused() -> None:
    layout = state_layout("split", "lion")
    param, states = make_tile(layout, 256)
    grad = gradient(layout, 256, 1)
    wrong = {"low_bits": states["low_bits"].clone(), "exp_avg": torch.zeros(255)}
    with pytest.raises(ValueError, match="first moment aside has 255 elements"):
        formats.update(layout, param, states, grad, HYPERS["lion"], aside=(None, wrong))
    with pytest.raises(ValueError, match="param aside is torch"):
        formats.update(layout, param, states, grad, HYPERS["lion"], aside=(torch.zeros(256), None))
    flat, moments = torch.zeros(256), [kernels.Moment(torch.zeros(256)) for _ in range(2)]
    with pytest.raises(ValueError, match="no master"):
        kernels.update(
            HYPERS["adamw"], flat, flat, first=moments[0], second=moments[1], aside=kernels.Aside(master=flat)
        )


@pytest.mark.parametrize("name", FORMATS)
def test_every_length_and_instruction_set_gives_the_same_bits(name: str) -> None:
    layout = state_layout(name)
    for numel in range(1, 301, 1 if name == "int8" else 7):
        tiles = []
        for instruction_set in kernels.instruction_sets():
            kernels.use_instruction_set(instruction_set)
            tiles.append(make_tile(layout, numel))
            train(layout, tiles[-1], HYPERS["adamw"], 2)
        for tile in tiles[1:]:
            assert_same(tile, tiles[0])


@pytest.mark.parametrize(
    ("optimizer", "hyper", "reference"),
    [
        ("adamw", HYPERS["adamw"], lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
        ("adam", HYPERS["adam"], lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1)),
        ("adagrad", HYPERS["adagrad"], lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1)),
        ("sgd", HYPERS["sgd"], lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1)),
        ("sgd", NESTEROV, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)),
    ],
    ids=["AdamW", "Adam", "Adagrad", "SGD", "SGD-nesterov"],
)
@pytest.mark.parametrize("name", ["fp32", "split", "master"])
def test_exact_formats_follow_torch_on_the_master(name: str, optimizer: str, hyper: Rule, reference) -> None:
    layout = state_layout(name, optimizer)
    tile = make_tile(layout, 1000)
    master = torch.nn.Parameter(formats.read_master(layout, *tile))
    peer = reference([master])
    train(layout, tile, hyper, 50)
    for step in range(1, 51):
        master.grad = gradient(layout, 1000, step).float()
        peer.step()
    travelled = 1e-2 * 50 * (20 if optimizer == "sgd" else 1)  # what an error may be relative to, where terms cancel
    torch.testing.assert_close(formats.read_master(layout, *tile), master.detach(), rtol=1e-6, atol=2e-7 * travelled)
    for key, moment in formats.read_moments(layout, tile[1]).items():
        torch.testing.assert_close(moment, peer.state[master][key], rtol=1e-5, atol=2e-6)


def test_lion_follows_its_paper() -> None:
    layout, hyper = state_layout("fp32", "lion"), HYPERS["lion"]
    tile = make_tile(layout, 1000)
    param, exp_avg = tile[0].clone(), torch.zeros(1000)
    train(layout, tile, hyper, 20)
    for step in range(1, 21):
        grad = gradient(layout, 1000, step)
        param = param * (1 - 1e-3 * 0.1) - 1e-3 * torch.sign(0.9 * exp_avg + 0.1 * grad)
        exp_avg = 0.99 * exp_avg + 0.01 * grad
    torch.testing.assert_close(tile[0], param, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tile[1]["exp_avg"], exp_avg, rtol=1e-5, atol=1e-7)


def test_master_format_rounds_the_parameter_to_fp16() -> None:
    layout = state_layout("master")
    tile = make_tile(layout, 1000)
    train(layout, tile, HYPERS["adamw"], 3)
    assert same_bits(tile[0], tile[1]["master"].half())


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_lossy_moments_are_right_on_average(name: str) -> None:
    layout = state_layout(name)
    numel = 4096
    values = {
        "exp_avg": torch.randn(numel, generator=torch.Generator().manual_seed(1)),
        "exp_avg_sq": torch.rand(numel, generator=torch.Generator().manual_seed(2)) + 1e-3,
    }
    states = layout.views(torch.zeros(layout.tile_bytes(numel), dtype=torch.uint8), numel)
    sums = {key: torch.zeros(numel, dtype=torch.float64) for key in values}
    rounds = 400
    for seed in range(rounds):
        formats.write_moments(layout, values, states, Dither(seed=seed))
        for key, stored in formats.read_moments(layout, states).items():
            sums[key] += stored
    step = {"bf16": 1 / 128, "int8": 1 / 16}[name]
    for key, value in values.items():
        error = (sums[key] / rounds - value).abs()
        floor = 0.0 if name == "bf16" else float(value.abs().max()) / 1000
        assert (error <= 5 * (step * value.abs() + floor) / 2 / rounds**0.5).all()


def test_int8_error_is_within_its_documented_bound() -> None:
    layout = state_layout("int8")
    numel = 256 * 64
    generator = torch.Generator().manual_seed(0)
    values = {
        "exp_avg": torch.randn(numel, generator=generator)
        * 10.0 ** torch.randint(-6, 1, (numel,), generator=generator),
        "exp_avg_sq": torch.rand(numel, generator=generator)
        * 10.0 ** torch.randint(-9, 1, (numel,), generator=generator),
    }
    states = layout.views(torch.zeros(layout.tile_bytes(numel), dtype=torch.uint8), numel)
    formats.write_moments(layout, values, states, Dither(seed=1))
    stored = formats.read_moments(layout, states)
    for key, smallest in (("exp_avg", 2.0**-10), ("exp_avg_sq", 2.0**-18)):
        blocks, kept = values[key].view(-1, 256), stored[key].view(-1, 256)
        top = blocks.abs().amax(dim=1, keepdim=True)
        bound = torch.maximum(blocks.abs() / 16, top / 1.9375 * smallest) * (1 + 1e-5)
        assert ((kept - blocks).abs() <= bound).all()
    assert (stored["exp_avg_sq"] > 0).all()  # nothing positive becomes a zero denominator


def test_one_bad_value_changes_its_block_and_no_other() -> None:
    layout = state_layout("int8")
    states = layout.views(torch.zeros(layout.tile_bytes(1024), dtype=torch.uint8), 1024)
    values = {"exp_avg": torch.ones(1024), "exp_avg_sq": torch.ones(1024)}
    values["exp_avg"][300] = float("nan")
    values["exp_avg_sq"][300] = float("inf")
    formats.write_moments(layout, values, states)
    for stored in formats.read_moments(layout, states).values():
        bad = stored.isnan().view(-1, 256)
        assert bad.all(dim=1).tolist() == [False, True, False, False]
        assert bad.any(dim=1).tolist() == [False, True, False, False]


def test_second_moments_decay_only_with_stochastic_rounding() -> None:
    """Why the lossy formats need it: with no gradient, v must fall to 0.999^1000 = 0.37 of itself."""
    layout = state_layout("bf16")
    param, states = make_tile(layout, 4096)
    states["exp_avg_sq"].fill_(1.0)
    nearest = torch.ones(4096, dtype=torch.bfloat16)
    no_gradient = torch.zeros(4096, dtype=torch.bfloat16)
    for step in range(1, 1001):
        now = dataclasses.replace(HYPERS["adamw"], step=step)  # type: ignore[type-var]
        formats.update(layout, param, states, no_gradient, now, Dither(seed=step))
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(states["exp_avg_sq"].float().mean()) == pytest.approx(0.999**1000, rel=0.02)
    assert float(nearest.float().mean()) == 1.0


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_formats_convert_into_each_other(source: str, target: str) -> None:
    one, other = state_layout(source), state_layout(target)
    tile = make_tile(one, 2048)
    train(one, tile, HYPERS["adamw"], 5)
    converted = make_tile(other, 2048, seed=9)
    formats.write_master(other, formats.read_master(one, *tile), *converted)
    formats.write_moments(other, formats.read_moments(one, tile[1]), converted[1], Dither(seed=3))
    expected = formats.read_master(one, *tile)
    result = formats.read_master(other, *converted)
    assert same_bits(result, expected)
    step = {"bf16": 1 / 128, "int8": 1 / 16}.get(target, 0.0)
    moments = formats.read_moments(other, converted[1])
    for key, moment in formats.read_moments(one, tile[1]).items():
        floor = float(moment.abs().max()) * step / 50
        torch.testing.assert_close(moments[key], moment, rtol=step, atol=floor)


def test_what_does_not_exist_or_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose fp32, split"):
        state_layout("fp8")
    with pytest.raises(ConfigError, match="choose adam, adamw"):
        state_layout("fp32", "shampoo")
    layout = state_layout("int8")
    states = make_tile(layout, 1024)[1]
    with pytest.raises(ConfigError, match="blocks of 256"):
        layout.narrow(states, 100, 300)
    with pytest.raises(ValueError, match="master is missing"):
        kernels.update(HYPERS["adamw"], torch.zeros(4).bfloat16(), torch.zeros(4))
    with pytest.raises(ValueError, match="give just these"):
        kernels.update(HYPERS["lion"], torch.zeros(4), torch.zeros(4), second=kernels.Moment(torch.zeros(4)))
    with pytest.raises(ValueError, match=r"scales are needed with torch\.uint8"):
        kernels.load_moment(kernels.Moment(torch.zeros(4, dtype=torch.uint8)), signed=True)
