"""A link, a drive and memory that tell on who does not wait.

[Note: what is late]
A copy has two sides. Its host side is over when somebody waits for the token, or after some more link operations. Its
device side is over then too, or earlier, for the compute stream, when that waits: what is computed on this machine is
computed at once, so `compute_waits` fills the target, but the host knows nothing of it. Until a side is over,

- its target is all 0xff (NaN in every floating dtype) and nobody else may write there,
- its source must stay as it was when the copy began,
- and its memory may be neither leased anew, nor given to I/O, nor freed.

Copies of one direction keep their order. Besides, a copy begins after all that the compute stream has waited for.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.io import IoEngine, IoFile, IoFuture, Priority, Span, open_engine
from infinity.io.gds import DeviceReader, HostReader
from infinity.memory import Arena, DeviceLevel, Lease, StableBuffer
from infinity.telemetry import Times, now
from tests.behaviour.disks import Disk

_POISON = 0xFF
_NEVER = 1 << 60


# Who touches what #


class Access:
    """Something under way that reads or writes a range of memory, or of a file."""

    def __init__(self, space: Path | None, start: int, nbytes: int, writes: bool, what: str) -> None:
        self.space, self.start, self.stop, self.writes, self.what = space, start, start + nbytes, writes, what
        self.is_over: Callable[[], bool] = lambda: False


class Watch:
    """The table of what is under way.

    Attributes:
        faults: what went wrong, also where nobody passed the AssertionError on.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.faults: list[str] = []
        self._open: list[Access] = []

    def fail(self, text: str) -> NoReturn:
        self.faults.append(f"{text}, at {_callers()}")
        raise AssertionError(self.faults[-1])

    def refuse(self, doing: str, start: int, nbytes: int, *, writes: bool = True, space: Path | None = None) -> None:
        """Fail if something under way is in the way."""
        with self.lock:
            for access in self._open:
                overlaps = access.space == space and access.start < start + nbytes and start < access.stop
                if overlaps and (writes or access.writes) and not access.is_over():
                    self.fail(f"{doing} while {access.what} is under way")

    def begin(self, what: str, start: int, nbytes: int, *, writes: bool, space: Path | None = None) -> Access:
        with self.lock:
            self._open = [access for access in self._open if not access.is_over()]
            self.refuse(what, start, nbytes, writes=writes, space=space)
            self._open.append(Access(space, start, nbytes, writes, what))
            return self._open[-1]

    def end(self, access: Access) -> None:
        with self.lock:
            if access in self._open:
                self._open.remove(access)


def _callers() -> str:
    """The lines of the library that led here, innermost first."""
    lines, frame = [], sys._getframe(1)
    while frame is not None and len(lines) < 5:
        code = frame.f_code
        if "/infinity/" in code.co_filename and "/tests/" not in code.co_filename:
            lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines) or "the test"


# The link #


