"""What monitors are told of training: DeepSpeed's names and axis, by rank 0, whatever becomes of a writer."""

from __future__ import annotations

import csv
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.config import load_config
from infinity.integrations.deepspeed.config import DeepSpeedConfig
from infinity.integrations.deepspeed.monitor import MonitorMaster, get_monitor_config
from tests.api.small_models import CONFIG, WIDTH, Heads, engine_of, train
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, tiny_llama, train_on

LOSS, RATE, SCALE = "Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"


def in_csv(directory: Path) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(directory), "job_name": "job"}}


def told(directory: Path, name: str) -> list[tuple[int, float]]:
    """What the file of an event has, after its header."""
    with (directory / "job" / f"{name.replace('/', '_')}.csv").open() as file:
        (first, second), *rows = csv.reader(file)
    assert (first, second) == ("step", name.rpartition("/")[2])
    return [(int(samples), float(value)) for samples, value in rows]


def test_the_loss_stands_at_the_samples_before_its_step_and_the_rest_behind_them(tmp_path) -> None:
    config = in_csv(tmp_path) | {
        "gradient_accumulation_steps": 2,
        "wall_clock_breakdown": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    }
    losses, rates = [], []
    with engine_of(**config) as engine:
        assert engine.monitor.enabled
        for step in range(3):
            total = 0.0
            for _ in range(2):
                loss = engine(torch.randn(4, WIDTH)).square().mean()
                if step == 1:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
                total += loss.item() / 2
            losses.append(total)
            rates.append(engine.get_lr()[0])
        peak = engine.stats().peak_bytes["host"] / 1e9
        engine.monitor.write_events([("mine/a b", torch.tensor(3.0), 5)])
    assert told(tmp_path, LOSS) == [(8 * step, pytest.approx(loss)) for step, loss in enumerate(losses)]
    assert told(tmp_path, RATE) == [(8 * step + 8, rate) for step, rate in enumerate(rates)]
    assert told(tmp_path, "tiers/peak_host_gb")[-1] == (24, peak)
    for phase in ("forward", "backward", "step"):
        assert [samples for samples, _ in told(tmp_path, f"Train/Samples/elapsed_time_ms_{phase}")] == [8, 16, 24]
    assert (tmp_path / "job" / "mine_a_b.csv").read_text() == "step,a b\n5,3.0\n"
    assert not (tmp_path / "job" / "Train_Samples_loss_scale.csv").exists()


def test_what_moved_is_told(tmp_path) -> None:
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB", "900KB"))
    read = []
    with infinity.initialize(model=tiny_llama(), config=config | in_csv(tmp_path))[0] as engine:
        for ids in batches(3):
            train_on(engine, [ids])
            if "nvme_read" in engine.stats().tier_bytes:  # of a step of which the first reads have begun by its end
                read.append((engine.global_samples, engine.stats().tier_bytes["nvme_read"] / 1e9))
    assert read
    assert told(tmp_path, "tiers/nvme_read_gb") == read


def test_the_loss_scale_is_told_and_a_resumed_run_goes_on(tmp_path) -> None:
    config = in_csv(tmp_path) | {"fp16": {"enabled": True, "initial_scale_power": 4}}
    for run in range(2):
        with engine_of(**config) as engine:
            if run:
                engine.load_checkpoint(tmp_path / "saved")
            for _ in range(2):
                engine.scale(engine(torch.randn(4, WIDTH).half()).square().mean())  # a step that begins anew
                engine.zero_grad()
                engine.backward(engine(torch.zeros(4, WIDTH).half()).float().sum() * 0)
                engine.step()
            engine.save_checkpoint(tmp_path / "saved")
    assert told(tmp_path, LOSS) == [(4 * step, 0.0) for step in range(4)]
    assert told(tmp_path, SCALE) == [(4 * step + 4, 16.0) for step in range(4)]


