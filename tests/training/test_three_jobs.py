"""The jobs of examples/: small data of each are trained on, evaluated and applied under cuts as by one process."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.training import apply, evaluate, train
from tests.training.cuts import logged_losses, overrides_of

JOBS = Path(__file__).parents[2] / "examples"
CUT = {1: {}, 2: {"height": 2}, 4: {"height": 2, "width": 2}}


@pytest.fixture
def job(request, shared, comm, monkeypatch):
    """Enter a folder of a job with its data and new data; return the settings of a short run in float64."""
    name, sizes, new = request.param
    folder = shared / name
    if comm.rank == 0:
        shutil.copytree(JOBS / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        write = importlib.import_module(f"examples.{name}.data").write
        write(*sizes(folder))
        write(*new(folder))
    comm.barrier()
    monkeypatch.chdir(folder)
    return ["training.epochs=2", 'training.dtype="float64"', 'backend.kernels="numpy"']


def check(comm, sets, data, run, predicted):
    """Assert that losses and scores under a cut are those of one process; apply the network to new data."""
    cut = overrides_of(CUT[comm.size])
    train("run.toml", [*sets, *cut], comm=comm)
    found = evaluate("run.toml", [*sets, *cut], comm=comm)
    apply(run, data, predicted, what="classes", comm=comm)
    if comm.rank == 0:
        alone = [*sets, "output.directory=alone"]
        train("run.toml", alone, comm=MPI.COMM_SELF)
        want = evaluate("run.toml", alone, comm=MPI.COMM_SELF)
        np.testing.assert_allclose(logged_losses(Path(run)), logged_losses(Path("alone")), rtol=1e-10)
        assert {k: found[k] for k in want.keys() - {"checkpoint"}} == pytest.approx(
            {k: want[k] for k in want.keys() - {"checkpoint"}}, rel=1e-10
        )


def only(*jobs):
    return pytest.mark.parametrize("job", jobs, indirect=True, ids=[job[0] for job in jobs])


@only(("climate", lambda f: (f / "ocean.nc", 10, 16, 24), lambda f: (f / "next.nc", 4, 16, 24)))
@pytest.mark.ranks(1, 2, 4)
def test_climate(comm, job):
    sets = [*job, "model.rows=16", "model.columns=24", "model.width=4"]
    check(comm, sets, "next.nc", "runs/ocean", "predicted.nc")
    if comm.rank == 0:
        with h5py.File("predicted.nc") as file:
            values = file["prediction"]
            assert values.shape == (4, 16, 24, 1) and values.attrs["units"] == "degC"
            assert [values.dims[k][0].name for k in range(3)] == ["/time", "/lat", "/lon"]


@only(("medicine", lambda f: (f / "patients", 4), lambda f: (f / "new", 2, 50, False)))
@pytest.mark.ranks(1, 2, 4)
def test_medicine(comm, job):
    check(comm, [*job, "model.width=2", "data.patches=2"], "new", "runs/lesions", "predicted")
    if comm.rank == 0:
        sources = json.loads(Path("predicted/sources.json").read_text())["files"]
        assert [one["source"] for one in sources.values()] == [f"new/imagesTr/p{n}_0000.nii.gz" for n in (50, 51)]
        shapes = [h5py.File(f"predicted/{name}")["prediction"].shape for name in sources]
        assert len(set(shapes)) == 2


@only(("slide", lambda f: (f / "slides", 2, 1024), lambda f: (f / "new", 1, 1024, 9)))
@pytest.mark.ranks(1, 2, 4)
def test_slide(comm, job):
    check(comm, [*job, "model.width=2", "training.steps_per_epoch=2"], "new", "runs/tumor", "predicted.h5")
    if comm.rank == 0:
        with h5py.File("predicted.h5") as file:
            assert file["prediction"].shape == (1, 256, 256, 1) and file["prediction"].dtype == np.uint8


@pytest.mark.parametrize("name", ["climate", "medicine", "slide"])
def test_own_lines_are_few(name):
    code = [line for line in (JOBS / name / "net.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 30
