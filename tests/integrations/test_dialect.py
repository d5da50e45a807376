"""What the namespace's classes do beside what the engine does."""

from __future__ import annotations

import logging
import pickle
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.integrations.deepspeed import activation_checkpointing, comm, helpers, values
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.config import DeepSpeedConfig
from infinity.integrations.deepspeed.engine import DeepSpeedEngine, initialize
from infinity.integrations.deepspeed.logs import log_dist, logger
from infinity.integrations.deepspeed.parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    unwrap_model_for_generation,
)
from infinity.zero import leaf_modules
from tests.api.small_models import CONFIG, WIDTH
from tests.behaviour.reference import batches, tiny_llama

NVME = {"stage": 3, "stage3_param_persistence_threshold": 0}


pytestmark = pytest.mark.usefixtures("ends_process_group")


class Borrows(nn.Module):
    """Reads the head's weight in its own forward, gathered as scripts for DeepSpeed do it."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 4)
        self.gathers = gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body[0](x)
        if self.gathers:
            with GatheredParameters([self.head.weight, self.head.bias]):
                return nn.functional.linear(x, self.head.weight, self.head.bias)
        return nn.functional.linear(x, self.head.weight, self.head.bias)


def test_parameters_may_be_gathered_inside_a_training_forward(tmp_path) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    section = NVME | {"offload_param": drive, "offload_optimizer": drive}
    engine, *_ = initialize(model=Borrows(gathers=True), config=CONFIG | {"zero_optimization": section})
    plain = Borrows(gathers=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    with engine:
        for seed in range(3):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(x).square().mean())
            engine.step()
            plain(x).square().mean().backward()
            nn.utils.clip_grad_norm_(plain.parameters(), CONFIG["gradient_clipping"])
            optimizer.step()
            optimizer.zero_grad()
        for name, value in infinity.Engine.named_parameters(engine):
            torch.testing.assert_close(value, plain.get_parameter(name).detach())


def test_the_engine_is_a_module_around_the_model(tmp_path) -> None:
    model = Borrows(gathers=False)
    engine, optimizer, _, _ = initialize(model=model, config=CONFIG)
    with engine:
        assert isinstance(engine, nn.Module)
        assert [name for name, _ in engine.named_children()] == ["module"]
        assert dict(engine.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert engine.gathers is False  # the model's attribute
        with pytest.raises(AttributeError, match="neither the engine nor its Borrows has 'nothing'"):
            engine.nothing  # noqa: B018
        assert not engine.eval().training
        assert engine.train() is engine
        assert model.training
        assert engine.save_checkpoint(tmp_path) is True
        path, state = engine.load_checkpoint(str(tmp_path))
        assert (path, state) == (str(tmp_path / "global_step0"), {})
        with pytest.raises(infinity.ConfigError, match="custom_load_fn is not supported"):
            engine.load_checkpoint(tmp_path, custom_load_fn=print)
        assert engine.save_16bit_model(tmp_path) is True
        weights = torch.load(tmp_path / "pytorch_model.bin")
        assert weights.keys() == engine.module_state_dict().keys()
        assert isinstance(optimizer.param_groups[0]["params"][0], nn.Parameter)
        model.head.requires_grad_(False)
        assert set(engine.module_state_dict(exclude_frozen_parameters=True)) == {"body.0.weight", "body.0.bias"}
        assert set(engine._zero3_consolidated_16bit_state_dict(True)) == {"body.0.weight", "body.0.bias"}
    assert isinstance(engine, DeepSpeedEngine)


def test_the_engine_tells_what_its_users_ask(caplog) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 3))
    with caplog.at_level(logging.INFO, logger=logger.name):
        engine, _, loader, _ = initialize(model=Borrows(gathers=False), config=CONFIG, training_data=data)
    assert f"DeepSpeed info: in its place is infinity {infinity.__version__}" in caplog.text
    with engine:
        assert engine.training_dataloader is loader
        assert (engine.mp_world_size, engine.has_moe_layers) == (1, False)
        assert engine.data_parallel_group is engine.seq_data_parallel_group is dist.group.WORLD
        ones = {name: torch.ones_like(value) for name, value in engine.module.state_dict().items()}
        engine.load_module_state_dict({"module": ones}, fetch_z3_params=True)
        engine.allreduce_gradients()
        with unwrap_model_for_generation(engine) as unwrapped:
            assert unwrapped is engine
            assert all(bool((param == 1).all()) for param in engine.parameters())
        with pytest.raises(
            infinity.ConfigError, match=r"load_module_state_dict\(custom_load_fn=...\) is not supported"
        ):
            engine.load_module_state_dict({"module": ones}, custom_load_fn=print)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_was_looked_at_is_trained(stage) -> None:
    """TRL makes an engine without an optimizer of a model, and then another one to train it."""
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    model = Borrows(gathers=False)
    x = torch.randn(4, WIDTH)
    first = initialize(model=model, config=config)[0]
    with torch.no_grad():
        seen = first(x)
    engine, *_ = initialize(model=model, config=config | {"optimizer": CONFIG["optimizer"]})
    with engine:
        assert torch.equal(engine(x), seen)
        engine.backward(engine(x).square().mean())
        engine.step()
        with pytest.raises(infinity.ConfigError, match=r"belongs to another engine: call its destroy\(\)"):
            infinity.initialize(model, config | {"optimizer": CONFIG["optimizer"]})


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_backward_gives_the_loss_as_it_was_divided(precision) -> None:
    config = CONFIG | {"gradient_accumulation_steps": 3} | precision
    with initialize(model=Borrows(gathers=False), config=config)[0] as engine:
        for scale_wrt_gas in (True, False, True):
            loss = engine(torch.ones(4, WIDTH, dtype=torch.bfloat16 if precision else None)).square().mean()
            said = engine.backward(loss, scale_wrt_gas=scale_wrt_gas)
            assert torch.equal(said, loss / (3 if scale_wrt_gas else 1))
            assert said.dtype == loss.dtype
            engine.step()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_master_weights_begin_as_the_16_bit_weights(stage, precision) -> None:
    """As DeepSpeed's do; those of `infinity.initialize` are what the model comes with."""
    config = CONFIG | {"zero_optimization": {"stage": stage}, precision: {"enabled": True}}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    for begin, rounds in ((initialize, True), (infinity.initialize, False)):
        model = Borrows(gathers=False)
        own = {name: param.detach().clone() for name, param in model.named_parameters()}
        with begin(model=model, config=config)[0] as engine:
            for name, param in engine.module.named_parameters():
                master = values.safe_get_full_fp32_param(param)
                assert torch.equal(master, own[name].to(dtype).float() if rounds else own[name])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_was_trained_is_given_to_another_engine(stage, caplog, monkeypatch) -> None:
    """As where a cell of a notebook runs again: the newest values go on, and nothing is lost if they cannot."""
    config = CONFIG | {"zero_optimization": {"stage": stage}}
    model, x = Borrows(gathers=False), torch.randn(4, WIDTH)
    first = initialize(model=model, config=config)[0]
    first.backward(first(x).square().mean())
    with pytest.raises(infinity.InfinityError, match="in the middle of a step"):
        initialize(model=model, config=config)
    first.step()
    with torch.no_grad():
        seen = first(x)
    with monkeypatch.context() as patch:
        patch.setattr("infinity.zero.param_access.free_bytes", lambda device: 0)
        with pytest.raises(infinity.CapacityError, match="save the model first"):
            initialize(model=model, config=config)
    with torch.no_grad():
        assert torch.equal(first(x), seen)
    second = initialize(model=model, config=config)[0]
    assert "with its optimizer states, is ended" in caplog.text
    with second, torch.no_grad():
        assert torch.equal(second(x), seen)
        with pytest.raises(infinity.InfinityError, match="closed"):
            first(x)


