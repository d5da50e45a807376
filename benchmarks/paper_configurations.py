"""The configurations of ZeRO-Infinity's paper as this library would train them, beside what was published.

    python benchmarks/paper_configurations.py --json FILE

The claim: a trillion parameters fit one DGX-2, and 32 trillion fit 32 of them (512 V100), as the paper says
(Rajbhandari et al., arXiv 2104.07857). Nothing is measured here: the machine is made of published numbers.

A DGX-2 has 16 V100 of 32 GB, 1.5 TB of memory, 28 TB of NVMe (the paper, figure 2). Rates are what the paper reckons
with: 70 TFLOP/s a GPU, 1.6 GB/s of NVMe and 3 GB/s of host memory for each GPU when all of them use it. Assumed are 3e9
parameters a second that a machine updates, and collectives at 100 GB/s: eight InfiniBand adapters of 100 Gb/s leave a
node, and a ring crosses its border once.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


from infinity.config import format_size, load_config
from infinity.planner import (
    Machine,
    Rates,
    Shape,
    count_work,
    decoder_of,
    estimate,
    plan_training,
    predict_step,
    with_numbers,
)

GPUS, GPU_BYTES, HOST_BYTES, NVME_BYTES = 16, 32 << 30, 1.5e12, 28e12
PEAK, NVME_RATE, LINK_RATE, OPTIMIZER_RATE = 70e12, 16 * 1.6e9, 3e9, 3e9
COLLECTIVE_RATE = 100e9
SEQ = 1024


@dataclass(frozen=True)
class Example:
    """A model on so many nodes."""

    name: str
    shape: Shape
    nodes: int
    batch: int
    tiles: int
    published: str


EXAMPLES = (
    Example("1T on one DGX-2", Shape(128, 25600), 1, 7, 4, "fits"),
    Example("32T on 32 DGX-2", Shape(621, 65536), 32, 1, 8, "fits; 25 PFLOP/s on these GPUs, 40% of their peak"),
)


def plan_example(example: Example) -> dict[str, Any]:
    started_s = time.perf_counter()
    checkpoints = example.batch * SEQ * example.shape.width * 2 * example.shape.layers
    config = load_config(
        {
            "train_micro_batch_size_per_gpu": example.batch,
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "nvme"},
            },
            # Checkpoints go to the drives where host memory has no room for them.
            "tiering": {
                "nvme": [{"path": "."}],
                "device_memory": 22 << 30,
                "activations": "nvme",
                "activation_memory": min(checkpoints, 40 << 30),
            },
        },
        world_size=GPUS * example.nodes,
    )
    machine = Machine(GPUS * example.nodes, GPUS, GPU_BYTES, int(HOST_BYTES))
    rates = with_numbers(
        Rates(),
        flop_per_s=PEAK,
        optimizer_params_per_s=OPTIMIZER_RATE,
        disk_bytes_per_s=NVME_RATE,
        link_bytes_per_s=LINK_RATE,
        collective_bytes_per_s=COLLECTIVE_RATE,
    )
    model = decoder_of(example.shape, example.tiles)
    plan = plan_training(model, config, machine)
    work = count_work(model, plan, example.batch, SEQ, checkpointing=True)
    needs = estimate(plan, work, 0)
    step = predict_step(plan, config, work, rates)
    reached = example.batch * SEQ / 4 * NVME_RATE / GPUS  # a quarter of a flop for each token and byte of the states
    return {
        "name": example.name,
        "params": plan.params,
        "published": example.published,
        "device_bytes": needs.device_bytes,
        "host_bytes": needs.process_bytes * GPUS,
        "nvme_bytes": needs.machine_nvme_bytes,
        "fits": needs.device_bytes <= GPU_BYTES
        and needs.process_bytes * GPUS <= HOST_BYTES
        and needs.machine_nvme_bytes <= NVME_BYTES,
        "step_s": step.seconds,
        "parts_s": dict(step.parts),
        "bottleneck": step.bottleneck,
        "flop_per_s": step.flop_per_s,
        "efficiency": step.flop_per_s / PEAK,
        "roofline_states": reached / (reached + PEAK),  # section 4 of the paper: nothing overlaps
        "break_even_tokens": step.break_even_tokens,
        "took_s": time.perf_counter() - started_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for example in EXAMPLES:
        row = plan_example(example)
        rows.append(row)
        print(f"{row['name']}: {row['params'] / 1e12:.2f}T parameters; published: {row['published']}")
        print(
            f"  {'fits' if row['fits'] else 'DOES NOT FIT'}: a GPU {format_size(row['device_bytes'])} of 32 GiB, "
            f"a node {row['host_bytes'] / 1e12:.2f} TB of 1.5 host, {row['nvme_bytes'] / 1e12:.1f} TB of 28 NVMe"
        )
        parts = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in row["parts_s"].items())
        print(f"  step {row['step_s']:,.0f} s, bound by {row['bottleneck']} ({parts})")
        print(
            f"  {row['flop_per_s'] / 1e12:.1f} TFLOP/s a GPU, {row['efficiency']:.0%} of 70; the paper's roofline for "
            f"optimizer states at {NVME_RATE / GPUS / 1e9:.1f} GB/s without overlap {row['roofline_states']:.1%}"
        )
        print(f"  planned in {row['took_s']:.1f} s and {row['peak_rss_bytes'] / 1e9:.2f} GB", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
