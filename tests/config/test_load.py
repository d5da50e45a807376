"""A configuration is honoured, or refused with a message that says what to do."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import format_size, load_config, parse_size, read_json, size_to_set, write_json
from infinity.config.keys import CHOICES, NO_EFFECT, REFUSED
from infinity.errors import ConfigError

NVME = {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}}


def test_what_is_written_replaces_files_and_neither_links_nor_devices(tmp_path) -> None:
    file, link, full = tmp_path / "file.json", tmp_path / "link.json", tmp_path / "full.json"
    link.symlink_to(file)
    full.symlink_to("/dev/full")
    write_json(link, {"stage": 3}, "the file")
    assert read_json(file) == {"stage": 3}
    with pytest.raises(ConfigError, match=r"the file cannot be written to .*full\.json: No space left on device"):
        write_json(full, {}, "the file")
    assert sorted(tmp_path.iterdir()) == [file, full, link]
    assert link.is_symlink()
    assert full.is_symlink()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16MiB", 16 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 << 29),
        (4096, 4096),
        ("5e8", 5 * 10**8),
        (2e9, 2 * 10**9),
    ],
)
def test_sizes(text, nbytes) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["16 miles", "", "-1", True, "MiB"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sizes_are_printed_in_the_unit_that_suits() -> None:
    assert [format_size(n) for n in (5, 1536, 3 << 29)] == ["5 B", "1.50 KiB", "1.50 GiB"]


@given(st.integers(0, 1 << 60))
def test_a_size_to_set_is_read_as_enough(nbytes) -> None:
    assert nbytes <= parse_size(size_to_set(nbytes)) <= nbytes + max(0, nbytes // 100)
    assert [size_to_set(n) for n in (5, 1536, (1 << 30) + 1)] == ["5B", "1.50KiB", "1.01GiB"]


def test_defaults_are_deepspeeds() -> None:
    config = load_config({})
    assert config.gradient_clipping == 1.0
    assert config.zero.stage == 0
    assert config.precision == "fp32"
    assert (config.micro_batch_size, config.gradient_accumulation_steps, config.train_batch_size) == (1, 1, 1)


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2, (4, 4, 32)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 2, (8, 2, 32)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}, 1, (4, 8, 32)),
        ({"train_batch_size": 6}, 3, (2, 1, 6)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}, 1, (2, 1, 2)),
    ],
)
def test_batch_sizes_complete_one_another(given, world, expected) -> None:
    config = load_config(given, world_size=world)
    assert (config.micro_batch_size, config.gradient_accumulation_steps, config.train_batch_size) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4},
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
    ],
)
def test_batch_sizes_that_contradict_one_another_are_refused_with_the_numbers(given) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size is \d+.* \(4\).*must equal"):
        load_config(given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_optimisation": {}}, "did you mean `zero_optimization`"),
        (
            {"zero_optimization": {"stage": 3, "offload_params": {}}},
            "did you mean `zero_optimization.offload_param`",
        ),
        ({"tiering": {"host_mem": "1GiB"}}, "did you mean `tiering.host_memory`"),
        ({"xyzzy": 1}, "docs/configuration.md"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_name(values, message) -> None:
    with pytest.raises(ConfigError, match="unknown configuration key") as refused:
        load_config(values)
    assert message in str(refused.value)


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_every_refused_key_says_why(path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({path: "unwanted"})
    assert str(refused.value).startswith(f"{path} is 'unwanted'")
    assert REFUSED[path] in str(refused.value)


@pytest.mark.parametrize("path", sorted(NO_EFFECT))
def test_every_key_without_effect_is_accepted_with_a_log_line(path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        load_config({"optimizer": {"type": "AdamW"}, path: CHOICES.get(path, (1,))[0]})
    assert path in caplog.text
    assert NO_EFFECT[path] in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is True; it must be a number"),
        ({"zero_optimization": True}, "zero_optimization is True; it must be an object"),
        ({"checkpoint": 3}, "checkpoint is 3; it must be an object"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1; it must be greater than or equal to 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping is inf; it must be a finite number"),
        ({"gradient_clipping": "abc"}, "gradient_clipping is 'abc'; it must be a valid number"),
        ({"fp16": {"loss_scale": float("inf")}}, "fp16.loss_scale is inf; it must be a finite number"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale is True; it must be a number"),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 8, "initial_scale_power": 2}},
            "fp16.min_loss_scale is 8, above the initial scale, 4",
        ),
        ({"train_batch_size": True}, "train_batch_size is True; it must be a number"),
        ({"train_batch_size": 2.5}, "train_batch_size is 2.5; it must be a valid integer"),
        ({"bfloat16": {"enabled": "x"}}, "bfloat16.enabled is 'x'"),
        ({"communication_data_type": "int8"}, "communication_data_type is 'int8'; it must be 'fp32', 'fp16' or 'bf16'"),
        (
            {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "bf16"}},
            "grad_accum_dtype is bf16 but the model trains in fp32",
        ),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
        ({"tiering": {"host_memory": 0}}, "tiering.host_memory is 0"),
        ({"tiering": {"nvme": [{"path": "/a", "size": 1}]}}, "unknown configuration key `tiering.nvme.0.size`"),
        ({3: 4}, "configuration key 3 is not a string"),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled is 'perhaps'"),
        ({"tiering": {"tile_size": "big"}}, "tiering.tile_size: 'big' is not a size"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"zero_optimization": NVME}, "no path is given"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0; it must be greater than or equal to 1"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(values, message) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(values)
    assert message in str(refused.value)


def test_common_spellings_are_understood() -> None:
    config = load_config(
        {
            "bfloat16": {"enabled": "true"},
            "zero_optimization.stage": 3,
            "zero_optimization": {"stage3_param_persistence_threshold": 1e4, "reduce_bucket_size": 2e8},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        }
    )
    assert config.precision == "bf16"
    assert config.zero.stage == 3
    assert config.zero.param_persistence_threshold == 10_000
    assert config.optimizer is not None
    assert dict(config.optimizer.params) == {"betas": [0.9, 0.95]}


def test_a_static_loss_scale_needs_no_room_above_the_least() -> None:
    config = load_config({"fp16": {"enabled": True, "loss_scale": 4, "initial_scale_power": 2, "min_loss_scale": 8}})
    assert config.fp16 is not None
    assert config.fp16.loss_scale == 4


@pytest.mark.parametrize(("section", "expected"), [("fp16", "fp16"), ("bf16", "bf16"), (None, "fp32")])
def test_gradients_travel_in_the_precision_unless_told_otherwise(section, expected) -> None:
    values = {} if section is None else {section: {"enabled": True}}
    assert load_config(values).communication_data_type == expected
    config = load_config(values | {"communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "fp32"}})
    assert (config.communication_data_type, config.grad_accum_dtype) == ("fp32", "fp32")
    load_config(values | {"data_types": {"grad_accum_dtype": "fp16"}})  # nothing is accumulated


def test_auto_and_null_stand_for_the_default(caplog) -> None:
    values = {"gradient_clipping": "auto", "fp16": {"hysteresis": "auto"}, "bf16": None, "train_batch_size": "auto"}
    with caplog.at_level(logging.INFO):
        assert load_config(values) == load_config({})
    assert "key gradient_clipping is auto: 1.0, the default" in caplog.text
    assert "key fp16.hysteresis is auto: 2, the default" in caplog.text


def test_nvme_paths_come_from_tiering_or_from_the_offload_sections() -> None:
    section = {"device": "nvme", "nvme_path": "/a"}
    config = load_config({"zero_optimization": {"stage": 3, "offload_param": section, "offload_optimizer": section}})
    assert [nvme.path for nvme in config.tiering.nvme] == [Path("/a")]
    config = load_config({"zero_optimization": NVME, "tiering": {"nvme": [{"path": "/b", "capacity": "2GiB"}]}})
    assert [(nvme.path, nvme.capacity_bytes) for nvme in config.tiering.nvme] == [(Path("/b"), 2 << 30)]


def test_a_directory_counts_as_one_drive(tmp_path) -> None:
    drive, link = tmp_path / "drive", tmp_path / "link"
    link.symlink_to(drive)
    for other in (str(link), f"{drive}/", f"{tmp_path}/./drive"):
        with pytest.raises(ConfigError, match=r"tiering.nvme has .*: give each directory once"):
            load_config({"tiering": {"nvme": [{"path": str(drive)}, {"path": other}]}})
        sections = {
            "offload_param": {"device": "nvme", "nvme_path": str(drive)},
            "offload_optimizer": {"device": "nvme", "nvme_path": other},
        }
        assert len(load_config({"zero_optimization": {"stage": 3, **sections}}).tiering.nvme) == 1


@pytest.mark.parametrize(
    ("device", "drives", "mib"), [("none", 2, 256), ("cpu", 2, 256), ("nvme", 1, 4), ("nvme", 3, 12), ("nvme", 8, 16)]
)
def test_a_tile_is_large_in_host_memory_and_small_on_few_drives(device: str, drives: int, mib: int) -> None:
    values = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}},
        "tiering": {"nvme": [{"path": f"/{drive}"} for drive in range(drives)]},
    }
    assert load_config(values).tiering.tile_size_bytes == mib << 20
    values["tiering"]["tile_size"] = "1MiB"
    assert load_config(values).tiering.tile_size_bytes == 1 << 20


def test_a_file_that_is_missing_or_broken_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*missing\.json"):
        load_config(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": }')
    with pytest.raises(ConfigError, match=r"broken\.json is not valid JSON: line 1"):
        load_config(broken)
    broken.write_text('{"bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError, match="key `enabled` is given twice"):
        load_config(broken)
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_config(broken)
    for source in (None, True, 1.0, [broken]):
        with pytest.raises(ConfigError, match=f"the configuration is a {type(source).__name__}; give a JSON file's"):
            load_config(source)  # type: ignore[arg-type]
    broken.write_text(json.dumps({"gradient_clipping": 0.5}))
    assert load_config(broken).gradient_clipping == 0.5


@pytest.mark.parametrize(
    ("nvme", "message"),
    [
        ("/x", r"tiering.nvme is '/x'; write a list of drives: \[\{\"path\": \"/x\"\}\]"),
        ({"path": "/x"}, r"write a list of drives: \[\{\"path\": \"/x\"\}\]"),
        ('/"\ud800', r"write a list of drives: \[\{\"path\": \"/\\\"\\ud800\"\}\]"),
        (["/x", "/y"], r"write a list of objects: \[\{\"path\": \"/x\"\}, \{\"path\": \"/y\"\}\]"),
    ],
)
def test_a_path_in_the_place_of_the_drives_says_how_to_write_them(nvme, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"tiering": {"nvme": nvme}})


def test_keys_that_are_comments_are_left_out() -> None:
    values = {"_comment": "mine", "//": 1, "tiering": {"_comment_2": [], "# a.b": None, "host_memory": "1GiB"}}
    config = load_config(values)
    assert config.source == {"tiering": {"host_memory": "1GiB"}}
