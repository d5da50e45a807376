"""Checkpoints that DeepSpeed 0.19.8 has saved, of ZeRO 1, 2 and 3 on one and two ranks: every value, and what follows.

`data/deepspeed` holds them as they are; benchmarks/peers/deepspeed_checkpoints.py writes them.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.checkpoint import pickles
from infinity.checkpoint.deepspeed import import_deepspeed
from infinity.checkpoint.format import Manifest, read_manifest
from infinity.checkpoint.pickles import ForeignObject, read_pickle
from infinity.checkpoint.stored import StoredReader
from infinity.cli.main import main
from tests.checkpoint.deepspeed_model import AFTER, BEFORE, config, data, groups, small

DATA = Path(__file__).parent / "data" / "deepspeed"
SAVED = sorted(path.name for path in DATA.iterdir())
TAG = f"global_step{BEFORE}"


def values_of(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    with StoredReader(path, manifest.tensors) as reader:
        return {key: reader.read(key, 0, tensor.numel) for key, tensor in manifest.tensors.items()}


def engine_of(name: str, seed: int = 5, **changes: Any) -> infinity.Engine:
    stage, precision, _ = name.split("-", 2)
    model = small(seed)
    model.temperature.zero_()
    settings = config(int(stage[-1]), precision) | changes
    return infinity.initialize(model=model, config=settings, model_parameters=groups(model))[0]


def train(engine: infinity.Engine, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for ids in batches:
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(params=[pickles._SMALL_BYTES, 8], ids=["read at once", "left in the file"])
def where(request, monkeypatch) -> int:
    """Storages of more bytes than this stay in their file."""
    monkeypatch.setattr(pickles, "_SMALL_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("name", SAVED)
def test_every_value_is_the_one_that_deepspeed_has(name, where, tmp_path) -> None:
    path = import_deepspeed(DATA / name, tmp_path)
    manifest = read_manifest(path)
    found, expected = values_of(path, manifest), load_file(DATA / name / "expected.safetensors")
    assert path == tmp_path / TAG
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert manifest.counters == {"global_steps": BEFORE, "micro_steps": BEFORE, "skipped_steps": 0}
    assert set(manifest.steps.values()) == {BEFORE}


@pytest.mark.parametrize("name", SAVED)
def test_training_goes_on_as_it_would_have_there(name, tmp_path) -> None:
    """To the rounding of the precision: gradients are summed in another order, and bfloat16 rounds at other places."""
    import_deepspeed(DATA / name, tmp_path)
    there = json.loads((DATA / name / "losses.json").read_text())["losses"][BEFORE:]
    with engine_of(name) as engine:
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path == tmp_path / TAG
        assert client_state.pop("seen").tolist() == [0, 1, 2]
        assert client_state == {"epoch": 7}
        assert engine.global_steps == BEFORE
        assert engine.module.temperature.tolist() == [1.5, 0.5]
        here = train(engine, data(BEFORE + AFTER)[BEFORE:])
    tolerance = 1e-6 if "fp32" in name else 2e-3
    assert here == pytest.approx(there, rel=tolerance)


def test_a_loss_scale_rises_at_the_steps_at_which_it_would_have_there(tmp_path) -> None:
    name = "stage2-fp16-2"
    import_deepspeed(DATA / name, tmp_path)
    there = json.loads((DATA / name / "losses.json").read_text())["loss_scales"]
    here = []
    with engine_of(name) as engine:
        engine.load_checkpoint(tmp_path)
        here.append(engine.loss_scale.value)
        for ids in data(BEFORE + AFTER)[BEFORE:]:
            train(engine, [ids])
            here.append(engine.loss_scale.value)
    assert here == there[BEFORE - 1 :]
    assert len(set(here)) > 1


def test_hyper_parameters_and_the_schedule_go_on(tmp_path) -> None:
    name = "stage3-fp32-2"
    import_deepspeed(DATA / name, tmp_path)
    rates = []
    with engine_of(name) as engine:
        train(engine, data(BEFORE + 1))
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
    with engine_of(name) as engine:
        engine.load_checkpoint(tmp_path)
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
        assert all(group["decoupled"] for group in engine.optimizer.param_groups)
        train(engine, data(1))
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
    assert rates[0] == rates[1]


def test_the_command_imports(tmp_path, capsys) -> None:
    source = DATA / "stage3-bf16-1"
    assert main(["checkpoint", "import", str(source), str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["path"], said["global_steps"]) == (str(tmp_path / TAG), BEFORE)
    assert main(["checkpoint", "import", str(source / TAG), str(tmp_path / "again"), "--tag", "../x"]) == 2
    assert main(["checkpoint", "import", str(tmp_path / TAG), str(tmp_path / "again")]) == 2
    assert "is no checkpoint of DeepSpeed" in capsys.readouterr().err
    assert main(["checkpoint", "import", str(source), str(source)]) == 2
    assert not (tmp_path / "again").exists()


def test_tensors_of_any_kind_come_out_of_a_file_as_they_were(where, tmp_path) -> None:
    base = torch.randn(6, 8)
    saved = {
        "whole": base,
        "part": base[2:4],
        "turned": base.t(),
        "steps": base[::2, 1::3],
        "half": base.bfloat16(),
        "bools": base > 0,
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": [{"counts": torch.arange(5)}, (torch.tensor(3), "text")],
    }
    torch.save(saved, tmp_path / "file.pt")
    found = read_pickle(tmp_path / "file.pt")
    for key, value in list(saved.items())[:-1]:
        assert torch.equal(pickles.whole(found[key]), value), key
        assert torch.equal(pickles.elements(found[key], 1, 3), value.reshape(-1)[1:3]), key
    nested = pickles.whole(found["nested"])
    assert torch.equal(nested[0]["counts"], torch.arange(5))
    assert nested[1] == (torch.tensor(3), "text")


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(pickles, "_SMALL_BYTES", 0)
    torch.save({"values": torch.ones(1 << 16)}, tmp_path / "file.pt")
    found = read_pickle(tmp_path / "file.pt")["values"]
    os.truncate(tmp_path / "file.pt", 4096)
    with pytest.raises(infinity.CheckpointError, match=r"file\.pt ended while"):
        pickles.elements(found, 0, found.numel())


def test_a_file_without_checksums_is_taken(tmp_path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"values": torch.ones(9)}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_pickle(tmp_path / "file.pt")["values"].sum() == 9


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_bit_that_is_another_is_refused_by_file_or_changes_nothing(kind, where, tmp_path) -> None:
    path = copy_of("stage2-fp32-2-aligned", tmp_path / "saved")
    wanted = load_file(DATA / "stage2-fp32-2-aligned" / "expected.safetensors")
    file = min(path.glob(f"*{kind}_states.pt"))
    content, chance = file.read_bytes(), random.Random(kind)
    named: list[str] = []
    for number in range(20):
        changed = bytearray(content)
        changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        try:
            made = import_deepspeed(path, tmp_path / f"new{number}")
        except infinity.CheckpointError as error:
            named.append(str(error))
            continue
        found = values_of(made, read_manifest(made))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert len(named) > 10
    assert all(str(file) in message for message in named)


def test_loading_one_as_it_is_says_what_to_do() -> None:
    with engine_of("stage3-bf16-1") as engine, pytest.raises(infinity.CheckpointError, match="checkpoint import"):
        engine.load_checkpoint(DATA / "stage3-bf16-1")


def copy_of(name: str, path: Path) -> Path:
    shutil.copytree(DATA / name, path)
    return path / TAG


def rewrite(path: Path, change: Any) -> None:
    """Change what a file of DeepSpeed's holds, so that it has plain values for the classes."""
    content = read_pickle(path)
    change(content)
    torch.save(_plain(content), path)


