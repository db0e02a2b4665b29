"""Tests of a user's data sets, from a function in a file or a script: the same results as HDF5, under every cut."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.data import ArrayDataset
from halograd.errors import UserError
from halograd.training import apply, evaluate, train
from tests.training.cuts import CUTS, logged_losses, overrides_of
from tests.training.runs import OPTIONS, unet, write_config

DATA = """
from pathlib import Path
import numpy as np
from halograd.data import ArrayDataset

def open(path, labelled=True):
    folder = Path(path if isinstance(path, str) else path[0])
    arrays = {"x": np.load(folder / "x.npy", mmap_mode="r")}
    if labelled:
        arrays["target"] = np.load(folder / "t.npy", mmap_mode="r")
    return ArrayDataset(arrays, ["target"] if labelled else [], path=folder)

def nothing(path):
    return 7

def others(path):
    return ArrayDataset({"y": np.zeros((8, 4, 4, 1))}, [])

def failing(path):
    raise KeyError(path)
"""


def write(folder):
    write_config(folder)
    (folder / "data.py").write_text(DATA)
    (folder / "arrays").mkdir()
    with h5py.File(folder / "data.h5") as file:
        np.save(folder / "arrays/x.npy", file["inputs"][()])
        np.save(folder / "arrays/t.npy", file["mask"][()][..., None])


OWN = ['data.path="arrays"', 'data.file="data.py:open"']


@pytest.mark.ranks(1, 2, 4)
def test_by_a_function(comm, config):
    """A user's data set gives the results of the same samples in HDF5: training, resumption, evaluation, `apply`."""
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*overrides_of(cut), f"output.directory=cut{number}"]
        train(config, [*sets, *OWN, "training.epochs=1"], comm=comm)
        train(config, [*sets, *OWN, "training.epochs=2"], True, comm=comm)
        found = evaluate(config, [*sets, *OWN], comm=comm)
        apply(config, ["arrays"], f"{number}.h5", [*sets, *OWN, "data.options={labelled = false}"], comm=comm)
        comm.barrier()
        if comm.rank == 0:
            alone = ["output.directory=alone"]
            if not number:
                train(config, [*alone, "training.epochs=1"], comm=MPI.COMM_SELF)
                train(config, [*alone, "training.epochs=2"], True, comm=MPI.COMM_SELF)
                apply(config, ["data.h5"], "alone.h5", alone, comm=MPI.COMM_SELF)
            want = evaluate(config, alone, comm=MPI.COMM_SELF)
            assert found["loss"] == pytest.approx(want["loss"], rel=1e-10)
            with h5py.File(f"{number}.h5") as file, h5py.File("alone.h5") as theirs:
                np.testing.assert_allclose(file["prediction"][()], theirs["prediction"][()], rtol=1e-9, atol=1e-12)
        comm.barrier()


@pytest.mark.ranks(1, 2)
def test_losses_are_those_of_the_file(comm, config):
    whole = f"strategy.height={comm.size}"
    train(config, [whole, "output.directory=file"], comm=comm)
    train(config, [whole, "output.directory=own", *OWN], comm=comm)
    found, want = (logged_losses(config.parent / run) for run in ("own", "file"))
    assert found == want


@pytest.mark.ranks(1, 2)
def test_given_by_a_script(comm, config):
    x, t = (np.load(config.parent / f"arrays/{name}.npy") for name in "xt")
    data, new = ArrayDataset({"x": x, "target": t}), ArrayDataset({"x": x}, [])
    cut = {"height": comm.size}
    run = hg.fit(unet(), data, "script", comm=comm, strategy=cut, validation=0.3, **OPTIONS)
    file = hg.fit(unet(), "data.h5", "by-file", comm=comm, strategy=cut, validation=0.3, **OPTIONS)
    assert run.losses == file.losses and run.history == file.history
    run.apply(new, "p.h5")
    file.apply("data.h5", "q.h5")
    comm.barrier()
    with h5py.File("p.h5") as mine, h5py.File("q.h5") as theirs:
        np.testing.assert_array_equal(mine["prediction"][()], theirs["prediction"][()])


@pytest.mark.ranks(1, 2)
def test_refusals(comm, config):
    for function, message in (
        ("nothing", r"expected data\.py:nothing to return a halograd\.data\.Dataset, got int without 'fields'"),
        ("others", r"expected fields for the inputs of the network \(x, target\), got y"),
        ("failing", r"data\.py:failing failed: KeyError: 'arrays' \(.*data\.py, line 20\)"),
        ("absent", r"expected a function 'absent' in data\.py, got open, nothing, others, failing"),
    ):
        with pytest.raises(UserError, match=rf"data\.file: {message}"):
            train(config, ['data.path="arrays"', f'data.file="data.py:{function}"'], comm=comm)