class _Side:
    """One end of a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.start, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self.over = False
        self.access: Access | None = None

    def overlaps(self, other: _Side) -> bool:
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes

    def content(self) -> bytes:
        return ctypes.string_at(self.start, self.nbytes)

    def fill(self, content: bytes) -> None:
        ctypes.memmove(self.start, content, self.nbytes)


class LateToken(IoFuture):
    """A copy, or a mark of the compute stream.

    Attributes:
        after: what is over before this one is.
        due: at which operation of the link it is over by itself.
    """

    def __init__(self, link: LateLink, what: str, after: Iterable[LateToken], due: int) -> None:
        self._link = link
        self._times: Times | None = None
        self.number = link.operations
        self.what = what
        self.after = tuple(after)
        self.due = due
        self.over = False
        self.nbytes = 0

    def done(self) -> bool:
        return self._link.is_over(self)

    def result(self, timeout: float | None = None) -> int:
        self._link.complete(self)
        return self.nbytes

    def times(self) -> Times | None:
        return self._times

    def until(self) -> list[LateToken]:
        """This and everything that must be over before, in order."""
        found, left = {self}, [self]
        while left:
            fresh = {token for token in left.pop().after if not token.over} - found
            found |= fresh
            left += fresh
        return sorted(found, key=lambda token: token.number)

    def reach_device(self) -> None:
        """The device side is over."""

    def reach_host(self) -> None:
        """All of it is over."""
        self.over = True
        self.after = ()
        self._times = now()


class LateCopy(LateToken):
    """See [Note: what is late]."""

    def begin(self, watch: Watch, host: torch.Tensor, device: torch.Tensor, *, up: bool) -> None:
        self._watch, self._up = watch, up
        self._keep = host  # device memory is its owner's: who frees it while it is copied is told on
        self._device_storage = StorageWeakRef(device.untyped_storage())
        self.host, self.device = _Side(host), _Side(device)
        self.nbytes = host.nbytes
        for earlier in self.until()[:-1]:
            if isinstance(earlier, LateCopy) and not earlier.over:
                self._overtake(earlier)
        target, source = (self.device, self.host) if up else (self.host, self.device)
        source.access = watch.begin(self.what, source.start, source.nbytes, writes=False)
        target.access = watch.begin(self.what, target.start, target.nbytes, writes=True)
        self.snapshot = source.content()
        ctypes.memset(target.start, _POISON, target.nbytes)

    def _overtake(self, earlier: LateCopy) -> None:
        """What is before this one, and touches the same memory, is over there when this one begins."""
        if earlier.device.overlaps(self.device):
            earlier.reach_device()
        if earlier.host.overlaps(self.host) and not (self._up and earlier._up):
            earlier.reach_host()

    def reach_device(self) -> None:
        if not self.device.over:
            self._reach(self.device, is_target=self._up)

    def reach_host(self) -> None:
        if not self.over:
            super().reach_host()
            self.reach_device()
            self._reach(self.host, is_target=not self._up)

    def _reach(self, side: _Side, *, is_target: bool) -> None:
        side.over = True
        if side.access is None:  # it has failed when it began
            return
        self._watch.end(side.access)
        if side is self.device and self._device_storage.expired():
            self._watch.fail(f"the device memory of {self.what} was freed meanwhile")
        if side.content() != (bytes([_POISON]) * self.nbytes if is_target else self.snapshot):
            self._watch.fail(f"the {'target' if is_target else 'source'} of {self.what} was changed meanwhile")
        if is_target:
            side.fill(self.snapshot)


class LateLink:
    """A link of a device whose memory is the host's; see [Note: what is late].

    Args:
        seed: of when copies are over that nobody waits for.
        patience: after how many operations of the link that is at the latest; None for never.
    """

    device = torch.device("cpu")
    discrete = True
    pinned_for = None
    token, copy = LateToken, LateCopy

    def __init__(self, seed: int = 0, patience: int | None = 12) -> None:
        self.watch = Watch()
        self.operations = 0
        self.copies = 0
        self._random = random.Random(seed)
        self._patience = patience
        self._tails: dict[str, LateToken] = {}
        self._under_way: list[LateToken] = []
        self._computed: list[LateToken] = []  # what the compute stream has waited for, and its marks

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: object = None) -> LateToken:
        return self._copy("upload", target, source)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: LateToken | None = None) -> LateToken:
        return self._copy("download", target, source, after)

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> LateToken:
        return [self.download(target, source) for target, source in pairs][-1]

    def compute_waits(self, token: LateToken) -> None:
        with self.watch.lock:
            self._tick()
            self._computed.append(token)
            for earlier in token.until():
                earlier.reach_device()

    def mark(self) -> LateToken:
        with self.watch.lock:
            self._tick()
            token = self.token(self, "a mark", self._before("compute"), self._due())
            self._computed.append(token)
            return self._started("compute", token)

    def keep_times(self) -> None:
        """They are known anyway."""

    def level(self) -> DeviceLevel | None:
        return None  # so that nothing fills it

    def forget_peak(self) -> None:
        """It keeps none."""

    def release_cached(self) -> None:
        """It keeps none."""

    def free_bytes(self) -> int:
        return sys.maxsize

    def device_reader(self) -> DeviceReader | str:
        return WatchedReader(self.watch)

    def is_over(self, token: LateToken) -> bool:
        with self.watch.lock:
            self._tick()
            return token.over

    def complete(self, token: LateToken) -> None:
        with self.watch.lock:
            for earlier in token.until():
                earlier.reach_host()

    def finish(self) -> None:
        """Everything that was started is over."""
        with self.watch.lock:
            for token in self._under_way:
                self.complete(token)

    def _copy(self, kind: str, target: torch.Tensor, source: torch.Tensor, after: LateToken | None = None) -> LateToken:
        assert target.dtype == source.dtype
        assert target.size() == source.size()
        assert target.stride() == source.stride() or (target.is_contiguous() and source.is_contiguous())
        with self.watch.lock:
            self._tick()
            self.copies += 1
            what = f"{kind} {self.copies} ({source.numel()} of {source.dtype}, from {_callers()})"
            stream = kind if after is None else f"early {kind}"
            before = self._before(kind) if after is None else [after, *self._tail(stream)]
            token = self.copy(self, what, before, self._due())
            up = kind == "upload"
            token.begin(self.watch, source if up else target, target if up else source, up=up)
            self._started(stream, token)
            return token

    def _before(self, stream: str) -> list[LateToken]:
        """What is over before something that this stream begins now."""
        self._computed = [token for token in self._computed if not token.over]
        return [*self._computed, *self._tail(stream)]

    def _tail(self, stream: str) -> list[LateToken]:
        """The last copy of a stream, while it is under way."""
        tail = self._tails.get(stream)
        return [] if tail is None or tail.over else [tail]

    def _started(self, stream: str, token: LateToken) -> LateToken:
        self._tails[stream] = token
        self._under_way.append(token)
        return token

    def _due(self) -> int:
        return _NEVER if self._patience is None else self.operations + self._random.randint(0, self._patience)

    def _tick(self) -> None:
        """Time passes."""
        self.operations += 1
        self._under_way = [token for token in self._under_way if not token.over]
        for token in list(self._under_way):
            if token.due <= self.operations:
                self.complete(token)


class WatchedReader(HostReader):
    """Reads past the host, into memory that nothing else touches."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def read(self, path: Path, offset: int, target: torch.Tensor) -> int:
        start, nbytes = target.data_ptr(), target.nbytes
        access = self._watch.begin("a read past the host", start, nbytes, writes=True)
        try:
            return super().read(path, offset, target)
        finally:
            self._watch.end(access)


