"""What training loops do beside forward, backward and step: each keeps the numbers of the in-memory placement."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.behaviour.reference import (
    ARCHITECTURES,
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    batches,
    least_memory,
    loss_of,
    tiny_gpt2,
    tiny_llama,
    train,
    train_on,
    train_plainly,
)

RECIPE = Recipe("bf16", steps=6)


def nvme(path: Path) -> Placement:
    return Placement("nvme", "nvme", path)


@pytest.fixture
def tight(tmp_path: Path) -> Placement:
    """The least memory that works, so that every unit really leaves between its uses."""
    least = least_memory(tiny_llama(), RECIPE.config(Placement("nvme", "nvme", tmp_path, "64KiB")))
    return Placement("nvme", "nvme", tmp_path, "64KiB", least + 60_000)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(architecture, use_reentrant, tight) -> None:
    def build() -> nn.Module:
        model = ARCHITECTURES[architecture]()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    placed = train(build(), RECIPE, tight)
    assert_same_bits(placed, train(build(), RECIPE, Placement()))
    plain = train(ARCHITECTURES[architecture](), RECIPE, Placement())
    assert placed.losses == pytest.approx(plain.losses, rel=1e-3)


def test_evaluation_between_steps_changes_nothing_and_sees_the_new_weights(tight) -> None:
    held_out = batches(1, seed=7)[0]

    def run(placement: Placement, *, evaluate: bool) -> tuple[list[float], list[float]]:
        trained, evaluated = [], []
        with infinity.initialize(model=tiny_gpt2(), config=RECIPE.config(placement))[0] as engine:
            for ids in batches(RECIPE.steps):
                trained += train_on(engine, [ids])
                if evaluate:
                    engine.eval()
                    with torch.no_grad():
                        evaluated.append(loss_of(engine, held_out).item())
                    engine.train()
        return trained, evaluated

    undisturbed, _ = run(tight, evaluate=False)
    disturbed, evaluated = run(tight, evaluate=True)
    assert disturbed == undisturbed
    assert evaluated == run(Placement(), evaluate=True)[1]
    assert len(set(evaluated)) == len(evaluated), "evaluation saw the same weights twice"


@pytest.mark.parametrize("placement", ["none", "tight"])
def test_frozen_parameters_keep_their_values_and_have_no_states(placement, tight) -> None:
    def build() -> nn.Module:
        model = tiny_llama()
        for name, param in model.named_parameters():
            if "mlp" in name or "embed" in name:
                param.requires_grad_(False)
        return model

    where = tight if placement == "tight" else Placement()
    before = {name: p.detach().bfloat16() for name, p in build().named_parameters() if not p.requires_grad}
    ours = train(build(), RECIPE, where)
    for name, value in before.items():
        assert torch.equal(ours.weights[name], value), name
    plain = train_plainly(build(), RECIPE)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-3)


def test_tied_embeddings_are_one_parameter(tight) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=RECIPE.config(tight))[0] as engine:
        names = dict(engine.named_parameters())
        assert "transformer.wte.weight" in names
        assert "lm_head.weight" not in names
        assert engine.module.lm_head.weight is engine.module.transformer.wte.weight


class _Branches(nn.Module):
    """Takes a different branch every other step, uses one block twice, and leaves one parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.head = nn.Linear(48, 48)
        self.unused = nn.Linear(48, 48)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        order = (0, 1, 2, 0) if self.calls % 2 else (3, 2, 3)
        for index in order:
            x = x + torch.tanh(self.blocks[index](x))
        return self.head(x).square().mean()


