"""What models do that a chain of blocks does not: each trains as in plain PyTorch while its units come and go."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.zero.foresight import Foresight
from tests.behaviour.reference import batches as texts
from tests.behaviour.reference import least_memory, tiny_llama
from tests.behaviour.reference import loss_of as language_loss

WIDTH, ROWS, STEPS = 32, 6, 4
ADAM = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4}  # less would magnify gradients that are only rounding
Step = Callable[[Any, torch.Tensor], torch.Tensor]  # (model, batch) -> loss


def config(path: Path, host_memory: int | str = "auto", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {"nvme": [{"path": str(path)}], "host_memory": host_memory, "tile_size": "16KiB"},
    } | more


def tightest(model: nn.Module, path: Path, **more: Any) -> dict[str, Any]:
    """The configuration with the least memory in which this model trains."""
    least = least_memory(copy.deepcopy(model), config(path, **more))
    return config(path, least + getattr(model, "more_memory", 0), **more)


def batches(seed: int = 3) -> list[torch.Tensor]:
    return list(torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def assert_trains_as_plainly(
    build: Callable[[], nn.Module],
    path: Path,
    step: Step = loss_of,
    settings: dict[str, Any] | None = None,
    *,
    stays: bool = False,
) -> None:
    """Losses, weights, buffers and gradients of the inputs, step by step, with the least memory (unless it `stays`)."""
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.is_floating_point()], **ADAM)
    engine, *_ = infinity.initialize(model=model, config=settings or tightest(model, path))
    with engine:
        for index, batch in enumerate(batches()):
            theirs, ours = batch.clone().requires_grad_(), batch.clone().requires_grad_()
            torch.manual_seed(index)
            expected = step(plain, theirs)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.manual_seed(index)
            loss = step(engine, ours)
            engine.backward(loss)
            engine.step()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, msg=f"loss of step {index}")
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        assert stays or engine.stats().tier_bytes["nvme_read"] > 0
        weights = dict(engine.named_parameters())
    for name, param in plain.named_parameters():
        if name in weights:
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-4, msg=name)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)


def train_both(
    plain: nn.Module, optimizer: torch.optim.Optimizer, engine: infinity.Engine, batch: torch.Tensor
) -> None:
    """One step of each, with the same loss."""
    expected = loss_of(plain, batch)
    expected.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(engine, batch)
    engine.backward(loss)
    engine.step()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks one after the other; most models here change one thing of it."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# Weights of other modules #


class TiedByHand(Chain):
    """The head reads the stem's weight; nothing is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x)) @ self.stem.weight.t()


class BlocksReadEachOther(Chain):
    """Every block mixes in a product with the first block's weight, held in a list that torch does not see."""

    class Reading(Block):
        def __init__(self) -> None:
            super().__init__()
            self.other: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            for weight in self.other:
                x = x + F.linear(F.linear(x, weight), weight.T)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Reading() for _ in range(5))
        for block in self.blocks[1:]:
            block.other.append(self.blocks[0].up.weight)

    def __deepcopy__(self, memo: Any) -> BlocksReadEachOther:
        copied = BlocksReadEachOther()
        copied.load_state_dict(self.state_dict())
        return copied


class ReadsDetached(Chain):
    """Early blocks read values of a later block that pass no gradient on; backward needs them after its gradient."""

    more_memory = 100_000  # for its gradients, which wait for the end of backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[3].up.weight
        alias = weight.detach()
        for block in self.blocks:
            x = block(x)
            x = x + F.linear(torch.tanh(F.linear(x, alias)), weight.data.t())
        return x


class RepeatsReads(Chain):
    """Checkpoints read values of a later block under `no_grad`, and again when backward repeats them."""

    more_memory = 100_000  # for the gradients of that block, which wait for the end of backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = self.blocks[3].up.weight.mean() + torch.tanh(self.blocks[3](x)).std()
            return torch.as_tensor(torch.tanh(block(x)) * (1 + scale))

        for block in self.blocks:
            x = checkpoint(body, block, x, use_reentrant=False)
        return x


