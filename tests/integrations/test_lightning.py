"""Lightning's Trainer over an engine is the same training as Lightning's own."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.integrations import save_pretrained
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_llama, train_on

pl = pytest.importorskip("lightning.pytorch")

from infinity.integrations.lightning import InfinityStrategy  # noqa: E402  (where Lightning is installed)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Lightning's, which are many
    pytest.mark.usefixtures("ends_process_group"),  # it leaves one of one rank
]
ROOT = Path(__file__).parents[2]
DATA = torch.cat(batches(10))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning leaves the environment of a launcher."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class Language(pl.LightningModule):
    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.losses: list[float] = []
        if not late:
            self.model = tiny_llama()

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = loss_of(self.model, ids)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, ids: torch.Tensor, index: int) -> None:
        self.log("validation", loss_of(self.model, ids), sync_dist=True)

    def predict_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=ids).logits

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Late(Language):
    def __init__(self) -> None:
        super().__init__(late=True)

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_llama()


def config(path: Path, placement: str = "nvme") -> dict[str, Any]:
    path.mkdir(exist_ok=True)
    whole = Recipe().config(Placement(placement, placement, path))
    return {key: whole[key] for key in ("zero_optimization", "tiering")}


def trainer(path: Path, strategy: Any, steps: int, **more: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        default_root_dir=path,
        **quiet | {"devices": 1, "use_distributed_sampler": False, "enable_checkpointing": False} | more,
    )


def loader(start: int = 0) -> Any:
    return torch.utils.data.DataLoader(DATA[start:], batch_size=2)


# The last step of an epoch of 10 batches has two of them: Lightning ends it there.
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.5), (4, 0.5)])
def test_training_is_lightnings_own(accumulate, clip, tmp_path) -> None:
    found = []
    for_trainer = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "train_batch_size": "auto"}
    for strategy in ("auto", InfinityStrategy(config(tmp_path / "swap") | for_trainer)):
        module = Language()
        more = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        used = trainer(tmp_path, strategy, 5, **more)
        used.fit(module, loader(), loader(16))
        found.append((module.losses, used.callback_metrics, used.global_step))
    (losses, metrics, steps), (ours, our_metrics, our_steps) = found
    assert ours == pytest.approx(losses, rel=1e-5)
    assert our_steps == steps == 5
    assert our_metrics.keys() == metrics.keys()
    assert float(our_metrics["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert not list((tmp_path / "swap").iterdir())


def test_a_training_goes_on_from_a_checkpoint(tmp_path) -> None:
    """As Lightning's own does, which begins the epoch's data anew."""
    losses = {}
    for name, make in (("plain", lambda: "auto"), ("ours", lambda: InfinityStrategy(config(tmp_path / "swap")))):
        every = pl.callbacks.ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        whole, resumed = Late(), Late()
        used = trainer(tmp_path, make(), 6, callbacks=[every], enable_checkpointing=True, gradient_clip_val=0.5)
        used.fit(whole, loader())
        used = trainer(tmp_path, make(), 6, gradient_clip_val=0.5)
        used.fit(resumed, loader(), ckpt_path=tmp_path / name / "step=3.ckpt")
        assert used.global_step == 6
        losses[name] = whole.losses + resumed.losses
    assert losses["ours"] == pytest.approx(losses["plain"], rel=1e-5)
    assert len(losses["ours"]) == 9
    saved = tmp_path / "ours"
    assert (saved / "step=3.ckpt").is_dir()

    for seed in (0, 1):  # values of its own, and of the checkpoint
        module = Late()
        used = trainer(tmp_path, InfinityStrategy(config(tmp_path / "swap")), 6)
        path = saved / "step=6.ckpt" if seed else None
        (predicted, *_) = used.predict(module, loader(), ckpt_path=path)
        plain = whole.model if seed else tiny_llama()
        assert torch.allclose(predicted, plain(input_ids=DATA[:2]).logits, atol=1e-5)
        (found,) = used.validate(module, loader(), ckpt_path=path, verbose=False)
        expected = sum(loss_of(plain, ids).item() for ids in loader()) / 10
        assert found["validation"] == pytest.approx(expected, rel=1e-5)


def test_weights_of_another_strategys_file_are_taken(tmp_path) -> None:
    module = Language()
    used = trainer(tmp_path, "auto", 2)
    used.fit(module, loader())
    used.save_checkpoint(tmp_path / "plain.ckpt")
    other = Language()
    used = trainer(tmp_path, InfinityStrategy(config(tmp_path / "swap")), 2)
    (found,) = used.validate(other, loader(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    expected = sum(loss_of(module.model, ids).item() for ids in loader()) / 10
    assert found["validation"] == pytest.approx(expected, rel=1e-5)


def test_the_trainers_precision_and_the_configurations_optimizer_count(tmp_path) -> None:
    class Exporting(Language):
        def on_train_end(self) -> None:
            engine = self.trainer.strategy.engine
            assert engine.config.precision == "bf16"
            assert {param.dtype for param in self.model.parameters()} == {torch.bfloat16}
            save_pretrained(engine, tmp_path / "export", dtype=torch.float32)

        def configure_optimizers(self) -> Any:
            raise AssertionError("the configuration has one")

    settings = config(tmp_path / "swap") | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    settings |= {"fp16": None, "bf16": None}  # as if they were left out
    module = Exporting()
    trainer(tmp_path, InfinityStrategy(settings), 3, precision="bf16-true").fit(module, loader())
    settings |= {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    with infinity.initialize(tiny_llama(), config=settings)[0] as engine:
        assert train_on(engine, list(DATA[:6].split(2))) == module.losses
    assert (tmp_path / "export" / "model.safetensors").is_file()
    with pytest.raises(infinity.ConfigError, match="while its Trainer runs"):
        _ = InfinityStrategy(settings).engine


def test_manual_optimization_with_one_backward_a_step(tmp_path) -> None:
    class Manual(Language):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, ids: torch.Tensor, index: int) -> None:
            optimizer = self.optimizers()
            loss = loss_of(self.model, ids)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())

    found = []
    for strategy in ("auto", InfinityStrategy(config(tmp_path / "swap"))):
        module = Manual()
        trainer(tmp_path, strategy, 4).fit(module, loader())
        found.append(module.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/how-to/use-trainer-lightning-ray.md").read_text(), re.DOTALL
    )
    module = Language()
    exec(code, {"config": config(tmp_path / "swap"), "module": module, "batches": loader()})
    assert len(module.losses) == 8


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, r"gradient_clipping is 1\.0 and Trainer\(gradient_c"),
        ({"gradient_accumulation_steps": 2}, {}, r"Trainer\(accumulate_grad_batches\) is 1: leave the key out"),
        ({"fp16": {"enabled": True}}, {"precision": "bf16-mixed"}, r"precision='bf16-mixed'\) and fp16 contradict"),
        ({"fp16.enabled": True}, {"precision": "bf16-mixed"}, r"precision='bf16-mixed'\) and fp16 contradict"),
        ({}, {"precision": "64-true"}, "choose 32, 16 or bf16"),
        ({}, {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, "clip by norm"),
    ],
)
def test_what_contradicts_the_trainer_is_refused(settings, arguments, words, tmp_path) -> None:
    strategy = InfinityStrategy(config(tmp_path / "swap", "none") | settings)

    def fit() -> None:
        trainer(tmp_path, strategy, 1, **arguments).fit(Language(), loader())

    with pytest.raises(infinity.ConfigError, match=words):
        fit()


EMA = pl.callbacks.EMAWeightAveraging
SWA = pl.callbacks.StochasticWeightAveraging


@pytest.mark.parametrize(("stage", "callback"), [(3, EMA), (3, partial(SWA, 1e-2)), (2, EMA)])
def test_averages_that_would_be_lost_are_refused(stage, callback, tmp_path) -> None:
    strategy = InfinityStrategy({"zero_optimization": {"stage": stage}})
    words = "choose stage 2" if stage == 3 else "enable_checkpointing=False"
    used = trainer(tmp_path, strategy, 1, callbacks=[callback()], enable_checkpointing=True)
    with pytest.raises(infinity.ConfigError, match=f"WeightAveraging .*{words}"):
        used.fit(Language(), loader())


def test_an_average_of_the_weights_is_lightnings_own(tmp_path) -> None:
    averages = []
    for strategy in ("auto", InfinityStrategy({"zero_optimization": {"stage": 2}})):
        module = Language()
        trainer(tmp_path, strategy, 3, callbacks=[EMA(decay=0.5)]).fit(module, loader())
        averages.append(module.state_dict())
    torch.testing.assert_close(averages[1], averages[0], rtol=1e-4, atol=1e-5)


def test_weights_that_a_hook_adds_to_a_checkpoint_are_refused(tmp_path) -> None:
    class Adds(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
            checkpoint["state_dict"]["average"] = torch.zeros(1)

    strategy = InfinityStrategy({"zero_optimization": {"stage": 2}})
    used = trainer(tmp_path, strategy, 1, callbacks=[Adds()], enable_checkpointing=True)
    with pytest.raises(infinity.ConfigError, match="use another key"):
        used.fit(Language(), loader())


def _twice(path: Path, data: Any, make: Any, **more: Any) -> list[float]:
    """Train for two steps, and with another module and Trainer go on to four."""
    every = pl.callbacks.ModelCheckpoint(path / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    module, again = Language(), Language()
    more |= {"accumulate_grad_batches": 2}
    trainer(path, make(), 2, callbacks=[every], enable_checkpointing=True, **more).fit(module, data)
    used = trainer(path, make(), 4, **more)
    used.fit(again, data, loader(16), ckpt_path=path / "saved" / "step=2.ckpt")
    return [*module.losses, *again.losses, float(used.callback_metrics["validation"])]


def _on_two(path: Path) -> list[float]:
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "one"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    data = torch.utils.data.DataLoader(DATA[int(rank) :: 2], batch_size=2)
    return _twice(path, data, lambda: InfinityStrategy(config(path / "swap")), devices=2)


@pytest.mark.slow
def test_two_processes_train_save_and_resume_as_one(tmp_path) -> None:
    """Batches of two on each of two ranks are batches of four on one."""
    (tmp_path / "ranks").mkdir()
    first, second = run_ranks(2, _on_two, tmp_path / "ranks", path=tmp_path / "ranks")
    order = torch.cat([DATA[rank::2][start : start + 2] for start in range(0, 10, 2) for rank in (0, 1)])
    plain = _twice(tmp_path / "plain", torch.utils.data.DataLoader(order, batch_size=4), lambda: "auto")
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(plain, rel=1e-4)
