"""Samples of tokens from text of any size, in bounded memory, in an order that depends only on the seed."""

from __future__ import annotations

import bisect
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.cli.training.turns import in_turns
from infinity.errors import ConfigError
from infinity.io.directory import how_to_grow
from infinity.zero.ranks import ALONE, Ranks

_SUFFIXES = frozenset((".txt", ".md", ".rst", ".py", ".json", ".html", ".c", ".h", ".cpp"))
_INSTALLED = frozenset(("site-packages", "dist-packages"))  # below the standard library, but not part of it
_PIECE_CHARS = 1 << 20
_LINE_CHARS = 1 << 16
_PROBES = 64  # samples whose tokens make up the fingerprint
BYTE_VOCABULARY = 256


class Tokens(Protocol):
    """A long sequence of tokens."""

    vocabulary: int

    def __len__(self) -> int: ...

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return tokens `[start, start + count)` as a 1-D int64 tensor."""


def find_files(paths: Iterable[Path], option: str = "--data") -> list[Path]:
    """Return the text files in `paths` and in directories of `paths`, in a fixed order.

    Raises:
        ConfigError: a path does not exist, a directory cannot be read, or all files are empty.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = (p for p in _below(path, option) if p.suffix in _SUFFIXES and p.is_file())
            files += sorted(p for p in found if _INSTALLED.isdisjoint(p.relative_to(path).parts))
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"{option} {path} does not exist")
    files = [path for path in files if path.stat().st_size]
    if not files:
        named = ", ".join(map(str, paths))
        kinds = ", ".join(sorted(_SUFFIXES))
        raise ConfigError(f"{option} {named}: there is no text; give files with content, or directories with {kinds}")
    return files


def _below(directory: Path, option: str) -> Iterator[Path]:
    def refuse(error: OSError) -> None:  # `rglob` would skip unreadable directories silently
        raise ConfigError(f"{option} {error.filename} cannot be read: {error.strerror}") from error

    for parent, _, names in os.walk(directory, onerror=refuse):
        yield from (Path(parent, name) for name in names)


