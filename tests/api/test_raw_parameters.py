"""Parameters read and written past the engine: the newest values at stages 0 to 2, never a stale one at stage 3."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError
from infinity.integrations import full_fp32_values
from infinity.tiers import SameMemory
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import LR, WEIGHT_DECAY, Placement, Recipe, batches, loss_of, tiny_gpt2, train_on
from tests.tiers.late_link import LateLink, late

STEPS = 4


def config_of(stage: int, *, offload: str = "none", path: Path | None = None, **recipe: Any) -> dict[str, Any]:
    return Recipe(**recipe).config(Placement(optimizer=offload, path=path), stage)


def raw(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "cpu"), (1, "nvme"), (2, "none"), (2, "nvme")])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_after_a_step_parameters_are_the_newest(stage, offload, clipping, tmp_path) -> None:
    config = config_of(stage, offload=offload, path=tmp_path, precision="bf16", clipping=clipping)
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=config)[0] as engine:
        for ids in batches(STEPS):
            train_on(engine, [ids])
            here = raw(model)
            assert all(torch.equal(here[name], values) for name, values in engine.named_parameters())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_before_step_no_parameter_shows_its_update(stage) -> None:
    """Under the schedule `backward` it has it by then: it is NaN, also when something has looked at what has ended."""
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=config_of(stage, precision="bf16"))[0] as engine:
        data = batches(STEPS)
        train_on(engine, data[:2])
        before = dict(engine.named_parameters())
        engine.backward(loss_of(engine, data[2]))
        deadline = time.monotonic() + 10
        while not engine._runtime.executor.in_flight.all_computed and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(infinity.InfinityError, match="between the last backward pass of a step and step"):
            loss_of(engine, data[3])
        for name, values in raw(model).items():
            assert values.isnan().all() or torch.equal(values, before[name]), name
        engine.step()
        if stage < 3:
            assert not any(values.isnan().any() for values in raw(model).values())


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def _by_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.9


def trained_plainly(
    change: Callable[[nn.Module], None], clipping: float, steps: int = STEPS
) -> dict[str, torch.Tensor]:
    """In torch alone, with a change of the parameters after every step."""
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for ids in batches(steps):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        if clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        change(model)
    return raw(model)


@pytest.mark.parametrize("shrink", [_in_place, _by_data])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("link", [None, SameMemory])
def test_what_is_written_to_parameters_is_trained_on(stage, clipping, link, shrink) -> None:
    """As weight decay by hand, or a projection, does; in float32, where torch says what comes out.

    With a link the parameters lie apart from where they are updated, as on a GPU.
    """
    model = tiny_gpt2()
    config = config_of(stage, clipping=clipping)
    with infinity.initialize(model=model, config=config, link=link and link())[0] as engine:
        for ids in batches(STEPS):
            train_on(engine, [ids])
            shrink(model)
        here = raw(model)
    for name, values in trained_plainly(shrink, clipping).items():
        torch.testing.assert_close(here[name], values, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("link", [None, SameMemory])
@pytest.mark.parametrize("blocking", [True, False])
def test_data_that_are_set_after_the_last_step_are_in_what_is_saved(stage, link, blocking, tmp_path) -> None:
    config = config_of(stage, offload="cpu", path=tmp_path)
    model = tiny_gpt2()
    model.transformer.wpe.requires_grad_(False)
    with infinity.initialize(model=model, config=config, link=link and link())[0] as engine:
        train_on(engine, batches(1))
        expected = {name: torch.full_like(param, 0.25, device="cpu") for name, param in model.named_parameters()}
        for param in model.parameters():
            param.data = torch.full_like(param, 0.25)
        engine.save_checkpoint(tmp_path, blocking=blocking)
        masters = {name: full_fp32_values(param) for name, param in model.named_parameters()}
        torch.testing.assert_close(masters, expected, rtol=0, atol=0)
    model = tiny_gpt2(seed=1)
    model.transformer.wpe.requires_grad_(False)
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.load_checkpoint(tmp_path)
        torch.testing.assert_close(dict(engine.named_parameters()), expected, rtol=0, atol=0)


def _step(engine: infinity.Engine) -> None:
    train_on(engine, batches(1))


LOOKS: list[Callable[[infinity.Engine], object]] = [
    _step,
    lambda engine: engine.module.state_dict(),
    lambda engine: list(engine.named_parameters()),
    lambda engine: infinity.zero.GatheredParameters(engine.module).__enter__(),
]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_at_stage_3_data_that_would_be_lost_are_refused(place, look, tmp_path) -> None:
    """`param.data = values` leaves the tiers as they are, where a script would go on with old values."""
    model = tiny_gpt2()
    config = config_of(3, offload=place, path=tmp_path)
    config["zero_optimization"]["offload_param"] = {"device": place, "nvme_path": str(tmp_path)}
    with infinity.initialize(model=model, config=config)[0] as engine:
        train_on(engine, batches(2))
        before = dict(engine.named_parameters())
        for param in model.parameters():
            param.data = torch.zeros(param.shape)
        with pytest.raises(infinity.InfinityError, match=r"`.*weight`\.data was set .* zero\.GatheredParameters"):
            look(engine)
        for _ in range(6):  # each unit says so once
            with suppress(infinity.InfinityError):
                list(engine.named_parameters())
        assert all(torch.equal(values, before[name]) for name, values in engine.named_parameters())
        train_on(engine, batches(1))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_data_of_another_shape_are_refused(stage) -> None:
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=config_of(stage))[0] as engine:
        train_on(engine, batches(1))
        model.lm_head.weight.data = torch.zeros(3)
        with pytest.raises(infinity.InfinityError, match=r"weight`\.data was set to a tensor of shape \(3,\)"):
            train_on(engine, batches(1))
        train_on(engine, batches(1))


@pytest.mark.parametrize("schedule", ["auto", "deferred", "backward"])
@pytest.mark.parametrize("params", ["none", "nvme"])
def test_at_stage_3_a_parameter_is_nan_or_the_newest(schedule, params, tmp_path) -> None:
    placement = Placement(params, "nvme", tmp_path, schedule=schedule)
    config = Recipe("bf16", clipping=0.0 if schedule == "backward" else 1.0).config(placement)
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=config)[0] as engine:
        for ids in batches(STEPS):
            loss_of_step = loss_of(engine, ids)
            engine.backward(loss_of_step)
            after_backward = raw(model)
            engine.step()
            after_step = raw(model)
            newest = dict(engine.named_parameters())
            for name, values in newest.items():
                assert after_step[name].isnan().all() or torch.equal(after_step[name], values), name
                if schedule == "backward":
                    assert after_backward[name].isnan().all() or torch.equal(after_backward[name], values), name


BETWEEN_STEPS: list[Callable[[infinity.Engine], object]] = [
    lambda engine: None,
    lambda engine: engine.synchronize(),
    lambda engine: list(engine.named_parameters()),
    lambda engine: engine.module.state_dict(),
    lambda engine: engine.module(batches(1)[0]),
]


@pytest.mark.parametrize("look", BETWEEN_STEPS)
@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier"])
@pytest.mark.parametrize("host_memory", ["800KB", "1500KB", None])
def test_at_stage_3_what_comes_and_goes_is_nan_between_steps(host_memory, schedule, look, tmp_path) -> None:
    """Where it happens to be in memory, too: what is written there would be lost when it goes."""
    placement = Placement("nvme", "nvme", tmp_path, "16KiB", host_memory, schedule)
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=Recipe().config(placement))[0] as engine, torch.no_grad():
        for ids in batches(STEPS):
            with torch.enable_grad():
                train_on(engine, [ids])
            look(engine)
            for param in model.transformer.h.parameters():
                assert param.isnan().all()
                with pytest.raises(RuntimeError, match="single memory location"):
                    param.data.mul_(0.5)


def _ranks_read(stage: int, path: str, clipping: float) -> list[dict[str, torch.Tensor]]:
    """What the module shows, and what it should, after a step, a save and a load."""
    config = config_of(stage, clipping=clipping)
    config["train_micro_batch_size_per_gpu"] = 2
    model = tiny_gpt2()
    seen = []
    with infinity.initialize(model=model, config=config)[0] as engine:
        seen.append(raw(model))
        seen.append(dict(engine.named_parameters()))
        train_on(engine, batches(1))
        for use in (lambda: None, lambda: engine.save_checkpoint(path), lambda: engine.load_checkpoint(path)):
            use()
            shown = raw(model)
            seen += [shown, dict(engine.named_parameters())]
            train_on(engine, batches(1, seed=5))
            seen += [raw(model), dict(engine.named_parameters())]
    return seen


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_reads_the_newest(stage, clipping, tmp_path) -> None:
    (tmp_path / "ranks").mkdir()
    for seen in run_ranks(2, _ranks_read, stage, str(tmp_path / "saved"), clipping, path=tmp_path / "ranks"):
        for shown, newest in zip(seen[::2], seen[1::2], strict=True):
            for name, values in newest.items():
                if stage < 3:
                    assert torch.equal(shown[name], values), name
                else:
                    assert shown[name].isnan().all() or torch.equal(shown[name], values), name


@pytest.mark.parametrize("stage", [0, 2])
def test_an_average_of_the_weights_follows_them(stage, tmp_path) -> None:
    """`AveragedModel` reads the parameters after every step."""
    model = tiny_gpt2()
    plain = tiny_gpt2()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    with infinity.initialize(model=model, config=config_of(stage))[0] as engine:
        mean: dict[str, torch.Tensor] = {}
        reference: dict[str, torch.Tensor] = {}
        for ids in batches(STEPS):
            train_on(engine, [ids])
            optimizer.zero_grad()
            loss_of(plain, ids).backward()
            optimizer.step()
            for average, source in ((mean, model), (reference, plain)):
                for name, param in source.named_parameters():
                    average[name] = param.detach() * 0.1 + average.get(name, torch.zeros(())) * 0.9
    for name, values in reference.items():
        torch.testing.assert_close(mean[name], values, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("link", [None, SameMemory, LateLink])
def test_so_it_is_where_the_unit_that_was_updated_last_is_the_next_again(clipping, link, monkeypatch) -> None:
    """What its last update has left in host memory is older than what was written since."""

    def run(model: nn.Module, step: Callable[[torch.Tensor], object]) -> torch.Tensor:
        for seed in range(STEPS):
            step(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    def plainly(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        if clipping:
            nn.utils.clip_grad_norm_(plain.parameters(), clipping)
        optimizer.step()

    def by_engine(x: torch.Tensor) -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    model = copy.deepcopy(plain)
    over = late(monkeypatch, 1, patience=64) if link is LateLink else link and link()
    with infinity.initialize(model=model, config=config_of(2, clipping=clipping), link=over)[0] as engine:
        here = run(model, by_engine)
    torch.testing.assert_close(here, run(plain, plainly))


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_in_one_anothers_memory_are_refused(frozen) -> None:
    """In torch a step of one changes the other; in their tiers each would have values of its own."""
    model = tiny_gpt2()
    first, second = (block.attn.c_proj.weight for block in model.transformer.h[:2])
    second.data = first.data
    if frozen:
        second.requires_grad_(False)
    with pytest.raises(infinity.ConfigError, match=r"`.*h\.0\.attn\.c_proj.*` and `.*h\.1\..*` lie in the same memory"):
        infinity.initialize(model=model, config=config_of(2))
    second.data = first.data.clone()
    with infinity.initialize(model=model, config=config_of(2))[0] as engine:
        train_on(engine, batches(1))


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_that_overlap_are_refused(trained) -> None:
    """A part of another parameter's memory would be a memory of its own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight = nn.Parameter(model[0].weight.data[2:6])
    if not trained:
        model[0].weight.requires_grad_(False)
        model[1].weight.requires_grad_(False)
        infinity.initialize(model=model, config=config_of(3), device="cpu")[0].close()
        return
    with pytest.raises(infinity.ConfigError, match=r"`0\.weight` and `1\.weight` lie in the same memory"):
        infinity.initialize(model=model, config=config_of(3), device="cpu")


