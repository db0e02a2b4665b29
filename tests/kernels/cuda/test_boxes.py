"""Tests of copies between strided boxes, of their adjoint, and of filled margins."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halograd.kernels import KernelError
from halograd.kernels.cuda import launch
from halograd.kernels.cuda.boxes import join, joined_bytes

from .conftest import BFLOAT16, DTYPES


def numbers(shape, dtype, seed=0):
    """Return an aligned array of small integers, which every dtype represents exactly."""
    from halograd.kernels.memory import aligned_empty

    array = aligned_empty(shape, dtype)
    array[...] = np.random.default_rng(seed).integers(-8, 9, shape)
    return array


def faces(array, width=1):
    """Return views of the margins of (N, H, W, C) that eight neighbors own."""
    parts = (slice(0, width), slice(width, -width), slice(-width, None))
    return [array[:, a, b] for i, a in enumerate(parts) for j, b in enumerate(parts) if (i, j) != (1, 1)]


@pytest.mark.parametrize("channels", [1, 3, 5, 8, 16])
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.uint8), np.dtype(np.int64)], ids=str)
def test_pack_and_unpack_all_neighbors(cuda, dtype, channels):
    """The eight messages of a block with margins are packed in one launch, and unpacked in one."""
    block, there = numbers((2, 6, 7, channels), dtype), numbers((2, 6, 7, channels), dtype, seed=1)
    views = faces(block)
    message = numbers((sum(v.size for v in views),), dtype, seed=2)
    parts, at = [], 0
    for view in views:
        parts.append(message[at : at + view.size].reshape(view.shape))
        at += view.size
    cuda.launcher.launched.clear()
    cuda.boxes.copy(list(zip(views, parts)))()
    assert all(np.array_equal(v, p) for v, p in zip(views, parts))
    untouched = there[:, 1:-1, 1:-1].copy()
    cuda.boxes.copy(list(zip(parts, faces(there))))()
    assert all(np.array_equal(v, w) for v, w in zip(views, faces(there)))
    assert np.array_equal(there[:, 1:-1, 1:-1], untouched)
    assert len(cuda.launcher.launched) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [3, 16])
def test_add_into_is_the_adjoint_of_copy(cuda, dtype, channels):
    """Adding unpacked messages is the adjoint of packing: <pack x, y> = <x, unpack-add y>, exactly for integers."""
    x, gradient = numbers((1, 5, 6, channels), dtype), numbers((1, 5, 6, channels), dtype, seed=1)
    before = gradient.astype(np.float64)
    views = [x[:, :2], x[:, 3:, 1:4]]
    messages = [numbers(v.shape, dtype, seed=5 + i) for i, v in enumerate(views)]
    y = [m.astype(np.float64) for m in messages]
    cuda.boxes.add_into([(m, gradient[:, :2] if i == 0 else gradient[:, 3:, 1:4]) for i, m in enumerate(messages)])()
    added = gradient.astype(np.float64) - before
    cuda.boxes.copy(list(zip(views, messages)))()
    left = sum((m.astype(np.float64) * a).sum() for m, a in zip(messages, y))
    assert left == (x.astype(np.float64) * added).sum()
    assert added[:, 2].any() == 0


@st.composite
def slices(draw):
    """Return extents and a strided box of an array of up to five axes."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    box = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        box.append(slice(start, draw(st.integers(start + 1, n)), draw(st.integers(1, 2))))
    return tuple(shape), tuple(box)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=slices(), other=st.integers(0, 1), dtype=st.sampled_from(DTYPES))
def test_any_strides(cuda, drawn, other, dtype):
    shape, box = drawn
    source, target = numbers(shape, dtype), numbers((*shape[:-1], shape[-1] + other), dtype, seed=1)
    expected = target.copy()
    at = (*box[:-1], slice(box[-1].start + other, box[-1].stop + other, box[-1].step))
    expected[at] += source[box]
    expected_copy = target.copy()
    expected_copy[at] = source[box]
    copied = target.copy()
    cuda.boxes.copy([(source[box], copied[at])])()
    assert np.array_equal(copied, expected_copy)
    cuda.boxes.add_into([(source[box], target[at])])()
    assert np.array_equal(target, expected)


