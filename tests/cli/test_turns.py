"""Several ranks tokenize together what each would have tokenized alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.training import data
from infinity.cli.training.data import TokenizedFiles
from infinity.cli.training.documents import read_documents
from infinity.cli.training.turns import in_turns
from infinity.errors import ConfigError
from infinity.zero.ranks import ALONE, Ranks, join_ranks
from tests.behaviour.ranks import run_ranks
from tests.cli.test_documents import chat, tokenizer_of, write


class Words:
    """A tokenizer: one token a word, its length; `seen` are the texts that it was given."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __len__(self) -> int:
        return 5

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        self.seen.append(text)
        return {"input_ids": [len(word) for word in text.split()]}


def plain_text(path: Path, ranks: Ranks) -> tuple[int, int, list[int]]:
    """Characters that this rank's tokenizer was given, the vocabulary, and all tokens."""
    data._PIECE_CHARS = 50
    words = Words()
    tokens = TokenizedFiles([path, path], words, ranks)
    return sum(map(len, words.seen)), tokens.vocabulary, tokens.read(0, len(tokens)).tolist()


def lines_of_json(path: Path, ranks: Ranks) -> list[tuple[list[int], Any]]:
    tokenizer = tokenizer_of("header")
    return [(list(document.ids), document.learned) for document in read_documents([path], tokenizer, ranks)]


def failing(items: list[int], ranks: Ranks) -> str:
    """The message of an error that one item has."""

    def work(item: int) -> int:
        if item == 3:
            raise ConfigError("three")
        return item

    done: list[int] = []
    try:
        done.extend(in_turns(items, work, ranks, "counting"))
    except ConfigError as error:
        return f"{done} {error}"
    return f"{done}"


def on_ranks(texts: Path, documents: Path) -> list[Any]:
    ranks = join_ranks()
    return [
        plain_text(texts, ranks),
        lines_of_json(documents, ranks),
        failing([1, 2, 4, 3, 5], ranks),
        failing([1, 2, 4], ranks),
        failing([], ranks),
        failing([1, 2, 4, 5][: 4 - ranks.rank], ranks),
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_tokenizing(size, tmp_path) -> None:
    texts = tmp_path / "text.txt"
    texts.write_text("\n".join("w" * (1 + n % 9) for n in range(400)))
    rows = [chat("a b", "c d") if n % 3 else {"text": f"a b {'c ' * (n % 7)}d"} for n in range(700)]
    documents = write(tmp_path / "lines.jsonl", *map(json.dumps, rows))
    characters, vocabulary, tokens = plain_text(texts, ALONE)
    lines = lines_of_json(documents, ALONE)
    found = run_ranks(size, on_ranks, texts, documents, path=tmp_path)
    for own, kinds, ids in (each[0] for each in found):
        assert (kinds, ids) == (vocabulary, tokens)
        assert own < characters / size + 200
    assert sum(each[0][0] for each in found) == characters
    assert all(each[1] == lines for each in found)
    for each in found:
        assert each[2].endswith(f"] rank {3 % size}: three")
        assert each[3:5] == ["[1, 2, 4]", "[]"]
        assert "--data ends earlier on rank" in each[5]
