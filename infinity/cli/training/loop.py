"""The training loop of `infinity train`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from infinity.cli.training.data import ByteTokens, Samples, TokenizedFiles, Tokens, find_files
from infinity.cli.training.models import build_model, max_tokens
from infinity.cli.training.progress import Progress, StepReport
from infinity.engine import Engine, initialize
from infinity.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """The command line of `infinity train`."""

    model: str
    data: tuple[Path, ...]
    tokenizer: Path | None
    config: Path
    steps: int
    seq_len: int
    micro_batch_size: int | None
    device: str | None
    lr: float | None
    seed: int
    save_dir: Path
    save_every: int | None
    resume: bool
    json: bool


def train(settings: Settings) -> int:
    """Train until `settings.steps`, or until a signal asks to stop; returns the exit code."""
    transformers.logging.set_verbosity_error()  # its remarks on configurations are for model authors
    torch.manual_seed(settings.seed)
    model = build_model(settings.model)
    longest = max_tokens(model)
    if longest is not None and settings.seq_len > longest:
        raise ConfigError(f"--seq-len is {settings.seq_len}, but {settings.model} takes at most {longest} tokens")
    tokens = _tokens(settings)
    samples = Samples(tokens, settings.seq_len, settings.seed)
    if tokens.vocabulary > model.get_input_embeddings().num_embeddings:  # type: ignore[operator]
        raise ConfigError(f"the tokenizer has {tokens.vocabulary} tokens, more than {settings.model} has embeddings")
    engine, *_ = initialize(model=model, config=_config(settings), device=settings.device)
    with engine, _stop_signal() as stop:
        progress = Progress(settings.steps, json_lines=settings.json)
        if settings.resume:
            path, _ = engine.load_checkpoint(settings.save_dir)
            progress.note(f"resumed from {path}" if path else f"no checkpoint in {settings.save_dir}; starting afresh")
            if path and settings.lr is not None:
                _set_lr(engine, settings.lr)
        while engine.global_steps < settings.steps and not stop:
            _step(engine, samples, settings, progress)
            if settings.save_every and engine.global_steps % settings.save_every == 0:
                progress.note(f"saved {engine.save_checkpoint(settings.save_dir)}")
        engine.synchronize()
        progress.finish()
    return 128 + stop[0] if stop else 0


def _step(engine: Engine, samples: Samples, settings: Settings, progress: Progress) -> None:
    """One update, over all of its micro-batches."""
    size = engine.config.micro_batch_size
    accumulation = engine.config.gradient_accumulation_steps
    start_s = time.perf_counter()
    losses = []
    for _ in range(accumulation):
        ids = samples.batch(engine.micro_steps * size, size).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    progress.show(
        StepReport(
            step=engine.global_steps,
            loss=torch.stack(losses).float().mean().item(),
            step_s=time.perf_counter() - start_s,
            tokens=accumulation * size * settings.seq_len,
            lr=engine.get_lr()[0],
            stats=engine.stats(),
        )
    )


def _tokens(settings: Settings) -> Tokens:
    files = find_files(settings.data)
    if settings.tokenizer is None:
        return ByteTokens(files)
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {settings.tokenizer} cannot be loaded: {error}") from error
    return TokenizedFiles(files, tokenizer)


def _config(settings: Settings) -> Path | dict[str, Any]:
    """The configuration, with what the command line says in its place."""
    if settings.lr is None and settings.micro_batch_size is None:
        return settings.config
    try:
        values: dict[str, Any] = json.loads(settings.config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return settings.config  # initialize says what is wrong with it
    if settings.micro_batch_size is not None:
        values["train_micro_batch_size_per_gpu"] = settings.micro_batch_size
    if settings.lr is not None:
        section = values.setdefault("optimizer", {"type": "AdamW"})
        section.setdefault("params", {})["lr"] = settings.lr
    return values


def _set_lr(engine: Engine, lr: float) -> None:
    """Go on with the learning rate of the command line, not the checkpoint's; a schedule keeps its position."""
    schedule = engine.lr_scheduler
    groups = engine.optimizer.param_groups
    rates = [lr] * len(groups) if schedule is None else schedule.get_lr()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """A list that receives the signal which asks the loop to stop after the step it is in.

    A second signal ends the process at once, through the handler that was there before.
    """
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