# The drive #


class LateDisk(Disk):
    """Begins with requests when somebody waits for them, or has asked a few times whether they are done."""

    def __init__(self, engine: IoEngine, watch: Watch, seed: int) -> None:
        super().__init__(engine)
        self._watch = watch
        self._random = random.Random(seed)
        self._writes: list[LateRequest] = []

    def read(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.PREFETCH) -> IoFuture:
        with self._watch.lock:
            request = LateRequest(self, file, offset, span, writes=False)
            ctypes.memset(span.address, _POISON, span.nbytes)
            request.submit = lambda: self._engine.read(file, offset, span, priority)
            return request

    def write(self, file: IoFile, offset: int, span: Span, priority: Priority = Priority.WRITE_BACK) -> IoFuture:
        with self._watch.lock:
            request = LateRequest(self, file, offset, span, writes=True)
            request.submit = lambda: self._engine.write(file, offset, span, priority)
            self._writes = [earlier for earlier in self._writes if not earlier.has_begun]
            self._writes.append(request)
            return request

    def close(self) -> None:
        for request in self._writes:
            request.begin()
        super().close()


class LateRequest(IoFuture):
    submit: Callable[[], IoFuture]

    def __init__(self, disk: LateDisk, file: IoFile, offset: int, span: Span, *, writes: bool) -> None:
        self._watch = disk._watch
        self._what = f"a {'write' if writes else 'read'} of {span.nbytes} bytes at {offset} (from {_callers()})"
        memory = self._watch.begin(self._what, span.address, span.nbytes, writes=not writes)
        self._accesses = [memory]
        space = self._watch.begin(self._what, offset, span.nbytes, writes=writes, space=file.path)
        self._accesses.append(space)
        memory.is_over = space.is_over = self._has_ended
        self._span, self.nbytes = span, span.nbytes
        self.reads = not writes
        self._snapshot = ctypes.string_at(span.address, span.nbytes) if writes else None
        self._future: IoFuture | None = None
        self._patience = disk._random.randint(0, 3)

    @property
    def has_begun(self) -> bool:
        return self._future is not None

    def _has_ended(self) -> bool:
        return self._future is not None and self._future.done()

    def begin(self) -> IoFuture:
        with self._watch.lock:
            if self._future is None:
                self._future = self.submit()
                if self._snapshot not in (None, ctypes.string_at(self._span.address, self._span.nbytes)):
                    self._watch.fail(f"the source of {self._what} was changed meanwhile")
            return self._future

    def done(self) -> bool:
        with self._watch.lock:
            self._patience -= 1
            if self._patience < 0:
                self.begin()
            return self._has_ended()

    def result(self, timeout: float | None = None) -> int:
        return self.begin().result(timeout)

    def times(self) -> Times | None:
        return None if self._future is None else self._future.times()


