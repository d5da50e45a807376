"""The step on a GPU that is not here: emulated kernels and link, the real drive and the real CPU optimizer.

    python benchmarks/emulated_gpu.py --path DIR [--regimes h200,4090] [--runs 3] [--json FILE] [--traces DIR]

The emulated device of the tests runs hollow kernels, which take their time and compute nothing, and copies without the
processor, as the engines of a real link do: the cores belong to the optimizer, the drive and the Python that launches.
A regime is a step of a Llama 8B on some machine: seconds of compute, link, optimizer and drive. Here a model of as many
layers and an eighth of the parameters stands for it, and a parameter takes eight times as long: on the device and on
the link because they are told to, in the optimizer because it sleeps behind each tile for as long as this machine is
faster (a large machine has other cores for it, too; here one is left to the threads that launch, as the library leaves
some there). So a step takes the seconds that it takes there, and Python, which
is not stretched, counts for as much here as there. Where this machine's optimizer is slower than that, everything is
stretched further; with a drive, which cannot be told to wait, everything is stretched by as much as that one is slower
than the regime's.

The floor of a step is its busiest engine: compute, each direction of the link, the optimizer, the drive. Printed are
the step, what each engine worked, the floor, the step over it, and how much of the step the device computes. Where
gradients are clipped, updates that wait for the norm work beside the forward pass alone. So the step over the least
that its schedule can take is printed, too:

    backward + max(forward, optimizer - ahead)

`ahead` is what the optimizer can do before the norm: no more than the undo log has room for, and no more than it can
compute during backward, at the rate of updates that fill the undo log; 0 where all updates wait. The room is printed,
as a share of the updates: with `host_memory` left out it depends on the memory that this machine has free. What updates
ahead do more than those in place is no part of the floor. Beside a step stands what the planner predicts of it, with
the same budget.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import infinity
import infinity.kernels
from benchmarks.disk import disk_bytes_per_s
from infinity.config import load_config
from infinity.kernels import Hyper, update_on_device
from infinity.memory.available import device_level
from infinity.optim import formats, pipeline
from infinity.planner import Duplex, Machine, Rates, Work, plan_training, predict_step
from infinity.planner.work import Pass, Product
from infinity.zero.foresight import Foresight
from infinity.zero.meta import construct_on_meta
from infinity.zero.updates import UpdateSchedule
from tests.device import simdev

GPU_PARAMS = 8.0e9  # of the model whose step a regime tells
LAYERS, WIDTH, VOCAB, SEQ, BATCH = 32, 1024, 65536, 256, 4  # units as those of a Llama 8B, an eighth of their size
FORWARD_SHARE = 1 / 4  # of what a micro-batch computes; backward computes it again and twice as much beside it
PROBE_FLOPS = 1e13
PROBE_STEPS = 7  # in the first of which nothing is updated, in the second memory is touched first
ASIDE_SHARE = 0.75  # of the optimizer's rate, where an update leaves what it replaces (measured: 0.72 to 0.82)
ENGINES = ("compute", "h2d", "d2h", "optimizer", "drive")


@dataclass(frozen=True)
class Regime:
    """A step of the large model on some machine.

    Attributes:
        compute_s: of one forward and backward pass over a micro-batch, recomputation included.
        link: bytes a second, each way.
        adam: parameters a second of the CPU optimizer.
        drive: bytes a second, read and written; 0 where nothing is on a drive, else what is stretched by.
        accumulation: micro-batches a step.
        host_share: budget of host memory, as a share of all states; 0 for what is useful.
        states: the optimizer's home.
        ratio: the share of the states that has it; the rest is on the device. None for what `fills` leaves there.
        fills: whether states come to the device after the first step. Parameters come and go, so that of all states the
            embedding's come, unless a `card` is given.
        card: bytes of the device's memory; parameters stay in it. 0 for one that has room for everything.
        schedule: of updates.
        clips: every step is taken for one whose gradients are clipped, so that no update stands that ran ahead.
        activations: checkpoints of so many bytes, for the large model, are kept in host memory; 0 to keep them there.
    """

    compute_s: float
    link: float
    adam: float
    drive: float = 0.0
    clip: float = 0.0
    accumulation: int = 1
    host_share: float = 0.0
    states: str = "cpu"
    ratio: float | None = None
    fills: bool | str = "auto"
    card: float = 0.0
    schedule: str = "auto"
    clips: bool = False
    activations: float = 0.0


H200: dict[str, Any] = {"link": 53e9, "adam": 9e9}
# Its optimizer is bound by 150 GB/s of host memory, 26 bytes a parameter.
H100: dict[str, Any] = {"link": 53e9, "adam": 150e9 / 26}
REGIMES = {
    "h200": Regime(1.2, **H200),
    "h200-all-on-host": Regime(1.2, fills=False, **H200),
    "h100-filled": Regime(1.2, card=80e9, **H100),
    "h100-filled-clip": Regime(1.2, card=80e9, clip=1.0, host_share=1.75, **H100),
    "h100-all-on-host": Regime(1.2, card=80e9, fills=False, **H100),
    "h200-clip": Regime(1.2, clip=1.0, schedule="deferred", **H200),
    "h200-clip-ahead": Regime(1.2, clip=1.0, host_share=1.75, **H200),  # of 8B 170 GB; which "auto" runs ahead
    "h200-clipping": Regime(1.2, clip=1.0, host_share=1.75, schedule="deferred", clips=True, **H200),
    "h200-clipping-ahead": Regime(1.2, clip=1.0, host_share=1.75, clips=True, **H200),
    "h200-tenth-on-device": Regime(1.2, ratio=0.9, **H200),
    "h200-tenth-on-device-clip": Regime(1.2, ratio=0.9, clip=1.0, **H200),
    "h200-8-micro-batches": Regime(1.2, accumulation=8, **H200),
    "h200-states-on-device": Regime(1.2, states="none", **H200),
    "4090": Regime(3.2, link=25e9, adam=3e9),
    "few-tokens": Regime(0.15, **H200),
    "h200-32k-activations": Regime(4.8, activations=8.6e9, **H200),  # 32 checkpoints of 32,768 tokens of 4,096 numbers
    "h200-nvme": Regime(1.2, drive=6e9, host_share=1 / 3, states="nvme", **H200),
    "h200-nvme-clip": Regime(1.2, drive=6e9, host_share=1 / 3, states="nvme", clip=1.0, schedule="deferred", **H200),
    "h200-nvme-clip-ahead": Regime(1.2, drive=6e9, host_share=1 / 3, states="nvme", clip=1.0, **H200),  # "auto"
    "h200-nvme-clipping": Regime(
        1.2, drive=6e9, host_share=1 / 3, states="nvme", clip=1.0, schedule="deferred", clips=True, **H200
    ),
    "h200-nvme-clipping-ahead": Regime(1.2, drive=6e9, host_share=1 / 3, states="nvme", clip=1.0, clips=True, **H200),
    "4090-nvme": Regime(3.2, link=25e9, adam=3e9, drive=6e9, host_share=1 / 3, states="nvme"),
    "4090-nvme-clip-ahead": Regime(3.2, link=25e9, adam=3e9, drive=6e9, host_share=1 / 3, states="nvme", clip=1.0),
}


class Block(nn.Module):
    """The matrices of a transformer block, without what a hollow kernel would not compute anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 4 * WIDTH)
        self.up = nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.attention(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x).float().square().mean()


