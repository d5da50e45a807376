"""The training step that `gpu_step.py` measures, the same for every system: the model, the data and the measurement."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.device_profile import Kind, StepProfile, analyse, records_of
from infinity.zero.meta import construct_on_meta

LR, WEIGHT_DECAY = 1e-5, 0.01
_PATTERN_NUMEL = 1 << 22


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    batch: int


PRESETS = {
    "tiny": Shape(2, 64, 160, 4, 2, 256, 32, 1),
    "1.3b": Shape(24, 2048, 5504, 16, 16, 32000, 2048, 4),
    "8b": Shape(32, 4096, 14336, 32, 8, 128256, 2048, 4),
}


def arguments() -> argparse.ArgumentParser:
    homes = ["none", "cpu", "nvme"]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--device", help="cuda, or simdev for the emulated one of the tests; by default, what torch sees"
    )
    parser.add_argument("--preset", choices=PRESETS, help="size of the decoder and the batch; options below change it")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--seq", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients; 0 for any")
    parser.add_argument("--offload-optimizer", choices=homes, default="cpu", help="of infinity and DeepSpeed")
    parser.add_argument("--offload-param", choices=homes, default="cpu", help="of infinity and DeepSpeed")
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="directory on a drive")
    parser.add_argument("--host-memory", default="auto", help="budget of infinity, for example 60GiB")
    parser.add_argument("--schedule", default="auto", help="tiering.update_schedule of infinity")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median counts")
    parser.add_argument("--profiled", type=int, default=2, help="steps under the profiler, after the timed ones")
    return parser


def worker_options(args: argparse.Namespace) -> list[str]:
    """The options of `arguments` as a worker's command line."""
    given = {name: getattr(args, name) for name in vars(arguments().parse_args([]))}
    return [f"--{name.replace('_', '-')}={value}" for name, value in sorted(given.items()) if value is not None]


# Model and data #


def shape_of(args: argparse.Namespace) -> Shape:
    found = PRESETS[args.preset or ("tiny" if args.device in ("simdev", "cpu") else "1.3b")]
    hidden = args.hidden or found.hidden
    if hidden != found.hidden:  # the proportions of Llama: heads of 128, an inner width of 8/3
        heads = max(1, hidden // 128)
        found = Shape(
            found.layers, hidden, -(-hidden * 8 // 3 // 64) * 64, heads, heads, found.vocab, found.seq, found.batch
        )
    own = {name: getattr(args, name) for name in ("layers", "seq", "batch") if getattr(args, name)}
    return Shape(**(asdict(found) | own))


def device_of(args: argparse.Namespace) -> torch.device:
    """Where this process computes."""
    if args.device == "simdev":
        from tests.device import simdev  # noqa: PLC0415  # it becomes the accelerator of the process

        simdev.load()
    chosen = torch.device(args.device) if args.device else torch.accelerator.current_accelerator()
    if chosen is None:
        sys.exit("no accelerator: torch sees none")
    return chosen


def decoder(args: argparse.Namespace, values_on: torch.device | None = None) -> Any:
    """The model in training mode with activation checkpoints; its parameters are on "meta" where no device is given."""
    shape = shape_of(args)
    config = LlamaConfig(  # type: ignore[call-arg]  # its stub has no attn_implementation
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=max(shape.seq, 4096),
        tie_word_embeddings=False,
        use_cache=False,
        # The emulated device has no fused attention.
        attn_implementation="eager" if args.device == "simdev" else "sdpa",
    )
    with construct_on_meta():
        model = LlamaForCausalLM(config)
    if values_on is not None:
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                values = torch.empty_like(param, dtype=torch.bfloat16, device=values_on)
                setattr(module, name, nn.Parameter(values))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(values_on))
            fill(module)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Initialise the parameters of one module by repeating one pattern: to draw 8 billion values takes minutes."""
    for param in module.parameters(recurse=False):
        if param.dim() == 1:  # a norm's
            param.fill_(1.0)
            continue
        for piece in param.view(-1).split(_PATTERN_NUMEL):
            piece.copy_(_pattern(param.device)[: piece.numel()])


@cache
def _pattern(device: torch.device) -> torch.Tensor:
    return (torch.randn(_PATTERN_NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02).to(device)


def token_ids(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    shape = shape_of(args)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, shape.vocab, (shape.batch, shape.seq), generator=generator).to(device)


def torch_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, ids: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """One step of a plain loop."""

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# Measurement #


def measure(
    system: str,
    args: argparse.Namespace,
    device: torch.device,
    params: int,
    init_s: float,
    step: Callable[[], torch.Tensor],
) -> None:
    """Time steps, profile others, and print one JSON line.

    Args:
        step: one whole step; returns the loss, which the loop reads as a training loop does.
    """
    shape = shape_of(args)
    took_s, losses = [], []
    for _ in range(args.warmup + args.steps):
        synchronize(device)
        start_s = time.perf_counter()
        losses.append(step().item())
        took_s.append(time.perf_counter() - start_s)
    tokens, step_s = shape.batch * shape.seq, statistics.median(took_s[args.warmup :])
    profile = profiled(device, step, args.profiled)
    row = {
        "system": system,
        "card": card_name(device),
        "params": params,
        "tokens": tokens,
        "step_s": step_s,
        "step_min_s": min(took_s[args.warmup :]),
        "step_max_s": max(took_s[args.warmup :]),
        "tokens_per_s": tokens / step_s,
        "tflop_per_s": 6 * params * tokens / step_s / 1e12,
        "init_s": init_s,
        "device_peak_bytes": peak_bytes(device),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
        "profile": None if profile is None else asdict(profile),
    }
    print("RESULT " + json.dumps(row), flush=True)


def profiled(device: torch.device, step: Callable[[], torch.Tensor], steps: int) -> StepProfile | None:
    """The profile of so many steps; None where torch's profiler sees nothing of this device."""
    activity = next((each for each in torch.profiler.supported_activities() if each.name == device.type.upper()), None)
    if activity is None or device.type == "cpu" or not steps:
        return None
    with torch.profiler.profile(activities=[activity]) as found:
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(steps):
            step().item()
        synchronize(device)
        wall_s = time.perf_counter() - start_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    records = records_of(events)
    return analyse(records, wall_s, steps) if any(each.kind is Kind.KERNEL for each in records) else None


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def peak_bytes(device: torch.device) -> int:
    module: Any = torch.get_device_module(device)
    return int(module.max_memory_allocated()) if hasattr(module, "max_memory_allocated") else 0


def card_name(device: torch.device) -> str:
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type
