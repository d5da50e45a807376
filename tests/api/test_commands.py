"""Commands end in words and an exit code: bad input, missing packages, closed pipes, Ctrl-C, foreign code, any tree."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import infinity
from infinity import extension
from infinity.cli.main import main
from infinity.config import load_config
from infinity.planner import plan_training
from tests.cli.test_commands import ROOT, train_arguments, workspace, write_config

__all__ = ["workspace"]  # a fixture

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infinity.cli.main", *arguments],
        **{"capture_output": True, "text": True, "cwd": ROOT, "timeout": 120, "check": False, **options},
    )


# plan #


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON: line 1"),
        ("[]", "must hold a JSON object"),
        ('{"tiering": 3}', "tiering is 3; it must be an object"),
        ('{"tiering": {"nvme": [null]}}', "tiering.nvme.0 is None"),
    ],
)
def test_plan_with_another_budget_says_what_is_wrong_with_the_file(content, message, tmp_path, capsys) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    assert main(["plan", "--model", "gpt2:tiny", "--config", str(path), "--host-memory", "1GiB"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown


@pytest.mark.parametrize("tiering", [None, {}, {"host_memory": "1MiB"}])
def test_plan_with_another_budget_takes_a_file_without_one(tiering, tmp_path, capsys) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"tiering": tiering}))
    assert main(["plan", "--model", "gpt2:tiny", "--config", str(path), "--host-memory", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_bytes"] == 1 << 30


def test_a_command_without_transformers_says_what_to_install(tmp_path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    script = f"""
import sys
sys.modules["transformers"] = None
from infinity.cli.main import main
for name in ("plan", "train"):
    print(main([name, "--model", "gpt2:tiny", "--config", {str(tmp_path / "ds.json")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.split() == ["2", "2"], done.stderr
    for name in ("plan", "train"):
        assert f"infinity {name} needs transformers: python -m pip install" in done.stderr


def least(model: nn.Module, budget: str) -> str:
    config = load_config(
        {
            "zero_optimization.stage": 3,
            "zero_optimization.stage3_param_persistence_threshold": 0,
            "zero_optimization.offload_param.device": "nvme",
            "zero_optimization.offload_optimizer.device": "nvme",
            "tiering.nvme": [{"path": "."}],
            "tiering.host_memory": budget,
        }
    )
    with pytest.raises(infinity.CapacityError) as refused:
        plan_training(model, config)
    return str(refused.value)


def test_a_large_embedding_is_not_told_to_become_a_linear_layer() -> None:
    words = least(nn.Sequential(nn.Embedding(10_000, 64), nn.Linear(64, 64)), "1MiB")
    assert "Unit `0` alone is larger than that (2.4" in words
    assert "and is an embedding, which is held as a whole" in words
    assert "TiledLinear" not in words


def test_a_large_linear_layer_is_told_to_be_tiled() -> None:
    words = least(nn.Sequential(nn.Linear(64, 10_000), nn.Linear(10_000, 4)), "1MiB")
    assert "infinity.zero.TiledLinear" in words


def test_a_layer_that_would_fit_alone_is_told_what_else_must_fit() -> None:
    words = least(nn.Sequential(nn.Linear(64, 10_000), nn.Linear(10_000, 4)), "4MiB")
    assert "Unit `0` alone takes 2.4" in words
    assert "of that, in addition to the next unit, which is fetched at the same time: if it is a block, " in words
    assert "tiering.max_unit_size cuts it into units of its modules (auto does so if that is enough; 6" in words
    assert "infinity.zero.TiledLinear" in words


# Ends of a process #


@pytest.mark.parametrize("arguments", [["configs"], ["--help"], ["--version"], ["configs", "--json"]])
def test_nobody_reads_the_output_any_more(arguments) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = command(*arguments, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # argparse may have seen it, and does not mind


def test_an_interrupted_command_says_so(monkeypatch, capsys) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("infinity.cli.env.collect", interrupt)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


# Which tree runs #


def test_ranks_run_the_package_that_started_them(tmp_path) -> None:
    """In the source tree, for one, there is another package of this name, without extension modules."""
    other = tmp_path / "tree" / "infinity"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('the wrong tree')")
    start = tmp_path / "start.py"
    start.write_text("import sys\nfrom infinity.cli.main import main\nsys.exit(main(sys.argv[1:]))\n")
    done = subprocess.run(
        [sys.executable, str(start), "run", "--ranks", "1", "train", "--help"],
        capture_output=True,
        text=True,
        cwd=other.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--checkpoint-activations" in done.stdout


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["CMakeLists.txt", "infinity/"], "is the source tree, where _adam is not built"),
        (["infinity/", "infinity/_adam.cpython-30.so"], "has _adam for another Python"),
        (["infinity/"], "_adam was not built; install infinity with a C++ compiler"),
    ],
)
def test_a_missing_extension_is_explained(files, message, tmp_path, monkeypatch) -> None:
    for name in files:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).touch()
    monkeypatch.setattr(extension, "_PACKAGE", tmp_path / "infinity")
    assert message in extension.missing_extension("_adam")
    assert "pip install" in extension.missing_extension("_adam")


# Model directories #


def save_model(directory: Path, vocabulary: int) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=vocabulary, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(directory)


def save_tokenizer(directory: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)


def train_directory(workspace: Path, directory: Path, *more: str) -> int:
    write_config(workspace, tiering={"nvme": [{"path": str(workspace / "swap")}]})
    return main(train_arguments(workspace, "--steps", "1", "--model", str(directory), *more))


def test_training_a_directory_uses_its_tokenizer(workspace, capsys) -> None:
    directory = workspace / "model"
    save_model(directory, 10)
    save_tokenizer(directory)
    assert train_directory(workspace, directory) == 0
    assert f"tokens: {directory} (vocabulary of 9)" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--tokenizer", "bytes"]])
def test_bytes_are_for_directories_without_a_tokenizer_or_by_name(more, workspace, capsys) -> None:
    directory = workspace / "model"
    save_model(directory, 256)
    if more:
        save_tokenizer(directory)
    assert train_directory(workspace, directory, *more) == 0
    assert "tokens: bytes (vocabulary of 256)" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(workspace, capsys) -> None:
    directory = workspace / "model"
    save_model(directory, 8)
    save_tokenizer(directory)
    assert train_directory(workspace, directory) == 2
    assert f"the tokenizer has 9 tokens, more than {directory} has embeddings (8)" in capsys.readouterr().err


def test_a_damaged_tokenizer_is_named(workspace, capsys) -> None:
    directory = workspace / "model"
    save_model(directory, 10)
    save_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{")
    assert train_directory(workspace, directory) == 2
    shown = capsys.readouterr().err
    assert f"the tokenizer of --model {directory} cannot be loaded; give --tokenizer" in shown
    assert "Traceback" not in shown


_REMOTE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
class Config(GPT2Config): model_type = {kind!r}
class Model(GPT2LMHeadModel): config_class = Config
class Words(PreTrainedTokenizerFast): pass
"""


@pytest.mark.parametrize("kind", ["made-up", "bert-generation"])
@pytest.mark.parametrize("name", ["plan", "train"])
def test_code_in_a_model_directory_never_runs_whatever_standard_input_says(
    name, kind, workspace, monkeypatch, capsys
) -> None:
    directory = workspace / "model"
    save_model(directory, 10)
    marker = workspace / "ran"
    (directory / "code.py").write_text(_REMOTE.format(marker=str(marker), kind=kind))
    path = directory / "config.json"
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind, "auto_map": classes}))
    arguments = [name, "--model", str(directory), "--config", str(workspace / "config.json")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    main(arguments)
    assert "Traceback" not in capsys.readouterr().err
    assert not marker.exists()


def test_code_of_a_tokenizer_never_runs_whatever_standard_input_says(workspace, monkeypatch, capsys) -> None:
    directory = workspace / "model"
    save_model(directory, 10)
    save_tokenizer(directory)
    marker = workspace / "ran"
    (directory / "code.py").write_text(_REMOTE.format(marker=str(marker), kind="words"))
    path = directory / "tokenizer_config.json"
    changes = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": [None, "code.Words"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    main(train_arguments(workspace, "--steps", "1", "--model", str(directory)))
    assert "Traceback" not in capsys.readouterr().err
    assert not marker.exists()