# One training #


def config_of(regime: Regime, path: str, params: int) -> dict[str, Any]:
    on_drive, stays = regime.drive > 0, regime.states == "none" or regime.card > 0
    tiering: dict[str, Any] = {
        "nvme": [{"path": path}],
        "device_memory": "auto",
        "update_schedule": regime.schedule,
        "fill_device": regime.fills,
    }
    if regime.activations:
        kept = int(regime.activations * params / GPU_PARAMS)
        tiering |= {"activations": "cpu", "activation_memory": kept + (64 << 20)}
    if regime.host_share:
        tiering["host_memory"] = int(regime.host_share * 12 * params) + (96 << 20)
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": regime.accumulation,
        "gradient_clipping": regime.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme" if on_drive else "none" if stays else "cpu"},
            "offload_optimizer": {"device": regime.states, "ratio": "auto" if regime.ratio is None else regime.ratio},
        },
        "tiering": tiering,
    }


def touch(engine: infinity.Engine) -> None:
    """Have the memory be there that updates ahead of the norm leave in what they replace: on a virtual machine it comes
    slowly, and would take some steps' time."""
    arena = engine._runtime.pipeline.rollback.log.arena
    if free_bytes := arena.capacity_bytes - arena.used_bytes:
        with arena.lease(free_bytes) as all_of_it:
            all_of_it.tensor(torch.uint8).zero_()


