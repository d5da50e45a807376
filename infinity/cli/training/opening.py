"""The lines that `infinity train` shows before the first step: model, data, learning rate, tiers, I/O and output."""

from __future__ import annotations

from pathlib import Path

from infinity.cli.training.sources import Data
from infinity.config import Config, format_size
from infinity.engine import Engine
from infinity.io import probe_backends


def model_line(name: str, source: Path | None, params: int, trained: int, lora: int | None) -> str:
    """Describe the model, and where its weights come from."""
    weights = f"pretrained weights of {source}" if source is not None else "random weights"
    adapters = "" if lora is None else f", LoRA of rank {lora}: {trained:,} parameters are trained"
    return f"model: {name}, {params:,} parameters, {weights}{adapters}"


def run_lines(engine: Engine, data: Data, steps: int, schedule: str | None, output: Path | None) -> list[str]:
    """Describe data, learning rate, tiers, I/O and output, in one line each."""
    config = engine.config
    tokens = config.train_batch_size * data.source.length
    samples = f"{len(data.source):,} samples of {data.source.length} tokens"
    passes = steps * config.train_batch_size / max(1, data.samples.count)
    return [
        f"data: {samples}; {steps} steps of {tokens:,} tokens are {passes:.3g} epochs",
        f"learning rate: {_rate(engine)}, {schedule or _schedule(config)}; {_optimizer(config)} in {config.precision}",
        f"tiers: {_tiers(engine)}",
        f"I/O: {_io(engine)}",
        "output: none (--no-save)" if output is None else f"output: {output}, at the end and on Ctrl-C",
    ]


def _rate(engine: Engine) -> str:
    scheduler, optimizer = engine.config.scheduler, engine.config.optimizer
    highest = None if scheduler is None else scheduler.params.get("warmup_max_lr")
    if highest is None and optimizer is not None:
        highest = optimizer.params.get("lr")
    return f"{engine.get_lr()[0] if highest is None else float(highest):g}"


def _optimizer(config: Config) -> str:
    return "AdamW" if config.optimizer is None else config.optimizer.type


def _schedule(config: Config) -> str:
    if config.scheduler is None:
        return "constant"
    given = ", ".join(f"{key} {value}" for key, value in config.scheduler.params.items() if key.endswith("_num_steps"))
    return config.scheduler.type + (f" ({given})" if given else "")


def _tiers(engine: Engine) -> str:
    tiers = engine.tiers()
    parts = [
        f"{format_size(tiers[name].capacity_bytes)} of {name} memory" for name in ("device", "host") if name in tiers
    ]
    stored = tiers["nvme"].used_bytes if "nvme" in tiers else 0
    if stored:
        paths = ", ".join(str(nvme.path) for nvme in engine.config.tiering.nvme)
        parts.append(f"{format_size(stored)} on NVMe in {paths}")
    else:
        parts.append("nothing on NVMe")
    return "; ".join(parts)


def _io(engine: Engine) -> str:
    """Describe the I/O backend and its settings."""
    tiering, aio = engine.config.tiering, engine.config.aio
    if not tiering.nvme:
        return "none"
    backend = tiering.io_backend
    if backend == "auto":
        backend = next(status.name for status in probe_backends() if status.available)
    return f"{backend}, {aio.queue_depth} blocks of {format_size(aio.block_size_bytes)} in flight"
