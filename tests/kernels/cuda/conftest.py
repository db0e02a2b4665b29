"""The CUDA kernels as a backend on the CPU, in place of the backends of the tests one folder up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from halograd.kernels import Backend
from halograd.kernels.cuda import CudaKernels, CupyDevice
from halograd.kernels.cuda.launch import Launch
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels
from halograd.kernels.numpy import NumpyBackend
from tests.gpu.place import PLACES

from ..conftest import Arrays
from . import mirror
from .host import HostDevice, compiler

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]


class HostBackend(NumpyBackend):
    """What cuDNN does by NumPy, all else by the CUDA kernels."""

    name: ClassVar[str] = "cuda on the host"
    fuses_batch_norm = True

    def __init__(self, cuda: CudaKernels) -> None:
        super().__init__()
        self.cuda = cuda
        self.dtypes = tuple(d.name for d in DTYPES)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.cuda.device.empty(shape, dtype)

    def _max_pool(self, *args: Any) -> Any:
        return self.cuda.max_pool(*args)

    def _average_pool(self, *args: Any) -> Any:
        return self.cuda.average_pool(*args)

    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        return self.cuda.batch_norm(arrays)

    def _bias(self, *args: Any) -> Any:
        return self.cuda.bias(*args)

    def _bias_gradient(self, *args: Any) -> Any:
        return self.cuda.bias_gradient(*args)

    def _sum_of_squares(self, *args: Any) -> Any:
        return self.cuda.sum_of_squares(*args)

    def _clip(self, *args: Any) -> Any:
        return self.cuda.clip(*args)

    def _activation(self, *args: Any) -> Any:
        return self.cuda.activation(*args)

    def _add(self, *args: Any) -> Any:
        return self.cuda.add(*args)


@pytest.fixture(scope="session", params=PLACES)
def host(request, tmp_path_factory) -> Iterator[HostDevice]:
    """The double of a device, and a real one where there is one; the latter's double with ``HALOGRAD_CUDA_MIRROR``."""
    folder: Path = tmp_path_factory.mktemp("cuda-on-the-host")
    real, mirrored = request.param == "gpu", bool(os.environ.get("HALOGRAD_CUDA_MIRROR"))
    if not real and compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    if not real and not mirrored:
        yield HostDevice(folder)
        return
    device = mirror.on_cupy(folder, CupyDevice()) if real else mirror.on_host(folder, HostDevice(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch: device.run(launch))
        yield device


@pytest.fixture
def cuda(host) -> Iterator[CudaKernels]:
    """The kernels on the double, threads in their order."""
    host.set_order(False)
    yield CudaKernels(host)
    host.set_order(False)


@pytest.fixture
def backend(cuda) -> Iterator[Backend]:
    """The kernels as a backend."""
    with HostBackend(cuda) as made:
        yield made


@pytest.fixture
def arrays(backend) -> Arrays:
    """float32 arrays."""
    return Arrays(backend, np.float32)


@pytest.fixture(params=[d for d in DTYPES if d.name != "float16"], ids=str)
def typed(backend, host, request) -> Arrays:
    """Arrays of a dtype; with every other one threads run from the last to the first.

    float16 differs from bfloat16 by two conversions: test_around.py.
    """
    host.set_order(request.param.name == "float64")
    return Arrays(backend, request.param)
