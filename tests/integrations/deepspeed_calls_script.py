"""What scripts for DeepSpeed call on two ranks, and what they are told where it cannot be."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_grad,
    safe_update_full_grad_vectorized,
    z3_leaf_module,
)
from torch import nn

from infinity.errors import InfinityError

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def engine_of(stage: int, *, optimizer: Any = None, frozen: bool = False, **changes: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "tiering": {"update_schedule": "deferred"},
        "zero_optimization": {"stage": stage, **changes.pop("zero", {})},
    }
    model = deepcopy(MODEL)
    model[0].requires_grad_(not frozen)
    if optimizer is None:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    given = None if optimizer is None else optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config | changes, optimizer=given)
    return engine


def message(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised no {kind.__name__}")


def check_what_one_rank_changes_in_init() -> None:
    """All ranks have it, and the engine."""
    with deepspeed.zero.Init():
        layer = nn.Linear(4, 2)
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=1), torch.no_grad():
        layer.weight.fill_(comm.get_rank())
    assert torch.equal(layer.weight, torch.ones(2, 4))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=nn.Sequential(layer), config=config)
    assert torch.equal(safe_get_full_fp32_param(layer.weight), torch.ones(2, 4))
    engine.destroy()


def check_the_part_of_a_parameter_in_init() -> None:
    """It is of rank 0's values, which count, and filled up to one length."""
    with deepspeed.zero.Init():
        layer = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1 + comm.get_rank())
    part = layer.weight.ds_tensor
    assert part.numel() == 5
    assert torch.equal(part, torch.ones(5) if comm.get_rank() == 0 else torch.tensor([1.0, 1, 1, 1, 0]))
    if comm.get_rank() == 1:  # a copy asks nobody
        assert torch.equal(deepcopy(part), torch.tensor([2.0, 2, 2, 2, 0]))


class Coded(nn.Module):
    """Integers and numbers of eight bits beside what is trained."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.bytes = nn.Parameter(torch.full((4,), value, dtype=torch.uint8), requires_grad=False)
        self.codes = nn.Parameter(torch.full((4,), float(value)).to(torch.float8_e4m3fn), requires_grad=False)
        self.dense = nn.Linear(4, 2)


def check_codes_are_rank_0s() -> None:
    """As all of a model's values are."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=Coded(comm.get_rank() + 1), config=config)
    for codes, dtype in ((engine.module.bytes, torch.uint8), (engine.module.codes, torch.float8_e4m3fn)):
        assert codes.dtype is dtype
        assert torch.equal(codes.float(), torch.ones(4))
    engine.destroy()


def check_live_views() -> None:
    """Each rank's part of the masters, the gradients and a parameter."""
    engine = engine_of(3)
    params = list(engine.module.parameters())
    engine.backward(engine(inputs()).sum())
    grads = torch.cat([safe_get_local_grad(param) for param in params])
    assert torch.equal(engine.optimizer.grad_partitions_flat_buffer, grads)
    engine.step()
    (view,) = engine.optimizer.fp32_partitioned_groups_flat
    assert torch.equal(view, torch.cat([safe_get_local_fp32_param(param) for param in params]))
    for param in params:
        assert torch.equal(param.ds_tensor, safe_get_local_fp32_param(param))
    engine.destroy()


def check_coalesced_means() -> None:
    """Each rank's part of the mean of several tensors, of which one does not divide evenly."""
    rank = comm.get_rank()
    first, second = torch.full((4,), float(rank)), torch.arange(3.0) + rank
    one, other = reduce_scatter_coalesced([first, second])
    assert torch.equal(one, torch.full((2,), 0.5))
    assert torch.equal(other, (torch.arange(3.0) + 0.5)[2 * rank : 2 * rank + 2])


def inputs() -> torch.Tensor:
    return torch.full((1, 4), float(comm.get_rank() + 1))


