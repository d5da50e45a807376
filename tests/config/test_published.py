"""Configurations that people have published for DeepSpeed run as they are, once the "auto" values are filled in.

Source: Hugging Face, "Accelerate Large Model Training using DeepSpeed" (huggingface.co/blog/accelerate-deepspeed).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import infinity
from infinity.config import load_config
from infinity.errors import ConfigError
from tests.behaviour.reference import batches, loss_of, tiny_gpt2

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED = ["zero2-fp16.json", "zero3-fp16-offload.json"]
FILLED = {
    "optimizer.params.lr": 1e-3,
    "optimizer.params.weight_decay": 0.01,
    "scheduler.params.warmup_num_steps": 4,
    "scheduler.params.total_num_steps": 20,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_trains(name) -> None:
    config = load_config(CONFIGS / name, auto=FILLED)
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        losses, rates = [], []
        for ids in batches(20):
            loss = loss_of(engine, ids)
            engine.backward(loss)
            rates.append(engine.get_lr()[0])
            engine.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert max(rates) == pytest.approx(1e-3)  # "auto", so the optimizer's
    assert rates[-1] < 1e-3
    assert config.train_batch_size == 2


def test_what_auto_became_is_logged(caplog) -> None:
    with caplog.at_level("INFO", "infinity.config"):
        load_config(CONFIGS / PUBLISHED[0], auto=FILLED)
    assert "key optimizer.params.lr is auto: 0.001 was given" in caplog.text
    assert "key scheduler.params.warmup_min_lr is auto: left to its default" in caplog.text
    assert "key scheduler.params.warmup_max_lr is auto: 0.001, the optimizer's" in caplog.text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_number_that_nobody_can_guess_is_asked_for(name) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps is missing; WarmupDecayLR needs it"):
        infinity.initialize(model=tiny_gpt2(), config=CONFIGS / name)


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "optimizer.params.betas", "tiering.nvme.path"])
def test_a_value_for_a_key_that_is_not_auto_is_refused_by_name(key) -> None:
    with pytest.raises(ConfigError, match=f"a value is given for {key}"):
        load_config(CONFIGS / PUBLISHED[0], auto={key: 4})


def test_dotted_keys_go_into_the_sections_that_are_there() -> None:
    values = json.loads((CONFIGS / PUBLISHED[1]).read_text())
    values["scheduler.params.total_num_steps"] = 100
    values["optimizer.params.lr"] = 5e-4
    config = load_config(values)
    assert config.scheduler is not None
    assert dict(config.scheduler.params) == {"total_num_steps": 100, "warmup_max_lr": 5e-4}
    assert config.optimizer is not None
    assert dict(config.optimizer.params) == {"lr": 5e-4}
