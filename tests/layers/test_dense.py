"""Tests of Dense and Flatten: after a trunk that is cut; rejected inputs."""

import pytest

from halograd.layers import Conv, Dense, Flatten, Input, MaxPool
from halograd.testing import check_layer


@pytest.mark.mpi
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
def test_a_classifier_behind_a_cut_trunk(backend, dtype):
    def chain():
        def build(x):
            x = MaxPool(2)(Conv(3, 3, padding=1, activation="relu", name="c")(x))
            return Dense(4, name="d2")(Dense(5, name="d1")(Flatten()(x)))

        return build

    check_layer(chain, (8, 7, 2), gradient=False, backend=backend, dtype=dtype, batch=3)


def test_shapes_parameters_and_flops():
    assert Flatten().output_shape((3, 4, 5)) == (60,)
    layer = Dense(4)
    assert layer.output_shape((6,)) == (4,)
    assert {k: p.shape for k, p in layer.parameters((6,)).items()} == {"w": (4, 6), "b": (4,)}
    assert layer.flops((6,)) == 48


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"Dense: expected samples of shape \(F,\), got \(4, 4, 2\); put Flatten"):
        Dense(3)(Input((4, 4, 2)))
    with pytest.raises(ValueError, match="units must be at least 1, got 0"):
        Dense(0)