def _train_branches(config: dict | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = _Branches()
    data = torch.randn(8, 4, 48, generator=torch.Generator().manual_seed(3))
    losses = []
    if config is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        for x in data:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {n: p.detach().clone() for n, p in model.named_parameters()}
    with infinity.initialize(model=model, config=config)[0] as engine:
        for x in data:
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, dict(engine.named_parameters())


@pytest.mark.parametrize("clipping", [0.0, 1e9])
def test_dynamic_paths_and_parameters_without_a_gradient(clipping, tmp_path) -> None:
    """A parameter that has no part in a step is skipped as torch skips it: no decay, no step count."""
    recipe = Recipe("fp32", clipping=clipping)
    plain_losses, plain = _train_branches(None)
    for placement in (Placement(), Placement("nvme", "nvme", tmp_path)):
        config = recipe.config(placement)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        losses, weights = _train_branches(config)
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        for name, value in plain.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_parameter_groups_keep_their_own_hyper_parameters(tight) -> None:
    def groups(model: nn.Module) -> list[dict]:
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return [
            {"params": decay, "lr": 2e-3, "weight_decay": 0.3},
            {"params": rest, "lr": 5e-4, "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]

    recipe = Recipe("fp32", steps=6)
    plain = tiny_gpt2()
    optimizer = torch.optim.AdamW(groups(plain), lr=1e-3)
    expected = []
    for ids in batches(recipe.steps):
        loss = loss_of(plain, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    model = tiny_gpt2()
    placement = Placement("nvme", "nvme", tight.path)
    engine, *_ = infinity.initialize(model=model, model_parameters=groups(model), config=recipe.config(placement))
    with engine:
        losses = train_on(engine, batches(recipe.steps))
    assert losses == pytest.approx(expected, rel=1e-5)


def _fail_in_forward(engine: infinity.Engine, ids: torch.Tensor) -> None:
    handle = engine.module.transformer.h[1].mlp.register_forward_hook(_raise)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(engine, ids)
    handle.remove()


def _fail_before_the_first_update(engine: infinity.Engine, ids: torch.Tensor) -> None:
    loss = loss_of(engine, ids)
    loss.register_hook(_raise)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.backward(loss)


@pytest.mark.parametrize("fail", [_fail_in_forward, _fail_before_the_first_update])
def test_an_exception_before_anything_is_updated_leaves_the_engine_usable(fail, tight) -> None:
    """Also without clipping, where units are updated as backward goes."""
    with infinity.initialize(model=tiny_gpt2(), config=RECIPE.config(tight))[0] as engine:
        losses = []
        for step, ids in enumerate(batches(RECIPE.steps)):
            if step == 3:
                fail(engine, ids)
            losses += train_on(engine, [ids])
        ours = Result(losses, dict(engine.named_parameters()))
    assert_same_bits(ours, train(tiny_gpt2(), RECIPE, Placement()))


def test_an_exception_in_backward_drops_the_step_and_leaves_the_engine_usable(tight) -> None:
    """With clipping nothing is updated before the whole backward pass has succeeded."""
    recipe = Recipe("bf16", accumulation=2, clipping=0.5, steps=4)
    model = tiny_gpt2()
    data = batches(recipe.steps * recipe.accumulation)
    with infinity.initialize(model=model, config=recipe.config(nvme(tight.path)))[0] as engine:
        losses = []
        for index, ids in enumerate(data):
            loss = loss_of(engine, ids)
            if index == 5:  # the second micro-batch of the third step
                handle = model.transformer.h[1].mlp.register_full_backward_hook(_raise)
                again = loss_of(engine, ids)
                with pytest.raises(RuntimeError, match="on purpose"):
                    engine.backward(again)
                handle.remove()
                assert engine.micro_steps == 4
                first = loss_of(engine, data[4])
                engine.backward(first)
                engine.step()
                loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        ours = Result(losses, dict(engine.named_parameters()))
    assert_same_bits(ours, train(tiny_gpt2(), recipe, Placement()))


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def _not_a_number(module: nn.Module, grads: tuple[torch.Tensor | None, ...], _: object) -> tuple[Any, ...]:
    return tuple(None if grad is None else grad * float("nan") for grad in grads)


@pytest.mark.parametrize(
    ("hook", "error", "told"),
    [
        (_interrupt, KeyboardInterrupt, "KeyboardInterrupt"),
        (_not_a_number, infinity.NonFiniteError, "NonFiniteError: a gradient of unit `transformer.h.0`"),
    ],
)
def test_an_exception_among_the_updates_of_a_step_stops_the_engine(hook, error, told, tight) -> None:
    """The last blocks are updated by then and the first are not: to do the step again would update them twice."""
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=RECIPE.config(tight))[0] as engine:
        model.transformer.h[1].register_full_backward_hook(hook)
        loss = loss_of(engine, batches(1)[0])
        with pytest.raises(error):
            engine.backward(loss)
        for use in (
            lambda: loss_of(engine, batches(1)[0]),
            engine.step,
            engine.synchronize,
            lambda: next(engine.named_parameters()),
            lambda: engine.save_checkpoint(tight.path / "saved"),
        ):
            with pytest.raises(infinity.InfinityError, match=rf"has stopped after an error \({told}.* resume"):
                use()


def test_generate_between_steps_changes_nothing(tight) -> None:
    """Many forward passes outside of `engine(...)`, in another order of units each time."""

    def run(placement: Placement, *, generate: bool) -> tuple[list[float], list[list[int]]]:
        losses, texts = [], []
        with infinity.initialize(model=tiny_llama(), config=RECIPE.config(placement))[0] as engine:
            for ids in batches(RECIPE.steps):
                losses += train_on(engine, [ids])
                if generate:
                    with torch.no_grad():
                        made = engine.module.generate(ids[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
                    texts.append(made[0].tolist())
        return losses, texts

    losses, texts = run(tight, generate=True)
    assert losses == run(Placement(), generate=False)[0]
    assert texts == run(Placement(), generate=True)[1]


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["backward", "deferred"])
def test_gradients_of_inputs_within_the_last_micro_batch_change_nothing(clipping, tight) -> None:
    """`torch.autograd.grad` goes backward through the units, and the step's last backward pass is still to come."""
    recipe = Recipe("bf16", accumulation=2, clipping=clipping, steps=3)
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=recipe.config(nvme(tight.path)))[0] as engine:
        losses = []
        for ids in batches(recipe.steps * recipe.accumulation):
            hidden: list[torch.Tensor] = []
            handle = model.transformer.h[0].register_forward_pre_hook(lambda _, args, to=hidden: to.append(args[0]))
            loss = loss_of(engine, ids)
            handle.remove()
            (grad,) = torch.autograd.grad(loss, hidden, retain_graph=True)
            assert grad.isfinite().all()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        ours = Result(losses, dict(engine.named_parameters()))
    assert_same_bits(ours, train(tiny_gpt2(), recipe, Placement()))


def _raise(*args: object) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_nan_loss_changes_nothing(clipping, tight) -> None:
    """Without clipping it is refused before anything moves; with clipping the step is skipped and counted."""
    recipe = Recipe("bf16", clipping=clipping, steps=6)
    placement = Placement("nvme", "nvme", tight.path)
    with infinity.initialize(model=tiny_gpt2(), config=recipe.config(placement))[0] as engine:
        before = dict(engine.named_parameters())
        loss = loss_of(engine, batches(1)[0]) * float("nan")
        if clipping:
            engine.backward(loss)
            engine.step()
            assert engine.skipped_steps == 1
            assert engine.stats().skipped
        else:
            with pytest.raises(infinity.NonFiniteError, match="loss of step 0"):
                engine.backward(loss)
        for name, value in engine.named_parameters():
            assert torch.equal(value, before[name]), name
        loss = loss_of(engine, batches(1)[0])
        engine.backward(loss)
        engine.step()
        assert any(not torch.equal(value, before[name]) for name, value in engine.named_parameters())


def test_parameters_read_outside_of_their_use_are_nan_of_the_right_shape(tight) -> None:
    model = tiny_gpt2()
    shapes = {name: p.shape for name, p in copy.deepcopy(model).named_parameters()}
    with infinity.initialize(model=model, config=RECIPE.config(tight))[0] as engine:
        loss = loss_of(engine, batches(1)[0])
        engine.backward(loss)
        engine.step()
        engine.synchronize()
        away = [p for p in model.parameters() if p.isnan().all()]
        assert away
        assert {name: p.shape for name, p in model.named_parameters()} == shapes


def test_hooks_are_gone_after_close(tight) -> None:
    model = tiny_gpt2()
    engine, *_ = infinity.initialize(model=model, config=RECIPE.config(tight))
    engine.close()
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for param in model.parameters():
        assert not param._post_accumulate_grad_hooks
