"""What all ranks do together refuses by name where one comes alone."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch.distributed as dist

import infinity
from infinity.config import load_config
from infinity.errors import ConfigError, RankError
from infinity.zero import GatheredParameters
from infinity.zero.meeting import Meeting
from infinity.zero.ranks import Ranks
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2

TIMEOUT_S = 1.5
ALONE_S = 0.2  # the timeout of a rank that is sure to be alone; many calls wait for it


def engine_here(timeout_s: float = TIMEOUT_S) -> infinity.Engine:
    recipe = Recipe(extra={"communication": {"timeout": timeout_s}})
    return infinity.initialize(model=tiny_gpt2(), config=recipe.config(Placement()))[0]


def step(engine: infinity.Engine) -> None:
    engine.backward(loss_of(engine, batches(1)[0]))
    engine.step()


def gather(engine: infinity.Engine, path: str) -> None:
    with GatheredParameters(engine.module):
        pass


CALLS = {
    "engine.named_parameters()": lambda engine, path=None: list(engine.named_parameters()),
    "engine.save_checkpoint()": lambda engine, path: engine.save_checkpoint(path),
    "engine.save_16bit_model()": lambda engine, path: engine.save_16bit_model(f"{path}-16bit"),
    "engine.load_checkpoint()": lambda engine, path: engine.load_checkpoint(path),
    "GatheredParameters": gather,
    "model.state_dict()": lambda engine, path=None: engine.module.state_dict(),
    "load_state_dict": lambda engine, path=None: engine.module.load_state_dict(tiny_gpt2().state_dict()),
    "copy.deepcopy(model)": lambda engine, path=None: copy.deepcopy(engine.module),
}


def call_alone(lonely: int, path: str) -> dict[str, str]:
    """Return the messages that one rank gets for each call while the other rank waits; then both train and call."""
    messages = {}
    together = Meeting.together
    with engine_here(timeout_s=30) as engine:
        step(engine)
        if dist.get_rank() == lonely:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Meeting, "together", lambda meeting, what, _: together(meeting, what, ALONE_S))
                for name, call in CALLS.items():
                    with pytest.raises(RankError) as refused:
                        call(engine, path)
                    messages[name] = str(refused.value)
        dist.monitored_barrier()
        step(engine)
        for call in CALLS.values():
            call(engine, path)
    return messages


@pytest.mark.parametrize("lonely", [0, 1])
def test_a_rank_that_calls_alone_is_told_so(lonely, of_two) -> None:
    """And the run goes on: nothing of the refused call is left that the next one could stumble over."""
    messages = [of_rank["alone"][lonely] for of_rank in of_two]
    assert messages[1 - lonely] == {}
    ending = (
        f"but rank(s) {1 - lonely} did not within 0.2 s: call it on all ranks together (or raise communication.timeout"
    )
    assert messages[lonely].keys() == CALLS.keys()
    for name, message in messages[lonely].items():
        assert message.startswith(f"rank {lonely} called {name} {ending}")


def call_in_a_step() -> str:
    """Rank 0 looks at the parameters, rank 1 is in the next forward pass."""
    with engine_here() as engine:
        step(engine)
        call = step if dist.get_rank() else CALLS["engine.named_parameters()"]
        with pytest.raises(RankError) as refused:
            call(engine)
    return str(refused.value)


def test_a_rank_in_a_training_step_does_not_take_it_for_its_own(of_two) -> None:
    alone, training = (of_rank["in a step"] for of_rank in of_two)
    assert "rank 0 called engine.named_parameters() but rank(s) 1 did not" in alone
    assert "rank 0 called engine.named_parameters(), which all ranks must call together" in training


def make_different_calls() -> tuple[str, float]:
    ranks = Ranks.of_group(timeout_s=100)
    dist.barrier()
    started_s = time.monotonic()
    with pytest.raises(RankError) as refused:
        ranks.together(["model.state_dict()", "engine.save_checkpoint()"][dist.get_rank()])
    return str(refused.value), time.monotonic() - started_s


def test_different_calls_are_refused_at_once(of_two) -> None:
    (first, first_s), (second, second_s) = (of_rank["different"] for of_rank in of_two)
    assert max(first_s, second_s) < 20
    assert "rank 0 called model.state_dict() while rank 1 called engine.save_checkpoint()" in first
    assert "rank 1 called engine.save_checkpoint() while rank 0 called model.state_dict()" in second


def come_one_short() -> str | None:
    """The last of three stays away."""
    ranks = Ranks.of_group(timeout_s=TIMEOUT_S)
    dist.barrier()  # the other two must come within the timeout of each other
    if dist.get_rank() == 2:
        dist.barrier()
        return None
    with pytest.raises(RankError) as refused:
        ranks.together("model.state_dict()")
    dist.barrier()
    return str(refused.value)


def test_waiting_ranks_name_the_absent_one(tmp_path) -> None:
    first, second, absent = run_ranks(3, come_one_short, path=tmp_path)
    assert absent is None
    for message in (first, second):
        assert "called model.state_dict() but rank(s) 2 did not within 1.5 s" in message


def test_one_rank_does_not_wait(tmp_path) -> None:
    with engine_here() as engine:
        for call in CALLS.values():
            call(engine, tmp_path)
    Ranks().together("model.state_dict()")
    assert not dist.is_initialized()


@pytest.mark.parametrize("value", [0, -1, "soon"])
def test_a_timeout_that_cannot_be_is_refused_by_name(value) -> None:
    assert load_config({}).communication.timeout_s == 300
    with pytest.raises(ConfigError, match=r"communication\.timeout"):
        load_config({"communication": {"timeout": value}})


def calls_in_two_groups() -> int:
    """Each process group counts its own calls, and goes on counting when a second engine uses it."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([0, 1])]
    several = Ranks.of_group(groups[1])
    if rank == 0:
        Ranks.of_group(groups[0]).together("a call of one rank")
    again = Ranks.of_group(groups[1])
    for ranks in (several, again, Ranks.of_group(), several):
        ranks.together("a call")
    return again.neighbours


def test_each_group_counts_its_own_calls(of_two) -> None:
    assert [of_rank["groups"] for of_rank in of_two] == [2, 2]


def everything(path: str) -> dict[str, Any]:
    return {
        "alone": [call_alone(lonely, f"{path}/saved-{lonely}") for lonely in range(2)],
        "different": make_different_calls(),
        "groups": calls_in_two_groups(),
        "in a step": call_in_a_step(),  # after which nothing can follow
    }


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> list[dict[str, Any]]:
    """Return what each of two ranks found."""
    path = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, everything, str(path), path=path)
