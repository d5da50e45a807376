"""The record of a rank's last finished step: the slots that hold it, and its other state.

[Note: records]
A record is one file that is replaced by one rename, so a crash leaves the old record or the new one, never a part. It
describes the step that was committed last. Another rank may not have committed that step yet, so the record also
describes the previous step. The slots of the previous step are overwritten only after all ranks have committed the
newer one (see slots.py). The ranks agree on which of the two to use. A damaged record is refused, because it is unknown
which steps its slots contain.

The file: 8 bytes `INFRECD1`; the length of the head as a little-endian 64-bit number; the head as JSON; the bytes of
the head's generations, in order, with the lengths that the head names; the SHA-256 of all preceding bytes.
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
        sequence: number of commits of the run; the same for the same commit on all ranks.
        state: counters and other values, see `_State`.
        slots: the slot that holds the step, by range, see slots.py.
        extra: other data of the step, in the format of its writer.
    """

    sequence: int
    state: Mapping[str, Any]
    slots: bytes
    extra: bytes


@dataclass(frozen=True)
class Record:
    """The files of one rank of a run.

    Attributes:
        run: the run's name.
        rank, ranks: this rank, and the number of ranks.
        facts: settings that must be equal in a process that continues the run, by topic.
        stripes: the directories, with the values that determine the layout.
        sizes: bytes of each directory's file.
        layout: digest of the places of all extents.
        generations: the newest first, then the previous one if its slots are intact; empty for a run that has ended.
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
        head = {
            **vars(self),
            "stripes": [[_text(stripe.path), stripe.weight, stripe.capacity_bytes] for stripe in self.stripes],
            "sizes": list(self.sizes),
            "generations": [
                {"sequence": g.sequence, "state": g.state, "slots": len(g.slots), "extra": len(g.extra)}
                for g in self.generations
            ],
        }
        text = json.dumps(head).encode()
        blobs = b"".join(generation.slots + generation.extra for generation in self.generations)
        content = _MAGIC + _LENGTH.pack(len(text)) + text + blobs
        return content + hashlib.sha256(content).digest()


def _text(path: Path) -> str:
    """Return the path as text for messages; it may have bytes that JSON cannot hold."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def parse_record(path: Path, content: bytes) -> Record:
    """Parse a file's content; `path` is for messages. Raises CheckpointError if it is damaged."""
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
    except (ValueError, struct.error) as error:  # a checksum does not prove who wrote the file
        raise _damaged(path, str(error)) from error
    stripes = [Stripe(Path(name), weight, capacity) for name, weight, capacity in head.stripes]
    return Record(**{**vars(head), "stripes": stripes, "generations": generations})


# Types of the head, see [Note: typed records] #


@dataclass(frozen=True)
class _Counters:
    global_steps: Count
    micro_steps: Count
    skipped_steps: Count


@dataclass(frozen=True)
class _State:
    """
    Attributes:
        steps: number of updates of each parameter.
        time_s: when the step ended.
    """

    counters: _Counters
    steps: dict[str, Count]
    time_s: Real


@dataclass(frozen=True)
class _Step:
    """
    Attributes:
        slots, extra: bytes of each, after the head.
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
        """Check that the fields agree with one another; raises ValueError."""
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
        f"{path} is damaged ({why}), so the step of its states is unknown: resume from a checkpoint, and remove these "
        f"states (infinity states remove {path.parent})"
    )


def first_difference(saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Describe the first difference between two runs' facts; None if there is none."""
    for topic, ours in here.items():
        theirs = saved.get(topic, {})
        for name in dict.fromkeys((*theirs, *ours)):
            if name not in theirs or name not in ours:
                return f"{topic}: {name} is only {'here' if name in ours else 'there'}"
            if theirs[name] != ours[name]:
                return f"{topic}: {name} was {theirs[name]!r} and is {ours[name]!r} here"
    return None
