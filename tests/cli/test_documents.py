"""Lines of JSON become samples: what is learned, what is packed together, and what is refused by file and line."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from infinity.cli.main import main
from infinity.cli.training.apart import check_apart, model_inputs
from infinity.cli.training.documents import Document, read_documents
from infinity.cli.training.evaluation import Evaluator
from infinity.cli.training.packing import Packed
from infinity.cli.training.records import holds_records, read_records
from infinity.errors import ConfigError
from infinity.setup import initialize
from tests.behaviour.reference import Placement, Recipe
from tests.cli.test_commands import lines, train_arguments, workspace, write_config

__all__ = ["workspace"]  # a fixture

IGNORED = -100

# Each as published models have them: a header and an end mark a turn (ChatML); no header (Mistral's); turns that the
# template marks itself; and one whose earlier turns change when others follow, as where thoughts are left out.
TEMPLATES = {
    "header": (
        "{% for m in messages %}<s> {{ m.role }} \n {{ m.content }} </s> \n {% endfor %}"
        "{% if add_generation_prompt %}<s> assistant \n {% endif %}"
    ),
    "no header": (
        "{% for m in messages %}{% if m.role == 'user' %}[ {{ m.content }} ]{% else %} {{ m.content }} </s>{% endif %}"
        "{% endfor %}"
    ),
    "marked": (
        "{% for m in messages %}<s> {{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>"
        "{% endgeneration %}{% else %}{{ m.content }} </s>{% endif %} \n {% endfor %}"
    ),
    "changing": (
        "{% for m in messages %}<s> {{ m.role }} {% if loop.last %}thought {% endif %}{{ m.content }} </s> \n "
        "{% endfor %}"
    ),
    "header always": "{% for m in messages %}<s> {{ m.role }} \n {{ m.content }} </s> \n {% endfor %}",
}
WORDS = ["<s>", "</s>", "user", "assistant", "system", "[", "]", "thought", "\n", *"abcdefghij"]


def tokenizer_of(template: str | None) -> Any:
    """A token a word."""
    vocabulary = {word: number for number, word in enumerate(["?", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", eos_token="</s>")
    tokenizer.name_or_path = "words"
    tokenizer.chat_template = None if template is None else TEMPLATES[template]
    return tokenizer


def chat(*turns: str) -> dict[str, Any]:
    """Turns in the order user, assistant, user ..."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def learned(tokenizer: Any, document: Document) -> str:
    assert document.learned is not None
    return tokenizer.decode([one for one, is_learned in zip(document.ids, document.learned, strict=True) if is_learned])


@pytest.mark.parametrize("template", ["header", "no header", "marked"])
def test_only_the_assistants_turns_are_learned(template, tmp_path) -> None:
    tokenizer = tokenizer_of(template)
    path = write(tmp_path / "x.jsonl", chat("a b", "c d", "e", "f g h"), "", chat("a", "b"))
    first, second = read_documents([path], tokenizer)
    assert learned(tokenizer, first).split() == ["c", "d", "</s>", "f", "g", "h", "</s>"]
    assert learned(tokenizer, second).split() == ["b", "</s>"]
    assert not first.splits


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        ("changing", [chat("a", "b", "c", "d")], r"x.jsonl:1: the chat template of words cannot mark .* message 2"),
        ("header always", [chat("a", "b")], "x.jsonl:1: the chat template of words cannot mark"),
        (
            None,
            [{"text": "a"}, chat("a", "b")],
            "x.jsonl:2 has `messages`, but the tokenizer words has no chat template",
        ),
        (
            "header",
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            "x.jsonl:1: the chat template of words cannot",
        ),
        ("header", ["{"], "x.jsonl:1 is no JSON"),
        ("header", [{"text": "a"}, "[1]"], "x.jsonl:2 must be an object with one of these: `text`; .* it is no object"),
        (
            "header",
            [{"text": "a", **chat("a", "b")}],
            "x.jsonl:1 must be an object with one of these: .* it has `text`, `messages`",
        ),
        ("header", [{"text": 5}], "x.jsonl:1: `text` is int; it must be a string"),
        ("header", [{"messages": "a"}], "x.jsonl:1: `messages` must be a list of objects that have a `role`"),
        ("header", [{"messages": [{"content": "a"}]}], "x.jsonl:1: `messages` must be a list"),
        ("header", [chat("a")], "x.jsonl:1: `messages` has no turn of the role `assistant`"),
        ("header", [{"conversations": "a"}], "x.jsonl:1: `conversations` must be a list"),
        (
            "header",
            [{"conversations": [{"from": "bing", "value": "a"}]}],
            "turn 1 of `conversations` has `from` 'bing'",
        ),
        ("header", [{"instruction": "a", "output": 1}], "x.jsonl:1: `output` is int"),
        ("header", [{"instruction": None, "output": "b"}], "x.jsonl:1: `instruction` is NoneType"),
        ("header", ["[" * 100_000], "x.jsonl, record 1 is nested too deeply"),
        ("header", ['{"text":' + "[" * 100_000], "x.jsonl:1 is no JSON: maximum recursion depth"),
        ("header", [{"instruction": "a", "output": "b", "history": [["a", "b"]]}], "x.jsonl:1 has `history`"),
        ("header", [{"prompt": [], "completion": "b"}], "x.jsonl:1: `prompt` is list; it must be a string"),
    ],
)
def test_lines_that_cannot_be_learned_are_named(template, rows, message, tmp_path) -> None:
    path = write(tmp_path / "x.jsonl", *rows)
    with pytest.raises(ConfigError, match=message):
        list(read_documents([path], tokenizer_of(template)))


