"""Normalization, surveys of channels and targets, and logistic regression: the same for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data import normalize, survey
from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError
from halograd.data.logistic import best_threshold, fit, predict
from halograd.data.normalize import ChannelStatistics, channel_statistics, check_transforms
from halograd.data.structure import Field, numbered
from halograd.data.survey import look_at, look_at_data
from halograd.dtensor.box import Box

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


N, GRID = 200, (6, 5)


class Reads:
    """Double of a dataset that records the reads."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.boxes, self.samples = values, [], []
        self.fields = {"x": Field("x", "channels last", values.shape[1:], numbered(values.shape[-1]))}

    def __len__(self) -> int:
        return len(self.values)

    def read(self, name: str, indices: list[int], box: Box, out: np.ndarray) -> None:
        self.samples.append(indices[0])
        self.boxes.append(box)
        out[...] = self.values[indices][box.slices()]


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_one_sample_where_everything_differs() -> None:
    read = Reads(drawn(N, *GRID, 3))
    found = look_at(read, "x")
    assert (found.samples, found.constant) == (1, {}) and read.samples == [0]


def test_constant_channels_and_the_samples_that_were_looked_at() -> None:
    values = drawn(N, *GRID, 3)
    values[..., 1] = 2.5
    read = Reads(values)
    found = look_at(read, "x")
    assert (found.samples, found.constant) == (survey.LOOKS, {1: 2.5})
    assert read.samples[0] == 0 and read.samples[-1] == N - 1 and len(set(read.samples)) == survey.LOOKS


