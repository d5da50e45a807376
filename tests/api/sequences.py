"""Random sequences of operations, done to an engine and to plain torch side by side.

An operation is something that a training script does between forward, backward and step. Each is done to both models,
and what the script can see is compared. The engine may refuse an operation by an `InfinityError`; then torch skips it.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.zero.phases import Phase

WIDTH, BATCH, LR, DECAY = 16, 4, 1e-2, 0.1
EPS = 1e-3  # so large that rounding in a gradient near zero stays rounding in the update


class Blocks(nn.Module):
    """Three units and a persistent one, and a switch to fail in the forward or in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.fails: tuple[str, type[BaseException]] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x + block(x).tanh()
            if index == 1 and self.fails is not None:
                where, error = self.fails
                if where == "forward":
                    raise error("on purpose")
                x.register_hook(lambda _, error=error: _raise(error))
        return self.norm(x).square().mean()


def _raise(error: type[BaseException]) -> None:
    raise error("on purpose")


@dataclass(frozen=True)
class Case:
    """Where the states live.

    Attributes:
        frozen: the second block requires no gradient at first.
    """

    stage: int = 3
    offload: str = "none"
    schedule: str = "auto"
    accumulation: int = 1
    clipping: float = 0.0
    frozen: bool = False

    def model(self) -> Blocks:
        model = Blocks()
        model.blocks[1].requires_grad_(not self.frozen)
        return model

    def config(self, path: Path) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 100}
        if self.stage == 3:
            zero["offload_param"] = {"device": self.offload}
        if self.stage > 0:
            zero["offload_optimizer"] = {"device": self.offload}
        tiering: dict[str, Any] = {"update_schedule": self.schedule, "tile_size": 4096}
        if self.offload == "nvme":
            tiering["nvme"] = [{"path": str(path / "swap")}]
            tiering["host_memory"] = (120_000 if self.stage < 3 else 110_000) + 40_000 * self.frozen
            (path / "swap").mkdir(exist_ok=True)
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS, "weight_decay": DECAY}},
            "zero_optimization": zero,
            "tiering": tiering,
        }


CASES = (
    Case(stage=0),
    Case(stage=2, accumulation=2),
    Case(stage=1, clipping=0.1),
    Case(stage=2, offload="nvme", clipping=0.1),
    Case(stage=3),
    Case(stage=3, offload="cpu", schedule="deferred", accumulation=2),
    Case(stage=3, offload="nvme", clipping=0.1),
    Case(stage=3, offload="nvme"),
    Case(stage=3, offload="nvme", schedule="barrier", accumulation=2),
    Case(stage=3, offload="nvme", schedule="speculative", clipping=0.1),
    Case(stage=3, offload="cpu", schedule="speculative", clipping=0.1),
    Case(stage=3, offload="cpu", schedule="speculative", clipping=1e6, accumulation=2),
    Case(stage=3, offload="nvme", schedule="speculative", clipping=1e6, accumulation=2),
    Case(stage=1, frozen=True),
    Case(stage=3, offload="nvme", clipping=0.1, frozen=True),
    Case(stage=3, offload="cpu", schedule="deferred", accumulation=2, frozen=True),
)