SHARE_GPT = {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]}
ALPACA = {"instruction": "a", "input": "b", "output": "c d"}


def test_other_formats_of_conversations_are_those_of_messages(tmp_path) -> None:
    tokenizer = tokenizer_of("header")
    rows = [SHARE_GPT, {"instruction": "a b", "output": "c d"}, chat("a b", "c d")]
    first, second, same = read_documents([write(tmp_path / "x.jsonl", *rows)], tokenizer)
    assert first == second == same
    assert learned(tokenizer, same).split() == ["c", "d", "</s>"]


def test_only_the_completion_is_learned_without_a_chat_template(tmp_path) -> None:
    tokenizer = tokenizer_of(None)
    path = write(tmp_path / "x.jsonl", {"prompt": "a b ", "completion": "c d"}, ALPACA)
    document, _ = read_documents([path], tokenizer)
    assert learned(tokenizer, document).split() == ["c", "d", "</s>"]
    assert not document.splits
    for document in read_documents([path], None):
        assert document.learned is not None
        said = bytes(one for one, is_learned in zip(document.ids, document.learned, strict=True) if is_learned)
        assert said == b"c d"
    assert bytes(document.ids).endswith(b"### Instruction:\na\n\n### Input:\nb\n\n### Response:\nc d")


@pytest.mark.parametrize("tokens", ["words", "bytes"])
def test_half_of_a_surrogate_pair_is_a_question_mark(tokens, tmp_path) -> None:
    keys = ({"text": "{}"}, {"prompt": "{}", "completion": "b"})
    found = []
    for character in ("\ud800", "?"):
        rows = [json.dumps(row).replace("{}", json.dumps(f"a {character}")[1:-1]) for row in keys]
        path = write(tmp_path / "x.jsonl", *rows)
        found.append(list(read_documents([path], tokenizer_of("header") if tokens == "words" else None)))
    assert found[0] == found[1]


def test_a_list_of_records_is_read_one_at_a_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("infinity.cli.training.records._READ_CHARS", 7)
    rows = [{"text": "a [1, 2] é"}, {"text": "b" * 50}, {"prompt": "x", "completion": "y"}]
    path = tmp_path / "x.json"
    for indent in (None, 2):
        path.write_text(json.dumps(rows, indent=indent))
        assert holds_records(path)
        assert [bytes(document.ids) for document in read_documents([path], None)] == [
            "a [1, 2] é".encode(),
            b"b" * 50,
            b"xy",
        ]
    path.write_text(json.dumps(rows)[:-1])
    with pytest.raises(ConfigError, match=r"x.json, record 4 is no JSON"):
        list(read_documents([path], None))
    path.write_text('[{"texts": "a"}]')
    with pytest.raises(ConfigError, match=r"x.json, record 1 must be an object with .* it has `texts`"):
        list(read_documents([path], None))


