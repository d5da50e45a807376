"""Random combinations of what a configuration can say, each held bit for bit against the same training in memory.

    python benchmarks/combinations.py --count 500 [--ranks 2] [--device simdev] [--json]

The claim: what is not refused by name trains as in memory under the schedule `barrier`, with the same losses, norms and
weights after every step. Each combination is the one of many random ones whose pairs of values have been tried least,
so that all pairs come early. One that differs or fails is reduced: every choice that does not matter is set to the
plain one. There is no floor: it counts, and does not time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.checkpoint.inspection import export_weights
from infinity.integrations import pretrained_model
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import batches, loss_of, named_budget, tiny_llama

STEPS, LR = 3, 1e-3
CANDIDATES = 40

# The plain choice comes first.
AXES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "split", "bf16", "int8", "fp16", "autocast"),
    "stage": (0, 1, 2, 3),
    "optimizer": ("none", "cpu", "nvme"),
    "params": ("none", "cpu", "nvme"),
    "schedule": ("barrier", "auto", "backward", "deferred", "speculative"),
    "accumulation": (1, 2),
    "order": ("micro_batch", "layer"),
    "clipping": (0.0, 0.3),
    "crash_consistent": (False, True),
    "saves": (False, True),
    "groups": (False, True),
    "activations": ("none", "cpu", "nvme"),
    "compile": (False, True),
    "cut": (False, True),
    "leaf": (False, True),
    "lora": ("none", "loaded", "in_place"),
    "budget": ("auto", "least"),
}
# What changes numbers, so that the reference has it, too. Over several ranks shards do, by the last digit of the norm,
# and so does whether micro-batches are added up before the ranks are. Moments are rounded with random bits that depend
# on the unit.
OF_REFERENCE = ("precision", "accumulation", "clipping", "compile", "lora")
OF_RANKS = ("stage", "groups", "cut", "leaf", "order")
OF_ROUNDING = ("cut", "leaf")
ROUNDED = ("bf16", "int8")
Combination = dict[str, Any]


def config_of(chosen: Combination, path: Path) -> dict[str, Any]:
    """The configuration, without a budget."""
    zero: dict[str, Any] = {"stage": chosen["stage"], "stage3_param_persistence_threshold": 1000}
    if chosen["leaf"]:
        zero["leaf_module"] = {"classes": ["LlamaMLP"]}
    for name in ("optimizer", "params"):
        if chosen[name] != "none":
            zero["offload_optimizer" if name == "optimizer" else "offload_param"] = {"device": chosen[name]}
    precision = chosen["precision"]
    tiering: dict[str, Any] = {
        "tile_size": "16KiB",
        "status": False,
        "update_schedule": chosen["schedule"],
        "accumulation": chosen["order"],
        "activations": chosen["activations"],
        "crash_consistent": chosen["crash_consistent"],
    }
    if "nvme" in (chosen["optimizer"], chosen["params"], chosen["activations"]):
        tiering["nvme"] = [{"path": str(path)}]
    if chosen["cut"]:
        tiering["max_unit_size"] = "24KiB"
    if precision in ("split", "bf16", "int8"):
        tiering["state_format"] = precision
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": chosen["accumulation"],
        "gradient_clipping": chosen["clipping"],
        "bf16": {"enabled": precision in ("split", "bf16", "int8")},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
        "torch_autocast": {"enabled": precision == "autocast", "dtype": "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": zero,
        "communication": {"shard_size": 1} if chosen["groups"] else {},
        "tiering": tiering,
    }


def can_be(chosen: Combination, ranks: int, device: str) -> bool:
    """It is none of those that everybody knows to be refused, which would only take time.

    Nor is it one with an autocast on the emulated device, which has none.
    """
    return not (
        (chosen["params"] != "none" and chosen["stage"] < 3)
        or (chosen["optimizer"] != "none" and chosen["stage"] < 1)
        or (chosen["schedule"] == "backward" and (chosen["clipping"] or chosen["precision"] == "fp16"))
        or (chosen["order"] == "layer" and (chosen["accumulation"] == 1 or chosen["compile"]))
        or (chosen["groups"] and ranks == 1)
        or (chosen["crash_consistent"] and chosen["optimizer"] != "nvme")
        or (chosen["lora"] == "in_place" and chosen["params"] != "nvme")
        or (chosen["precision"] == "autocast" and (device != "cpu" or chosen["order"] == "layer"))
    )


def combinations(ranks: int, device: str, seed: int) -> Iterator[Combination]:
    """Without end; pairs that are rare so far come first."""
    chance, seen = random.Random(seed), Counter[tuple[Any, ...]]()
    while True:
        drawn = ({name: chance.choice(values) for name, values in AXES.items()} for _ in itertools.count())
        candidates = itertools.islice((each for each in drawn if can_be(each, ranks, device)), CANDIDATES)
        best = max(candidates, key=lambda each: sum(1 / (1 + seen[pair]) for pair in _pairs(each)))
        seen.update(_pairs(best))
        yield best


def _pairs(chosen: Combination) -> list[tuple[Any, ...]]:
    return [(*left, *right) for left, right in itertools.combinations(chosen.items(), 2)]


# One training #


def _model(chosen: Combination, base: Path) -> tuple[nn.Module, Any]:
    """The model, and the weights that `initialize` reads, if it is to."""
    weights = None
    if chosen["lora"] == "none":
        model = tiny_llama()
    else:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # of an extra, and slow to import

        where = base / ("half" if chosen["precision"] in ("split", "bf16", "int8") else "full")
        model, weights = pretrained_model(where, in_place=chosen["lora"] == "in_place")
        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
        )
    # Of operators that every device has.
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    if chosen["compile"]:
        for layer in next(each for each in model.modules() if isinstance(each, nn.ModuleList)):
            layer.compile(backend="eager")
    return model, weights


def _engine(chosen: Combination, base: Path, path: Path, device: str) -> infinity.Engine:
    config = config_of(chosen, path)

    def made(host_memory: int | None) -> infinity.Engine:
        model, weights = _model(chosen, base)
        tiering = config["tiering"] | ({} if host_memory is None else {"host_memory": host_memory})
        given: dict[str, Any] = {} if weights is None else {"weights": weights}
        if device == "simdev" and dist.is_initialized():
            given["process_group"] = _staged()
        return infinity.initialize(model=model, config=config | {"tiering": tiering}, device=device, **given)[0]

    if chosen["budget"] == "least":
        try:
            made(1).close()
        except infinity.CapacityError as refusal:
            return made(named_budget(refusal))
    return made(None)


@functools.cache
def _staged() -> dist.ProcessGroup:
    """The ranks, for tensors on the emulated device."""
    from tests.device.staged_group import staged_group  # noqa: PLC0415  # needs the device

    return staged_group()


Trace = list[dict[str, Any]]  # by step: losses, norm and weights


def trained(chosen: Combination, base: Path, path: Path, device: str) -> Trace:
    """What a training gives, step by step; a crash-consistent one is left after the first and gone on from."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = batches(STEPS * chosen["accumulation"] * ranks)[rank::ranks]
    engine = _engine(chosen, base, path, device)
    trace: Trace = []
    try:
        for step in range(STEPS):
            if step == 1 and chosen["crash_consistent"]:
                engine.close()
                engine = _engine(chosen, base, path, device)
                engine.resume()
            mine = data[step * chosen["accumulation"] : (step + 1) * chosen["accumulation"]]
            mine = [ids.to(engine.device) for ids in mine]
            loss = _step(engine, chosen, mine)
            weights = {name: values.cpu() for name, values in engine.named_parameters()}
            trace.append({"loss": loss, "norm": engine.get_global_grad_norm(), "weights": weights})
            if step == 1 and chosen["saves"]:
                engine.save_checkpoint(path / "saved", blocking=False)
        if chosen["saves"]:
            engine.wait_checkpoint()
            trace[1]["saved"] = True
        if chosen["crash_consistent"]:
            engine.end_run()
    finally:
        engine.close()
    if chosen["saves"] and rank == 0:
        _check_saved(path, trace[1]["weights"])
    return trace


