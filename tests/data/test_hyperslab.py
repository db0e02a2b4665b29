"""Regular selections against NumPy's own indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from h5py import h5s

from halograd.data.storage import Hyperslab, hyperslabs


def chosen(slab: Hyperslab, n: int) -> list[int]:
    """Return the indices along the single axis of a selection, by the definition of regular selections."""
    count = n if slab.count[0] == h5s.UNLIMITED else slab.count[0]
    starts = (slab.start[0] + k * slab.stride[0] for k in range(count))
    return [i for start in starts for i in range(start, start + slab.block[0]) if i < n]


def test_what_is_selected_within_an_array() -> None:
    for start, block, gap, count in itertools.product(range(4), range(1, 4), range(3), (0, 1, 2, 5, h5s.UNLIMITED)):
        slab = Hyperslab((start,), (block + gap,), (count,), (block,))
        for n in range(12):
            indices = chosen(slab, n)
            assert slab.selected((n,)) == (len(indices),) and slab.size((n,)) == len(indices)
            inside = slab.within((n,))
            assert chosen(inside, n) == indices
            assert not inside.count[0] or inside.start[0] + (inside.count[0] - 1) * inside.stride[0] < n
        if count not in (0, h5s.UNLIMITED):
            assert slab.stop == (chosen(slab, 100)[-1] + 1,) and slab.block_size == len(chosen(slab, 100))


def test_one_block_of_a_growing_selection() -> None:
    slab = Hyperslab((1, 0), (4, 1), (h5s.UNLIMITED, 1), (2, 3))
    assert slab.growing == 0 and slab.stop == (None, 3) and slab.block_size == 6
    assert slab.part(0, 5) == Hyperslab((21, 0), (4, 1), (1, 1), (2, 3))


def test_selections_of_hdf5() -> None:
    """The union of the regular selections equals HDF5's selection, also if that is irregular."""
    rng = np.random.default_rng(0)
    space = h5s.create_simple((9, 7))
    assert [slab.size((9, 7)) for slab in hyperslabs(space, (9, 7))] == [63]
    space.select_none()
    assert hyperslabs(space, (9, 7)) == []
    for _ in range(20):
        expected = np.zeros((9, 7), bool)
        space.select_none()
        for _ in range(3):
            low = [int(rng.integers(0, n)) for n in (9, 7)]
            size = [int(rng.integers(1, n - a + 1)) for n, a in zip((9, 7), low)]
            space.select_hyperslab(tuple(low), (1, 1), (1, 1), tuple(size), h5s.SELECT_OR)
            expected[low[0] : low[0] + size[0], low[1] : low[1] + size[1]] = True
        found = np.zeros((9, 7), int)
        for slab in hyperslabs(space, (9, 7)):
            for rows in range(slab.count[0]):
                for columns in range(slab.count[1]):
                    a = [s + k * t for s, k, t in zip(slab.start, (rows, columns), slab.stride)]
                    found[a[0] : a[0] + slab.block[0], a[1] : a[1] + slab.block[1]] += 1
        np.testing.assert_array_equal(found, expected)
    space.select_elements([(0, 0), (3, 3)])
    with pytest.raises(ValueError, match="a selection of points"):
        hyperslabs(space, (9, 7))
