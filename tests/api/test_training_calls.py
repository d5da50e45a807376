"""Ways to train beside `engine.backward(loss); engine.step()`: each gives torch's numbers, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import LR, WEIGHT_DECAY, Placement, Recipe, batches, least_memory, loss_of, tiny_gpt2

PLACES = ("stage 0", "stage 2", "stage 3", "nvme", "deferred")
STEPS = 4


def recipe(place: str, path: Path, **settings: Any) -> dict[str, Any]:
    """A configuration in fp32, so that plain torch is the reference."""
    placement = Placement()
    if place == "nvme":
        least = least_memory(tiny_gpt2(), Recipe(**settings).config(Placement("nvme", "nvme", path, "64KiB")))
        placement = Placement("nvme", "nvme", path, "64KiB", least + 60_000)
    config = Recipe(**settings).config(placement)
    if place.startswith("stage"):
        config["zero_optimization"] = {"stage": int(place[-1])}
    if place == "deferred":
        config["tiering"]["update_schedule"] = "deferred"
    return config


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return request.param


Loop = Callable[[Any, Any, list[torch.Tensor]], None]  # (model or engine, its optimizer, micro-batches)


def torch_weights(loop: Loop, data: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model = tiny_gpt2()
    loop(model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY), data)
    return {name: param.detach() for name, param in model.named_parameters()}


def engine_weights(loop: Loop, data: list[torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        loop(engine, engine.optimizer, data)
        return dict(engine.named_parameters())


def assert_alike(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
    for name, values in here.items():
        torch.testing.assert_close(
            values.float(), there[name].float(), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


# Backward by the user #


def by_engine(engine: Any, _: Any, data: list[torch.Tensor]) -> None:
    """What the others are held against."""
    for ids in data:
        engine.backward(loss_of(engine, ids))
        engine.step()


def plain_loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    """What a torch loop does, word for word."""
    for ids in data:
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_plain_torch_loop_trains(place, tmp_path) -> None:
    data = batches(STEPS)
    assert_alike(engine_weights(plain_loop, data, recipe(place, tmp_path)), torch_weights(plain_loop, data))


def test_loss_backward_counts_as_one_of_the_micro_batches(place, tmp_path) -> None:
    """Not a power of two, so that the share would show."""

    def by_hand(engine: Any, _: Any, data: list[torch.Tensor]) -> None:
        for ids in data:
            loss_of(engine, ids).backward()
            engine.step()

    data, config = batches(6), recipe(place, tmp_path, accumulation=3)
    assert_alike(engine_weights(by_hand, data, config), engine_weights(by_engine, data, config))


def test_a_loss_that_the_engine_has_scaled_is_not_scaled_again(place, tmp_path) -> None:
    def scaled(engine: Any, _: Any, data: list[torch.Tensor]) -> None:
        for ids in data:
            engine.scale(loss_of(engine, ids)).backward()
            engine.step()

    data, config = batches(6), recipe(place, tmp_path, accumulation=3)
    here, there = engine_weights(scaled, data, config), engine_weights(by_engine, data, config)
    assert all(torch.equal(values, there[name]) for name, values in here.items())


def test_loss_backward_in_fp16_is_refused_without_the_scale_and_trains_with_it(tmp_path) -> None:
    config = Recipe("fp16").config(Placement())
    ids = batches(1)[0]
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        with pytest.raises(infinity.InfinityError, match=r"engine\.scale\(loss\)\.backward\(\)"):
            loss_of(engine, ids).backward()
        before = dict(engine.named_parameters())
        engine.scale(loss_of(engine, ids)).backward()
        engine.step()
        after = dict(engine.named_parameters())
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        engine.backward(loss_of(engine, ids))
        engine.step()
        reference = dict(engine.named_parameters())
    assert any(not torch.equal(before[name], values) for name, values in after.items())
    assert all(torch.equal(reference[name], values) for name, values in after.items())


class _Scalar(nn.Module):
    """Its gradient is the input's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).mean()


def _sgd_on_rank(stage: int) -> float:
    rank = torch.distributed.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
    }
    with infinity.initialize(model=_Scalar(), config=config)[0] as engine:
        engine(torch.tensor([1.0 + rank])).backward()
        engine.step()
        return dict(engine.named_parameters())["weight"].item()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loss_backward_on_two_ranks_takes_the_mean_of_their_gradients(stage, tmp_path) -> None:
    assert run_ranks(2, _sgd_on_rank, stage, path=tmp_path) == [-1.5, -1.5]


