"""Parameters that a loop writes to directly, and a process whose default dtype is another than float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import kernels
from infinity.optim.formats import init_states, read_master, state_layout, update
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import LR, Placement, Recipe, batches, tiny_gpt2, tiny_llama, train_on
from tests.kernels.conftest import _restore_machine_settings  # noqa: F401
from tests.kernels.data import HYPER, same_bits, wild

NUMEL = 2048 + 38
NAMES = kernels.instruction_sets()


class Tile:
    """Parameters and states in one format."""

    def __init__(self, format_name: str, master: torch.Tensor) -> None:
        self.layout = state_layout(format_name)
        self.param = torch.empty(NUMEL, dtype=self.layout.param_dtype)
        self.states = self.layout.views(torch.empty(self.layout.tile_bytes(NUMEL), dtype=torch.uint8), NUMEL)
        init_states(self.layout, master, self.param, self.states)

    def update(self, seed: int) -> None:
        grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).half()
        update(self.layout, self.param, self.states, grad, HYPER)

    def master(self) -> torch.Tensor:
        return read_master(self.layout, self.param, self.states)


@pytest.mark.parametrize("name", NAMES)
def test_fp16_weights_that_nobody_writes_have_masters_of_fp32_training(name) -> None:
    kernels.use_instruction_set(name)
    master = wild(NUMEL, 0)
    master[5], master[40] = 65519.99, 7e4  # the last that rounds to a number, and one that rounds to infinity
    plain, tile = Tile("fp32", master), Tile("master", master)
    for seed in range(4):
        plain.update(seed)
        tile.update(seed)
        assert same_bits(tile.master(), plain.param)
        assert same_bits(tile.param, plain.param.half())


WRITES = {
    "scaled": lambda values: values * 0.5,
    "pruned": lambda values: values * 0,
    "replaced": lambda values: values.flip(0),
    "a few": lambda values: torch.where(torch.arange(NUMEL) % 17 == 3, 0.25, values.float()).to(values.dtype),
    "negative zero": lambda values: values * -0.0,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("write", WRITES)
def test_an_fp16_weight_that_was_written_is_its_own_master(write, name) -> None:
    kernels.use_instruction_set(name)
    tile, plain = (Tile(kind, torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))) for kind in _KINDS)
    for each in (tile, plain):
        each.update(0)
    before = tile.param.clone()
    tile.param.copy_(WRITES[write](tile.param))
    written = tile.param != before
    plain.param[written] = tile.param[written].float()  # as a loop does that seeds its float32 masters anew
    assert torch.equal(tile.master(), plain.param)
    for each in (tile, plain):
        each.update(1)
    assert same_bits(tile.master(), plain.param)


_KINDS = ("master", "fp32")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format_name", ["split", "bf16", "int8"])
@pytest.mark.parametrize("write", WRITES)
def test_a_bf16_weight_that_was_written_is_its_master_to_half_a_step(write, format_name, name) -> None:
    kernels.use_instruction_set(name)
    tile = Tile(format_name, torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)))
    tile.update(0)
    tile.param.copy_(WRITES[write](tile.param))
    master = tile.master()
    assert bool(master.isfinite().all())
    torch.testing.assert_close(master, tile.param.float(), rtol=2**-8, atol=1e-38)
    tile.update(1)
    assert bool(tile.param.isfinite().all())


def test_a_weight_that_a_loop_prunes_and_scales_stays_so_in_fp16_training() -> None:
    """At stage 0 parameters are there after `step()`; the reference keeps float32 masters beside fp16 weights."""
    config = Recipe("fp16").config(Placement()) | {"zero_optimization": {"stage": 0}}
    weights = []
    for written in (False, True):
        with infinity.initialize(tiny_llama(), config)[0] as engine:
            train_on(engine, batches(2))
            engine.synchronize()
            weight = engine.module.get_parameter("model.layers.1.mlp.up_proj.weight")
            if written:
                with torch.no_grad():
                    weight.fill_(0.125)
            train_on(engine, batches(1))
            weights.append(dict(engine.named_parameters())["model.layers.1.mlp.up_proj.weight"])
    assert float((weights[1] - 0.125).abs().max()) < 10 * LR  # one update away from what was written
    assert float((weights[0] - 0.125).abs().min()) < float((weights[0] - 0.125).abs().max())


# The default dtype #


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


OTHERS = [torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_state_dicts_are_float32_in_host_memory_under_any_default(offload, dtype, tmp_path) -> None:
    states = []
    for default in (torch.float32, dtype):
        torch.manual_seed(0)
        model = nn.Linear(300, 7, dtype=torch.bfloat16)
        path = {"nvme_path": tmp_path} if offload == "nvme" else {}
        with default_dtype(default), infinity.optim.AdamW(model.parameters(), offload=offload, **path) as optimizer:
            for _ in range(2):
                model(torch.ones(1, 300, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
            with torch.device("meta" if default is dtype else "cpu"):
                states.append(optimizer.state_dict()["state"])
            optimizer.load_state_dict(optimizer.state_dict())
            assert _same(optimizer.state_dict()["state"], states[-1])
    assert _same(*states)


def _same(left: dict[int, dict[str, torch.Tensor]], right: dict[int, dict[str, torch.Tensor]]) -> bool:
    return all(
        same_bits(value.view(-1), right[index][key].view(-1)) for index in left for key, value in left[index].items()
    )


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize(
    ("precision", "tier", "more"),
    [
        ("fp32", "nvme", {}),
        ("bf16", "nvme", {"gradient_clipping": 0.5}),
        ("bf16", "none", {"tiering": {"accumulation": "layer"}, "gradient_accumulation_steps": 2}),
        ("bf16", "cpu", {"tiering": {"state_format": "int8"}}),
        ("fp16", "cpu", {}),
    ],
)
def test_training_has_the_same_bits_under_any_default_dtype(precision, tier, more, dtype, tmp_path) -> None:
    config: dict[str, Any] = Recipe(precision).config(Placement(tier, tier, tmp_path))
    tiering = config["tiering"] | more.get("tiering", {})
    config = config | more | {"tiering": tiering}
    results = []
    for default in (torch.float32, dtype):
        torch.manual_seed(0)
        model = tiny_gpt2()
        with default_dtype(default), infinity.initialize(model, config)[0] as engine:
            if "gradient_accumulation_steps" in more:
                losses = [engine.train_batch([{"input_ids": ids, "labels": ids} for ids in batches(2)])]
            else:
                losses = train_on(engine, batches(3))
            engine.save_checkpoint(tmp_path / str(default))
            results.append((losses, dict(engine.named_parameters())))
    (losses, weights), (other_losses, other_weights) = results
    assert losses == other_losses
    assert all(same_bits(value, other_weights[name]) for name, value in weights.items())


def _place_on_a_rank(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = tiny_llama()
    with default_dtype(dtype), infinity.initialize(model, Recipe("fp32").config(Placement()))[0] as engine:
        return dict(engine.named_parameters())


@pytest.mark.parametrize("dtype", OTHERS)
def test_ranks_agree_on_float32_values_under_any_default_dtype(dtype, tmp_path) -> None:
    expected = tiny_llama().state_dict()
    for values in run_ranks(2, _place_on_a_rank, dtype, path=tmp_path):
        assert all(same_bits(value, expected[name]) for name, value in values.items())


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_model_without_values_is_initialised_in_float32(dtype) -> None:
    values = []
    for default in (torch.float32, dtype):
        with torch.device("meta"):
            model = nn.Linear(30, 7)
        torch.manual_seed(0)
        with default_dtype(default), infinity.initialize(model, Recipe().config(Placement()))[0] as engine:
            values.append(dict(engine.named_parameters())["weight"])
    assert same_bits(*values)
