"""Checks of host memory that the device's driver has registered, and of the optimizer's update on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import torch

from infinity.cli.selftesting.outcome import Check
from infinity.errors import CapacityError
from infinity.kernels import (
    AdagradHyper,
    Hyper,
    LionHyper,
    Moment,
    Rule,
    SgdHyper,
    norm_on_device,
    update,
    update_on_device,
)
from infinity.memory import Arena
from infinity.memory.pinning import register, unregister
from infinity.tiers import AcceleratorLink

_NBYTES = 32 << 20
_NUMEL = 4099  # not a multiple of a kernel's block
_UPDATES = 3
# Dtypes of a parameter and its master (or, for bfloat16, its low bits).
_FORMS = ((torch.float32, None), (torch.bfloat16, torch.int16), (torch.float16, torch.float32))


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of a device; none for the CPU."""
    if device.type == "cpu":
        return
    yield Check("host memory", "registered, copied up and down", partial(_round_trip, device))
    yield Check("host memory", "a refused registration and the kernel after it", partial(_refused, device))
    yield Check("optimizer on the device", "norms", partial(_norms, device))
    for name in _rules(1):
        for dtype, beside in _FORMS:
            form = str(dtype).removeprefix("torch.")
            yield Check(
                "optimizer on the device", f"{name}, {form}", partial(_same_update, device, name, dtype, beside)
            )


def _rules(step: int) -> dict[str, Rule]:
    return {
        "AdamW": Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, step, decoupled=True, grad_scale=0.37),
        "Adam": Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, step, decoupled=False),
        "Adagrad": AdagradHyper(1e-2, 1e-3, 1e-10, 0.1, step),
        "Lion": LionHyper(1e-3, 0.9, 0.99, 0.1, step),
        "SGD": SgdHyper(1e-2, 0.9, 0.1, step),
    }


def _round_trip(device: torch.device) -> str:
    link = AcceleratorLink(device)
    with closing(Arena(2 * _NBYTES, pin=device)) as arena, arena.lease(_NBYTES) as source, arena.lease(_NBYTES) as back:
        values = source.tensor(torch.uint8)
        values.copy_(torch.arange(256, dtype=torch.uint8).repeat(_NBYTES // 256))
        there = torch.empty(_NBYTES, dtype=torch.uint8, device=device)
        link.compute_waits(link.upload(there, values))
        there += 1
        link.download(back.tensor(torch.uint8), there).result()
        same = torch.equal(back.tensor(torch.uint8), values + 1)
    return "" if same else "the downloaded bytes differ from the uploaded ones"


def _refused(device: torch.device) -> str:
    """Register memory twice, which drivers refuse. Their error must not surface in the next kernel."""
    with closing(Arena(_NBYTES, pin=device)) as arena, arena.lease(_NBYTES) as lease:
        try:
            if register(device, lease.address, lease.nbytes):
                unregister(device, lease.address)
        except CapacityError:
            pass
        right = torch.ones(8, device=device).sum().item() == 8
    return "" if right else "a kernel after the refusal computes a wrong result"


def _norms(device: torch.device) -> str:
    values = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0))
    here, there = values.double().norm().item(), norm_on_device(values.to(device)).item()
    same = abs(here - there) <= 1e-12 * here
    return "" if same else f"the norm of {_NUMEL} values is {there} on the device, and {here} on the CPU"


def _same_update(device: torch.device, name: str, dtype: torch.dtype, beside: torch.dtype | None) -> str:
    """Compare updates on the device with those of the host's kernels, bit by bit."""
    made = torch.Generator().manual_seed(2)
    param = torch.randn(_NUMEL, generator=made).to(dtype)
    master = None
    if beside is not None:
        drawn = torch.randint(-30000, 30000, (_NUMEL,), generator=made)
        master = drawn.to(beside) if beside is torch.int16 else param.float()
    rule = _rules(1)[name]
    first = None if rule.first is None else torch.randn(_NUMEL, generator=made) * 1e-3
    second = None if rule.second is None else torch.rand(_NUMEL, generator=made) * 1e-6
    here = [param, master, first, second]
    there = [None if each is None else each.to(device) for each in here]
    for step in range(1, _UPDATES + 1):
        rule = _rules(step)[name]
        grad = (torch.randn(_NUMEL, generator=made) * 1e-3).to(dtype)
        moments = [None if each is None else Moment(each) for each in (first, second)]
        update(rule, param, grad, master=master, first=moments[0], second=moments[1])
        assert there[0] is not None
        update_on_device(rule, there[0], grad.to(device), master=there[1], first=there[2], second=there[3])
    names = ("parameters", "masters", "first moments", "second moments")
    for what, ours, its in zip(names, here, there, strict=True):
        if ours is None or its is None:
            continue
        if not torch.equal(ours.view(torch.uint8), its.cpu().view(torch.uint8)):
            return f"{what} differ from the result of the host's kernels"
    return ""