def _by_engine(engine: infinity.Engine, ids: torch.Tensor) -> None:
    engine.backward(loss_of(engine, ids))


def _by_loss(engine: infinity.Engine, ids: torch.Tensor) -> None:
    loss_of(engine, ids).backward()


def _fail(*_: Any) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("go_back", [_by_engine, _by_loss])
def test_a_backward_that_fails_is_no_micro_batch(place, go_back, tmp_path) -> None:
    ids, config = batches(1)[0], recipe(place, tmp_path)
    config["tiering"]["update_schedule"] = "deferred"
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        before = dict(engine.named_parameters())
        handle = engine.module.transformer.h[2].register_full_backward_hook(_fail)
        with pytest.raises(ValueError, match="on purpose"):
            go_back(engine, ids)
        handle.remove()
        for _ in range(2):
            with pytest.raises(infinity.InfinityError, match="a backward pass that failed"):
                engine.step()
        assert all(torch.equal(before[name], values) for name, values in engine.named_parameters())
        go_back(engine, ids)
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("go_back", [_by_engine, _by_loss])
def test_a_backward_that_fails_takes_earlier_micro_batches_along_and_says_so(go_back, tmp_path, caplog) -> None:
    def train(fails: bool) -> dict[str, torch.Tensor]:
        config = recipe("deferred", tmp_path) | {"gradient_accumulation_steps": 2}
        first, second = batches(2)
        with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
            if fails:
                go_back(engine, first)
                engine.step()
                assert "failed" not in caplog.text
                handle = engine.module.transformer.h[2].register_full_backward_hook(_fail)
                with pytest.raises(ValueError, match="on purpose"):
                    go_back(engine, second)
                handle.remove()
            for ids in (first, second):
                go_back(engine, ids)
                engine.step()
            assert ("the step's earlier micro-batches (1) are dropped" in caplog.text) == fails
            assert engine.global_steps == 1
            return dict(engine.named_parameters())

    expected, found = train(False), train(True)
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_a_step_whose_backward_failed_may_be_left_out(place, tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe(place, tmp_path))[0] as engine:
        with pytest.raises(RuntimeError):
            engine.backward(loss_of(engine, batches(1)[0]).expand(2))
        engine.zero_grad()
        engine.step()
        assert engine.global_steps == 1


def test_backward_returns_the_loss_and_can_keep_the_graph(tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe("deferred", tmp_path))[0] as engine:
        loss = loss_of(engine, batches(1)[0])
        assert engine.backward(loss, retain_graph=True) is loss
        engine.backward(loss)
        engine.step()


def test_backward_through_a_graph_older_than_an_update_is_torchs_error(place, tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe(place, tmp_path))[0] as engine:
        loss = loss_of(engine, batches(1)[0])
        engine.backward(loss, retain_graph=True)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)


# Several backward passes, and dropping gradients #


