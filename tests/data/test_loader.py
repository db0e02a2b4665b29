"""The prefetch thread: correct boxes in order, errors at the right batch, and no thread left."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError
from halograd.data.loader import Loader
from halograd.data.normalize import channel_statistics
from halograd.data.sampler import Sampler
from halograd.data.targets import TargetReduction
from halograd.dtensor.box import Box
from tests.harness.limits import wait_until

INPUT = Box((0, -1, 0, 0), (2, 5, 8, 2))
TARGET = Box((0, 0, 0, 0), (2, 4, 8, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["inputs"] = rng.normal(5, 2, (9, 8, 8, 2)).astype(np.float32)
        file["inputs"].attrs["layout"] = "NHWC"
        file["mask"] = rng.integers(0, 2, (9, 8, 8)).astype(np.uint8)
    return tmp_path / "d.h5"


def prefetch_threads() -> int:
    return sum(t.name == "halograd-prefetch" for t in threading.enumerate())


def arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(path) as file:
        return file["inputs"][()], file["mask"][()][..., None]


@pytest.mark.parametrize("depth", [2, 3])
def test_boxes_in_order_normalised_with_zero_padding(path: Path, depth: int) -> None:
    x, y = arrays(path)
    with Hdf5Dataset(path) as data:
        statistics = channel_statistics(data, "x", range(9))
        loader = Loader(data, {"x": INPUT, "target": TARGET}, statistics={"x": statistics}, depth=depth)
        seen = []
        for item in loader.iterate(Sampler(range(9), 2, seed=1)):
            chosen = list(item.batch.indices)
            expected = (x[chosen] - statistics.mean) / statistics.std
            assert np.all(item.arrays["x"][:, 0] == 0)
            np.testing.assert_allclose(item.arrays["x"][:, 1:], expected[:, :5], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(item.arrays["target"], y[chosen, :4])
            seen.append(item.batch.position)
        assert seen == [0, 1, 2, 3]
        assert loader.seconds_waited > 0
    assert prefetch_threads() == 0


def test_buffers_are_reused_over_epochs(path: Path) -> None:
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT, "target": TARGET}) as loader:
        places = {id(item.arrays["x"]) for _ in range(3) for item in loader.iterate([[0, 1], [2, 3], [4, 5]])}
    assert len(places) == 2


def test_a_batch_in_use_is_not_overwritten(path: Path) -> None:
    x, _ = arrays(path)
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        for item in loader.iterate([[k, k + 1] for k in range(6)]):
            ready = loader._running.ready
            wait_until(lambda ready=ready: not ready.empty(), "the thread to run ahead, or to end")
            np.testing.assert_array_equal(item.arrays["x"][:, 1:], x[list(item.batch.indices), :5])
            assert set(item.arrays) == {"x"}


def test_reduced_targets(path: Path) -> None:
    _, y = arrays(path)
    coarse = Box((0, 1, 0, 0), (2, 2, 2, 1))
    with (
        Hdf5Dataset(path) as data,
        Loader(
            data, {"x": INPUT, "target": coarse}, reductions={"target": TargetReduction("fraction", (4, 4))}
        ) as loader,
    ):
        (item,) = loader.iterate([[3, 7]])
        expected = y[[3, 7], 4:8].reshape(2, 1, 4, 2, 4, 1).mean(axis=(2, 4))
        np.testing.assert_allclose(item.arrays["target"], expected)


def test_a_rank_with_nothing(path: Path) -> None:
    empty = Box((0, 8, 0, 0), (2, 8, 8, 2))
    with Hdf5Dataset(path) as data, Loader(data, {"x": empty, "target": empty.replace(3, 0, 1)}) as loader:
        shapes = [item.arrays["x"].shape for item in loader.iterate([[0, 1], [2, 3]])]
        assert shapes == [(2, 0, 8, 2)] * 2 and data.bytes_read == 0


def test_an_error_is_raised_when_its_batch_is_due(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["inputs"][5, 0, 0, 0] = np.nan
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        got = []
        with pytest.raises(DataError, match="nan in sample 5, channel 0"):
            for item in loader.iterate([[0, 1], [2, 3], [4, 5], [6, 7]]):
                got.append(item.batch.indices)
        assert got == [(0, 1), (2, 3)]
        assert prefetch_threads() == 0
        # The loader can be used again.
        assert len(list(loader.iterate([[0, 1]]))) == 1


def test_leaving_a_loop_ends_the_thread(path: Path) -> None:
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        loop = loader.iterate([[0, 1]] * 50)
        next(loop)
        with pytest.raises(DataError, match="already in a loop"):
            next(loader.iterate([[0, 1]]))
        loader.close()
        loader.close()
        assert prefetch_threads() == 0
        assert len(list(loop)) <= 2, "a closed loop must end, not wait"
        for _ in loader.iterate([[0, 1]] * 50):
            break
    assert prefetch_threads() == 0


def test_a_forgotten_loop_does_not_end_another(path: Path) -> None:
    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}) as loader:
        old = loader.iterate([[0, 1]] * 5)
        next(old)
        loader.close()
        new = loader.iterate([[2, 3]] * 5)
        next(new)
        assert isinstance(old, Generator)
        old.close()
        assert len(list(new)) == 4


def test_reads_are_recorded(path: Path) -> None:
    class Recorder:
        spans: list = []  # noqa: RUF012

        def span(self, name: str, category: str, t0: float, t1: float) -> None:
            self.spans.append((name, category, t1 >= t0))

    with Hdf5Dataset(path) as data, Loader(data, {"x": INPUT}, recorder=Recorder()) as loader:
        list(loader.iterate([[0, 1], [2, 3]]))
    assert Recorder.spans == [("read", "io", True)] * 2


def test_wrong_arguments(path: Path) -> None:
    with Hdf5Dataset(path) as data:
        with pytest.raises(DataError, match="depth: expected 2 or more sets of buffers, got 1"):
            Loader(data, {"x": INPUT}, depth=1)
        with pytest.raises(DataError, match=r"divisible into patches of \(3, 4\), got \(8, 8\)"):
            Loader(data, {"x": INPUT, "target": TARGET}, reductions={"target": TargetReduction("any", (3, 4))})
