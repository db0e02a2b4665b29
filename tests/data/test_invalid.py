"""NaN, infinity and targets out of range: found, left out of statistics, filled; no effect on data without them."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import DataError, FileSet, Hdf5Dataset, Loader, channel_statistics
from halograd.data.survey import find_invalid
from halograd.data.targets import TargetRange
from halograd.dtensor import Box

N, EDGE, CHANNELS = 6, 9, 3
RANGES = {"target": TargetRange(0, 1, True)}


@pytest.fixture
def arrays():
    rng = np.random.default_rng(3)
    x = 5 + 2 * rng.standard_normal((N, EDGE, EDGE, CHANNELS))
    return x, rng.integers(0, 2, (N, EDGE, EDGE)).astype(float)


def write(path, x, t):
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=x).attrs.update(layout="NHWC", channel_names=["rho", "p", "u"])
        file["mask"] = t
    return path


def test_samples_and_what_is_wrong_with_them(tmp_path, arrays):
    x, t = arrays
    x[1, 8, 0, 1], x[4, 2, 2, 2], x[4, 2, 1, 0] = np.nan, np.nan, -np.inf
    t[0, 3, 3], t[3, 8, 8] = 2, 0.5
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", x, t), ranges=RANGES)
    assert find_invalid(dataset, RANGES, range(N)) == {
        0: "2 in target 'mask'",
        1: "nan in channel 1 (p)",
        3: "0.5 in target 'mask'",
        4: "-inf in channel 0 (rho)",
    }
    assert find_invalid(dataset, RANGES, [2, 5, 4]) == {4: "-inf in channel 0 (rho)"}
    with pytest.raises(DataError, match="expected finite numbers"):  # strict mode is restored
        dataset.read("x", [1], Box.of_shape((1, EDGE, EDGE, CHANNELS)), np.empty((1, EDGE, EDGE, CHANNELS)))


def test_of_several_files_the_place_is_named(tmp_path, arrays):
    x, t = arrays
    paths = [write(tmp_path / "a.h5", x, t), tmp_path / "b.h5"]
    x[2, 0, 0, 0] = np.inf
    write(paths[1], x, t)
    dataset = FileSet([Hdf5Dataset(path, ranges=RANGES) for path in paths])
    assert find_invalid(dataset, RANGES, range(2 * N)) == {N + 2: "inf in channel 0 (rho)"}
    assert dataset.place(N + 2) == f"{paths[1]}, sample 2" and not dataset.lenient


@given(st.data())
def test_statistics_are_those_of_the_numbers_that_are_there(tmp_path_factory, data):
    """Statistics ignore missing values in any pattern; transformed infinities count as missing."""
    holes = data.draw(st.lists(st.integers(0, N * EDGE * EDGE * CHANNELS - 1), max_size=40))
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    rng = np.random.default_rng(3)
    x = rng.standard_normal((N, EDGE, EDGE, CHANNELS))
    x.reshape(-1)[holes] = value
    dataset = Hdf5Dataset(write(tmp_path_factory.mktemp("d") / "a.h5", x, np.zeros((N, EDGE, EDGE))))
    dataset.lenient = frozenset(["x"])
    there = np.where(np.isfinite(x), x, np.nan).astype(np.float32).astype(float)
    for rules, want in (({}, there), ({"p": "log"}, np.copysign(np.log1p(np.abs(there)), there))):
        found = channel_statistics(dataset, "x", range(N), transforms=rules)
        chosen = [1] if rules else range(CHANNELS)
        for k in chosen:
            assert found.mean[k] == pytest.approx(np.nanmean(want[..., k]), rel=1e-6, abs=1e-6)
            assert found.std[k] == pytest.approx(np.nanstd(want[..., k]), rel=1e-6)


def test_a_channel_of_holes_is_refused(tmp_path, arrays):
    x, t = arrays
    x[..., 2] = np.nan
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", x, t))
    dataset.lenient = frozenset(["x"])
    with pytest.raises(DataError, match=r"expected finite numbers in channel 2 \(u\), got none"):
        channel_statistics(dataset, "x", range(N))


@pytest.mark.parametrize("normalized", [True, False])
def test_holes_become_the_mean_and_are_counted(tmp_path, arrays, normalized):
    x, t = arrays
    x[0, 0, 0, 0], x[2, 4, 4, 1], x[3, 8, 8, 2] = np.nan, np.inf, -np.inf
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", x, t))
    dataset.lenient = frozenset(["x"])
    statistics = {"x": channel_statistics(dataset, "x", range(N))} if normalized else {}
    boxes = {"x": Box((0, -1, 0, 0), (4, EDGE, EDGE, CHANNELS)), "target": Box.of_shape((4, EDGE, EDGE, 1))}
    with Loader(dataset, boxes, statistics=statistics, dtype="float64") as loader:
        (batch,) = loader.iterate([[0, 1, 2, 3]])
        found = batch.arrays["x"][:, 1:]
    want = np.where(np.isfinite(x[:4]), x[:4], 0)
    if normalized:
        want = np.where(np.isfinite(x[:4]), (x[:4] - statistics["x"].mean) / statistics["x"].std, 0)
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)
    assert loader.absent == 3 and not batch.arrays["x"][:, 0].any()
