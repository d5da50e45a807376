"""The plan that is printed is the one that training follows: same bytes, same space."""

from __future__ import annotations

import json

import pytest

import infinity
from infinity.cli.main import main
from infinity.config import load_config
from infinity.planner import plan_training
from tests.action_logs.worlds import world_of
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_llama


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize(("params", "optimizer"), [("nvme", "nvme"), ("none", "nvme"), ("nvme", "none")])
@pytest.mark.parametrize("host_memory", [1_400_000, 2_000_000, 10_000_000])
def test_bytes_are_those_of_a_step(clipping, params, optimizer, host_memory, tmp_path) -> None:
    recipe = Recipe("bf16", clipping=clipping)
    values = recipe.config(Placement(params, optimizer, tmp_path, "64KiB", host_memory))
    try:
        plan = plan_training(tiny_llama(), load_config(values))
    except infinity.CapacityError:
        with pytest.raises(infinity.CapacityError):
            infinity.initialize(model=tiny_llama(), config=values)
        return
    # On a busy machine a unit may be evicted that could have stayed, as the one that should leave is not written yet.
    with world_of("prompt"), infinity.initialize(model=tiny_llama(), config=values)[0] as engine:
        moved = []
        for ids in batches(5):
            engine.backward(loss_of(engine, ids))
            engine.step()
            engine.synchronize()
            stats = engine.stats()
            moved.append([stats.tier_bytes.get(f"nvme_{kind}", 0) for kind in ("read", "write")])
        assert stats.peak_bytes["nvme"] == plan.nvme_bytes
    assert moved[1:] == [[plan.traffic.read_bytes, plan.traffic.write_bytes]] * 4


@pytest.mark.parametrize(
    ("micro_batches", "host_memory", "slots"),
    [(1, 2_000_000, 1), (1, 2_060_000, 2), (1, 2_120_000, 3), (2, 2_240_000, 2)],
)
def test_gradients_that_spill_are_those_of_a_step_to_the_byte(micro_batches, host_memory, slots, tmp_path) -> None:
    """What the last micro-batch leaves in the slots is not read again."""
    recipe = Recipe("bf16", micro_batches, clipping=0.5)
    values = recipe.config(Placement("nvme", "none", tmp_path, "64KiB", host_memory))
    plan = plan_training(tiny_llama(), load_config(values))
    assert plan.traffic.disk == 0, "parameters stay, and gradients alone move"
    moved = []
    with infinity.initialize(model=tiny_llama(), config=values)[0] as engine:
        assert len(engine._runtime.grads.slots) == slots
        for index, ids in enumerate(batches(4 * micro_batches)):
            engine.backward(loss_of(engine, ids))
            engine.step()
            engine.synchronize()
            if (index + 1) % micro_batches == 0:
                moved.append(tuple(engine.stats().tier_bytes.get(f"nvme_{way}", 0) for way in ("read", "write")))
    assert moved[2:] == [(plan.traffic.read_bytes, plan.traffic.write_bytes)] * 2