class Torch:
    """Plain torch, as a script would do it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, eps=EPS, weight_decay=DECAY)
        self.micro_steps = 0
        self.uncounted = 0  # micro-batches before a failed backward pass: run again, or left out by zero_grad
        self.saved: Any = None

    def backward(self, x: torch.Tensor) -> None:
        self.uncounted = 0
        (self.model(x) / self.case.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.case.accumulation:
            return
        if self.case.clipping:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drop_step(self) -> None:
        """What a failed backward pass leaves of a step."""
        self.optimizer.zero_grad()
        earlier = self.micro_steps % self.case.accumulation
        self.micro_steps -= earlier
        self.uncounted = earlier  # a backward pass that began has run the step again

    def zero_grad(self) -> None:
        """The step ends where it would have."""
        self.optimizer.zero_grad()
        self.micro_steps += self.uncounted
        self.uncounted = 0


class DifferenceError(AssertionError):
    """The engine and torch disagree."""


@dataclass
class Run:
    """One sequence.

    Attributes:
        log: the operations so far, for messages.
        outcomes: how often operations were done and refused.
    """

    case: Case
    path: Path
    random: random.Random
    log: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.torch = Torch(self.case)
        model = self.case.model()
        self.engine = infinity.initialize(
            model=model, config=self.case.config(self.path), model_parameters=model.parameters()
        )[0]

    def x(self) -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(self.random.randrange(1000)))

    def same(self, what: str, here: torch.Tensor, there: torch.Tensor) -> None:
        if here.shape != there.shape or not torch.allclose(here.float(), there.float(), rtol=2e-3, atol=LR / 10):
            off = (here.float() - there.float()).abs().max() if here.shape == there.shape else "shape"
            raise DifferenceError(f"{what} differs by {off}, after {self.log} in {self.case}")

    def do(self, name: str) -> bool:
        """Whether it was not refused."""
        self.log.append(name)
        try:
            OPERATIONS[name](self)
        except infinity.InfinityError as error:
            self.outcomes["refused"] += 1
            self.outcomes[f"refused {name}: {str(error).split(':')[0][:60]}"] += 1
            if "has stopped after an error" in str(error):
                raise
            return False
        self.outcomes["done"] += 1
        return True

    def compare(self) -> None:
        """Compare all parameters, as the engine gives them."""
        reference = dict(self.torch.model.named_parameters())
        for name, values in self.engine.named_parameters():
            self.same(name, values, reference[name].detach())


Operation = Callable[[Run], None]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


@operation
def train(run: Run) -> None:
    x = run.x()
    loss = run.engine(x)
    run.engine.backward(loss)
    run.engine.step()
    run.torch.backward(x)
    run.torch.step()


@operation
def train_by_loss_backward(run: Run) -> None:
    x = run.x()
    run.engine(x).backward()
    run.engine.optimizer.step()
    run.torch.backward(x)
    run.torch.step()


@operation
def backward_alone(run: Run) -> None:
    x = run.x()
    run.engine.backward(run.engine(x))
    run.torch.backward(x)


@operation
def step_alone(run: Run) -> None:
    run.engine.step()
    run.torch.step()


@operation
def forward_without_backward(run: Run) -> None:
    x = run.x()
    run.same("the loss", run.engine(x).detach(), run.torch.model(x).detach())


@operation
def evaluate(run: Run) -> None:
    x = run.x()
    with torch.no_grad():
        run.same("the loss", run.engine.eval()(x), run.torch.model.eval()(x))
    run.engine.train()


@operation
def evaluate_past_the_engine(run: Run) -> None:
    x = run.x()
    with torch.no_grad():
        run.same("the loss", run.engine.module(x), run.torch.model(x))


@operation
def zero_grad(run: Run) -> None:
    chosen = run.random.choice([run.engine, run.engine.optimizer, run.engine.module])
    chosen.zero_grad()
    run.torch.zero_grad()


@operation
def state_dict(run: Run) -> None:
    reference = run.torch.model.state_dict()
    here = run.engine.module.state_dict()
    if list(here) != list(reference):
        raise DifferenceError(f"state_dict has {list(here)}")
    for name, values in here.items():
        run.same(f"state_dict {name}", values, reference[name])


@operation
def load_state_dict(run: Run) -> None:
    torch.manual_seed(run.random.randrange(1000))
    values = {name: torch.randn_like(value) * 0.1 for name, value in run.torch.model.state_dict().items()}
    run.engine.module.load_state_dict(values)
    run.torch.model.load_state_dict(values)


@operation
def save_checkpoint(run: Run) -> None:
    run.engine.save_checkpoint(run.path / "saved")
    run.torch.saved = copy.deepcopy((run.torch.model.state_dict(), run.torch.optimizer.state_dict()))


@operation
def load_checkpoint(run: Run) -> None:
    found, _ = run.engine.load_checkpoint(run.path / "saved")
    if (found is None) != (run.torch.saved is None):
        raise DifferenceError("a checkpoint was not found")
    if found is not None:
        model, optimizer = copy.deepcopy(run.torch.saved)
        run.torch.model.load_state_dict(model)
        run.torch.optimizer.load_state_dict(optimizer)
        run.torch.micro_steps = run.engine.micro_steps


@operation
def gathered_read(run: Run) -> None:
    with infinity.zero.GatheredParameters(run.engine.module):
        for (name, here), there in zip(run.engine.module.named_parameters(), run.torch.model.parameters(), strict=True):
            run.same(name, here.detach(), there.detach())


@operation
def gathered_write(run: Run) -> None:
    index = run.random.randrange(3)
    here, there = run.engine.module.blocks[index].weight, run.torch.model.blocks[index].weight
    with infinity.zero.GatheredParameters([here], modifier_rank=0), torch.no_grad():
        here.mul_(0.5)
    with torch.no_grad():
        there.mul_(0.5)


@operation
def raw_write(run: Run) -> None:
    if run.case.stage == 3 or run.engine._step.updates.under_way:  # NaN, which torch does not write to
        return
    for model in (run.engine.module, run.torch.model):
        model.blocks[0].weight.data.mul_(0.5)


@operation
def raw_read(run: Run) -> None:
    pairs = zip(run.engine.module.named_parameters(), run.torch.model.parameters(), strict=True)
    for (name, here), there in pairs:
        waits = run.engine._step.updates.under_way  # for a step() that torch has not had
        if run.case.stage == 3 and (waits or bool(here.isnan().all())):
            continue
        if waits and bool(here.isnan().all()):
            continue
        run.same(f"raw {name}", here.detach(), there.detach())


@operation
def deepcopy(run: Run) -> None:
    copied = copy.deepcopy(run.engine.module)
    x = run.x()
    run.same("a copy's loss", copied(x).detach(), run.torch.model(x).detach())


@operation
def freeze(run: Run) -> None:
    run.engine.module.blocks[2].weight.requires_grad_(False)
    run.torch.model.blocks[2].weight.requires_grad_(False)


@operation
def unfreeze(run: Run) -> None:
    run.engine.module.blocks[2].weight.requires_grad_(True)
    run.torch.model.blocks[2].weight.requires_grad_(True)


@operation
def unfreeze_late(run: Run) -> None:
    """What was frozen at `initialize`, between two steps: elsewhere the engine's next call is refused."""
    step = run.engine._step
    within = step.gradients.any_pending() or step.updates.under_way or run.engine.awaits_backward
    if not within and run.torch.micro_steps % run.case.accumulation == 0:
        run.engine.module.blocks[1].requires_grad_(True)
        run.torch.model.blocks[1].requires_grad_(True)


