"""`infinity.optim.AdamW` in plain loops: torch's numbers, torch's interface, states in memory or on disk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_inputs_func_adam, optim_inputs_func_adamw

import infinity.optim
from infinity.errors import ConfigError, StorageError
from tests.kernels.data import same_bits

Make = Callable[..., torch.optim.Optimizer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds optimizers by place, and closes them."""
    made: list[infinity.optim.AdamW] = []

    def build(
        params: Any, place: str = "cpu", kind: type[infinity.optim.AdamW] = infinity.optim.AdamW, **options: Any
    ) -> infinity.optim.AdamW:
        path = tmp_path if place == "nvme" else None
        made.append(kind(params, offload=place, nvme_path=path, **options))
        return made[-1]

    yield build
    for optimizer in made:
        optimizer.close()


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 70), nn.GELU(), nn.Linear(70, 3)).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 40, generator=generator)
    dtype = next(model.parameters()).dtype
    return (model(inputs.to(dtype)).float() - inputs[:, :3]).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        assert same_bits(one.detach(), other.detach())


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_plain_loop_reaches_torchs_losses(make: Make, place: str) -> None:
    mine, reference = make_model(), make_model()
    losses = train(mine, make(mine.parameters(), place, lr=1e-2), range(30))
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), range(30))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_disk_and_memory_give_the_same_bits(make: Make, dtype: torch.dtype) -> None:
    models = [make_model(dtype) for _ in range(2)]
    for model, place in zip(models, ("cpu", "nvme"), strict=True):
        train(model, make(model.parameters(), place, lr=1e-2, eps=1e-6), range(10))
    assert_same_weights(*models)


@pytest.mark.parametrize("state_format", ["bf16", "int8"])
def test_lossy_formats_learn(make: Make, state_format: str) -> None:
    mine, exact = make_model(torch.bfloat16), make_model(torch.bfloat16)
    losses = train(mine, make(mine.parameters(), "nvme", lr=1e-2, state_format=state_format), range(60))
    expected = train(exact, make(exact.parameters(), lr=1e-2), range(60))
    assert sum(losses[-10:]) == pytest.approx(sum(expected[-10:]), rel=0.1)