def config_file(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB"))))
    return str(path)


def test_the_table_and_the_steps(tmp_path, capsys) -> None:
    arguments = ["plan", "--model", "gpt2", "--config", config_file(tmp_path), "--host-memory", "1GiB"]
    assert main([*arguments, "--disk", "2GB", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "124,439,808 in" in out
    assert "host memory     1.00 GiB (at least" in out
    assert "at least 0." in out
    assert out.count("transformer.h.3") >= 2
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]


def test_the_steps_that_are_printed_can_be_carried_out_within_the_budget(tmp_path, capsys) -> None:
    """Line by line, as a reader would: what is used is there, and what is there fits."""
    arguments = ["plan", "--model", "gpt2", "--config", config_file(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    least = json.loads(capsys.readouterr().out)["host_least_bytes"]
    assert main([*arguments, "--host-memory", str(least + 20_000_000), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--host-memory", str(least + 20_000_000), "--explain"]) == 0
    lines = capsys.readouterr().out.split("in order\n")[1].splitlines()
    sizes = {unit["name"]: unit["nbytes"] for unit in facts["units"] if unit["offloaded"]}
    assert sum(sizes.values()) > facts["split"]["params_bytes"], "everything fits: nothing to explain"
    uses = [*sizes, "transformer.wte"]  # which is the head, too
    assert [line.split()[0] for line in lines] == [*uses, *reversed(uses)]
    there: set[str] = set()
    for cycle in range(2):  # the first fills the memory
        fetched = 0
        for line in lines:
            used, *notes = line.split(maxsplit=1)
            for note in notes[0].split(", ") if notes else ():
                action, _, name = note.partition(" ")
                name = used if note == "fetch it now" else name
                if action == "evict":
                    assert name in there or cycle == 0, line
                    there.discard(name)
                else:
                    assert name not in there, line
                    there.add(name)
                    fetched += sizes[name]
                assert sum(sizes[name] for name in there) <= facts["split"]["params_bytes"], line
            assert used in there or cycle == 0, line
            there.add(used)
    assert 0 < fetched < facts["read_bytes_per_step"]  # the rest is optimizer states


def test_json(tmp_path, capsys) -> None:
    assert main(["plan", "--model", "gpt2", "--config", config_file(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["params"] == 124_439_808
    assert facts["state_format"] == "split"
    uses = sum(unit["offloaded"] for unit in facts["units"]) + 1  # the embedding is the head, too
    assert len(facts["steps"]) == 2 * uses


def test_a_budget_that_is_too_small_is_an_error_with_the_number(tmp_path, capsys) -> None:
    arguments = ["plan", "--model", "gpt2", "--config", config_file(tmp_path), "--host-memory", "10MiB"]
    assert main(arguments) == 2
    assert "this model needs at least" in capsys.readouterr().err


RATES = ["--flops", "20e9", "--disk", "1GB", "--optimizer-rate", "1e8"]


def test_a_step_is_predicted_in_parts(tmp_path, capsys) -> None:
    arguments = ["plan", "--model", "gpt2:tiny", "--config", config_file(tmp_path), *RATES, "--tbw", "600TB"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "tokens/s; bound by compute" in out
    assert "break-even" in out
    assert main([*arguments, "--json"]) == 0
    least = json.loads(capsys.readouterr().out)["host_least_bytes"]
    assert main([*arguments, "--host-memory", str(least), "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["unknown"] == []
    assert step["step_s"] == pytest.approx(sum(step["phases_s"].values()))
    assert step["step_s"] >= max(step["busy_s"].values())
    assert step["step_s"] >= max(step["parts_s"].values())
    assert step["days_to_rated"] > 0


@pytest.mark.parametrize(("what", "count"), [("tokens", 8), ("host-memory", 8), ("drives", 6)])
def test_a_sweep_and_its_plot(what, count, tmp_path, capsys) -> None:
    picture = tmp_path / "sweep.png"
    model = ["--model", "gpt2:tiny", "--config", config_file(tmp_path)]
    assert main(["plan", *model, *RATES, "--sweep", what, "--plot", str(picture), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["sweep"]
    assert len(points) == count
    assert all(point["step_s"] > 0 for point in points)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_ranks_send_to_one_another(tmp_path, capsys) -> None:
    values = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"communication": {"shard_size": 2}}))
    arguments = ["plan", "--model", "gpt2", "--config", str(path), "--host-memory", "2GiB", "--nodes", "2"]
    assert main([*arguments, "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "gathered, " in out
    assert "averaged over replicas" in out
    assert main([*arguments, "--ranks", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["averaged_bytes_per_step"] == facts["reduced_bytes_per_step"] > 0, "half of a half, there and back"
    assert main([*arguments, "--ranks", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["averaged_bytes_per_step"] == 0
    assert main([*arguments, "--nodes", "1", "--ranks", "3"]) != 0
    assert "choose a divisor of 3" in capsys.readouterr().err


def test_a_trillion_parameters_are_planned_in_seconds(capsys) -> None:
    machine = ["--ranks", "16", "--device-memory", "128GiB", "--machine-memory", "1.5TB", "--nvme-capacity", "28TB"]
    rates = ["--flops", "70e12", "--link", "12GB", "--collectives", "100GB", "--disk", "25GB"]
    more = ["--checkpoint-activations", "--optimizer-rate", "3e9", "--precision", "fp16"]
    assert main(["plan", "--params", "128x25600", *machine, *rates, *more, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["params"] == pytest.approx(1e12, rel=0.02)
    assert facts["step"]["unknown"] == []
    assert facts["machine_nvme_bytes"] < 28e12


def test_options_that_need_others_say_so(tmp_path, capsys) -> None:
    model = ["--model", "gpt2:tiny", "--config", config_file(tmp_path)]
    assert main(["plan", *model, "--plot", "x.png"]) == 2
    assert "--plot draws a sweep" in capsys.readouterr().err
    assert main(["plan", *model, "--profile", str(tmp_path / "config.json")]) == 2
    assert "is no profile" in capsys.readouterr().err
