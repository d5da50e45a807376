"""Which tokenizer a training runs its text through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

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
    """The tokenizer that was asked for, or else the model directory's own; None for bytes.

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
    if not Path(directory).is_dir():  # a name would be looked for among downloads
        raise ConfigError(f"{problem}: there is no such directory")
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file, whatever the library for its kind raises
        raise ConfigError(f"{problem}: {type(error).__name__}: {error}") from error


def check_vocabulary(model: nn.Module, vocabulary: int, name: str) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        ConfigError: the message has both numbers.
    """
    embeddings = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary > embeddings:
        raise ConfigError(
            f"the tokenizer has {vocabulary} tokens, more than {name} has embeddings ({embeddings}): give the "
            "tokenizer that the model was trained with, or enlarge the model by resize_token_embeddings and save it"
        )
