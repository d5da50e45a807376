"""Claim: with bf16 moments training ends within 0.5%, with int8 moments within 1% of the loss that exact ones reach.

A small GPT-2 learns the Python standard library's source, byte by byte, from scratch: same weights, same batches, same
learning rate for every format. Floor: `fp32`, computed in float32. A contrast that no one should use, `bf16 nearest`,
rounds bfloat16 moments to nearest.

    python benchmarks/state_formats.py --steps 500 --json curves.json --plot curves.svg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from infinity.kernels import Dither, Hyper, set_threads
from infinity.optim import formats

NEAREST = "bf16 nearest"
VOCABULARY, BATCH, LENGTH = 256, 16, 128
PEAK_LR, WARM_UP = 1e-3, 50
TAIL = 50  # steps at the end whose mean loss is compared


def read_text(limit: int = 20_000_000) -> torch.Tensor:
    """Bytes of the standard library's modules."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int) -> torch.Tensor:
    """The same samples for every format."""
    starts = torch.randint(0, text.numel() - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(LENGTH)].long()


def make_model(layers: int, width: int) -> GPT2LMHeadModel:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "n_layer": layers,
        "n_embd": width,
        "n_head": width // 64,
        "n_positions": LENGTH,
        "vocab_size": VOCABULARY,
    }
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    )


class FlatTrainer:
    """A model whose parameters are views of one flat tensor that the kernels update."""

    def __init__(self, model: GPT2LMHeadModel, format_name: str, steps: int) -> None:
        self.nearest = format_name == NEAREST
        self.layout = formats.state_layout("split" if self.nearest else format_name)
        self.steps = steps
        master = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.model = model.to(dtype=self.layout.param_dtype)  # type: ignore[call-arg]
        numel = master.numel()
        self.param = torch.empty(numel, dtype=self.layout.param_dtype)
        self.states = {f.name: torch.empty(f.length(numel), dtype=f.dtype) for f in self.layout.fields}
        formats.init_states(self.layout, master, self.param, self.states)
        offset = 0
        for parameter in model.parameters():
            parameter.data = self.param[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()

    def step(self, number: int, samples: torch.Tensor) -> float:
        loss = self.model(input_ids=samples, labels=samples).loss
        loss.backward()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([grad.float().norm() for grad in grads]))
        progress = max(0.0, (number - WARM_UP) / max(1, self.steps - WARM_UP))
        lr = PEAK_LR * min(number / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * progress))
        clip = min(1.0, 1.0 / float(norm))
        hyper = Hyper(lr, 0.9, 0.999, 1e-8, 0.1, number, decoupled=True, grad_scale=clip)
        grad = torch.cat([g.flatten() for g in grads])
        formats.update(self.layout, self.param, self.states, grad, hyper, Dither(seed=number))
        if self.nearest:
            for name in ("exp_avg", "exp_avg_sq"):
                self.states[name].copy_(self.states[name].bfloat16())
        self.model.zero_grad()
        return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["fp32", "split", "bf16", "int8", NEAREST])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the curves here")
    parser.add_argument("--plot", type=Path, help="draw the curves here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_threads(args.threads)
    text = read_text()
    curves: dict[str, list[float]] = {}
    for name in args.formats:
        trainer = FlatTrainer(make_model(args.layers, args.width), name, args.steps)
        start_s = time.perf_counter()
        curves[name] = []
        for step in range(1, args.steps + 1):
            curves[name].append(trainer.step(step, batch(text, step)))
            if step % 50 == 0:
                rate = (time.perf_counter() - start_s) / step
                print(f"{name} step {step} loss {curves[name][-1]:.4f} {rate:.2f} s/step", file=sys.stderr, flush=True)
    report(curves, trainer.param.numel(), args.json)
    if args.plot:
        plot(curves, args.plot)


def report(curves: dict[str, list[float]], params: int, path: Path | None) -> None:
    """Print final losses beside the first format's."""
    final = {name: sum(losses[-TAIL:]) / len(losses[-TAIL:]) for name, losses in curves.items()}
    floor = next(iter(final.values()))
    print(f"{params:,} parameters; mean loss of the last {TAIL} steps")
    for name, loss in final.items():
        print(f"  {name:<14} {loss:.4f}  {100 * (loss / floor - 1):+.2f}%")
    if path:
        rounded = {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()}
        path.write_text(json.dumps({"params": params, "final": final, "curves": rounded}) + "\n")


def plot(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib import pyplot  # noqa: PLC0415  (optional)

    figure, (whole, tail) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, losses in curves.items():
        smooth = [sum(losses[max(0, i - 19) : i + 1]) / len(losses[max(0, i - 19) : i + 1]) for i in range(len(losses))]
        whole.plot(smooth, label=name)
        tail.plot(range(len(losses) * 3 // 5, len(losses)), smooth[len(losses) * 3 // 5 :])
    whole.set_xlabel("step")
    whole.set_ylabel("loss, mean of 20 steps")
    tail.set_xlabel("step (detail)")
    whole.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
