"""Plans for machines that are not here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.config import write_json
from infinity.planner.machines import MACHINES
from infinity.profiling.record import new_record

SMALL = ["plan", "--params", "50e6", "--checkpoint-activations", "--seq-len", "256", "--json"]


@pytest.fixture
def profile_file(tmp_path) -> Path:
    """Of a machine whose drives and processor are slow."""
    drive = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "mixed_bytes_per_s": 1e9}
    parts = {
        "drives": [{"path": "/drive", **drive}],
        "optimizer": [{"format": "split", "threads": 2, "params_per_s": 1e9, "bytes_per_s": 1e10}],
        "memory": [{"threads": 2, "triad_bytes_per_s": 1e10, "in_place_bytes_per_s": 1e10, "fresh_bytes_per_s": 1e10}],
        "products": [{"device": "cpu", "dtype": "bfloat16", "layout": "nt", "rows": 64, "flop_per_s": 1e11}],
    }
    write_json(tmp_path / "profile.json", new_record("0", 0.0, 0.0, parts), "the profile")
    return tmp_path / "profile.json"


def planned(capsys, *more: str) -> dict:
    assert main([*SMALL, *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_machine_has_all_that_a_step_needs(capsys) -> None:
    for name in MACHINES:
        step = planned(capsys, "--emulate", name, "--offload-param", "cpu", "--offload-optimizer", "cpu")["step"]
        assert step["step_s"] > 0
        assert not step["unknown"]


def test_what_the_command_line_says_comes_first(capsys, tmp_path) -> None:
    homes = ("--offload-param", "cpu", "--offload-optimizer", "cpu")
    slow = planned(capsys, "--emulate", "H200", "--flops", "1e12", *homes)["step"]["parts_s"]["compute"]
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(asdict(MACHINES["H200"]) | {"flops": 1e12}))
    assert planned(capsys, "--emulate", str(file), *homes)["step"]["parts_s"]["compute"] == pytest.approx(slow)


def test_states_on_the_device_put_nothing_on_the_link_and_sums_leave_once(capsys, tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "tiering": {"fill_device": False}}))

    def link_s(*more: str) -> float:
        homes = ("--stage", "3", "--micro-batch-size", "1", "--offload-param", "none")
        plan = planned(capsys, "--emulate", "H200", "--config", str(file), *homes, *more)
        return plan["step"]["parts_s"]["link"]

    once = link_s("--offload-optimizer", "cpu")
    assert once > 0
    assert link_s("--offload-optimizer", "none") == 0
    assert link_s("--offload-optimizer", "cpu", "--accumulation", "8") < 3 * once  # twice the bytes, in float32


def test_it_says_that_nothing_is_measured(capsys) -> None:
    assert main([*SMALL[:-1], "--emulate", "4090"]) == 0
    assert "4090, emulated: all numbers are computed, none was measured on it" in capsys.readouterr().out
    facts = planned(capsys, "--emulate", "4090")
    assert (facts["emulated"], facts["measured"]) == ("4090", False)


def test_a_profile_has_the_drives_and_the_optimizer_unless_a_file_says_them(capsys, tmp_path, profile_file) -> None:
    def parts(*more: str) -> dict[str, float]:
        return planned(capsys, "--offload-param", "cpu", "--host-memory", "475MB", *more)["step"]["parts_s"]

    assumed, measured = parts("--emulate", "H200"), parts("--emulate", "H200", "--profile", str(profile_file))
    assert measured["disk"] > 2 * assumed["disk"]
    assert measured["optimizer"] > 2 * assumed["optimizer"]
    assert (measured["compute"], measured["link"]) == (assumed["compute"], assumed["link"])
    file = tmp_path / "machine.json"
    whole = asdict(MACHINES["H200"])
    file.write_text(json.dumps(whole))
    assert parts("--emulate", str(file), "--profile", str(profile_file)) == assumed
    file.write_text(json.dumps({key: value for key, value in whole.items() if key not in ("disk", "optimizer_rate")}))
    assert parts("--emulate", str(file), "--profile", str(profile_file)) == measured
    assert main([*SMALL, "--emulate", str(file)]) == 2


def test_the_share_of_the_states_on_the_device_is_in_the_plan(capsys, tmp_path) -> None:
    def plan(ratio: float, **tiering: object) -> dict:
        config = {
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
            "tiering": tiering,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return planned(capsys, "--emulate", "H200", "--config", str(tmp_path / "config.json"), "--params", "500e6")

    whole, half, nothing = plan(1), plan(0.5), plan(0)
    assert not whole["updated_on_device"]
    assert not whole["filled_later"]
    filled = plan(0.5, fill_device=True)
    assert {*filled["filled_later"], *filled["updated_on_device"]} == set(nothing["updated_on_device"])
    assert not {*filled["filled_later"]} & {*filled["updated_on_device"]}
    assert not plan(0.5, fill_device=True, device_headroom=0.97)["filled_later"]
    assert half["updated_on_device"][0] == half["units"][0]["name"]
    assert 0.3 < half["states_on_device_bytes"] / nothing["states_on_device_bytes"] <= 0.5
    for part in ("link", "optimizer"):
        below = half["step"]["parts_s"][part] / whole["step"]["parts_s"][part]
        assert below == pytest.approx(1 - half["states_on_device_bytes"] / nothing["states_on_device_bytes"], abs=0.02)
        assert nothing["step"]["parts_s"][part] == 0


def test_the_plan_fills_the_device_by_default_and_says_so(capsys, tmp_path) -> None:
    """The step is one after the first."""
    file = tmp_path / "config.json"
    base = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }

    def plan(*more: str, **tiering: object) -> dict:
        file.write_text(json.dumps(base | {"tiering": tiering}))
        return planned(capsys, "--emulate", "4090", "--config", str(file), "--params", "1.5e9", *more)

    def share_below(one: dict, part: str) -> float:
        return one["step"]["parts_s"][part] / below["step"]["parts_s"][part]

    filled, below = plan(), plan(fill_device=False)
    assert filled["filled_later"][0] == filled["units"][0]["name"]
    assert filled["optimizer_states"] == "100% stay on the device: beside measured activations, after the first step"
    assert filled["step"]["parts_s"]["optimizer"] == filled["step"]["parts_s"]["link"] == 0
    assert filled["step"]["step_s"] < below["step"]["step_s"]
    assert below["optimizer_states"] == "none stay on the device: tiering.fill_device is false"
    part = plan(device_headroom=0.5)
    assert part["optimizer_states"].endswith("beside measured activations, after the first step")
    share = int(part["optimizer_states"].split("%")[0]) / 100
    assert 0 < share < 1
    assert share_below(part, "optimizer") == pytest.approx(1 - share, abs=0.01)
    assert share_below(part, "link") == pytest.approx(1 - share, abs=0.02)
    limited = plan(device_memory="8GB")
    assert 0 < len(limited["filled_later"]) < len(filled["filled_later"])
    assert not plan(device_memory=filled["device_used_bytes"])["filled_later"], "the step takes all of it"
    speculative = plan(update_schedule="speculative")
    assert speculative["optimizer_states"].startswith("none stay on the device: tiering.update_schedule is speculative")
    assert share_below(speculative, "optimizer") == 1
    streamed = plan("--offload-param", "cpu")
    assert set(streamed["filled_later"]) < set(filled["filled_later"])
    assert streamed["filled_later"][0] == filled["filled_later"][0]
    assert plan(device_headroom=0.97)["optimizer_states"] == (
        "none stay on the device: beside activations and tiering.device_headroom there is no room for those of a unit"
    )
    assert main([*SMALL[:-1], "--emulate", "4090", "--config", str(file)]) == 0
    assert "  optimizer states: none stay on the device: beside" in capsys.readouterr().out


def test_an_h100_is_filled_as_one_was(capsys, tmp_path) -> None:
    """Measured on 2026-11-28: 59% of the states of an 8B Llama, beside a step that took 15.1 GB with its gradients."""
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "tiering": {"host_memory": "100GiB"},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    asked = ["plan", "--model", "llama:8b", "--seq-len", "2048", "--checkpoint-activations", "--json"]
    assert main([*asked, "--config", str(file), "--emulate", "H100"]) == 0
    facts = json.loads(capsys.readouterr().out)
    share = int(facts["optimizer_states"].partition("%")[0])
    assert 59 - 100 / 32 < share <= 59, "no more, and less than a block fewer"
    taken = facts["activation_bytes"] + facts["unit_grad_bytes"]
    assert 15.09e9 <= taken <= 1.07 * 15.09e9, "a unit's gradient counts beside the peak of the loss"


def test_states_of_the_drives_that_come_to_the_device_are_not_moved_any_more(capsys) -> None:
    """All are on NVMe without a configuration."""
    filled = planned(capsys, "--emulate", "H100", "--offload-param", "none", "--host-memory", "450MB")
    assert filled["optimizer_states"].startswith("100% stay on the device")
    assert filled["step"]["parts_s"]["disk"] == 0
    assert filled["nvme_bytes"] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such machine; there are H200"),
        ("{", "cannot be read"),
        ("{}", "must be an object with these numbers and no others: device_memory"),
        (json.dumps(asdict(MACHINES["4090"]) | {"link": -1}), "link is -1; it must be a number above 0"),
    ],
)
def test_what_is_no_machine_is_refused(content, message, tmp_path, capsys) -> None:
    name = "GTX"
    if content is not None:
        (tmp_path / "machine.json").write_text(content)
        name = str(tmp_path / "machine.json")
    assert main([*SMALL, "--emulate", name]) == 2
    assert message in capsys.readouterr().err
