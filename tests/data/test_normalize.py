"""Normalization: correct, the same for any number of ranks, and robust against values of tangled cells."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError
from halograd.data.normalize import ChannelStatistics, channel_statistics, check_transforms

NAMES = ["a", "offset", "oddy", "constant"]


@pytest.fixture
def data(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (7, 70, 5, 4)).astype(np.float32)
    x[..., 1] = 1e5 + 0.1 * x[..., 1]
    x[..., 2] = np.exp(4 * x[..., 2])
    x[0, 0, 0, 2] = 1e30
    x[..., 3] = 0.1
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["inputs"] = x
        file["inputs"].attrs.update({"layout": "NHWC", "channel_names": NAMES})
    with Hdf5Dataset(tmp_path / "d.h5", targets=None) as dataset:
        yield dataset, x


def on_ranks(dataset: Hdf5Dataset, indices, size: int) -> list[ChannelStatistics]:
    """Return the statistics of each of `size` ranks, in two passes: the first collects the summands of all ranks."""
    parts: list[np.ndarray] = []
    for rank in range(size):
        channel_statistics(
            dataset, "x", indices, rank=rank, size=size, allreduce=lambda a: parts.append(a.copy()) or a + 1
        )
    total = np.sum(parts, axis=0)
    return [
        channel_statistics(dataset, "x", indices, rank=rank, size=size, allreduce=lambda a: total.copy())
        for rank in range(size)
    ]


def test_mean_and_std(data) -> None:
    dataset, x = data
    got = channel_statistics(dataset, "x", range(7), transforms={"oddy": "none"})
    exact = x.astype(np.float64).reshape(-1, 4)
    np.testing.assert_allclose(got.mean[:2], exact.mean(axis=0)[:2], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got.std[:2], exact.std(axis=0)[:2], rtol=1e-9)
    assert got.count == 7 * 70 * 5
    assert got.std[3] == 0


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_number_of_ranks_does_not_matter(data, size: int) -> None:
    dataset, _ = data
    indices = [6, 2, 0, 5, 1]
    one = channel_statistics(dataset, "x", indices)
    for many in on_ranks(dataset, indices, size):
        np.testing.assert_allclose(many.mean, one.mean, rtol=1e-12)
        np.testing.assert_allclose(many.std, one.std, rtol=1e-12)
        assert many.count == one.count


def test_each_rank_reads_its_share(data) -> None:
    dataset, x = data
    before = dataset.bytes_read
    channel_statistics(dataset, "x", range(6), rank=1, size=3)
    first_block = 64 * 5 * 4 * 4
    assert dataset.bytes_read - before == 2 * x[0].nbytes + first_block


def test_normalised_channels_have_mean_zero_and_variance_one(data) -> None:
    dataset, x = data
    statistics = channel_statistics(dataset, "x", range(7))
    y = x.copy()
    statistics.apply(y)
    flat = y.reshape(-1, 4).astype(np.float64)
    np.testing.assert_allclose(flat.mean(axis=0)[[0, 2]], 0, atol=1e-5)
    np.testing.assert_allclose(flat.std(axis=0)[[0, 2]], 1, rtol=1e-5)
    assert np.all(y[..., 3] == 0)
    assert np.abs(flat).max() < 10, "a clamped metric must not be an outlier"


def test_a_block_of_channels_is_normalised_alike(data) -> None:
    dataset, x = data
    statistics = channel_statistics(dataset, "x", range(7), transforms={"a": "clip"})
    whole, part = x.copy(), np.ascontiguousarray(x[..., 1:3])
    statistics.apply(whole)
    statistics.apply(part, first_channel=1)
    np.testing.assert_array_equal(part, whole[..., 1:3])


@pytest.mark.parametrize(
    ("rule", "function"),
    [("log", lambda v: np.sign(v) * np.log1p(np.abs(v))), ("asinh", np.arcsinh), ("none", lambda v: v)],
)
def test_rules(data, rule: str, function) -> None:
    dataset, x = data
    statistics = channel_statistics(dataset, "x", [1, 2], transforms={"a": rule})
    expected = function(x[[1, 2], ..., 0].astype(np.float64))
    assert statistics.transforms == (rule, "none", "metric", "none")
    assert statistics.mean[0] == pytest.approx(expected.mean(), abs=1e-7)
    assert statistics.std[0] == pytest.approx(expected.std(), rel=1e-6)


def test_the_rule_of_an_input_is_that_of_its_channels_without_one(data) -> None:
    dataset, _ = data
    rules = {"x": "asinh", "offset": "none"}
    check_transforms(dataset, rules)
    found = channel_statistics(dataset, "x", [1, 2], transforms=rules)
    assert found.transforms == ("asinh", "none", "asinh", "asinh")


def test_clip_cuts_after_normalisation(data) -> None:
    dataset, x = data
    y = x.copy()
    y[0, 0, 0, 0] = 1e9
    channel_statistics(dataset, "x", [1], transforms={"a": "clip"}).apply(y)
    assert y[0, 0, 0, 0] == 5


@pytest.mark.parametrize(("rule", "alike"), [("log", False), ("asinh", False), ("metric", True), ("none", False)])
def test_a_metric_alone_is_limited(data, rule: str, alike: bool) -> None:
    """Only metrics are clipped at a limit; other channels, such as pressures in Pa, keep large values."""
    dataset, x = data
    y = x.copy()
    y[0, 0, :2, 0] = 2e6, 3e9
    channel_statistics(dataset, "x", [1], transforms={"a": rule}).apply(y)
    assert (y[0, 0, 0, 0] == y[0, 0, 1, 0]) == alike


def test_what_an_older_checkpoint_calls_log_is_metric(data) -> None:
    dataset, _ = data
    state = channel_statistics(dataset, "x", [0, 1], transforms={"a": "log", "oddy": "asinh"}).state_dict()
    assert ChannelStatistics.from_state_dict(state).transforms == ("log", "none", "asinh", "none")
    del state["rules"]
    assert ChannelStatistics.from_state_dict(state).transforms == ("metric", "none", "asinh", "none")


def test_state_survives(data) -> None:
    dataset, _ = data
    statistics = channel_statistics(dataset, "x", [0, 1])
    again = ChannelStatistics.from_state_dict(statistics.state_dict())
    np.testing.assert_array_equal(again.mean, statistics.mean)
    np.testing.assert_array_equal(again.std, statistics.std)
    assert (again.transforms, again.count) == (statistics.transforms, statistics.count)


def test_wrong_arguments(data) -> None:
    dataset, _ = data
    with pytest.raises(DataError, match="expected samples to compute the normalization from, got none"):
        channel_statistics(dataset, "x", [])
    message = "expected inputs out of x, or channels out of a, offset, oddy, constant, got b"
    with pytest.raises(DataError, match=message):
        check_transforms(dataset, {"b": "log"})
    with pytest.raises(DataError, match="expected rules out of none, log, metric, asinh, clip, got sqrt"):
        check_transforms(dataset, {"a": "sqrt"})
