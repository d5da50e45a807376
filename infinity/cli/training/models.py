"""Models by name, built without a download and without memory for their weights."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from infinity.checkpoint import PretrainedWeights
from infinity.errors import ConfigError
from infinity.integrations.pretrained import pretrained_model, pretrained_shape
from infinity.zero.meta import construct_on_meta

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")  # files of the configuration and the tokenizer


def _gpt2(layers: int, hidden: int, heads: int, **more: Any) -> PretrainedConfig:
    return GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more
    )


def _llama(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    *,
    vocab: int = 32000,
    tied: bool = False,
) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> PretrainedConfig:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )


# Shapes as published; the llama ones below 7b are those of MobileLLM, TinyLlama, Sheared-LLaMA and OpenLLaMA, and 4b is
# one between its neighbours.
_SHAPES: dict[str, Any] = {
    "gpt2:tiny": lambda: _gpt2(2, 64, 2, vocab_size=256, n_positions=256, bos_token_id=0, eos_token_id=0),
    "gpt2": lambda: _gpt2(12, 768, 12),
    "gpt2-medium": lambda: _gpt2(24, 1024, 16),
    "gpt2-large": lambda: _gpt2(36, 1280, 20),
    "gpt2-xl": lambda: _gpt2(48, 1600, 25),
    "llama:125m": lambda: _llama(576, 1536, 30, 9, 3, tied=True),
    "llama:160m": lambda: _llama(768, 3072, 12, 12),
    "llama:1.1b": lambda: _llama(2048, 5632, 22, 32, 4),
    "llama:1.3b": lambda: _llama(2048, 5504, 24, 16),
    "llama:2.7b": lambda: _llama(2560, 6912, 32, 20),
    "llama:3b": lambda: _llama(3200, 8640, 26, 32),
    "llama:4b": lambda: _llama(3072, 8192, 34, 24),
    "llama:7b": lambda: _llama(4096, 11008, 32, 32),
    "llama:8b": lambda: _llama(4096, 14336, 32, 32, 8, vocab=128256),
    "llama:13b": lambda: _llama(5120, 13824, 40, 40),
    "llama:70b": lambda: _llama(8192, 28672, 80, 64, 8, vocab=128256),
    "qwen:0.5b": lambda: _qwen(896, 4864, 24, 14, 2, True),
    "qwen:1.5b": lambda: _qwen(1536, 8960, 28, 12, 2, True),
    "qwen:3b": lambda: _qwen(2048, 11008, 36, 16, 2, True),
    "qwen:7b": lambda: _qwen(3584, 18944, 28, 28, 4, False),
    "qwen:14b": lambda: _qwen(5120, 13824, 48, 40, 8, False),
    "qwen:32b": lambda: _qwen(5120, 27648, 64, 40, 8, False),
}


def model_directory(name: str, *, weights: bool = True) -> Path | None:
    """Return the directory of a model's files; None for a known size, which has no files.

    Args:
        name: a key of the table above, a directory in transformers' format, or a Hugging Face name such as
            Qwen/Qwen2.5-0.5B, which is taken from its cache or downloaded.
        weights: whether the weights are needed; if False, only configuration and tokenizer are downloaded.

    Raises:
        ConfigError: the name is none of these; the message lists the known sizes.
    """
    if name in _SHAPES:
        return None
    if (Path(name) / "config.json").is_file():
        return Path(name)
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        return _from_hub(name, weights=weights)
    if Path(name).exists():
        kind = "a directory without config.json" if Path(name).is_dir() else "a file"
        raise ConfigError(f"--model {name} is {kind}: give a directory that save_pretrained wrote")
    nearest = difflib.get_close_matches(name, _SHAPES, 1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(
        f"--model {name} is no model directory and no known size: {hint}choose one of {', '.join(_SHAPES)}, or give a "
        "Hugging Face name such as Qwen/Qwen2.5-0.5B"
    )


def _from_hub(name: str, *, weights: bool) -> Path:
    """Return the directory of a model in Hugging Face's cache. Missing files are downloaded."""
    needed = ("config.json", "*.safetensors") if weights else ("config.json",)
    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if all(any(cached.glob(pattern)) for pattern in needed):
            return cached
    except FileNotFoundError:  # the model is not in the cache
        pass
    except HFValidationError as error:
        raise ConfigError(f"--model {name} is no directory and no Hugging Face name: {_first_line(error)}") from error
    try:
        patterns = [*_DESCRIPTION, *(["*.safetensors"] if weights else [])]
        found = Path(snapshot_download(name, allow_patterns=patterns))  # without a network, returns the cached files
    except Exception as error:  # from the network, the hub or the disk
        raise ConfigError(
            _not_found(name, f"cannot be downloaded ({type(error).__name__}: {_first_line(error)})")
        ) from error
    missing = [pattern for pattern in needed if not any(found.glob(pattern))]
    if missing:
        raise ConfigError(_not_found(name, f"has no {missing[0]} on the hub, or there is no network"))
    return found


def _not_found(name: str, problem: str) -> str:
    return (
        f"--model {name} is no directory, is not in Hugging Face's cache, and {problem}: give a directory that holds "
        f"the model, or download it where there is a network (hf download {name})"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def build_model(name: str, *, in_place: bool = False) -> tuple[nn.Module, PretrainedWeights | None]:
    """Return a causal language model on the meta device, and its pretrained weights.

    Args:
        name: as for `model_directory`; a size has no weights, and is initialized randomly later.
        in_place: read frozen parameters from the model's files in every pass, without a copy.

    Raises:
        ConfigError: there is no such model; the message lists the known sizes.
        CheckpointError: a file of the directory is missing or damaged.
    """
    directory = model_directory(name)
    if directory is None:
        return _fresh(name), None
    return pretrained_model(directory, model_class=AutoModelForCausalLM, in_place=in_place)


def model_shape(name: str) -> nn.Module:
    """Return the model of `build_model` without reading its weights, which may be missing."""
    directory = model_directory(name, weights=False)
    return _fresh(name) if directory is None else pretrained_shape(directory, model_class=AutoModelForCausalLM)


def _fresh(name: str) -> nn.Module:
    with construct_on_meta():
        model: nn.Module = AutoModelForCausalLM.from_config(_SHAPES[name](), trust_remote_code=False)
    return model


def checkpoint_activations(model: nn.Module) -> None:
    """Let backward recompute the activations of blocks, so that only their inputs are kept.

    Raises:
        ConfigError: the architecture does not support it.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # with the old name, transformers 5.23 warns
    enable: Any = newer or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"--checkpoint-activations: {error}") from error
    model.config.use_cache = False  # type: ignore[union-attr]


def max_tokens(model: nn.Module, name: str, asked: int | None) -> int | None:
    """Return the architecture's limit of tokens in a sample, None if unknown; raise ConfigError if `asked` is more."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and asked is not None and asked > limit:
        raise ConfigError(f"--seq-len is {asked}, but {name} takes at most {limit} tokens")
    return limit
