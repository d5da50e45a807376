"""The examples of the pages on several ranks run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity.config import load_config
from infinity.zero.budgets import host_capacity
from infinity.zero.leaf_modules import get_z3_leaf_modules
from tests.behaviour.test_leaf_modules import Mixture
from tests.behaviour.test_pipelining import needs_scale_grads
from tests.integrations.processes import ROOT, output, ranks
from tests.schedule.test_budget import NEEDS

PAGES = [ROOT / "docs/how-to" / name for name in ("train-on-several-gpus.md", "combine-parallelisms.md")]
EXAMPLES = [
    code for page in PAGES for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
]
MODEL = """
from tests.behaviour.reference import batches, tiny_gpt2 as make_model

def make_dataset():
    return [{"input_ids": sample, "labels": sample} for batch in batches(8) for sample in batch]

"""


def written(path: Path, code: str) -> Path:
    (path / "train.py").write_text(MODEL + code)
    return path / "train.py"


def test_the_training_script_runs_on_two_ranks(tmp_path) -> None:
    (tmp_path / "swap").mkdir()
    ended = ranks(2, written(tmp_path, EXAMPLES[0]), where=tmp_path)
    assert "trained on 2 ranks with 1 threads each" in output(ended)
    assert (tmp_path / "checkpoints/latest").read_text() == "global_step2"
    assert not list((tmp_path / "swap").iterdir())


def test_experts_are_named_before_the_engine_is_made() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    names: dict[str, Any] = {"model": Mixture(), "config": config}
    exec(EXAMPLES[1], names)
    with names["engine"] as engine:
        assert get_z3_leaf_modules(engine.module) == [engine.module.moe]


MLP = """
import torch
from torch import nn

config = {
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}

def make_mlp():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("up", nn.Linear(32, 64))
    model.add_module("activation", nn.GELU())
    model.add_module("down", nn.Linear(64, 32))
    return model

def make_stage(index):
    return make_mlp()

"""


def test_the_tensor_parallel_script_runs_on_four_ranks(tmp_path) -> None:
    output(ranks(4, written(tmp_path, MLP + EXAMPLES[2]), where=tmp_path))
    for part in range(2):
        assert (tmp_path / f"checkpoints/part-{part}-of-2/latest").read_text() == "global_step3"


@needs_scale_grads
def test_the_pipeline_script_runs_on_two_ranks(tmp_path) -> None:
    output(ranks(2, written(tmp_path, MLP + EXAMPLES[3]), where=tmp_path))
    for stage in range(2):
        assert (tmp_path / f"checkpoints/stage-{stage}/latest").read_text() == "global_step3"


def test_an_automatic_budget_is_a_share_of_the_machine(monkeypatch) -> None:
    plenty = replace(NEEDS, params_bytes=1 << 60)
    alone = host_capacity(load_config({}), plenty)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_capacity(load_config({}), plenty) == pytest.approx(alone / 8, rel=0.2)  # others use the memory, too