def _plain(value: Any) -> Any:
    if isinstance(value, ForeignObject):
        return dict(value.state) if value.state else value.arguments[0]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_files_that_are_missing_are_named(tmp_path) -> None:
    path = copy_of("stage3-fp32-2", tmp_path / "saved")
    optim = sorted(path.glob("*_optim_states.pt"))
    optim[1].rename(tmp_path / "kept")
    with pytest.raises(infinity.CheckpointError, match="saved by 2 ranks, and has the optimizer states of 1"):
        import_deepspeed(path, tmp_path / "new")
    (tmp_path / "kept").rename(optim[1])
    optim[0].unlink()
    with pytest.raises(infinity.CheckpointError, match="no file of rank 0"):
        import_deepspeed(path, tmp_path / "new")
    optim[1].unlink()
    with pytest.raises(infinity.CheckpointError, match="without ZeRO"):
        import_deepspeed(path, tmp_path / "new")
    next(path.glob("zero_pp_rank_1*model*")).unlink()
    assert not (tmp_path / "new").exists()


def _cut(content: dict[str, Any]) -> None:
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[0] = groups[0][:-1]


def _of_lamb(content: dict[str, Any]) -> None:
    content["ds_config"]["optimizer"]["type"] = "Lamb"


def _swapped(content: dict[str, Any]) -> None:
    shapes = content["param_shapes"][0]
    content["param_shapes"][0] = dict(reversed(shapes.items()))


