"""Tests of damaged files: checkpoints, parts of predictions, and HDF5 files of all kinds."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import h5py
import pytest

from halograd.data import split
from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.kernels import KernelError, get_backend
from halograd.training.run import train
from tests.harness.limits import scaled
from tests.training.damage import GOOD, campaign
from tests.training.fuzz_hdf5 import MUTATIONS as HDF5_MUTATIONS
from tests.training.fuzz_hdf5 import prepare
from tests.training.part_damage import GOOD as PART_GOOD
from tests.training.part_damage import MUTATIONS, Job, case_of, outcome
from tests.training.runs import SAMPLES, write_config


def test_no_damage_is_accepted():
    """No damaged checkpoint is accepted; a child process executes the cases, so that a hang or a crash is detected."""
    counted = campaign(300)
    assert set(counted) <= GOOD and counted["detected"] > 250 and counted.total() == 300, counted


def test_no_damage_of_parts_is_accepted():
    """No damaged part is accepted; a child process executes the cases, so that a hang or a crash is detected."""
    counted = campaign(4 * len(MUTATIONS), program="tests.training.part_damage")
    assert set(counted) <= PART_GOOD and counted.total() == 4 * len(MUTATIONS), counted
    assert counted["anew"] > 30 and counted["refused"] > 2, counted


@pytest.mark.ranks(2)
def test_of_one_of_two_ranks(comm, working):
    """After damage to one rank's part, all ranks compute anew or raise the same error, for every mutation."""
    job, counted = Job(working, comm), Counter[str]()
    for number in range(3 * len(MUTATIONS)):
        name = case_of(job, 3, number)
        found = outcome(job)
        assert found in PART_GOOD, f"{name}, case {number}: {found}"
        counted[found] += 1
    assert counted["anew"] > 20, counted


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("other", ["seed", "sources", "settings"])
def test_of_another_job_nothing_is_continued(comm, working, other):
    """A job does not continue parts of another run, of other source files of the samples, or of other settings."""
    job = Job(working, comm, others=False)
    changed = {"seed": job.exchange, "sources": job.touch, "settings": lambda: None}[other]
    sets = ["data.normalize=false"] if other == "settings" else []
    job.interrupt(job.out, 3)
    job.root(changed)
    computed = job.run(job.out, sets=[*job.sets, *sets])["computed"]
    assert computed == 8
    job.interrupt(job.out, 3)
    assert job.run(job.out)["computed"] == 2


def fuzz(*arguments: str) -> str:
    """Return the output of the program, after a check that it has found no error."""
    command = [sys.executable, "-m", "tests.training.fuzz_hdf5", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(850))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_mutation():
    """Every mutation ends as specified, except those of the mask that are also applied to the inputs."""
    wanted = [name for name in HDF5_MUTATIONS if name.replace("mask", "inputs") == name or "mask_of" in name]
    assert f"{len(wanted)} cases on 1 rank(s)" in fuzz("--only", "^(?!mask_(?!of)|virtual_mask)")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_on_two_ranks():
    """One mutation of each kind ends as specified on two ranks: names, attributes, storage, read errors."""
    names = ["links_in_a_circle", "names_scalar", "virtual_mask_source_missing", "inputs_some_chunks", "nan"]
    assert f"{len(names)} cases on 2 rank(s)" in fuzz("--ranks", "2", "--only", f"^({'|'.join(names)})$")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["external_outside", "simulation_texts", "virtual_inputs_source_short"])
def test_all_ranks_raise_the_same(comm, tmp_path, name):
    folder = tmp_path / "data"
    if comm.rank == 0:
        folder.mkdir()
        prepare(folder, name, 0)
    folder = Path(comm.bcast(str(folder)))
    with pytest.raises(DataError) as caught:
        train(folder / "run.toml", [f"strategy.height={comm.size}"], comm=comm)
    assert len({*comm.allgather(str(caught.value))}) == 1 and "\n" not in str(caught.value)


@pytest.mark.ranks(2, 3)
@pytest.mark.timeout(60)
def test_a_fault_of_one_rank_while_statistics_are_computed(comm, config):
    """An error of one rank during the statistics is raised on all ranks, which do not wait for its sums."""
    if comm.rank == 0:
        sample = split(SAMPLES, 0.3, seed=7)[0][1]  # rank 1 reads it, for every number of ranks
        with h5py.File(config.with_name("data.h5"), "r+") as file:
            file["inputs"][sample, 0, 0, 0] = float("nan")
    comm.Barrier()
    with pytest.raises(DataError, match=r"^rank 1: .*data\.h5: nan in sample ") as caught:
        train(config, [f"strategy.sample={comm.size}"], comm=comm)
    assert caught.value.agreed and caught.value.arose_here == (comm.rank == 1)


@pytest.mark.ranks(1)
def test_numbers_from_outside_if_it_is_allowed(comm, tmp_path):
    """Data in external files are an error, unless ``data.allow_external`` is set."""
    folder = tmp_path / "data"
    folder.mkdir()
    prepare(folder, "virtual_outside", 0)
    with pytest.raises(DataError, match=r"set data\.allow_external = true"):
        train(folder / "run.toml", comm=comm)
    assert train(folder / "run.toml", ["data.allow_external=true"], comm=comm)["steps"] == 3


@pytest.fixture
def onednn():
    try:
        get_backend("onednn")
    except KernelError:
        pytest.skip("needs oneDNN: pip install onednn-cpu-gomp")


@pytest.mark.ranks(1)
def test_doubles_and_kernels_that_have_none(comm, tmp_path, onednn):
    """Files of float64 are converted to the dtype of a run; computing in float64 by oneDNN is a one-line error."""
    config = write_config(tmp_path)
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        values = file["inputs"][()]
        del file["inputs"]
        file.create_dataset("inputs", data=values, dtype=">f8").attrs["layout"] = "NHWC"
    wanted = ["backend.kernels=onednn", "training.epochs=1"]
    message = (
        r'training\.dtype: expected float32.* with kernels = "onednn", got float64; use float32, or the backend numpy'
    )
    with pytest.raises(UserError, match=message):
        train(config, wanted, comm=comm)
    assert train(config, [*wanted, "training.dtype=float32"], comm=comm)["steps"] == 3
