"""Which slice of a flat tensor is this rank's. Pure arithmetic.

A flat tensor holds what is trained first, then what is frozen. Each of the two is cut into one slice for every rank,
and a shard is the rank's two slices back to back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements that a shard and the whole have in common.

    Attributes:
        shard: where they begin in the shard.
        whole: where they begin in the flat tensor.
    """

    shard: int
    whole: int
    numel: int


@dataclass(frozen=True)
class Sharding:
    """The place of one rank among `count` that share a flat tensor."""

    rank: int = 0
    count: int = 1

    @property
    def label(self) -> str:
        """Of a file that holds this slice; nothing where it is all."""
        return f"-rank-{self.rank:05d}" if self.count > 1 else ""

    def pieces(self, trainable_numel: int, numel: int) -> tuple[Piece, ...]:
        """This rank's slices of what is trained, `[0, trainable_numel)`, and of what is frozen, up to `numel`.

        Both lengths are multiples of `count`; a slice without elements is left out.
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
    """The part of a piece that lies in `[start, stop)` of the whole."""
    low, high = max(start, piece.whole), min(stop, piece.whole + piece.numel)
    return Piece(piece.shard + low - piece.whole, low, high - low) if low < high else None
