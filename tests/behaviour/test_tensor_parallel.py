"""A model that torch has divided over one mesh dimension trains under infinity on the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import infinity
from infinity.errors import ConfigError
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import DTYPES

WIDTH, LAYERS, BATCH, STEPS, LR = 32, 3, 8, 5, 1e-3


class Block(nn.Module):
    """Divided matrices, and a norm that every part holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def global_batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(1)))


def loss_of(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (model(x.to(dtype)).float() - x.roll(1, -1)).square().mean() * 30  # so that there is something to clip


@dataclass
class Curve:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def train_plainly(precision: str, clipping: float) -> Curve:
    """One process; fp32 masters."""
    model = make_model()
    masters = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    model = model.to(DTYPES[precision])
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=0.1)
    losses, norms = [], []
    for x in global_batches():
        loss = loss_of(model, x, DTYPES[precision])
        loss.backward()
        for name, param in model.named_parameters():
            masters[name].grad, param.grad = param.grad.float(), None
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), clipping or torch.inf).item())
        optimizer.step()
        for name, param in model.named_parameters():
            param.data.copy_(masters[name])
    return Curve(losses, norms, {name: master.detach() for name, master in masters.items()})


def divided_model(mesh, seed: int = 0) -> nn.Module:
    plan = {f"{i}.up": ColwiseParallel() for i in range(LAYERS)} | {
        f"{i}.down": RowwiseParallel() for i in range(LAYERS)
    }
    return parallelize_module(make_model(seed), mesh, plan)


def train_divided(parts: int, shard_size: int | None, cases: list[tuple[int, str, float]], swap: str) -> list[Curve]:
    """On a mesh of so many parts; what this rank has of the weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // parts, parts), mesh_dim_names=("dp", "tp"))
    return [train_case(mesh, shard_size, *case, swap) for case in cases]


def train_case(mesh, shard_size: int | None, stage: int, precision: str, clipping: float, swap: str) -> Curve:
    device = {"device": "nvme", "nvme_path": swap}
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clipping,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage}
        | ({"offload_optimizer": device, "offload_param": device} if stage == 3 else {}),
        "tiering": {"tile_size": "16KiB"},
        "communication": {"shard_size": shard_size},
    }
    model = divided_model(mesh["tp"], seed=mesh["dp"].get_local_rank())  # the first one's values count
    losses, norms = [], []
    with infinity.initialize(model=model, config=config, process_group=mesh["dp"].get_group())[0] as engine:
        for batch in global_batches():
            total = 0.0
            for x in batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].chunk(2):
                loss = loss_of(engine, x, DTYPES[precision])
                engine.backward(loss)
                engine.step()
                total += loss.item() / 2
            losses.append(total)
            norms.append(engine.get_global_grad_norm())
        return Curve(losses, norms, dict(engine.named_parameters()))


def whole(name: str, held: list[torch.Tensor]) -> torch.Tensor:
    """A weight from the parts that hold it."""
    if name.endswith(("up.weight", "up.bias")):
        return torch.cat(held)
    return torch.cat(held, 1) if name.endswith("down.weight") else held[0]


@pytest.mark.parametrize(("ranks", "parts", "shard_size"), [(4, 2, None), (2, 2, None), (4, 2, 1), (8, 2, 2)])
def test_it_follows_the_plain_loop(ranks, parts, shard_size, tmp_path) -> None:
    """Also where groups of ranks hold the states several times (HSDP)."""
    (tmp_path / "swap").mkdir()
    cases = [(1, "fp32", 1.0), (3, "fp32", 0.0), (3, "fp32", 1.0), (3, "bf16", 1.0)]
    by_rank = run_ranks(ranks, train_divided, parts, shard_size, cases, str(tmp_path / "swap"), path=tmp_path)
    start = dict(make_model().named_parameters())
    for (_, precision, clipping), *results in zip(cases, *by_rank, strict=True):
        expected = train_plainly(precision, clipping)
        tolerance = 1e-5 if precision == "fp32" else 1e-2
        losses = torch.tensor([result.losses for result in results]).mean(0)
        torch.testing.assert_close(losses, torch.tensor(expected.losses), rtol=tolerance, atol=tolerance)
        for result in results:
            assert result.norms == results[0].norms
            torch.testing.assert_close(
                torch.tensor(result.norms), torch.tensor(expected.norms), rtol=tolerance, atol=tolerance
            )
        off, way = [], []
        for name, weight in expected.weights.items():
            trained = whole(name, [result.weights[name] for result in results[:parts]])
            off.append((trained.float() - weight.to(trained.dtype)).norm())
            way.append((weight - start[name]).norm())
        assert torch.stack(off).norm() < (1e-4 if precision == "fp32" else 0.1) * torch.stack(way).norm()


def refuse_here() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    messages = []
    with torch.device("meta"):
        on_meta = divided_model(mesh["tp"])
    for model, group in ((divided_model(mesh["tp"]), None), (on_meta, mesh["dp"].get_group())):
        with pytest.raises(ConfigError) as caught:
            infinity.initialize(model=model, config=config, process_group=group)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_work_is_refused(tmp_path) -> None:
    for same, meta in run_ranks(2, refuse_here, path=tmp_path):
        assert "distributed over ranks [0, 1], which would also share its states" in same
        assert "`0.up.weight` is a DTensor on the meta device" in meta


def resume_here(path: str) -> bool:
    """Trained on from a checkpoint, this part has the bits that it has without one."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    config = {"train_batch_size": BATCH, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    batches = global_batches()

    def train(engine: infinity.Engine, steps: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        for x in steps:
            engine.backward(loss_of(engine, x, torch.float32))
            engine.step()
        return dict(engine.named_parameters())

    group = mesh["dp"].get_group()
    with infinity.initialize(model=divided_model(mesh["tp"]), config=config, process_group=group)[0] as engine:
        train(engine, batches[:2])
        engine.save_checkpoint(path)
        expected = train(engine, batches[2:])
    with infinity.initialize(model=divided_model(mesh["tp"], seed=1), config=config, process_group=group)[0] as engine:
        engine.load_checkpoint(path)
        resumed = train(engine, batches[2:])
    return all(torch.equal(resumed[name], weight) for name, weight in expected.items())


def test_a_divided_model_resumes_to_the_same_bits(tmp_path) -> None:
    assert run_ranks(2, resume_here, str(tmp_path / "checkpoints"), path=tmp_path) == [True, True]
