"""Process grids against numpy's own row-major arithmetic."""

import itertools

import numpy as np
import pytest

from halograd.comm import ProcessGrid

SHAPES = [(1,), (4,), (2, 3), (3, 1, 2), (2, 2, 2)]
NAMES = ("sample", "height", "width")


def grid_of(shape, extra=0):
    return ProcessGrid(dict(zip(NAMES, shape)), int(np.prod(shape)) + extra)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", [0, 2])
def test_ranks_are_row_major_and_those_behind_have_no_coordinates(shape, extra):
    grid = grid_of(shape, extra)
    for rank, index in enumerate(np.ndindex(*shape)):
        assert tuple(grid.coords(rank).values()) == index
        assert list(grid.coords(rank)) == list(grid.names)
        assert grid.rank(grid.coords(rank)) == rank
    assert [grid.coords(rank) for rank in range(grid.used, grid.size)] == [None] * extra


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_hold_the_ranks_with_the_same_coordinates(shape):
    grid = grid_of(shape, extra=1)
    for count in range(len(shape) + 1):
        for shared in itertools.combinations(grid.names, count):
            groups = grid.groups(shared)
            assert sorted(sum(groups, ())) == list(range(grid.used))
            for color, group in enumerate(groups):
                same = {tuple(grid.coords(rank)[name] for name in shared) for rank in group}
                assert len(same) == 1
                assert all(grid.group(rank, shared) == group and grid.color(rank, shared) == color for rank in group)
            assert grid.group(grid.used, shared) is None
            assert grid.color(grid.used, shared) is None


def test_order_of_names_does_not_change_groups():
    grid = grid_of((2, 2, 2))
    assert grid.groups(["width", "sample"]) == grid.groups(["sample", "width"])


def test_equal_grids_hash_alike_and_order_matters():
    a, b = ProcessGrid({"height": 2, "width": 2}, 4), ProcessGrid({"height": 2, "width": 2}, 4)
    assert a == b and hash(a) == hash(b)
    assert a != ProcessGrid({"width": 2, "height": 2}, 4)
    assert a != ProcessGrid({"height": 2, "width": 2}, 5)
    assert repr(a) == "ProcessGrid({'height': 2, 'width': 2}, size=4)"


def test_a_grid_without_dimensions_is_one_rank():
    grid = ProcessGrid({}, 3)
    assert (grid.used, grid.coords(0), grid.coords(1)) == (1, {}, None)


def test_parts_cannot_be_changed():
    parts = {"height": 2}
    grid = ProcessGrid(parts, 4)
    parts["height"] = 3
    assert grid.shape == (2,)
    with pytest.raises(TypeError):
        grid.parts["height"] = 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ProcessGrid({"height": 3, "width": 2}, 4), "process grid height 3 x width 2 needs 6 ranks, got 4"),
        (lambda: ProcessGrid({"height": 0}, 4), "parts of 'height': expected an integer >= 1, got 0"),
        (lambda: ProcessGrid({"height": 2.0}, 4), "parts of 'height': expected an integer >= 1, got 2.0"),
        (lambda: grid_of((2, 2)).coords(4), "rank: expected 0 <= rank < 4, got 4"),
        (lambda: grid_of((2, 2)).rank({"sample": 2, "height": 0}), "coordinate 'sample': expected 0 <= c < 2, got 2"),
        (lambda: grid_of((2, 2)).rank({"sample": 1}), r"\['height'\] missing"),
        (lambda: grid_of((2, 2)).rank({"sample": 1, "height": 0, "depth": 0}), "got 'depth'"),
        (lambda: grid_of((2, 2)).groups(["depth"]), r"dimension: expected one of \('sample', 'height'\), got 'depth'"),
    ],
)
def test_errors_say_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