def probe(regime: Regime, path: str) -> tuple[float, float]:
    """Seconds that the device computes for a micro-batch, and parameters a second of the optimizer where updates wait
    for the norm and leave nothing of what they overwrite."""
    compute_nothing()
    model, params = made()
    config = config_of(regime, path, params)
    config["tiering"] |= {"update_schedule": "deferred", "fill_device": False}
    computed, worked = [], []
    with infinity.initialize(model=model, config=config, device="simdev")[0] as engine:
        for _ in range(PROBE_STEPS):
            busy = simdev.busy()["compute"]
            step_of(engine, regime)
            torch.accelerator.synchronize()
            computed.append((simdev.busy()["compute"] - busy) / regime.accumulation)
            worked.append(engine.stats().optimizer_s)
    return statistics.median(computed), params / max(1e-9, statistics.median(worked[2:]))


def compute_nothing() -> None:
    """Make the device's kernels hollow, once the library has verified that its updates are right there."""
    simdev.configure(hollow=0)
    param, beside, first, second = (torch.zeros(8).to("simdev") for _ in range(4))
    for grad in (param.bfloat16(), param):  # of one micro-batch, and the sum of several
        update_on_device(
            Hyper(1e-4, 0.9, 0.999, 1e-8, 0.0, 1, decoupled=True),
            param.bfloat16(),
            grad,
            master=beside.to(torch.int16),
            first=first,
            second=second,
        )
    simdev.configure(hollow=1, copy=0, poison=0, flops=PROBE_FLOPS)


def made() -> tuple[Model, int]:
    torch.manual_seed(0)
    model = Model()
    return model, sum(param.numel() for param in model.parameters())


def step_of(engine: infinity.Engine, regime: Regime) -> None:
    seq = SEQ
    if regime.activations:  # so many that their checkpoints are as large beside the parameters as the large model's
        kept = regime.activations * sum(param.numel() for param in engine.module.parameters()) / GPU_PARAMS
        seq = round(kept / (LAYERS * BATCH * WIDTH * torch.bfloat16.itemsize))
    ids = torch.zeros(BATCH, seq, dtype=torch.long).to("simdev")
    for _ in range(regime.accumulation):
        engine.backward(engine(ids))
        engine.step()


def throttled(rate: float) -> Callable[..., Any]:
    """The optimizer's update of a run of elements, at no more than so many a second."""

    def update(
        layout: Any, param: torch.Tensor, states: Any, grad: Any, rule: Any, dither: Any, aside: Any, **options: Any
    ) -> Any:
        until_s = time.perf_counter() + param.numel() / (rate if aside is None else ASIDE_SHARE * rate)
        lost = formats.update(layout, param, states, grad, rule, dither, aside, **options)
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return lost

    return update


def clip_always() -> None:
    """Gradients of hollow kernels are zeros, which nobody clips."""
    after_step = Foresight.after_step
    Foresight.after_step = lambda self, *, quiet: after_step(self, quiet=False)  # type: ignore[method-assign]


