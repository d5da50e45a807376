"""Decoders of a given number of parameters."""

from __future__ import annotations

import pytest

from infinity.planner import Shape, decoder_of, shape_of


@pytest.mark.parametrize("params", [1e8, 7e9, 70e9, 1e12, 32e12])
def test_a_shape_is_within_two_hundredths_and_of_usual_proportions(params) -> None:
    shape = shape_of(params)
    assert shape.params == pytest.approx(params, rel=0.02)
    assert 20 < shape.width / shape.layers < 300


@pytest.mark.parametrize("tiles", [1, 4])
def test_the_model_has_as_many_parameters_as_its_shape_says(tiles) -> None:
    shape = Shape(3, 128)
    assert sum(param.numel() for param in decoder_of(shape, tiles).parameters()) == shape.params


@pytest.mark.parametrize("params", [1e3, float("nan"), float("inf"), -1.0])
def test_what_is_no_model_is_refused(params) -> None:
    with pytest.raises(ValueError, match="parameters"):
        shape_of(params)
