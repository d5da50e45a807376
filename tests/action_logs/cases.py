"""The trainings whose actions are written down."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.errors import CapacityError
from infinity.integrations import pretrained_model
from infinity.tiers import SameMemory
from infinity.zero.foresight import Foresight
from tests.action_logs.recorder import Recorder, recording
from tests.action_logs.worlds import world_of
from tests.behaviour.reference import named_budget

BLOCKS, WIDTH, BATCH, STEPS = 5, 32, 2, 3
LARGE = 1 << 28  # of host memory: all of the model fits
_NEVER, _ALWAYS = 1e9, 1e-3  # norms that gradients are clipped to


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks of the same size between an embedding and a head, and a norm that always stays in memory.

    Args:
        branches: one of the inner blocks is left out, another one in every micro-batch.
    """

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(3 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block(WIDTH) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3 * WIDTH)
        self._branches = branches
        self._batches = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        self._batches += 1
        for index, block in enumerate(self.blocks):
            if not (self._branches and index == 1 + self._batches * 7 % (BLOCKS - 2)):
                x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        params, optimizer: offload devices.
        room: of the parameters' bytes, beside the least that the engine asks for; None where all fit.
        clip: gradients' norm is clipped to this.
        eager: updates run ahead of the norm in every step.
        device: "discrete" for a device with memory of its own that needs no emulator.
    """

    params: str = "nvme"
    optimizer: str = "nvme"
    stage: int = 3
    room: float | None = None
    schedule: str = "auto"
    accumulation: int = 1
    clip: float = 0.0
    ranks: int = 1
    device: str = "cpu"
    eager: bool = False
    model: Callable[[Path], tuple[nn.Module, Any]] = field(default=lambda _: (Stack(), None))
    tiering: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False


def _frozen_in_files(path: Path) -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (two seconds, for one case)

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        vocab_size=3 * WIDTH,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(path / "base")
    model, weights = pretrained_model(path / "base", in_place=True)
    for name, param in model.named_parameters():
        param.requires_grad_("o_proj" in name or name.startswith("lm_head"))
    return model, weights


_SUMS = {"accumulation": 3}
CASES: dict[str, Case] = {
    "memory": Case("none", "none", stage=0),
    "states_on_host": Case("none", "cpu", stage=2),
    "all_fits": Case(),
    "tight": Case(room=0.4),
    "tightest": Case(room=0.0),
    "tight_deferred": Case(room=0.4, schedule="deferred"),
    "tightest_deferred": Case(room=0.0, schedule="deferred", clip=1.0),
    "tight_barrier": Case(room=0.4, schedule="barrier"),
    "tight_sums": Case(room=0.4, **_SUMS),
    "tightest_sums_deferred": Case(room=0.0, clip=1.0, schedule="deferred", **_SUMS),
    "layer_major": Case(room=0.4, tiering={"accumulation": "layer"}, **_SUMS),
    "speculative": Case(room=0.6, schedule="speculative", clip=_NEVER, eager=True),
    "speculative_clips": Case(room=0.6, schedule="speculative", clip=_ALWAYS, eager=True),
    "speculative_in_memory": Case("cpu", "cpu", room=None, schedule="speculative", clip=_NEVER, eager=True),
    "crash_consistent": Case(room=0.4, tiering={"crash_consistent": True}),
    "branches": Case(room=0.4, model=lambda _: (Stack(branches=True), None)),
    "frozen_in_files": Case("nvme", "cpu", room=0.3, model=_frozen_in_files, bf16=True),
    "link": Case("cpu", "cpu", device="discrete"),
    "link_nvme_tight": Case(room=0.4, device="discrete", tiering={"device_memory": "64KiB"}),
    "ranks": Case(room=0.4, ranks=2),
    "ranks_stage_2": Case("none", "cpu", stage=2, ranks=2),
    "ranks_deferred_sums": Case(room=0.4, ranks=2, schedule="deferred", clip=1.0, **_SUMS),
}
ON_DEVICE: dict[str, Case] = {
    "device_states_on_host": Case("none", "cpu", device="emulated", bf16=True, tiering={"fill_device": False}),
    "device_states_there": Case("none", "none", device="emulated", bf16=True),
    "device_fetched": Case(room=0.4, device="emulated", tiering={"fill_device": False, "device_memory": "64KiB"}),
    "device_half_there": Case("cpu", "cpu", device="emulated", clip=1.0, schedule="deferred"),
}


def log_of(name: str, world: str) -> str:
    """The actions of a case on this rank."""
    case = (CASES | ON_DEVICE)[name]
    with tempfile.TemporaryDirectory() as directory, world_of(world):
        path = Path(directory)
        engine = make(case, path)
        recorder = Recorder([spec.name or "the rest" for spec in engine._runtime.sizing.specs])
        with recording(recorder):
            _train(engine, case, recorder)
            engine.close()
    return recorder.text()


def make(case: Case, path: Path) -> infinity.Engine:
    """An engine with the room that the case has."""
    model, weights = case.model(path)
    params = sum(param.nbytes for param in model.parameters())
    host_memory = LARGE
    if case.room is not None:
        try:
            _initialize(case, path, model, weights, 1)
        except CapacityError as error:
            host_memory = named_budget(error) + int(case.room * params)
        model, weights = case.model(path)
    return _initialize(case, path, model, weights, host_memory)


def _initialize(case: Case, path: Path, model: nn.Module, weights: Any, host_memory: int) -> infinity.Engine:
    where: dict[str, Any] = {"device": "simdev"} if case.device == "emulated" else {"device": "cpu"}
    if case.device == "discrete":
        where = {"link": SameMemory()}
    if weights is not None:
        where["weights"] = weights
    return infinity.initialize(model=model, config=config_of(case, path, host_memory), **where)[0]


def config_of(case: Case, path: Path, host_memory: int) -> dict[str, Any]:
    drive = path / f"drive-{dist.get_rank() if dist.is_initialized() else 0}"
    drive.mkdir(exist_ok=True)
    tiering = {"tile_size": "8KiB", "update_schedule": case.schedule, "host_memory": host_memory}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "bf16": {"enabled": case.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 500,
            "offload_param": {"device": case.params},
            "offload_optimizer": {"device": case.optimizer},
        },
        "tiering": tiering | {"nvme": [{"path": str(drive)}]} | case.tiering,
    }


def _train(engine: infinity.Engine, case: Case, recorder: Recorder) -> None:
    made = torch.Generator().manual_seed(1)
    speculates = Foresight.speculates
    if case.eager:
        Foresight.speculates = True  # type: ignore[assignment, method-assign]
    try:
        for step in range(STEPS):
            recorder.event(f"\n# step {step}")
            batches = [torch.randint(3 * WIDTH, (BATCH, 4), generator=made) for _ in range(case.accumulation)]
            if case.tiering.get("accumulation") == "layer":
                engine.train_batch(batches)
                continue
            for ids in batches:
                output = engine(ids.to(engine.device))
                engine.backward(output if torch.is_tensor(output) else output.logits.float().square().mean())
                engine.step()
    finally:
        Foresight.speculates = speculates  # type: ignore[method-assign]
