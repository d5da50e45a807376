"""Check by the manifest alone that a checkpoint fits the model and the optimizer."""

from __future__ import annotations

import logging
from pathlib import Path

from infinity.checkpoint.codes import Codes, check_codes
from infinity.checkpoint.format import FROZEN_FIELD, MASTER_FIELD, Manifest
from infinity.checkpoint.identity import first_difference
from infinity.checkpoint.runs import Run
from infinity.errors import CheckpointError
from infinity.zero.build import Runtime

_log = logging.getLogger(__name__)


def check_fit(
    path: Path,
    manifest: Manifest,
    runtime: Runtime,
    run: Run,
    codes: Codes,
    *,
    moments: bool,
    strict_model: bool,
    all_weights: bool,
) -> None:
    """Check that the checkpoint's tensors are those of the model, and raise CheckpointError if not.

    Args:
        codes: the codes of the model, by name.
        moments: the moments will be loaded, too.
        strict_model: refuse a checkpoint of another model with the same parameters. Otherwise log a warning.
        all_weights: refuse a checkpoint that lacks some frozen parameters or codes.
    """
    _check_weights(path, manifest, runtime, all_of_them=all_weights)
    _check_model(path, manifest, run, strict=strict_model)
    if moments:
        _check_moments(path, manifest, runtime)
    check_codes(path, manifest, codes, all_of_them=all_weights)


def _check_model(path: Path, manifest: Manifest, run: Run, *, strict: bool) -> None:
    """Check that the saved model computes the same as this one, as far as `identity.py` can see that."""
    difference = None if manifest.model is None else first_difference(manifest.model, run.model)
    if difference is None:
        return
    if strict:
        raise CheckpointError(
            f"{path} is of another model: {difference}. Build the model that was saved, or pass strict_model=False to "
            "load its values anyway"
        )
    _log.warning("%s is of another model, and is loaded anyway: %s", path, difference)


def _check_moments(path: Path, manifest: Manifest, runtime: Runtime) -> None:
    """Check that the moments are those of this optimizer, and of no parameter that is frozen here."""
    ours = (runtime.layout.first, runtime.layout.second)
    if manifest.moments != ours:
        raise CheckpointError(
            f"{path} has the moments {_names(manifest.moments)}, but this optimizer keeps {_names(ours)}: "
            "choose the optimizer that the checkpoint was saved with"
        )
    infos = [info for unit in runtime.partition.units for info in unit.params]
    trained = {info.name for info in infos if info.trainable}
    saved = manifest.stored(MASTER_FIELD).keys()
    for name in sorted(saved - trained):
        raise CheckpointError(
            f"{name} is frozen, but in {path} it was trained: load with load_module_only=True to take the weights alone"
        )
    if fresh := sorted(trained - saved):
        _log.warning(
            "`%s` and %d other parameters were frozen in %s and are trained here: they begin with fresh optimizer "
            "states",
            fresh[0],
            len(fresh) - 1,
            path,
        )
    for name in manifest.steps.keys() - trained:
        raise CheckpointError(f"{path} counts the updates of {name}, which is no parameter that is trained")


def _check_weights(path: Path, manifest: Manifest, runtime: Runtime, *, all_of_them: bool) -> None:
    """Check that the checkpoint has every parameter of the model, in its shape, and no others."""
    saved = manifest.stored(MASTER_FIELD) | manifest.stored(FROZEN_FIELD)
    infos = [info for unit in runtime.partition.units for info in unit.params]
    kept = []
    for info in infos:
        name, shape = info.name, info.shape
        if name in saved:
            if saved[name].shape != shape:
                raise CheckpointError(f"{path} has {name} in shape {saved[name].shape}; the model has {shape}")
        elif info.trainable or all_of_them:
            hint = "" if info.trainable else ", or was saved without frozen ones (load_module_strict=False keeps those)"
            raise CheckpointError(f"{path} has no parameter {name}: it is of another model{hint}")
        else:
            kept.append(name)
    if kept:
        _log.warning(
            "%s has no `%s` and %d other frozen parameters, which keep their values", path, kept[0], len(kept) - 1
        )
    for name in saved.keys() - {info.name for info in infos}:
        raise CheckpointError(f"{path} has a parameter {name}, which the model does not have: it is of another model")


def _names(moments: tuple[str | None, str | None]) -> str:
    return " and ".join(name for name in moments if name is not None)
