"""This rank's slice of a flat tensor. Pure arithmetic.

A flat tensor holds the trainable elements first, then the frozen ones. Each of the two parts is cut into one slice for
every rank; a shard is the rank's two slices back to back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Elements that are consecutive both in a shard and in the flat tensor.

    Attributes:
        shard: their start in the shard.
        whole: their start in the flat tensor.
    """

    shard: int
    whole: int
    numel: int


@dataclass(frozen=True)
class Sharding:
    """The position of one rank among `count` that share a flat tensor."""

    rank: int = 0
    count: int = 1

    @property
    def label(self) -> str:
        """Part of the name of a file that holds this slice; empty if the slice is the whole tensor."""
        return f"-rank-{self.rank:05d}" if self.count > 1 else ""

    def pieces(self, trainable_numel: int, numel: int) -> tuple[Piece, ...]:
        """Return this rank's slices of the trainable elements, `[0, trainable_numel)`, and of the frozen elements.

        Both lengths are multiples of `count`. Empty slices are omitted.
        """
        trained = trainable_numel // self.count
        frozen = (numel - trainable_numel) // self.count
        slices = (
            Piece(0, self.rank * trained, trained),
            Piece(trained, trainable_numel + self.rank * frozen, frozen),
        )
        return tuple(piece for piece in slices if piece.numel)


WHOLE = Sharding()


def overlap(piece: Piece, start: int, stop: int) -> Piece | None:
    """Return the part of a piece that lies in `[start, stop)` of the flat tensor, or None."""
    low, high = max(start, piece.whole), min(stop, piece.whole + piece.numel)
    return Piece(piece.shard + low - piece.whole, low, high - low) if low < high else None