def _with_amsgrad(content: dict[str, Any]) -> None:
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"]


def _of_another_step(content: dict[str, Any]) -> None:
    content["global_steps"] += 1


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("stage3-fp32-2", "*rank_1_*optim*", _cut, "its slices of all parameters are"),
        ("stage1-bf16-2", "*model*", _of_lamb, "of an optimizer that the engine does not have"),
        ("stage1-bf16-2", "*model*", _swapped, "its files are not of one checkpoint"),
        ("stage1-bf16-2", "*optim*", _with_amsgrad, "max_exp_avg_sq"),
        ("stage3-fp32-2", "zero_pp_rank_1_*model*", _of_another_step, "files of several steps"),
    ],
)
def test_what_does_not_fit_together_is_refused(name, file, change, message, tmp_path) -> None:
    path = copy_of(name, tmp_path / "saved")
    for one in path.glob(file):
        rewrite(one, change)
    with pytest.raises(infinity.CheckpointError, match=message):
        import_deepspeed(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mp_rank_01_model_states.pt", "model parallelism"),
        ("layer_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
    ],
)
def test_models_that_are_divided_are_refused(name, message, tmp_path) -> None:
    path = copy_of("stage1-bf16-2", tmp_path / "saved")
    (path / name).write_bytes(b"")
    with pytest.raises(infinity.CheckpointError, match=message):
        import_deepspeed(path, tmp_path / "new")


def _whole_steps(content: dict[str, Any]) -> None:
    """As DeepSpeed's CPU Adam counts."""
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = int(state["step"])


def _steps_of_groups(content: dict[str, Any]) -> None:
    """As its fused Adam does."""
    base = content["optimizer_state_dict"]["base_optimizer_state"]
    for state, group in zip(base["state"].values(), base["param_groups"], strict=True):
        group["step"] = int(state.pop("step"))
        group["bias_correction"] = True
        del group["decoupled_weight_decay"]


@pytest.mark.parametrize("change", [_whole_steps, _steps_of_groups])
def test_steps_are_found_wherever_an_optimizer_keeps_them(change, tmp_path) -> None:
    path = copy_of("stage1-bf16-2", tmp_path / "saved")
    for one in path.glob("*optim*"):
        rewrite(one, change)
    manifest = read_manifest(import_deepspeed(path, tmp_path / "new"))
    assert set(manifest.steps.values()) == {BEFORE}
    with engine_of("stage1-bf16-2") as engine:
        engine.load_checkpoint(tmp_path / "new")
        assert all(group["decoupled"] for group in engine.optimizer.param_groups)


def test_how_weights_decay_is_this_runs_where_a_checkpoint_does_not_say(tmp_path) -> None:
    path = copy_of("stage1-bf16-2", tmp_path / "saved")

    def forget(content: dict[str, Any]) -> None:
        del content["ds_config"]["optimizer"]

    for one in path.glob("*optim*"):
        rewrite(one, _steps_of_groups)
    rewrite(path / "mp_rank_00_model_states.pt", forget)
    import_deepspeed(path, tmp_path / "new")
    adam = {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}
    with engine_of("stage1-bf16-2", optimizer=adam) as engine:
        engine.load_checkpoint(tmp_path / "new")
        assert not any(group["decoupled"] for group in engine.optimizer.param_groups)


def test_universal_checkpoints_are_refused(tmp_path) -> None:
    path = copy_of("stage1-bf16-2", tmp_path / "saved")
    (path / "zero").mkdir()
    with pytest.raises(infinity.CheckpointError, match="universal checkpoint: import the one"):
        import_deepspeed(path, tmp_path / "new")


class _Trap:
    """Unpickling it calls a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.copyfile, ("/dev/null", str(self.path))


def test_no_code_of_a_file_runs(tmp_path, caplog) -> None:
    """What names a function is left out, by name; a module that torch blocks is refused."""
    path = copy_of("stage1-bf16-2", tmp_path / "saved")

    def plant(content: dict[str, Any]) -> None:
        content["mine"] = _Trap(tmp_path / "touched")

    rewrite(path / "mp_rank_00_model_states.pt", plant)
    import_deepspeed(path, tmp_path / "new")
    assert "client_state `mine` is left out" in caplog.text
    assert not (tmp_path / "touched").exists()
    (path / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(_Trap(tmp_path / "touched")))
    with pytest.raises(infinity.CheckpointError, match="cannot be read"):
        import_deepspeed(path, tmp_path / "new")
    assert not (tmp_path / "touched").exists()
