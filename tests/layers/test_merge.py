"""Tests of Add and Concat: shared and summed gradients, rejected inputs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import Box
from halograd.layers import Add, Concat, Conv, Input
from halograd.testing import check_layer, compare, run_layer
from tests.support.refusals import refusals

SHAPE = (7, 6, 3)


CUT = ("sample", "width", "channel")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_concat_reads_what_its_channels_are_made_of(channels, data):
    low = data.draw(st.integers(0, sum(channels)))
    high = data.draw(st.integers(low, sum(channels)))
    boxes = Concat().input_boxes(Box((0, 2, low), (3, 4, high)), *[(6, c) for c in channels])
    origin = [(i, c) for i, n in enumerate(channels) for c in range(n)]
    read = [(i, c) for i, box in enumerate(boxes) for c in range(*box.ranges[-1])]
    assert read == origin[low:high]
    assert all(box.ranges[:-1] == ((0, 3), (2, 4)) and box.start[-1] <= box.stop[-1] for box in boxes)


@pytest.mark.ranks(3)
def test_concat_of_values_on_different_ranks():
    """Concat is exact for inputs from layers with different cuts, on different ranks."""
    make = lambda: lambda a, b: Concat(name="c")(Conv(4, 1, name="v")(a), b)  # noqa: E731
    with Communicator(MPI.COMM_SELF) as alone, Communicator(MPI.COMM_WORLD) as comm:
        for parts in ({"channel": 3}, {"channel": 2}, {"width": 3}):
            found = run_layer(make, [(5, 6, 3), (5, 6, 2)], comm, parts)
            fault = None
            if found is not None:
                want = run_layer(make, [(5, 6, 3), (5, 6, 2)], alone, {})
                fault = compare(found, want, 64.0, "float64", str(parts))
                assert np.isfinite(found["y"]).all()
            comm.agree(fault)


def residual(x):
    """Return the output of sums and Concat whose inputs all have several readers, so their gradients must not mix."""
    a = Conv(3, 3, padding=1, name="a")(x)
    b = Conv(3, 3, padding=1, name="b")(x)
    s = Add("relu")(a, b)
    t = Add()(s, a, b, s)
    return Concat()(t, a, Add()(t, b))


@pytest.mark.mpi
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
def test_exact_where_gradients_meet(backend, dtype):
    check_layer(lambda: residual, SHAPE, gradient=False, backend=backend, dtype=dtype)


def test_gradients_that_meet_are_the_derivative():
    check_layer(lambda: residual, SHAPE)


def test_shapes_and_flops():
    assert Concat().output_shape((4, 5, 2), (4, 5, 3)) == (4, 5, 5)
    assert Concat(axis="height").output_shape((4, 5, 2), (1, 5, 2)) == (5, 5, 2)
    assert Add().output_shape((4, 5, 2), (4, 5, 2)) == (4, 5, 2)
    assert Add().flops((4, 5, 2), (4, 5, 2), (4, 5, 2)) == 80


A, B = Input((4, 4, 2), "a"), Input((5, 4, 2), "b")
test_errors_name_what_is_wrong = refusals(
    (lambda: Add()(A, B), r"Add: expected .* got \(4, 4, 2\), \(5, 4, 2\)"),
    (lambda: Concat()(A, B), r"Concat: expected .* got \(4, 4, 2\), \(5, 4, 2\)"),
    (lambda: Concat()(), r"Concat: .* got no input"),
    (lambda: Concat(axis="width")(A, B), r"Concat: expected .* got \(4, 4, 2\)"),
    (lambda: Concat(axis="depth")(A, B), r"Concat: axis: expected .* got 'depth'"),
    (lambda: Add("tan"), r"activation: expected .* got 'tan'"),
)
