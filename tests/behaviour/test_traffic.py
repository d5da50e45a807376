"""Bytes that cross the disk, as the kernel counts them, and memory, as the kernel counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.zero.meta import construct_on_meta
from tests.behaviour.reference import Placement, Recipe, least_memory

LAYERS, HIDDEN, VOCAB = 24, 256, 256


def deep_llama(layers: int = LAYERS) -> torch.nn.Module:
    """Many equal blocks and small embeddings, so that what is in memory at the turn of the pass hardly counts."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
    )
    with construct_on_meta():
        return LlamaForCausalLM(config)


def disk_bytes() -> tuple[int, int]:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


# Bytes per parameter and step with everything on NVMe and one micro-batch (the design's table): every parameter is
# read twice and written once, every other field is read and written once.
# Gradients that wait for their norm are written and read once, where memory cannot hold them.
TABLE = {"fp32": (4 + 4 + 8, 4 + 8), "bf16": (2 + 2 + 10, 2 + 10)}
SPILLED = {"fp32": 4, "bf16": 2}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["backward", "deferred"])
def test_disk_traffic_is_what_the_format_says(precision, clipping, tmp_path) -> None:
    """With the least memory that works, so that nothing is cached."""
    recipe = Recipe(precision, clipping=clipping)
    config = recipe.config(Placement("nvme", "nvme", tmp_path, "256KiB"))
    config["tiering"]["host_memory"] = least_memory(deep_llama(), config)
    with infinity.initialize(model=deep_llama(), config=config)[0] as engine:
        params = sum(p.numel() for p in engine.module.parameters())
        ids = torch.randint(0, VOCAB, (1, 8))

        def step() -> None:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()

        for _ in range(2):
            step()
        before = disk_bytes()
        counted = 0
        steps = 2
        for _ in range(steps):
            step()
            moved = engine.stats().tier_bytes
            counted += moved["nvme_read"] + moved["nvme_write"]
        read, written = (after - b for after, b in zip(disk_bytes(), before, strict=True))
    spilled = SPILLED[precision] if clipping else 0
    expected_read, expected_written = ((n + spilled) * params * steps for n in TABLE[precision])
    assert read == pytest.approx(expected_read, rel=0.03)
    assert written == pytest.approx(expected_written, rel=0.03)
    assert counted == pytest.approx(read + written, rel=0.03)


def test_states_that_fit_the_budget_never_touch_the_disk(tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, host_memory="1GiB"))
    with infinity.initialize(model=deep_llama(), config=config)[0] as engine:
        ids = torch.randint(0, VOCAB, (1, 8))
        moved: list[dict[str, int]] = []  # by each step

        def two_steps() -> tuple[int, ...]:
            """Bytes that the kernel counted as read and written."""
            engine.synchronize()
            before = disk_bytes()
            for _ in range(2):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                moved.append(engine.stats().tier_bytes)
            engine.synchronize()
            return tuple(now - then for now, then in zip(disk_bytes(), before, strict=True))

        two_steps()
        moved.clear()
        # The kernel also counts pages of code, which it reads when they are first used: once, unlike states.
        windows = [two_steps() for _ in range(3)]
    assert (0, 0) in windows
    assert all(written == 0 for _, written in windows)
    assert not any(step.get(route, 0) for step in moved for route in ("nvme_read", "nvme_write"))


_BUDGETED = """
import json, sys, resource, torch, infinity
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
from infinity.zero.meta import construct_on_meta

torch.manual_seed(0)
with construct_on_meta():
    model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=1024, n_head=16))
params = sum(p.numel() for p in model.parameters())
config = json.loads(sys.argv[1])
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with infinity.initialize(model=model, config=config)[0] as engine:
    ids = torch.randint(0, 50257, (1, 8))  # torch multiplies bf16 slowly on a CPU without instructions for it
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    peak_host = engine.stats().peak_bytes["host"]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"params": params, "base": base, "peak": peak, "peak_host": peak_host}))
"""


def test_the_host_budget_bounds_the_process(tmp_path) -> None:
    """153M parameters have 1.8 GB of states; the budget is a quarter of that, and the process grows by little more."""
    budget = 512 << 20
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "8MiB", host_memory=budget))
    done = subprocess.run(
        [sys.executable, "-c", _BUDGETED, json.dumps(config)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["peak_host"] <= budget
    # what torch allocates itself: the gradients of the largest unit, activations, initial values of one module
    transient = 600 << 20
    assert measured["peak"] - measured["base"] < budget + transient
    assert measured["peak"] - measured["base"] < 12 * measured["params"]


def test_a_budget_that_cannot_work_is_refused_with_the_number_that_is_needed(tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, host_memory="1MiB"))
    with pytest.raises(
        infinity.CapacityError, match=r"tiering.host_memory is [0-9.]+ [KM]iB but this model needs at least"
    ):
        infinity.initialize(model=deep_llama(), config=config)
    assert not list(tmp_path.iterdir())