class ByteTokens:
    """The bytes of files as one sequence of tokens, read on demand."""

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
            part = self._read_file(self._files[index], start + len(data) - begin, count - len(data))
            if not part:
                raise ConfigError(f"--data {self._files[index]} became shorter while it was read")
            data += part
            index += 1
        return torch.frombuffer(data, dtype=torch.uint8).long()

    @staticmethod
    def _read_file(path: Path, offset: int, count: int) -> bytes:
        with readable(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(count)


class TokenizedFiles:
    """The tokens of files, tokenized once into a temporary file.

    Args:
        ranks: ranks that have the same files; each tokenizes its share of them.

    Raises:
        ConfigError: a file cannot be read, or the tokenizer returns no token for any of them.
    """

    def __init__(self, files: Sequence[Path], tokenizer: Any, ranks: Ranks = ALONE) -> None:
        def tokens_of(text: str) -> NDArray[np.int32]:
            return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

        self.vocabulary = len(tokenizer)  # raised below, because token numbers may have gaps
        texts = chain.from_iterable(map(_pieces, files))
        with temporary_file() as storage:  # the memory mapping keeps the file alive
            for ids in in_turns(texts, tokens_of, ranks, "tokenizing --data"):
                self.vocabulary = max(self.vocabulary, 1 + int(ids.max(initial=-1)))
                storage.write(ids.tobytes())
            storage.flush()
            if not storage.tell():
                raise ConfigError(f"the tokenizer finds no token in --data ({_listed(files)}): does it fit the text?")
            self._tokens = np.memmap(storage, dtype=np.int32, mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[start : start + count].astype(np.int64))


def _pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces that end with a line, or within a line if it is longer than `_LINE_CHARS`."""
    with readable(path), path.open(encoding="utf-8", errors="replace") as file:
        while text := file.read(_PIECE_CHARS):
            yield text + file.readline(_LINE_CHARS)


@contextmanager
def temporary_file() -> Iterator[IO[bytes]]:
    """Yield a temporary file for tokens. Raise ConfigError if it cannot be made or written in this context."""
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"the tokens of --data cannot be written to a temporary file in {tempfile.tempdir}: {error.strerror}; "
            f"{how_to_grow(error)}, or set TMPDIR to a directory that has 5 bytes free for each token"
        ) from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert OSErrors in this context to ConfigErrors that name the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--data {path} cannot be read: {error.strerror}") from error


def _listed(files: Sequence[Path]) -> str:
    return f"{files[0]}" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


class Source(Protocol):
    """Samples of one length, by number.

    Attributes:
        tokens: number of tokens in all samples.
        vocabulary: one more than the largest token.
    """

    @property
    def length(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    def __len__(self) -> int: ...

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Return the model's arguments for a sample, each a 1-D int64 tensor."""

    def crc(self, index: int, crc: int) -> int:
        """Return a checksum of the sample, continued from `crc`."""


class Stream:
    """A sequence of tokens cut into samples. Tokens after the last whole sample are left out.

    Raises:
        ConfigError: the sequence is shorter than one sample.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.length = length
        self.tokens = len(tokens)
        self.vocabulary = tokens.vocabulary
        self._tokens = tokens
        if self.tokens < length:
            raise ConfigError(
                f"--data has {len(tokens)} tokens, fewer than one sample of --seq-len {length}: give more text, or a "
                "shorter --seq-len"
            )

    def __len__(self) -> int:
        return self.tokens // self.length

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._tokens.read(index * self.length, self.length)
        return {"input_ids": ids, "labels": ids}

    def crc(self, index: int, crc: int) -> int:
        return zlib.crc32(self._tokens.read(index * self.length, self.length).numpy().tobytes(), crc)


def hold_out(source: Source, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the samples to train on, and of a random share of all samples to evaluate on.

    Raises:
        ConfigError: one of the two would be empty.
    """
    count = len(source)
    held = round(share * count)
    if not 0 < held < count:
        raise ConfigError(
            f"--eval-split {share:g} of {count} samples holds out {held}, and leaves {count - held}: neither may be 0"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[held:].sort().values, order[:held].sort().values


class Samples:
    """Samples in an order that depends only on the seed, so that a run can continue from any sample.

    Args:
        seed: seed of the shuffle; each pass over the data has another order.
        chosen: numbers of the samples to use; by default all of the source.
    """

    def __init__(self, source: Source, seed: int, chosen: torch.Tensor | None = None) -> None:
        self._source = source
        self._seed = seed
        self._chosen = chosen
        self._count = len(source) if chosen is None else len(chosen)
        self._order = lru_cache(maxsize=2)(lambda epoch: self._permutation(seed, epoch))

    @property
    def count(self) -> int:
        """Number of samples in one pass over the data."""
        return self._count

    def fingerprint(self) -> dict[str, int]:
        """Return the facts that determine the order and content of samples; `crc` is of samples all over the data."""
        crc, probes = 0, min(_PROBES, self._count)
        for probe in range(probes):
            crc = self._source.crc(self._index(probe * (self._count - 1) // max(1, probes - 1)), crc)
        found = {"tokens": self._source.tokens, "seq_len": self._source.length, "seed": self._seed, "crc": crc}
        return found if self._chosen is None else {**found, "samples": self._count}

    def _permutation(self, seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(self._count, generator=generator)

    def _index(self, position: int) -> int:
        return position if self._chosen is None else int(self._chosen[position])

    def batch(self, first: int, size: int) -> dict[str, torch.Tensor]:
        """Return samples `[first, first + size)` of the run as int64 tensors of shape [size, length]."""
        rows = []
        for number in range(first, first + size):
            epoch, position = divmod(number, self._count)
            rows.append(self._source.sample(self._index(int(self._order(epoch)[position]))))
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
