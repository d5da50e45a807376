"""Packs documents into samples of one length, on disk.

[Note: what a sample holds]
A sample holds documents one after the other. Attention does not cross documents: in each, positions begin at 0, by
which transformers separates them. The first token of a document is not predicted. A text that does not fit into the
rest of a sample continues in the next one, from position 0. A conversation begins in the next sample instead, and its
end is cut off if it is longer than a sample. The rest of a sample is filled with tokens that are not learned.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.cli.training.data import temporary_file
from infinity.cli.training.documents import Document
from infinity.errors import ConfigError

_LEARNED, _FIRST = 1, 2  # bits of a token's flags: the model learns to predict it; it is the first of a document
_IGNORED = -100  # the label that loss functions ignore


class Packed:
    """Samples that are packed with documents.

    Attributes:
        vocabulary: one more than the largest token, or the tokenizer's vocabulary if that is larger.
        documents, cut, dropped: number of documents; of those that were cut; of those without a learned token.

    Raises:
        ConfigError: no document has a learned token.
    """

    def __init__(self, documents: Iterable[Document], length: int, vocabulary: int, fill: int) -> None:
        self.length = length
        self.vocabulary = vocabulary
        self.documents = self.cut = self.dropped = 0
        self.tokens = 0
        self._fill = fill
        with temporary_file() as ids, temporary_file() as flags:  # memory mappings keep them alive
            self._pack(documents, ids, flags)
            if not flags.tell():
                raise ConfigError(
                    f"--data has nothing to learn: {self.documents} documents, {self.cut} of which are longer than "
                    f"--seq-len {length}; give documents with answers, or a --seq-len that includes the answers"
                )
            ids.flush()
            flags.flush()
            self._ids = np.memmap(ids, dtype=np.int32, mode="r").reshape(-1, length)
            self._flags = np.memmap(flags, dtype=np.uint8, mode="r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self._ids)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Return the model's arguments for a sample, each a 1-D int64 tensor."""
        ids = self._ids[index].astype(np.int64)
        flags = self._flags[index]
        firsts = np.flatnonzero(flags & _FIRST)
        places = np.arange(self.length)
        positions = places - firsts[np.searchsorted(firsts, places, side="right") - 1]
        labels = np.where(flags & _LEARNED, ids, _IGNORED)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def crc(self, index: int, crc: int) -> int:
        """Return a checksum of the sample, continued from `crc`."""
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
                flags[:1] = _FIRST  # the rest is a document of its own in the next sample
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
    """The sample that is being filled; `room` is the number of tokens that still fit."""

    def __init__(self, length: int, fill: int) -> None:
        self._length, self._fill = length, fill
        self.begin()

    def begin(self) -> None:
        """Start an empty sample. Its unused end becomes a document without learned tokens."""
        self.room = self._length
        self.ids: NDArray[np.int32] = np.full(self._length, self._fill, np.int32)
        self.flags: NDArray[np.uint8] = np.zeros(self._length, np.uint8)

    def take(self, ids: NDArray[np.int32], flags: NDArray[np.uint8]) -> int:
        """Append as many tokens as fit. Return their number."""
        at = self._length - self.room
        count = min(self.room, len(ids))
        self.ids[at : at + count] = ids[:count]
        self.flags[at : at + count] = flags[:count]
        self.room -= count
        if self.room:
            self.flags[at + count] = _FIRST
        return count
