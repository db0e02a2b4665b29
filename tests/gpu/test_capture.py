"""Tests of CUDA graphs: replayed passes of small networks give the results of passes kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import Backend, Geometry, get_backend
from tests.gpu.place import PLACES, only_gpu
from tests.support.fake_device import FakeBackend
from tests.training.device_steps import NETWORKS, train

STEPS = 6  # three of them replayed


@pytest.fixture(scope="module", params=PLACES)
def kernels(request) -> Iterator[Backend]:
    """Return kernels of the double, whose graphs repeat recorded calls, and of a GPU."""
    with FakeBackend() if request.param == "double" else get_backend("cudnn", deterministic=True) as backend:
        yield backend


@only_gpu
@pytest.mark.parametrize("what", ["convolution", "dense", "copy and sum"])
def test_operations(what):
    """Single operations of cuDNN, cuBLAS and CuPy give the same results in a captured graph."""
    with get_backend("cudnn") as k:
        x, y = (k.device.array(np.arange(2 * 6 * 6 * 8).reshape(2, 6, 6, 8) / 100.0, "float32") for _ in range(2))
        if what == "convolution":
            w = k.device.array(np.arange(8 * 3 * 3 * 8).reshape(8, 3, 3, 8) / 1000.0, "float32")
            run = k.conv_forward(x, w, None, y, Geometry.of((3, 3), 1, 1))
        elif what == "dense":
            w = k.device.array(np.arange(64).reshape(8, 8) / 10.0, "float32")
            run = k.dense_forward(x.reshape(-1, 8), w, None, y.reshape(-1, 8))
        else:

            def run():
                np.copyto(y, x)
                np.add(y, x, out=y)
                y.sum(axis=(0, 1, 2), out=x[0, 0, 0])

        before = k.device.to_host(x)
        run()
        expected = k.device.to_host(y)
        k.device.assign(x, before)
        k.before_capture()
        launch = k.device.capture(run)
        k.device.assign(x, before)
        y.fill(np.nan)
        launch()
        assert np.array_equal(k.device.to_host(y), expected)


@pytest.mark.parametrize("passes", [(), ("fork",)], ids=["", "fork"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_steps(kernels, name, dtype, passes):
    with Communicator(MPI.COMM_SELF) as comm:
        options = {"comm": comm, "kernels": kernels, "parts": {}, "dtype": dtype, "steps": STEPS}
        graphs = {False: {}, True: {"reduction": {"passes": passes}}}
        found = {graph: _train(NETWORKS[name](), graph, **options, **more) for graph, more in graphs.items()}
    losses, params = found[False]
    np.testing.assert_allclose(found[True][0], losses, rtol=1e-6, err_msg="losses")
    for key, array in params.items():
        np.testing.assert_allclose(found[True][1][key], array, rtol=1e-5, atol=1e-6, err_msg=key)


def _train(network, graph, comm, kernels, parts, **options):
    return train(network, comm, kernels, parts, graph=graph, **options)[:2]