@operation
def change_lr(run: Run) -> None:
    """Where updates have begun, it is set back: `step()` refuses it."""
    before = run.torch.optimizer.param_groups[0]["lr"]
    lr = run.random.choice([1e-3, 1e-2])
    optimizers = (run.engine.optimizer, run.torch.optimizer)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = lr
    if run.engine._step.updates.under_way and lr != before:
        with pytest.raises(infinity.InfinityError, match=r"hyper-parameters|zeroed"):
            run.engine.step()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = before


@operation
def abandoned_iteration(run: Run) -> None:
    next(iter(run.engine.named_parameters()))


@operation
def convert_to_what_it_is(run: Run) -> None:
    run.engine.module.float().to("cpu")


@operation
def convert(run: Run) -> None:
    with suppress(infinity.InfinityError):
        run.engine.module.to(torch.bfloat16)
        raise DifferenceError("a conversion was accepted")


@operation
def clip_by_hand(run: Run) -> None:
    if run.torch.model.norm.weight.grad is not None:
        nn.utils.clip_grad_norm_(run.engine.module.parameters(), 1e-3)
        nn.utils.clip_grad_norm_(run.torch.model.parameters(), 1e-3)


def _fails_in_forward(run: Run, error: type[BaseException]) -> None:
    run.engine.module.fails = ("forward", error)
    try:
        with suppress(error):
            run.engine(run.x())
    finally:
        run.engine.module.fails = None


def _fails_in_backward(run: Run, error: type[BaseException]) -> None:
    run.engine.module.fails = ("backward", error)
    by_hand = run.random.random() < 0.5
    try:
        loss = run.engine(run.x())
        with suppress(error):
            if by_hand:
                loss.backward()
            else:
                run.engine.backward(loss)
    finally:
        run.engine.module.fails = None
    run.torch.drop_step()
    if by_hand:
        run.engine.zero_grad()
        run.torch.zero_grad()


@operation
def exception_in_forward(run: Run) -> None:
    _fails_in_forward(run, ValueError)


@operation
def interrupt_in_forward(run: Run) -> None:
    _fails_in_forward(run, KeyboardInterrupt)


@operation
def exception_in_backward(run: Run) -> None:
    _fails_in_backward(run, ValueError)


@operation
def interrupt_in_backward(run: Run) -> None:
    _fails_in_backward(run, KeyboardInterrupt)


def run_sequence(case: Case, names: Sequence[str], seed: int, path: Path) -> Counter[str]:
    """Do these operations, then train two steps.

    Raises:
        DifferenceError: something was not as in torch.
    """
    path.mkdir(parents=True, exist_ok=True)
    run = Run(case, path, random.Random(seed))
    with run.engine:
        try:
            for name in names:
                run.do(name)
                if run.engine._step.phase is Phase.FAILED:
                    run.engine.synchronize()  # which says so
            while run.torch.micro_steps % case.accumulation:
                run.do("step_alone")
            if run.engine._step.updates.under_way:
                run.do("step_alone")
            run.do("zero_grad")
            for _ in range(2 * case.accumulation):
                run.do("train")
            run.compare()
        except infinity.InfinityError as error:
            if "has stopped after an error" not in str(error):
                raise
            run.outcomes["stopped"] += 1
    return run.outcomes