def check_sums() -> None:
    """The gradients of the ranks are averaged, or added up."""
    changes = {}
    for stage in (0, 2):
        for op, factor in (("mean", 1.0), ("sum", 2.0)):
            engine = engine_of(stage, gradient_allreduce_op=op)
            engine.backward(engine(inputs()).sum())
            grad = safe_get_full_grad(engine.module[1].bias)
            assert torch.equal(grad, torch.full((2,), factor)), (stage, op, grad)
            engine.step()
            changes[stage, op] = MODEL[0].weight - safe_get_full_fp32_param(engine.module[0].weight)
            engine.destroy()
        torch.testing.assert_close(changes[stage, "sum"], 2 * changes[stage, "mean"])


def check_gradients_are_updated_together() -> None:
    engine = engine_of(3, frozen=True)
    engine.backward(engine(inputs()).sum())
    seen = []

    def negated(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        seen.append(param)
        return -grad

    before = safe_get_full_grad(engine.module[1].weight)
    safe_update_full_grad_vectorized(engine.module.parameters(), negated)
    assert [param is own for param, own in zip(seen, engine.module[1].parameters(), strict=True)] == [True, True]
    assert torch.equal(safe_get_full_grad(engine.module[1].weight), -before)
    engine.step()
    assert torch.equal(safe_get_full_fp32_param(engine.module[1].weight), MODEL[1].weight + before)
    assert safe_get_full_fp32_param(engine.module[0].weight) is None
    engine.destroy()


def check_no_sync() -> dict[str, str]:
    divided, whole = engine_of(2), engine_of(1)
    told = {"incompatible": message(AssertionError, divided.no_sync().__enter__)}
    with whole.no_sync():
        whole.backward(whole(inputs()).sum())
        own = torch.outer(MODEL[1].weight.detach().sum(0), inputs()[0])  # of this rank alone
        torch.testing.assert_close(safe_get_full_grad(whole.module[0].weight), own)
        bias = whole.module[1].bias
        told["early"] = message(InfinityError, lambda: safe_set_full_grad(bias, torch.ones(2)))
        told["step"] = message(AssertionError, whole.step)
        told["again"] = message(AssertionError, whole.no_sync().__enter__)
    whole.backward(whole(inputs()).sum())
    whole.step()
    torch.testing.assert_close(safe_get_full_fp32_param(whole.module[1].bias), MODEL[1].bias - 2)
    told["tags"] = message(ValueError, lambda: whole.save_checkpoint("/nowhere", f"tag-{comm.get_rank()}"))
    for engine in (divided, whole):
        engine.destroy()
    return told


def check_gradients_between_micro_batches() -> None:
    """They are those of all ranks, whether these have exchanged them yet or not."""
    for stage in (0, 1, 2):
        engine = engine_of(stage, gradient_accumulation_steps=2)
        expected = torch.outer(MODEL[1].weight.detach().sum(0), torch.full((4,), 1.5))
        for share in (0.5, 1.0):
            engine.backward(engine(inputs()).sum())
            for _ in range(2):
                torch.testing.assert_close(safe_get_full_grad(engine.module[0].weight), share * expected)
                part = safe_get_local_grad(engine.module[0].weight)
                assert part.numel() == safe_get_local_fp32_param(engine.module[0].weight).numel()
            if share < 1:
                engine.step()
        engine.step()
        change = MODEL[0].weight - safe_get_full_fp32_param(engine.module[0].weight)
        torch.testing.assert_close(change, expected)
        engine.destroy()


def check_misuse() -> dict[str, str]:
    told = {
        "no model": message(AssertionError, lambda: deepspeed.initialize(config={"train_batch_size": 2})),
        "optimizer": message(AssertionError, lambda: engine_of(1, optimizer=torch.optim.Rprop)),
    }
    leaf = {"leaf_module": {"names": ["1"], "classes": [], "name_suffixes": []}}
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    model = deepcopy(MODEL)
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]) == list(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=sgd)
    assert (engine.get_lr(), engine.optimizer.kind.layout) == ([0.5], "sgd")  # the script's own counts
    assert list(engine.optimizer.leaf_parameters) == list(model)
    engine.destroy()
    engine = engine_of(1, zero=leaf, fp16={"enabled": True, "initial_scale_power": 4})
    assert [z3_leaf_module(module) for module in engine.module] == [False, True]
    assert engine.optimizer.needs_scaler()
    assert engine.optimizer.loss_scaler.loss_scale == engine.optimizer.loss_scaler.cur_scale == 16
    outputs = engine(inputs().half())
    told["scale"] = message(AssertionError, lambda: engine.scale(outputs))
    told["unscaled"] = message(RuntimeError, lambda: outputs.sum().backward())
    engine.destroy()
    assert not engine_of(1).optimizer.needs_scaler()
    engine = engine_of(1, managed_gradient_accumulation=False)
    told["boundary"] = message(AssertionError, lambda: engine.set_gradient_accumulation_boundary(True))
    engine.destroy()
    gathered = torch.zeros(2)
    comm.all_gather_into_tensor(output_tensor=gathered, tensor=torch.tensor([comm.get_rank() + 1.0]), prof=False)
    assert gathered.tolist() == [1.0, 2.0]
    comm.all_gather_into_tensor(gathered, torch.tensor(comm.get_rank() + 3.0))  # without dimensions
    assert gathered.tolist() == [3.0, 4.0]
    comm.allgather_fn(gathered, torch.tensor(comm.get_rank() + 1.0))
    assert gathered.tolist() == [1.0, 2.0]
    comm.reduce_scatter_fn(part := torch.zeros(1), gathered.clone(), log_name="mine")
    assert (part.item(), comm.get_all_ranks_from_group()) == (2.0 * (comm.get_rank() + 1), [0, 1])
    total = torch.ones(1)
    comm.inference_all_reduce(total)
    assert total.item() == comm.get_world_size(comm.get_world_group()) == 2
    return told


