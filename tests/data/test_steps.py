"""Pairs of times: every box against a loop over the rows of each simulation, file and gap in time."""

from __future__ import annotations

import logging

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import ArrayDataset, DataError, StandardAugmentation, open_dataset
from halograd.data.augment import Rules
from halograd.data.steps import TimeSteps, simulations
from halograd.data.windows import SampleWindows
from halograd.dtensor import Box

GRID, C = (3, 4), 2


def arrays_of(rows):
    rng = np.random.default_rng(rows)
    return {
        "x": rng.standard_normal((rows, *GRID, C)),
        "t": rng.standard_normal((rows, *GRID, 1)),
        "n": rng.random(rows),
    }


def samples_of(numbers, lag, history, rollout):
    """Return, by a loop, the rows of inputs and of targets of every sample."""
    found = []
    for row, number in enumerate(numbers):
        chain = [k for k, other in enumerate(numbers) if other == number]
        at = chain.index(row)
        steps = [at + lag * k for k in range(1 - history, rollout + 1)]
        if steps[0] >= 0 and steps[-1] < len(chain):
            rows = [chain[k] for k in steps]
            found.append((rows[:history], rows[history:]))
    return found


@given(st.data())
def test_every_box_is_that_of_a_loop(data):
    numbers = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
    lag, history, rollout = (data.draw(st.integers(1, 3)) for _ in range(3))
    arrays = arrays_of(len(numbers))
    dataset = ArrayDataset(arrays, ["t", "n"], groups=numbers)
    want = samples_of(numbers, lag, history, rollout)
    if not want:
        with pytest.raises(
            DataError, match=rf"data.lag: expected {1 + lag * (history + rollout - 1)} successive times"
        ):
            TimeSteps(dataset, lag, history, rollout)
        return
    steps = TimeSteps(dataset, lag, history, rollout)
    assert len(steps) == len(want) and steps.rows.tolist() == [rows[-1] for rows, _ in want]
    assert steps.groups.tolist() == [numbers[rows[-1]] for rows, _ in want]
    indices = data.draw(st.lists(st.integers(0, len(want) - 1), min_size=1, max_size=3))
    for name, which in (("x", 0), ("t", 1), ("n", 1)):
        whole = np.stack(
            [np.concatenate([arrays[name][row].reshape(*GRID, -1) if name != "n" else arrays[name][[row]]
                             for row in want[k][which]], -1) for k in indices]
        )  # fmt: skip
        assert steps.fields[name].shape == whole.shape[1:]
        ranges = []
        for n in whole.shape:
            low = data.draw(st.integers(-1, n - 1))
            ranges.append((low, data.draw(st.integers(max(low, 0) + 1, n + 1))))
        box = Box.of_ranges(ranges)
        out = np.full(box.shape, 9.0)
        filled = steps.read(name, indices, box, out)
        np.testing.assert_array_equal(out[filled], whole[(box & Box.of_shape(whole.shape)).slices()])
        out[filled] = 9
        assert (out == 9).all()


def test_without_labels_the_steps_of_inputs_suffice():
    dataset = ArrayDataset(arrays_of(6), ["t", "n"])
    assert TimeSteps(dataset, 2, 2, 1, labelled=False).rows.tolist() == [2, 3, 4, 5]
    steps = TimeSteps(dataset, 2, 2, 1)
    assert steps.rows.tolist() == [2, 3] and steps.groups is None
    assert steps.source(1) == ("arrays", 3) and steps.place(1) == "arrays, sample 3"
    with pytest.raises(DataError, match=r"expected a sample of 0 \.\. 1, got 2"):
        steps.source(2)


def write(path, times, units="days since 2000-01-01", first=0):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(first, first + len(times), dtype=float)[:, None, None, None] * np.ones((*GRID, C))
        file["x"].attrs["layout"] = "NHWC"
        file["time"] = np.asarray(times)
        file["time"].make_scale("time")
        file["time"].attrs["units"] = units
        file["x"].dims[0].attach_scale(file["time"])


def test_no_pair_across_files_or_gaps(tmp_path, caplog):
    write(tmp_path / "a.nc", [0, 31, 59, 90])  # months
    write(tmp_path / "b.nc", [0.0, 6.0, 12.0, 24.0, 30.0, 24.0], "hours since 1990-01-01", first=4)
    dataset = open_dataset(tmp_path, "x", {"t": "x"})
    with caplog.at_level(logging.WARNING):
        assert simulations(dataset).tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert "time has 2 gaps or steps backwards" in caplog.text
    steps = TimeSteps(dataset, 1)
    assert steps.rows.tolist() == [0, 1, 2, 4, 5, 7] and steps.file_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert steps.groups.tolist() == [0, 0, 0, 1, 1, 2]  # held out together
    out = np.empty((6, *GRID, C))
    steps.read("t", range(6), Box.of_shape(out.shape), out)
    assert out[:, 0, 0, 0].tolist() == [1, 2, 3, 5, 6, 8]
    assert steps.source(3) == (str(tmp_path / "b.nc"), 0)


def test_other_coordinates_are_no_times(tmp_path):
    write(tmp_path / "a.nc", [5, 1, 3], "km")
    assert simulations(open_dataset(tmp_path, "x", {"t": "x"})).tolist() == [0, 0, 0]


def test_vectors_of_all_steps_are_mirrored():
    dataset = ArrayDataset(arrays_of(6), ["t", "n"], channel_names={"x": ["v", "u"]})
    steps = TimeSteps(dataset, 1, history=2)
    augmentation = StandardAugmentation(Rules(vectors=[["v", "u"]]), SampleWindows(steps), 0)
    assert augmentation._vectors["x"] == {0: (0, (0, 1)), 1: (1, (0, 1)), 2: (0, (2, 3)), 3: (1, (2, 3))}