def test_a_temporary_directory_that_is_full_is_named(monkeypatch) -> None:
    def full() -> IO[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ConfigError, match=r"in .*No space left on device; free some space, or set TMPDIR"):
        Packed([Document(b"abc", None, splits=True)], 4, 256, 0)


def test_a_long_list_of_short_records_takes_linear_time(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"text": "a few words, " * 8}] * 10_000))
    start_s = time.process_time()
    json.loads(path.read_text())
    loaded_s = time.process_time()
    assert sum(1 for _ in read_records(path)) == 10_000
    assert time.process_time() - loaded_s < 40 * max(loaded_s - start_s, 0.01)


def test_a_json_file_of_lines_is_never_taken_for_text(tmp_path) -> None:
    path = tmp_path / "x.json"
    record = {"prompt": "x", "completion": "y"}
    for mark in ("", "\ufeff"):  # some editors begin UTF-8 with a mark
        for content in (f"{json.dumps(record)}\n{json.dumps(record)}\n", json.dumps([record, record], indent=2)):
            path.write_text(mark + content)
            assert holds_records(path)
            documents = list(read_documents([path], None))
            assert [(bytes(document.ids), document.learned) for document in documents] == [(b"xy", [False, True])] * 2
    path.write_text(json.dumps({"data": [record]}))
    assert holds_records(path)
    with pytest.raises(ConfigError, match=r"x.json:1 must be an object with one of these: .* it has `data`"):
        list(read_documents([path], None))
    path.write_text(json.dumps({"data": [record]}, indent=2))
    with pytest.raises(ConfigError, match=r"x.json:1 is no JSON: .*; give one list of records, or one record a line"):
        list(read_documents([path], None))
    path.write_text("[1, 2]")
    assert not holds_records(path)


def test_what_a_template_raises_is_told_with_the_line(tmp_path) -> None:
    tokenizer = tokenizer_of("header")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "x.jsonl", {"text": "a"}, chat("a", "b"))
    with pytest.raises(ConfigError, match=r"x.jsonl:2: the chat template of words refuses .* roles must alternate"):
        list(read_documents([path], tokenizer))
    with pytest.raises(ConfigError, match=r"x.jsonl:2 has `messages`, .* bytes have none"):
        list(read_documents([path], None))
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl:1 is no JSON"):
        list(read_documents([path], tokenizer))


def test_texts_and_conversations_keep_their_order_in_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("infinity.cli.training.documents._TOGETHER", 2)
    tokenizer = tokenizer_of("header")
    rows = [{"text": "a"}, {"text": "b"}, {"text": "c"}, chat("a", "b"), {"text": "d </s>"}]
    found = [tokenizer.decode(document.ids) for document in read_documents([write(tmp_path / "x", *rows)], tokenizer)]
    assert [text.split() for text in found[:3]] == [["a", "</s>"], ["b", "</s>"], ["c", "</s>"]]
    assert "user" in found[3]
    assert found[4].split() == ["d", "</s>"]


# Packing #


def document(*ids: int, learned: list[bool] | None = None) -> Document:
    return Document(list(ids), learned, splits=learned is None)


def test_samples_hold_texts_one_after_the_other_and_no_loss_goes_from_one_to_the_next() -> None:
    packed = Packed([document(1, 2, 3), document(4, 5, 6, 7, 8), document(9, 10)], 4, 5, fill=0)
    assert (len(packed), packed.tokens, packed.vocabulary, packed.documents) == (3, 10, 11, 3)
    samples = [{name: values.tolist() for name, values in packed.sample(index).items()} for index in range(3)]
    assert [sample["input_ids"] for sample in samples] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert [sample["labels"] for sample in samples] == [
        [IGNORED, 2, 3, IGNORED],
        [IGNORED, 6, 7, 8],
        [IGNORED, 10, IGNORED, IGNORED],
    ]
    assert [sample["position_ids"] for sample in samples] == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1]]


