"""LoRA and generation with a model that is three times the memory given to it, from its own files.

    python benchmarks/larger_than_memory.py --path DIR [--memory 2GiB] [--json FILE]

The claims, for 6 GB of safetensors in a control group of 2 GiB: the tokens are those of transformers with the whole
model in memory; the losses of LoRA follow a plain loop of PEFT; nothing of the base is written, and no second copy of
it is on the drive; what is read comes at 0.8 or more of the rate at which the drive reads (`infinity bench-io`), which
is measured in turn, at once before and after. The floor of a token is one pass over the files, that of a training step
two. The pass over a prompt is told apart: without instructions for bf16 a processor computes longer on it than its
weights take to read, and on LoRA for minutes (`--dtype float32 --layers 14 --tokens 4` has the same bytes).
Needs root, for the control group, and 6 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

import infinity
from benchmarks.disk import disk_bytes_per_s
from benchmarks.workload import disk_bytes
from infinity.config import parse_size
from infinity.integrations import from_pretrained, pretrained_model
from tests.behaviour.control_groups import control_group

PROMPT, NEW_TOKENS, STEPS = 8, 6, 4
LR = 1e-3


def make_model(path: Path, args: argparse.Namespace) -> int:
    """Write a model of random weights, a file a block; returns bytes."""
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 512,
        vocab_size=16_384,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype=args.dtype,
    )
    with torch.device("meta"), no_init_weights():
        names = {name: param.shape for name, param in AutoModelForCausalLM.from_config(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, shape in names.items():
        block = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{block}.safetensors", {})[name] = shape
    total, where = 0, {}
    for file, shapes in files.items():
        tensors = {}
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator) * 0.02
            tensors[name] = (drawn if len(shape) > 1 else torch.ones(shape)).to(getattr(torch, args.dtype))
            total += tensors[name].nbytes
            where[name] = file
        save_file(tensors, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    )
    config.save_pretrained(path)
    return total


# What is measured #


def prompt() -> torch.Tensor:
    return torch.randint(0, 16_384, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def samples(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 16_384, (1, length), generator=generator) for _ in range(STEPS)]


def dtype_of(path: Path) -> torch.dtype:
    """What the files hold, and the model computes in."""
    dtype = LlamaConfig.from_pretrained(path).dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 (its import takes seconds)

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def adapters(model: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """The adapters' parameters and what they begin with, here and there; A and B, else A has no gradient at first."""
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_" in name:
            shape = getattr(param, "ds_shape", param.shape)
            yield param, (torch.randn(shape, generator=generator) * 0.02).to(param.dtype)


