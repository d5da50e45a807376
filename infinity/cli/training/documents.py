"""Tokenizes records to documents: a text, a prompt with its completion, or a conversation.

[Note: the assistant's turns]
Only the assistant's turns of a conversation are learned. A chat template converts a conversation to one text. If the
template marks the turns (`{% generation %}`), the tokenizer says which tokens are the assistant's. Otherwise a turn is
the text that the template adds to the prompt for the messages before the turn: the end-of-turn mark is learned, the
header is not. This requires that later messages do not change the text of earlier ones; other templates are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from infinity.cli.training.records import Record, read_records
from infinity.cli.training.turns import in_turns
from infinity.errors import ConfigError
from infinity.zero.ranks import ALONE, Ranks

_TOGETHER = 256  # records in a batch; a tokenizer processes the texts of a batch on all cores
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(frozen=True)
class Document:
    """One record.

    Attributes:
        ids: its tokens.
        learned: whether the model learns to predict each token; None for all.
        splits: whether it may continue in the next sample. In a conversation, the answer would lose its question.
    """

    ids: Sequence[int]
    learned: Sequence[bool] | None
    splits: bool


def read_documents(files: Iterable[Path], tokenizer: Any | None, ranks: Ranks = ALONE) -> Iterator[Document]:
    """Yield the documents of these files in order.

    Args:
        tokenizer: a tokenizer of transformers; None for bytes.
        ranks: ranks that have the same files; each tokenizes its share of them.

    Raises:
        ConfigError: a record is malformed, with file and line; or the tokenizer does not support it.
    """
    records = chain.from_iterable(map(read_records, files))
    batches = iter(lambda: tuple(islice(records, _TOGETHER)), ())
    if tokenizer is None:
        reader: _Bytes | _Reader = _Bytes()
        ranks = ALONE  # bytes need no tokenizing that ranks could share
    else:
        reader = _Reader(tokenizer)
    for documents in in_turns(batches, partial(_documents, reader), ranks, "tokenizing --data"):
        yield from documents


def _documents(reader: _Bytes | _Reader, records: Sequence[tuple[str, Record]]) -> list[Document]:
    """Return the documents of these records, in their order."""
    texts = reader.texts([record["text"] for _, record in records if "text" in record])
    return [next(texts) if "text" in record else _document(reader, place, record) for place, record in records]


def _document(reader: _Bytes | _Reader, place: str, record: Record) -> Document:
    """Return the document of a conversation or a completion. A record that has both is a conversation if possible."""
    if "prompt" in record and not ("messages" in record and reader.chats):
        return reader.completion(place, record["prompt"], record["completion"])
    return reader.conversation(place, record["messages"], record["tools"])


def _utf8(text: str) -> bytes:
    """Return the UTF-8 bytes of a text. Unpaired surrogates, which JSON may contain, become `?`."""
    return text.encode("utf-8", errors="replace")


class _Bytes:
    """Reads documents whose tokens are bytes."""

    chats = False

    def texts(self, texts: Sequence[str]) -> Iterator[Document]:
        for text in texts:
            yield Document(_utf8(text), None, splits=True)

    def completion(self, place: str, prompt: str, completion: str) -> Document:
        asked, said = _utf8(prompt), _utf8(completion)
        return Document(asked + said, [False] * len(asked) + [True] * len(said), splits=False)

    def conversation(self, place: str, messages: list[dict[str, Any]], tools: Any) -> Document:
        raise ConfigError(
            f"{place} has `messages`, which need a tokenizer with a chat template, and bytes have none: give "
            "--tokenizer DIRECTORY of a chat model"
        )


class _Reader:
    """Runs text and conversations through a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        self._name = tokenizer.name_or_path

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    def completion(self, place: str, prompt: str, completion: str) -> Document:
        """Return a prompt and its completion. The completion and the end mark are learned, the prompt is not.

        Both are tokenized together, so that no token boundary is forced between them. A token that begins in the
        prompt belongs to the prompt.
        """
        self._check_fast(place, "`prompt` and `completion`")
        found = self._tokenizer(_utf8(prompt + completion).decode(), return_offsets_mapping=True)
        ids: list[int] = list(found["input_ids"])
        learned = [len(prompt) <= begin < end for begin, end in found["offset_mapping"]]
        if self._end is not None and not (ids and ids[-1] == self._end):
            ids.append(self._end)
            learned.append(True)
        elif self._end is not None:
            learned[-1] = True  # the end mark that the tokenizer adds has no characters, so the offsets miss it
        return Document(ids, learned, splits=False)

    def _check_fast(self, place: str, what: str) -> None:
        """Raise ConfigError if the tokenizer cannot return the characters of each token."""
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"{place} has {what}, but the tokenizer {self._name} cannot say which characters a token stands "
                "for: give one with a tokenizer.json"
            )

    def texts(self, texts: Sequence[str]) -> Iterator[Document]:
        """Yield texts with the begin mark, if the tokenizer adds one, and the end mark, as in pretraining."""
        if not texts:
            return
        for ids in self._tokenizer([_utf8(text).decode() for text in texts])["input_ids"]:
            ended = self._end is None or (ids and ids[-1] == self._end)
            yield Document(ids if ended else [*ids, self._end], None, splits=True)

    def conversation(self, place: str, messages: list[dict[str, Any]], tools: Any) -> Document:
        """Return a conversation, see [Note: the assistant's turns]."""
        try:
            template = self._tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise ConfigError(
                f"{place} has `messages`, but the tokenizer {self._name} has no chat template: give --tokenizer "
                "DIRECTORY of a chat model, or lines of `text`"
            ) from error
        self._check_fast(place, "`messages`")
        try:
            if _MARKS.search(template):
                return self._marked(messages, tools)
            text, turns = self._turns(place, messages, tools)
        except ConfigError:
            raise
        except Exception as error:  # from Jinja, or raised by the template, for example if roles do not alternate
            raise ConfigError(
                f"{place}: the chat template of {self._name} refuses the conversation: {type(error).__name__}: {error}"
            ) from error
        found = self._tokenizer(_utf8(text).decode(), add_special_tokens=False, return_offsets_mapping=True)
        begins = [begin for begin, _ in found["offset_mapping"]]
        learned = [any(first <= begin < last for first, last in turns) for begin in begins]
        return Document(found["input_ids"], learned, splits=False)

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> Document:
        found = self._tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        return Document(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]], splits=False)

    def _turns(self, place: str, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the [start, end) characters of the assistant's turns."""
        whole = self._rendered(messages, tools)
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            plain = self._rendered(messages[:index], tools) if index else ""
            prompt = self._rendered(messages[:index], tools, add_generation_prompt=True) if index else ""
            until = self._rendered(messages[: index + 1], tools).rstrip()
            said = until[len(prompt) :]
            prompted = prompt != plain or said.lstrip().startswith(str(message.get("content") or "").strip())
            if not until.startswith(prompt) or not whole.startswith(until) or not said or not prompted:
                raise ConfigError(
                    f"{place}: the chat template of {self._name} cannot mark the assistant's turns: message "
                    f"{index + 1} is not what it adds to its prompt for the messages before. Give it a template with "
                    "{% generation %} around them, or lines of `text`"
                )
            turns.append((len(prompt), len(until)))
        return whole, turns

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, **more: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **more))