def train(
    regime: Regime, path: str, steps: int, drive_rate: float, probed: tuple[float, float], trace: Path | None
) -> dict[str, Any]:
    """Steps of the small model; medians of those after two."""
    compute_nothing()
    probed_s, adam_rate = probed
    if regime.clips:
        clip_always()
    model, params = made()
    if regime.card:
        simdev.configure(capacity=regime.card * params / GPU_PARAMS)
    rows: list[dict[str, Any]] = []
    with infinity.initialize(model=model, config=config_of(regime, path, params), device="simdev")[0] as engine:
        touch(engine)
        for _ in range(2):
            step_of(engine, regime)
        torch.accelerator.synchronize()
        # How many times longer a parameter takes here: what cannot be told to wait decides.
        slower = regime.drive / drive_rate if regime.drive else GPU_PARAMS / params
        if regime.states != "none":
            slower = max(slower, regime.adam / adam_rate)
        compute_s = regime.compute_s * params / GPU_PARAMS * slower
        simdev.configure(
            flops=PROBE_FLOPS * probed_s / compute_s,
            h2d=regime.link / slower,
            d2h=regime.link / slower,
            launch_us=1,
            trace=float(trace is not None),
        )
        pipeline.update = throttled(regime.adam / slower)  # type: ignore[attr-defined]
        for _ in range(2 + steps):
            busy, start_s = simdev.busy(), time.perf_counter()
            step_of(engine, regime)
            wall_s = time.perf_counter() - start_s
            stats = engine.stats()
            if stats.skipped:
                raise RuntimeError("a hollow kernel has made a gradient that is not finite")
            moved = stats.tier_bytes
            drive_bytes = moved.get("nvme_read", 0) + moved.get("nvme_write", 0)
            engines = {name: now_s - busy[name] for name, now_s in simdev.busy().items()}
            engines |= {"optimizer": stats.optimizer_s, "drive": drive_bytes / drive_rate}
            rows.append({"step_s": wall_s, **engines, "stalls": stats.stall_s, "tier_bytes": moved})
        torch.accelerator.synchronize()
        share, room, budget = on_device(engine), undo_room(engine), engine._runtime.host.capacity_bytes
    if trace is not None:
        simdev.write_trace(trace)
    rows = rows[2:]
    engines = {name: statistics.median(row[name] for row in rows) for name in ENGINES}
    step_s = statistics.median(row["step_s"] for row in rows)
    in_place = engines | {"optimizer": min(engines["optimizer"], params * slower / regime.adam)}
    floor = max(in_place, key=in_place.__getitem__)
    floor_s = least_s = in_place[floor]
    if regime.clip:
        forward_s = engines["compute"] * FORWARD_SHARE / regime.accumulation
        backward_s = engines["compute"] / regime.accumulation - forward_s
        ahead_s = 0.0 if regime.clips else min(room * in_place["optimizer"], ASIDE_SHARE * backward_s)
        least_s = max(least_s, engines["compute"] - forward_s + max(forward_s, in_place["optimizer"] - ahead_s))
    return {
        "params": params,
        "stretched": slower,
        "states_on_device": share,
        "adam_rate": adam_rate,
        "step_s": step_s,
        "undo_room": room,
        "predicted_s": predicted(regime, path, slower, compute_s, drive_rate, budget),
        "busy_s": engines,
        "floor": floor,
        "floor_s": floor_s,
        "over_floor": step_s / floor_s,
        "over_schedule": step_s / least_s,
        "device_computes": engines["compute"] / step_s,
        "stall_s": rows[-1]["stalls"],
        "bytes_a_param": {route: nbytes / params for route, nbytes in rows[-1]["tier_bytes"].items()},
    }


def on_device(engine: infinity.Engine) -> float:
    """The share of the optimizer states that is on the device."""
    units, states = engine._runtime.partition.units, engine._runtime.states
    there = sum(unit.trainable_numel for unit in units if states.units[unit.index].are_on_device)
    return there / sum(unit.trainable_numel for unit in units)


def undo_room(engine: infinity.Engine) -> float:
    """The share of the updates in host memory that may run ahead of the norm at once: those whose old values are kept
    on the drive, and those that the undo log has room for."""
    runtime = engine._runtime
    if runtime.sizing.schedule is not UpdateSchedule.SPECULATIVE:
        return 0.0
    logged, unlogged, needed_bytes = 0, 0, 0
    for row in runtime.executor.units:
        if row.is_updated_on_device:
            continue
        tiles = runtime.states.units[row.index].tiles
        undo_bytes = sum(tile.nbytes for tile in tiles if tile.is_in_memory_alone)
        if row.params.is_in_memory_alone() and (undo_bytes or not row.is_reconstructable):
            undo_bytes += sum(tile.numel for tile in tiles) * row.params.spec.dtype.itemsize
        numel = runtime.partition.units[row.index].trainable_numel
        logged += numel if undo_bytes else 0
        unlogged += 0 if undo_bytes else numel
        needed_bytes += undo_bytes
    fits = min(1.0, runtime.pipeline.rollback.log.arena.capacity_bytes / max(1, needed_bytes))
    return (unlogged + fits * logged) / max(1, unlogged + logged)