class ReturnsDetached(Chain):
    """A module returns its parameter's values without a gradient, and is not in use when they are read."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self) -> torch.Tensor:
            return self.weight.detach()

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.Positions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.positions()
        return super().forward(x) * positions


# Uses that no output shows #


class AttentionOfTorch(Chain):
    """`nn.MultiheadAttention` never calls its output projection as a module."""

    def __init__(self) -> None:
        super().__init__()
        # without biases: that of the keys has no gradient but rounding, which Adam would magnify
        self.attention = nn.MultiheadAttention(WIDTH, 4, bias=False, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        return super().forward(self.attention(x, x, x, need_weights=False)[0][0])


class HiddenOutputs(Chain):
    """Each block also leaves a loss in an attribute, made from a detached input, and returns an object."""

    @dataclass
    class Output:
        hidden: torch.Tensor

    class Hiding(Block):
        def forward(self, x: torch.Tensor) -> Any:
            self.loss = self.down(self.up(x.detach())).square().mean()
            out = HiddenOutputs.Output(super().forward(x))
            return type("Opaque", (), {"output": out})()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Hiding() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).output.hidden
        return x + sum(block.loss for block in self.blocks)


class InPlace(Chain):
    """Blocks change their input in place, as `nn.ReLU(inplace=True)` does."""

    class Changing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.relu(x.mul_(1.5), inplace=True))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Changing() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1.0)


class ViewsInPlace(Chain):
    """A block returns a view, as a linear layer with three dimensions did before torch 2.15; it is changed outside."""

    class Linear(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x))).unsqueeze(0)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Linear() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(x)
            assert hidden._base is not None
            hidden += x
            hidden[..., 0] *= 2
            x = hidden[0]
        return x


# Tensors that several blocks have #


class SharedInput(Chain):
    """Later blocks also read what the first one has made, as a decoder's layers read the encoder's output."""

    class Reading(Block):
        def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            return super().forward(x + source)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Reading() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source = self.stem(x)
        for block in self.blocks:
            x = block(x, source)
        return x


class HandedOn(Chain):
    """The first block makes a tensor that all others use, and return as it is, as T5's position bias."""

    class Handing(Block):
        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            if bias is None:
                bias = self.up(x).sigmoid()[:, :WIDTH]
            return super().forward(x * bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Handing() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


# Paths #


class Repeated(Chain):
    """Blocks are called more than once, in another order the second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 2, 3, 1, 0, 0):
            x = self.blocks[index](x)
        return x


class Experts(nn.Module):
    """A layer that sends each row to its best expert; experts without rows have no gradient in that step."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1)
        self.loss = share.mean(0).square().sum()
        weight, choice = share.max(-1)
        out = torch.zeros_like(x)
        for index in choice.unique().tolist():
            rows = choice == index
            out[rows] = weight[rows, None] * self.experts[index](x[rows])
        return x + out


class MixtureOfExperts(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-2 * sum(block.loss for block in self.blocks)


class SingleExperts(Chain):
    """The same outside of a block: every expert is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.mixture(x)) + self.mixture.loss


class Checkpointed(Chain):
    """Checkpointing inside of checkpointing."""

    use_reentrant = False

    def _half(self, half: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[2 * half : 2 * half + 2]:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in range(2):
            x = checkpoint(self._half, half, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class RepeatedReentrant(Repeated):
    """Each checkpoint is a backward pass of its own, so a block's gradients come in several parts."""

    more_memory = 100_000  # for gradients that wait for their other parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 2, 3, 1, 0, 0):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return x


class SelfConditioned(Chain):
    """All blocks are called without gradients first, and nothing repeats those calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            condition = super().forward(x)
        return super().forward(x + condition)


# Other than plain float parameters #


class Buffers(Chain):
    """Batch norm's statistics, and parameters and buffers that are no floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3)
        self.register_buffer("phase", torch.polar(torch.ones(WIDTH), torch.rand(WIDTH)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(x[:, self.order] * self.mask)
        return super().forward((x * self.phase).abs())


class InputsOfHooks(Chain):
    """Hooks before forward make its inputs of parameters, and change them in place."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.shift = nn.Parameter(torch.randn(WIDTH))
            block.register_forward_pre_hook(self.shifted)
            block.register_forward_hook(lambda module, _, output: output + module.up.bias.sum())

    @staticmethod
    def shifted(block: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.sin(inputs[0] * 1.0).mul_(block.shift)


class LaterHooks(Chain):
    """Hooks that are registered after `initialize` read the parameters of their module, to log or to change outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.scaled not in block._forward_hooks.values():
                block.register_forward_pre_hook(lambda block, inputs: inputs[0] + block.down.bias)
                block.register_forward_hook(self.scaled)
        return super().forward(x)

    @staticmethod
    def scaled(block: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output / (1 + block.up.weight.norm())


class Autocast(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


MODELS = [
    TiedByHand,
    BlocksReadEachOther,
    ReadsDetached,
    RepeatsReads,
    ReturnsDetached,
    AttentionOfTorch,
    HiddenOutputs,
    InPlace,
    ViewsInPlace,
    SharedInput,
    HandedOn,
    Repeated,
    MixtureOfExperts,
    SingleExperts,
    Checkpointed,
    CheckpointedReentrant,
    RepeatedReentrant,
    SelfConditioned,
    Buffers,
    InputsOfHooks,
    LaterHooks,
    Autocast,
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of nested reentrant checkpoints
@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("clipping", [0.0, 1e9], ids=["backward", "deferred"])
def test_model_trains_as_in_plain_torch(build, clipping, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert_trains_as_plainly(build, tmp_path, settings=tightest(build(), tmp_path, gradient_clipping=clipping))


def test_a_loop_may_change_the_output_in_place_before_its_own_backward(tmp_path: Path) -> None:
    """The output is a view, and autograd gives it another history."""

    class Viewing(ViewsInPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(super().forward(x).unsqueeze(0), self.blocks[0].up.weight)

    torch.manual_seed(0)
    plain = Viewing()
    engine, *_ = infinity.initialize(model=copy.deepcopy(plain), config=tightest(plain, tmp_path))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    with engine:
        for batch in batches():
            losses = []
            for model in (plain, engine):
                out = model(batch)
                out *= 0.5
                losses.append(out.square().mean())
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


class PenaltyInForward(Chain):
    """The root, which has no parameters of its own, reads all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + 1e-2 * sum(p.square().sum() for p in self.parameters())


def test_a_module_that_reads_all_weights_needs_room_for_them(tmp_path: Path) -> None:
    """What a module has read of others it holds until its call is over."""
    settings = tightest(PenaltyInForward(), tmp_path)
    engine, *_ = infinity.initialize(model=PenaltyInForward(), config=settings)
    with engine, pytest.raises(infinity.CapacityError, match=r"blocks.0, blocks.1.* are in use together") as refused:
        engine(batches()[0])
    told = re.search(r"raise tiering.host_memory by (\d+) bytes", str(refused.value))
    assert told is not None, refused.value
    named = re.search(r"unit `(\S+)` needs \S+ \S+ but (.*) are in use", str(refused.value))
    assert named is not None, refused.value
    assert named.group(1) not in named.group(2).split(", ")
    settings["tiering"]["host_memory"] += int(told.group(1))
    engine, *_ = infinity.initialize(model=PenaltyInForward(), config=settings)
    with engine:
        engine(batches()[0])
    assert_trains_as_plainly(PenaltyInForward, tmp_path, settings=config(tmp_path, "1MiB"), stays=True)


class SiameseReentrant(Chain):
    """Two passes through all blocks, so that all of them wait for the second part of their gradients."""

    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x, x.flip(0)
        for block in self.blocks:
            first = checkpoint(block, first, use_reentrant=True)
        for block in self.blocks:
            second = checkpoint(block, second, use_reentrant=True)
        return first * second


def test_gradients_that_wait_for_one_another_get_room_as_the_refusal_says(tmp_path: Path) -> None:
    """More memory would not help: the schedule has room for a few units."""
    settings = config(tmp_path, "1GiB")
    engine, *_ = infinity.initialize(model=SiameseReentrant(), config=settings)
    with engine, pytest.raises(infinity.CapacityError, match=r"Set tiering.update_schedule to deferred") as refused:
        engine.backward(loss_of(engine, batches()[0].requires_grad_()))
    assert "host_memory" not in str(refused.value)
    settings["tiering"]["update_schedule"] = "deferred"
    assert_trains_as_plainly(SiameseReentrant, tmp_path, settings=settings, stays=True)


class PassesInHook(Chain):
    """A hook runs backward passes of its own within the outer one, which the forward pass does not show.

    Attributes:
        outer: the outer pass goes through the blocks, too, before the hook is called.
    """

    def __init__(self, *, outer: bool = False) -> None:
        super().__init__()
        self.outer = outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = super().forward

        @torch.enable_grad()
        def hook(grad: torch.Tensor) -> None:
            for rows in x.detach().split(2):
                half(rows).square().mean().backward()

        x = x * 1.0
        x.register_hook(hook)
        return half(x) if self.outer else x


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("schedule", ["backward", "speculative", "deferred"])
def test_backward_passes_within_a_hook_count_or_are_refused(schedule, outer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Foresight, "speculates", schedule == "speculative")
    settings = config(tmp_path, "1MiB", gradient_clipping=0 if schedule == "backward" else 1e9)
    settings["tiering"] |= {"update_schedule": schedule, "timeline": str(tmp_path / "timeline.json")}
    if schedule == "deferred" or not outer:
        assert_trains_as_plainly(lambda: PassesInHook(outer=outer), tmp_path, settings=settings, stays=True)
        return
    engine, *_ = infinity.initialize(model=PassesInHook(outer=True), config=settings)
    with engine:
        with pytest.raises(infinity.InfinityError, match=r"tiering.update_schedule to \"?deferred"):
            engine.backward(loss_of(engine, batches()[0].requires_grad_()))
        with pytest.raises(infinity.InfinityError, match=r"stopped after an error|backward pass that failed"):
            engine.step()


@pytest.mark.parametrize("model", [ReadsDetached, RepeatsReads])
@pytest.mark.parametrize("schedule", ["backward", "speculative"])
def test_values_without_a_gradient_stay_until_backward_has_read_them(model, schedule, tmp_path, monkeypatch) -> None:
    """In memory, too, where an update under backward would change them."""
    monkeypatch.setattr(Foresight, "speculates", schedule == "speculative")
    settings = config(tmp_path) | {"zero_optimization": {"stage": 0}, "tiering": {"update_schedule": schedule}}
    assert_trains_as_plainly(model, tmp_path, settings=settings, stays=True)


class Factors(Chain):
    """Autograd saves the parameters themselves, and no views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(WIDTH))
        self.second = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.first * self.second)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_backward_pass_finds_the_values_of_rolled_back_updates(stage, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Foresight, "speculates", True)
    settings = config(tmp_path) | {
        "zero_optimization": {"stage": stage},
        "tiering": {"update_schedule": "speculative"},
    }

    def two_passes(model: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = loss_of(model, x), loss_of(model, x * 2)
        (model.backward if isinstance(model, infinity.Engine) else torch.Tensor.backward)(first)
        return second

    assert_trains_as_plainly(Factors, tmp_path, two_passes, settings=settings, stays=True)


# Other loops #


def _several_forwards(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Three calls, then one backward, as in contrastive learning."""
    first, second = model(x), model(x.flip(0))
    return (first * second).mean() + model(first).square().mean()


def _with_evaluation_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A look without gradients, between a forward pass and its backward."""
    out = model(x)
    with torch.no_grad():
        target = model(x * 2)
    return (out - target).square().mean()


@pytest.mark.parametrize("step", [_several_forwards, _with_evaluation_between])
@pytest.mark.parametrize("build", [Chain, Checkpointed, MixtureOfExperts])
def test_several_forwards_for_one_backward(build, step, tmp_path: Path) -> None:
    assert_trains_as_plainly(build, tmp_path, step)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("build", [Chain, Buffers, TiedByHand])
def test_evaluation_sees_the_new_weights_and_leaves_no_trace(build, context, tmp_path: Path) -> None:
    """Also before the first step, when everything is in memory for the first time."""

    def evaluated(model: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        module.eval()
        with context():
            out = model(x)
        module.train()
        return out.clone()

    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAM)
    engine, *_ = infinity.initialize(model=model, config=tightest(model, tmp_path))
    with engine:
        for batch in batches():
            torch.testing.assert_close(evaluated(engine, batch, model), evaluated(plain, batch, plain))
            train_both(plain, optimizer, engine, batch)
        torch.testing.assert_close(evaluated(engine.module, batch, model), evaluated(plain, batch, plain))


class Failing(Chain):
    """Raises where it is told to."""

    class Point(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, model: Failing, x: torch.Tensor) -> torch.Tensor:
            ctx.model = model
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
            if ctx.model.fails == "backward":
                raise RuntimeError("on purpose")
            return None, grad

    class Inner(Block):
        model: list[Failing]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = Failing.Point.apply(self.model[0], torch.tanh(self.up(x)))
            fails = self.model[0].fails
            if fails == "forward" or (fails == "recompute" and self.calls % 2):
                raise RuntimeError("on purpose")
            if fails == "interrupt":
                raise KeyboardInterrupt
            self.calls += 1
            return x + self.down(hidden)

    fails = ""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.Inner()
        self.blocks[2].calls = 0
        self.blocks[2].model = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails != "recompute":
            return super().forward(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("where", ["forward", "backward", "recompute", "interrupt"])
@pytest.mark.parametrize("clipping", [0.0, 1e9], ids=["backward", "deferred"])
def test_after_an_exception_training_goes_on_as_if_the_step_had_not_been(where, clipping, tmp_path: Path) -> None:
    """Under the `backward` schedule a failed backward pass leaves updates behind: from there nothing goes on."""
    torch.manual_seed(0)
    plain, model = Failing(), Failing()
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, *_ = infinity.initialize(model=model, config=tightest(model, tmp_path, gradient_clipping=clipping))
    with engine:
        for index, batch in enumerate(batches()):
            if index in (0, 2):
                model.fails = where
                kind = KeyboardInterrupt if where == "interrupt" else RuntimeError
                with pytest.raises(kind):
                    engine.backward(loss_of(engine, batch.clone().requires_grad_()))
                model.fails = ""
                model.blocks[2].calls = 0
                if clipping == 0 and where in ("backward", "recompute"):
                    with pytest.raises(infinity.InfinityError, match=r"has stopped after an error \(RuntimeError"):
                        engine(batch)
                    return
            train_both(plain, optimizer, engine, batch)
        weights = dict(engine.named_parameters())
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("build", [Chain, Checkpointed, TiedByHand])
@pytest.mark.parametrize("ending", ["backward", "dropped"])
def test_a_graph_is_freed_with_its_last_reference(build, ending, tmp_path: Path) -> None:
    """Hooks must not hold it, or the nodes of every step would stay."""

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            nodes.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    nodes: list[weakref.ref[Any]] = []
    engine, *_ = infinity.initialize(model=build(), config=config(tmp_path))
    gc.disable()
    try:
        with engine:
            loss = loss_of(engine, Witness.apply(batches()[0].requires_grad_()))
            if ending == "backward":
                engine.backward(loss)
                engine.step()
            del loss
            assert [node() for node in nodes] == [None]
    finally:
        gc.enable()


def test_generate_in_eval_mode_gives_the_tokens_of_plain_torch(tmp_path: Path) -> None:
    plain, model = tiny_llama(), tiny_llama()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    prompts = texts(1, seed=5)[0][:, :6]
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    engine, *_ = infinity.initialize(model=model, config=tightest(model, tmp_path))
    with engine:
        for ids in texts(3):
            plain.train()
            language_loss(plain, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.train()
            engine.backward(language_loss(engine, ids))
            engine.step()
            engine.eval()
            assert torch.equal(model.generate(prompts, **asked), plain.eval().generate(prompts, **asked))


def test_parameters_that_cannot_be_trained_are_refused_by_name(tmp_path: Path) -> None:
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(infinity.ConfigError, match=r"`1.weight` has no shape yet.*run one forward"):
        infinity.initialize(model=lazy, config=config(tmp_path))
    turning = Chain()
    turning.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
    with pytest.raises(infinity.ConfigError, match=r"`phase` is complex64.*view_as_real"):
        infinity.initialize(model=turning, config=config(tmp_path))
