"""The training loop of `infinity train`."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from infinity import __version__
from infinity.checkpoint import PretrainedWeights
from infinity.cli.arguments import check_directory
from infinity.cli.training.apart import check_apart, model_inputs
from infinity.cli.training.configuration import ConfigOptions, base_values, with_schedule
from infinity.cli.training.data import Samples
from infinity.cli.training.evaluation import Evaluator
from infinity.cli.training.log import RunLog
from infinity.cli.training.lora import reads_in_place, with_adapters
from infinity.cli.training.models import build_model, checkpoint_activations, max_tokens, model_directory
from infinity.cli.training.opening import model_line, run_lines
from infinity.cli.training.output import check_room, output_directory, save_trained
from infinity.cli.training.precision import measured_precision, slowdown
from infinity.cli.training.progress import Progress, StepReport
from infinity.cli.training.ranks import agreed, first_sample, mean_over_ranks, rank_and_size
from infinity.cli.training.room import with_room
from infinity.cli.training.schedule import Schedule
from infinity.cli.training.signals import StopSignals
from infinity.cli.training.sources import Data, DataOptions, open_data
from infinity.cli.training.tokenizers import find_tokenizer
from infinity.config import load_config
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError, NonFiniteError
from infinity.setup import initialize
from infinity.tiers import compute_device
from infinity.zero.ranks import join_ranks

_DEFAULT_STEPS = 100
_FRESH_LR, _PRETRAINED_LR, _LORA_LR = 3e-4, 2e-5, 2e-4  # if neither a file nor --lr sets the rate
MAX_SKIPPED = 30  # in a row: more than a loss scale needs to settle


@dataclass(frozen=True)
class Saving:
    """What is saved, and where.

    Attributes:
        model: write the trained model at the end, and when a signal ends the run.
        output: directory of the trained model; None for a new directory.
        checkpoints: directory of the checkpoints, one every `every` steps.
    """

    model: bool
    output: Path | None
    checkpoints: Path
    every: int | None
    keep_last: int | None
    resume: bool


@dataclass(frozen=True)
class Settings:
    """The command line of `infinity train`.

    Attributes:
        steps: updates; None for `epochs` passes over the data.
        lora: rank of the adapters; None to train all parameters.
    """

    model: str
    data: DataOptions
    eval_every: int
    tokenizer: str | None
    config: ConfigOptions
    steps: int | None
    epochs: float | None
    lora: int | None
    device: str | None
    saving: Saving
    checkpoint_activations: bool
    log: Path | None
    json: bool


@dataclass(frozen=True)
class _Prepared:
    """What a run begins with.

    Attributes:
        name, source: the model on the command line, and its directory; None for random weights.
        params, trained: number of its parameters, without adapters; number of parameters that are trained.
        output: directory of the trained model; None to write none.
    """

    name: str
    source: Path | None
    params: int
    trained: int
    model: nn.Module
    weights: PretrainedWeights | None
    tokenizer: Any | None
    data: Data
    values: dict[str, Any]
    schedule: Schedule | None
    steps: int
    output: Path | None


def train(settings: Settings) -> int:
    """Train until the last step, or until a signal asks to stop. Return the exit code."""
    transformers.logging.set_verbosity_error()  # its remarks on configurations are for model authors
    torch.manual_seed(settings.data.seed)
    prepared = _prepare(settings)
    engine, *_ = initialize(
        model=prepared.model,
        config=prepared.values,
        weights=prepared.weights,
        device=settings.device,
        lr_scheduler=None if prepared.schedule is None else prepared.schedule.made,
    )
    data, tokenizer, steps, saving = prepared.data, prepared.tokenizer, prepared.steps, settings.saving
    with (
        engine,
        _progress(settings, prepared, engine) as progress,
        StopSignals(progress, saves=prepared.output is not None) as stop,
    ):
        if prepared.output is not None:
            check_room(prepared.output, engine, prepared.params)
        for line in _opening(settings, prepared, engine):
            progress.note(line)
        if data.packed:
            check_apart(engine)
        evaluator = None if data.held_out is None else Evaluator(engine, data.source, data.held_out)
        engine.tell(steps=steps)
        run = _Run(engine, data.samples, settings, _about(settings, prepared), progress, stop)
        if saving.resume:
            run.resume()
        elif engine.config.tiering.crash_consistent:
            engine.check_resumed("infinity train without --resume")
        signum = 0
        while engine.global_steps < steps and not signum:
            run.step()
            signum = agreed(stop.first, engine.device)
            last = engine.global_steps == steps
            if evaluator is not None and not signum and (last or engine.global_steps % settings.eval_every == 0):
                progress.evaluated(evaluator.run())
            if saving.every is not None and (signum or last or engine.global_steps % saving.every == 0):
                run.save(wait=bool(signum) or last)
        engine.synchronize()
        if prepared.output is not None:
            if signum:
                progress.note(f"stopped after step {engine.global_steps}; saving the model (Ctrl-C again: do not save)")
            try:
                save_trained(engine, prepared.output, tokenizer)
            except InfinityError:
                run.keep()
                raise
        if engine.config.tiering.crash_consistent and not signum:
            run.end()
        progress.finish()
        if prepared.output is not None:
            progress.note(f"the trained model is in {prepared.output}: AutoModelForCausalLM.from_pretrained loads it")
        if signum and saving.every is None and not engine.config.tiering.crash_consistent:
            progress.note("no checkpoint was saved, so --resume cannot continue here (--save-every N saves them)")
    return 128 + signum if signum else 0


def _prepare(settings: Settings) -> _Prepared:
    """Build the model without memory, read the data, and complete the configuration."""
    ranks = join_ranks()
    source = model_directory(settings.model)
    if settings.lora is not None and source is None:
        raise ConfigError(
            f"--lora {settings.lora} adapts a pretrained model, and --model {settings.model} is a size with random "
            "weights: give a model directory or a Hugging Face name, or leave --lora out"
        )
    saving = settings.saving
    data_paths = (*settings.data.data, *settings.data.eval_data)
    output = output_directory(saving.output, settings.model, source, data_paths) if saving.model else None
    if output is not None and ranks.rank == 0:
        check_directory("--output", output)
    if saving.every is not None:
        check_directory("--save-dir", saving.checkpoints)
    default_lr = _LORA_LR if settings.lora is not None else _FRESH_LR if source is None else _PRETRAINED_LR
    options = replace(settings.config, default_lr=default_lr)
    device = compute_device(settings.device)
    values = base_values(options, lambda: ranks.on_rank_0(lambda: measured_precision(device)))
    config = load_config(values, world_size=ranks.size)
    in_place = settings.lora is not None and source is not None and reads_in_place(config, source)
    model, weights = build_model(settings.model, in_place=in_place)
    params = sum(param.numel() for param in model.parameters())
    max_tokens(model, settings.model, settings.data.seq_len)
    tokenizer = find_tokenizer(settings.model if source is None else str(source), settings.tokenizer)
    data = open_data(settings.data, tokenizer, model, settings.model, ranks)
    steps = settings.steps or _DEFAULT_STEPS
    if settings.epochs is not None:
        steps = math.ceil(settings.epochs * data.samples.count / config.train_batch_size)
    values, schedule = with_schedule(values, options, steps)
    if settings.lora is not None:
        model = with_adapters(model, settings.lora)
    if settings.checkpoint_activations:
        checkpoint_activations(model)
    values = with_room(
        values,
        model,
        device,
        ranks,
        settings.data.seq_len,
        checkpointing=settings.checkpoint_activations,
    )
    return _Prepared(
        name=settings.model,
        source=source,
        params=params,
        trained=sum(param.numel() for param in model.parameters() if param.requires_grad),
        model=model,
        weights=weights,
        tokenizer=tokenizer,
        data=data,
        values=values,
        schedule=schedule,
        steps=steps,
        output=output,
    )


def _about(settings: Settings, prepared: _Prepared) -> dict[str, Any]:
    """Return what a checkpoint records of its model. Paths are absolute."""
    source, tokenizer = prepared.source, settings.tokenizer
    is_path = source is not None and Path(settings.model).is_dir()
    if tokenizer is not None and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).absolute())
    model = str(Path(settings.model).absolute()) if is_path else settings.model
    return {"model": model, "tokenizer": tokenizer, "lora": settings.lora}


def _opening(settings: Settings, prepared: _Prepared, engine: Engine) -> list[str]:
    """Return the lines that are shown before the first step."""
    tokenizer, data = prepared.tokenizer, prepared.data
    name = "bytes" if tokenizer is None else tokenizer.name_or_path
    words = None if prepared.schedule is None else prepared.schedule.words()
    return [
        model_line(prepared.name, prepared.source, prepared.params, prepared.trained, settings.lora),
        f"tokens: {name} (vocabulary of {data.source.vocabulary})",
        *data.notes,
        *run_lines(engine, data, prepared.steps, words, prepared.output),
        *_slow_precision(engine),
    ]


def _slow_precision(engine: Engine) -> list[str]:
    """Return a warning if the CPU computes the configuration's precision much more slowly than float32."""
    precision = engine.config.precision
    if engine.device.type != "cpu":
        return []
    ratio = slowdown(engine.device, precision)
    if ratio == 1:
        return []
    return [
        f"warning: matrix products in {precision} take {ratio:.1f} times as long here as in float32: add --precision "
        "fp32, or leave the precision out of the configuration"
    ]


