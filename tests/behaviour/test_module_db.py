"""torch's own modules, with torch's own cases for them, trained while every unit leaves memory between its uses."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

import infinity
from tests.behaviour.reference import least_memory

CASES = 1000 if os.environ.get("INFINITY_ALL_MODULE_CASES") else 4  # of each module, spread over those that torch has
WIDTH = 48


class _Surrounded(nn.Module):
    """The subject, whose own parts are units, between blocks that push it out of memory."""

    def __init__(self, subject: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.subject = subject
        width = max(WIDTH, int(max((p.numel() for p in subject.parameters()), default=0) ** 0.5) + 1)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        first = self.first(torch.ones(1, 8)).square().mean()
        output = self.subject(*args, **kwargs)
        x = torch.ones(1, self.blocks[0].in_features)
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = x.square().mean() + first
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                loss = loss + tensor.nan_to_num().square().mean()  # pooling by a power of negative numbers
        return output, loss


def _cases(info: ModuleInfo, training: bool) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    chosen = inputs[:: max(1, len(inputs) // CASES)][:CASES] if len(inputs) > CASES else inputs
    for case in chosen:
        module = info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs)
        if case.forward_input is None:
            continue
        args, kwargs = case.forward_input.args, case.forward_input.kwargs
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
            with torch.no_grad():
                module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        yield module.float().train(training), args, kwargs


def _is_away(module: nn.Module) -> bool:
    """All parameters are the stand-in without memory, which is one element repeated."""
    return all(not any(p.stride()) for p in module.parameters() if p.numel() > 1)


def _leaves(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _fresh(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs again, as leaves that have no gradient yet."""
    return pytree.tree_map(
        lambda v: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v,
        (args, kwargs),
    )


def _config(path: Path, schedule: str, host_memory: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {
            "nvme": [{"path": str(path)}],
            "host_memory": host_memory,
            "tile_size": "16KiB",
            "update_schedule": schedule,
            "io_backend": "threads",
        },
    }


def _tightest(model: nn.Module, path: Path, schedule: str) -> dict[str, Any]:
    return _config(path, schedule, least_memory(copy.deepcopy(model), _config(path, schedule, 1)))


def _run(
    model: Any, backward: Any, args: Any, kwargs: Any, steps: int = 2
) -> list[tuple[list[torch.Tensor], list[torch.Tensor | None]]]:
    """Outputs and gradients of the inputs, step by step."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        now_args, now_kwargs = _fresh(args, kwargs)
        output, loss = model(*now_args, **now_kwargs)
        backward(loss)
        outputs = [v.detach().clone() for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]
        seen.append((outputs, [leaf.grad for leaf in _leaves(now_args, now_kwargs)]))
    return seen


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_module_trains_as_in_plain_torch(info: ModuleInfo, tmp_path: Path) -> None:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for index, (subject, args, kwargs) in enumerate(_cases(info, training)):
            schedule = ("backward", "deferred")[(index + training) % 2]
            torch.manual_seed(1)
            model = _Surrounded(subject)
            plain = copy.deepcopy(model)
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

            def plainly(loss: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            expected = _run(plain, plainly, args, kwargs)
            engine, *_ = infinity.initialize(model=model, config=_tightest(model, tmp_path, schedule))
            away: list[bool] = []
            model.blocks[2].register_forward_pre_hook(lambda *_, m=subject, a=away: a.append(_is_away(m)))
            with engine:

                def placed(loss: torch.Tensor, engine: infinity.Engine = engine) -> None:
                    engine.backward(loss)
                    engine.step()

                found = _run(engine, placed, args, kwargs)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
                weights = dict(engine.named_parameters())
            for name, param in plain.named_parameters():
                torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-5)
            for name, buffer in plain.named_buffers():
                torch.testing.assert_close(model.get_buffer(name), buffer)
            assert any(away), "the subject stayed in memory: the test shows nothing"