# All of it #


def watch_memory(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """From now on arenas and stable memory refuse to give away what is in use; what is leased is NaN."""

    def patched(cls: type, name: str, doing: str, place: Callable[..., tuple[int, int]]) -> None:
        original = getattr(cls, name)

        def checked(self: object) -> None:
            watch.refuse(doing, *place(self))
            original(self)

        monkeypatch.setattr(cls, name, checked)

    patched(Arena, "close", "an arena is closed", lambda arena: (arena._mapping.address, arena._mapping.nbytes))
    for name in ("free", "close"):
        patched(StableBuffer, name, "device memory is freed", lambda buffer: (buffer.address, buffer.nbytes))
    try_lease = Arena.try_lease

    def checked_lease(self: Arena, nbytes: int, *, at_end: bool = False) -> Lease | None:
        lease = try_lease(self, nbytes, at_end=at_end)
        if lease is not None:
            watch.refuse(f"{nbytes} bytes are leased", lease.address, nbytes)
            ctypes.memset(lease.address, _POISON, nbytes)
        return lease

    monkeypatch.setattr(Arena, "try_lease", checked_lease)
    move = Lease._move

    def checked_move(self: Lease, address: int) -> None:
        watch.refuse(f"{self.nbytes} leased bytes move", self.address, self.nbytes)
        watch.refuse(f"{self.nbytes} leased bytes move here", address, self.nbytes)
        move(self, address)

    monkeypatch.setattr(Lease, "_move", checked_move)


def watch_drives(monkeypatch: pytest.MonkeyPatch, watch: Watch, seed: int) -> None:
    """From now on drives are late."""
    for place in ("infinity.tiers.swap.open_engine", "infinity.zero.build.open_engine"):
        monkeypatch.setattr(place, lambda *args: LateDisk(open_engine(*args), watch, seed))


def late(
    monkeypatch: pytest.MonkeyPatch, seed: int = 0, patience: int | None = 12, kind: type[LateLink] = LateLink
) -> LateLink:
    """A late link on a machine that tells on who does not wait for it."""
    link = kind(seed, patience)
    watch_memory(monkeypatch, link.watch)
    watch_drives(monkeypatch, link.watch, seed)
    return link