def plain_generate(path: Path) -> dict[str, Any]:
    """As transformers does it, with everything in memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype_of(path))
    tokens = model.generate(prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return {"tokens": tokens[0].tolist()}


def plain_train(path: Path, length: int) -> dict[str, Any]:
    """As PEFT does it, with everything in memory; adapters in float32 under any computation."""
    model = lora(AutoModelForCausalLM.from_pretrained(path, dtype=dtype_of(path)))
    trained, begin = zip(*adapters(model), strict=True)
    masters = [values.float() for values in begin]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=0.0)
    losses, seconds = [], []
    for param, master in zip(trained, masters, strict=True):
        param.data = master.to(param.dtype, copy=True)
    for ids in samples(length):
        start_s = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        for param, master in zip(trained, masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        for param, master in zip(trained, masters, strict=True):
            param.data.copy_(master)
        seconds.append(time.perf_counter() - start_s)
    return {"losses": losses, "step_s": min(seconds)}


def config_of(path: Path, swap: str, host_memory: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype_of(path) == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {"nvme": [{"path": swap}], "host_memory": host_memory},
    }


@contextmanager
def timed(told: dict[str, Any]) -> Iterator[None]:
    read, written = disk_bytes()
    start_s = time.perf_counter()
    yield
    seconds = time.perf_counter() - start_s
    after = disk_bytes()
    told |= {"s": seconds, "read_bytes": after[0] - read, "written_bytes": after[1] - written}


def generate(path: Path, swap: str, host_memory: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with from_pretrained(path, config_of(path, swap, host_memory), inference=True)[0] as engine:
        engine.generate(prompt(), max_new_tokens=1, do_sample=False, pad_token_id=0)
        first: dict[str, Any] = {}
        with timed(first):
            engine.generate(prompt(), max_new_tokens=1, do_sample=False, pad_token_id=0)
        with timed(told):
            tokens = engine.generate(prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        told |= {name: told[name] - first[name] for name in first}  # each pass after the prompt's is one of a token
        told |= {"prompt": first, "tokens": tokens[0].tolist(), "passes": NEW_TOKENS - 1, "swap_bytes": size_of(swap)}
    return told


def train(path: Path, swap: str, host_memory: int, length: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    model, weights = pretrained_model(path, in_place=True)
    model = lora(model)
    engine = infinity.initialize(model=model, config=config_of(path, swap, host_memory), weights=weights)[0]
    losses = []
    with engine:
        for param, values in adapters(engine.module):
            with infinity.zero.GatheredParameters(param, modifier_rank=0):
                param.data.copy_(values)
        for index, ids in enumerate(samples(length)):
            if index == 1:  # the first learns the order
                engine.synchronize()
                watch = ExitStack()
                watch.enter_context(timed(told))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.synchronize()
        watch.close()
        told |= {"losses": losses, "passes": 2 * (STEPS - 1), "swap_bytes": size_of(swap)}
    return told


def size_of(directory: str) -> int:
    return sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())


# Processes of their own #


def worker(what: str, path: Path, group: Path | None = None, host_memory: int = 0, length: int = 0) -> dict[str, Any]:
    """Run a part of this in a process of its own, in the control group."""
    options = [sys.executable, __file__, "--worker", what, str(path), str(group or ""), str(host_memory), str(length)]
    join = "" if group is None else f"echo $$ > {group}/cgroup.procs; "  # first: torch's own memory counts
    done = subprocess.run(
        ["sh", "-c", f'{join}exec "$@"', "sh", *options], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{what} ended with {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def work(what: str, path: Path, group: str, host_memory: int, length: int) -> None:
    if what == "rate":
        told: dict[str, Any] = {"bytes_per_s": disk_bytes_per_s(path.parent, "read", runtime_s=8.0)}
    elif what == "plain generate":
        told = plain_generate(path)
    elif what == "plain train":
        told = plain_train(path, length)
    else:
        with tempfile.TemporaryDirectory(dir=path.parent) as swap:
            told = generate(path, swap, host_memory) if what == "generate" else train(path, swap, host_memory, length)
    if group:
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (Path(group) / name).exists():
                told["group_peak_bytes"] = int((Path(group) / name).read_text())
    print(json.dumps(told))


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--memory", default="2GiB", help="of the control group")
    parser.add_argument("--host-memory", default="1GiB", help="of the engine within it")
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the files")
    parser.add_argument("--tokens", type=int, default=16, help="of a training step")
    parser.add_argument("--only", choices=["generate", "train"], help="one of the two")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = [args.only] if args.only else ["generate", "train"]
    rows: dict[str, Any] = {name: getattr(args, name) for name in ("memory", "host_memory", "dtype", "tokens")}
    with tempfile.TemporaryDirectory(dir=args.path) as path, control_group(parse_size(args.memory)) as group:
        model = Path(path) / "model"
        model.mkdir()
        rows["model_bytes"] = make_model(model, args)
        before = {file.name: file.stat().st_mtime_ns for file in model.iterdir()}
        rows["plain"] = {}
        for what in parts:
            rows["plain"] |= worker(f"plain {what}", model, length=args.tokens)
        for what in parts:
            rates = [worker("rate", model)["bytes_per_s"]]
            rows[what] = worker(what, model, group, parse_size(args.host_memory), args.tokens)
            rates.append(worker("rate", model)["bytes_per_s"])
            told = rows[what]
            told["drive_bytes_per_s"] = rates
            told["read_share"] = told["read_bytes"] / told["s"] / (sum(rates) / 2)
            told["reads_a_pass"] = told["read_bytes"] / told["passes"] / rows["model_bytes"]
        rows["untouched"] = before == {file.name: file.stat().st_mtime_ns for file in model.iterdir()}
    if "generate" in parts:
        rows["same_tokens"] = rows["plain"]["tokens"] == rows["generate"]["tokens"]
    if "train" in parts:
        pairs = zip(rows["plain"]["losses"], rows["train"]["losses"], strict=True)
        rows["loss_distance"] = max(abs(a - b) / abs(a) for a, b in pairs)
    print(json.dumps(rows, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
