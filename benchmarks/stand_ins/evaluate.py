"""Stands where `evaluate` does for accelerate's scripts."""

from __future__ import annotations

from typing import Any


class Metric:
    """Accuracy and F1 of what was added."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self._pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        pairs, self._pairs = self._pairs, []
        both = sum(found == wanted == 1 for found, wanted in pairs)
        ones = sum(found + wanted for found, wanted in pairs)
        right = sum(found == wanted for found, wanted in pairs)
        return {"accuracy": right / len(pairs), "f1": 2 * both / ones if ones else 0.0}


def load(path: str, name: str | None = None) -> Metric:
    return Metric()
