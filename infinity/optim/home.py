"""The optimizer states of a list of parameters, for an optimizer that is used without the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path

import torch

from infinity.config import NvmeConfig, default_tile_bytes
from infinity.io import IoOptions
from infinity.kernels import Dither, Rule
from infinity.memory import Arena
from infinity.optim import formats
from infinity.optim.formats import SHARD_ALIGN, state_layout
from infinity.optim.pipeline import MOST_SLOTS, UpdatePipeline
from infinity.optim.ticket import Segment, UpdateTicket
from infinity.schedule.needs import cut_into_tiles
from infinity.telemetry import Counters
from infinity.tiers import Memory
from infinity.tiers.states import StateStore
from infinity.tiers.swap import open_swap


class StatesHome:
    """States of parameters of one dtype, in host memory or in a swap file. Each parameter is a unit.

    Args:
        nvme_path: directory of the swap file; None for host memory.

    Raises:
        StorageError: the directory cannot be used or has too little space.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], format_name: str, nvme_path: Path | None) -> None:
        self.layout = state_layout(format_name)
        # updates in progress: ticket, parameter, and its flat host copy, which may be the parameter itself
        self._pending: list[tuple[UpdateTicket, torch.Tensor, torch.Tensor]] = []
        tile_bytes = self.layout.tile_bytes
        shards = [-(-parameter.numel() // SHARD_ALIGN) * SHARD_ALIGN for parameter in parameters]
        aim_bytes = default_tile_bytes(0 if nvme_path is None else 1)
        tile_numel = max(SHARD_ALIGN, aim_bytes // self.layout.bytes_per_param // SHARD_ALIGN * SHARD_ALIGN)
        slot_count = 0 if nvme_path is None else MOST_SLOTS
        slot_bytes = tile_bytes(min(tile_numel, max(shards, default=SHARD_ALIGN)))
        with ExitStack() as undo:
            if nvme_path is None:
                arena = Arena(max(SHARD_ALIGN, sum(map(tile_bytes, cut_into_tiles(shards, tile_numel)))))
            else:
                arena = Arena(slot_count * slot_bytes)
            undo.callback(arena.close)
            swap = open_swap([NvmeConfig(nvme_path)] if nvme_path else [], IoOptions())
            undo.callback(swap.close)
            slots = [arena.lease(slot_bytes) for _ in range(slot_count)]
            homes = repeat(Memory.NVME if nvme_path else Memory.HOST)
            store = StateStore(shards, tile_numel, tile_bytes, homes, arena=arena, swap=swap, counters=Counters())
            swap.create()
            self._pipeline = UpdatePipeline(self.layout, store, slots, Counters())
            undo.callback(self._pipeline.close)
            for unit, parameter in enumerate(parameters):
                self.write(unit, parameter, {})
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Finish queued updates, then free memory and files."""
        self.wait()
        self._undo.close()

    def start_update(self, unit: int, parameter: torch.Tensor, gradient: torch.Tensor, rule: Rule) -> None:
        """Queue one update; the gradient must not change until `wait()`."""
        flat = _flat(parameter.detach())
        ticket = UpdateTicket(
            unit,
            flat,
            _flat(gradient.detach()),
            segments=(Segment(0, flat.numel(), rule),),
            inputs=(),
            write=None,
            seed=rule.step << 24 | unit,
        )
        self._pipeline.submit(ticket)
        self._pending.append((ticket, parameter, flat))

    def wait(self) -> None:
        """Block until every queued update is stored in its parameter. Raises StorageError if a read or write failed."""
        pending, self._pending = self._pending, []
        for ticket, parameter, flat in pending:
            ticket.result()
            _store(flat, parameter)

    # States #

    def read(self, unit: int, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return flat float32 moments, and `master` if the parameter is not float32."""
        flat = _flat(parameter.detach())
        names = ["exp_avg", "exp_avg_sq"] + (["master"] if self.layout.master else [])
        whole = {name: torch.empty(flat.numel(), dtype=torch.float32, device="cpu") for name in names}
        for start, stop, fields in self._tiles(unit, flat.numel(), fresh=False):
            part = formats.read_moments(self.layout, fields)
            if self.layout.master:
                part["master"] = formats.read_master(self.layout, flat[start:stop], fields)
            for name, values in part.items():
                whole[name][start:stop] = values
        return whole

    def write(self, unit: int, parameter: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Store moments and master. Missing moments become zero; a missing master becomes the parameter's value."""
        flat = _flat(parameter.detach())
        sources = {name: _flat(value.detach()).float() for name, value in values.items()}
        master = sources.get("master") if self.layout.master else None
        for start, stop, fields in self._tiles(unit, flat.numel(), fresh=True):
            here = flat[start:stop]
            formats.init_states(self.layout, here.float() if master is None else master[start:stop], here, fields)
            if "exp_avg" in sources:
                moments = {name: sources[name][start:stop] for name in ("exp_avg", "exp_avg_sq")}
                formats.write_moments(self.layout, moments, fields, Dither(seed=unit, index=start))
        _store(flat, parameter)

    def _tiles(self, unit: int, numel: int, *, fresh: bool) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
        """Yield the range within the parameter and the fields of every tile of a unit, without padding."""
        for tile, fields in self._pipeline.tiles(unit, writable=fresh, fresh=fresh):
            stop = min(tile.start + tile.numel, numel)
            if tile.start < stop:
                yield tile.start, stop, self.layout.narrow(fields, 0, stop - tile.start)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as 1-D in host memory, without a copy if it is contiguous host memory already."""
    return tensor.cpu().contiguous().view(-1)


def _store(flat: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy the result of `_flat` back to the parameter, unless it is the parameter's own memory."""
    if flat.data_ptr() != parameter.data_ptr():
        parameter.detach().copy_(flat.view(parameter.shape))
