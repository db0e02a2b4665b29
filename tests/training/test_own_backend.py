"""Tests of a backend in a user's file, which changes some kernels of another one and is named by its file."""

import numpy as np
import pytest

from halograd.errors import UserError
from halograd.kernels import Geometry, KernelError, get_backend
from halograd.training.log import read_log
from halograd.training.run import train
from tests.training.cuts import curve

COUNTED = """
from pathlib import Path

from halograd.kernels.numpy import NumpyBackend

class Counted(NumpyBackend):
    name = "counted"
    convolutions = 0

    def _conv_forward(self, *arguments):
        Counted.convolutions += 1
        return super()._conv_forward(*arguments)

class Other:
    name = "other"
"""


@pytest.fixture
def counted(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "kernels.py"
    path.write_text(COUNTED)
    return f"{path}:Counted"


def test_it_is_found_by_its_file_and_computes(counted):
    geometry = Geometry(kernel=(3,), stride=(1,), dilation=(1,), padding=((1, 1),))
    x, w, results = np.ones((1, 5, 1), np.float32), np.ones((1, 3, 1), np.float32), []
    for name in (counted, "numpy"):
        with get_backend(name) as backend:
            y = backend.zeros((1, 5, 1), "float32")
            backend.conv_forward(x, w, None, y, geometry)()
            results.append(y.copy())
    np.testing.assert_array_equal(*results)
    with get_backend(counted) as backend:
        assert backend.convolutions == 1 and backend.describe().startswith("counted ")


def test_a_run_names_it(comm, config, counted):
    """A run with a user's backend has the losses of the backend that it extends, and the log names it."""
    folder = config.parent
    for name, kernels in (("own", counted), ("theirs", "numpy")):
        train(config, [f"backend.kernels={kernels}", f"output.directory={folder / name}"], comm=comm)
    assert curve(folder / "own") == curve(folder / "theirs")
    assert "counted" in (folder / "own" / "log.jsonl").read_text()
    assert read_log(folder / "own" / "log.jsonl", "step")


def test_what_is_refused(counted, comm, config):
    file = counted.rpartition(":")[0]
    with pytest.raises(
        UserError, match=r"backend\.kernels: .*:Other: .*from Backend"
    ):
        train(config, [f"backend.kernels={file}:Other"], comm=comm)
    with pytest.raises(UserError, match=r"backend: .*kernels\.py"):
        get_backend(f"{file}:Missing")
    with pytest.raises(KernelError, match=r"precision strict .*counted, got 'tf32'"):
        get_backend(counted, precision="tf32")
    with pytest.raises(UserError, match=r"kernels = .* with it, got"):
        train(config, [f"backend.kernels={counted}", "backend.graph=true"], comm=comm)
