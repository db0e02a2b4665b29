"""Tests of the description of our arrays for cuDNN."""

import itertools

import numpy as np
import pytest

from halograd.kernels import Geometry
from halograd.kernels.cudnn.graphs import Shapes, Tensor
from halograd.kernels.geometry import read_part
from halograd.kernels.memory import packed_strides
from tests.kernels.geometries import CASES


def test_packed_arrays_have_numpys_strides():
    for shape in ((2, 3, 4, 5), (1, 1, 7), (3, 2, 2, 2, 6)):
        strides = np.empty(shape, np.int8).strides
        assert packed_strides(shape) == strides
        tensor = Tensor.packed(shape)
        assert tensor.dims == (shape[0], shape[-1], *shape[1:-1])
        assert tensor.strides == (strides[0], strides[-1], *strides[1:-1]) and tensor.is_packed


def test_leading_rows_of_one_sample_are_packed():
    one, two = (Tensor.leading((n, 8, 5, 3), (6, 5)) for n in (1, 2))
    assert one.is_packed and one.strides == (90, 1, 15, 3)
    assert not two.is_packed and two.strides == (120, 1, 15, 3)
    assert not Tensor.leading((1, 8, 5, 3), (8, 4)).is_packed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_cudnn_is_told_gives_the_same_outputs(case):
    s = Shapes.of(*(shape for shape in (case.shapes[0], case.shapes[1], case.shapes[3])), case.geometry)
    assert min(*s.before, *s.after) >= 0 and len(s.x.dims) >= 4
    outputs = tuple(
        (n + lo + hi - d * (k - 1) - 1) // stride + 1
        for n, lo, hi, k, stride, d in zip(s.x.dims[2:], s.before, s.after, s.w.dims[2:], s.stride, s.dilation)
    )
    assert outputs == s.y.dims[2:]
    assert s.x.dims[1] == s.w.dims[1] * case.geometry.groups


def test_dropped_rows_are_left_out_only_where_they_matter():
    """For every small geometry of one axis, the selected part without negative padding gives the same outputs."""
    for n, k, s, d, lo, hi in itertools.product((5, 8), (1, 3, 4), (1, 2, 3), (1, 2), (0, 1), (-2, -1, 0, 1)):
        geometry = Geometry.of((k,), s, ((lo, hi),), d)
        (part,), read = read_part((n,), geometry)
        ((_, behind),) = read.padding
        outputs = geometry.output_shape((n,))
        if outputs == (0,):
            continue
        assert behind == max(0, hi)
        assert Geometry.of((k,), s, ((lo, behind),), d).output_shape((part,)) == outputs
        if hi >= 0:
            assert part == n
        elif Geometry.of((k,), s, ((lo, 0),), d).output_shape((n,)) == outputs:
            assert part == n, "the stride skips them anyway"
        else:
            assert part == n + hi


def test_one_axis_becomes_two():
    s = Shapes.of((2, 11, 5), (7, 4, 5), (2, 5, 7), Geometry.of((4,), 2, ((2, 1),), dilation=2))
    assert s.x.dims == (2, 5, 1, 11) and s.w.dims == (7, 5, 1, 4) and s.y.dims == (2, 7, 1, 5)
    assert (s.before, s.after, s.stride, s.dilation, s.part) == ((0, 2), (0, 1), (1, 2), (1, 2), (11,))
