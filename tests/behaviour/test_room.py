"""What `initialize` accepts trains: random models in any budget from the least one up, on one to four ranks.

To try more of them: `python -c 'from tests.behaviour.test_room import main; main(ranks=2, count=300)'`.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity import CapacityError
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import named_budget

WIDTH, STEPS, LR = 32, 2, 1e-2
EPS = 1e-3  # so that rounding of the smallest gradients does not show
BUDGETS = (1.0, 1.0, 1.003, 1.03, 1.2, 2.0, 60.0)  # of the least
SCHEDULES = ("auto", "auto", "backward", "deferred", "speculative", "barrier")


class Block(nn.Module):
    """A block of any size, perhaps of several layers, which units may divide."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        for layer in self.more:
            x = x + torch.tanh(layer(x))
        return x


class Net(nn.Module):
    """Perhaps a stem and a head, smaller or larger than the blocks between them, tied or not; perhaps frozen parts."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        sizes = chance.choice(((200,), (200,), (64, 200), (8, 200, 500)))
        self.stem = nn.Linear(WIDTH, WIDTH) if chance.random() < 0.5 else None
        deep = chance.choice((0, 0, 0, 6))
        self.blocks = nn.ModuleList(Block(chance.choice(sizes), deep) for _ in range(chance.randint(2, 6)))
        if deep and chance.random() < 0.5:
            self.blocks[-1].more = self.blocks[0].more
        wide = chance.choice((WIDTH, WIDTH, 700))
        self.head = nn.Linear(WIDTH, wide) if chance.random() < 0.8 else None
        if self.stem and self.head and wide == WIDTH and chance.random() < 0.5:
            self.head.weight = self.stem.weight
        if chance.random() < 0.3:
            self.blocks[chance.randrange(len(self.blocks))].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) if self.stem else x
        for block in self.blocks:
            x = block(x)
        return (self.head(x) if self.head else x).square().mean()  # type: ignore[no-any-return]


def config_of(chance: random.Random, ranks: int, path: Path) -> dict[str, Any]:
    """A random configuration, without a budget."""
    stage = chance.randint(0, 3)
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": chance.choice((0, 0, 2000))}
    tier = chance.choice(("none", "cpu", "nvme"))
    if stage and tier != "none":
        zero["offload_optimizer"] = {"device": tier, "nvme_path": str(path)}
        if stage == 3:
            zero["offload_param"] = {"device": chance.choice(("none", tier)), "nvme_path": str(path)}
    schedule, clips = chance.choice(SCHEDULES), chance.random() < 0.4
    if schedule == "backward":
        clips = False
    tiering: dict[str, Any] = {
        "update_schedule": schedule,
        "tile_size": chance.choice(("4KiB", "64KiB")),
        "status": False,
    }
    if chance.random() < 0.2:
        tiering["max_unit_size"] = "8KiB"
    accumulation = chance.choice((1, 1, 2, 3))
    if accumulation > 1 and chance.random() < 0.5:
        tiering["accumulation"] = "layer"
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05 if clips else 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS}},
        "zero_optimization": zero,
        "tiering": tiering,
    }


def train_plainly(model: nn.Module, config: dict[str, Any], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """In torch alone; `data` is of (steps, micro-batches of all ranks, samples, width)."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR, eps=EPS, weight_decay=0.0)
    for step in data:
        for micro in step:
            (model(micro) / len(step)).backward()
        if config["gradient_clipping"]:
            torch.nn.utils.clip_grad_norm_(params, config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def tried(seed: int, rank: int, ranks: int, path: Path) -> str:
    """What is wrong with the seed's training in its budget; nothing if it trains, or is refused before it begins."""
    chance = random.Random(f"{seed} {ranks}")
    torch.manual_seed(seed)
    plain = Net(chance)
    config = config_of(chance, ranks, path)
    share, accumulation = chance.choice(BUDGETS), config["gradient_accumulation_steps"]
    saves = chance.random() < 0.3
    data = torch.randn(STEPS, ranks * accumulation, 2, WIDTH, generator=torch.Generator().manual_seed(seed))
    try:
        infinity.initialize(model=copy.deepcopy(plain), config=_within(config, 1), device="cpu")[0].close()
        least = 1
    except CapacityError as refusal:
        least = named_budget(refusal)
    except infinity.ConfigError:
        return ""  # a combination that is refused by name
    model = copy.deepcopy(plain)
    engine = infinity.initialize(model=model, config=_within(config, int(least * share)), device="cpu")[0]
    try:
        for step in data:
            engine.train_batch(iter(step[rank::ranks]))
            if saves:
                engine.save_checkpoint(path / "saved" / str(seed), blocking=False)
        ours = {name: values.detach().clone() for name, values in engine.named_parameters()}
    except infinity.InfinityError as error:
        return f"seed {seed}, {ranks} ranks, {share} of {least}, {config}: {type(error).__name__}: {error}"
    finally:
        engine.close()
    for name, values in train_plainly(plain, config, data).items():
        if name in ours and not torch.allclose(ours[name], values, rtol=1e-3, atol=LR / 50):
            off = (ours[name] - values).abs().max().item()
            return f"seed {seed}, {ranks} ranks, {share} of {least}, {config}: `{name}` is off by {off:.1e}"
    return ""


def _within(config: dict[str, Any], host_memory: int) -> dict[str, Any]:
    return config | {"tiering": config["tiering"] | {"host_memory": host_memory}}


def try_seeds(first: int, count: int, path: Path) -> list[str]:
    """What is wrong with each of these seeds that something is wrong with."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong = (tried(seed, rank, ranks, path) for seed in range(first, first + count))
    return [words for words in wrong if words]


@pytest.mark.parametrize(("ranks", "count"), [(1, 8), (2, 8), (3, 5)])
def test_what_initialize_accepts_trains(ranks, count, tmp_path) -> None:
    if ranks == 1:
        assert not try_seeds(0, count, tmp_path)
    else:
        assert run_ranks(ranks, try_seeds, 0, count, tmp_path, path=tmp_path) == [[]] * ranks


def main(ranks: int, count: int, first: int = 0) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        if ranks > 1:
            wrong = run_ranks(ranks, try_seeds, first, count, path, path=path, timeout_s=3600)[0]
        else:
            wrong = try_seeds(first, count, path)
        for words in wrong:
            print(words)
        print(f"{count} seeds on {ranks} ranks: {len(wrong)} wrong")
