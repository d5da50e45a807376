"""A checkpoint is loaded whole and as it was saved, into the model that it is of, on every rank; or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import infinity
from infinity.checkpoint import Run, convert
from infinity.checkpoint.identity import first_difference, model_identity
from infinity.checkpoint.runs import LOCK
from tests.api.small_models import WIDTH, Heads, engine_of, flip, train, weights
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import assert_same_weights
from tests.prepared import Child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12

ROOT = Path(__file__).parents[2]
OLD = Path(__file__).parent / "data" / "checkpoint-format-2"


def blocks(seed: int) -> nn.Module:
    """Several units."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def save(directory: Path, seed: int = 0, steps: int = 2, model: nn.Module | None = None) -> Path:
    with engine_of(model, seed=seed) as engine:
        train(engine, steps)
        return engine.save_checkpoint(directory, tag="tag")


# The second pass #


MEANWHILE: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda d: flip(d / "unit-00001.safetensors"),
        r"unit-00001\.safetensors is not what was checked: tensor \S+ differs",
    ),
    (lambda d: os.truncate(d / "unit-00001.safetensors", 900), r"unit-00001\.safetensors ended while tensor"),
    (lambda d: (d / "unit-00001.safetensors").unlink(), r"unit-00001\.safetensors cannot be read: No such file"),
    (
        lambda d: shutil.copy(d.parents[1] / "other" / "tag" / "unit-00001.safetensors", d),
        r"unit-00001\.safetensors is not what was checked",
    ),
]


@pytest.mark.parametrize(("change", "message"), MEANWHILE)
def test_a_file_that_changes_while_it_is_loaded_stops_the_engine(change, message, tmp_path, monkeypatch) -> None:
    """What was checked is not what is read: parameters of two checkpoints, of which nothing may be trained or saved."""
    saved = save(tmp_path / "saved", model=blocks(0))
    save(tmp_path / "other", model=blocks(3))
    with engine_of(blocks(5)) as engine:
        after_check(monkeypatch, lambda: change(saved))
        with pytest.raises(infinity.CheckpointError, match=message) as caught:
            engine.load_checkpoint(saved.parent)
        assert "trains and saves no more: close it, and load into a new one" in str(caught.value)
        assert_stopped(engine, tmp_path)


