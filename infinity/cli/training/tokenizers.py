"""Finds the tokenizer of a training, and makes one for bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from infinity.errors import ConfigError

BYTES = "bytes"
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def find_tokenizer(model: str, asked: str | None) -> Any | None:
    """Return the given tokenizer, or else that of the model directory; None for bytes.

    Args:
        model: a size, or a model directory.
        asked: a tokenizer directory, or `bytes`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if asked == BYTES:
        return None
    if asked is not None:
        return _load(asked, f"--tokenizer {asked} cannot be loaded")
    if not any((Path(model) / name).is_file() for name in _FILES):
        return None
    return _load(model, f"the tokenizer of --model {model} cannot be loaded; give --tokenizer DIRECTORY, or bytes")


def _load(directory: str, problem: str) -> Any:
    if not Path(directory).is_dir():  # transformers would look for a name in its cache of downloads
        raise ConfigError(f"{problem}: there is no such directory")
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its library raises
        raise ConfigError(f"{problem}: {type(error).__name__}: {error}") from error


def check_vocabulary(model: nn.Module, vocabulary: int, name: str) -> None:
    """Raise ConfigError if the tokenizer has more tokens than the model has embeddings."""
    embeddings = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary > embeddings:
        raise ConfigError(
            f"the tokenizer has {vocabulary} tokens, more than {name} has embeddings ({embeddings}): give the "
            "tokenizer that the model was trained with, or enlarge the model by resize_token_embeddings and save it"
        )


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the bytes of UTF-8 text, numbered by their values.

    It is saved beside models that were trained on bytes, for libraries that expect a tokenizer.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for their own character
    hidden = [byte for byte in range(256) if byte not in shown]
    characters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