def test_a_label_per_sample_differs_between_samples() -> None:
    labels = np.repeat([3.0, 4.0], N // 2)[:, None]
    assert look_at(Reads(labels), "x").constant == {}
    assert look_at(Reads(labels[:100]), "x").constant == {0: 3.0}
    assert look_at(Reads(labels[:1]), "x").constant == {}  # a single number proves nothing


def test_parts_of_large_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The survey of large samples reads at most one part per sample, and other rows of each sample."""
    monkeypatch.setattr(survey, "PART", 10)
    read = Reads(np.ones((N, *GRID, 1)))
    assert look_at(read, "x").constant == {0: 1.0}
    assert all(box.size == 10 for box in read.boxes)
    rows = [box.start[1] for box in read.boxes]
    assert rows == sorted(rows) and set(rows) == {0, 1, 2, 3, 4}
    monkeypatch.setattr(survey, "PART", 1)
    read = Reads(np.ones((2, *GRID, 1)))
    look_at(read, "x")
    assert [box.size for box in read.boxes] == [5, 5]  # at least one row


def test_the_scale_is_the_loss_of_predicting_zero() -> None:
    values = np.zeros((N, 2, 1))
    values[100:] = [[0.1], [-0.3]]
    assert look_at(Reads(values), "x").scale == pytest.approx(0.2)
    values[-1] = [[30.0], [-10.0]]
    assert look_at(Reads(values), "x").scale == pytest.approx(0.2)  # the others differ early
    assert look_at(Reads(values), "x", least=survey.LOOKS).scale == pytest.approx(500)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    x = drawn(20, *GRID, 4)
    x[..., 1], x[..., 3] = 7.0, 1e6 + 1e-3 * x[..., 3]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["inputs"], file["mask"] = x.astype(np.float64), np.ones((20, *GRID), np.uint8)
        file["inputs"].attrs.update(layout="NHWC", channel_names=["a", "b", "c", "d"])
    return tmp_path / "d.h5"


def test_messages(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hdf5Dataset(path) as data:
        look_at_data(data, None)
    inputs, targets = caplog.messages
    assert inputs.startswith(f"{path}: channel 1 (b) is 7") and "in all 20 samples: a network learns nothing" in inputs
    assert f"{path}: the targets are 1 in all 20 samples" in targets and "data.targets" in targets


def test_messages_of_statistics(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A message names a channel whose values differ in their last digits only, and become zero by normalization."""
    with Hdf5Dataset(path) as data:
        look_at_data(data, {"x": channel_statistics(data, "x", range(5, 20))}, 5)
    message = caplog.messages[0]
    assert "channel 1 (b) is 7, channel 3 (d) is 1e+06 in all training samples, to 7 digits, and 0 after nor" in message


def test_nothing_to_say(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data without constant channels give no message, also if a class of a one-hot target does not occur."""
    with h5py.File(path, "r+") as file:
        del file["mask"]
        file["inputs"][...] = drawn(20, *GRID, 4)
        file["mask"] = np.stack([drawn(20, *GRID) > 0, drawn(20, *GRID) <= 0, np.zeros((20, *GRID))], axis=-1)
    with Hdf5Dataset(path) as data:
        look_at_data(data, None)
        look_at_data(data, {"x": channel_statistics(data, "x", range(20))})
    assert not caplog.messages


def test_long_reads_are_announced(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hdf5Dataset(path) as data:
        channel_statistics(data, "x", range(20))
        assert not caplog.messages
        monkeypatch.setattr(normalize, "_LONG", 20 * 6 * 5 * 4 * 4 - 1)
        channel_statistics(data, "x", range(20))
        assert "reading all 20 training samples (0 GB) for the normalization; data.normalize = false" in caplog.text
        channel_statistics(data, "x", range(20), rank=1, size=2)
        assert len(caplog.messages) == 1


def test_a_fault_of_reading_is_agreed_on_before_sums_are_taken(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["inputs"][3, 0, 0, 0] = np.nan
    agreed: list[Exception | None] = []

    def agree(fault: Exception | None) -> None:
        agreed.append(fault)
        raise DataError("another rank has a fault")

    def allreduce(array: np.ndarray) -> np.ndarray:
        pytest.fail("expected no sum")

    with Hdf5Dataset(path) as data:
        for rank in (0, 1):
            with pytest.raises(DataError, match="another rank has a fault"):
                channel_statistics(data, "x", range(20), rank=rank, size=2, allreduce=allreduce, agree=agree)
        with pytest.raises(DataError, match="nan in sample 3"):
            channel_statistics(data, "x", range(20))
    assert agreed[0] is None and "nan in sample 3" in str(agreed[1])


def draw(count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (count, 3))
    p = 1 / (1 + np.exp(-(x @ [2.0, -1.0, 0.0] - 0.5)))
    return x, (rng.uniform(size=count) < p).astype(np.uint8)


def test_the_gradient_vanishes_and_the_weights_are_found() -> None:
    x, y = draw()
    model = fit(lambda: [(x, y)], ridge=0.0)
    residual = predict(model, x) - y
    assert np.abs(residual @ x / len(x)).max() < 1e-6 and abs(residual.mean()) < 1e-6
    np.testing.assert_allclose(model.weights, [2, -1, 0], atol=0.25)
    assert model.iterations < 12


def test_blocks_and_shapes_do_not_matter() -> None:
    x, y = draw()
    one = fit(lambda: [(x, y)])
    many = fit(
        lambda: [
            (x[k : k + 1000].reshape(10, 100, 3), y[k : k + 1000].reshape(10, 100, 1)) for k in range(0, 4000, 1000)
        ]
    )
    np.testing.assert_allclose(many.weights, one.weights, rtol=1e-9)
    assert many.loss == pytest.approx(one.loss)


def intersection_over_union(probability, y, threshold=0.5) -> float:
    positive, true = np.asarray(probability) > threshold, np.asarray(y) > 0.5
    union = np.count_nonzero(positive | true)
    return 1.0 if union == 0 else np.count_nonzero(positive & true) / union


def test_collinear_and_separable_data_stay_finite() -> None:
    x = np.linspace(-1, 1, 50)[:, None]
    model = fit(lambda: [(np.hstack([x, x, 0 * x]), x[:, 0] > 0)])
    assert np.isfinite(model.weights).all()
    assert intersection_over_union(predict(model, np.hstack([x, x, 0 * x])), x[:, 0] > 0) == 1


def test_best_threshold_against_a_loop() -> None:
    x, y = draw()
    model = fit(lambda: [(x, y)])
    threshold, score = best_threshold(model, lambda: [(x[:1500], y[:1500]), (x[1500:], y[1500:])])
    scores = [intersection_over_union(predict(model, x), y, t / 100) for t in range(1, 100)]
    assert score == pytest.approx(max(scores))
    assert threshold == pytest.approx((int(np.argmax(scores)) + 1) / 100)


def test_intersection_over_union_by_hand() -> None:
    assert intersection_over_union([0.9, 0.8, 0.1, 0.2], [1, 0, 1, 0]) == pytest.approx(1 / 3)
    assert intersection_over_union([0.1], [0]) == 1


def test_logistic_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="expected at least one cell, got blocks of none"):
        fit(lambda: [(np.zeros((0, 3)), np.zeros(0))])
    with pytest.raises(ValueError, match="expected at least one block of data, got none"):
        fit(lambda: [])
    x, y = draw(50)
    with pytest.raises(ValueError, match=r"expected 3 channels last, got shape \(2, 4\)"):
        predict(fit(lambda: [(x, y)]), np.zeros((2, 4)))
