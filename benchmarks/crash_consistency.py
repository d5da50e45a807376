"""Steps that outlive the process: kills at any moment, and what keeping every step costs.

    python benchmarks/crash_consistency.py kills --path DIR [--kills 200] [--json FILE]
    python benchmarks/crash_consistency.py cost --path DIR [--rounds 6] [--json FILE]

The claims. After SIGKILL at any moment, a run with `tiering.crash_consistent` goes on from the step that its record
names, with the bits of a run that was never stopped, and loses no step that was committed. With all states on NVMe,
keeping every step costs less than 5% of a step, and twice the space.

`kills`: processes train one after the other, each from where the one before was killed: half of them at a random time,
half at a random system call that makes something durable (flush, rename, removal), before or after it. They are forked
from one that has imported everything. Losses and, at the end of a run, weights are held against an uninterrupted run.

`cost`: two engines of the same model (GPT-2 of 355M parameters) in one process, with the key and without, take blocks
of steps in turn; a block ends when all is written (and committed).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import infinity
import infinity.setup  # before the children are forked
from infinity.tiers.run_files import kept_files, read_record

STEPS = 24  # of a run
VOCAB, SEQ, BATCH = 128, 32, 2
DURABLE_CALLS = ("fsync", "fdatasync", "rename", "unlink")
# What differs between the placements: where states live, and when updates run.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on NVMe, updates in backward": {"host_memory": "900KiB"},
    "all on NVMe, clipping, updates deferred": {"host_memory": "1200KiB", "clip": 0.5},
    "all on NVMe, updates ahead of the norm": {"host_memory": "1200KiB", "clip": 1e3},
    "all on NVMe, updates ahead, some undone": {"host_memory": "1200KiB", "clip": 2.3},
    "tiles in host memory, written through, updates ahead": {"host_memory": "64MiB", "clip": 1e3},
    "parameters in memory, stage 1": {"params": "none", "stage": 1},
    "fp16, two micro-batches, updates ahead": {"fp16": True, "accumulation": 2, "clip": 1e3},
}


# Kills #


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=3, n_embd=64, n_head=4, vocab_size=VOCAB, n_positions=SEQ, bos_token_id=0, eos_token_id=0
        )  # with dropout, so that random states count
    )


def small_config(path: Path, placement: dict[str, Any], *, keeps: bool) -> dict[str, Any]:
    fp16 = placement.get("fp16", False)
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": placement.get("accumulation", 1),
        "gradient_clipping": placement.get("clip", 0.0),
        "bf16": {"enabled": not fp16},
        "fp16": {"enabled": fp16, "initial_scale_power": 24, "loss_scale_window": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 12}},
        "zero_optimization": {
            "stage": placement.get("stage", 3),
            "stage3_param_persistence_threshold": 1000,
            "offload_param": {"device": placement.get("params", "nvme")},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {
            "nvme": [{"path": str(path)}],
            "tile_size": "64KiB",
            "host_memory": placement.get("host_memory", "auto"),
            "crash_consistent": keeps,
        },
    }


def samples(first: int, count: int) -> torch.Tensor:
    """Arithmetic progressions, by number."""
    numbers = torch.arange(first, first + count).unsqueeze(1)
    return (numbers * 37 % VOCAB + (1 + numbers % 3) * torch.arange(SEQ)) % VOCAB


def train(path: Path, placement: dict[str, Any], say: Callable[..., None], *, keeps: bool) -> None:
    """Train to the end of a run, from the last step that is on the drive."""
    engine, *_ = infinity.initialize(model=small_model(), config=small_config(path, placement, keeps=keeps))
    position = {"sample": 0}
    if keeps:
        engine.keep_with_steps(lambda: dict(position))
        _, state = engine.resume()
        position.update(state or {})
    say(resumed=engine.global_steps)

    def micro_batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            ids = samples(position["sample"], BATCH)
            position["sample"] += BATCH
            yield {"input_ids": ids, "labels": ids}

    while engine.global_steps < STEPS:
        loss = engine.train_batch(micro_batches())
        say(step=engine.global_steps, loss=loss.item(), skipped=engine.skipped_steps)
    weights = 0
    for _, values in engine.named_parameters():
        weights = zlib.crc32(values.contiguous().view(torch.uint8).numpy().tobytes(), weights)
    if keeps:
        engine.end_run()
    engine.close()
    say(weights=weights)


def die_at(call: int, *, after: bool) -> None:
    """Have this process killed at its `call`-th system call that makes something durable."""
    left = [call]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    for name in DURABLE_CALLS:
        setattr(os, name, wrap(getattr(os, name)))


class Child:
    """A forked process that trains and says what it has done."""

    def __init__(self, body: Callable[[Callable[..., None]], None]) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            code = 1

            def tell(**facts: Any) -> None:
                os.write(writer, (json.dumps(facts) + "\n").encode())

            try:
                body(tell)
                code = 0
            except BaseException as error:
                traceback.print_exc()
                os.write(writer, (json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n").encode())
            finally:
                os._exit(code)
        os.close(writer)
        self._reader = reader

    def kill_after(self, seconds: float) -> None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def facts(self) -> tuple[list[dict[str, Any]], bool]:
        """All that it has said, and whether it was killed."""
        with os.fdopen(self._reader) as stream:
            said = [json.loads(line) for line in stream if line.endswith("\n")]
        _, status = os.waitpid(self.pid, 0)
        return said, os.WIFSIGNALED(status)


def recorded_step(path: Path) -> int:
    """The step to go on from; 0 without one, while the first commit was under way, or if the run has ended."""
    files = kept_files(path)
    records = [file for file in files if file.is_record]
    generations = read_record(records[0].path).generations if records else []
    if not generations or all(file.path.suffix != ".slots" for file in files):
        return 0
    return int(generations[0].state["counters"]["global_steps"])


def kills(args: argparse.Namespace) -> dict[str, Any]:
    """Kill and go on until there were enough kills; raises SystemExit at the first wrong number."""
    rng = random.Random(args.seed)
    names = [name for name in PLACEMENTS if args.only in name]
    killed: Counter[str] = Counter()
    lost: Counter[int] = Counter()
    moments: Counter[str] = Counter()
    runs = 0
    whole_s = 0.0
    start_s = time.perf_counter()
    while sum(killed.values()) < args.kills:
        name = names[runs % len(names)]
        placement = PLACEMENTS[name]
        runs += 1
        path = args.path / f"run-{runs}"
        path.mkdir()
        reference_start_s = time.perf_counter()
        said, _ = Child(lambda say: train(path, placement, say, keeps=False)).facts()  # noqa: B023 (called now)
        whole_s = time.perf_counter() - reference_start_s
        expected = {fact["step"]: fact for fact in said if "step" in fact}
        weights = said[-1].get("weights")
        if weights is None:
            raise SystemExit(f"{name}: the uninterrupted run failed: {said[-1:]}")
        ended = False
        while not ended:
            step = recorded_step(path)
            at_call = rng.random() < 0.5
            call, after = rng.randrange(1, 60), rng.random() < 0.5
            delay_s = rng.uniform(0.0, 0.6 * whole_s)

            def body(say: Callable[..., None]) -> None:
                if at_call:  # noqa: B023 (called now)
                    die_at(call, after=after)  # noqa: B023 (called now)
                train(path, placement, say, keeps=True)  # noqa: B023 (called now)

            child = Child(body)
            if not at_call:
                child.kill_after(delay_s)
            said, was_killed = child.facts()
            errors = [fact for fact in said if "error" in fact]
            if errors or (not was_killed and "weights" not in said[-1]):
                raise SystemExit(f"{name}: refused or failed after a kill: {said[-3:]}")
            for fact in said:
                if "resumed" in fact and fact["resumed"] != step:
                    raise SystemExit(f"{name}: went on from step {fact['resumed']}, the record has {step}")
                if "step" in fact and fact != expected[fact["step"]]:
                    raise SystemExit(f"{name}: {fact} where it was {expected[fact['step']]}")
                if "weights" in fact and fact["weights"] != weights:
                    raise SystemExit(f"{name}: other weights at the end")
            ended = not was_killed
            if was_killed:
                killed[name] += 1
                steps = [fact["step"] for fact in said if "step" in fact]
                ended = STEPS in steps  # all of it is trained, and it may have said so
                moments["at a durable call" if at_call else "at a random time"] += 1
                moments["before the first step" if not steps else "in or between steps"] += 1
                if recorded_step(path) < step and not ended:
                    raise SystemExit(f"{name}: step {step} was committed and is gone")
                if steps and not ended:
                    lost[steps[-1] - recorded_step(path)] += 1
            if sum(killed.values()) % 20 == 0:
                print(f"{sum(killed.values())} kills, {runs} runs", file=sys.stderr, flush=True)
        # A start that was killed while it made a swap file leaves that, for a minute or until a later start.
        found = [file.name for file in path.iterdir() if file.suffix != ".new"]
        if found and not was_killed:
            raise SystemExit(f"{name}: the run has ended and left {found}")
        shutil.rmtree(path)
    return {
        "kills": sum(killed.values()),
        "runs": runs,
        "by_placement": dict(killed),
        "moments": dict(moments),
        "steps_over_but_not_committed": {str(steps): count for steps, count in sorted(lost.items())},
        "seconds": time.perf_counter() - start_s,
    }


# Cost #


def large_engine(args: argparse.Namespace, path: Path, host_memory: str, *, keeps: bool) -> infinity.Engine:
    torch.manual_seed(0)
    width = {"n_embd": args.width, "n_head": args.width // 64}
    config = GPT2Config(n_layer=args.layers, **width, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return infinity.initialize(
        model=GPT2LMHeadModel(config),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": args.clip,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "nvme"},
            },
            "tiering": {"nvme": [{"path": str(path)}], "host_memory": host_memory, "crash_consistent": keeps},
        },
    )[0]


def block(engine: infinity.Engine, ids: torch.Tensor, steps: int) -> tuple[float, float, float]:
    """Seconds, and bytes read and written, of a step."""
    start_s = time.perf_counter()
    moved = [0, 0]
    for _ in range(steps):
        engine.train_batch([{"input_ids": ids, "labels": ids}])
        for index, name in enumerate(("nvme_read", "nvme_write")):
            moved[index] += engine.stats().tier_bytes.get(name, 0)
    engine.synchronize()
    return (time.perf_counter() - start_s) / steps, moved[0] / steps, moved[1] / steps


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Blocks of steps in turn, for each host memory."""
    ids = torch.randint(0, GPT2Config().vocab_size, (1, args.seq), generator=torch.Generator().manual_seed(1))
    rows = []
    for host_memory in args.host_memory:
        engines = {}
        for keeps in (False, True):
            path = args.path / f"cost-{keeps}"
            path.mkdir(exist_ok=True)
            engines[keeps] = large_engine(args, path, host_memory, keeps=keeps)
        results: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for index in range(args.warmup + args.rounds):
            for keeps in (False, True) if index % 2 else (True, False):
                result = block(engines[keeps], ids, args.block)
                if index >= args.warmup:
                    results[keeps].append(result)
        ratios = [kept[0] / plain[0] for kept, plain in zip(results[True], results[False], strict=True)]
        params = sum(p.numel() for p in engines[False].module.parameters())
        row: dict[str, Any] = {"host_memory": host_memory, "params": params, "tokens": args.seq}
        for keeps, label in ((False, "plain"), (True, "kept")):
            seconds, read, written = (statistics.median(column) for column in zip(*results[keeps], strict=True))
            row |= {
                f"{label}_step_s": seconds,
                f"{label}_step_min_s": min(result[0] for result in results[keeps]),
                f"{label}_read_bytes_per_param": read / params,
                f"{label}_write_bytes_per_param": written / params,
                f"{label}_nvme_bytes": engines[keeps].stats().peak_bytes["nvme"],
            }
        row |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        row["ratio_of_sums"] = sum(r[0] for r in results[True]) / sum(r[0] for r in results[False])
        engines[True].end_run()
        for engine in engines.values():
            engine.close()
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return {"rows": rows, "rounds": args.rounds, "block_steps": args.block, "clip": args.clip}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "cost"])
    parser.add_argument("--path", type=Path, required=True, help="directory on a drive")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--only", default="", help="placements with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--block", type=int, default=3, help="steps in a block")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--host-memory", nargs="+", default=["360MiB", "1GiB", "6GiB"])
    args = parser.parse_args()
    args.path.mkdir(parents=True, exist_ok=True)
    facts = {"kills": kills, "cost": cost}[args.what](args)
    print(json.dumps(facts))
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