def test_a_model_generates_while_its_parameters_are_gathered(tmp_path) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = CONFIG | {"zero_optimization": NVME | {"offload_param": drive, "offload_optimizer": drive}}
    ids = batches(1)[0][:, :4]
    mask = torch.ones_like(ids)
    wanted = tiny_llama().generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    engine, optimizer, _, _ = initialize(model=tiny_llama(), config=config)
    for param in engine.parameters():
        assert param.ds_tensor.numel() == param.ds_numel
        assert param.ds_tensor.numel() == len(param.ds_tensor.clone())
    with engine, GatheredParameters(engine.parameters()):
        assert list(optimizer.parameter_offload.module.named_parameters()) == []
        found = engine.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(found, wanted)


def test_init_and_its_arguments() -> None:
    with Init(config_dict_or_path=CONFIG, remote_device="cpu", pin_memory=True):
        model = Borrows(gathers=False)
    assert dist.is_initialized()
    assert torch.equal(model.head.weight, Borrows(gathers=False).head.weight)
    bias = model.head.bias
    assert (bias.ds_shape, bias.ds_numel, bias.ds_status) == (bias.shape, 4, ZeroParamStatus.NOT_AVAILABLE)
    with GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():  # which no engine has yet
        assert bias.ds_status == ZeroParamStatus.AVAILABLE
        with GatheredParameters(bias):
            bias.zero_()
        assert bias.ds_status == ZeroParamStatus.AVAILABLE
    assert bias.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert not bias.any()
    with GatheredParameters(bias), GatheredParameters(bias, modifier_rank=0), torch.no_grad():
        bias.fill_(0.0)
    refused = pytest.raises(RuntimeError, match=r"in-place modification of a parameter of zero\.Init")
    with refused, GatheredParameters(model.parameters()), torch.no_grad():
        bias.add_(0.0)
    with pytest.raises(ZeroDivisionError), GatheredParameters(bias), torch.no_grad():
        bias.add_(0.0).fill_(1 / 0)
    copied = pickle.loads(pickle.dumps(bias))  # as a process that is spawned gets it
    assert torch.equal(copied, bias)
    assert copied.ds_status is ZeroParamStatus.NOT_AVAILABLE
    summary = bias.ds_summary()
    assert (summary["status"], summary["ds_shape"], summary["ds_tensor.shape"]) == ("NOT_AVAILABLE", (4,), (4,))
    assert copied.ds_summary() == summary
    with pytest.raises(infinity.ConfigError, match=r"zero.Init: `data_parallel_group` is not supported"):
        Init(data_parallel_group=object())
    assert not hasattr(Borrows(gathers=False).head.weight, "ds_id")
    with Init(enabled=False):
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"config_dict_or_path": CONFIG | {"bf16": {"enabled": True}}}, torch.bfloat16),
        ({"config": CONFIG | {"fp16": {"enabled": True}}}, torch.float16),
        ({"config_dict_or_path": CONFIG, "dtype": torch.bfloat16}, torch.bfloat16),
        ({"config_dict_or_path": CONFIG}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_init_makes_parameters_of_the_precision_that_they_train_in(arguments, dtype) -> None:
    elsewhere = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False)
    with Init(**arguments):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(600, 600, dtype=torch.float32))
        model.stored = elsewhere
    assert {param.dtype for param in model.parameters() if param is not elsewhere} == {dtype}
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}
    assert elsewhere.dtype is torch.float8_e4m3fn
    torch.manual_seed(0)
    with Init(**arguments):
        wide = nn.Linear(600, 600)
    torch.manual_seed(0)
    assert torch.equal(wide.weight, nn.Linear(600, 600).weight.to(dtype)), "what it has in memory"
    assert wide.weight.untyped_storage().nbytes() == 600 * 600 * dtype.itemsize
    assert nn.Linear(2, 2).weight.dtype is torch.float32, "outside all is as ever"
    with Init(), Init():
        nested = nn.Linear(2, 2)
    number = nested.weight.ds_id
    assert hasattr(nested.bias, "ds_id")
    engine = initialize(model=nn.Sequential(nested), config=CONFIG)[0]
    with engine:
        assert nested.weight.ds_id > number
        assert nested.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert ZeroParamStatus.AVAILABLE != ZeroParamStatus.NOT_AVAILABLE


