"""Whatever a configuration holds, what comes of it is a Config or a ConfigError that names the key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.config import Config, load_config, parse_size, with_values
from infinity.config.load import known_keys
from infinity.errors import ConfigError
from infinity.io import IoOptions
from tests.behaviour.reference import Placement, Recipe

KEYS = sorted(path for path, _ in known_keys() if not path.startswith("tiering.nvme."))  # a list's
ODD_NUMBERS = (float("nan"), float("inf"), -float("inf"), 10**400, 2**63, -1, 0, 1e300, 0.5)
ODD_TEXTS = ("", "auto", "inf", "1e400", "9" * 5000, "-1", "nan", "a\0b", "\ud800", "16MiB", "true")
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(ODD_NUMBERS + ODD_TEXTS)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), VALUES, max_size=4))
def test_any_value_at_any_key_gives_a_config_or_a_config_error(values: dict[str, Any]) -> None:
    try:
        found: Config | ConfigError = load_config(values)
    except ConfigError as error:
        found = error
    assert isinstance(found, Config) or len(str(found)) < 1000


@settings(max_examples=200)
@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda middle: b'{"a": ' + middle + b"}"))
def test_any_bytes_in_the_file_give_a_config_or_a_config_error(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_bytes(content)
    try:
        found: Config | ConfigError = load_config(path)
    except ConfigError as error:
        found = error
    assert isinstance(found, Config) or "fuzzed.json" in str(found) or "configuration key" in str(found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe{}", r"is not UTF-8 \(byte 0xff at offset 0\): save it as UTF-8"),
        (b'{"a": "\xe4"}', r"is not UTF-8 \(byte 0xe4 at offset 7\)"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"zero_optimization": ' * 50 + b"{}" + b"}" * 50, "nested more than 32 levels deep"),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "train_batch_size is inf; it must be a"),
        (b'{"gradient_clipping": NaN}', "gradient_clipping is nan; it must be"),
        (b'{"gradient_clipping": 1e999}', "gradient_clipping is inf; it must be a finite number"),
        (b'{"train_batch_size": Infinity}', "train_batch_size is inf"),
        (b'{"aio": {}, "aio": {}}', "`aio` is given twice"),
        (b"", "is not valid JSON: line 1, column 1"),
        (b"null", "must hold a JSON object, not NoneType"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(content, message, tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 4}')
    assert load_config(path).train_batch_size == 4


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "no regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (lambda path: path.symlink_to(path), "cannot read the configuration"),
        (lambda path: path.write_bytes(b"") or os.truncate(path, 1 << 40), "is it the right file"),
        (lambda path: None, "cannot read the configuration"),
    ],
)
def test_what_is_no_file_is_refused_without_waiting(make, message, tmp_path) -> None:
    path = tmp_path / "ds.json"
    make(path)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_path_with_a_null_character_is_refused() -> None:
    with pytest.raises(ConfigError, match="null"):
        load_config("ds\0.json")


@pytest.mark.parametrize(
    ("key", "value", "demand"),
    [
        ("aio.block_size", 1, "multiple of 4096"),
        ("aio.block_size", 5000, "multiple of 4096"),
        ("aio.block_size", "3TiB", "less than or equal to"),
        ("aio.queue_depth", 1e9, "less than or equal to 4096"),
        ("aio.queue_depth", 10**400, "number of more than 300 digits"),
        pytest.param(
            "optimizer.params.lr", 10**5000, "number of more than 300 digits", id="optimizer.params.lr-endless"
        ),
        ("aio.intra_op_parallelism", 1e9, "less than or equal to 1024"),
        ("tiering.host_memory", "inf", ": 'inf' is not a size; write bytes"),
        ("tiering.host_memory", "1e400", "more than any machine has"),
        ("tiering.host_memory", -1, "is not a size"),
        ("tiering.host_memory", float("nan"), "is not a size"),
        ("tiering.tile_size", "9" * 5000, "more than any machine has"),
        ("tiering.nvme", [{"path": "a\0b"}], "null characters"),
        ("tiering.nvme", [{"path": "\ud800"}], "encodable"),
        ("tiering.nvme", [{"path": None}], "valid string"),
        ("tiering.timeline", "a\0b", "null characters"),
        ("zero_optimization.offload_param.nvme_path", "", "not empty"),
        ("fp16.loss_scale_window", 1e300, "less than"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(key, value, demand) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){key}.*{demand}") as refused:
        load_config({key: value})
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("key", [key for key in KEYS if not key.endswith(".type")])  # a section's, which must have it
def test_null_is_as_if_the_key_were_not_there(key) -> None:
    beside = {"optimizer.type": "AdamW", "scheduler.type": "WarmupLR"}
    beside = {path: value for path, value in beside.items() if path.startswith(key.split(".")[0])}
    beside = {} if key in ("optimizer", "scheduler", *beside) else beside
    assert load_config({**beside, key: None}) == load_config(beside)


def test_values_take_the_place_of_null_and_missing_sections(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"tiering": None, "aio": {"queue_depth": 4}}))
    changed = with_values(path, {"tiering.host_memory": "1GiB", "optimizer.params.lr": 0.1})
    assert changed == {
        "tiering": {"host_memory": "1GiB"},
        "aio": {"queue_depth": 4},
        "optimizer": {"params": {"lr": 0.1}},
    }
    with pytest.raises(ConfigError, match="aio is 3; it must be an object"):
        with_values({"aio": 3}, {"aio.queue_depth": 4})


@pytest.mark.parametrize("size", ["1e309", "inf", "1" * 400, float("inf"), 2**62])
def test_a_size_beyond_all_machines_is_no_overflow(size) -> None:
    with pytest.raises(ValueError, match=r"not a size|more than any machine has"):
        parse_size(size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size_bytes": 5000}, "block size is 5000 bytes; it must be a multiple of 4096"),
        ({"block_size_bytes": 0}, "block size is 0"),
        ({"queue_depth": 10**9}, "between 1 and 4096"),
        ({"threads": 0}, "between 1 and 1024"),
    ],
)
def test_options_of_an_engine_are_refused_before_the_kernel_would(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        IoOptions(**options)


# Models with nothing in them #


class WithNothing(nn.Module):
    """Two layers, and parameters without elements in a place of their own."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.place = place
        if place == "block":
            self.blocks.append(nn.Sequential(nn.Identity()))
            self.blocks[2].nothing = nn.Parameter(torch.empty(3, 0))
        else:
            self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = self.blocks[2].nothing if self.place == "block" else self.nothing
        return self.blocks(x).sum() + nothing.sum()


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("place", ["model", "block"])
def test_parameters_without_elements_train_as_in_torch(place, home, tmp_path) -> None:
    config = Recipe("fp32").config(Placement(home, home, tmp_path / "swap"))
    config["gradient_clipping"] = 0
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}}
    torch.manual_seed(0)
    model = WithNothing(place)
    plain = WithNothing(place)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.01)
    inputs = torch.ones(2, 8)
    with infinity.initialize(model=model, config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(inputs))
            engine.step()
            plain(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.save_checkpoint(tmp_path / "saved")
        assert engine.load_checkpoint(tmp_path / "saved")[0] is not None
        trained = {name: value.clone() for name, value in engine.named_parameters()}
    for name, value in plain.named_parameters():
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_the_optimizer_takes_parameters_without_elements(offload, tmp_path) -> None:
    path = {"nvme_path": tmp_path} if offload == "nvme" else {}
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.empty(0))]
    optimizer = infinity.optim.AdamW(parameters, lr=0.1, offload=offload, **path)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    optimizer.state_dict()
    optimizer.close()
    assert (parameters[0] < 1).all()
    assert not list(Path(tmp_path).iterdir())
