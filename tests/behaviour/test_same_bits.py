"""Weights and norms have the same bits in memory, on the drive, and with blocks cut, whatever the architecture.

Where several modules use an activation (an encoder's output, a position bias, the output of a norm behind the residual
sum), autograd adds up several gradients, and another order of that sum has other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import infinity
from tests.behaviour.ranks import run_ranks

STEPS, ROWS, LENGTH, VOCAB = 2, 2, 12, 64
CUT = "8KiB"  # a block has twice as much and more

Batch = dict[str, torch.Tensor]


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)


def text(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def image(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 4, (ROWS,), generator=generator)}


def pairs(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return {"input_ids": tokens(generator), "pixel_values": pixels}


def speech(generator: torch.Generator) -> Batch:
    labels = torch.randint(3, VOCAB, (ROWS, 2), generator=generator)
    return {"input_values": torch.randn(ROWS, 400, generator=generator), "labels": labels}


def spectrogram(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 24, generator=generator), "labels": tokens(generator)}


@dataclass(frozen=True)
class Case:
    """A model of transformers, small.

    Attributes:
        model: its class, whose configuration is made with `sizes`.
        precision: bf16 where the model can compute in it, since there more sums differ with their order.
        leaves: classes of modules that are gathered whole.
        checkpointing: arguments of activation checkpoints.
    """

    model: str
    sizes: dict[str, Any]
    batch: Callable[[torch.Generator], Batch] = text
    precision: str = "bf16"
    leaves: tuple[str, ...] = ()
    checkpointing: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        cls = getattr(transformers, self.model)
        model = cls(cls.config_class(**self.sizes))
        if self.checkpointing:
            model.gradient_checkpointing_enable(self.checkpointing)
        return model


USUAL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KEYS = {"num_key_value_heads": 2, "head_dim": 8}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PICTURE = {"image_size": 16, "patch_size": 4, "num_labels": 4}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

CASES = {
    # decoders
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "llama": Case("LlamaForCausalLM", USUAL | KEYS),
    "gemma2": Case("Gemma2ForCausalLM", USUAL | KEYS),
    "gpt-neox": Case("GPTNeoXForCausalLM", USUAL),
    "bloom": Case("BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mamba": Case("MambaForCausalLM", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}),
    # encoders
    "bert": Case("BertForMaskedLM", USUAL),
    "albert": Case("AlbertForMaskedLM", USUAL | {"embedding_size": 16}),
    "deberta": Case("DebertaV2ForMaskedLM", USUAL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    # encoder-decoders
    "t5": Case("T5ForConditionalGeneration", T5),
    "t5-checkpointed": Case("T5ForConditionalGeneration", T5, checkpointing={"use_reentrant": False}),
    "t5-reentrant": Case("T5ForConditionalGeneration", T5, checkpointing={"use_reentrant": True}),
    "bart": Case("BartForConditionalGeneration", BART),
    # vision, and with text
    "vit": Case("ViTForImageClassification", USUAL | PICTURE, image),
    "swin": Case(
        "SwinForImageClassification",
        PICTURE | {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
        image,
    ),
    "clip": Case("CLIPModel", {"text_config": USUAL, "vision_config": CLIP | PICTURE, "projection_dim": 16}, pairs),
    # speech
    "whisper": Case(
        "WhisperForConditionalGeneration",
        BART | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
        spectrogram,
    ),
    "wav2vec2": Case(
        "Wav2Vec2ForCTC",
        USUAL
        | {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.3},
        speech,
    ),
    # mixtures of experts
    "mixtral": Case("MixtralForCausalLM", USUAL | KEYS | EXPERTS),
    "mixtral-leaves": Case("MixtralForCausalLM", USUAL | KEYS | EXPERTS, leaves=("MixtralSparseMoeBlock",)),
    "switch-leaves": Case(
        "SwitchTransformersForConditionalGeneration",
        T5 | {"num_experts": 4, "expert_capacity": 24, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        precision="fp32",  # its router converts its own weights
        leaves=("SwitchTransformersSparseMLP",),
    ),
}


@dataclass
class Trained:
    weights: dict[str, torch.Tensor]
    norms: list[float | None]
    losses: list[float]


def train(case: Case, where: str, path: Path, max_unit_size: str | None = None, rank: int = 0) -> Trained:
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": where},
        "offload_optimizer": {"device": where},
        "leaf_module": {"classes": list(case.leaves)},
    }
    tiering = {"status": False} | ({"max_unit_size": max_unit_size} if max_unit_size else {})
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": case.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": zero,
        "tiering": tiering | ({"nvme": [{"path": str(path)}]} if where == "nvme" else {}),
    }
    norms, losses = [], []
    with infinity.initialize(model=case.build(), config=config)[0] as engine:
        for step in range(STEPS):
            batch = case.batch(torch.Generator().manual_seed(STEPS * rank + step))
            if case.precision == "bf16":
                batch = {name: v.bfloat16() if v.is_floating_point() else v for name, v in batch.items()}
            if "labels" not in batch:
                batch["return_loss"] = True
            torch.manual_seed(step)
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm())
            losses.append(loss.item())
        return Trained(dict(engine.named_parameters()), norms, losses)


def differences(case: Case, path: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """What training on the drive, and with blocks cut there, changes of training in memory."""
    memory = train(case, "none", path, rank=rank)
    found = []
    for where, cut in (("on the drive", None), ("with blocks cut", CUT)):
        placed = train(case, "nvme", path, cut, rank)
        assert placed.weights.keys() == memory.weights.keys()
        other = [name for name, weight in placed.weights.items() if not torch.equal(weight, memory.weights[name])]
        if other:
            found.append(f"{where} {len(other)} of {len(placed.weights)} parameters, {other[0]} among them")
        # Each of several ranks rounds the sum of squares over its own shards, which are others where blocks are cut.
        norms = memory.norms if ranks == 1 or cut is None else pytest.approx(memory.norms, rel=1e-14)
        if placed.norms != norms or placed.losses != memory.losses:
            found.append(f"{where} norms {placed.norms} for {memory.norms}, losses {placed.losses} for {memory.losses}")
    return found


@pytest.mark.parametrize("name", CASES)
def test_placements_give_the_same_bits(name, tmp_path) -> None:
    assert differences(CASES[name], tmp_path) == []


ON_RANKS = ("bert", "t5-checkpointed", "bart", "mixtral-leaves", "switch-leaves")


def differences_on_a_rank(path: Path) -> dict[str, list[str]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name: differences(CASES[name], path, rank, ranks) for name in ON_RANKS}


def test_so_they_do_on_two_ranks(tmp_path) -> None:
    for found in run_ranks(2, differences_on_a_rank, tmp_path, path=tmp_path):
        assert found == {name: [] for name in ON_RANKS}