def test_a_buffer_in_the_memory_of_a_trained_parameter_is_refused() -> None:
    """In torch it follows the parameter; in its tier it would keep the first values."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].register_buffer("alias", model[0].weight.data[2:6])
    with pytest.raises(infinity.ConfigError, match=r"`0\.weight` and `1\.alias` lie in the same memory"):
        infinity.initialize(model=model, config=config_of(3), device="cpu")
    model[0].requires_grad_(False)
    infinity.initialize(model=model, config=config_of(3), device="cpu")[0].close()


def test_modules_that_share_a_buffer_of_parameters_are_not_refused() -> None:
    flat = torch.randn(2 * 64)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for index, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[64 * index : 64 * (index + 1)].view(8, 8))
    infinity.initialize(model=model, config=config_of(3), device="cpu")[0].close()


def test_tying_modules_after_initialize_is_refused() -> None:
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=config_of(3), device="cpu")[0] as engine:
        (ids,) = batches(1)
        train_on(engine, [ids])
        model.transformer.h[0] = model.transformer.h[1]
        with pytest.raises(infinity.InfinityError, match=r"`transformer\.h\.0\.\S+` is another parameter than at"):
            loss_of(engine, ids)


class _ReturnsWeight(torch.nn.Module):
    """Returns what `share` makes of a weight beside its output."""

    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.share = share

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return x.mean(), self.share(self.layers[1].weight)


@pytest.mark.parametrize("share", [torch.Tensor.detach, torch.Tensor.t, lambda weight: weight.data.view(-1)])
def test_a_model_that_returns_a_view_of_a_weight_is_refused(share, tmp_path) -> None:
    """A read of it after the weight's eviction would end the process by SIGSEGV."""
    config = Recipe().config(Placement("nvme", "nvme", tmp_path))
    with infinity.initialize(model=_ReturnsWeight(share), config=config)[0] as engine:
        with pytest.raises(InfinityError, match=r"returns a view of `layers\.1\.weight`"):
            engine(torch.ones(2, 64))
        engine.module.share = torch.clone
        loss, copy = engine(torch.ones(2, 64))
        engine.backward(loss + copy.mean())
        engine.step()