@pytest.mark.parametrize(
    ("kind", "reference", "inputs"),
    [
        (infinity.optim.AdamW, torch.optim.AdamW, optim_inputs_func_adamw),
        (infinity.optim.Adam, torch.optim.Adam, optim_inputs_func_adam),
    ],
    ids=["AdamW", "Adam"],
)
def test_torchs_own_cases(make: Make, kind: Any, reference: Any, inputs: Any) -> None:
    ran = 0
    for case in inputs(device="cpu"):
        options = dict(case.kwargs)
        if any(options.pop(name, False) for name in ("amsgrad", "maximize", "capturable", "decoupled_weight_decay")):
            continue
        mine, theirs = make_model(), make_model()
        train(mine, make(mine.parameters(), kind=kind, **options), range(5))
        train(theirs, reference(theirs.parameters(), **options), range(5))
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=str(options))
        ran += 1
    assert ran >= 3


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_state_dict_goes_to_torch_and_back(make: Make, place: str) -> None:
    model, reference = make_model(), make_model()
    optimizer = make(model.parameters(), place, lr=1e-2)
    train(model, optimizer, range(5))
    reference.load_state_dict(model.state_dict())
    peer = torch.optim.AdamW(reference.parameters(), lr=1.0)
    peer.load_state_dict(optimizer.state_dict())
    assert peer.param_groups[0]["lr"] == 1e-2
    train(model, optimizer, range(5, 10))
    train(reference, peer, range(5, 10))
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)

    back = make(reference.parameters(), place)
    back.load_state_dict(peer.state_dict())
    resumed, original = back.state_dict()["state"], peer.state_dict()["state"]
    for index, values in original.items():
        for name, value in values.items():
            assert torch.equal(resumed[index][name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_resuming_from_a_state_dict_is_exact(make: Make, dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = make(model.parameters(), lr=1e-2, eps=1e-6)
    train(model, optimizer, range(5))
    resumed = copy.deepcopy(model)
    second = make(resumed.parameters(), "nvme")
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(5, 10))
    train(resumed, second, range(5, 10))
    assert_same_weights(model, resumed)


def test_groups_schedulers_and_missing_gradients(make: Make) -> None:
    mine, reference = make_model(), make_model()

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": model[0].parameters(), "weight_decay": 0.5},
            {"params": [model[2].weight], "lr": 5e-3, "betas": (0.8, 0.9)},
        ]

    optimizers = [make(groups(mine), lr=1e-2), torch.optim.AdamW(groups(reference), lr=1e-2)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for model, optimizer, scheduler in zip((mine, reference), optimizers, schedulers, strict=True):
        for step in range(10):
            loss_of(model, step).backward()
            if step % 3 == 0:
                model[0].bias.grad = None  # neither decays nor counts
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step == 4:
                optimizer.add_param_group({"params": [model[2].bias], "lr": 1e-3})
    for one, other in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_updates_inside_backward_give_the_same_bits(make: Make, place: str) -> None:
    plain, overlapped = make_model(), make_model()
    train(plain, make(plain.parameters(), lr=1e-2), range(10))
    optimizer = make(overlapped.parameters(), place, lr=1e-2)
    handles = optimizer.overlap(overlapped)
    train(overlapped, optimizer, range(10))
    assert_same_weights(plain, overlapped)
    loss_of(overlapped, 0).backward()
    with pytest.raises(ConfigError, match="second backward"):
        loss_of(overlapped, 0).backward()
    for handle in handles:
        handle.remove()


def test_closure_and_grad_scaler(make: Make) -> None:
    mine, reference = make_model(), make_model()
    for model, optimizer in (
        (mine, make(mine.parameters(), lr=1e-2)),
        (reference, torch.optim.AdamW(reference.parameters(), lr=1e-2)),
    ):

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 1)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 2:
                next(model.parameters()).grad.fill_(float("inf"))  # must be skipped
            scaler.step(optimizer)
            scaler.update()
    for one, other in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_parameters_that_are_not_contiguous(make: Make) -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    strided, plain = nn.Parameter(weight.clone().t()), nn.Parameter(weight.t().contiguous())
    for parameter in (strided, plain):
        optimizer = make([parameter], lr=0.1)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.testing.assert_close(strided, plain, rtol=0, atol=0)


def test_the_swap_file_goes_with_the_optimizer(tmp_path: Path) -> None:
    model = make_model()
    with infinity.optim.AdamW(model.parameters(), offload="nvme", nvme_path=tmp_path):
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_refused_group_leaves_nothing_behind(tmp_path: Path) -> None:
    fits, fits_too = (nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for _ in range(2))
    refused = nn.Parameter(torch.zeros(8))
    with pytest.raises(ConfigError, match="does not fit"):
        infinity.optim.AdamW([fits, refused], offload="nvme", nvme_path=tmp_path, state_format="int8")
    assert list(tmp_path.iterdir()) == []
    with infinity.optim.AdamW([fits], offload="nvme", nvme_path=tmp_path, state_format="int8") as optimizer:
        files = list(tmp_path.iterdir())
        with pytest.raises(ConfigError, match="does not fit"):
            optimizer.add_param_group({"params": [fits_too, refused]})
        assert (list(tmp_path.iterdir()), len(optimizer.param_groups)) == (files, 1)
        fits.grad = torch.ones_like(fits)
        optimizer.step()


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    parameters = list(make_model().parameters())
    with pytest.raises(ConfigError, match="needs nvme_path"):
        infinity.optim.AdamW(parameters, offload="nvme")
    with pytest.raises(ConfigError, match="choose 'cpu' or 'nvme'"):
        infinity.optim.AdamW(parameters, offload="disk")
    with pytest.raises(ConfigError, match="does not fit"):
        infinity.optim.AdamW(parameters, state_format="int8")
    with pytest.raises(ConfigError, match="Invalid learning rate: -1"):
        infinity.optim.AdamW(parameters, lr=-1.0)
    with pytest.raises(StorageError, match="nvme path"):
        infinity.optim.AdamW(parameters, offload="nvme", nvme_path="/dev/null/below")
    saved = torch.optim.AdamW(parameters, amsgrad=True).state_dict()
    with (
        infinity.optim.AdamW(parameters) as optimizer,
        pytest.raises(ConfigError, match="amsgrad"),
    ):
        optimizer.load_state_dict(saved)