def predicted(regime: Regime, path: str, slower: float, compute_s: float, drive_rate: float, host_bytes: int) -> float:
    """Seconds of a step as `infinity plan` would say it of such a machine.

    It takes updates that run ahead for confirmed. Where all are clipped none run ahead, which is `deferred`.

    Args:
        host_bytes: the engine's budget.
    """
    if regime.clips:
        regime = replace(regime, schedule="deferred")
    with construct_on_meta():
        model, params = made()
    device_bytes = device_level(torch.device("simdev")).total_bytes
    told, machine = config_of(regime, path, params), Machine(device_bytes=device_bytes)
    least_bytes = plan_training(model, load_config(told), machine).needs.least_bytes  # values pass through at first
    told["tiering"]["host_memory"] = max(host_bytes, least_bytes)
    config = load_config(told)
    plan = plan_training(model, config, machine)
    forward, backward = (Pass({Product("nt", 1): compute_s * share}) for share in (FORWARD_SHARE, 1 - FORWARD_SHARE))
    link = regime.link / slower
    rates = Rates(
        {"nt": ((1, 1.0),)},  # a product of one operation a second
        optimizer_params_per_s=regime.adam / slower,
        disk=Duplex(*(drive_rate,) * 3) if regime.drive else None,
        link=Duplex(link, link, 2 * link),
    )
    logits = BATCH * SEQ * VOCAB * 10  # bytes, in bfloat16 and float32, and their gradient
    work = Work(BATCH * SEQ, forward, backward, 0, 0, logits)
    return predict_step(plan, config, work, rates).seconds


def in_process(name: str, args: argparse.Namespace, drive: float, trace: Path | None) -> dict[str, Any]:
    """A training in a process of its own, and before it the probe: the device keeps what it was told, and where its
    memory is used again, what hollow kernels leave in it are old values, which may be of any size."""
    told: Any = None
    for more in ([], ["--probed", "{}"]):
        command = [sys.executable, __file__, "--path", str(args.path), "--steps", str(args.steps), "--worker", name]
        command += ["--drive-rate", str(drive), *(["--traces", str(trace)] if trace is not None else [])]
        command += [part.format(json.dumps(told)) for part in more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            return {"failed": last[0] if last else f"exit code {done.returncode}"}
        told = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on a drive")
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--runs", type=int, default=3, help="trainings a regime, in turn; the median is printed")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--traces", type=Path, help="directory for a Chrome trace of each regime's last training")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--probed", help=argparse.SUPPRESS)
    parser.add_argument("--drive-rate", type=float, help="bytes a second; measured by default")
    args = parser.parse_args()
    if args.worker:
        infinity.kernels.set_threads(max(1, (os.cpu_count() or 2) - 1))
        with tempfile.TemporaryDirectory(dir=args.path) as path:
            regime = REGIMES[args.worker]
            if args.probed is None:
                told: Any = probe(regime, path)
            else:
                told = train(regime, path, args.steps, args.drive_rate, json.loads(args.probed), args.traces)
        print(json.dumps(told))
        return
    problem = simdev.problem()
    if problem is not None:
        sys.exit(problem)
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    drive = args.drive_rate or disk_bytes_per_s(args.path, runtime_s=0.0, size=1 << 30)
    print(f"the drive: {drive / 1e9:.2f} GB/s, reading and writing", flush=True)
    names = args.regimes.split(",")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for run in range(args.runs):
        for name in names:
            trace = args.traces / f"{name}.json" if args.traces is not None and run == args.runs - 1 else None
            row = in_process(name, args, drive, trace)
            results[name].append(row)
            if "failed" in row:
                print(f"{name:24} failed: {row['failed']}", flush=True)
                continue
            print(
                f"{name:24} {row['step_s']:7.3f} s (predicted {row['predicted_s']:.3f})  "
                f"floor {row['floor_s']:7.3f} s ({row['floor']})  "
                f"{row['over_floor']:.2f}  over its schedule {row['over_schedule']:.2f}  "
                f"computes {row['device_computes']:4.0%}  has {row['states_on_device']:4.0%} of the states  "
                f"room ahead {row['undo_room']:4.0%}  "
                f"{row['bytes_a_param']}",
                flush=True,
            )
    if args.json:
        table = {
            name: {"regime": asdict(REGIMES[name]), "runs": rows, "over_floor": _median(rows)}
            for name, rows in results.items()
        }
        args.json.write_text(json.dumps({"drive_bytes_per_s": drive, "regimes": table}, indent=2) + "\n")


def _median(rows: list[dict[str, Any]]) -> float | None:
    ratios = [row["over_floor"] for row in rows if "failed" not in row]
    return statistics.median(ratios) if ratios else None


if __name__ == "__main__":
    main()
