"""The `deepspeed` namespace: unchanged scripts of transformers and accelerate train on infinity to the same numbers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.cli.main import main
from infinity.integrations import as_deepspeed
from tests.api.small_models import Heads
from tests.integrations.processes import ranks, result, run, script

HERE = Path(__file__).parent
BUDGET = "272KiB"  # of the states' 420


def config_files(path: Path) -> list[Path]:
    """ZeRO-2 with its optimizer on the CPU, and ZeRO-3 on a drive that leaves the optimizer to the script."""
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    )
    optimizer = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    nvme = {"device": "nvme", "nvme_path": str(path / "drive")}
    sections: list[dict[str, Any]] = [
        {
            "optimizer": optimizer,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": nvme,
                "offload_param": nvme,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": 0,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "tiering": {"host_memory": BUDGET, "tile_size": "8KiB"},
        },
    ]
    files = [path / "zero2.json", path / "zero3.json"]
    for file, section in zip(files, sections, strict=True):
        file.write_text(json.dumps(auto | {"bf16": {"enabled": "auto"}} | section))
    return files


# What is imported #

IMPORTS = """
import importlib.metadata, json
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.fused_adam import multi_tensor_applier
from deepspeed.ops.op_builder import CPULionBuilder, QuantizerBuilder
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.compiler import is_compile_supported
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.torch_autocast import get_comm_dtype, has_comm_dtype
from deepspeed.runtime.utils import CheckOverflow, clip_grad_norm_, see_memory_usage
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.mics import MiCS_Init
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils.nvtx import instrument_w_nvtx
from deepspeed.utils.timer import SynchronizedWallClockTimer
from deepspeed.utils.z3_leaf_module import z3_leaf_module
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.utils import groups, logger, safe_get_full_fp32_param, set_z3_leaf_modules
import infinity
from infinity.ops.adam import DeepSpeedCPUAdam as Same
import torch
from torch import nn

assert deepspeed.__infinity__ == infinity.__version__
assert importlib.metadata.version("deepspeed") == deepspeed.__version__
assert Same is DeepSpeedCPUAdam and infinity.utils.safe_get_full_fp32_param is safe_get_full_fp32_param
refused = {}
for name in ("init_inference", "PipelineModule", "unknown"):
    try:
        getattr(deepspeed, name)()
    except Exception as error:
        refused[name] = str(error)
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule

class Pipe(PipelineModule):  # scripts have classes of their own beside those that they use
    def __init__(self):
        super().__init__(layers=[])

others = DynamicLossScaler, DeepSpeedDataLoader, DeepSpeedZeRoOffload, zero3_linear_wrap, QuantizerBuilder
for made in (MoE, Pipe, *others):
    try:
        made()
    except infinity.ConfigError as error:
        refused[made.__name__] = str(error)

model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
assert not isinstance(model, PipelineModule)
assert not deepspeed.ops.__compatible_ops__[QuantizerBuilder.NAME] and is_compile_supported()
assert (has_comm_dtype(model[0].weight), get_comm_dtype(model[0].weight)) == (False, torch.float32)
assert multi_tensor_applier(lambda size, flag, lists, by: [by * len(lists), flag], None, [[], []], 3) == [6, None]
assert not is_zero_param(model[0].weight)
config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
assert set_z3_leaf_modules(model, [nn.Sequential]) == [model]
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
assert isinstance(engine, DeepSpeedEngine) and isinstance(engine, nn.Module) and engine.module is model
assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
assert deepspeed.comm.get_world_size() == torch.distributed.get_world_size() == 1
param = model[0].weight
assert [p is q for p, q in zip(engine.parameters(), model.parameters())] == [True] * 4
assert (tuple(param.ds_shape), param.ds_numel) == ((64, 64), 4096)
assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
with deepspeed.zero.GatheredParameters(engine.parameters(), fwd_module=model):
    assert param.ds_status == ZeroParamStatus.AVAILABLE
    values = param.detach().clone()
assert torch.equal(safe_get_full_fp32_param(param), values)
calls = []
engine.register_forward_hook(lambda *_: calls.append(1))
engine.backward(engine(torch.ones(2, 64)).square().mean())
engine.step()
assert calls == [1] and not torch.equal(safe_get_full_fp32_param(param), values)
state = engine._zero3_consolidated_16bit_state_dict()
assert list(state) == [name for name, _ in model.named_parameters()]
engine.destroy()
del config["optimizer"]
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
assert optimizer is None
with torch.no_grad():
    assert torch.equal(engine(torch.ones(2, 64)), nn.functional.linear(
        nn.functional.linear(torch.ones(2, 64), state["0.weight"], state["0.bias"]), state["1.weight"], state["1.bias"]
    ))
