"""Count the work of one micro-batch for the compute device, on the model itself with tensors that have no values.

[Note: two layers stand for all]
Equal blocks do equal work. So a model of a hundred blocks is run with one and with two: the difference is the work of a
block, and the remainder is the work outside of blocks. The counts are of the CPU's kernels, whose attention keeps
no matrix of all pairs, like a GPU's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from infinity.errors import ConfigError
from infinity.memory import FRESH_BYTES
from infinity.planner.training_plan import TrainingPlan
from infinity.zero.model_parts import has_numbers
from infinity.zero.partition import Partition


class Product(NamedTuple):
    """A kind of matrix product, as far as its speed depends on it.

    Attributes:
        layout: of the operands: "nn", "nt" (the second is transposed), "tn" (the first is), or "attention".
        rows: the smallest of its three dimensions.
    """

    layout: str
    rows: int


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass.

    Attributes:
        flops: of products, by kind.
        other_bytes: read and written by all other operations.
        operations: number of operations, including products.
        fresh_bytes: of results so large that a host's allocator asks the system for each, which provides them page by
            page: the gradient of a vocabulary.
    """

    flops: dict[Product, float] = field(default_factory=dict)
    other_bytes: float = 0.0
    operations: float = 0.0
    fresh_bytes: float = 0.0

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())


@dataclass(frozen=True)
class Work:
    """One micro-batch on one rank.

    Attributes:
        tokens: of the micro-batch.
        saved_bytes: activations that autograd holds at the end of the forward pass.
        block_bytes: recomputed activations of one block, if blocks are checkpointed; else 0.
        loss_bytes: peak of the tensors that the loss's backward makes, beside these.
        outside_forward, outside_backward: work outside of blocks, as far as known.
    """

    tokens: int
    forward: Pass
    backward: Pass
    saved_bytes: float
    block_bytes: float
    loss_bytes: float
    outside_forward: Pass = Pass()
    outside_backward: Pass = Pass()

    @property
    def activation_bytes(self) -> float:
        return self.saved_bytes + max(self.block_bytes, self.loss_bytes)


def count_work(model: nn.Module, plan: TrainingPlan, batch: int, seq: int, *, checkpointing: bool = False) -> Work:
    """Count the work of a micro-batch of `batch` samples of `seq` tokens in `model`, whose weights may be on meta.

    Args:
        plan: says which modules are blocks, and in which dtype the model computes.
        checkpointing: keep only the inputs of blocks, and recompute the other activations in backward.

    Raises:
        ConfigError: the model does not run on `input_ids` and `labels`.
    """
    blocks = _outermost(plan.sizing.partition)
    run = _Run(plan.sizing.layout.param_dtype, batch, seq, checkpointing)
    work = _count(model, blocks, run)
    if not checkpointing or not blocks:
        return work
    whole = _count(model, blocks, run._replace(checkpointing=False))
    return replace(work, block_bytes=(whole.saved_bytes - work.saved_bytes) / len(blocks))


class _Run(NamedTuple):
    """How to run a model, see `count_work`."""

    dtype: torch.dtype
    batch: int
    seq: int
    checkpointing: bool


def _count(model: nn.Module, names: list[str], run: _Run) -> Work:
    """Count the work, see [Note: two layers stand for all]. `names` are those of the blocks."""
    blocks = [model.get_submodule(name) for name in names]
    kinds = {(type(block), tuple(param.shape for param in block.parameters())) for block in blocks}
    listed = model.get_submodule(names[0].rpartition(".")[0]) if names else model
    is_list_of_all = isinstance(listed, nn.ModuleList) and list(listed) == blocks
    if len(blocks) < 3 or len(kinds) > 1 or not is_list_of_all:
        return _work(model, blocks, run)
    works = []
    members = listed._modules
    for count in (1, 2):
        listed._modules = dict(islice(members.items(), count))
        try:
            works.append(_work(model, blocks[:count], run))
        finally:
            listed._modules = members
    return _extended(works[0], works[1], len(blocks))


def _outermost(partition: Partition) -> list[str]:
    """Return the blocks that are not tiles of another."""
    names = frozenset(partition.blocks)

    def inside(name: str) -> bool:
        return any(name[:end] in names for end, letter in enumerate(name) if letter == ".")

    return [name for name in partition.blocks if not inside(name)]


def _extended(one: Work, two: Work, blocks: int) -> Work:
    """Extrapolate from one and two blocks."""

    def line(first: float, second: float, count: int) -> float:
        return first + (count - 1) * (second - first)

    def passes(first: Pass, second: Pass, count: int) -> Pass:
        kinds = first.flops | second.flops  # not a set, whose order would change the last digit of sums
        flops = {kind: line(first.flops.get(kind, 0.0), second.flops.get(kind, 0.0), count) for kind in kinds}
        other_bytes = line(first.other_bytes, second.other_bytes, count)
        operations = line(first.operations, second.operations, count)
        return Pass(flops, other_bytes, operations, line(first.fresh_bytes, second.fresh_bytes, count))

    return Work(
        one.tokens,
        passes(one.forward, two.forward, blocks),
        passes(one.backward, two.backward, blocks),
        line(one.saved_bytes, two.saved_bytes, blocks),
        one.block_bytes,
        one.loss_bytes,
        passes(one.forward, two.forward, 0),
        passes(one.backward, two.backward, 0),
    )


