"""Tests of Dense and Flatten: after a trunk that is cut; rejected inputs."""

import pytest

from halograd.layers import Dense, Flatten, Input


def test_shapes_parameters_and_flops():
    assert Flatten().output_shape((3, 4, 5)) == (60,)
    layer = Dense(4)
    assert layer.output_shape((6,)) == (4,)
    assert {k: p.shape for k, p in layer.parameters((6,)).items()} == {"w": (4, 6), "b": (4,)}
    assert layer.flops((6,)) == 48


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"Dense: expected .* got \(4, 4, 2\)"):
        Dense(3)(Input((4, 4, 2)))
    with pytest.raises(ValueError, match="units must be at least 1, got 0"):
        Dense(0)
