"""Fixtures for tests of kernels: backends, arrays from a seed, outputs filled with NaN, comparison within rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

from halograd.kernels import Backend
from halograd.kernels.guards import GUARDS
from tests.support.onednn import onednn, opened  # noqa: F401

FLOAT32, FLOAT64, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)
EPS = {
    np.dtype(np.float64): 2.0**-52,
    np.dtype(np.float32): 2.0**-23,
    np.dtype(np.float16): 2.0**-10,
    np.dtype(ml_dtypes.bfloat16): 2.0**-7,
}


class Arrays:
    """Factory of arrays for one backend and dtype."""

    def __init__(self, backend: Backend, dtype, seed: int = 0) -> None:
        self.backend, self.dtype = backend, np.dtype(dtype)
        self._random = np.random.default_rng(seed)

    def draw(self, *shape: int, dtype=None):
        """Return a random array with standard normal values."""
        a = self.backend.empty(shape, dtype or self.dtype)
        a[...] = self._random.standard_normal(shape)
        return a

    def levels(self, *shape: int):
        """Return a random array with values -1, 0, 1, so that ties are common."""
        a = self.backend.empty(shape, self.dtype)
        a[...] = self._random.integers(-1, 2, shape)
        return a

    def poisoned(self, *shape: int, dtype=None):
        """Return an output array filled with NaN, which remains where a kernel does not write."""
        a = self.backend.empty(shape, dtype or self.dtype)
        a.fill(np.nan)
        return a


def assert_close(got, expected, terms: int, what: str = "", scale: float | None = None) -> None:
    """Check that every element of `got` is within ``4 * eps * terms * scale`` of `expected`.

    `terms` is the length of the sum behind an element, `scale` the size of its terms (default: the largest expected, at
    least 1). A sum in any order has an error of at most ``eps * terms * sum |terms|``; the factor 4 covers its
    products.
    """
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    found = got.astype(np.float64)
    assert not np.isnan(found).any(), f"{what}: {np.isnan(found).sum()} of {found.size} elements never written"
    largest = max(1.0, float(np.abs(expected).max(initial=0)))
    bound = 4 * EPS[np.dtype(got.dtype)] * terms * (largest if scale is None else scale)
    error = np.abs(found - expected).max(initial=0)
    assert error <= bound, f"{what}: error {error:.3e} exceeds {bound:.3e}"


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    """Surround all arrays and scratch memory of a test with guard bytes; none may change."""
    with GUARDS:
        yield
        GUARDS.check()


@pytest.fixture(scope="session")
def backends() -> Iterator[Callable[[str], Backend]]:
    """Return a function that returns the backend of a name, opened once."""
    made: dict[str, Backend] = {}

    def get(name: str) -> Backend:
        if name not in made:
            made[name] = opened(name)
        return made[name]

    yield get
    for backend in made.values():
        backend.close()


@pytest.fixture(params=["numpy", "onednn"])
def backend(backends, request) -> Backend:
    """Return each backend in turn, as a parameter of the test."""
    return backends(request.param)


@pytest.fixture
def arrays(backend) -> Arrays:
    """Return a factory of float32 arrays for the backend."""
    return Arrays(backend, np.float32)


@pytest.fixture(
    params=[("numpy", np.float32), ("numpy", np.float64), ("onednn", np.float32)],
    ids=["numpy-float32", "numpy-float64", "onednn-float32"],
)
def typed(backends, request) -> Arrays:
    """Return a factory of arrays for each backend and each dtype that all its kernels support."""
    name, dtype = request.param
    backend = backends(name)
    assert np.dtype(dtype).name in backend.dtypes
    return Arrays(backend, dtype)


@pytest.fixture(params=[(FLOAT32, FLOAT32, None), (FLOAT64, FLOAT64, None), (FLOAT32, FLOAT32, BFLOAT16)], ids=str)
def precision(request):
    """Return the dtypes of the parameters, of their gradients, and of the copy of the parameters."""
    return request.param
