"""Save, load and export the state of one engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.background import BackgroundSave
from infinity.checkpoint.codes import codes_of
from infinity.checkpoint.commits import ClientState, Commits
from infinity.checkpoint.export import export_16bit
from infinity.checkpoint.extra import Parts, TrainingState
from infinity.checkpoint.identity import model_identity, unchanged
from infinity.checkpoint.load import Loaded, load_tensors, open_checkpoint
from infinity.checkpoint.runs import Run
from infinity.checkpoint.save import Options, Saving
from infinity.checkpoint.shards import write_shards
from infinity.errors import ConfigError, InfinityError
from infinity.optim.optimizer import TieredOptimizer
from infinity.zero.build import Runtime
from infinity.zero.step import Step
from infinity.zero.step_counter import Counts


class Session:
    """Saves and loads one engine's state, between its steps. All ranks call every method together.

    Attributes:
        commits: commits every step on NVMe, if `tiering.crash_consistent` is set.
    """

    def __init__(self, model: nn.Module, optimizer: TieredOptimizer, runtime: Runtime, step: Step) -> None:
        self._model = model
        self._training = TrainingState(model, optimizer, step)
        self._runtime = runtime
        self._step = step
        self._run = Run(model)
        run = runtime.swap.run
        self.commits = None if run is None else Commits(self._training, runtime, run)
        step.keeper = self.commits
        self._background: BackgroundSave | None = None
        self._background_error: InfinityError | None = None  # of a save that failed in step(), until a call raises it

    def save(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        options: Options,
        blocking: bool,
    ) -> Path:
        """See `Engine.save_checkpoint`."""
        directory = _named("save_checkpoint", directory)
        self._begin("save_checkpoint")
        step, ranks, runtime = self._step, self._runtime.ranks, self._runtime
        extra = self._training.collect(client_state)
        tag = tag or f"global_step{step.counter.counts.global_steps}"
        of_ranks = ranks.of_all((extra["rng"], tag))
        extra["rng_of_ranks"] = [states for states, _ in of_ranks]
        run = self._run
        run.id, run.model = ranks.on_rank_0(lambda: (run.id, unchanged(run.model, model_identity(self._model))))
        if len({other for _, other in of_ranks}) > 1:
            given = ", ".join(repr(other) for _, other in of_ranks[:4])
            raise ConfigError(f"save_checkpoint: tag is not the same on all ranks ({given}): they write one checkpoint")
        saving = Saving(
            self._of_this_part(directory),
            tag,
            runtime,
            run=run,
            steps=step.updates.steps,
            counters=asdict(step.counter.counts),
            options=options,
        )
        with ExitStack() as undo, runtime.counters.aside("save_checkpoint"):
            undo.callback(saving.close)
            saving.begin(extra, codes_of(self._model) if options.frozen else {})
            if blocking or runtime.states.some_are_on_device:  # no worker updates these, so none would save them first
                return saving.finish(lambda: write_shards(saving.shards, runtime, frozen=options.frozen))
            self._background = BackgroundSave(saving, runtime, step, frozen=options.frozen, over=self._saving_is_over)
            undo.pop_all()
        return saving.path

    @property
    def saving(self) -> Path | None:
        """See `Engine.saving`."""
        return None if self._background is None else self._background.path

    def finish_saving(self) -> None:
        """Finish the background save, if there is one. All ranks call this together, between steps.

        Raises:
            StorageError, CheckpointError: a save failed, now or at the end of a step since the last call.
        """
        self._raise_background_error()
        if self._background is not None:
            self._background.finish()

    def end_saving(self, *, failed: bool) -> None:
        """Finish the background save before the engine is closed, or cancel it if it cannot be finished any more.

        Args:
            failed: the engine is closed by an error that other ranks may not have.
        """
        if self._background is not None:
            self._background.end("the engine was closed", failed=failed)
        elif not failed:
            self._raise_background_error()

    def cancel_saving(self) -> None:
        """Cancel the background save, if there is one, on this rank alone."""
        if self._background is not None:
            self._background.cancel("the engine was closed before it was finished")

    def _saving_is_over(self, error: InfinityError | None) -> None:
        self._background = None
        self._background_error = error

    def _raise_background_error(self) -> None:
        error, self._background_error = self._background_error, None
        if error is not None:
            raise error

    def load(
        self, directory: str | Path, tag: str | None, parts: Parts, *, strict_model: bool, all_weights: bool = True
    ) -> tuple[Path | None, dict[str, Any] | None]:
        """See `Engine.load_checkpoint`."""
        directory = _named("load_checkpoint", directory)
        if self.commits is not None:
            self.commits.check_resumed("engine.load_checkpoint()")
        self._begin("load_checkpoint")
        opened = open_checkpoint(
            self._of_this_part(directory),
            tag,
            self._runtime,
            self._run,
            codes=codes_of(self._model),
            moments=parts.optimizer,
            strict_model=strict_model,
            all_weights=all_weights,
            check=lambda path, extra: self._training.check(path, extra, parts),
        )
        if opened is None:
            return None, None
        try:
            self._take_over(opened, parts)
        except BaseException as error:
            self._step.fail(error)  # values of two checkpoints may be mixed
            raise
        return opened.path, opened.extra["client_state"]

    def _take_over(self, opened: Loaded, parts: Parts) -> None:
        """Replace the engine's state by that of a checkpoint."""
        step, runtime = self._step, self._runtime
        with runtime.counters.aside("load_checkpoint"):
            load_tensors(opened, runtime, codes_of(self._model), moments=parts.optimizer)
        runtime.show_newest()
        step.updates.steps = dict(opened.manifest.steps) if parts.optimizer else {}
        if parts.progress:
            step.counter.resume(Counts(**opened.manifest.counters))
            self._run.id = opened.manifest.run or self._run.id
        self._training.apply(opened.path, runtime.ranks.rank, opened.extra, parts)

    def export(
        self,
        directory: str | Path,
        values: Iterable[tuple[str, torch.Tensor]],
        max_shard_size: int | str,
        *,
        file_name: str | None,
        frozen: bool,
    ) -> Path:
        """See `Engine.save_16bit_model`."""
        directory = _named("save_16bit_model", directory)
        self._runtime.ranks.together("engine.save_16bit_model()")
        export_16bit(directory, self._model, self._runtime, values, max_shard_size, file_name=file_name, frozen=frozen)
        return directory

    def resume(self) -> tuple[Path | None, dict[str, Any] | None]:
        """See `Engine.resume`."""
        commits = self._kept("resume")
        self._begin("resume")
        return commits.resume()

    def commit(self) -> None:
        """See `Engine.commit`."""
        commits = self._kept("commit")
        self._begin("commit")
        commits.commit()

    def end_run(self) -> None:
        """See `Engine.end_run`."""
        commits = self._kept("end_run")
        self._begin("end_run")
        commits.end()

    def keep_with_steps(self, client_state: ClientState) -> None:
        """See `Engine.keep_with_steps`."""
        self._kept("keep_with_steps").client_state = client_state

    def _kept(self, what: str) -> Commits:
        if self.commits is None:
            raise ConfigError(f"engine.{what}() is for runs that keep every step: set tiering.crash_consistent to true")
        return self.commits

    def unclaim(self) -> None:
        """Release the directories that this run has saved in, so that other runs may save there."""
        self._run.unclaim()

    def wait(self) -> None:
        """See `Engine.wait_checkpoint`."""
        self._begin("wait_checkpoint")

    @property
    def in_worker(self) -> bool:
        """Whether this thread is the optimizer's, or the one that commits steps."""
        return self._runtime.pipeline.is_worker() or (self.commits is not None and self.commits.is_worker())

    def finish_commits(self) -> None:
        """See `Commits.finish`."""
        if self.commits is not None:
            self.commits.finish()

    def close_commits(self) -> None:
        """Commit the last step, if possible, and end the commits."""
        if self.commits is not None:
            self.commits.close()

    def _begin(self, what: str) -> None:
        """Check that no step is running, and block until all updates, commits and saves have ended."""
        self._step.check_boundary(what)
        self._runtime.ranks.together(f"engine.{what}()")
        self._step.drain()
        if self.commits is not None:
            self.commits.wait()
        self.finish_saving()

    def _of_this_part(self, directory: Path) -> Path:
        """Return the directory for the checkpoints of this process's part of the model (tensor parallelism)."""
        parts = self._runtime.parts.ranks
        return directory if parts.size == 1 else directory / f"part-{parts.rank}-of-{parts.size}"


def _named(call: str, directory: str | Path | None) -> Path:
    """Return the directory as a path. Raise ConfigError if it is no path or empty, as from an unset variable."""
    if not isinstance(directory, (str, os.PathLike)) or directory == "":
        raise ConfigError(f'{call}: the directory is {directory!r}; give its path, "." for the working directory')
    return Path(directory)