def test_ctrl_c_while_a_checkpoint_is_taken_over_stops_the_engine(tmp_path, monkeypatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    saved = save(tmp_path)
    with engine_of(seed=5) as engine:
        monkeypatch.setattr("infinity.checkpoint.extra.TrainingState.apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.load_checkpoint(saved.parent)
        assert_stopped(engine, tmp_path)


def after_check(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something when a checkpoint has been checked, before it is read."""
    monkeypatch.setattr("infinity.checkpoint.extra.TrainingState.check", lambda *args: action())


def assert_stopped(engine: infinity.Engine, directory: Path) -> None:
    for call in (lambda: train(engine), lambda: engine.save_checkpoint(directory / "new")):
        with pytest.raises(infinity.InfinityError, match="the engine has stopped after an error"):
            call()
    assert not (directory / "new").exists()


def test_what_is_read_in_slices_is_verified_block_by_block(tmp_path) -> None:
    """Tensors of several blocks, whose parts are read by tile."""
    model = nn.Sequential(nn.Linear(700, 300), nn.Linear(300, 700))
    tiles = {"tiering": {"tile_size": "64KiB"}}
    with engine_of(model, **tiles) as engine:
        saved = engine.save_checkpoint(tmp_path, tag="tag")
        expected = weights(engine)
    torch.manual_seed(5)
    with engine_of(nn.Sequential(nn.Linear(700, 300), nn.Linear(300, 700)), **tiles) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same_weights(weights(engine), expected)
        with pytest.MonkeyPatch.context() as patch:
            size = (saved / "unit-00000.safetensors").stat().st_size
            after_check(patch, lambda: flip(saved / "unit-00000.safetensors", size // 6))
            with pytest.raises(infinity.CheckpointError, match=r"tensor master\.0\.weight differs near byte"):
                engine.load_checkpoint(tmp_path)


# The model #


class Activation(nn.Module):
    def __init__(self, kind: type[nn.Module], function: Callable[..., Any] = nn.functional.relu) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.kind(self.linear(x)))


def gpt2(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 4, "vocab_size": 16, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**(sizes | changes)))


OTHER_MODELS = [
    (Heads(4), Heads(8), "`heads` of the model is 4 in the checkpoint and 8 here"),
    (gpt2(), gpt2(n_head=8), "`n_head` of config is 4 in the checkpoint and 8 here"),
    (gpt2(), gpt2(activation_function="relu"), "`activation_function` of config is 'gelu_new' in the checkpoint and"),
    (gpt2(), gpt2(layer_norm_epsilon=0.1), "`layer_norm_epsilon` of config is 1e-05"),
    (Activation(nn.ReLU), Activation(nn.Tanh), "`class` of kind is 'ReLU' in the checkpoint and 'Tanh' here"),
    (
        Activation(nn.ReLU),
        Activation(nn.ReLU, nn.functional.gelu),
        "`function` of the model is 'relu' in the checkpoint and 'gelu' here",
    ),
    (
        nn.Sequential(nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        r"module `1` \('ReLU'\) is only in this model",
    ),
    (nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4), "`num_heads` of the model is 2 in the checkpoint"),
]


@pytest.mark.parametrize(("saved", "here", "message"), OTHER_MODELS)
def test_another_model_of_the_same_shapes_is_refused_by_its_first_difference(saved, here, message, tmp_path) -> None:
    with engine_of(saved) as engine:
        engine.save_checkpoint(tmp_path)
        expected = weights(engine)
    with engine_of(here) as engine:
        with pytest.raises(infinity.CheckpointError, match=f"is of another model: {message}.*pass strict_model=False"):
            engine.load_checkpoint(tmp_path)
        with pytest.raises(infinity.CheckpointError, match="is of another model"):
            engine.load_checkpoint(tmp_path, load_module_only=True)
        engine.load_checkpoint(tmp_path, strict_model=False)
        assert_same_weights(weights(engine), expected)


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (Heads(4), Heads(4, dropout=0.5)),
        (gpt2(), gpt2(resid_pdrop=0.0, use_cache=False, eos_token_id=3, initializer_range=1.0, id2label={0: "a"})),
        (gpt2(), gpt2(attn_implementation="eager", architectures=["X"], name_or_path="y", output_attentions=True)),
        (gpt2(), gpt2(a_setting_of_the_next_version=4)),
        (
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)),
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Dropout()),
        ),
        (Heads(4).eval(), Heads(4).train()),
    ],
)
def test_what_may_change_between_runs_of_a_model_is_no_difference(saved, here) -> None:
    assert first_difference(model_identity(saved), model_identity(here)) is None


def test_an_attribute_that_changes_in_training_is_no_difference(tmp_path) -> None:
    with engine_of() as engine:
        engine.module.calls = 0
        engine.save_checkpoint(tmp_path)
        engine.module.heads, engine.module.calls = 2, 7
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("count", [3, 100])
def test_what_training_has_changed_is_no_difference_to_another_engine(count, tmp_path) -> None:
    def model(losses: list[float], calls: int, limit: int) -> nn.Module:
        made = Heads()
        made.losses, made.calls, made.limit = losses, calls, limit
        return made

    with engine_of(model([], 0, 5)) as engine:
        engine.module.losses += [0.5] * count
        engine.module.calls = count
        engine.save_checkpoint(tmp_path)
        expected = weights(engine)
    with engine_of(model([0.25], 7, 5), seed=1) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same_weights(weights(engine), expected)
    with (
        engine_of(model([], 0, 6)) as engine,
        pytest.raises(infinity.CheckpointError, match="`limit` of the model is 5 in the checkpoint and 6 here"),
    ):
        engine.load_checkpoint(tmp_path)


# Checkpoints of earlier versions #


def old_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    model[3].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("converted", [False, True])
def test_a_checkpoint_of_before_runs_and_models_were_noted_is_read(converted, tmp_path) -> None:
    """With bfloat16 statistics of its BatchNorm, in whatever dtype this version keeps them."""
    directory = shutil.copytree(OLD, tmp_path / "old")
    expected = torch.load(OLD / "expected.pt", weights_only=True)
    if converted:
        convert(directory, tmp_path / "new", state_format="fp32")
        directory = tmp_path / "new"
    model = old_model(5)
    with engine_of(model, bf16={"enabled": True}) as engine:
        path, client_state = engine.load_checkpoint(directory)
        assert (path, client_state) == (directory / "global_step3", {"epoch": 2})
        assert engine.global_steps == 3
        assert_same_weights(weights(engine), expected["weights"])
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, expected["buffers"][name].to(buffer.dtype)), name
        with torch.no_grad():
            output = engine.eval()(expected["input"])
        torch.testing.assert_close(output, expected["output"])
        engine.train().backward(engine(expected["input"]).square().mean())
        engine.step()
        saved = engine.save_checkpoint(tmp_path / "again")
        assert saved.name == "global_step4"


# Runs #


def run_of(path: Path) -> str:
    return json.loads((path / "manifest.json").read_text())["run"]


def test_a_run_keeps_its_name_over_its_checkpoints(tmp_path) -> None:
    first = save(tmp_path / "first")
    with engine_of() as engine:
        other = engine.save_checkpoint(tmp_path / "other")
        assert run_of(other) != run_of(first)
        engine.load_checkpoint(tmp_path / "first", load_module_only=True)
        assert run_of(engine.save_checkpoint(tmp_path / "other")) == run_of(other)
        engine.load_checkpoint(tmp_path / "first")
        assert run_of(engine.save_checkpoint(tmp_path / "other")) == run_of(first)
    assert run_of(convert(first, tmp_path / "converted", state_format="bf16")) == run_of(first)


def test_two_runs_at_once_do_not_save_in_one_directory(tmp_path) -> None:
    with engine_of() as first, engine_of() as second:
        run = run_of(first.save_checkpoint(tmp_path, tag="tag"))
        with pytest.raises(
            infinity.CheckpointError,
            match=rf"another run saves its checkpoints here: process {os.getpid()} on '.+', run '{run[:8]}.*own",
        ):
            second.save_checkpoint(tmp_path, tag="tag")
        second.load_checkpoint(tmp_path)  # reading is for all
        second.save_checkpoint(tmp_path / "own")
        train(second)
        first.close()
        second.save_checkpoint(tmp_path, tag="tag")
    assert not (tmp_path / LOCK).exists()


def test_what_another_run_saved_is_replaced_with_a_word(tmp_path, caplog) -> None:
    run = run_of(save(tmp_path))
    with engine_of() as engine, caplog.at_level(logging.WARNING):
        engine.save_checkpoint(tmp_path, tag="tag")
        engine.save_checkpoint(tmp_path, tag="tag")
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{tmp_path / 'tag'} is the checkpoint of another run ({run}), and is replaced by this run's"]


HOLD = """
import os, signal, sys, time
from pathlib import Path
from torch import nn
from infinity.checkpoint import Run

run = Run(nn.Linear(1, 1))
run.claim(Path(sys.argv[1]))
child = os.fork()  # a worker, which inherits the lock
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.parametrize("fate", ["lives", "dies"])
def test_the_lock_of_a_process_lasts_as_long_as_the_process(fate, tmp_path) -> None:
    """Not as long as workers that were forked off it."""
    process = Child(["-c", HOLD, tmp_path, fate])
    worker = int(process.stdout.readline())
    run = Run(nn.Linear(1, 1))
    try:
        if fate == "lives":
            with pytest.raises(infinity.CheckpointError, match=f"another run saves .* process {process.pid} on"):
                run.claim(tmp_path)
        else:
            process.wait()
            run.claim(tmp_path)
            assert json.loads((tmp_path / LOCK).read_text())["run"] == run.id
            with pytest.raises(infinity.CheckpointError, match=f"another run saves .* process {os.getpid()} on"):
                Run(nn.Linear(1, 1)).claim(tmp_path)
    finally:
        run.unclaim()
        process.kill()
        os.kill(worker, signal.SIGKILL)
        process.communicate()


def test_a_child_that_ends_does_not_unlock_what_its_parent_holds(tmp_path) -> None:
    run, other = Run(nn.Linear(1, 1)), Run(nn.Linear(1, 1))
    run.claim(tmp_path)
    child = os.fork()
    if child == 0:
        run.unclaim()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(infinity.CheckpointError, match="another run saves its checkpoints here"):
        other.claim(tmp_path)
    run.unclaim()
    other.claim(tmp_path)
    other.unclaim()


def test_an_engine_that_is_dropped_lets_its_directory_go(tmp_path) -> None:
    run = Run(nn.Linear(1, 1))
    run.claim(tmp_path)
    del run
    other = Run(nn.Linear(1, 1))
    other.claim(tmp_path)
    other.unclaim()


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK])
def test_a_filesystem_without_locks_gets_one_warning(code, tmp_path, monkeypatch, caplog) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with engine_of() as engine, caplog.at_level(logging.WARNING):
        engine.save_checkpoint(tmp_path, tag="a")
        engine.save_checkpoint(tmp_path, tag="b")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: the filesystem has no locks, so other runs are not kept from saving here"
    ]