def _work(model: nn.Module, blocks: list[nn.Module], run: _Run) -> Work:
    """Count one forward and backward pass over tensors without values."""
    saved: dict[int, tuple[torch.Tensor, int]] = {}  # keeps tensors alive, so that no address is reused
    forward, backward = _Counter(), _Counter()
    with _without_values(model, run.dtype) as fake, fake, _checkpointed(blocks, run.checkpointing):
        weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            if _storage(tensor) not in weights:
                saved[_storage(tensor)] = tensor, tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.zeros(run.batch, run.seq, dtype=torch.long)
        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), forward:
                output = model(input_ids=ids, labels=ids)
        except Exception as error:
            raise ConfigError(
                f"the work of {type(model).__name__} cannot be counted: forward(input_ids=..., labels=...) raised "
                f"{type(error).__name__}: {error}"
            ) from error
        with backward:
            (output if isinstance(output, torch.Tensor) else output.loss).backward()
    sizes = [nbytes for _, nbytes in saved.values()]
    # The float32 log-probabilities kept by the loss are the largest. Backward makes two more tensors of their size at
    # once, whatever the model computes in: their gradient, and that of the logits.
    loss_bytes = 2.0 * max(sizes, default=0)
    return Work(run.batch * run.seq, forward.counted, backward.counted, float(sum(sizes)), 0.0, loss_bytes)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _without_values(model: nn.Module, dtype: torch.dtype) -> Iterator[FakeTensorMode]:
    """Replace the model's parameters and buffers by CPU tensors without memory, while the context lasts."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    stand_ins: dict[int, torch.Tensor] = {}  # keeps ties

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        with fake:
            made = torch.empty(tensor.shape, dtype=dtype if has_numbers(tensor) else tensor.dtype)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    try:
        for module in model.modules():
            for members in cast("list[dict[str, Any]]", [module._parameters, module._buffers]):
                for name, tensor in members.items():
                    if tensor is not None:
                        if id(tensor) not in stand_ins:
                            stand_ins[id(tensor)] = stand_in(tensor)
                        before.append((members, name, tensor))
                        members[name] = stand_ins[id(tensor)]
        yield fake
    finally:
        for members, name, tensor in before:
            members[name] = tensor


@contextmanager
def _checkpointed(blocks: list[nn.Module], checkpointing: bool) -> Iterator[None]:
    """Recompute the inside of these blocks in backward."""
    if not checkpointing:
        yield
        return
    for block in blocks:
        inner = block.forward
        block.forward = lambda *args, _inner=inner, **more: checkpoint(_inner, *args, use_reentrant=False, **more)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class _Counter(TorchDispatchMode):
    """Add up the work of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops: Counter[Product] = Counter()
        self._other_bytes = 0.0
        self._operations = 0
        self._fresh_bytes = 0.0

    @property
    def counted(self) -> Pass:
        return Pass(dict(self._flops), self._other_bytes, self._operations, self._fresh_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        self._operations += func.namespace != "prim" and not func.is_view  # "prim": queries by tensors without values
        self._fresh_bytes += _fresh_bytes(args, out)
        if "scaled_dot_product" in str(packet):
            self._flops[Product("attention", 0)] += _attention_flops(args, backward="backward" in str(packet))
        elif packet in flop_registry:
            self._flops[_product_of(args)] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif not func.is_view:
            self._other_bytes += sum(map(_bytes_of, (*args, out)))
        return out


def _attention_flops(args: Any, *, backward: bool) -> int:
    """Count the whole square: a kernel that skips the masked half then only seems faster."""
    query, key = args[1:3] if backward else args[:2]
    batch, heads, tokens, width = query.shape
    return int((5 if backward else 2) * 2 * batch * heads * tokens * key.shape[-2] * width)


def _product_of(args: Any) -> Product:
    first, second = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    rows = min(first.shape[-2], first.shape[-1], second.shape[-1])
    layout = "".join("t" if matrix.stride(-1) > matrix.stride(-2) else "n" for matrix in (first, second))
    return Product("tn" if layout == "tt" else layout, rows)


def _fresh_bytes(args: Any, out: Any) -> int:
    """Return the bytes of results in new memory that no allocator keeps."""
    given = {_storage(tensor) for tensor in _tensors(args)}
    made = (tensor for tensor in _tensors(out) if _storage(tensor) not in given)
    return sum(nbytes for tensor in made if (nbytes := _bytes_of(tensor)) >= FRESH_BYTES)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _bytes_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