def test_copies_of_transposed_arrays(cuda):
    x, y = numbers((3, 4, 5), np.float32), numbers((5, 4, 3), np.float32)
    cuda.boxes.copy([(x.T, y)])()
    assert np.array_equal(y, x.T)


def as_rounded(source, dtype):
    """Return the values as the kernels convert them: float64 to 16 bits goes through float32."""
    with np.errstate(over="ignore"):
        middle = source.astype(np.float32) if dtype.itemsize == 2 else source
        return middle.astype(dtype)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversion(cuda, source, target):
    """One launch converts several boxes: long, odd and misaligned ones, and rows of an array with more channels."""
    if source == target:
        return
    random = np.random.default_rng(5)
    views = []
    for shape, at in (
        ((3001,), ()),
        ((4096,), ()),
        ((2, 5, 6, 3), (slice(None), slice(1, 4))),
        ((3, 7, 24), (..., slice(0, 18))),
        ((67,), (slice(1, None),)),
        ((4, 6), (slice(None), slice(None, None, 2))),
    ):
        pair = [numbers(shape, source), numbers(shape, target)]
        pair[0][...] = random.standard_normal(shape) * 1e3
        pair[0].reshape(-1)[2] = 3e38 if source.itemsize > 2 else 1e4
        views.append(tuple(pair))
        views[-1] = (*views[-1], pair[0][at], pair[1][at])
    before = [whole.copy() for _, whole, _, _ in views]
    want = [as_rounded(part, target) for *_, part, _ in views]
    cuda.launcher.launched.clear()
    cuda.boxes.copy([(part, into) for *_, part, into in views])()
    assert cuda.launcher.launched == ["convert_1"]
    for (_, whole, _, into), old, expected in zip(views, before, want):
        assert into.tobytes() == expected.tobytes()
        into[...] = 0
        outside = np.where(whole.astype(np.float64) == 0, whole, old)
        assert whole.tobytes() == outside.tobytes(), "beside the box"
    flat = views[1]
    cuda.boxes.copy([(flat[0], flat[1])])()
    assert flat[1].tobytes() == want[1].tobytes() and cuda.launcher.launched[-1] == "convert_4"


def test_conversion_of_rows_with_more_channels_is_by_pairs(cuda):
    """An input of 18 float32 channels is converted by pairs to 18 of 24 bfloat16 channels."""
    x, room = numbers((2, 5, 7, 18), np.float32), np.zeros((2, 5, 7, 24), BFLOAT16)
    cuda.launcher.launched.clear()
    cuda.boxes.copy([(x, room[..., :18])])()
    assert cuda.launcher.launched == ["convert_2"]
    assert np.array_equal(room[..., :18].astype(np.float32), x) and not room[..., 18:].any()


def test_conversion_and_copies_together(cuda):
    """Conversions and copies need one launch for each pair of dtypes, in any order of the arrays."""
    a, b = numbers((8,), np.float32), numbers((8,), np.float32, seed=1)
    x, y, z = (numbers((8,), dtype, seed=2) for dtype in (np.float32, BFLOAT16, np.float64))
    cuda.launcher.launched.clear()
    cuda.boxes.copy([(a, y), (a, x), (b, z)])()
    assert np.array_equal(x, a) and np.array_equal(y.astype(np.float32), a) and np.array_equal(z, b)
    assert sorted(cuda.launcher.launched) == ["convert_4", "convert_4", "copy_16"]


def test_conversion_of_special_values(cuda):
    source = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-8, 6e-8, 65519, 65520, 2.0**-14, -1e-6, 1.0], np.float32)
    for dtype in DTYPES[2:]:
        found, back = cuda.launcher.empty(source.shape, dtype), cuda.launcher.empty(source.shape, np.float32)
        cuda.boxes.copy([(source, found)])()
        want = as_rounded(source, dtype)
        assert np.isnan(found[0].astype(np.float32))
        assert found[1:].tobytes() == want[1:].tobytes()
        cuda.boxes.copy([(found, back)])()
        assert back[1:].tobytes() == want[1:].astype(np.float32).tobytes()


