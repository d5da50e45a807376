"""Stands where `datasets` does for accelerate's scripts: pairs of sentences that a model can learn to tell apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
SIZES = {"train": 128, "validation": 67}  # the last batch of the second is not full

Row = dict[str, Any]


class Rows:
    """A split."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def map(self, function: Callable[[Mapping[str, list[Any]]], Mapping[str, list[Any]]], **how: Any) -> Rows:
        made = function({key: [row[key] for row in self._rows] for key in self._rows[0]})
        removed = how.get("remove_columns", ())
        kept = [{key: value for key, value in row.items() if key not in removed} for row in self._rows]
        return Rows([row | {key: made[key][index] for key in made} for index, row in enumerate(kept)])

    def rename_column(self, old: str, new: str) -> Rows:
        return Rows([{new if key == old else key: value for key, value in row.items()} for row in self._rows])


class Splits(dict[str, Rows]):
    """Splits by name."""

    def map(self, function: Any, **how: Any) -> Splits:
        return Splits({name: rows.map(function, **how) for name, rows in self.items()})

    def rename_column(self, old: str, new: str) -> Splits:
        return Splits({name: rows.rename_column(old, new) for name, rows in self.items()})


def load_dataset(path: str, name: str | None = None, *, split: Any = None, **_: Any) -> Rows | Splits:
    """Every split, one by name (`validation`, `train[:20]`), or several by a mapping of names."""
    if isinstance(split, str):
        return _rows(split)
    wanted: Mapping[str, str] = split or {name: name for name in SIZES}
    return Splits({name: _rows(spec) for name, spec in wanted.items()})


def _rows(spec: str) -> Rows:
    name, _, most = spec.partition("[:")
    size = min(SIZES[name], int(most.rstrip("]") or SIZES[name])) if most else SIZES[name]
    choice = random.Random(name)
    rows = []
    for index in range(size):
        label = index % 2
        first = " ".join(choice.choices(WORDS, k=choice.randrange(3, 7)))
        rows.append({"sentence1": first, "sentence2": 12 * ("other ", "same ")[label], "label": label, "idx": index})
    return Rows(rows)


def _nothing(*_: Iterable[Any]) -> None:
    """Verbosity is left alone."""


utils = SimpleNamespace(logging=SimpleNamespace(set_verbosity_warning=_nothing, set_verbosity_error=_nothing))