# Several ranks #


def load_own(directories: list[str]) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Each rank loads from a directory of its own; what it is told, and its weights after a step."""
    torch.manual_seed(5)
    with engine_of(Heads()) as engine:
        message = None
        try:
            engine.load_checkpoint(directories[dist.get_rank()])
        except infinity.CheckpointError as error:
            message = str(error)
        loaded = weights(engine)
        train(engine)
        return message, loaded


def load_each(cases: list[list[str]]) -> list[tuple[str | None, dict[str, torch.Tensor]]]:
    return [load_own(directories) for directories in cases]


def test_ranks_with_different_checkpoints_under_one_tag_all_refuse(tmp_path) -> None:
    """Node-local directories: of another run, damaged, empty; and equal ones, which load."""
    ours = save(tmp_path / "ours").parent
    save(tmp_path / "other", seed=3)
    for name in ("damaged", "no-extra", "copy"):
        shutil.copytree(ours, tmp_path / name)
    for path in (tmp_path / "damaged" / "tag").glob("*.safetensors"):
        flip(path)
        flip(path, -100)
    (tmp_path / "no-extra" / "tag" / "extra.pt").unlink()
    names = ["other", "damaged", "empty", "no-extra", "copy"]
    (tmp_path / "ranks").mkdir()
    results = run_ranks(2, load_each, [[str(ours), str(tmp_path / n)] for n in names], path=tmp_path / "ranks")
    expected = [
        "rank 1: .*other/tag is another checkpoint here than on rank 0",
        r"rank 1: .*damaged/tag/unit-\d+\.safetensors is damaged: tensor \S+ differs near byte \d+",
        "rank 1: .*empty/tag/manifest.json cannot be read: No such file",
        "rank 1: .*no-extra/tag/extra.pt cannot be read: No such file",
    ]
    with engine_of(seed=5) as engine:
        untouched = weights(engine)
        engine.load_checkpoint(ours)
        loaded = weights(engine)
    for of_rank in results:
        for (message, after), pattern in zip(of_rank[:-1], expected, strict=True):
            assert message is not None, pattern
            assert re.match(pattern, message), message
            assert_same_weights(after, untouched)
        message, after = of_rank[-1]
        assert message is None
        assert_same_weights(after, loaded)


def fail_on_rank_1(directory: str) -> tuple[str, str]:
    """The second pass fails on one rank: no rank goes on."""
    with engine_of(Heads()) as engine, pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("infinity.checkpoint.load._load_unit", raise_error)
        with pytest.raises(infinity.CheckpointError) as refused:
            engine.load_checkpoint(directory)
        with pytest.raises(infinity.InfinityError) as stopped:
            train(engine)
        return str(refused.value), str(stopped.value)


def raise_error(*args: Any) -> None:
    raise infinity.CheckpointError("the drive is gone")


def test_a_load_that_fails_half_way_on_one_rank_stops_all(tmp_path) -> None:
    directory = save(tmp_path / "saved").parent
    for refused, stopped in run_ranks(2, fail_on_rank_1, str(directory), path=tmp_path):
        assert refused.startswith("rank 1: the drive is gone. Some parameters had been loaded by then")
        assert "the engine has stopped after an error" in stopped


STAGES = (1, 2, 3)


def resume(directory: str) -> dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Weights after a load, and after the training step that follows, by stage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for stage in STAGES:
        torch.manual_seed(5)
        with engine_of(Heads(), zero_optimization={"stage": stage}) as engine:
            engine.load_checkpoint(directory)
            loaded = weights(engine)
            for ids in inputs()[rank::size]:
                engine.backward(engine(ids).square().mean())
            engine.step()
            found[stage] = loaded, weights(engine)
    return found


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]


def test_two_ranks_go_on_from_a_checkpoint_as_one_does(tmp_path) -> None:
    directory = save(tmp_path / "saved", steps=3).parent
    with engine_of(seed=5, gradient_accumulation_steps=2) as engine:
        engine.load_checkpoint(directory)
        loaded = weights(engine)
        for ids in inputs():
            engine.backward(engine(ids).square().mean())
            engine.step()
        after = weights(engine)
    assert any(not torch.equal(loaded[name], after[name]) for name in after)
    for by_stage in run_ranks(2, resume, str(directory), path=tmp_path):
        for stage in STAGES:
            assert_same_weights(by_stage[stage][0], loaded)
            for name, value in by_stage[stage][1].items():
                torch.testing.assert_close(value, after[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tag", [0, 7, 2.25])
def test_a_tag_may_be_a_number(tag, tmp_path) -> None:
    """Scripts for DeepSpeed give a step or a loss."""
    with engine_of() as engine:
        train(engine)
        engine.save_checkpoint(tmp_path, tag)
        assert engine.load_checkpoint(tmp_path, tag)[0] == tmp_path / str(tag)


def test_a_client_state_that_cannot_be_pickled_is_refused(tmp_path) -> None:
    with engine_of() as engine:
        train(engine)
        with pytest.raises(infinity.CheckpointError, match=r"client_state .* cannot be saved: .*lambda"):
            engine.save_checkpoint(tmp_path, client_state={"schedule": lambda step: step})
        engine.save_checkpoint(tmp_path)
