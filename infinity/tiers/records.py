"""The record of a rank's last finished step: which slots have it, and what goes with them.

[Note: records]
A record is one file, replaced by one rename, so it is always a whole one: a crash leaves the one before or the one
after. It describes the step that was committed last and, as another rank may not have come so far, the one before:
its slots are overwritten only once all ranks have the newer (see slots.py). So which of the two counts is for the ranks
to agree on, and a record that is damaged is refused: nobody can know what its slots hold.

The file: 8 bytes `INFRECD1`, the length of the head as a little-endian 64-bit number, the head as JSON, the bytes that
the head's generations name by their lengths, in order, and the SHA-256 of all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from infinity.config.typed import Capacity, Count, Positive, Rate, Real, parsed
from infinity.errors import CheckpointError
from infinity.tiers.striping import Stripe

_MAGIC = b"INFRECD1"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Generation:
    """One finished step.

    Attributes:
        sequence: how many commits the run has had; the same for the same commit on all ranks.
        state: counters and the like, as `_State` has them.
        slots: which slot has it, by range, see slots.py.
        extra: what else belongs to it, which only its writer knows to read.
    """

    sequence: int
    state: Mapping[str, Any]
    slots: bytes
    extra: bytes


@dataclass(frozen=True)
class Record:
    """What a rank of a run has on its drives.

    Attributes:
        run: the run's name.
        rank, ranks: which rank this is, of how many.
        facts: what another process must have alike to go on, by topic.
        stripes: the directories, and what the layout on them follows from.
        sizes: bytes of each one's file.
        layout: digest of what lies where.
        generations: the newest first, then the one before, if its slots are still there; none of a run that has ended.
    """

    run: str
    rank: int
    ranks: int
    facts: Mapping[str, Mapping[str, Any]]
    stripes: Sequence[Stripe]
    sizes: Sequence[int]
    layout: str
    generations: Sequence[Generation]

    def to_bytes(self) -> bytes:
        """The content of the file."""
        head = json.dumps(
            {
                "run": self.run,
                "rank": self.rank,
                "ranks": self.ranks,
                "facts": self.facts,
                "stripes": [[_text(stripe.path), stripe.weight, stripe.capacity_bytes] for stripe in self.stripes],
                "sizes": list(self.sizes),
                "layout": self.layout,
                "generations": [
                    {"sequence": g.sequence, "state": g.state, "slots": len(g.slots), "extra": len(g.extra)}
                    for g in self.generations
                ],
            }
        ).encode()
        blobs = b"".join(generation.slots + generation.extra for generation in self.generations)
        content = _MAGIC + _LENGTH.pack(len(head)) + head + blobs
        return content + hashlib.sha256(content).digest()


def _text(path: Path) -> str:
    """For messages; a path may be any bytes, which JSON has no text for."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def parse_record(path: Path, content: bytes) -> Record:
    """The record in a file's content.

    Args:
        path: for messages.

    Raises:
        CheckpointError: it is damaged.
    """
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if not body.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        raise _damaged(path, "its checksum differs, or it is of another version")
    try:
        start = len(_MAGIC) + _LENGTH.size
        stop = start + _LENGTH.unpack_from(body, len(_MAGIC))[0]
        head = parsed(_Head, body[start:stop])
        head.check()
        generations = []
        for step in head.generations:
            middle, end = stop + step.slots, stop + step.slots + step.extra
            generations.append(Generation(step.sequence, asdict(step.state), body[stop:middle], body[middle:end]))
            stop = end
        if stop != len(body):
            raise ValueError(f"`generations` describe {stop} bytes, and it has {len(body)}")
    except (ValueError, struct.error) as error:  # a checksum is no proof of who wrote it
        raise _damaged(path, str(error)) from error
    return Record(
        run=head.run,
        rank=head.rank,
        ranks=head.ranks,
        facts=head.facts,
        stripes=[Stripe(Path(name), weight, capacity) for name, weight, capacity in head.stripes],
        sizes=head.sizes,
        layout=head.layout,
        generations=generations,
    )


# What the head may hold, see [Note: typed records] #


@dataclass(frozen=True)
class _Counters:
    global_steps: Count
    micro_steps: Count
    skipped_steps: Count


@dataclass(frozen=True)
class _State:
    """
    Attributes:
        steps: updates that each parameter has had.
        time_s: when the step was over.
    """

    counters: _Counters
    steps: dict[str, Count]
    time_s: Real


@dataclass(frozen=True)
class _Step:
    """
    Attributes:
        slots, extra: bytes of each, behind the head.
    """

    sequence: Positive
    state: _State
    slots: Count
    extra: Count


@dataclass(frozen=True)
class _Head:
    """See `Record`."""

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]  # a part of file names
    rank: Count
    ranks: Positive
    facts: dict[str, dict[str, Any]]
    stripes: list[tuple[str, Rate, Capacity]]
    sizes: list[Count]
    layout: str
    generations: Annotated[list[_Step], Field(max_length=2)]

    def check(self) -> None:
        """Fields agree with one another; raises ValueError."""
        if self.rank >= self.ranks:
            raise ValueError(f"`rank` is {self.rank}, of {self.ranks} ranks")
        if len(self.sizes) != len(self.stripes):
            raise ValueError(f"`sizes` are {len(self.sizes)}, of {len(self.stripes)} stripes")
        if self.generations and not self.stripes:
            raise ValueError("`stripes` is empty, and there are states")
        if any("\0" in name for name, _, _ in self.stripes):
            raise ValueError("`stripes` has a path with a null character")
        if len(self.generations) == 2 and self.generations[0].sequence <= self.generations[1].sequence:
            raise ValueError("`generations` do not have the newest first")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged ({why}), so nobody can tell which step its states are of: go on from a checkpoint, and "
        f"remove these states (infinity states remove {path.parent})"
    )


def first_difference(saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Where two runs' facts differ, in words; None if they do not."""
    for topic, ours in here.items():
        theirs = saved.get(topic, {})
        for name in dict.fromkeys((*theirs, *ours)):
            if name not in theirs or name not in ours:
                return f"{topic}: {name} is only {'here' if name in ours else 'there'}"
            if theirs[name] != ours[name]:
                return f"{topic}: {name} was {theirs[name]!r} and is {ours[name]!r} here"
    return None
