"""Checks that training gives the same bits for every placement and schedule, and follows plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from infinity.cli.selftesting.outcome import Check
from infinity.cli.selftesting.training import Place, Recipe, Trained, train, train_plainly

RECIPES = (
    Recipe("bf16"),
    Recipe("bf16", clipping=0.5),
    Recipe("fp32", accumulation=2, clipping=0.5),
    Recipe("fp16", clipping=0.5),
)
HOMES = ("none", "cpu", "nvme")
# Enough for two blocks of four, and all states or a few tiles of them.
_HOST_BYTES = {"none": "2900KB", "cpu": "2900KB", "nvme": "900KB"}
_DEVICE_BYTES = "700KB"
_CLOSE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}  # allowed relative difference from plain torch's losses
# Races show if copies take longer than computation: units of 16 MiB, and few tokens.
_RACE = Recipe("bf16", steps=4, width=1024, blocks=3)


class Parity:
    """Trainings on one device, each compared with a reference: the same training with the schedule `barrier`.

    Args:
        path: a directory on a drive.
    """

    def __init__(self, device: torch.device, path: Path) -> None:
        self._device = device
        self._path = path
        self._apart = device.type != "cpu"
        self.reference = cache(self._reference)

    def _reference(self, recipe: Recipe, state_format: str) -> Trained:
        home = "cpu" if self._apart else "none"
        formats = {} if state_format == "auto" else {"state_format": state_format}
        return train(recipe, Place(home, home, "barrier", formats), self._device, self._path)

    def compare(self, recipe: Recipe, place: Place) -> str:
        trained = train(recipe, place, self._device, self._path)
        return trained.difference(self.reference(recipe, place.tiering.get("state_format", "auto")))

    def follow(self, recipe: Recipe) -> str:
        ours, plain = self.reference(recipe, "auto").losses, train_plainly(recipe, self._device)
        off = max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))
        return "" if off < _CLOSE[recipe.precision] else f"the losses are {ours}, and {plain} in plain torch"

    def checks(self) -> Iterator[Check]:
        """Yield all checks. Those against plain torch come first, because they check the references of the others."""
        for recipe in RECIPES:
            yield Check("plain torch", _name(recipe), partial(self.follow, recipe))
        for recipe in RECIPES:
            for params in HOMES:
                for states in HOMES:
                    place = self._tight(Place(params, states))
                    name = f"parameters {params}, states {states}, {_name(recipe)}"
                    yield Check("placements", name, partial(self.compare, recipe, place))
        for name, recipe, place in self._others():
            yield Check("schedules and formats", name, partial(self.compare, recipe, place))
        for name, place in (("host memory", Place("cpu", "cpu")), ("drive", Place("nvme", "nvme"))):
            yield Check("races", f"large units in {name}", partial(self.compare, _RACE, place))

    def _tight(self, place: Place) -> Place:
        """Return the placement with so little memory that units are evicted."""
        if place.params == "none":
            return place
        if self._apart:
            return replace(place, tiering=place.tiering | {"device_memory": _DEVICE_BYTES})
        if place.params == "nvme":
            return replace(place, tiering=place.tiering | {"host_memory": _HOST_BYTES[place.states]})
        return place

    def _others(self) -> Iterator[tuple[str, Recipe, Place]]:
        plain, clipped, summed = RECIPES[0], RECIPES[1], RECIPES[2]
        moving = self._tight(Place("nvme", "nvme"))
        yield "backward", plain, replace(moving, schedule="backward")
        for schedule in ("deferred", "speculative"):
            yield f"{schedule}, clipping", clipped, replace(moving, schedule=schedule)
            yield f"{schedule}, clipping, in host memory", clipped, Place("cpu", "cpu", schedule)
        for state_format in ("bf16", "int8"):
            tiering = moving.tiering | {"state_format": state_format}
            yield f"moments in {state_format}", plain, replace(moving, tiering=tiering)
        yield "layer-major", summed, replace(moving, tiering=moving.tiering | {"accumulation": "layer"})
        yield "checksums", plain, replace(moving, tiering=moving.tiering | {"checksum": True})
        if self._apart:
            yield "half of the states on the device", clipped, Place("none", "cpu", zero=_ratio(0.5))
            yield "states fill the device", plain, Place("none", "cpu", tiering={"fill_device": True})
            for home in ("cpu", "nvme"):
                kept = {"activations": home, "activation_memory": "4MiB"}
                yield f"activations in {home}", plain, Place("cpu", "cpu", tiering=kept)


def _ratio(share: float) -> dict[str, object]:
    return {"offload_optimizer": {"device": "cpu", "ratio": share}}


def _name(recipe: Recipe) -> str:
    more = f", {recipe.accumulation} micro-batches" if recipe.accumulation > 1 else ""
    return recipe.precision + more + (", clipping" if recipe.clipping else "")
