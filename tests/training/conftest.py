"""Fixtures: a configuration that all ranks share, kernels of a device's double, and stores of a small network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from halograd.kernels.numpy import NumpyBackend
from halograd.layers import Input, Layer, Network, Parameter
from halograd.training.memory import Memory
from halograd.training.store import ParameterStore
from tests.support import freed
from tests.support.fake_device import FakeBackend
from tests.training.runs import write_config, write_shared

#: One for all: opening it asks all libraries of the process for their threads.
HOST_KERNELS = NumpyBackend()


class Scale(Layer):
    """Layer with parameters of given shapes: `w` with weight decay, `b` without, and a running `mean`."""

    def __init__(self, w: tuple[int, ...], name: str) -> None:
        super().__init__(name)
        self._w = w

    def parameters(self, *shapes) -> Mapping[str, Parameter]:
        return {"w": Parameter(self._w, "he", math.prod(self._w)), "b": Parameter((self._w[0],), decay=False)}

    def state(self, *shapes) -> Mapping[str, Parameter]:
        return {"mean": Parameter((self._w[0],))}


def small_network(first: tuple[int, ...] = (5, 3, 3), name: str = "scale1") -> Network:
    x = Input((8, 8, 2), name="x")
    return Network(Scale((7, 41), "scale3")(Scale((3,), "scale2")(Scale(first, name)(x))), name="small")


@pytest.fixture(autouse=True)
def _freed(monkeypatch):
    freed.overwrite(monkeypatch)


@pytest.fixture
def config(request, comm, working):
    """Return the path of a run's configuration, written by the test module's `write` if it has one."""
    return write_shared(comm, working, getattr(request.module, "write", write_config))


@pytest.fixture
def kernels():
    """Return kernels of the double of a device."""
    with FakeBackend() as opened:
        yield opened


@pytest.fixture
def make_store() -> Callable[..., ParameterStore]:
    """Return a function that creates a store: ``make_store(bucket_bytes=..., dtype=..., network=..., seed=...)``."""

    def make(bucket_bytes: int = 1 << 20, dtype: str = "float64", seed: int = 0, **shape) -> ParameterStore:
        return ParameterStore(small_network(**shape), Memory(HOST_KERNELS), np.dtype(dtype), seed, bucket_bytes)

    return make