def twice(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        loss_of(model, first).backward()
        loss_of(model, second).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["deferred", "barrier"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_two_backward_passes_before_a_step_add_up(schedule, clipping, tmp_path) -> None:
    def reference(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for first, second in zip(data[::2], data[1::2], strict=True):
            loss_of(model, first).backward()
            loss_of(model, second).backward()
            if clipping:
                nn.utils.clip_grad_norm_(model.parameters(), clipping)
            optimizer.step()
            optimizer.zero_grad()

    data, config = batches(4), recipe("stage 3", tmp_path, clipping=clipping)
    config["tiering"]["update_schedule"] = schedule
    assert_alike(engine_weights(twice, data, config), torch_weights(reference, data))


def test_a_second_backward_is_refused_where_the_first_has_updated(tmp_path) -> None:
    ids = batches(1)[0]
    config = recipe("stage 3", tmp_path)
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        first, second = loss_of(engine, ids), loss_of(engine, ids)
        engine.backward(first)
        with pytest.raises(infinity.InfinityError, match=r"second backward pass before step\(\).*deferred"):
            engine.backward(second)


DROPS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "module.zero_grad": lambda model, optimizer: getattr(model, "module", model).zero_grad(),
    "grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in _parameters(model)],
}


def _parameters(model: Any) -> Iterator[nn.Parameter]:
    return getattr(model, "module", model).parameters()


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("place", ["stage 0", "stage 3", "nvme"])
def test_dropped_gradients_are_gone(drop, place, tmp_path) -> None:
    def bad_then_good(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for bad, good in zip(data[::2], data[1::2], strict=True):
            (loss_of(model, bad) * 1e3).backward()
            DROPS[drop](model, optimizer)
            loss_of(model, good).backward()
            optimizer.step()
            optimizer.zero_grad()

    data, config = batches(4), recipe(place, tmp_path)
    config["tiering"]["update_schedule"] = "deferred"
    assert_alike(engine_weights(bad_then_good, data, config), torch_weights(bad_then_good, data))


def test_the_gradient_of_one_parameter_can_be_dropped(tmp_path) -> None:
    """As in torch: it is left alone in this step, with its moments, unless another gradient comes."""

    def one(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for ids in data:
            loss_of(model, ids).backward()
            getattr(model, "module", model).transformer.h[1].attn.c_attn.weight.grad = None
            if ids is data[-1]:  # then what comes is its gradient, and the sum for all others
                loss_of(model, data[0]).backward()
            optimizer.step()
            optimizer.zero_grad()

    data, config = batches(3), recipe("deferred", tmp_path)
    assert_alike(engine_weights(one, data, config), torch_weights(one, data))


@pytest.mark.parametrize("drop", DROPS)
def test_gradients_that_have_updated_parameters_cannot_be_dropped(drop, tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe("stage 3", tmp_path))[0] as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        with pytest.raises(infinity.InfinityError, match='update_schedule "backward"'):  # noqa: PT012
            DROPS[drop](engine, engine.optimizer)
            engine.step()


def test_zero_grad_after_a_step_and_before_any_is_nothing(place, tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe(place, tmp_path))[0] as engine:
        engine.zero_grad()
        engine.backward(loss_of(engine, batches(1)[0]))
        engine.step()
        engine.optimizer.zero_grad()
        assert engine.global_steps == 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_by_hand_is_refused(place, accumulation, tmp_path) -> None:
    """It would clip nothing, and say a norm of 0."""
    config = recipe(place, tmp_path, accumulation=accumulation)
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        with pytest.raises(infinity.InfinityError, match="gradient_clipping"):
            nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
        engine.step()
        assert all(param.grad is None for param in engine.module.parameters()) == (accumulation == 1)


def test_clipping_copies_by_hand_is_refused(place, tmp_path) -> None:
    """`engine.parameters()` are copies; without gradients they would have a norm of 0, too."""
    config = recipe(place, tmp_path)
    config["tiering"]["update_schedule"] = "deferred"
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        with pytest.raises(infinity.InfinityError, match="gradient_clipping"):
            nn.utils.clip_grad_norm_(list(engine.parameters()), 1.0)
        engine.step()
        assert all(values.grad is None for values in engine.parameters())


def test_a_gradient_set_by_hand_is_refused(place, tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe(place, tmp_path))[0] as engine:
        weight = engine.module.transformer.ln_f.weight
        weight.grad = torch.ones(weight.shape)
        with pytest.raises(infinity.InfinityError, match=r"`transformer\.ln_f\.weight` was set by hand"):
            engine.backward(loss_of(engine, batches(1)[0]))


# Forward passes without a backward #


@pytest.mark.parametrize("then", ["save", "load", "step", "train"])
def test_an_evaluation_without_no_grad_is_dropped(then, place, tmp_path) -> None:
    """Nobody calls backward for it, and nothing is in the way of what follows."""

    def run(*, evaluates: bool) -> dict[str, torch.Tensor]:
        with infinity.initialize(model=tiny_gpt2(), config=recipe(place, tmp_path))[0] as engine:
            first, second, held_out = batches(3)
            engine.backward(loss_of(engine, first))
            engine.step()
            engine.save_checkpoint(tmp_path / "saved")
            if evaluates:
                loss_of(engine, held_out)
            if then == "save":
                engine.save_checkpoint(tmp_path / "again")
            if then == "load":
                engine.load_checkpoint(tmp_path / "saved")
            if then == "step":
                engine.step()
            engine.backward(loss_of(engine, second))
            engine.step()
            return dict(engine.named_parameters())

    with_it, without = run(evaluates=True), run(evaluates=False)
    assert all(torch.equal(with_it[name], values) for name, values in without.items())


def test_saving_is_refused_while_gradients_wait_and_names_the_way_out(tmp_path) -> None:
    config = recipe("stage 3", tmp_path, accumulation=2)
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        engine.step()
        with pytest.raises(infinity.InfinityError, match=r"in the middle of a step.*engine\.zero_grad\(\)"):
            engine.save_checkpoint(tmp_path / "saved")
        engine.zero_grad()
        engine.save_checkpoint(tmp_path / "saved")


# The engine as the model #


def test_what_the_engine_has_not_is_the_models(tmp_path) -> None:
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=recipe("stage 0", tmp_path))[0] as engine:
        assert engine.transformer is model.transformer
        assert engine.get_input_embeddings() is model.get_input_embeddings()
        with pytest.raises(AttributeError, match="neither the engine nor its GPT2LMHeadModel has 'nonsense'"):
            engine.nonsense  # noqa: B018


def test_a_failed_engines_model_cannot_be_called_either(tmp_path) -> None:
    """Some of its units are updated and others are not."""
    with infinity.initialize(model=tiny_gpt2(), config=recipe("stage 3", tmp_path))[0] as engine:

        def fail(*_: Any) -> None:
            raise ValueError("on purpose")

        engine.module.transformer.h[1].register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            engine.backward(loss_of(engine, batches(1)[0]))
        with torch.no_grad(), pytest.raises(infinity.InfinityError, match="has stopped after an error"):
            loss_of(engine.module, batches(1)[0])


LOOKS: dict[str, Callable[[Any], Any]] = {
    "evaluation": lambda engine: engine(input_ids=batches(1)[0]),
    "evaluation past the engine": lambda engine: engine.module(input_ids=batches(1)[0]),
    "state_dict": lambda engine: engine.module.state_dict(),
    "named_parameters": lambda engine: dict(engine.named_parameters()),
    "gathered": lambda engine: infinity.zero.GatheredParameters(engine.module).__enter__(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("place", ["stage 0", "nvme"])
def test_between_backward_and_step_no_value_of_the_next_step_is_seen(look, place, tmp_path) -> None:
    """Under the schedule `backward` parameters are updated by then, and torch's are not."""
    with infinity.initialize(model=tiny_gpt2(), config=recipe(place, tmp_path))[0] as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        with torch.no_grad(), pytest.raises(infinity.InfinityError, match=r"Call step\(\) first"):
            LOOKS[look](engine)
        engine.step()
        with torch.no_grad():
            LOOKS[look](engine)


def test_hyper_parameters_that_change_after_updates_began_are_refused(tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe("stage 3", tmp_path))[0] as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        (group,) = engine.optimizer.param_groups
        before, group["lr"] = group["lr"], 0.5
        with pytest.raises(infinity.InfinityError, match=r"param_groups\) were changed between backward and step"):
            engine.step()
        group["lr"] = before
        engine.step()


@pytest.mark.parametrize("loss", [None, 1.0, {"loss": torch.ones(())}])
def test_a_loss_that_is_no_tensor_is_refused(loss, tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe("memory", tmp_path))[0] as engine:
        with pytest.raises(infinity.InfinityError, match=rf"takes the loss, .* got a {type(loss).__name__}"):
            engine.backward(loss)
        by_engine(engine, None, batches(1))


@pytest.mark.parametrize(("key", "value"), [("lr", None), ("lr", "high"), ("betas", (0.9,)), ("weight_decay", [])])
def test_a_hyper_parameter_that_is_no_number_is_refused_by_name(key, value, tmp_path) -> None:
    with infinity.initialize(model=tiny_gpt2(), config=recipe("memory", tmp_path))[0] as engine:
        group = engine.optimizer.param_groups[0]
        before, group[key] = group[key], value
        loss = loss_of(engine, batches(1)[0])
        with pytest.raises(
            infinity.ConfigError, match=rf"parameter group 0 .*'{key}': .*correct optimizer.param_groups"
        ):
            engine.backward(loss)
        group[key] = before
        engine.zero_grad()
        by_engine(engine, None, batches(1))