def test_leaf_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert leaf_modules.set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[2]]
    assert leaf_modules.set_z3_leaf_modules(model, ["ReLU"]) == [model[1]]
    assert leaf_modules.get_z3_leaf_modules(model) == list(model)
    assert leaf_modules.unset_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"]) == [model[0], model[2]]
    assert [leaf_modules.z3_leaf_module(module) for module in model] == [False, True, False]
    with pytest.raises(ValueError, match="No modules of type"):
        leaf_modules.set_z3_leaf_modules(model, [nn.GELU])
    assert leaf_modules.set_z3_leaf_modules(model, [nn.GELU], raise_if_not_found=False) == []
    with pytest.raises(TypeError, match="must be classes"):
        leaf_modules.set_z3_leaf_modules(model, [3])


def test_helpers(caplog) -> None:
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.get_global_rank()) == (0, 1, 0, 0)
    assert comm.ReduceOp is dist.ReduceOp
    with pytest.raises(AttributeError, match=r"torch\.distributed has none"):
        comm.nothing  # noqa: B018
    loader = helpers.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    view = torch.arange(10.0)[2:4]
    point = namedtuple("point", "x y")(view, 3)
    copied = helpers.clone_tensors_for_torch_save({"a": [view], "b": (3, "text"), "c": point})
    assert copied["b"] == (3, "text")
    assert type(copied["c"]) is tuple  # as in DeepSpeed
    assert copied["a"][0].untyped_storage().nbytes() == 8
    with caplog.at_level(logging.INFO, logger=logger.name):
        log_dist("seen", ranks=[0])
        log_dist("unseen", ranks=[1])
    assert [record.message for record in caplog.records] == ["[Rank 0] seen"]
    accelerator = get_accelerator()
    assert accelerator is get_accelerator()
    if not torch.accelerator.is_available():
        assert (accelerator.device_name(), accelerator.current_device_name(), accelerator.device_count()) == (
            "cpu",
            "cpu",
            1,
        )
        assert accelerator.communication_backend_name() == "gloo"
        with pytest.raises(AttributeError, match=r"torch\.cpu has none"):
            accelerator.nothing  # noqa: B018
    weight = torch.ones(2, requires_grad=True)
    activation_checkpointing.checkpoint(lambda w: (w * w).sum(), weight).backward()
    assert torch.equal(weight.grad, torch.full((2,), 2.0))
    with pytest.raises(infinity.ConfigError, match="cpu_checkpointing"):
        activation_checkpointing.configure(checkpoint_in_cpu=True)
    resolved = DeepSpeedConfig(CONFIG)
    assert (resolved.train_batch_size, resolved.zero_optimization_stage, resolved.optimizer_name) == (4, 3, "adamw")