def test_tensorboard_has_the_same(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    board = {"tensorboard": {"enabled": "true", "output_path": str(tmp_path / "board"), "job_name": "job"}}
    with engine_of(**in_csv(tmp_path), **board) as engine:
        train(engine, 3)
    found = EventAccumulator(str(tmp_path / "board" / "job"))
    found.Reload()
    for name in (LOSS, RATE, "tiers/peak_host_gb"):
        seen = [(event.step, pytest.approx(event.value)) for event in found.Scalars(name)]
        assert told(tmp_path, name) == seen
        assert len(seen) == 3


class Run:
    """Stands where a run of Weights & Biases does, which takes no step before the last one."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False
        self.fails = False

    def log(self, values: dict[str, float], step: int) -> None:
        if self.fails:
            raise ConnectionError("no network")
        assert not self.logged or step >= self.logged[-1][0]
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.run = None
    module.started = []

    def init(**how: Any) -> Run:
        module.started.append((how, Run()))
        return module.started[-1][1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_has_a_run_of_the_engine_or_the_scripts_own(wandb) -> None:
    section = {"wandb": {"enabled": True, "project": "p", "team": "t", "group": "g"}}
    with engine_of(**section) as engine:
        train(engine, 2)
    ((how, run),) = wandb.started
    assert how == {"project": "p", "entity": "t", "group": "g"}
    assert [(samples, LOSS in values, RATE in values) for samples, values in run.logged] == [
        (0, True, False),
        (4, False, True),
        (4, True, False),
        (8, False, True),
    ]
    assert run.finished
    wandb.run = Run()
    with engine_of(**section) as engine:
        train(engine)
    assert len(wandb.started) == 1
    assert len(wandb.run.logged) == 2
    assert not wandb.run.finished


def test_without_an_account_the_offline_mode_is_named(wandb) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("No API key configured")

    wandb.init = init
    with pytest.raises(infinity.ConfigError, match=r"wandb cannot be opened: No API key .*WANDB_MODE=offline"):
        infinity.initialize(model=Heads(), config=CONFIG | {"wandb": {"enabled": True}})


def test_a_writer_that_fails_is_left_out_and_training_goes_on(wandb, tmp_path, caplog) -> None:
    with engine_of(**in_csv(tmp_path), wandb={"enabled": True}) as engine:
        train(engine)
        wandb.started[0][1].fails = True
        train(engine, 2)
        assert engine.global_steps == 3
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "wandb failed; later events are not written to it: no network"
    ]
    assert len(told(tmp_path, LOSS)) == 3


def test_what_is_missing_or_cannot_be_opened_is_refused_before_anything_is_trained(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("infinity.telemetry.monitor.find_spec", lambda name: None)
    for package in ("wandb", "tensorboard"):
        model = Heads()
        with pytest.raises(infinity.ConfigError, match=f"{package}.enabled is true .* pip install {package}"):
            infinity.initialize(model=model, config=CONFIG | {package: {"enabled": True}})
        assert model.mix.weight.isfinite().all()
    (tmp_path / "file").touch()
    model = Heads()
    with pytest.raises(
        infinity.ConfigError, match=r"csv_monitor.enabled is true, but csv_monitor cannot be opened: .*file"
    ):
        infinity.initialize(model=model, config=CONFIG | in_csv(tmp_path / "file"))
    infinity.initialize(model=model, config=CONFIG)[0].close()  # nobody has it
    with pytest.raises(infinity.ConfigError, match=r"tensorboard.job_name: '' must be a path"):
        load_config({"tensorboard": {"enabled": True, "job_name": ""}})


def test_a_monitor_of_the_scripts_own(tmp_path) -> None:
    monitor = MonitorMaster(DeepSpeedConfig(CONFIG | in_csv(tmp_path)).monitor_config)
    assert monitor.enabled
    monitor.write_events([("mine", 1, 2)])
    monitor.close()
    monitor.write_events([("mine", 3, 4)])
    assert told(tmp_path, "mine") == [(2, 1.0)]
    assert get_monitor_config(CONFIG) == load_config({}).monitors
    assert not MonitorMaster(get_monitor_config(CONFIG)).enabled


def told_by_two(directory: str) -> str:
    """Each rank would write into a directory of its own; where rank 0 cannot, none trains."""
    own = Path(directory) / str(dist.get_rank())
    with engine_of(**in_csv(own)) as engine:
        train(engine)
    try:
        engine_of(**in_csv(Path(directory) / ("nothing" if dist.get_rank() else "store")))
    except infinity.ConfigError as error:
        return str(error)
    return ""


def test_rank_0_writes_for_all(tmp_path) -> None:
    (tmp_path / "store").touch()
    messages = run_ranks(2, told_by_two, str(tmp_path), path=tmp_path)
    assert [samples for samples, _ in told(tmp_path / "0", RATE)] == [8]
    assert not (tmp_path / "1").exists()
    assert not (tmp_path / "nothing").exists()
    for message in messages:
        assert message.startswith("rank 0: csv_monitor.enabled is true, but csv_monitor cannot be opened")
