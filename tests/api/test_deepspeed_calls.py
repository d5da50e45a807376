"""What a DeepSpeed script calls means here what it means there: arguments, accumulation, accessors, optimizers."""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity as deepspeed
from infinity.integrations.deepspeed import named_optimizers as named
from infinity.optim import lr_schedules as schedules
from tests.api.small_models import CONFIG, WIDTH, Heads, train, weights
from tests.behaviour.ranks import run_ranks

LR = 1e-2


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Heads()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def fp32(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def plain(steps: list[list[torch.Tensor]], *, mean: bool = True, clipping: float = 1.0) -> nn.Module:
    """torch alone: each list is the micro-batches of a step."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for micro_batches in steps:
        for x in micro_batches:
            (model(x).square().mean() / (len(micro_batches) if mean else 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same(engine: Any, model: nn.Module) -> None:
    for name, value in engine.named_parameters():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


# initialize #


def test_the_arguments_of_a_deepspeed_script(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(fp32(train_micro_batch_size_per_gpu=2)))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    model = model_of()
    data = [torch.full((WIDTH,), float(value)) for value in range(6)]
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args,
        model,
        None,
        [p for p in model.parameters() if p.requires_grad],
        data,
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        collate_fn=lambda samples: torch.stack(samples) + 100,
    )
    with engine:
        assert args.deepspeed
        assert engine.train_micro_batch_size_per_gpu() == 2
        seen = list(loader)
        assert [tuple(batch.shape) for batch in seen] == [(2, WIDTH)] * 3
        assert sorted(float(row[0]) for batch in seen for row in batch) == [100.0 + value for value in range(6)]
        train(engine)
        assert engine.get_lr() == [LR * 0.5]
        assert scheduler is engine.lr_scheduler
        assert optimizer is engine.optimizer


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.full((WIDTH,), float(value)) for value in range(5)])


@pytest.mark.parametrize("drops", [False, True])
def test_a_last_micro_batch_that_is_not_full_is_left_out_if_it_must_be(drops) -> None:
    config = fp32(dataloader_drop_last=drops, train_micro_batch_size_per_gpu=4)
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        config.pop(key, None)
    engine, _, loader, _ = deepspeed.initialize(model=model_of(), config=config, training_data=list(range(10)))
    with engine:
        assert [len(batch) for batch in loader] == ([4, 4] if drops else [4, 4, 2])


def test_iterable_data_come_in_their_order() -> None:
    engine, _, loader, _ = deepspeed.initialize(model=model_of(), config=fp32(), training_data=Stream())
    with engine:
        assert [float(value) for batch in loader for value in batch[:, 0]] == [0, 1, 2, 3, 4]


def test_a_configuration_is_given_once_and_parallel_units_are_refused() -> None:
    args = argparse.Namespace(deepspeed_config="ds.json")
    with pytest.raises(deepspeed.ConfigError, match=re.escape("given twice, as config and args.deepspeed_config")):
        deepspeed.initialize(args=args, model=model_of(), config=fp32())
    with pytest.raises(deepspeed.ConfigError, match="`mpu` is not supported"):
        deepspeed.initialize(model=model_of(), config=fp32(), mpu=object())
    deepspeed.initialize(model=model_of(), config_params=fp32())[0].close()


def test_a_process_alone_can_have_a_process_group() -> None:
    assert not dist.is_initialized()
    engine, *_ = deepspeed.initialize(model=model_of(), config=fp32(), dist_init_required=True)
    try:
        with engine:
            assert (dist.get_rank(), dist.get_world_size()) == (engine.global_rank, engine.world_size) == (0, 1)
            deepspeed.init_distributed()  # does nothing
            train(engine)
    finally:
        dist.destroy_process_group()
    with pytest.raises(deepspeed.ConfigError, match="dist_backend is 'mpi'"):
        deepspeed.init_distributed("mpi")


# Accumulation #


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_boundaries_that_the_script_sets_are_those_of_the_steps(stage) -> None:
    data = batches(6)
    steps = [data[:2], data[2:5], data[5:]]  # of uneven length, as at the end of an epoch
    engine, *_ = deepspeed.initialize(model=model_of(), config=fp32(stage, gradient_accumulation_steps=2))
    with engine:
        for micro_batches in steps:
            for index, x in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                engine.set_gradient_accumulation_boundary(is_boundary=last)
                assert engine.is_gradient_accumulation_boundary() is last
                engine.backward(engine(x).square().mean() / len(micro_batches), scale_wrt_gas=False)
            engine.step()
        assert (engine.global_steps, engine.global_samples) == (3, 24)
        assert_same(engine, plain(steps))


def test_a_loss_that_is_scaled_by_the_script_is_not_scaled_again() -> None:
    data = batches(4)
    engine, *_ = deepspeed.initialize(model=model_of(), config=fp32(gradient_accumulation_steps=2))
    with engine:
        for x in data:
            engine.scale(engine(x).square().mean(), scale_wrt_gas=False).backward()
            engine.step()
        assert_same(engine, plain([data[:2], data[2:]], mean=False))


def test_a_boundary_needs_room_for_what_is_added_up() -> None:
    engine, *_ = deepspeed.initialize(model=model_of(), config=fp32(gradient_clipping=0))
    with engine, pytest.raises(deepspeed.InfinityError, match="nothing is reserved: set gradient_accumulation_steps"):
        engine.set_gradient_accumulation_boundary(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_are_not_managed_end_where_the_script_says(dtype, tmp_path) -> None:
    """Any number of micro-batches a step, which the configuration does not know; summed as those that it knows."""
    data = [x.to(dtype) for x in batches(6)]
    steps = [data[:1], data[1:4], data[4:]]
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    config = fp32(zero_optimization=zero, bf16={"enabled": dtype is torch.bfloat16})
    found = []
    for more in ({"managed_gradient_accumulation": False}, {"gradient_accumulation_steps": 3}):
        engine, *_ = deepspeed.initialize(model=model_of(), config=config | more)
        with engine:
            for count, step in enumerate(steps, start=1):
                for index, x in enumerate(step, start=1):
                    if "gradient_accumulation_steps" in more:
                        engine.set_gradient_accumulation_boundary(index == len(step))
                    engine.backward(engine(x).square().mean(), scale_wrt_gas=False)
                    assert engine.global_steps == count - 1
                engine.step()
                assert engine.global_steps == count
            found.append(dict(engine.named_parameters()))
            if dtype is torch.float32:
                assert_same(engine, plain(steps, mean=False))
            elif "gradient_accumulation_steps" not in more:
                with pytest.raises(deepspeed.InfinityError, match="managed_gradient_accumulation is false: call back"):
                    engine.train_batch(data[:1])
                with pytest.raises(deepspeed.InfinityError, match=r"every step\(\) ends one: leave the call out"):
                    engine.set_gradient_accumulation_boundary(False)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_backward_passes_count_where_every_step_ends_one(caplog, tmp_path) -> None:
    """Also those whose gradients were dropped; not those of a step that begins again."""
    config = fp32(managed_gradient_accumulation=False, gradient_accumulation_steps=4, train_micro_batch_size_per_gpu=8)
    engine, *_ = deepspeed.initialize(model=model_of(), config=config)
    x = batches(1)[0]
    with engine:
        for passes in (2, 5):
            for _ in range(passes):
                engine.backward(engine(x).square().mean())
            engine.step()
        assert (engine.micro_steps, engine.global_samples, engine.was_step_applied()) == (7, 56, True)
        engine.backward(engine(x).square().mean())
        engine.zero_grad()
        assert engine.micro_steps == 8
        engine.backward(engine(x).square().mean())
        out = engine(x)
        out.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(out.square().mean())
        assert "the gradients of the step's earlier micro-batches (1) are dropped" in caplog.text
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path)
        assert (engine.micro_steps, engine.global_samples) == (9, 72)
    engine, *_ = deepspeed.initialize(model=model_of(), config=config)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert (engine.micro_steps, engine.global_samples) == (9, 72)


def _coalesced(stage: int) -> dict[str, torch.Tensor]:
    data, rank = batches(6), dist.get_rank() if dist.is_initialized() else None
    size = 1 if rank is None else 2
    engine, *_ = deepspeed.initialize(model=model_of(), config=fp32(stage))
    with engine:
        for step in (data[:3], data[3:]):
            with engine.coalesce_grad_reduction():
                for x in step:
                    mine = x if rank is None else x[rank::size]
                    engine.backward(engine(mine).square().mean())
            engine.step()
        assert engine.global_steps == 2
        return dict(engine.named_parameters())


def test_backward_passes_inside_one_context_make_one_step() -> None:
    expected = plain([batches(6)[:3], batches(6)[3:]], mean=False)
    for name, value in _coalesced(1).items():
        torch.testing.assert_close(value, expected.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    engine, *_ = deepspeed.initialize(model=model_of(), config=fp32(gradient_clipping=0))
    with engine, pytest.raises(deepspeed.InfinityError, match="nothing is reserved"), engine.coalesce_grad_reduction():
        pass


@pytest.mark.parametrize("stage", [1, 3])
def test_they_do_on_several_ranks(stage, tmp_path) -> None:
    expected = plain([batches(6)[:3], batches(6)[3:]], mean=False)
    for found in run_ranks(2, _coalesced, stage, path=tmp_path):
        for name, value in found.items():
            # The halves of a batch are summed in another order, which Adam makes more of where a gradient is almost 0.
            torch.testing.assert_close(value, expected.get_parameter(name).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("key", "value"), [("update_schedule", "backward"), ("accumulation", "layer")])
def test_what_must_know_a_steps_end_needs_managed_ones(key, value) -> None:
    config = fp32(managed_gradient_accumulation=False, tiering={key: value}, gradient_accumulation_steps=2)
    with pytest.raises(deepspeed.ConfigError, match=rf"step\(\) alone says .* tiering\.{key} is {value}"):
        deepspeed.initialize(model=model_of(), config=config)


# Precision #


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", ["cpu", "nvme"])
def test_autocast_is_torchs(placement, dtype, tmp_path) -> None:
    offload = {"device": placement, "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    autocast = {"enabled": True, "dtype": str(dtype), "lower_precision_safe_modules": ["torch.nn.Linear"]}
    model, data = model_of(), batches(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", 2.0**16, enabled=dtype is torch.float16)
    losses = []
    for x in data:
        with torch.autocast("cpu", dtype):
            out = model(x)
        loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    config = fp32(zero_optimization=zero, torch_autocast=autocast)
    engine, *_ = deepspeed.initialize(model=model_of(), config=config)
    with engine:
        assert engine.torch_autocast_enabled()
        assert engine.torch_autocast_dtype() is dtype
        assert engine.dynamic_loss_scale() is (dtype is torch.float16)
        for x, expected in zip(data, losses, strict=True):
            out = engine(x)
            assert out.dtype is dtype
            loss = out.float().square().mean()
            assert loss.item() == pytest.approx(expected, rel=1e-6)
            engine.backward(loss)
            engine.step()
        assert_same(engine, model)


def test_a_step_that_overflows_under_autocast_in_fp16_is_left_out() -> None:
    autocast = {"enabled": True, "dtype": "float16"}
    engine, *_ = deepspeed.initialize(model=model_of(), config=fp32(gradient_clipping=0, torch_autocast=autocast))
    with engine:
        before = dict(engine.named_parameters())
        engine.backward(engine(batches(1)[0]).float().mean() * 1e30)
        engine.step()
        assert engine.skipped_steps == 1
        assert all(torch.equal(value, before[name]) for name, value in engine.named_parameters())
        with pytest.raises(deepspeed.InfinityError, match="Loss scaling is required"):
            engine(batches(1)[0]).float().mean().backward()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "float32"}}, "dtype is float32; choose bfloat16 or float16"),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "torch_autocast and bf16 are enabled"),
        ({"torch_autocast": {"enabled": True}, "tiering": {"accumulation": "layer"}}, "torch_autocast with tiering"),
    ],
)
def test_autocast_that_cannot_be_is_refused(more, words) -> None:
    with pytest.raises(deepspeed.ConfigError, match=words):
        deepspeed.initialize(model=model_of(), config=fp32(**more))


# Accessors #


def test_accessors() -> None:
    config = fp32(3, gradient_accumulation_steps=3, steps_per_print=float("inf"), bf16={"enabled": True})
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model_of(), config=config)
    with engine:
        assert engine.train_batch_size() == 12
        assert engine.get_batch_info() == (12, 4, 3)
        assert engine.gradient_accumulation_steps() == 3
        assert engine.gradient_clipping() == 1.0
        assert (engine.local_rank, engine.global_rank, engine.world_size) == (0, 0, 1)
        assert engine.zero_optimization()
        assert engine.zero_optimization_stage() == 3
        assert engine.zero_optimization_partition_weights()
        assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, True)
        assert engine.get_data_types() == (torch.bfloat16, torch.float32)
        assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", "WarmupLR")
        assert engine.config.get("zero_optimization", {}).get("stage") == engine.config["zero_optimization"]["stage"]
        assert engine.steps_per_print() == float("inf")
        assert engine.zero_gather_16bit_weights_on_model_save()
        assert engine.get_mom() == [(0.9, 0.999)]
        assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow) == (1.0, 1.0, False)
        assert not engine.was_step_applied()
        for x in batches(3):
            engine.backward(engine(x.bfloat16()).square().mean())
            engine.step()
        assert engine.was_step_applied()
        engine.offload_states()
        engine.reload_states()
        assert not engine.is_compiled


def test_the_optimizer_tells_of_an_overflow() -> None:
    config = fp32(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine, optimizer, _, _ = deepspeed.initialize(model=model_of(), config=config)
    with engine:
        assert (optimizer.cur_scale, optimizer.dynamic_loss_scale) == (16.0, True)
        x = batches(1)[0].half()
        engine.backward(engine(x).square().mean() * float("inf"))
        engine.step()
        assert optimizer.overflow
        assert not engine.was_step_applied()
        assert optimizer.loss_scale == 8.0
        engine.backward(engine(x).square().mean())
        engine.step()
        assert not optimizer.overflow


# Optimizers and schedules under DeepSpeed's names #


def adam(params: Any) -> torch.optim.Optimizer:
    return named.FusedAdam(params, LR, adam_w_mode=False, weight_decay=0.1)


OPTIMIZERS = {
    "DeepSpeedCPUAdam": (partial(named.DeepSpeedCPUAdam, lr=LR), partial(torch.optim.AdamW, lr=LR, weight_decay=0.0)),
    "FusedAdam": (adam, partial(torch.optim.Adam, lr=LR, weight_decay=0.1)),
    "DeepSpeedCPUAdagrad": (partial(named.DeepSpeedCPUAdagrad, lr=LR), partial(torch.optim.Adagrad, lr=LR)),
}


@pytest.mark.parametrize(("made", "like"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("callable_", [False, True])
def test_optimizers_under_deepspeeds_names_are_torchs(made, like, callable_) -> None:
    config = fp32(gradient_clipping=0)
    del config["optimizer"]
    trained = []
    for maker in (made, like):
        model = model_of()
        engine, *_ = deepspeed.initialize(
            model=model, config=config, optimizer=maker if callable_ else maker(list(model.parameters()))
        )
        with engine:
            train(engine, 3)
            trained.append(weights(engine))
    assert all(torch.equal(trained[0][name], value) for name, value in trained[1].items())


def test_lion_as_an_object_is_lion_by_name() -> None:
    config = fp32(gradient_clipping=0)
    by_name = deepspeed.initialize(model=model_of(), config=config | {"optimizer": {"type": "Lion"}})[0]
    del config["optimizer"]
    model = model_of()
    engine = deepspeed.initialize(model=model, config=config, optimizer=named.DeepSpeedCPULion(model.parameters()))[0]
    with engine, by_name:
        train(engine, 2)
        train(by_name, 2)
        assert all(torch.equal(weights(engine)[name], value) for name, value in weights(by_name).items())


def test_a_scheduler_of_the_first_of_several_optimizers_that_share_groups_counts() -> None:
    config = fp32()
    del config["optimizer"]
    model = model_of()
    first = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 0.1**step)
    second = named.DeepSpeedCPUAdam(first.param_groups)  # as accelerate makes one
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=second)
    with engine:
        train(engine)
        assert engine.get_lr() == [LR]
        first.step = lambda: None
        with pytest.warns(UserWarning, match="lr_scheduler.step"):
            scheduler.step()
        assert engine.get_lr() == [pytest.approx(LR * 0.1)]


@pytest.mark.parametrize(
    ("type_name", "params"),
    [
        ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}),
        ("WarmupDecayLR", {"total_num_steps": 8, "warmup_max_lr": 0.1, "warmup_num_steps": 3}),
        ("WarmupCosineLR", {"total_num_steps": 8, "warmup_min_ratio": 0.1, "warmup_num_steps": 3}),
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2}),
        ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "decay_step_size": 2}),
    ],
)
def test_schedule_classes_give_what_the_configuration_gives(type_name, params) -> None:
    assert type_name in schedules.VALID_LR_SCHEDULES
    rates = []
    configured = fp32(scheduler={"type": type_name, "params": params})
    given = {"lr_scheduler": lambda optimizer: getattr(schedules, type_name)(optimizer, **params)}
    for config, more in ((configured, {}), (fp32(), given)):
        engine, *_ = deepspeed.initialize(model=model_of(), config=config, **more)
        with engine:
            rates.append([])
            for _ in range(7):
                train(engine)
                rates[-1].append((engine.get_lr(), engine.get_mom()))
    assert rates[0] == rates[1]
    with pytest.raises(deepspeed.ConfigError, match="last_batch_iteration is 3"):
        getattr(schedules, type_name)(torch.optim.SGD(model_of().parameters()), **params, last_batch_iteration=3)


# Checkpoints without what is frozen #


def test_checkpoints_may_leave_frozen_parameters_out(tmp_path) -> None:
    def build(seed: int) -> Any:
        model = model_of(seed)
        model.mix.requires_grad_(False)
        return deepspeed.initialize(model=model, config=CONFIG)[0]

    with build(0) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        saved = weights(engine)
    with build(1) as engine:
        before = weights(engine)
        with pytest.raises(deepspeed.CheckpointError, match=re.escape("was saved without frozen ones (load_module_")):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, None, False)
        after = weights(engine)
    assert torch.equal(after["out.weight"], saved["out.weight"])
    assert torch.equal(after["mix.weight"], before["mix.weight"])
    of_another_model = pytest.raises(
        deepspeed.CheckpointError, match=r"no parameter mix\.weight: it is of another model$"
    )
    with deepspeed.initialize(model=model_of(), config=CONFIG)[0] as engine, of_another_model:
        engine.load_checkpoint(tmp_path, load_module_strict=False)
