"""What may be chosen, and that a file's other keys stay as their author left them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from infinity.config import edited, load_config
from infinity.config.typed import parsed
from infinity.errors import ConfigError
from infinity.tuning import KNOBS, Limits, Setting, choices_of, keys_of, setting_of
from infinity.tuning.space import canonical

VALUES = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
    "optimizer": {"params": {"lr": 1e-3}, "type": "AdamW"},
    "bf16": {"enabled": True},
    "gradient_clipping": 0,
    "tiering": {"nvme": [{"path": "."}], "host_memory": "1GiB", "update_schedule": "barrier"},
    "aio": {"block_size": "16KiB", "queue_depth": 1},
}


NO_LIMITS = Limits()


def choices(changes=None, limits=NO_LIMITS, **more):
    return choices_of(load_config(edited(VALUES, changes or {})), limits, **more)


def test_the_given_value_comes_first_and_nothing_that_changes_numbers_is_offered() -> None:
    found = choices(aio=[(1 << 20, 32, "auto")])
    given = setting_of(load_config(VALUES))
    assert {knob: values[0] for knob, values in found.items()} == {knob: getattr(given, knob) for knob in KNOBS}
    assert found["state_format"] == ("split",)
    assert set(found["schedule"]) == {"barrier", "backward", "deferred"}
    assert all(micro * count == 8 for micro, count, _ in found["batch"])
    assert {order for _, _, order in found["batch"]} == {"micro_batch", "layer"}
    assert found["memory"] == ((1 << 30, None),)
    assert set(found["placement"]) == {(a, b) for a in ("none", "nvme") for b in ("none", "nvme")}


def test_lossy_formats_need_a_word() -> None:
    assert set(choices(lossy=True)["state_format"]) == {"split", "bf16", "int8"}
    assert choices({"tiering.state_format": "int8"})["state_format"] == ("int8",)


@pytest.mark.parametrize(
    ("changes", "knob", "expected"),
    [
        ({"gradient_clipping": 1.0}, "schedule", {"barrier", "deferred"}),
        ({"managed_gradient_accumulation": False}, "batch", {(2, 4, "micro_batch")}),
        ({"gradient_accumulation_steps": "auto"}, "batch", {(8, 1, "micro_batch")}),
        (
            {"zero_optimization.offload_param.device": "none", "zero_optimization.stage": 2},
            "schedule",
            {"barrier", "auto"},
        ),
        (
            {"zero_optimization.offload_param.device": "none", "zero_optimization.stage": 1},
            "placement",
            {("none", "none"), ("none", "nvme")},
        ),
    ],
)
def test_what_is_promised_elsewhere_stays(changes, knob, expected) -> None:
    assert set(choices(changes)[knob]) == expected


def test_a_knob_that_is_kept_has_one_value() -> None:
    assert choices(keep=["batch", "placement"])["batch"] == ((2, 4, "micro_batch"),)


def test_memory_goes_to_the_limit_and_never_beyond() -> None:
    assert choices(limits=Limits(host_bytes=2 << 30))["memory"] == ((1 << 30, None), (2 << 30, None))
    assert choices({"tiering.host_memory": "auto"}, Limits(host_bytes=2 << 30))["memory"] == ((2 << 30, None),)
    with pytest.raises(ConfigError, match=r"tiering.host_memory is 1.00 GiB, above --host-memory 512.00 MiB"):
        choices(limits=Limits(host_bytes=512 << 20))


def test_a_setting_becomes_keys_of_the_file_and_comes_back() -> None:
    config = load_config(VALUES)
    given = setting_of(config)
    other = replace(
        given,
        placement=("none", "nvme"),
        schedule="deferred",
        tile=2 << 20,
        aio=(1 << 20, 32, "threads"),
        batch=(4, 2, "layer"),
        memory=(1536 << 20, None),
    )
    keys = keys_of(config, other)
    assert keys["tiering.host_memory"] == "1536MiB"
    assert keys["tiering.tile_size"] == "2MiB"
    assert setting_of(load_config(edited(VALUES, keys))) == other
    assert keys_of(config, given) == {}
    assert parsed(Setting, json.dumps(other.facts())) == other
    assert other.words(given).startswith("placement parameters none, states nvme; updates deferred")


def test_one_micro_batch_has_no_order() -> None:
    given = setting_of(load_config(VALUES))
    assert canonical(replace(given, batch=(8, 1, "layer")), given).batch == (8, 1, "micro_batch")


def test_sections_whose_paths_are_their_own_can_move() -> None:
    values = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/a"},
            "offload_optimizer": {"device": "cpu"},
        }
    }
    config = load_config(values)
    keys = keys_of(config, replace(setting_of(config), placement=("none", "nvme")))
    moved = load_config(edited(values, keys))
    assert [str(nvme.path) for nvme in moved.tiering.nvme] == ["/a"]
    assert moved.zero.offload_optimizer.device == "nvme"


# The file #


def test_order_spelling_and_unknown_keys_stay() -> None:
    values = {"b": 1, "zero_optimization.stage": 3, "tiering": {"tile_size": "1MiB", "x": {"y": 1}}, "mine": {"z": [1]}}
    after = edited(values, {"tiering.tile_size": "4MiB", "tiering.host_memory": "1GiB", "zero_optimization.stage": 2})
    assert json.dumps(after) == json.dumps(
        {
            "b": 1,
            "zero_optimization.stage": 2,
            "tiering": {"tile_size": "4MiB", "x": {"y": 1}, "host_memory": "1GiB"},
            "mine": {"z": [1]},
        }
    )
    assert values["tiering"] == {"tile_size": "1MiB", "x": {"y": 1}}


def test_an_old_switch_goes_where_its_section_is_given() -> None:
    values = {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    after = edited(values, {"zero_optimization.offload_optimizer.device": "none"})
    assert after == {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    assert load_config(after).zero.offload_optimizer.device == "none"


def test_a_value_where_a_section_should_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="aio is 3; it must be an object"):
        edited({"aio": 3}, {"aio.queue_depth": 1})
    assert edited({"aio": None}, {"aio.queue_depth": 1}) == {"aio": {"queue_depth": 1}}