def _progress(settings: Settings, prepared: _Prepared, engine: Engine) -> Progress:
    """Return the progress display, with the log on rank 0. It is silent on other ranks."""
    rank, ranks = rank_and_size()
    log = None
    if settings.log is not None and rank == 0:
        timeline = engine.config.tiering.timeline
        if timeline is not None and ranks > 1:
            timeline = timeline.with_suffix(f".rank0{timeline.suffix}")
        about = {
            "infinity": __version__,
            "model": settings.model,
            "data": [str(path) for path in settings.data.data],
            "resume": settings.saving.resume,
            "steps": prepared.steps,
            "seq_len": settings.data.seq_len,
            "ranks": ranks,
            "host": platform.node(),
            "timeline": None if timeline is None else str(timeline.resolve()),
            "config": dict(engine.config.source),
        }
        log = RunLog(settings.log, about)
    return Progress(prepared.steps, json_lines=settings.json, silent=rank > 0, log=log)


class _Run:
    """Steps of one engine over one order of samples.

    Args:
        about: the model, for `infinity checkpoint export`.
        stop: after the second signal a step ends before its next micro-batch.
    """

    def __init__(
        self,
        engine: Engine,
        samples: Samples,
        settings: Settings,
        about: dict[str, Any],
        progress: Progress,
        stop: StopSignals,
    ) -> None:
        self._engine = engine
        self._samples = samples
        self._settings = settings
        self._about = about
        self._progress = progress
        self._stop = stop
        self._next_sample = 0
        self._skipped = 0  # consecutive skipped steps
        self._saved_step = -1
        self._saving: Path | None = None  # the checkpoint whose save has begun but was not announced yet
        if engine.config.tiering.crash_consistent:
            engine.keep_with_steps(self._position)

    def _position(self) -> dict[str, Any]:
        return {"next_sample": self._next_sample, "data": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> dict[str, int]:
        return self._samples.fingerprint()

    def resume(self) -> None:
        """Continue from the last step on the drives, or else from the last checkpoint, with the next sample."""
        directory = self._settings.saving.checkpoints
        path, state = None, None
        if self._engine.config.tiering.crash_consistent:
            path, state = self._engine.resume()
        if path is None:
            path, state = self._engine.load_checkpoint(directory)
        if path is None or state is None:
            self._progress.note(f"--resume finds no checkpoint in {directory}: training starts from the beginning")
            return
        self._progress.note(f"resumed from {path}")
        seen = self._engine.micro_steps * self._engine.config.micro_batch_size * rank_and_size()[1]
        self._next_sample = int(state.get("next_sample", seen))  # missing if the user's own loop saved the checkpoint
        fingerprint = self._fingerprint
        if state.get("data") != fingerprint:
            saved = state.get("data") or {}
            changed = ", ".join(key for key in fingerprint if saved.get(key) != fingerprint[key])
            self._progress.note(
                f"warning: {path} was trained on other data ({changed} changed): samples may be repeated or skipped; "
                "give the same --data, --tokenizer, --seq-len and --seed to continue in the same order"
            )
        if self._settings.config.lr is not None:
            _set_lr(self._engine, self._settings.config.lr)

    def save(self, *, wait: bool) -> None:
        """Save a checkpoint that `resume` can continue from.

        Args:
            wait: block until it is written. Otherwise training continues, and it is complete two steps later.
        """
        engine = self._engine
        if self._saving is not None:
            engine.wait_checkpoint()
            self._tell_of_saved()
        self._saving = engine.save_checkpoint(
            self._settings.saving.checkpoints,
            client_state={**self._position(), "trained": self._about},
            keep_last=self._settings.saving.keep_last,
            blocking=wait,
        )
        self._saved_step = engine.global_steps
        self._tell_of_saved()

    def keep(self) -> None:
        """Save a checkpoint of this step, if there is none, because the trained model could not be written."""
        directory = self._settings.saving.checkpoints
        try:
            if self._saved_step != self._engine.global_steps:
                self.save(wait=True)
        except InfinityError as error:
            self._progress.note(f"the trained model cannot be written, nor can a checkpoint: {error}")
            return
        self._progress.note(
            f"the trained model cannot be written; `infinity checkpoint export {directory} DIRECTORY` creates it from "
            "the checkpoint, and --resume continues from there"
        )

    def _tell_of_saved(self) -> None:
        """Announce the pending checkpoint if it is complete.

        Raises:
            StorageError, CheckpointError: it could not be written.
        """
        if self._saving is not None and self._engine.saving is None:
            self._engine.wait_checkpoint()  # raises what ended the save
            self._progress.note(f"saved {self._saving}")
            self._saving = None

    def end(self) -> None:
        """Remove the states on the drives after the last step, if a checkpoint has them."""
        if self._saved_step == self._engine.global_steps:
            self._engine.end_run()
        else:
            paths = ", ".join(str(nvme.path) for nvme in self._engine.config.tiering.nvme)
            self._progress.note(
                f"step {self._engine.global_steps} stays in {paths}: --resume with more --steps continues from it, "
                "`infinity states remove` frees the space"
            )

    def _micro_batches(self) -> Iterator[dict[str, torch.Tensor | bool]]:
        """Yield the model's arguments for each micro-batch, and count its samples as seen."""
        size = self._engine.config.micro_batch_size
        _, ranks = rank_and_size()
        while True:
            if self._stop.twice:
                raise KeyboardInterrupt
            batch = self._samples.batch(first_sample(self._next_sample, size), size)
            self._next_sample += ranks * size
            yield model_inputs({name: values.to(self._engine.device) for name, values in batch.items()})

    def step(self) -> None:
        """Train one step, with all of its micro-batches.

        Raises:
            NonFiniteError: too many consecutive steps had gradients that are not finite.
        """
        engine = self._engine
        size = engine.config.micro_batch_size
        accumulation = engine.config.gradient_accumulation_steps
        _, ranks = rank_and_size()
        start_s = time.perf_counter()
        loss = engine.train_batch(self._micro_batches())
        report = StepReport(
            step=engine.global_steps,
            loss=mean_over_ranks(loss),
            step_s=time.perf_counter() - start_s,
            tokens=accumulation * ranks * size * self._settings.data.seq_len,
            lr=engine.get_lr()[0],
            stats=engine.stats(),
            tiers=engine.tiers(),
        )
        self._tell_of_saved()
        engine.tell(tokens=report.tokens, loss=report.loss)
        self._progress.show(report)
        self._skipped = self._skipped + 1 if report.stats.skipped else 0
        if self._skipped == MAX_SKIPPED:
            raise NonFiniteError(
                f"the last {MAX_SKIPPED} steps were skipped because their gradients were not finite (loss "
                f"{report.loss}), so the model does not learn. Resume from the last checkpoint with a lower --lr, or "
                "look for errors in the data"
            )


def _set_lr(engine: Engine, lr: float) -> None:
    """Set the learning rate of the command line instead of the checkpoint's. A schedule keeps its position."""
    schedule = engine.lr_scheduler
    groups = engine.optimizer.param_groups
    rates = [lr] * len(groups) if schedule is None else schedule.get_lr()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