def test_conversations_are_never_split_and_those_that_are_too_long_are_cut() -> None:
    talks = [
        document(1, 2, 3, learned=[False, True, True]),
        document(4, 5, learned=[False, True]),
        document(6, 7, 8, 9, 10, learned=[False, False, True, False, True]),
        document(11, 12, 13, 14, 15, learned=[False, False, False, False, True]),
    ]
    packed = Packed(talks, 4, 1, fill=0)
    assert (packed.documents, packed.cut, packed.dropped) == (4, 2, 1)
    samples = [{name: values.tolist() for name, values in packed.sample(index).items()} for index in range(len(packed))]
    assert [sample["input_ids"] for sample in samples] == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert [sample["labels"][1:] for sample in samples] == [
        [2, 3, IGNORED],
        [5, IGNORED, IGNORED],
        [IGNORED, 8, IGNORED],
    ]


def test_every_token_is_in_one_sample_and_every_sample_has_something_to_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40, (200,), generator=generator).tolist()
    ids = iter(range(1, sum(sizes) + 1))
    packed = Packed([document(*(next(ids) for _ in range(size))) for size in sizes], 16, 1, fill=0)
    seen: list[int] = []
    for index in range(len(packed)):
        sample = packed.sample(index)
        assert (sample["labels"][1:] != IGNORED).any()
        kept = sample["labels"] != IGNORED
        assert torch.equal(sample["labels"][kept], sample["input_ids"][kept])
        assert not kept[sample["position_ids"] == 0].any()
        seen += sample["input_ids"][sample["input_ids"] > 0].tolist()
    single = packed.dropped  # documents of one token have nothing that comes before it
    assert single == sizes.count(1)
    assert sorted(seen) == sorted(set(seen))
    assert packed.tokens - len(seen) <= 16  # but for a last sample without anything to learn


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to learn: 1 documents"):
        Packed([document(1)], 4, 1, fill=0)


def config_of(architecture: str) -> Any:
    common = {"vocab_size": 32, "use_cache": True}
    if architecture == "gpt2":
        return GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, **common)
    kind = {"llama": LlamaConfig, "qwen": Qwen2Config}[architecture]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(**sizes, num_key_value_heads=1, **common)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen"])
def test_a_packed_document_is_seen_as_it_is_alone(architecture) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(architecture)).eval()
    alone = torch.arange(1, 9)
    packed = Packed([document(*range(9, 16)), document(*alone.tolist())], 15, 32, fill=0)
    batch = {name: values[None] for name, values in packed.sample(0).items()}
    with torch.no_grad():
        together = model(**model_inputs(batch)).logits[0, 7:]
        expected = model(input_ids=alone[None]).logits[0]
    torch.testing.assert_close(together, expected)


