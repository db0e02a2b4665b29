"""Fixtures of the tests of CUDA kernels, which run as a CPU backend the tests of the parent folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from halograd.kernels import Backend
from halograd.kernels.cuda.launch import CupyLauncher, Launch
from tests.gpu.place import PLACES

from ..conftest import BFLOAT16, FLOAT32, FLOAT64, Arrays
from . import mirror
from .host import HostBackend, HostLauncher, compiler

DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]


@pytest.fixture(scope="session", params=PLACES)
def host(request) -> Iterator[HostLauncher]:
    """Return a launcher: the double of a device, a mirrored GPU, or the mirrored double (HALOGRAD_CUDA_MIRROR)."""
    real, mirrored = request.param == "gpu", bool(os.environ.get("HALOGRAD_CUDA_MIRROR"))
    if not real and compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    if not real and not mirrored:
        yield HostLauncher()
        return
    device = mirror.on_cupy(CupyLauncher()) if real else mirror.on_host(HostLauncher())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch: device.run(launch))
        yield device


@pytest.fixture
def backend(host) -> Iterator[Backend]:
    """Return the kernels on the launcher, with threads in forward order."""
    host.set_order(False)
    with HostBackend(host) as made:
        yield made
    host.set_order(False)


@pytest.fixture
def cuda(backend) -> HostBackend:
    """Return the backend under the name that tests of CUDA kernels use."""
    return backend


@pytest.fixture
def arrays(backend) -> Arrays:
    """Return a factory of float32 arrays of the backend."""
    return Arrays(backend, np.float32)


@pytest.fixture(params=[d for d in DTYPES if d.name != "float16"], ids=str)
def typed(backend, host, request) -> Arrays:
    """Return a factory of arrays of a dtype; threads run in reverse order for float64.

    float16 differs from bfloat16 by two conversions: test_around.py.
    """
    host.set_order(request.param.name == "float64")
    return Arrays(backend, request.param)


@pytest.fixture(
    params=[
        (FLOAT32, FLOAT32, None),
        (FLOAT64, FLOAT64, None),
        (FLOAT32, BFLOAT16, BFLOAT16),
        (FLOAT32, DTYPES[2], DTYPES[2]),
        (FLOAT32, FLOAT32, BFLOAT16),
    ],
    ids=str,
)
def precision(request):
    """Return the dtypes of the parameters, of their gradients, and of the copy of the parameters."""
    return request.param