print("RESULT", json.dumps(refused))
"""


def test_what_deepspeed_scripts_import_is_there_or_refused_by_name(tmp_path) -> None:
    file = tmp_path / "imports.py"
    file.write_text(IMPORTS)
    refused = result(script(file))
    assert refused["init_inference"].startswith("deepspeed.init_inference is not supported by infinity: use the model")
    assert "torch.distributed.pipelining" in refused["PipelineModule"]
    assert refused["unknown"] == "module 'deepspeed', which is infinity's here, has no attribute 'unknown'"
    assert refused["MoE"].startswith("deepspeed.MoE is not supported by infinity: a mixture-of-experts block")
    assert refused["Pipe"] == refused["PipelineModule"]
    for name in (
        "DynamicLossScaler",
        "DeepSpeedDataLoader",
        "DeepSpeedZeRoOffload",
        "zero3_linear_wrap",
        "QuantizerBuilder",
    ):
        assert refused[name].startswith(f"deepspeed.{name} is not supported by infinity: ")


def test_what_scripts_call_on_two_ranks(tmp_path) -> None:
    """The script asserts what holds, and gives what was said of the rest."""
    told = result(ranks(2, HERE / "deepspeed_calls_script.py"))
    assert told["incompatible"].startswith("no_sync context manager is incompatible with this engine: ")
    assert told["step"].startswith("It is illegal to call Engine.step() inside no_sync context manager: leave it")
    assert told["again"].startswith("no_sync context manager reentry is unsupported")
    assert told["nobody"].startswith("dist_init_required is False, but torch.distributed is not initialized")
    assert told["early"].startswith("gradients are not reduced over the ranks before the last micro-batch's backward")
    assert told["tags"].startswith("save_checkpoint: tag is not the same on all ranks ('tag-0', 'tag-1'): they write")
    assert told["no model"] == "deepspeed.initialize requires a model"
    assert told["optimizer"].startswith("optimizer Rprop cannot be tiered")
    assert told["scale"].startswith(
        "engine.scale takes a loss, which is a scalar tensor with a gradient, not one of shape"
    )
    assert "Loss scaling is required" in told["unscaled"]
    assert told["boundary"].startswith("set_gradient_accumulation_boundary says where a step ends")


@pytest.mark.parametrize("more", [[], ["--no-deepspeed"]])
def test_infinity_run_puts_the_namespace_first_on_the_path(more, monkeypatch, tmp_path) -> None:
    (tmp_path / "script.py").touch()
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("PYTHONPATH", "before")
    main(["run", "--ranks", "1", *more, str(tmp_path / "script.py")])
    main(["run", *more, "accelerate", "launch", "script.py"])
    (_, torchrun, environment), (_, accelerate, other), *_ = started
    assert Path(torchrun[1]).name == "torchrun.py"
    assert accelerate[1:] == ["-m", "accelerate.commands.accelerate_cli", "launch", "script.py"]
    path = "before" if more else os.pathsep.join([str(as_deepspeed.FOLDER), "before"])
    assert environment["PYTHONPATH"] == other["PYTHONPATH"] == path


def test_a_deepspeed_that_is_imported_already_is_not_mixed_with(monkeypatch, tmp_path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    __import__("deepspeed")
    with pytest.raises(infinity.ConfigError, match=re.escape(f"deepspeed is imported already, from {tmp_path}")):
        as_deepspeed.install()
    monkeypatch.delitem(sys.modules, "deepspeed")
    monkeypatch.setattr(sys, "path", list(sys.path))
    as_deepspeed.install()
    assert sys.path[0] == str(as_deepspeed.FOLDER)
    assert importlib.metadata.version("deepspeed") == "0.19.8+infinity"


def test_options_that_are_accelerates_are_refused(capsys) -> None:
    assert main(["run", "--ranks", "2", "accelerate", "launch", "script.py"]) == 2
    assert "give `accelerate launch` its own --num_processes" in capsys.readouterr().err


# What trains #


def assert_same_files(ours: Path, plain: Path) -> None:
    found, wanted = load_file(ours), load_file(plain)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5)


def assert_same(found: dict[str, Any], wanted: dict[str, Any], *, norms: bool = True) -> None:
    for key in ("loss", "eval", "losses", *(["norms"] if norms else [])):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
    assert found["text"] == wanted["text"]


def test_an_unchanged_trainer_script_gives_the_same_losses_wherever_its_states_are(tmp_path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    files = config_files(tmp_path)
    results = result(script(HERE / "trainer_script.py", tmp_path, "one", *files))
    for index in (1, 2):
        assert_same(results[f"run{index}"], results["run0"])
        assert results[f"run{index}"]["engine"] == "DeepSpeedEngine"
        assert_same_files(*(tmp_path / f"saved{which}" / "model.safetensors" for which in (index, 0)))
    assert_same_files(*(tmp_path / f"adapter{which}" / "adapter_model.safetensors" for which in (2, 0)))
    assert_same(results["resumed2"], results["run0"] | {"loss": results["resumed2"]["loss"]})
    assert_same(results["lora2"], results["lora0"])
    assert results["evaluated2"] == pytest.approx(results["evaluated0"], rel=1e-6)
    assert results["run1"]["bytes"] == {}  # all in host memory
    moved = results["run2"]["bytes"]
    assert moved["nvme_read"] > 0
    assert moved["nvme_write"] > 0
    assert not list((tmp_path / "drive").rglob("*.swap*"))

    files[1].write_text(files[1].read_text().replace(BUDGET, "400KiB"))  # of each of two
    together = result(ranks(2, HERE / "trainer_script.py", tmp_path, "two", files[1]))
    assert_same(together["run0"], results["run0"], norms=False)


def test_ranks_that_accelerate_does_not_count_are_refused_before_a_model_is_read(tmp_path) -> None:
    pytest.importorskip("accelerate")
    program = tmp_path / "program.py"
    program.write_text(
        "from transformers import TrainingArguments\n"
        "TrainingArguments(output_dir='.', report_to=[], deepspeed={'zero_optimization': {'stage': 3}})\n"
        "raise SystemExit('was not refused')\n"
    )
    refused = ranks(2, program, where=tmp_path)
    assert "2 ranks were started, but accelerate counts one process" in refused.stderr
    assert "Start one rank (--ranks 1), or name the backend in the script" in refused.stderr


def test_a_value_that_accelerate_would_refuse_is_named_when_a_model_is_read(tmp_path) -> None:
    pytest.importorskip("accelerate")
    program = tmp_path / "program.py"
    program.write_text(
        "import deepspeed\n"
        "from transformers import TrainingArguments\n"
        "from transformers.integrations.deepspeed import deepspeed_config\n"
        "config = {'zero_optimization': {'stage': 3}, 'tiering': {'host_memory': 'auto'}}\n"
        "deepspeed.zero.Init(config_dict_or_path=dict(config))  # infinity's own\n"
        "arguments = TrainingArguments(output_dir='.', report_to=[], deepspeed=config)\n"
        "deepspeed.zero.Init(config_dict_or_path=deepspeed_config())  # as from_pretrained does\n"
        "raise SystemExit('was not refused')\n"
    )
    refused = script(program, where=tmp_path)
    assert 'tiering.host_memory is "auto" in the configuration: transformers\' Trainer' in refused.stderr


def test_what_transformers_own_tests_do_with_deepspeed(tmp_path) -> None:
    """The cases are in trainer_combinations.py, and say which of them failed."""
    pytest.importorskip("accelerate")
    assert len(result(script(HERE / "trainer_combinations.py", tmp_path))) == 18


def test_an_accelerate_loop_gives_the_same_losses(tmp_path) -> None:
    pytest.importorskip("accelerate")
    file = tmp_path / "zero3.json"
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
    section = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 1.0,
                "zero_optimization": section,
            }
        )
    )
    plain = result(script(HERE / "accelerate_script.py", tmp_path / "plain", namespace=False))
    options = ["--use_deepspeed", "--deepspeed_config_file", file, "--num_processes", "1"]
    ours = result(run("accelerate", "launch", *options, HERE / "accelerate_script.py", tmp_path / "ours"))
    assert ours.pop("engine") == "DeepSpeedEngine"
    assert plain.pop("engine") == "Heads" == Heads.__name__
    assert ours.keys() == plain.keys()
    for key, values in plain.items():
        assert ours[key] == pytest.approx(values, rel=1e-5), key
