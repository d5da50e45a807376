"""The placement table: what a stage, the offload sections and the device make of every field, and its choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from infinity.config import load_config
from infinity.schedule import MemorySplit
from infinity.schedule.needs import Shards, Share, collecting_bytes, cut_into_tiles, param_bytes, summed_once
from infinity.schedule.placement import place, place_gradients, place_units, resident_tiles
from infinity.schedule.rules import Rules, rules_of
from infinity.tiers import WHOLE, FlatSpec, Memory, Sharding

DEVICE, SHARD, HOST, NVME = Memory.DEVICE, Memory.SHARD, Memory.HOST, Memory.NVME


def rules(
    stage: int = 3,
    params: str = "none",
    states: str = "none",
    ranks: int = 1,
    *,
    discrete: bool = False,
    backward: bool = True,
    steps: int = 1,
    exact: bool = True,
    **tiering: Any,
) -> Rules:
    config = {
        "gradient_accumulation_steps": steps,
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": params},
            "offload_optimizer": {"device": states},
        },
        "tiering": {"nvme": [{"path": "/drive"}], **tiering},
    }
    loaded = load_config(config, world_size=ranks)
    return rules_of(loaded, ranks - 1, ranks, discrete=discrete, exact=exact, updates_in_backward=backward)


# (stage, offload_param, ranks, discrete) -> (home of parameters, where they are updated, shards, whole from shards)
TABLE = {
    (0, "none", 1, False): (DEVICE, DEVICE, 1, False),
    (0, "none", 2, False): (DEVICE, DEVICE, 1, False),
    (0, "none", 1, True): (DEVICE, HOST, 1, False),
    (1, "none", 1, False): (DEVICE, DEVICE, 1, False),
    (1, "none", 2, False): (DEVICE, HOST, 2, True),
    (2, "none", 2, True): (DEVICE, HOST, 2, True),
    (3, "none", 1, False): (DEVICE, DEVICE, 1, False),
    (3, "cpu", 1, False): (DEVICE, DEVICE, 1, False),  # where the compute device is the CPU, it is there already
    (3, "nvme", 1, False): (NVME, DEVICE, 1, False),
    (3, "none", 1, True): (DEVICE, HOST, 1, False),
    (3, "cpu", 1, True): (HOST, HOST, 1, False),
    (3, "nvme", 1, True): (NVME, HOST, 1, False),
    (3, "none", 2, False): (HOST, HOST, 2, True),  # a rank has its shard alone
    (3, "none", 2, True): (SHARD, HOST, 2, True),
    (3, "cpu", 2, True): (HOST, HOST, 2, True),
    (3, "cpu", 2, False): (HOST, HOST, 2, True),
    (3, "nvme", 2, False): (NVME, HOST, 2, True),
    (3, "nvme", 2, True): (NVME, HOST, 2, True),
}


@pytest.mark.parametrize(("given", "expected"), TABLE.items())
def test_homes_follow_from_stage_section_ranks_and_device(given, expected) -> None:
    stage, params, ranks, discrete = given
    made = rules(stage, params, ranks=ranks, discrete=discrete)
    assert (made.params.home, made.update_memory, made.sharding.count, made.params.gathers) == expected
    assert made.sharding == (Sharding(1, 2) if expected[2] == 2 else WHOLE)
    assert made.one_memory is not discrete
    assert made.grads.reduces == (ranks == 2)


@pytest.mark.parametrize(
    ("states", "exact", "params_home", "states_home", "share"),
    [("none", True, SHARD, DEVICE, 1.0), ("none", False, HOST, HOST, 0.0), ("cpu", True, HOST, HOST, 0.0)],
)
def test_shards_are_on_the_device_where_it_updates_them(states, exact, params_home, states_home, share) -> None:
    made = rules(3, "none", states, 2, discrete=True, exact=exact)
    assert (made.params.home, made.states.home, made.states.share_on_device) == (params_home, states_home, share)
    homes = [made.param_home(stays=stays, updated_on_device=there) for stays, there in product((True, False), repeat=2)]
    assert homes == [DEVICE, DEVICE, SHARD, params_home]


@pytest.mark.parametrize(
    ("stage", "accumulation", "order", "every_pass", "collects_all", "keeps"),
    [
        (0, 1, "micro_batch", False, False, True),
        (1, 4, "micro_batch", False, True, True),
        (2, 4, "micro_batch", True, False, False),
        (3, 4, "micro_batch", True, False, False),
        (3, 4, "layer", False, False, False),
    ],
)
def test_what_ranks_reduce_and_keep(stage, accumulation, order, every_pass, collects_all, keeps) -> None:
    made = rules(stage, ranks=2, steps=accumulation, accumulation=order)
    assert (made.grads.reduces_every_pass, made.grads.collects_all, not made.no_sync_problem()) == (
        every_pass,
        collects_all,
        keeps,
    )
    sizes = [10, 40, 20, 30]
    here = 2 * (100 if collects_all else 40 + 30) + (0 if stage == 0 else 2 * 20)  # beside it this rank's shard
    assert collecting_bytes(made, sizes, (), torch.bfloat16, torch.bfloat16, torch.bfloat16) == here
    assert not collecting_bytes(rules(stage), sizes, (), torch.bfloat16, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("steps", "backward", "holds"), [(1, True, False), (1, False, True), (4, True, True)])
def test_gradients_that_are_all_held_spill_where_there_is_a_drive(stage, steps, backward, holds) -> None:
    for states in ("cpu", "nvme"):
        made = rules(stage, states=states, steps=steps, backward=backward)
        assert made.grads.holds_all == holds
        assert made.grads.spills == (holds and states == "nvme")
        assert made.states.home is (NVME if states == "nvme" else HOST)


def test_activations_move_where_there_is_somewhere_to_move_them() -> None:
    for tier, discrete in product(("none", "cpu", "nvme"), (False, True)):
        expected = tier == "nvme" or (tier == "cpu" and discrete)
        assert bool(rules(discrete=discrete, activations=tier).activations_bytes) == expected


def test_a_step_settles_below_stage_3_unless_a_schedule_was_asked_for() -> None:
    assert [rules(stage).waits_for_updates for stage in range(4)] == [True, True, True, False]
    assert not rules(1, update_schedule="deferred").waits_for_updates


# Memory #


def with_ahead(made: Rules, numel: int) -> Rules:
    """Of units that are gathered ahead, so many elements."""
    return replace(made, params=replace(made.params, ahead_numel=numel))


def specs_of(made: Rules, *numels: int) -> list[FlatSpec]:
    moves, beside = made.params.home is not DEVICE, made.params.home is SHARD
    return [
        FlatSpec(f"u{index}", n, n, torch.bfloat16, moves, made.sharding, has_device_shard=beside)
        for index, n in enumerate(numels)
    ]


def test_units_inside_of_one_another_are_needed_together() -> None:
    """And what a module has in files beside what it trains; another one comes, or is updated, meanwhile."""
    names = ["head", "0", "0.up", "0.down", "0.down (in its files)"]
    specs = [
        FlatSpec(name, numel, numel, torch.bfloat16, offloaded=True)
        for name, numel in zip(names, [50, 3, 40, 20, 30], strict=True)
    ]
    assert param_bytes(rules(3, "nvme"), specs).computed.least == 2 * (3 + 20 + 30 + 50)
    assert param_bytes(rules(3, "nvme"), specs[1:]).computed.least == 2 * (3 + 20 + 30 + 40)
    assert param_bytes(rules(3, "nvme"), specs[:1]).computed.least == 2 * 50


def test_no_memory_has_less_than_the_least() -> None:
    """Units of one size, three inside of one another and one beside, where the ranks gather nothing ahead."""
    shared = with_ahead(rules(3, "nvme", ranks=2), 0)
    specs = [FlatSpec(name, 10, 10, torch.bfloat16, offloaded=True) for name in ("0", "0.mlp", "0.mlp.up", "1", "2")]
    computed = param_bytes(shared, specs).computed
    assert computed.least <= computed.most


def test_unsharded_units_are_counted_in_addition_to_their_shards() -> None:
    """Units of 40, 20, 20 and 20 bytes: two must be there at once."""
    alone = rules(3, "nvme")
    assert param_bytes(alone, specs_of(alone, 20, 10, 10, 10)).computed == Share(0, 60, 100)
    shared = rules(3, "nvme", ranks=2)
    held = param_bytes(shared, specs_of(shared, 20, 10, 10, 10))
    assert held.computed == Share(0, 60, 80)
    assert held.staging == 3 * 20
    assert held.homes == Share(0, 60, 60 + 50)
    stays = rules(1, ranks=2)
    held = param_bytes(stays, specs_of(stays, 20, 10, 10, 10))
    assert held.computed == Share(100, 0, 0)
    assert held.homes == Share(0, 60, 60)
    there = with_ahead(rules(3, ranks=2, discrete=True), 5)
    held = param_bytes(there, specs_of(there, 20, 10, 10, 10))
    assert held.computed == Share(50, 60, 90), "shards, and three units with a part of the fourth ahead"
    assert held.homes == Share(0, 20, 20), "one is looked at"


# The table of a divided budget #


@given(st.data())
def test_the_table_keeps_to_its_shares_and_names_every_field(data: st.DataObject) -> None:
    params = data.draw(st.sampled_from(["none", "cpu", "nvme"]))
    states = data.draw(st.sampled_from(["none", "nvme"]))
    made = rules(3, params, states, data.draw(st.integers(1, 2)), discrete=data.draw(st.booleans()), backward=False)
    specs = specs_of(made, *(4 * n for n in data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))))
    there = frozenset(data.draw(st.sets(st.integers(0, len(specs) - 1))))
    numels = [spec.shard_numel for spec in specs]
    shards = Shards(numels, 16, lambda numel: 10 * numel, torch.bfloat16, (), there)
    sizes = [spec.shard_nbytes for spec in specs]
    homes_bytes = data.draw(st.integers(0, sum(sizes)))
    grads_bytes = data.draw(st.integers(max(sizes), 2 * sum(sizes)))
    states_bytes = data.draw(st.integers(0, 20 * sum(sizes)))
    held = param_bytes(made, specs)
    grad_sizes = [0 if unit in there else size for unit, size in enumerate(sizes)]
    homes_bytes = max(homes_bytes, held.homes.least - held.staging)
    tiles = shards.tile_sizes
    states_bytes = states_bytes if made.states.home is NVME else sum(tiles)
    table = place(made, specs, shards, MemorySplit(0, grads_bytes, states_bytes, 0, held.staging + homes_bytes))

    assert len(table.params) == len(table.tiles) == len(specs)
    at_home = [size for size, home in zip(sizes, table.params, strict=True) if home is HOST]
    assert sum(at_home) <= homes_bytes
    assert set(table.params) <= {made.params.home, HOST}

    spilled = set(table.grad_homes.spilled)
    assert not spilled & (there | set(table.grad_homes.own))
    assert not spilled or NVME in (made.params.home, made.states.home)
    if spilled:
        held = sum(grad_sizes[unit] for unit in table.grad_homes.own)
        assert held + table.grad_homes.slots * max(sizes[unit] for unit in spilled) <= grads_bytes

    assert [len(homes) for homes in table.tiles] == [len(list(cut_into_tiles([numel], 16))) for numel in numels]
    assert all((home is DEVICE) == (unit in there) for unit, homes in enumerate(table.tiles) for home in homes)
    below = [home for homes in table.tiles for home in homes if home is not DEVICE]
    stored = sum(size for size, home in zip(tiles, below, strict=True) if home is NVME)
    assert sum(tiles) - stored <= states_bytes
    assert not stored or made.states.home is NVME
    assert table.stored_states_bytes == stored


def test_replicas_add_up_once_a_step_as_far_as_sums_have_room() -> None:
    shards = Shards([10, 0, 40, 20], 16, lambda numel: 10 * numel, torch.bfloat16, ())
    config = {"zero_optimization": {"stage": 3}, "communication": {"shard_size": 2}, "gradient_accumulation_steps": 2}
    once = rules_of(load_config(config, world_size=4), 0, 4, discrete=False, updates_in_backward=False)
    assert summed_once(once, shards, 140) == {0: 20, 2: 80, 3: 40}
    assert summed_once(once, shards, 139) == {0: 20, 2: 80}
    assert summed_once(once, shards, 79) == {0: 20, 3: 40}
    assert summed_once(once, replace(shards, on_device=frozenset((0, 2, 3))), 140) == {0: 20, 2: 80, 3: 40}
    assert summed_once(rules(3, ranks=4, steps=2), shards, 140) == {}, "all ranks share"


@given(
    blocks=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=2, max_size=5),
    standing=st.integers(0, 40),
    spare=st.integers(0, 60),
)
def test_gradients_of_a_whole_block_always_have_room(blocks, standing, spare) -> None:
    """In the least budget and in any above: its units may be open all at once."""
    sizes = [standing, *(size for block in blocks for size in block)]
    names = ["alone", *(str(index) for index, block in enumerate(blocks) for _ in block)]
    capacity = standing + max(map(sum, blocks)) + spare
    own = set(place_gradients(sizes, [0], capacity, spills=False, blocks=names).own)
    shared = capacity - sum(sizes[unit] for unit in own)
    for name in set(names):
        assert sum(size for unit, size in enumerate(sizes) if names[unit] == name and unit not in own) <= shared


def test_gradients_that_stand_never_spill() -> None:
    choice = place_gradients([50, 10, 10, 10, 10], [0], 50 + 2 * 10, spills=True)
    assert choice.own == (0,)
    assert choice.spilled == (1, 2, 3, 4)
    assert choice.slots == 2


@given(
    numels=st.lists(st.integers(0, 60), min_size=1, max_size=10).filter(any),
    there=st.sets(st.integers(0, 9), max_size=3),
    states_bytes=st.integers(0, 4000),
    flowing=st.integers(0, 300),
)
def test_units_stay_in_memory_with_their_gradients(numels, there, states_bytes, flowing) -> None:
    there = frozenset(unit for unit in there if unit < len(numels))
    shards = Shards(numels, 16, lambda numel: 10 * numel, torch.bfloat16, (), there)
    assume(any(shards.off_device))
    split = MemorySplit(0, max(shards.grad_sizes) + flowing, states_bytes, 0)
    homes, stay = place_units(shards, split)
    tiles = iter(stay)
    kept = [[next(tiles) for _ in shards.tile_sizes_of(unit)] for unit in range(len(numels))]
    assert next(tiles, None) is None
    slot_bytes = max((shards.grad_sizes[unit] for unit in homes.spilled), default=0)
    held = sum(shards.grad_sizes[unit] for unit in homes.own) + homes.slots * slot_bytes
    in_memory = sum(size for size, stays in zip(shards.tile_sizes, stay, strict=True) if stays)
    assert held + in_memory <= split.grads_bytes + split.states_bytes
    assert {unit for unit, some in enumerate(kept) if any(some)} <= set(homes.own)
    assert {unit for unit, size in enumerate(shards.grad_sizes) if size} <= set(homes.own) | set(homes.spilled)
    assert not set(homes.own) & set(homes.spilled)
    assert bool(homes.slots) == bool(homes.spilled)
    if sum(shards.grad_sizes) + sum(shards.tile_sizes) <= split.grads_bytes + split.states_bytes:
        assert all(stay)
        assert not homes.spilled


def test_units_that_stay_are_spread_evenly_after_the_first_one() -> None:
    shards = Shards([16] * 9, 16, lambda numel: 10 * numel, torch.bfloat16, ())
    states, grads = 160, 32
    homes, stay = place_units(shards, MemorySplit(0, 3 * grads, 5 * (states + grads), 0))
    assert stay == [True] + [False, True] * 4
    assert homes.own == (0, 2, 4, 6, 8)
    assert homes.spilled == (1, 3, 5, 7)
    assert homes.slots == 3


def test_a_unit_larger_than_most_has_memory_of_its_own_where_that_makes_more_slots() -> None:
    shards = Shards([64, *[16] * 9], 16, lambda numel: 10 * numel, torch.bfloat16, ())
    large, small, tile = 128, 32, 160
    homes, stay = place_units(shards, MemorySplit(0, large + 5 * small, 0, 0))
    assert (homes.own, homes.slots) == ((0,), 5), "and not two of the large one's size"
    assert not any(stay)
    homes, stay = place_units(shards, MemorySplit(0, large + 5 * small, tile, 0))
    assert stay == [True] + [False] * 12, "beside gradients that have their memory anyway"


def same(numel: int) -> int:
    return numel


@given(
    shards=st.lists(st.integers(0, 2000), min_size=1, max_size=12),
    tile=st.integers(1, 300),
    resident_bytes=st.integers(0, 20_000),
)
def test_resident_tiles_keep_to_the_budget_and_begin_with_the_first_unit(
    shards: list[int], tile: int, resident_bytes: int
) -> None:
    sizes = list(cut_into_tiles(shards, tile))
    stay = resident_tiles(Shards(shards, tile, same, torch.bfloat16, ()), resident_bytes)
    assert len(stay) == len(sizes)
    held = sum(size for size, stays in zip(sizes, stay, strict=True) if stays)
    assert held <= resident_bytes
    if sum(sizes) <= resident_bytes:
        assert all(stay)
    first = len(list(cut_into_tiles([next((numel for numel in shards if numel), 0)], tile)))
    within = [*stay[:first], False].index(False)
    assert within == first or sum(sizes[: within + 1]) > resident_bytes


def test_the_tiles_besides_those_of_the_first_unit_are_spread_evenly() -> None:
    stay = resident_tiles(Shards([400] + [100] * 8, 100, same, torch.bfloat16, ()), 400 + 400)
    assert stay == [True] * 4 + [False, True] * 4
