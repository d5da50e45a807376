"""A plan is refused where `infinity.initialize` refuses the same configuration, in the same words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.config import load_config
from infinity.planner import Machine, plan_training
from infinity.tiers import HostMemory, SameMemory
from tests.action_logs.cases import Stack
from tests.behaviour.reference import named_budget

GIB = 1 << 30
CLIPPED = {"gradient_clipping": 1.0}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
SUMS = {"gradient_accumulation_steps": 2}
KEPT = {"tiering.crash_consistent": True}
GDS = {"aio.use_gds": True}

# name: keys in place of those of `values`; what is refused on a device and on the CPU, or nothing
TABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "all on drives": ({}, "", ""),
    "kept": (KEPT, "", ""),
    "kept, with a share on the device": (
        {**KEPT, "offload_optimizer.ratio": 0.5},
        "crash_consistent needs updates in host memory",
        "",
    ),
    "kept, and the device filled": (
        {**KEPT, "tiering.fill_device": True},
        "crash_consistent needs updates in host memory",
        "",
    ),
    "kept, with states in memory": ({**KEPT, "offload_optimizer.device": "none"}, "", ""),
    "kept, with nothing on drives": (
        {**KEPT, "offload_optimizer.device": "cpu", "offload_param.device": "cpu"},
        "no states are assigned to them",
        "no states are assigned to them",
    ),
    "past the host": (GDS, "", ""),
    "past the host, with checksums": ({**GDS, "tiering.checksum": True}, "use_gds reads past the host", ""),
    "past the host, with checksums, from memory": (
        {**GDS, "tiering.checksum": True, "offload_param.device": "cpu"},
        "",
        "",
    ),
    "a rounded format on the device": (
        {**BF16, "tiering.state_format": "int8", "offload_optimizer.ratio": 0.5},
        "rounds moments, as only the kernels of the host do it",
        "",
    ),
    "filled, and ahead": (
        {**CLIPPED, "tiering.fill_device": True, "tiering.update_schedule": "speculative"},
        'but tiering.update_schedule is "speculative"',
        "",
    ),
    "backward, and clipped": (
        {**CLIPPED, "tiering.update_schedule": "backward"},
        "but gradient_clipping is 1.0",
        "but gradient_clipping is 1.0",
    ),
    "backward, and scaled": (
        {**FP16, "tiering.update_schedule": "backward"},
        "the loss is scaled for fp16",
        "the loss is scaled for fp16",
    ),
    "another precision's format": ({"tiering.state_format": "split"}, "does not fit fp32", "does not fit fp32"),
    "layer by layer": ({**SUMS, "tiering.accumulation": "layer"}, "", ""),
    "Lion": ({"optimizer": {"type": "Lion", "params": {}}}, "", ""),
    "no such optimizer": (
        {"optimizer": {"type": "Shampoo", "params": {}}},
        "optimizer.type is 'Shampoo'",
        "optimizer.type is 'Shampoo'",
    ),
    "an optimizer's unknown key": (
        {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
        "params.momentum is unknown",
        "params.momentum is unknown",
    ),
    "a schedule": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "", ""),
    "no such schedule": (
        {"scheduler": {"type": "Cosine", "params": {}}},
        "scheduler.type is 'Cosine'",
        "scheduler.type is 'Cosine'",
    ),
    "a schedule without its length": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "total_num_steps is missing",
        "total_num_steps is missing",
    ),
    "too little host memory": (
        {"tiering.host_memory": 4096},
        "needs at least",
        "needs at least",
    ),
    "too little device memory": ({"tiering.device_memory": 4096}, "tiering.device_memory is 4.00 KiB", ""),
    "activations beyond the budget": (
        {"tiering.activations": "nvme", "tiering.activation_memory": GIB},
        "activations 1.00 GiB",
        "activations 1.00 GiB",
    ),
}


class OneGibibyte(SameMemory):
    """A device with memory of its own that needs no emulator."""

    def free_bytes(self) -> int:
        return GIB


def values_of(keys: dict[str, Any], path: Any) -> dict[str, Any]:
    nvme = {"device": "nvme"}
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "offload_param": dict(nvme),
            "offload_optimizer": dict(nvme),
        },
        "tiering": {"nvme": [{"path": str(path)}], "host_memory": 1 << 26},
    }
    for key, value in keys.items():
        *sections, name = key.split(".")
        place = values
        for section in ["zero_optimization"] * (sections[:1] in (["offload_param"], ["offload_optimizer"])) + sections:
            place = place.setdefault(section, {})
        place[name] = value
    return values


def refusal(run: Callable[[], object]) -> str:
    try:
        run()
    except infinity.InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def both(model: Callable[[], nn.Module], values: dict[str, Any], *, discrete: bool) -> tuple[str, str]:
    link = OneGibibyte() if discrete else HostMemory()
    machine = Machine(device_bytes=GIB if discrete else None)

    def train() -> None:
        infinity.initialize(model=model(), config=copy.deepcopy(values), link=link)[0].close()

    return refusal(train), refusal(lambda: plan_training(model(), load_config(values), machine))


@pytest.mark.parametrize("name", TABLE)
def test_what_initialize_refuses_is_not_planned(name: str, tmp_path) -> None:
    keys, on_device, on_cpu = TABLE[name]
    for discrete, expected in ((True, on_device), (False, on_cpu)):
        trained, planned = both(Stack, values_of(keys, tmp_path), discrete=discrete)
        assert trained == planned
        assert bool(trained) == bool(expected)
        assert expected in trained


def test_layer_major_needs_blocks(tmp_path) -> None:
    values = values_of({**SUMS, "tiering.accumulation": "layer"}, tmp_path)
    trained, planned = both(lambda: nn.Linear(8, 3), values, discrete=False)
    assert trained == planned
    assert "the model (Linear) is no sequence of blocks" in trained


def test_other_optimizers_keep_fewer_bytes(tmp_path) -> None:
    def nvme_bytes(name: str) -> int:
        values = values_of({"optimizer": {"type": name, "params": {}}, "tiering.host_memory": 4096}, tmp_path)
        with pytest.raises(infinity.CapacityError) as too_little:
            plan_training(Stack(), load_config(values))
        values["tiering"]["host_memory"] = named_budget(too_little.value)
        plan = plan_training(Stack(), load_config(values))
        with infinity.initialize(model=Stack(), config=values)[0] as engine:
            assert engine._runtime.peak_bytes()["nvme"] == plan.nvme_bytes
        return plan.nvme_bytes

    assert nvme_bytes("SGD") < nvme_bytes("AdamW")
