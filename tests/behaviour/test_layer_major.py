"""Layer-major micro-batches: the numbers of the ordinary order, and the traffic of one micro-batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests.behaviour.reference import (
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    batches,
    least_memory,
    tiny_gpt2,
    tiny_llama,
    train,
    train_plainly,
)
from tests.behaviour.test_traffic import deep_llama

MICRO_BATCHES = 4


def layer_major(recipe: Recipe, placement: Placement) -> dict[str, Any]:
    config = recipe.config(placement)
    config["tiering"]["accumulation"] = "layer"
    return config


def inputs(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in batches(count)]


def train_layer_major(model: nn.Module, recipe: Recipe, placement: Placement) -> Result:
    data = iter(inputs(recipe.steps * recipe.accumulation))
    with infinity.initialize(model=model, config=layer_major(recipe, placement))[0] as engine:
        losses = [engine.train_batch(data).item() for _ in range(recipe.steps)]
        return Result(losses, dict(engine.named_parameters()))


def mean_losses(result: Result, accumulation: int) -> list[float]:
    return torch.tensor(result.losses).view(-1, accumulation).mean(1).tolist()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["unclipped", "clipped"])
def test_the_numbers_are_those_of_the_ordinary_order(precision, clipping, tmp_path) -> None:
    """Bit for bit: a parameter that one block uses gets its gradients in the same order."""
    recipe = Recipe(precision, MICRO_BATCHES, clipping, steps=5)
    ordinary = train(tiny_llama(), recipe, Placement())
    ordinary.losses[:] = mean_losses(ordinary, MICRO_BATCHES)
    assert_same_bits(train_layer_major(tiny_llama(), recipe, Placement()), ordinary)
    assert_same_bits(train_layer_major(tiny_llama(), recipe, Placement("nvme", "nvme", tmp_path, "64KiB")), ordinary)


def test_tied_embeddings_follow_plain_torch(tmp_path) -> None:
    """Their gradients of the head come before all of the embedding, so they are summed in another order."""
    recipe = Recipe("fp32", MICRO_BATCHES, steps=5)
    plain = train_plainly(tiny_gpt2(), recipe)
    placed = train_layer_major(tiny_gpt2(), recipe, Placement("nvme", "nvme", tmp_path, "64KiB"))
    assert placed.losses == pytest.approx(mean_losses(plain, MICRO_BATCHES), rel=1e-5)
    for name, values in plain.weights.items():
        torch.testing.assert_close(placed.weights[name], values, rtol=1e-4, atol=1e-5)
    assert_same_bits(train_layer_major(tiny_gpt2(), recipe, Placement()), placed)


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["backward", "deferred"])
def test_traffic_is_that_of_one_micro_batch(clipping, tmp_path) -> None:
    def step_bytes(micro_batches: int) -> int:
        recipe = Recipe("fp32", micro_batches, clipping)  # gradients as large in both
        config = layer_major(recipe, Placement("nvme", "nvme", tmp_path, "512KiB"))
        config["tiering"]["host_memory"] = least_memory(deep_llama(8), config)
        with infinity.initialize(model=deep_llama(8), config=config)[0] as engine:
            ids = torch.randint(0, 64, (1, 8))
            for _ in range(3):
                engine.train_batch([{"input_ids": ids, "labels": ids}] * micro_batches)
            moved = engine.stats().tier_bytes
        return moved["nvme_read"] + moved["nvme_write"]

    assert step_bytes(8) < 1.1 * step_bytes(1)


def test_a_checkpointed_block_is_recomputed_with_its_random_numbers(tmp_path) -> None:
    def build(*, checkpointed: bool, seed: int = 3) -> nn.Module:
        model = tiny_llama()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(seed)
        return model.train()

    recipe = Recipe("fp32", MICRO_BATCHES, steps=3)
    placement = Placement("nvme", "nvme", tmp_path, "64KiB")
    stored = train_layer_major(build(checkpointed=False), recipe, Placement())
    recomputed = train_layer_major(build(checkpointed=True), recipe, placement)
    assert_same_bits(recomputed, stored)
    assert train_layer_major(build(checkpointed=True, seed=4), recipe, placement).losses != stored.losses


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
@pytest.mark.parametrize("schedule", ["deferred", "backward"])
def test_after_an_exception_the_step_can_be_done_again(where, schedule, tmp_path) -> None:
    """In the third micro-batch: others have gone ahead, and others wait."""
    recipe = Recipe("bf16", MICRO_BATCHES, steps=3)
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", schedule=schedule)
    undisturbed = train_layer_major(tiny_llama(), recipe, placement)

    class InterruptError(Exception):
        pass

    def interrupt(*_: Any) -> None:
        calls.append(where)
        if armed and len(calls) == 3:
            raise InterruptError

    def loss_fn(outputs: Any, batch: Any) -> torch.Tensor:
        loss = outputs.loss
        if where == "backward":
            loss.register_hook(interrupt)
        elif where == "loss":
            interrupt()
        return loss

    calls: list[str] = []
    data = inputs(recipe.steps * MICRO_BATCHES)
    with infinity.initialize(model=tiny_llama(), config=layer_major(recipe, placement))[0] as engine:
        if where == "forward":
            engine.module.model.layers[1].register_forward_hook(interrupt)
        losses = []
        for step in range(recipe.steps):
            batch = data[step * MICRO_BATCHES :][:MICRO_BATCHES]
            calls.clear()
            armed = step == 1
            if armed:
                with pytest.raises(InterruptError):
                    engine.train_batch(batch, loss_fn)
                armed = False
            losses.append(engine.train_batch(batch, loss_fn).item())
        assert engine.global_steps == recipe.steps
        assert_same_bits(Result(losses, dict(engine.named_parameters())), undisturbed)
    assert not [thread for thread in threading.enumerate() if thread.name == "infinity-coroutine"]


class Residual(nn.Module):
    """Blocks, and something that goes around the second of them."""

    def __init__(self, skip: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[0](x))
        return self.blocks[2](self.blocks[1](x) + self.skip(x)).square().mean()


def layer_major_engine(model: nn.Module, **tiering: Any) -> infinity.Engine:
    config = {
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tiering": {"accumulation": "layer", **tiering},
    }
    return infinity.initialize(model=model, config=config)[0]


def test_a_tensor_that_goes_around_a_block_is_refused() -> None:
    data = list(torch.randn(2, 4, 8))
    with layer_major_engine(Residual(lambda x: x.detach())) as engine:
        engine.train_batch(data)
    with layer_major_engine(Residual(lambda x: x)) as engine:
        before = dict(engine.named_parameters())
        with pytest.raises(infinity.InfinityError, match=r"a tensor goes past the entry of block `blocks.1`"):
            engine.train_batch(data)
        assert all(torch.equal(values, before[name]) for name, values in engine.named_parameters())


def test_reentrant_checkpointing_is_refused() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x.square().mean()

    with (
        layer_major_engine(Checkpointed()) as engine,
        pytest.raises(infinity.InfinityError, match=r"block `blocks.0` is called without gradients"),
    ):
        engine.train_batch(list(torch.randn(2, 4, 8, requires_grad=True)))


def test_what_is_no_sequence_of_blocks_is_refused() -> None:
    with pytest.raises(infinity.ConfigError, match=r"the model \(Linear\) is no sequence of blocks"):
        layer_major_engine(nn.Linear(4, 4))


def test_misuse_is_told() -> None:
    with layer_major_engine(tiny_gpt2()) as engine:
        ids = batches(1)[0]
        with pytest.raises(infinity.InfinityError, match="given 1 micro-batches but gradient_accumulation_steps is 2"):
            engine.train_batch(inputs(1))
        with pytest.raises(infinity.InfinityError, match=r"engine.train_batch\(micro_batches\)"):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
        with pytest.raises(infinity.InfinityError, match="the model's output is not one: give loss_fn"):
            engine.train_batch([ids, ids])
        engine.train_batch(inputs(2))


def test_evaluation_between_steps_changes_nothing(tmp_path) -> None:
    recipe = Recipe("bf16", MICRO_BATCHES, clipping=1.0, steps=3)
    placement = Placement("nvme", "nvme", tmp_path, "64KiB")
    undisturbed = train_layer_major(tiny_gpt2(), recipe, placement)
    data = iter(inputs(recipe.steps * MICRO_BATCHES))
    with infinity.initialize(model=tiny_gpt2(), config=layer_major(recipe, placement))[0] as engine:
        losses = []
        for _ in range(recipe.steps):
            losses.append(engine.train_batch(data).item())
            with torch.no_grad():
                engine(input_ids=batches(1)[0])
        assert_same_bits(Result(losses, dict(engine.named_parameters())), undisturbed)


def test_tensors_are_created_on_the_callers_default_device() -> None:
    class Creating(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            devices.append(torch.empty(0).device.type)
            return super().forward(x)

    devices: list[str] = []
    data = list(torch.randn(2, 4, 8))
    with layer_major_engine(Creating(lambda x: x.detach())) as engine, torch.device("meta"):
        engine.train_batch(data)
    assert devices == ["meta", "meta"]


def test_micro_batches_may_leave_blocks_out() -> None:
    """Those that have come less far wait for nobody, and none is lost."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
            for index in used:
                x = torch.tanh(self.blocks[index](x))
            return x.square().mean()

    torch.manual_seed(0)
    model = Skipping()
    data = [(torch.randn(4, 8), used) for used in [(0, 1, 2, 3), (1, 3), (), (0, 0, 2)]]
    data[2] = (torch.randn(4, 8), (3,))
    expected = copy.deepcopy(model)
    torch.stack([expected(*batch) for batch in data]).mean().backward()
    config = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "tiering": {"accumulation": "layer"},
    }
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.train_batch(data)
        for name, values in engine.named_parameters():
            before = expected.get_parameter(name)
            torch.testing.assert_close(values, before - before.grad)
