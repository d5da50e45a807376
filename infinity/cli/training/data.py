"""Text as samples of tokens: any size of text, in bounded memory, in an order that a step number fixes."""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from infinity.errors import ConfigError

_SUFFIXES = frozenset((".txt", ".md", ".rst", ".py", ".json", ".html", ".c", ".h", ".cpp"))
_INSTALLED = frozenset(("site-packages", "dist-packages"))  # not the standard library's own, though below it
BYTE_VOCABULARY = 256


class Tokens(Protocol):
    """A long sequence of tokens."""

    vocabulary: int

    def __len__(self) -> int: ...

    def read(self, start: int, count: int) -> torch.Tensor:
        """Tokens `[start, start + count)` as a 1-D int64 tensor."""


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The text files among and below `paths`, in a fixed order.

    Raises:
        ConfigError: a path does not exist, or there is no text at all.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = (p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
            files += sorted(p for p in found if _INSTALLED.isdisjoint(p.relative_to(path).parts))
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"--data {path} does not exist")
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise ConfigError(f"--data has no text files ({', '.join(sorted(_SUFFIXES))}) with any content")
    return files


class ByteTokens:
    """Files as one sequence of their bytes, read when they are needed."""

    vocabulary = BYTE_VOCABULARY

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._ends = list(accumulate(path.stat().st_size for path in files))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, count: int) -> torch.Tensor:
        data = bytearray()
        index = bisect.bisect_right(self._ends, start)
        while len(data) < count:
            begin = self._ends[index - 1] if index else 0
            with self._files[index].open("rb") as file:
                file.seek(start + len(data) - begin)
                part = file.read(count - len(data))
            if not part:
                raise ConfigError(f"--data {self._files[index]} became shorter while it was read")
            data += part
            index += 1
        return torch.frombuffer(data, dtype=torch.uint8).long()


class TokenizedFiles:
    """Files run through a tokenizer once, into a temporary file."""

    def __init__(self, files: Sequence[Path], tokenizer: Any) -> None:
        self.vocabulary = len(tokenizer)
        self._storage = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the object)
        for path in files:
            text = path.read_text(encoding="utf-8", errors="replace")
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            self._storage.write(np.asarray(ids, dtype=np.int32).tobytes())
        self._storage.flush()
        self._tokens = np.memmap(self._storage, dtype=np.int32, mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[start : start + count].astype(np.int64))


class Samples:
    """Fixed-length samples in an order that seed and number alone decide, so that a run can go on anywhere.

    Args:
        length: tokens in a sample.
        seed: of the shuffle; every pass over the data has another order.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        self._tokens = tokens
        self._length = length
        self._count = len(tokens) // length
        if not self._count:
            raise ConfigError(f"--data has {len(tokens)} tokens, fewer than one sample of --seq-len {length}")
        self._order = lru_cache(maxsize=2)(lambda epoch: self._permutation(seed, epoch))

    def _permutation(self, seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(self._count, generator=generator)

    def batch(self, first: int, size: int) -> torch.Tensor:
        """Samples number `first` to `first + size` of the run, shape [size, length], int64."""
        rows = []
        for number in range(first, first + size):
            epoch, position = divmod(number, self._count)
            index = int(self._order(epoch)[position])
            rows.append(self._tokens.read(index * self._length, self._length))
        return torch.stack(rows)
