"""Documents packed into samples of one length, on disk.

[Note: what a sample holds]
Documents one after the other, none of which sees another: positions begin at 0 in each, by which transformers keeps
attention within it, and its first token is nobody's to predict. A text that is too long for what is left goes on in the
next sample, from a position of 0; a conversation begins in the next sample instead, and is cut where it is longer than
one. What is left is filled with tokens that are not learned.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterable
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.cli.training.documents import Document
from infinity.errors import ConfigError

_LEARNED, _FIRST = 1, 2  # bits of a token's flags: it is to be predicted; a document begins with it
_IGNORED = -100  # the label that losses leave out


class Packed:
    """Samples of documents.

    Attributes:
        vocabulary: one more than the largest token, or what the tokenizer has, if that is more.
        documents, cut, dropped: how many there are; that were longer than a sample; that had nothing to learn.

    Raises:
        ConfigError: there is nothing to learn at all.
    """

    def __init__(self, documents: Iterable[Document], length: int, vocabulary: int, fill: int) -> None:
        self.length = length
        self.vocabulary = vocabulary
        self.documents = self.cut = self.dropped = 0
        self.tokens = 0
        self._fill = fill
        with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as flags:  # the mappings keep them alive
            self._pack(documents, ids, flags)
            if not flags.tell():
                raise ConfigError(
                    f"--data has nothing to learn: {self.documents} documents, {self.cut} of which are longer than "
                    f"--seq-len {length}; give documents that have answers, or a --seq-len that reaches them"
                )
            ids.flush()
            flags.flush()
            self._ids = np.memmap(ids, dtype=np.int32, mode="r").reshape(-1, length)
            self._flags = np.memmap(flags, dtype=np.uint8, mode="r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self._ids)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """What the model is given."""
        ids = self._ids[index].astype(np.int64)
        flags = self._flags[index]
        firsts = np.flatnonzero(flags & _FIRST)
        places = np.arange(self.length)
        positions = places - firsts[np.searchsorted(firsts, places, side="right") - 1]
        labels = np.where(flags & _LEARNED, ids, _IGNORED)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def crc(self, index: int, crc: int) -> int:
        """A checksum of the sample, continued from `crc`."""
        return zlib.crc32(self._flags[index].tobytes(), zlib.crc32(self._ids[index].tobytes(), crc))

    def _pack(self, documents: Iterable[Document], ids_file: IO[bytes], flags_file: IO[bytes]) -> None:
        sample = _Sample(self.length, self._fill)

        def write() -> None:
            if sample.flags.any() and (sample.flags & _LEARNED).any():
                ids_file.write(sample.ids.tobytes())
                flags_file.write(sample.flags.tobytes())
            sample.begin()

        for document in documents:
            ids, flags = self._flagged(document)
            if not (flags & _LEARNED).any():
                self.dropped += 1
                continue
            self.tokens += len(ids)
            while len(ids):
                if not sample.room or (not document.splits and len(ids) > sample.room):
                    write()
                taken = sample.take(ids, flags)
                ids, flags = ids[taken:], flags[taken:].copy()
                flags[:1] = _FIRST  # what goes on in the next sample begins there
        if sample.room < self.length:
            write()

    def _flagged(self, document: Document) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        self.documents += 1
        ids = np.frombuffer(document.ids, np.uint8) if isinstance(document.ids, bytes) else np.asarray(document.ids)
        flags = np.full(len(ids), _LEARNED, np.uint8)
        if document.learned is not None:
            flags = np.asarray(document.learned, np.uint8) * np.uint8(_LEARNED)
        if len(ids):
            self.vocabulary = max(self.vocabulary, 1 + int(ids.max()))
        if not document.splits and len(ids) > self.length:
            self.cut += 1
            ids, flags = ids[: self.length], flags[: self.length]
        flags[:1] = _FIRST
        return ids.astype(np.int32), flags


class _Sample:
    """One that is being filled."""

    def __init__(self, length: int, fill: int) -> None:
        self._length, self._fill = length, fill
        self.begin()

    def begin(self) -> None:
        """Make it empty: what stays so is a document of its own, of which nothing is learned."""
        self.room = self._length
        self.ids: NDArray[np.int32] = np.full(self._length, self._fill, np.int32)
        self.flags: NDArray[np.uint8] = np.zeros(self._length, np.uint8)

    def take(self, ids: NDArray[np.int32], flags: NDArray[np.uint8]) -> int:
        """Put in what there is room for; returns how many tokens that is."""
        at = self._length - self.room
        count = min(self.room, len(ids))
        self.ids[at : at + count] = ids[:count]
        self.flags[at : at + count] = flags[:count]
        self.room -= count
        if self.room:
            self.flags[at + count] = _FIRST
        return count