def _step(engine: infinity.Engine, chosen: Combination, data: Sequence[torch.Tensor]) -> float:
    if chosen["accumulation"] > 1:
        given = [{"input_ids": ids, "labels": ids} for ids in data]
        return engine.train_batch(iter(given)).item()
    loss = loss_of(engine, data[0])
    engine.backward(loss)
    engine.step()
    return loss.item()


def _check_saved(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """The checkpoint has masters of the weights that the training had after the step that it was saved after."""
    from safetensors.torch import load_file  # noqa: PLC0415

    export_weights(path / "saved", path / "exported", dtype=torch.float32)
    saved = {
        name: value for file in (path / "exported").glob("*.safetensors") for name, value in load_file(file).items()
    }
    for name, values in expected.items():
        eps = 0.0 if values.dtype is torch.float32 else torch.finfo(values.dtype).eps
        # fp16 has few numbers below 1e-7.
        if not torch.allclose(saved[name], values.float(), rtol=eps, atol=1e-7 if eps else 0.0):
            raise AssertionError(f"the checkpoint has another {name}")


def difference(ours: Trace, known: Trace, *, norms: float) -> str:
    """The first thing that differs; nothing if all is the same.

    Args:
        norms: by how much norms may differ, relative to their size.
    """
    for step, (one, other) in enumerate(zip(ours, known, strict=True)):
        for what, most in (("loss", 0.0), ("norm", norms)):
            both_nan = one[what] != one[what] and other[what] != other[what]
            if not both_nan and not math.isclose(one[what], other[what], rel_tol=most):
                return f"{what} of step {step}: {one[what]!r}, in memory {other[what]!r}"
        for name, values in other["weights"].items():
            if not torch.equal(one["weights"][name], values):
                off = (one["weights"][name].float() - values.float()).abs().max().item()
                return f"{name} after step {step} is off by {off:.1e}"
    return ""


# All of them #


class Tries:
    """Tries combinations on the ranks that there are; all ranks try the same ones together."""

    def __init__(self, base: Path, path: Path, device: str) -> None:
        self._base, self._path, self._device = base, path, device
        self._known: dict[tuple[Any, ...], Trace] = {}
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1

    def outcome(self, chosen: Combination) -> tuple[str, str]:
        """`same`, `refused`, `different` or `raised`, and what is to be said of it."""
        with self._place() as place:
            try:
                ours = trained(chosen, self._base, place, self._device)
                # A sum over micro-batches is measured on the device or the host, which add up in orders of their own.
                norms = 0.0 if self._device == "cpu" else 1e-15
                found = difference(ours, self._reference(chosen), norms=norms)
            except infinity.InfinityError as error:
                return "refused", f"{type(error).__name__}: {error}"
            except Exception as error:  # whatever it is, it is what is looked for
                return "raised", f"{type(error).__name__}: {error}"
        gc.collect()
        return ("different", found) if found else ("same", "")

    def reduced(self, chosen: Combination, outcome: str) -> Combination:
        """The same with as many plain choices as leave the outcome."""
        for name, values in AXES.items():
            plainer = chosen | {name: values[0]}
            if plainer != chosen and can_be(plainer, self._ranks, self._device) and self.outcome(plainer)[0] == outcome:
                chosen = plainer
        return chosen

    def _reference(self, chosen: Combination) -> Trace:
        rounds = chosen["precision"] in ROUNDED
        names = OF_REFERENCE + (OF_RANKS if self._ranks > 1 else ()) + (OF_ROUNDING if rounds else ())
        plain = {name: values[0] for name, values in AXES.items()}
        plain |= {name: chosen[name] for name in names}
        if plain["lora"] == "in_place" and rounds:
            plain |= {"stage": 3, "params": "nvme"}
        elif plain["lora"] == "in_place":
            plain["lora"] = "loaded"
        key = tuple(plain.values())
        if key not in self._known:
            with self._place() as place:
                self._known[key] = trained(plain, self._base, place, self._device)
        return self._known[key]

    @contextmanager
    def _place(self) -> Iterator[Path]:
        """A directory for one training, the same on all ranks."""
        first = not dist.is_initialized() or dist.get_rank() == 0
        with tempfile.TemporaryDirectory(dir=self._path) if first else nullcontext("") as name:
            names: list[Any] = [name]
            if dist.is_initialized():
                dist.broadcast_object_list(names)
            try:
                yield Path(names[0])
            finally:
                if dist.is_initialized():
                    dist.barrier()


def run(count: int, seed: int, device: str, base: Path, path: Path) -> dict[str, Any]:
    """Try so many; on every rank, if there are several."""
    torch.set_num_threads(1)
    if device == "simdev":
        from tests.device import simdev  # noqa: PLC0415  # it becomes the accelerator of the process

        simdev.load()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tries = Tries(base, path, device)
    outcomes: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    found = []
    pairs: set[tuple[Any, ...]] = set()
    for number, chosen in enumerate(itertools.islice(combinations(ranks, device, seed), count), 1):
        outcome, said = tries.outcome(chosen)
        outcomes[outcome] += 1
        pairs.update(_pairs(chosen))
        if outcome == "refused":
            refusals[said[:160]] += 1
        elif outcome != "same":
            found.append({"outcome": outcome, "said": said[:600], "reduced": _told(tries.reduced(chosen, outcome))})
            print(found[-1], file=sys.stderr, flush=True)
        if number % 20 == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"{number} of {count}: {dict(outcomes)}", file=sys.stderr, flush=True)
    return {
        "ranks": ranks,
        "device": device,
        "seed": seed,
        "combinations": count,
        "pairs": len(pairs),
        "outcomes": dict(outcomes),
        "found": found,
        "refusals": dict(refusals.most_common()),
    }


def _told(chosen: Combination) -> Combination:
    """Only what is not plain."""
    return {name: value for name, value in chosen.items() if value != AXES[name][0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "simdev"), default="cpu", help="simdev is the emulated accelerator")
    parser.add_argument("--path", type=Path, default=Path(), help="directory on the drive")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as name:
        path = Path(name).absolute()
        base = path / "base"
        for kind, dtype in (("full", torch.float32), ("half", torch.bfloat16)):
            tiny_llama().to(dtype).save_pretrained(base / kind)  # type: ignore[operator]
        given = args.count, args.seed, args.device, base, path
        ranks = args.ranks
        result = run(*given) if ranks == 1 else run_ranks(ranks, run, *given, path=path, timeout_s=36_000)[0]
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:<14} {value}")
    return 1 if result["found"] else 0


if __name__ == "__main__":
    from benchmarks import combinations as itself  # as the ranks' processes, which have a main of their own, find it

    sys.exit(itself.main())
