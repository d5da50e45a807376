"""What is counted without values is what a real pass does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.config import load_config
from infinity.memory import FRESH_BYTES
from infinity.planner import Shape, Work, count_work, decoder_of, plan_training
from tests.behaviour.reference import SEQ, tiny_gpt2, tiny_llama

CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


def work_of(model: nn.Module, batch: int = 2, seq: int = SEQ, *, checkpointing: bool = False) -> Work:
    plan = plan_training(model, load_config(CONFIG))
    return count_work(model, plan, batch, seq, checkpointing=checkpointing)


class Counted(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_products_and_saved_bytes_are_those_of_a_real_pass(make) -> None:
    """Three blocks alike: two stand for them."""
    model = make()
    ids = torch.zeros(2, SEQ, dtype=torch.long)
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    work = work_of(model)
    attention = [
        sum(f for kind, f in p.flops.items() if kind.layout == "attention") for p in (work.forward, work.backward)
    ]
    products = 4 * 2 * 4 * SEQ * SEQ * 16 * 3  # two products of 2 samples, 4 heads of 16, 3 blocks
    assert attention == [products, products * 2.5]
    # before torch 2.15, its counter knows the kernels of devices, not those of the CPU
    unknown = attention if forward.get_total_flops() < work.forward.total_flops else [0, 0]
    assert work.forward.total_flops - unknown[0] == forward.get_total_flops()
    assert work.backward.total_flops - unknown[1] == backward.get_total_flops()
    counted = Counted()
    with counted:
        model(input_ids=ids, labels=ids).loss.backward()
    # Beside them a real pass looks at values, of masks for one.
    assert 0.75 * counted.operations < work.forward.operations + work.backward.operations <= counted.operations
    assert work.saved_bytes == pytest.approx(sum(t.untyped_storage().nbytes() for t in saved.values()), rel=0.02)


def test_large_results_are_told_from_those_that_an_allocator_keeps() -> None:
    head = FRESH_BYTES // 4 // 64  # rows of 64 float32, as large as that
    small, large = (work_of(decoder_of(Shape(3, 64, vocabulary)), batch=1, seq=4) for vocabulary in (head // 2, head))
    assert (small.forward.fresh_bytes, small.backward.fresh_bytes) == (0, 0)
    assert large.forward.fresh_bytes == 0
    gradients = large.backward.fresh_bytes / (4 * 64 * head)
    assert 2 <= gradients <= 3, "of the head, of the embedding, and their sum if they are tied"


def test_work_grows_with_the_blocks_and_the_batch() -> None:
    two, four = (work_of(decoder_of(Shape(layers, 64, 512))) for layers in (3, 6))
    per_layer = 2 * 2 * SEQ * 12 * 64**2  # of products with weights
    assert four.forward.total_flops - two.forward.total_flops == pytest.approx(3 * per_layer, rel=0.1)
    assert work_of(decoder_of(Shape(3, 64, 512)), batch=4).saved_bytes == pytest.approx(2 * two.saved_bytes, rel=0.01)


def test_checkpointing_saves_little_and_computes_again() -> None:
    model = decoder_of(Shape(6, 64, 512))
    plain, kept = work_of(model), work_of(model, checkpointing=True)
    assert kept.saved_bytes < plain.saved_bytes / 2
    assert kept.backward.total_flops > plain.backward.total_flops
    assert kept.forward.total_flops == plain.forward.total_flops
    assert kept.saved_bytes + 6 * kept.block_bytes == pytest.approx(plain.saved_bytes)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_do_the_work_of_the_layers_that_they_are_of(checkpointing) -> None:
    whole, tiled = (work_of(decoder_of(Shape(3, 64, 512), n), checkpointing=checkpointing) for n in (1, 4))
    assert tiled.forward.total_flops == whole.forward.total_flops


class Alive(TorchDispatchMode):
    """The most bytes that tensors made inside have had at once, without views of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._params = {param.untyped_storage()._cdata for param in model.parameters()}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._params:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_pass_has_no_more_activations_at_once_than_are_counted(dtype, checkpointing) -> None:
    """With a vocabulary, whose log-probabilities and two gradients are in float32 at once."""
    vocabulary, blocks, width = 20_000, 3, 64
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=160,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    plan = plan_training(model, load_config(CONFIG | {"bf16": {"enabled": dtype is torch.bfloat16}}))
    work = count_work(model, plan, 2, SEQ, checkpointing=checkpointing)
    model.to(dtype)
    if checkpointing:
        for block in model.model.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for param in model.parameters():  # gradients leave as they come
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    ids = torch.zeros(2, SEQ, dtype=torch.long)
    with Alive(model) as alive:
        model(input_ids=ids, labels=ids).loss.backward()
    assert 0.9 * work.activation_bytes < alive.peak <= work.activation_bytes + 0.01 * 4 * vocabulary * 2 * SEQ


def test_the_model_is_as_it_was() -> None:
    model = tiny_gpt2()
    before = dict(model.named_parameters())
    modules = list(model.named_modules())
    work_of(model, checkpointing=True)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert list(model.named_modules()) == modules
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape[1] == 4


class Chain(nn.ModuleList):
    """A list of blocks that runs them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


class Chained(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = Chain(nn.Linear(16, 16) for _ in range(blocks))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(input_ids)).sum()


def test_a_list_of_blocks_that_computes_is_counted_and_stays() -> None:
    model = Chained(5)
    blocks = model.blocks
    assert work_of(model).forward.total_flops == 5 * 2 * 2 * SEQ * 16**2
    assert model.blocks is blocks
    assert len(blocks) == 5


def test_a_model_of_another_kind_is_refused_with_its_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(infinity.ConfigError, match=r"the work of Sequential cannot be counted: .*input_ids"):
        work_of(model)
