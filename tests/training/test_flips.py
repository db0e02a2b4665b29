"""Tests of means over mirror images in `apply`: equal to images by hand under every cut, and refusals."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import apply, train
from tests.training.cuts import CUTS, overrides_of


def read(path):
    with h5py.File(path) as file:
        return file["prediction"][()]


@pytest.mark.ranks(1, 2, 4)
def test_mean_of_images(comm, config):
    if comm.rank == 0:
        train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
        with h5py.File("data.h5") as file:
            x = file["inputs"][:6]
        want = 0
        for axes in ((), (1,), (2,), (1, 2)):
            with h5py.File("image.h5", "w") as file:
                file["inputs"] = np.flip(x, axes)
                file["inputs"].attrs["layout"] = "NHWC"
            apply("out", ["image.h5"], "p.h5", comm=MPI.COMM_SELF)
            want = want + np.flip(read("p.h5"), axes) / 4
        with h5py.File("new.h5", "w") as file:
            file["inputs"] = x
            file["inputs"].attrs["layout"] = "NHWC"
        np.save("want.npy", want)
    comm.barrier()
    for number, cut in enumerate(CUTS[comm.size]):
        apply("out", ["new.h5"], f"mean{number}.h5", overrides_of(cut), comm=comm, flips=["width", "height"])
        np.testing.assert_allclose(read(f"mean{number}.h5"), np.load("want.npy"), rtol=1e-9, atol=1e-12)
    if comm.rank == 0:
        with pytest.raises(UserError, match=r"--flips: .*height, width, got depth"):
            apply("out", ["new.h5"], "x.h5", ["strategy={sample = 1}"], comm=MPI.COMM_SELF, flips=["depth"])
