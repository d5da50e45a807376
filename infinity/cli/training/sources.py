"""Opens `--data` and `--eval-data`: the samples to train on and to evaluate on."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.cli.training.apart import apart_problem
from infinity.cli.training.data import ByteTokens, Samples, Source, Stream, TokenizedFiles, find_files, hold_out
from infinity.cli.training.documents import read_documents
from infinity.cli.training.packing import Packed
from infinity.cli.training.records import LINES, holds_records
from infinity.cli.training.tokenizers import check_vocabulary
from infinity.errors import ConfigError
from infinity.zero.ranks import ALONE, Ranks


@dataclass(frozen=True)
class DataOptions:
    """The data options of the command line.

    Attributes:
        eval_split: share of the samples of `data` to evaluate on. Without it and `eval_data`, nothing is evaluated.
    """

    data: tuple[Path, ...]
    seq_len: int
    seed: int
    eval_split: float | None = None
    eval_data: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Data:
    """The samples of a training.

    Attributes:
        source: the source of `held_out`, or of `samples` if nothing is evaluated.
        held_out: numbers of the samples of `source` to evaluate on; None for no evaluation.
        packed: whether samples hold several documents.
        notes: remarks for the user.
    """

    samples: Samples
    source: Source
    held_out: torch.Tensor | None
    packed: bool
    notes: list[str]


def open_data(options: DataOptions, tokenizer: Any | None, model: nn.Module, name: str, ranks: Ranks = ALONE) -> Data:
    """Read the data, and cut it into samples.

    Args:
        name: name of the model, for messages.
        ranks: all ranks must call this with the same data, and share the tokenizing.

    Raises:
        ConfigError: the data does not exist, is malformed, or does not fit the model.
    """
    source, notes = _source(options.data, "--data", options, tokenizer, model, ranks)
    check_vocabulary(model, source.vocabulary, name)
    packed = isinstance(source, Packed)
    if options.eval_split is not None:
        chosen, held_out = hold_out(source, options.eval_split, options.seed)
        return Data(Samples(source, options.seed, chosen), source, held_out, packed, notes)
    samples = Samples(source, options.seed)
    if not options.eval_data:
        return Data(samples, source, None, packed, notes)
    other, more = _source(options.eval_data, "--eval-data", options, tokenizer, model, ranks)
    check_vocabulary(model, other.vocabulary, name)
    packed = packed or isinstance(other, Packed)
    return Data(samples, other, torch.arange(len(other)), packed, notes + more)


def _source(
    paths: Sequence[Path], option: str, options: DataOptions, tokenizer: Any | None, model: nn.Module, ranks: Ranks
) -> tuple[Source, list[str]]:
    files = find_files(paths, option)
    # .json files in a directory are text, such as a project's settings. A .json file that is named may have records.
    documents = [path for path in files if path.suffix == LINES or (path in paths and holds_records(path))]
    if not documents:
        tokens = ByteTokens(files) if tokenizer is None else TokenizedFiles(files, tokenizer, ranks)
        return Stream(tokens, options.seq_len), []
    if len(documents) < len(files):
        other = next(path for path in files if path not in documents)
        raise ConfigError(
            f"{option} has both {documents[0]}, a file of records, and {other}, which is plain text: give files of one "
            "kind"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(apart_problem(model))
    vocabulary, fill = (256, 0) if tokenizer is None else (len(tokenizer), tokenizer.eos_token_id or 0)
    packed = Packed(read_documents(files, tokenizer, ranks), options.seq_len, vocabulary, fill)
    notes = [f"{option}: {packed.documents} documents in {len(packed)} samples"]
    if packed.cut:
        notes.append(f"warning: {packed.cut} conversations of {option} are longer than --seq-len, and were cut")
    if packed.dropped:
        why = "no token within --seq-len is learned"
        notes.append(f"warning: {packed.dropped} documents of {option} were left out: {why}")
    return packed, notes