def test_many_pieces_and_long_pieces(cuda):
    """Pieces that need several thread blocks are copied together with pieces of one word."""
    x = numbers((3000,), np.float32)
    y = numbers((3000,), np.float32, seed=1)
    cuts = [0, 1, 2, 1030, 1031, 2100, 3000]
    cuda.boxes.copy([(x[a:b], y[a:b]) for a, b in pairwise(cuts)])()
    assert np.array_equal(x, y)


@pytest.mark.parametrize("value", [0, -1.5, -np.inf])
def test_fill(cuda, value):
    """Margins of arrays of several dtypes are filled by one launch per word size; the inside is unchanged."""
    made = [numbers((2, 5, 6, c), d) for d in DTYPES for c in (3, 8)]
    inside = [a[:, 1:-1, 1:-1].copy() for a in made]
    cuda.launcher.launched.clear()
    cuda.boxes.fill(value, *(view for a in made for view in faces(a)))()
    assert sorted(cuda.launcher.launched) == ["fill_16", "fill_2", "fill_4", "fill_8"]
    for a, kept in zip(made, inside):
        assert np.array_equal(a[:, 1:-1, 1:-1], kept)
        assert all((v.astype(np.float64) == value).all() for v in faces(a))


def test_fill_of_a_packed_array(cuda):
    a = numbers((1000,), BFLOAT16)
    cuda.boxes.fill(0, a)()
    assert not a.any()


def test_the_widest_word_is_taken(cuda):
    """Copies use words of 16 bytes if addresses and strides permit, otherwise the largest size that divides them."""
    x = numbers((2, 6, 8, 8), np.float32)
    assert joined_bytes("", x).lanes == 16
    assert joined_bytes("", x[:, :, 1:, 2:4]).lanes == 8
    assert joined_bytes("", x[..., 1:]).lanes == 4
    assert joined_bytes("", x[..., ::2]).lanes == 4
    assert joined_bytes("", numbers((7,), BFLOAT16)[1:]).lanes == 2
    assert joined_bytes("", numbers((3, 4), np.uint8)[:, 1:]).lanes == 1


def test_join():
    assert join((2, 1, 3, 4), [(12, 99, 4, 1)]) == ([24], [[1]])
    assert join((2, 3, 4), [(24, 4, 1), (12, 4, 1)]) == ([2, 12], [[24, 1], [12, 1]])
    assert join((1, 1), [(7, 3)]) == ([1], [[1]])


def test_large_offsets(cuda, monkeypatch):
    """The program for 64-bit offsets copies the same elements as that for 32 bits."""
    from halograd.kernels.cuda import boxes

    monkeypatch.setattr(boxes, "LARGE", 1)
    x, y = numbers((2, 5, 6, 3), np.float32), numbers((2, 5, 6, 3), np.float32, seed=1)
    cuda.boxes.copy([(x[:, 1:], y[:, :-1])])()
    assert np.array_equal(x[:, 1:], y[:, :-1])


def test_nothing_to_do(cuda):
    empty = np.empty((0, 3), np.float32)
    b, pairs = cuda.boxes, [(empty, empty)]
    for kernel in (b.copy([]), b.copy(pairs), b.add_into(pairs), b.fill(0, empty)):
        kernel()
    assert launch.power_of_two(0, 32) == 1


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((np.zeros((2, 3)), np.zeros((3, 2))), r"expected pairs of one shape, got \(2, 3\) and \(3, 2\)"),
        ((np.zeros(2, np.int32), np.zeros(2, np.float32)), "expected a dtype out of float32, .*, got int32; convert"),
    ],
)
def test_refused_pairs(cuda, pair, message):
    with pytest.raises(KernelError, match=message):
        cuda.boxes.copy([pair])


def test_refused_sums_and_axes(cuda):
    single, double = np.zeros(2, np.float32), np.zeros(2)
    with pytest.raises(KernelError, match="pairs of one dtype, got int32 and float32"):
        cuda.boxes.add_into([(np.zeros(2, np.int32), single)])
    with pytest.raises(KernelError, match="arrays of one dtype, got float32 and others"):
        cuda.boxes.add_into([(single, single), (double, double)])
    wide = np.zeros((4,) * 6, np.float32)[(slice(0, 3),) * 6]
    with pytest.raises(KernelError, match="at most 5 axes that cannot be joined, got 6; copy first"):
        cuda.boxes.copy([(wide, np.zeros(wide.shape, np.float32))])
