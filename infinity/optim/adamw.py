"""AdamW and Adam for plain training loops, with their states in host memory or on NVMe.

optimizer = infinity.optim.AdamW(model.parameters(), lr=3e-4, offload="nvme", nvme_path="/local_nvme")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.config import NvmeConfig, default_tile_bytes
from infinity.errors import ConfigError
from infinity.io import IoOptions
from infinity.kernels import Dither, Rule
from infinity.memory import Arena
from infinity.optim import formats
from infinity.optim.formats import SHARD_ALIGN, state_layout
from infinity.optim.kinds import ADAM
from infinity.optim.pipeline import MOST_SLOTS, UpdatePipeline
from infinity.optim.ticket import Segment, UpdateTicket
from infinity.schedule.needs import cut_into_tiles
from infinity.telemetry import Counters
from infinity.tiers import Memory
from infinity.tiers.states import StateStore
from infinity.tiers.swap import open_swap

_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, computed on the CPU with its states in host memory or on NVMe.

    Parameters may be on the CPU or a GPU, in float32, bfloat16 or float16; the 16-bit types get an exact float32
    master. `state_dict` is compatible with torch's: it has float32 moments, and `master` for 16-bit parameters. Close
    the optimizer after use, or use it as a context manager. Its files are removed at exit in any case.

    Args:
        params: as for any torch optimizer; learning-rate schedulers may change the groups.
        offload: "cpu" or "nvme".
        nvme_path: directory on the drive, for "nvme".
        state_format: "auto" (exact), or for bfloat16 parameters "bf16" or "int8", which are smaller; see
            docs/how-to/choose-a-state-format.md.

    Raises:
        ConfigError: options that contradict each other.
        StorageError: `nvme_path` cannot be used or has too little space.
    """

    decoupled = True

    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        offload: str = "cpu",
        nvme_path: str | Path | None = None,
        state_format: str = "auto",
    ) -> None:
        _check_numbers(float(lr), betas, eps, weight_decay)
        if offload not in ("cpu", "nvme"):
            raise ConfigError(f"offload is {offload!r}; choose 'cpu' or 'nvme'")
        if (offload == "nvme") != (nvme_path is not None):
            raise ConfigError("offload='nvme' needs nvme_path, a directory on the drive, and only that")
        self._nvme_path = Path(nvme_path) if nvme_path is not None else None
        self._state_format = state_format
        self._placed: dict[torch.Tensor, _StatesHome] = {}
        self._steps: dict[torch.Tensor, int] = {}
        self._started: set[torch.Tensor] = set()  # updated by a hook since the last step()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._adopt([parameter for group in self.param_groups for parameter in group["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._placed:  # after the constructor has added its groups
            try:
                self._adopt(self.param_groups[-1]["params"])
            except BaseException:
                del self.param_groups[-1]  # its parameters have no states
                raise

    def close(self) -> None:
        """Finish queued updates and free the states."""
        for home in self._each_home():
            home.close()
        self._placed.clear()

    @property
    def has_stepped(self) -> bool:
        """Whether a parameter was updated, or the states of an earlier run were loaded."""
        return bool(self._steps)

    def __enter__(self) -> AdamW:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Updates #

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and block until all updates have ended."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._started:
                    self._start_update(parameter, group)
        self._wait()
        self._started.clear()
        return loss

    def overlap(self, model: nn.Module) -> list[RemovableHandle]:
        """Start each update inside backward, as soon as its gradient is final; `step()` waits for the updates.

        Use this only in loops that call backward once per step and do not clip or scale gradients, because an update
        uses the gradient as it is when the update starts.

        Returns:
            Handles; `remove()` of each ends this for one parameter.
        """
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}

        def start(parameter: torch.Tensor) -> None:
            if parameter in self._started:
                raise ConfigError("a second backward pass before step(): overlap() serves one pass a step")
            self._start_update(parameter, groups[parameter])
            self._started.add(parameter)

        owned = [parameter for parameter in model.parameters() if parameter in groups and parameter.requires_grad]
        return [parameter.register_post_accumulate_grad_hook(start) for parameter in owned]

    def _start_update(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        gradient = cast(torch.Tensor, parameter.grad)
        if gradient.is_sparse:
            raise ConfigError("a gradient is sparse; give this parameter another optimizer")
        step = self._steps.get(parameter, 0) + 1
        hyper = ADAM.rule({**group, "decoupled": self.decoupled}, step, 1.0)
        self._placed[parameter].start_update(parameter, gradient, hyper)
        self._steps[parameter] = step

    def _wait(self) -> None:
        for home in self._each_home():
            home.wait()

    # States #

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's AdamW: `step`, `exp_avg` and `exp_avg_sq` by parameter, in host memory."""
        self._wait()
        packed = super().state_dict()
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        packed["state"] = {}
        for index, parameter in enumerate(ordered):
            if parameter not in self._steps:
                continue  # never updated; torch also leaves it out
            flats = self._placed[parameter].read(parameter)
            values = {name: flat.view(parameter.shape) for name, flat in flats.items()}
            step = torch.tensor(float(self._steps[parameter]), dtype=torch.float32, device="cpu")
            packed["state"][index] = {"step": step, **values}
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` of this class or of torch's.

        Raises:
            ConfigError: it needs an option that is not supported.
        """
        for group in state_dict["param_groups"]:
            for option in _UNSUPPORTED:
                if group.get(option):
                    raise ConfigError(f"the saved optimizer used {option}=True, which is not supported here")
        self._wait()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        saved_ids = [saved for group in state_dict["param_groups"] for saved in group["params"]]
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        self._steps.clear()
        for saved_id, parameter in zip(saved_ids, ordered, strict=True):
            values = dict(state_dict["state"].get(saved_id, {}))
            if values:
                self._steps[parameter] = int(values.pop("step"))
            self._placed[parameter].write(parameter, values)

    def _adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """Allocate the states of parameters, one home for each dtype."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            if not formats.formats_of(parameter.dtype):
                raise ConfigError(f"a parameter is {parameter.dtype}; use float32, bfloat16 or float16")
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        placed: dict[torch.Tensor, _StatesHome] = {}
        with ExitStack() as undo:  # if a later dtype is refused, free the states of the others
            for dtype, members in by_dtype.items():
                home = _StatesHome(members, self._format_of(dtype), self._nvme_path)
                undo.callback(home.close)
                placed.update(dict.fromkeys(members, home))
            undo.pop_all()
        self._placed.update(placed)

    def _format_of(self, dtype: torch.dtype) -> str:
        fitting = formats.formats_of(dtype)
        name = fitting[0] if self._state_format == "auto" else self._state_format
        if name not in fitting:
            raise ConfigError(f"state_format {self._state_format!r} does not fit {dtype} parameters; use 'auto'")
        return name

    def _each_home(self) -> list[_StatesHome]:
        return list(dict.fromkeys(self._placed.values()))


class Adam(AdamW):
    """`AdamW` with the weight decay of Adam, which is added to the gradient. Arguments are those of `AdamW`."""

    decoupled = False

    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **where: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **where)


class _StatesHome:
    """The states of parameters of one dtype, in host memory or in a swap file. Each parameter is a unit.

    Args:
        nvme_path: directory of the swap file; None for host memory.

    Raises:
        StorageError: the directory cannot be used or has too little space.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], format_name: str, nvme_path: Path | None) -> None:
        self._layout = state_layout(format_name)
        self._units = {parameter: unit for unit, parameter in enumerate(parameters)}
        # updates in progress: ticket, parameter, and its flat host copy, which may be the parameter itself
        self._pending: list[tuple[UpdateTicket, torch.Tensor, torch.Tensor]] = []
        tile_bytes = self._layout.tile_bytes
        shards = [-(-parameter.numel() // SHARD_ALIGN) * SHARD_ALIGN for parameter in parameters]
        drives = [] if nvme_path is None else [NvmeConfig(nvme_path)]
        aim_bytes = default_tile_bytes(len(drives))
        tile_numel = max(SHARD_ALIGN, aim_bytes // self._layout.bytes_per_param // SHARD_ALIGN * SHARD_ALIGN)
        slot_bytes = tile_bytes(min(tile_numel, max(shards, default=SHARD_ALIGN)))
        if drives:
            homes, slot_count = repeat(Memory.NVME), MOST_SLOTS
            arena_bytes = slot_count * slot_bytes
        else:
            homes, slot_count = repeat(Memory.HOST), 0
            arena_bytes = max(SHARD_ALIGN, sum(map(tile_bytes, cut_into_tiles(shards, tile_numel))))
        with ExitStack() as undo:
            arena = undo.enter_context(closing(Arena(arena_bytes)))
            swap = undo.enter_context(closing(open_swap(drives, IoOptions())))
            slots = [arena.lease(slot_bytes) for _ in range(slot_count)]
            store = StateStore(shards, tile_numel, tile_bytes, homes, arena=arena, swap=swap, counters=Counters())
            swap.create()
            self._pipeline = undo.enter_context(closing(UpdatePipeline(self._layout, store, slots, Counters())))
            for parameter in parameters:
                self.write(parameter, {})
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Finish queued updates, then free memory and files."""
        self.wait()
        self._undo.close()

    def start_update(self, parameter: torch.Tensor, gradient: torch.Tensor, rule: Rule) -> None:
        """Queue one update; the gradient must not change until `wait()`."""
        flat, unit = _flat(parameter.detach()), self._units[parameter]
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

    def read(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return flat float32 moments, and `master` if the parameter is not float32."""
        flat = _flat(parameter.detach())
        names = ["exp_avg", "exp_avg_sq"] + (["master"] if self._layout.master else [])
        whole = {name: torch.empty(flat.numel(), dtype=torch.float32, device="cpu") for name in names}
        for start, stop, fields in self._tiles(parameter, fresh=False):
            part = formats.read_moments(self._layout, fields)
            if self._layout.master:
                part["master"] = formats.read_master(self._layout, flat[start:stop], fields)
            for name, values in part.items():
                whole[name][start:stop] = values
        return whole

    def write(self, parameter: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Store moments and master. Missing moments become zero; a missing master becomes the parameter's value."""
        flat = _flat(parameter.detach())
        sources = {name: _flat(value.detach()).float() for name, value in values.items()}
        master = sources.get("master") if self._layout.master else None
        for start, stop, fields in self._tiles(parameter, fresh=True):
            here = flat[start:stop]
            formats.init_states(self._layout, here.float() if master is None else master[start:stop], here, fields)
            if "exp_avg" in sources:
                moments = {name: sources[name][start:stop] for name in ("exp_avg", "exp_avg_sq")}
                dither = Dither(seed=self._units[parameter], index=start)
                formats.write_moments(self._layout, moments, fields, dither)
        _store(flat, parameter)

    def _tiles(self, parameter: torch.Tensor, *, fresh: bool) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
        """Yield the range within the parameter and the fields of every tile, without padding."""
        for tile, fields in self._pipeline.tiles(self._units[parameter], writable=fresh, fresh=fresh):
            stop = min(tile.start + tile.numel, parameter.numel())
            if tile.start < stop:
                yield tile.start, stop, self._layout.narrow(fields, 0, stop - tile.start)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as 1-D in host memory, without a copy if it is contiguous host memory already."""
    return tensor.cpu().contiguous().view(-1)


def _store(flat: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy the result of `_flat` back to the parameter, unless it is the parameter's own memory."""
    if flat.data_ptr() != parameter.data_ptr():
        parameter.detach().copy_(flat.view(parameter.shape))


def _check_numbers(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value, legal in (
        ("learning rate", lr, lr >= 0),
        ("epsilon value", eps, eps >= 0),
        ("beta parameter at index 0", betas[0], 0 <= betas[0] < 1),
        ("beta parameter at index 1", betas[1], 0 <= betas[1] < 1),
        ("weight_decay value", weight_decay, weight_decay >= 0),
    ):
        if not legal:
            raise ConfigError(f"Invalid {name}: {value}")  # torch's text, which callers may match
