"""Frozen parameters that are integers or other codes: in no unit, and part of every checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import CheckpointError
from infinity.checkpoint.conversion import convert
from infinity.checkpoint.dcp import export_dcp, import_dcp
from infinity.checkpoint.inspection import export_weights
from tests.behaviour.ranks import run_ranks

STORED = {"codes": torch.uint8, "mask": torch.bool, "small": torch.float8_e4m3fn, "turns": torch.complex64}


class Quantised(nn.Module):
    """A frozen base in codes below a trained layer."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        for name, dtype in STORED.items():
            values = torch.randint(0, 100, (width, 8), generator=drawn).float()
            values = values > 50 if dtype is torch.bool else values.to(dtype)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ (self.codes.float() / 100 * self.mask)).square().mean()  # type: ignore[operator]


class WithoutMask(Quantised):
    """The same, but for one of its codes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        del self.mask


def engine_of(model: nn.Module, tier: str, path: Path, **settings: Any) -> infinity.Engine:
    offload = {"device": tier, "nvme_path": str(path)}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero}
    return infinity.initialize(model=model, config=config | settings, device="cpu")[0]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: model.get_parameter(name).detach().clone() for name in STORED}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in STORED)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("blocking", [True, False])
def test_codes_are_restored(tier, blocking, tmp_path) -> None:
    saved, other = Quantised(0), Quantised(1)
    with engine_of(saved, tier, tmp_path / "one") as engine:
        engine.save_checkpoint(tmp_path / "saved", blocking=blocking)
        engine.wait_checkpoint()
    assert not same(values_of(saved), values_of(other))
    with engine_of(other, tier, tmp_path / "two") as engine:
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
        assert same(values_of(other), values_of(saved))
        assert same(engine.state_dict(), values_of(saved))
        listed = dict(engine.named_parameters())
        assert list(listed) == [name for name, _ in other.named_parameters()]
        assert same(listed, values_of(saved))
    export_weights(tmp_path / "saved", tmp_path / "exported")
    (file,) = (tmp_path / "exported").glob("*.safetensors")
    assert set(STORED) <= set(infinity_tensors(file))


def infinity_tensors(file: Path) -> list[str]:
    from safetensors import safe_open  # noqa: PLC0415

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def on_a_rank(path: Path) -> bool:
    saved, other = Quantised(0), Quantised(1)
    with engine_of(saved, "cpu", path) as engine:
        engine.save_checkpoint(path / "saved")
    with engine_of(other, "cpu", path) as engine:
        engine.load_checkpoint(path / "saved")
    return same(values_of(other), values_of(saved))


def test_codes_are_restored_on_every_rank(tmp_path) -> None:
    assert run_ranks(2, on_a_rank, tmp_path, path=tmp_path) == [True, True]


def test_codes_of_another_model_are_refused(tmp_path) -> None:
    with engine_of(Quantised(0), "cpu", tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "whole")
    other = Quantised(1)
    other.mask = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    with (
        engine_of(other, "cpu", tmp_path) as engine,
        pytest.raises(CheckpointError, match=r"has mask as \(8, 8\) of torch.bool; the model has \(3,\) of"),
    ):
        engine.load_checkpoint(tmp_path / "whole")
    with (
        engine_of(WithoutMask(1), "cpu", tmp_path) as engine,
        pytest.raises(CheckpointError, match=r"has a parameter mask of torch\.bool, which the model does not have"),
    ):
        engine.load_checkpoint(tmp_path / "whole", load_module_only=True, strict_model=False)


def test_codes_that_were_left_out_are_kept_if_that_is_asked_for(tmp_path, caplog) -> None:
    with engine_of(Quantised(0), "cpu", tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "trained", exclude_frozen_parameters=True)
    with engine_of(Quantised(1), "cpu", tmp_path) as engine, caplog.at_level(logging.WARNING):
        with pytest.raises(CheckpointError, match=r"has no parameter codes: .*load_module_strict=False"):
            engine.load_checkpoint(tmp_path / "trained")
        engine.load_checkpoint(tmp_path / "trained", load_module_strict=False)
        assert "has no `codes` and 3 other parameters of codes" in caplog.text


def test_a_damaged_file_of_codes_is_refused_before_anything_changes(tmp_path) -> None:
    with engine_of(Quantised(0), "cpu", tmp_path) as engine:
        path = engine.save_checkpoint(tmp_path / "saved")
    damage(path / "codes.safetensors")
    other = Quantised(1)
    with engine_of(other, "cpu", tmp_path) as engine:
        with pytest.raises(CheckpointError, match=r"codes\.safetensors"):
            engine.load_checkpoint(tmp_path / "saved", tag=path.name)
        assert same(values_of(other), values_of(Quantised(1)))


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_codes_travel_through_conversions(tmp_path) -> None:
    """To two ranks and another state format, and through `torch.distributed.checkpoint`."""
    saved, other = Quantised(0), Quantised(1)
    with engine_of(saved, "cpu", tmp_path) as engine:
        engine.backward(engine(torch.randn(2, 8)))
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "of-two", state_format="bf16", ranks=2)
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "imported")
    for name in ("of-two", "imported"):
        with engine_of(other, "cpu", tmp_path) as engine:
            engine.load_checkpoint(tmp_path / name, load_module_only=True)
            assert same(values_of(other), values_of(saved)), name
        other = Quantised(1)


def test_a_run_goes_on_with_the_same_codes_alone(tmp_path) -> None:
    settings = {"tiering": {"crash_consistent": True}}
    with engine_of(Quantised(0), "nvme", tmp_path, **settings) as engine:
        engine.backward(engine(torch.randn(2, 8)))
        engine.step()
    with (
        engine_of(Quantised(1), "nvme", tmp_path, **settings) as engine,
        pytest.raises(CheckpointError, match="parameter `codes` has other codes than the run of"),
    ):
        engine.resume()
    with engine_of(Quantised(0), "nvme", tmp_path, **settings) as engine:
        assert engine.resume()[0] is not None


def test_codes_are_in_none_of_the_files_that_are_read_whole(tmp_path) -> None:
    """Those may have a gibibyte, and a quantised base has tens of them."""
    saved, other = Quantised(0), Quantised(0)
    for model, value in ((saved, 7), (other, 0)):
        model.large = nn.Parameter(torch.full((5 << 20,), value, dtype=torch.uint8), requires_grad=False)
    with engine_of(saved, "cpu", tmp_path) as engine:
        path = engine.save_checkpoint(tmp_path / "saved")
    assert sum(file.stat().st_size for file in path.iterdir() if file.suffix != ".safetensors") < 1 << 20
    with engine_of(other, "cpu", tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "saved")
    assert (other.large == 7).all()
