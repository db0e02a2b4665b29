"""Tests of the requirements on a GPU: libraries that load and match, a driver, and an MPI that starts ranks."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.facts import facts, missing
from tests.gpu.place import gpu_count, only_gpu


@pytest.mark.gpu
def test_a_gpu_answers():
    if not gpu_count():
        pytest.skip("needs a GPU; without one nothing else is marked gpu here")


@only_gpu
def test_what_is_needed_is_there(record_property):
    found = facts()
    record_property("detail", str(found))
    assert not missing(found)


@only_gpu
def test_versions_are_those_that_were_examined():
    from halograd.kernels.cudnn.frontend import Frontend, load

    Frontend(load())


@only_gpu
def test_one_library_of_each_is_loaded(record_property):
    """Only one cuDNN is loaded: torch and CuPy may each contain one, and the import order would select it."""
    from halograd.kernels import get_backend

    with get_backend("cudnn") as backend:
        x, w, y = (backend.zeros(shape, "float32") for shape in ((2, 4), (3, 4), (2, 3)))
        backend.dense_forward(x, w, None, y)()
        backend.synchronize()
    maps = Path("/proc/self/maps").read_text()
    found = {name: set(re.findall(rf"\S*/lib{name}\.so[.\d]*", maps)) for name in ("cudnn", "cublas", "nccl", "cudart")}
    record_property("detail", str({name: sorted(paths) for name, paths in found.items()}))
    assert len(found["cudnn"]) == len(found["cublas"]) == 1, found


@only_gpu
def test_the_properties_of_the_device_are_kept(record_property):
    """The properties of the device are recorded, as a GPU is described in tests/kernels/cudnn/planning.py."""
    import cudnn

    found = cudnn.create_device_properties(0).serialize()
    record_property("detail", found if isinstance(found, str) else bytes(found).decode(errors="replace"))


@only_gpu
def test_numpy_is_one_that_cupy_was_tested_with(record_property):
    from halograd.cli.doctor import NUMPY

    last = ".".join(map(str, NUMPY))
    newer = tuple(map(int, np.__version__.split(".")[:2])) > NUMPY
    record_property("detail", f"NumPy {np.__version__}; CuPy was tested with versions up to {last}" * newer)


@pytest.mark.gpu
@pytest.mark.ranks(2)
def test_two_ranks_start_on_one_gpu(record_property):
    if not gpu_count():
        pytest.skip("needs a GPU")
    from mpi4py import MPI

    from halograd.comm import Communicator
    from halograd.training.backend import open_kernels
    from halograd.training.config import BackendConfig

    with Communicator(MPI.COMM_WORLD) as comm, open_kernels(BackendConfig(kernels="cudnn"), comm) as kernels:
        array = kernels.device.array(np.full(3, comm.rank + 1.0))
        total = comm.reduction(array)
        total.run()
        assert kernels.device.to_host(array).tolist() == [3, 3, 3]
        total.close()
        record_property("detail", MPI.Get_library_version().splitlines()[0][:100].strip("\0"))


@only_gpu
def test_the_compute_stream_is_current_behind_any_other():
    """The compute stream is current after a context with another stream; CuPy itself returns to the null stream."""
    import cupy

    from halograd.device.cupy import cupy_device

    device = cupy_device()
    array = cupy.arange(64, dtype="float32").reshape(8, 8)
    for look in (lambda: array[:, ::2].get(stream=device.compute), lambda: device.to_host(array[:, ::2])):
        with cupy.cuda.Stream(non_blocking=True):
            array[:] = array + 0
        look()
        assert cupy.cuda.get_current_stream().ptr == device.compute.ptr
