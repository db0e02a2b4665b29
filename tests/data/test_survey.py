"""Channels and targets without information are reported, after a bounded number of reads."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data import normalize, survey
from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError
from halograd.data.normalize import channel_statistics
from halograd.data.structure import Field, numbered
from halograd.data.survey import look_at, look_at_data
from halograd.dtensor.box import Box

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
