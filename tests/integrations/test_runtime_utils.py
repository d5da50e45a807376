"""What scripts import from `deepspeed.runtime.utils` and `.config`: norms, small helpers, the configuration's facts."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.integrations.deepspeed import helpers, norms
from infinity.integrations.deepspeed.config import DeepSpeedConfig
from infinity.integrations.deepspeed.engine import initialize
from tests.api.small_models import CONFIG, WIDTH, Heads


def with_grads(*grads: list[float]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(len(grad))) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.tensor(grad)
    return params


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
def test_clipping_is_torchs(norm_type) -> None:
    expected, found = (with_grads([3.0, -4.0], [2.0]) for _ in range(2))
    wanted = nn.utils.clip_grad_norm_(expected, 1.0, norm_type)
    torch.testing.assert_close(norms.clip_grad_norm_(found, 1.0, norm_type), wanted)
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here.grad, there.grad)
    with pytest.raises(infinity.ConfigError, match="mpu"):
        norms.clip_grad_norm_(found, 1.0, mpu=object())


@pytest.mark.usefixtures("ends_process_group")
def test_an_engines_gradients_are_not_clipped_from_outside() -> None:
    with initialize(model=Heads(), config=CONFIG)[0] as engine:
        engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
        with pytest.raises(infinity.InfinityError, match="gradient_clipping"):
            norms.clip_grad_norm_(engine.parameters(), 1.0)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_an_invalid_norm_stays_invalid(bad) -> None:
    assert norms.get_global_norm([3.0, bad]) == math.inf
    assert norms.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(bad)]) == math.inf
    assert norms.CheckOverflow().check_using_norm([bad], reduce_overflow=False)


def test_norms_of_tensors() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert norms.get_global_norm([3, 4]) == 5
    assert norms.combine_grad_norm_groups(tensors) == 5
    assert norms.get_global_norm_of_tensors(tensors) == norms.get_weight_norm(tensors) == 5
    assert norms.get_weight_norm(torch.tensor([math.inf])) == -1
    assert norms.clip_tensors_by_global_norm(tensors, max_norm=1.0) == 5
    torch.testing.assert_close(torch.cat(tensors), torch.tensor([0.6, 0.8]))
    assert norms.has_inf_or_nan(torch.tensor([1.0, math.nan]))
    assert not norms.has_inf_or_nan(torch.tensor([]))
    assert norms.CheckOverflow([with_grads([1.0], [math.inf])]).check()
    assert not norms.CheckOverflow([with_grads([1.0])]).check()
    masked = torch.tensor([math.nan, 2.0])
    norms.mask_nan_or_inf_with_val_inplace(masked, val=1.5)
    assert masked.tolist() == [1.5, 2.0]


def test_small_helpers(tmp_path) -> None:
    assert helpers.call_to_str("hello", 1138, val=3) == "hello(1138, val=3)"
    assert helpers.partition_uniform(7, 3) == [0, 3, 5, 7]
    assert helpers.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert helpers.get_only_unique_item([4, 4]) == 4
    with pytest.raises(infinity.ConfigError, match="2 different"):
        helpers.get_only_unique_item([4, 5])
    pair = namedtuple("pair", "first second")
    nested = {"a": [torch.zeros(2), pair(torch.zeros(1), "b")]}
    assert helpers.get_tensor_bytes(nested) == 12
    moved = helpers.move_to_device(nested, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1][1] == "b"
    assert not helpers.copy_to_device(nested, "meta", lambda tensor: len(tensor) == 1)["a"][0].is_meta
    helpers.ensure_directory_exists(str(tmp_path / "new" / "file"))
    assert (tmp_path / "new").is_dir()
    helpers.set_random_seed(3)
    drawn = torch.rand(2)
    helpers.set_random_seed(3)
    assert torch.equal(torch.rand(2), drawn)


def test_parameters_that_a_backward_pass_reaches_are_counted() -> None:
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    counted: list[int] = []

    def count(grad: torch.Tensor) -> None:
        counted.append(helpers.count_used_parameters_in_backward([used, unused]))

    used.register_hook(count)
    (used * 2 + unused.detach()).sum().backward()
    assert counted == [1]
    with pytest.raises(infinity.InfinityError, match="backward pass"):
        helpers.count_used_parameters_in_backward([used])


def test_a_configuration_has_deepspeeds_sections() -> None:
    source: dict[str, Any] = CONFIG | {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7, "offload_optimizer": {"device": "cpu"}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 3,
    }
    config = DeepSpeedConfig(source)
    assert (config.zero_config.stage, config.zero_config.prefetch_bucket_size) == (3, 7)
    assert config.zero_config.offload_optimizer.device == "cpu"
    assert (config.bfloat16_config.enabled, config.float16_config.enabled) == (True, False)
    assert (config.grad_accum_dtype, config.param_dtype, config.steps_per_print) == ("fp32", None, 3)
    assert config.eigenvalue_enabled is False


@pytest.mark.usefixtures("ends_process_group")
def test_an_engine_has_its_own() -> None:
    with initialize(model=Heads(), config=CONFIG)[0] as engine:
        assert engine._config.gradient_clipping == engine.gradient_clipping() == 0.5
        assert engine._config.zero_config.stage == 3


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((32, 16, 2), (32, 16, 2)),
        ((32, 16, None), (32, 16, 2)),
        ((None, 4, None), (4, 4, 1)),
        ((None, 4, 2), (8, 4, 2)),
        ((32, 18, None), None),
        ((None, None, 2), None),
    ],
)
def test_batch_sizes_follow_from_one_another(given, found) -> None:
    config = DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": "SUM"})
    assert config.gradient_allreduce_op == "sum"
    config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = given
    if found is None:
        with pytest.raises(AssertionError):
            config._configure_train_batch_size()
        return
    config._configure_train_batch_size()
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    assert tuple(getattr(config, name) for name in names) == found
