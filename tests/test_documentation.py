"""The documentation says what the code does: its examples run, its tables are complete, its messages exist."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.cli import train
from infinity.cli.main import main, make_parser
from infinity.config import load_config
from infinity.integrations import save_adapters
from tests import prepared
from tests.behaviour.reference import Placement, Recipe, batches, tiny_gpt2, tiny_llama

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def command_lines(page: Path) -> list[str]:
    """Return the arguments of `infinity` in the shell blocks of a page."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return re.findall(r"^(?:\$ )?infinity (.*)$", "".join(blocks).replace("\\\n", " "), re.MULTILINE)


def examples(page: str) -> list[str]:
    """Return the blocks of Python of a page, in order; there is at least one."""
    blocks = [code for _, code in BLOCK.findall((ROOT / page).read_text())]
    assert blocks, page
    return blocks


def test_configuration_examples_run() -> None:
    for code in examples("docs/configuration.md"):
        exec(code, {})


def test_the_readme_and_the_checkpoint_examples_run(tmp_path, monkeypatch) -> None:
    """In order, with a small model in the place of the one that is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    code = (
        examples("README.md")[0]
        .replace("from transformers import AutoModelForCausalLM\n", "")
        .replace('AutoModelForCausalLM.from_pretrained("my-model")', "small_model()")
    )
    assert "small_model()" in code
    ending = "engine.close()\n"
    assert code.endswith(ending)
    scope = {"small_model": tiny_gpt2, "batches": [{"input_ids": ids, "labels": ids} for ids in batches(2)]}
    exec(code.removesuffix(ending), scope)
    save_and_load, at_sigterm = examples("docs/how-to/save-and-resume.md")
    (in_background,) = examples("docs/how-to/save-without-waiting.md")
    (read,) = examples("docs/checkpoints.md")
    (export,) = examples("docs/how-to/export-a-model.md")
    _, change = examples("docs/how-to/load-or-build-a-large-model.md")
    exec(save_and_load, scope)
    assert scope["client_state"] == {"epoch": 1}
    exec(in_background, scope)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handler(number, None))
    exec(at_sigterm, scope)
    assert (tmp_path / "checkpoints" / "global_step3").is_dir()
    exec(read.replace("global_step0", "global_step2"), scope)
    exec(export, scope)
    exec(ending, scope)
    exec(change.replace("my-model", "exported") + ending, scope | {"config": Recipe("bf16").config(Placement())})


def test_the_example_of_crash_consistent_steps_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = examples("docs/how-to/resume-every-step.md")
    stopped = code.replace("engine.end_run()", "").replace("global_steps < 10", "global_steps < 4")
    exec(stopped, {})
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["position"] == {"sample": 10}
    assert not list((tmp_path / "swap").iterdir())


def test_the_timeline_example_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    stalls, code = examples("docs/how-to/see-why-a-step-is-slow.md")
    scope = {"model": tiny_gpt2(), "batches": [{"input_ids": ids, "labels": ids} for ids in batches(6)]}
    exec(code.replace("engine.close()", stalls + "engine.close()"), scope)
    assert main(["timeline", "trace.json", "--steps", "3-4"]) == 0
    assert main(["timeline", "trace.json", "--steps", "6"]) == 2


def test_the_examples_of_migration_and_of_changing_parameters_run() -> None:
    (code,) = examples("docs/migration-from-deepspeed.md")
    change = examples("docs/how-to/read-and-change-parameters.md")[0]
    config = Recipe().config(Placement())
    scope: dict[str, Any] = {"model": tiny_gpt2(), "config": config}
    scope["batches"] = [{"input_ids": i, "labels": i} for i in batches(2)]
    exec(code, scope)
    engine: infinity.Engine = scope["engine"]
    assert engine.global_steps == 2
    before = dict(engine.named_parameters())
    exec(change, scope | {"torch": torch, "infinity": infinity})
    changed = [name for name, value in engine.named_parameters() if not torch.equal(value, before[name])]
    assert changed == ["transformer.wte.weight"]
    engine.destroy()


def test_the_example_of_two_models_trains_one_of_them() -> None:
    code = examples("docs/how-to/write-a-training-loop.md")[1]
    scope: dict[str, Any] = {"large": tiny_gpt2(), "small": tiny_gpt2(), "config": Recipe().config(Placement())}
    scope["batches"] = [{"input_ids": i, "labels": i} for i in batches(2)]
    exec(code, scope | {"torch": torch, "infinity": infinity}, scope)
    student: infinity.Engine = scope["student"]
    before = tiny_gpt2().state_dict()
    with scope["teacher"] as teacher, student:
        assert all(torch.equal(value, before[name]) for name, value in teacher.named_parameters())
        assert not all(torch.equal(value, before[name]) for name, value in student.named_parameters())


def test_the_examples_of_pretrained_weights_run(tmp_path, monkeypatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    tiny_llama().bfloat16().save_pretrained("my-model")
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path))
    scope = {"config": config, "batches": [{"input_ids": i, "labels": i} for i in batches(2)], "prompts": batches(1)[0]}
    scope |= {"save_adapters": save_adapters, "torch": torch}
    scope["prompts"] = scope["prompts"][:, :4]
    lora, adapters = examples("docs/how-to/fine-tune-with-lora.md")
    (inference,) = examples("docs/how-to/run-inference.md")
    fresh = lora[: lora.index("engine,")]
    exec(lora.replace("engine.close()", 'save_adapters(engine, "adapter")\nengine.close()'), scope)
    exec(fresh + adapters, scope)
    exec(inference, scope)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert scope["tokens"].shape == (2, 20)
    assert not list(tmp_path.glob("*.swap"))


def test_the_commands_of_the_cluster_recipes_are_ours(monkeypatch, tmp_path) -> None:
    yaml = pytest.importorskip("yaml")
    pages = ("run-in-docker-or-kubernetes.md", "train-on-several-machines.md")
    page = "".join((ROOT / "docs/how-to" / name).read_text() for name in pages)
    (manifest,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    service, job = yaml.safe_load_all(manifest)
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"] == pod["subdomain"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: started.append(command))
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    shell = page.replace(manifest, pod["containers"][0]["args"][0] + "\n").replace("\\\n", " ")
    for command in re.findall(r"^.*?\binfinity (run .*)$", shell, re.MULTILINE):
        words = shlex.split(re.sub(r"\$\{?[A-Z_:/\-]+\w*\}?", "2", command))
        main(words)
    assert len(started) == 4
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    for command in started:
        if "train" in command:
            parser.parse_args(command[command.index("train") :])
    assert sum("train" in command for command in started) == 2


@pytest.mark.parametrize("page", [*filter(command_lines, PAGES)], ids=lambda page: page.name)
def test_the_commands_of_the_pages_parse(page) -> None:
    parser, _ = make_parser()
    for line in command_lines(page):
        parsed = parser.parse_args(shlex.split(line, comments=True))
        if getattr(parsed, "script", None) == "train":
            parser.parse_args(["train", *parsed.arguments])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_that_the_code_names_exists() -> None:
    for path in (ROOT / "infinity").rglob("*.py"):
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / page).is_file(), (path, page)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.name)
def test_every_ready_configuration_loads_and_is_listed(path) -> None:
    load_config(path)
    assert f"`{path.name}`" in (ROOT / "configs/README.md").read_text()


def test_every_message_of_the_troubleshooting_page_exists() -> None:
    source = "".join(path.read_text() for path in (ROOT / "infinity").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)  # messages that are written over several lines
    messages = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 15
    for message in messages:
        assert message in joined, message


def test_the_pages_that_train_on_these_pages_show_their_size() -> None:
    """To a tenth, since every change of a page changes the number."""
    size_bytes = sum(len(page.read_bytes()) for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    shown = [
        (page.name, int(samples.replace(",", "")) * int(length))
        for page in PAGES
        for samples, length in re.findall(r"^data: ([0-9,]+) samples of (\d+) tokens", page.read_text(), re.MULTILINE)
    ]
    assert len(shown) >= 5
    for name, tokens in shown:
        assert tokens == pytest.approx(size_bytes, rel=0.1), name


def test_the_recipes_of_the_tests_are_valid(tmp_path) -> None:
    load_config(Recipe().config(Placement("nvme", "nvme", tmp_path)))


def test_the_page_on_the_engine_has_the_hops_of_today(tmp_path) -> None:
    """More where a drive is late, and more has to be looked at again."""
    counted = prepared.run([ROOT / "tools" / "count_hops.py", "--blocks", "24", tmp_path], check=True).stdout
    figures = re.compile(r"(\d+) hops and (\d+) calls a unit and step, through\s(\d+) files")
    told, today = figures.search((ROOT / "docs/inside.md").read_text()), figures.search(counted)
    assert told is not None
    assert today is not None
    assert [int(each) for each in told.groups()] == pytest.approx([int(each) for each in today.groups()], rel=0.3)
