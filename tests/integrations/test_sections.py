"""DeepSpeed's classes of configuration sections, schedules and names, as scripts build, read and ask for them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import logs
from infinity.integrations.deepspeed import tuning_arguments as tuning
from infinity.integrations.deepspeed.accelerator import Accelerator
from infinity.integrations.deepspeed.builders import (
    AsyncIOBuilder,
    CPUAdamBuilder,
    FusedLambBuilder,
    __compatible_ops__,
)
from infinity.integrations.deepspeed.config_model import DeepSpeedConfigModel
from infinity.integrations.deepspeed.engine import DeepSpeedEngine, initialize
from infinity.integrations.deepspeed.experts import (
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)
from infinity.integrations.deepspeed.precision_config import DeepSpeedFP16Config, get_bfloat16_config
from infinity.integrations.deepspeed.refused import refused_class
from infinity.integrations.deepspeed.zero_config import (
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    OffloadDeviceEnum,
    get_zero_config,
)
from infinity.optim import lr_schedules as schedules
from tests.api.small_models import CONFIG


def optimizer(**more: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    return torch.optim.Adam(groups, **more)


# Sections #


class Section(DeepSpeedConfigModel):
    count: int = 0
    old: str | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}
    )
    new: list[str] | None = None
    long: int = Field(0, alias="stage3_long")


def test_a_section_takes_old_names_and_aliases_and_refuses_what_it_has_not() -> None:
    assert Section(old="a").new == ["a"]
    assert Section(long=1).long == Section(stage3_long=1).long == 1
    assert Section(count="auto").count == 0
    for wrong in ({"count": "many"}, {"new": "a"}, {"cuont": 0}):
        with pytest.raises(ValidationError):
            Section(**wrong)
    with pytest.raises(AssertionError, match="old is deprecated, and new is given, too"):
        Section(old="a", new=["b"])


def test_the_zero_section_has_deepspeeds_fields_and_defaults() -> None:
    config = DeepSpeedZeroConfig()
    assert (config.stage, config.offload_param, config.overlap_comm) == (0, None, False)
    assert DeepSpeedZeroConfig(stage=3).overlap_comm is True
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    assert DeepSpeedZeroConfig(stage3_prefetch_bucket_size=5).prefetch_bucket_size == 5
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    offloaded = DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer
    assert isinstance(offloaded, DeepSpeedZeroOffloadOptimizerConfig)
    assert offloaded.device == OffloadDeviceEnum.cpu == "cpu"
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    assert get_zero_config({"zero_optimization": {"stage": 2}}).stage == 2
    for wrong in ({"reduce_bucket_size": 0}, {"compute_grad_norm": False}, {"offload_optimizer": {"ratio": 0.5}}):
        with pytest.raises(ValueError):
            DeepSpeedZeroConfig(**wrong)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), True, [], "a"])
def test_a_loss_scale_is_a_finite_number(value) -> None:
    with pytest.raises(ValidationError, match=r"must be (a|a finite) number|must be 0"):
        DeepSpeedFP16Config(loss_scale=value)


def test_the_precision_sections() -> None:
    assert DeepSpeedFP16Config(loss_scale="3").loss_scale == 3
    assert DeepSpeedFP16Config(initial_scale_power=8).dynamic_loss_scale_args()["init_scale"] == 256
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    with pytest.raises(ValidationError, match="loss_scale_window is 0"):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)


# Schedules #


def test_a_schedule_goes_to_where_it_is_after_a_batch() -> None:
    subject = optimizer()
    schedule = schedules.WarmupCosineLR(subject, total_num_steps=100, warmup_num_steps=10)
    assert (schedule.last_batch_iteration, schedule.get_lr_ratio(), schedule.get_last_lr()) == (-1, 0.0, [0.0, 0.0])
    subject.step()
    schedule.step(1)
    ratio = torch.log(torch.tensor(2.0)).item() / torch.log(torch.tensor(10.0)).item()
    assert schedule.get_lr_ratio() == pytest.approx(ratio)
    assert [group["lr"] for group in subject.param_groups] == pytest.approx([0.1 * ratio, 0.2 * ratio])
    assert schedule.last_batch_iteration == 1


def test_a_warmup_without_a_highest_rate_rises_to_each_groups() -> None:
    schedule = schedules.WarmupLR(optimizer(), warmup_num_steps=10)
    assert schedule.max_lrs == [0.1, 0.2]
    for steps in (None, -5):
        with pytest.raises(ValueError, match="warmup_num_steps is"):
            schedules.WarmupLR(optimizer(), warmup_num_steps=steps)


def test_a_cycle_has_momenta_of_each_group() -> None:
    subject = optimizer(betas=(0.9, 0.99))
    bounds = {"cycle_min_mom": [0.8, 0.85], "cycle_max_mom": [0.9, 0.95]}
    rates = {"cycle_min_lr": [0.001, 0.002], "cycle_max_lr": [0.01, 0.02], "cycle_first_step_size": 5}
    schedule = schedules.OneCycle(subject, **rates, **bounds)
    assert schedule.get_mom() == [(0.9, 0.99), (0.95, 0.99)]
    subject.step()
    schedule.step(4)
    assert [group["lr"] for group in subject.param_groups] == pytest.approx([0.01, 0.02])
    assert [group["betas"][0] for group in subject.param_groups] == pytest.approx([0.8, 0.85])
    assert (schedule.step_ratio, schedule.second_step_size) == (0.5, 5)
    with pytest.raises(ValueError, match="has 3 learning rates but the optimizer 2 groups"):
        schedules.OneCycle(optimizer(), **rates, cycle_min_mom=[0.1, 0.2, 0.3])
    still = schedules.OneCycle(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 0.1, 1.0)
    assert still.get_mom() is None


@pytest.mark.parametrize("name", schedules.VALID_LR_SCHEDULES)
def test_a_parser_gives_a_section_that_makes_its_schedule(name) -> None:
    parser = tuning.add_tuning_arguments(argparse.ArgumentParser())
    section, problem = tuning.get_config_from_args(parser.parse_args(["--lr_schedule", name, "--cycle_momentum"]))
    assert problem is None
    assert section is not None
    more = {"total_num_steps": 2000} if name in ("WarmupDecayLR", "WarmupCosineLR") else {}
    schedule = getattr(schedules, name)(optimizer(), **section["params"], **more)
    assert getattr(schedule, "cycle_momentum", True)
    rate, why = tuning.get_lr_from_config(section)
    assert (rate is None) == (name == "WarmupCosineLR") == bool(why)


def test_a_parser_without_a_schedule_gives_none() -> None:
    args = tuning.add_tuning_arguments(argparse.ArgumentParser()).parse_args([])
    assert tuning.get_config_from_args(args) == (None, "--lr_schedule not specified on command line")
    params: dict[str, Any] = {}
    tuning.override_1cycle_params(args, params)
    assert params["cycle_momentum"] is False
    assert "cycle_second_step_size" not in params


# Names #


def test_what_is_not_there_can_be_asked_for_and_not_made() -> None:
    lamb = refused_class("FusedLambBuilder", NAME="fused_lamb")
    assert not isinstance(object(), lamb)
    with pytest.raises(ConfigError, match=r"deepspeed\.FusedLambBuilder is not supported by infinity: choose Adam"):
        lamb()
    assert __compatible_ops__[AsyncIOBuilder.NAME]
    assert not __compatible_ops__[FusedLambBuilder.NAME]


def test_an_op_that_is_there_can_be_built_beforehand() -> None:
    builder = CPUAdamBuilder()
    assert builder.is_compatible()
    op = builder.load()
    assert not hasattr(op, "__wrapped__")
    with pytest.raises(ConfigError, match=r"CPUAdamBuilder\(\)\.load\(\)\.create_adam is not supported: use"):
        op.create_adam(0)


def test_groups_without_experts_are_left_as_they_are() -> None:
    model = nn.Linear(2, 2)
    group = {"params": model.parameters(), "lr": 1.0}
    (taken,) = split_params_into_different_moe_groups_for_optimizer(group)
    assert taken == {"params": list(model.parameters()), "lr": 1.0}
    assert has_moe_layers(model) == (False, 0)
    model.weight.allreduce = False
    assert is_moe_param(model.weight)
    with pytest.raises(ConfigError, match="marked as an expert's"):
        split_params_into_different_moe_groups_for_optimizer([{"params": [model.weight]}])


def test_versions_of_torch_and_memory_in_words(caplog) -> None:
    assert logs.required_torch_version(min_version=1.8)
    assert logs.required_torch_version(min_version=2)
    assert not logs.required_torch_version(max_version=1.13)
    assert not logs.required_torch_version(min_version=99.1)
    with pytest.raises(ConfigError, match="give min_version"):
        logs.required_torch_version()
    with caplog.at_level("INFO", logger="deepspeed"):
        logs.see_memory_usage("quiet")
        logs.see_memory_usage("after", force=True)
    (record,) = caplog.records
    assert "after: " in record.message
    assert "GiB in host memory" in record.message


def test_levels_of_the_log_by_name(caplog) -> None:
    with caplog.at_level("INFO", logger="deepspeed"):
        logs.set_log_level_from_string("Error")
        logs.logger.warning("quiet")
        assert not caplog.records
        with pytest.raises(ValueError, match="'loud' is no log level: choose one of debug, info, warning"):
            logs.set_log_level_from_string("loud")


def test_an_engine_tells_what_its_sections_say() -> None:
    model = nn.Linear(2, 2)
    section = {"stage": 1, "sub_group_size": 1e6, "stage3_max_live_parameters": 7, "cpu_offload": True}
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD"}, "zero_optimization": section}
    engine, *_ = infinity.initialize(model=model, config=config, engine_class=DeepSpeedEngine)
    with engine:
        assert (engine.zero_sub_group_size(), engine.zero_max_live_parameters()) == (10**6, 7)
        assert engine.zero_reduce_bucket_size() == 5 * 10**8
        assert (engine.zero_nvme_offload_optimizer(), engine.postscale_gradients()) == (False, True)
        assert not engine.flops_profiler_enabled()
        assert engine.dynamic_loss_scale_args()["scale_window"] == 1000
        assert (engine.dataloader_drop_last(), engine.dump_state()) == (False, False)
        loader = engine.deepspeed_io(torch.arange(6.0), data_sampler=range(4))
        assert [batch.tolist() for batch in loader] == [[0.0, 1.0, 2.0], [3.0]]
        assert (engine.get_data_parallel_rank(), engine.get_model_parallel_rank()) == (0, 0)
        engine.set_train_batch_size(engine.train_batch_size())
        with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu is 3 and cannot become 4"):
            engine.set_train_micro_batch_size(4)


def test_the_accelerator_of_a_processor() -> None:
    accelerator = Accelerator()
    if accelerator.device_name() != "cpu":
        pytest.skip("torch sees another device")
    state = accelerator.get_rng_state()
    accelerator.manual_seed(3)
    drawn = torch.rand(2)
    accelerator.manual_seed(3)
    assert torch.equal(torch.rand(2), drawn)
    accelerator.set_rng_state(state)
    assert accelerator.FloatTensor([1.5]).dtype is torch.float32
    kept = torch.ones(1 << 24)  # 64 MiB, touched
    assert accelerator.memory_allocated() > kept.nbytes
    assert accelerator.max_memory_allocated() >= accelerator.memory_reserved()
    assert accelerator.total_memory() > accelerator.available_memory() > 0
    env: dict[str, str] = {}
    accelerator.set_visible_devices_envs(env, [0, 1])
    assert env == {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(AttributeError, match="has no 'nothing_such' here"):
        _ = accelerator.nothing_such


def test_as_many_processes_compute_as_the_launcher_has_started(monkeypatch) -> None:
    accelerator = Accelerator()
    if accelerator.device_name() != "cpu":
        pytest.skip("torch sees another device")
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert accelerator.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert accelerator.device_count() == 3


@pytest.mark.usefixtures("ends_process_group")
def test_a_bucket_that_deepspeed_cannot_align_is_refused_as_there() -> None:
    section = {"stage": 2, "allgather_bucket_size": 1001}
    with pytest.raises(AssertionError, match=r"is 1001: .* multiple of nccl_start_alignment_factor, 2"):
        initialize(model=nn.Linear(4, 4), config=CONFIG | {"zero_optimization": section})
    with initialize(model=nn.Linear(4, 4), config=CONFIG | {"zero_optimization": section | {"stage": 3}})[0]:
        pass  # which has no such buffers there


@pytest.mark.usefixtures("ends_process_group")
def test_how_far_deepspeed_reads_ahead_is_read_and_changes_nothing() -> None:
    section = DeepSpeedZeroConfig(stage3_adaptive_prefetch_bucket_size=True, stage3_adaptive_prefetch_min_size=5)
    assert (section.adaptive_prefetch_bucket_size, section.adaptive_prefetch_min_size) == (True, 5)
    assert section.adaptive_prefetch_max_size == 5 * 10**8
    asked = {"stage": 3, "stage3_adaptive_prefetch_bucket_size": True}
    with initialize(model=nn.Linear(4, 4), config=CONFIG | {"zero_optimization": asked})[0] as engine:
        assert engine._config.zero_config.adaptive_prefetch_bucket_size
