"""Tests of the mirror that runs the tests on a GPU, with a second host memory in place of the GPU's."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.kernels.cuda.launch import Launch

from . import mirror
from .host import HostBackend, HostLauncher


@pytest.fixture
def apart(host, monkeypatch) -> HostBackend:
    """Return a backend whose kernels run on copies of the test's arrays."""
    device = mirror.on_host(HostLauncher())
    monkeypatch.setattr(Launch, "__call__", lambda launch: device.run(launch))
    return HostBackend(device)


def test_arguments_and_tables_are_translated(apart):
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    y, total, sums = np.zeros_like(x), np.zeros(1), np.zeros(5, np.float32)
    before = x.copy()
    apart.boxes.copy([(x[:, 1:3], y[:, 2:]), (x[:, 0], y[:, 0])])()
    apart.boxes.fill(7, y[:, 1])()
    apart.bias_gradient(x, sums)()
    apart.sum_of_squares([(y, 1), (x, 2)], total)()
    want = np.zeros_like(x)
    want[:, 2:], want[:, 0], want[:, 1] = x[:, 1:3], x[:, 0], 7
    assert np.array_equal(y, want) and np.array_equal(x, before)
    assert total[0] == (want**2).sum() + 0.5 * (x**2).sum() and np.array_equal(sums, x.sum(axis=(0, 1)))


def test_the_kernels_work_on_copies(apart, monkeypatch):
    """If the copy back is disabled, arrays of the test stay unchanged, so kernels run on the copies."""
    y = np.zeros(8, np.float32)
    device = apart.launcher
    kernel = apart.boxes.fill(1, y)
    monkeypatch.setattr(device, "_get", lambda memory, at, nbytes: np.zeros(nbytes, np.uint8))
    kernel()
    assert not y.any()