class Blind(torch.nn.Module):
    """Takes position_ids, and does not care."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 8)
        self.head = torch.nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(input_ids).cumsum(1)

        class Output:
            logits = self.head(hidden)

        return Output


def test_a_model_that_does_not_keep_documents_apart_is_refused() -> None:
    config = Recipe().config(Placement())
    engine, *_ = initialize(model=Blind(), config=config)
    with engine, pytest.raises(ConfigError, match="Blind does not keep them apart by position_ids"):
        check_apart(engine)
    engine, *_ = initialize(model=AutoModelForCausalLM.from_config(config_of("llama")), config=config)
    with engine:
        check_apart(engine)


# The command #


@pytest.fixture
def model(workspace) -> Path:
    """A directory with a small Llama, and a tokenizer of words that has a chat template."""
    directory = workspace / "model"
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(directory)
    tokenizer_of("header").save_pretrained(directory)
    return directory


def train(workspace: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[list[dict[str, Any]], str]:
    capsys.readouterr()
    assert main(train_arguments(workspace, *more)) == 0
    captured = capsys.readouterr()
    return lines(captured.out), captured.err


def test_train_learns_conversations_and_evaluates_on_what_is_held_out(model, workspace, capsys) -> None:
    write_config(workspace, tiering={"nvme": [{"path": str(workspace / "swap")}], "tile_size": "64KiB"})
    path = write(workspace / "chats.jsonl", *[chat("a b", "c d"), chat("e", "f g", "h", "i j")] * 100)
    arguments = ["--model", str(model), "--data", str(path), "--seq-len", "32", "--steps", "20"]
    shown, notes = train(workspace, capsys, *arguments, "--eval-split", "0.1", "--eval-every", "8")
    steps = [row for row in shown if "loss" in row]
    evaluated = [row for row in shown if "eval_loss" in row]
    assert "200 documents in" in notes
    assert [row["step"] for row in evaluated] == [8, 16, 20]
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    assert evaluated[0]["eval_tokens"] > 0
    fewer, _ = train(workspace, capsys, *arguments, "--eval-split", "0.1", "--eval-every", "100")
    assert [row["loss"] for row in fewer if "loss" in row] == [row["loss"] for row in steps]  # and changes nothing


def test_evaluation_on_other_files_is_the_loss_of_a_training_step(workspace, capsys) -> None:
    """With a learning rate of 0 both are of the same model; all of the text is one batch."""
    write(workspace / "a.jsonl", {"text": "x" * 63}, {"text": "y" * 64})
    data = str(workspace / "a.jsonl")
    arguments = ["--data", data, "--seq-len", "64", "--steps", "1", "--lr", "0", "--eval-data", data]
    (step, evaluation), _ = train(workspace, capsys, *arguments)
    assert evaluation["eval_tokens"] == 62 + 62  # of the second text one token is in the first sample
    assert evaluation["eval_loss"] == pytest.approx(step["loss"], rel=1e-2)  # bfloat16


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--eval-split", "1.5"], "--eval-split is 1.5; it must be a share"),
        (["--eval-split", "0.5", "--eval-data", "x"], "both --eval-split and --eval-data"),
        (["--eval-data", "/does/not/exist"], "--eval-data /does/not/exist does not exist"),
        (["--eval-every", "0"], "--eval-every is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(more, message, workspace, capsys) -> None:
    assert main(train_arguments(workspace, "--steps", "1", *more)) == 2
    assert message in capsys.readouterr().err


def test_documents_and_plain_text_do_not_mix(workspace, capsys) -> None:
    path = write(workspace / "a.jsonl", {"text": "x"})
    assert main(train_arguments(workspace, "--steps", "1", "--data", str(path), str(workspace / "text.txt"))) == 2
    assert "a file of records, and" in capsys.readouterr().err


class Counted:
    """Stands for an engine: its loss is the mean of the tokens that are learned, and it counts its passes."""

    class Settings:
        micro_batch_size = 2

    config = Settings()
    device = torch.device("cpu")
    global_steps = 5

    def __init__(self) -> None:
        self.module = torch.nn.Identity()
        self.passes = 0

    def eval(self) -> None:
        self.module.eval()

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    def __call__(self, labels: torch.Tensor, **more: Any) -> Any:
        assert not self.module.training
        self.passes += 1
        shifted = labels[:, 1:]
        return type("Output", (), {"loss": shifted[shifted != IGNORED].float().mean()})


@pytest.mark.parametrize("count", [1, 4, 7, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_evaluation_out_and_every_token_counts_once(ranks, count, monkeypatch) -> None:
    sizes = [3, 9, 2, 16, 5, 16, 8, 11][:count]
    packed = Packed([document(*range(2, 2 + size), learned=[True] * size) for size in sizes], 16, 32, fill=0)
    chosen = torch.arange(len(packed)).flip(0)
    labels = torch.cat([packed.sample(index)["labels"][1:] for index in range(len(packed))])
    learned_ids = labels[labels != IGNORED].double()
    totals: list[torch.Tensor] = []
    engines = [Counted() for _ in range(ranks)]
    for rank, engine in enumerate(engines):
        monkeypatch.setattr("infinity.cli.training.evaluation.rank_and_size", lambda rank=rank: (rank, ranks))
        monkeypatch.setattr("torch.distributed.all_reduce", lambda total: totals.append(total.clone()) or total.add_(1))
        found = Evaluator(engine, packed, chosen).run()  # type: ignore[arg-type]
        assert engine.module.training
    assert len({engine.passes for engine in engines}) == 1, "or ranks would wait for one another"
    if ranks == 1:
        assert (found.step, found.tokens) == (5, len(learned_ids))
        assert found.loss == pytest.approx(float(learned_ids.mean()))
        return
    losses, tokens = torch.stack(totals).sum(0).tolist()
    assert tokens == len(learned_ids)
    assert losses / tokens == pytest.approx(float(learned_ids.mean()))