class WithNothing(nn.Module):
    """Parameters without elements take part, also blocks of nothing else, more than memory has room for in padding."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 2)
        self.empty = nn.ModuleList(nn.Linear(4, 0, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x).sum() + sum(empty(x).sum() for empty in self.empty)


def check_empty_parameters() -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=WithNothing(), config=config)
    assert [hasattr(param, "ds_id") for param in engine.parameters()] == [True, True, False, False, False, False]
    for _ in range(2):
        engine.backward(engine(inputs()))
        engine.step()
    assert engine.global_steps == 2
    assert {str(device) for device in get_state_devices(engine, "hp_params")} == {"cpu"}
    engine.destroy()


class Saving(nn.Linear):
    """Saves as a model of transformers or PEFT."""

    saved: Any = None

    def save_pretrained(self, _path: str, is_main_process: bool = True, state_dict: Any = None) -> str:
        values = self.state_dict() if state_dict is None else state_dict
        if is_main_process:
            self.saved = {name: value.clone() for name, value in values.items()}
        return "saved"


def check_the_save_of_what_rank_0_has() -> None:
    """As accelerate documents it; all ranks collect the values only where rank 0 was given none."""
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=Saving(4, 2), config=config)
    main = comm.get_rank() == 0
    for given in (True, True, False, False):
        state = engine._zero3_consolidated_16bit_state_dict() if given else None
        assert (state is None) == (not main or not given)
        copied = deepcopy(engine.module)
        more = {"state_dict": state} if given else {}
        assert pickle.loads(pickle.dumps(copied)).save_pretrained("") == "saved"
        models = (engine.module, copied, engine.module)  # the same values can be saved twice
        done = [model.save_pretrained("", is_main_process=main, **more) for model in models]
        assert done == [None if given and not main else "saved"] * 3
        assert (engine.module.saved is not None) == main
        comm.barrier()
    engine._zero3_consolidated_16bit_state_dict()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    done = engine.module.save_pretrained("", is_main_process=main, state_dict=None)  # the values of now, by all ranks
    assert done == "saved"
    engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    assert "save_pretrained" not in vars(engine.module)


EARLY = message(AssertionError, lambda: deepspeed.init_distributed(dist_init_required=False))
deepspeed.init_distributed()
check_sums()
check_what_one_rank_changes_in_init()
check_the_part_of_a_parameter_in_init()
check_codes_are_rank_0s()
check_live_views()
check_coalesced_means()
check_gradients_between_micro_batches()
check_gradients_are_updated_together()
check_empty_parameters()
check_the_save_of_what_rank_0_has()
found = {"nobody": EARLY} | check_no_sync() | check_misuse()
if comm.get_rank() == 0:
    print("RESULT", json.dumps(found))
