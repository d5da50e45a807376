"""The slots that stored tiles pass through: what a tile may do while its bytes are on their way."""

from __future__ import annotations

import errno

import pytest

from infinity.errors import InfinityError, StorageError
from infinity.io import IoFuture, Span
from infinity.memory import Arena
from infinity.telemetry import Counters, StallCause, Times, Waits
from infinity.tiers import Field, Memory, StateStore, SwapSpace
from infinity.tiers.copies import State
from infinity.tiers.ring import Ring
from infinity.tiers.slots import Extent
from infinity.tiers.striping import Stripe

TILE = 4096


class Request(IoFuture):
    """Moves its bytes when it is waited for, or told to."""

    def __init__(self, name: str, log: list[str], error: BaseException | None = None) -> None:
        self.name, self.log, self.error, self.over = name, log, error, False

    def finish(self) -> None:
        if not self.over:
            self.log.append(self.name)
        self.over = True

    def done(self) -> bool:
        return self.over

    def result(self, timeout: float | None = None) -> int:
        if isinstance(self.error, KeyboardInterrupt):
            error, self.error = self.error, None
            raise error
        self.finish()
        if self.error is not None:
            raise self.error
        return 0

    def times(self) -> Times | None:
        return None


class Drive(SwapSpace):
    """Extents whose requests are over when somebody waits for them."""

    def __init__(self, tmp_path) -> None:
        super().__init__([], [Stripe(tmp_path, 1.0, 1 << 20)])
        self.over: list[str] = []
        self.requests: list[Request] = []
        self.error: BaseException | None = None

    def request(self, what: str, extent: Extent) -> Request:
        self.requests.append(Request(f"{what}{extent.pieces[0].offset // TILE}", self.over, self.error))
        self.error = None
        return self.requests[-1]

    def read(self, extent: Extent, span: Span, offset: int = 0, *, priority: object) -> IoFuture:
        return self.request("r", extent)

    def write(self, extent: Extent, span: Span, offset: int = 0) -> IoFuture:
        return self.request("w", extent)


class Stage:
    """Four stored tiles and two slots; then one tile that stays in host memory."""

    def __init__(self, tmp_path) -> None:
        self.drive, self.arena = Drive(tmp_path), Arena(4 * TILE)
        homes = [Memory.NVME] * 4 + [Memory.HOST]
        store = StateStore([5], 1, lambda numel: TILE, homes, arena=self.arena, swap=self.drive, counters=Counters())
        self.tiles = store.units[0].tiles
        self.ring = Ring(store, [self.arena.lease(TILE) for _ in range(2)], Waits())
        for tile in self.tiles:
            self.change(tile, fresh=True)
        self.ring.clear()
        self.drive.over.clear()

    def change(self, tile, *, fresh: bool = False) -> None:
        self.ring.hold(tile, fresh=fresh)
        tile.begin_write(Memory.HOST)
        tile.end_write(Memory.HOST)
        self.ring.release(tile)


@pytest.fixture
def on(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    stage.ring.clear()
    assert len(stage.ring._free) == 2, "a slot is lost"
    stage.arena.close()


def test_what_is_written_is_read_again_only_then(on) -> None:
    on.change(on.tiles[0])
    on.ring.read_ahead(on.tiles[:1], wait=False)
    assert on.drive.over == ["r0"], "nothing is read ahead of its write"
    on.ring.hold(on.tiles[0])
    assert on.drive.over == ["r0", "w0", "r0"]
    assert on.ring.release(on.tiles[0]) is None, "nothing was changed"


def test_a_slot_is_given_to_nobody_before_it_is_written(on) -> None:
    on.change(on.tiles[0])
    on.change(on.tiles[1])
    assert on.tiles[0].state(Memory.HOST) is State.LEAVING
    slot = on.tiles[0].lease
    on.ring.hold(on.tiles[2])
    assert on.drive.over == ["r0", "r1", "w0", "r2"]
    assert on.tiles[2].lease is slot
    on.ring.release(on.tiles[2])


def test_a_demand_read_takes_the_memory_of_the_prefetch_needed_last(on) -> None:
    on.ring.read_ahead(on.tiles[:4], wait=False)
    on.ring.hold(on.tiles[3])
    assert on.drive.over == ["r1", "r3"]
    assert on.ring.has(on.tiles[0])
    assert not on.ring.has(on.tiles[1])
    on.ring.release(on.tiles[3])


def test_a_read_that_fails_leaves_the_values_where_they_are(on) -> None:
    on.drive.error = StorageError(errno.EIO, "the drive is gone", "swap", 0)
    on.ring.read_ahead(on.tiles[:1], wait=False)
    with pytest.raises(StorageError, match="the drive is gone"):
        on.ring.hold(on.tiles[0])
    on.change(on.tiles[0])


@pytest.mark.parametrize("fresh", [True, False])
def test_values_that_could_not_be_written_are_never_read(on, fresh) -> None:
    on.ring.hold(on.tiles[0])
    on.drive.error = StorageError(errno.EIO, "the drive is gone", "swap", 0)
    on.tiles[0].begin_write(Memory.HOST)
    on.tiles[0].end_write(Memory.HOST)
    write = on.ring.release(on.tiles[0])
    on.ring.clear()
    with pytest.raises(StorageError):
        write.result()
    if not fresh:
        with pytest.raises(InfinityError, match="tile 0 of the optimizer states of unit 0 is lost"):
            on.ring.hold(on.tiles[0])
    on.change(on.tiles[0], fresh=True)


@pytest.mark.parametrize("index", [0, 4])
def test_a_change_that_was_left_half_way_is_not_stored(on, index) -> None:
    tile = on.tiles[index]
    on.ring.hold(tile)
    tile.begin_write(Memory.HOST)
    assert on.ring.release(tile) is None
    if tile.extent is not None:  # the drive has what was before
        on.change(tile)
        return
    with pytest.raises(InfinityError, match="is lost: an update of it has failed"):
        on.ring.hold(tile)


def test_a_wait_that_is_interrupted_gives_no_memory_back(on) -> None:
    on.drive.error = KeyboardInterrupt()
    on.ring.read_ahead(on.tiles[:1], wait=False)
    with pytest.raises(KeyboardInterrupt):
        on.ring.hold(on.tiles[0])
    assert on.tiles[0].state(Memory.HOST) is State.ARRIVING
    on.change(on.tiles[0])


def test_what_is_lent_keeps_its_memory_until_it_has_arrived() -> None:
    field = Field("x", (Memory.NVME, Memory.HOST))
    with pytest.raises(RuntimeError, match="the copy in HOST is ABSENT and cannot be read"):
        field.lend(Memory.HOST, Request("", []), StallCause.HOST_LINK)
    field.begin_write(Memory.HOST)
    field.end_write(Memory.HOST)
    write, lent = Request("", []), Request("", [])
    move = field.lend(Memory.HOST, lent, StallCause.HOST_LINK)
    written = field.begin_move(Memory.HOST, Memory.NVME, write, StallCause.DISK_WRITE)
    assert set(field.moves()) == {move, written}
    field.finish_move(written)
    assert not field.drop(Memory.HOST)
    lent.finish()
    assert field.gone(Memory.HOST)
    assert not field.moves()