class Watches(nn.Module):
    """Keeps what the status of a block's parameter is inside the block's forward, and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)])
        self.seen: list[bool] = []
        self.blocks[0].register_forward_hook(lambda *_: self.look())

    def look(self) -> None:
        self.seen.append(self.blocks[0].weight.ds_status == ZeroParamStatus.AVAILABLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_parameter_is_available_where_it_is_used() -> None:
    with initialize(model=Watches(), config=CONFIG)[0] as engine:
        engine.module.look()
        engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
        engine.step()
        engine.module.look()
        assert engine.module.seen == [False, True, False]


def test_a_parameter_tells_which_unit_uses_it_now() -> None:
    model = Watches()
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(list(model.blocks[0].weight.ds_active_sub_modules)))
    with initialize(model=model, config=CONFIG)[0] as engine:
        weight = model.blocks[0].weight
        engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
        ((number,),) = seen
        assert not weight.ds_active_sub_modules
        assert number not in weight.ds_active_sub_modules
        with GatheredParameters(weight):  # which is no use of a module's
            weight.ds_active_sub_modules.clear()
            assert len(weight.ds_active_sub_modules) == 0
        assert pickle.loads(pickle.dumps(weight.ds_active_sub_modules)) == set()
        assert not weight.is_external_param
        engine.step()


def test_a_tag_that_is_not_the_same_on_all_ranks_is_an_assertion_error(monkeypatch, tmp_path) -> None:
    def differ(*args: object, **kwargs: object) -> None:
        raise infinity.ConfigError("save_checkpoint: tag is not the same on all ranks")

    with initialize(model=nn.Sequential(nn.Linear(WIDTH, 4)), config=CONFIG)[0] as engine:
        monkeypatch.setattr(infinity.Engine, "save_checkpoint", differ)
        with pytest.raises(AssertionError, match="not the same on all ranks"):
            engine.save_checkpoint(tmp_path, tag="one")


def test_ranks_that_accelerate_does_not_know_of_are_refused(monkeypatch) -> None:
    """Each would train on all samples."""
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={"backend": None}))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.setattr("infinity.integrations.deepspeed.comm.world_size", lambda: 2)
    with pytest.raises(infinity.ConfigError, match=r"2 ranks .* one process.*PartialState\(backend=\"gloo\"\)"):
        initialize(model=tiny_llama(), config={})
