"""Tests of runs on samples in many files: they equal those on one file, and whole files can be held out."""

import json
import shutil

import h5py
import numpy as np
import pytest

from halograd.errors import UserError
from halograd.training.log import read_log
from halograd.training.run import train
from halograd.training.trained import evaluate
from tests.training.cuts import logged_losses
from tests.training.runs import write_arrays, write_config

LENGTHS = (4, 7, 1, 7)


def write(folder):
    """Write the data in one file, and also divided into several files."""
    write_config(folder)
    (folder / "parts").mkdir()
    first = 0
    with h5py.File(folder / "data.h5") as whole:
        for i, n in enumerate(LENGTHS):
            arrays = {name: whole[name][first : first + n] for name in ("inputs", "mask")}
            write_arrays(folder / "parts" / f"run{i}.h5", arrays, inputs="NHWC")
            first += n


@pytest.mark.ranks(1, 3)
def test_the_run_is_that_of_one_file(comm, config, caplog):
    folder = config.parent
    cut = [f"strategy.height={comm.size}", "data.open_files=2", "output.log_steps=1"]
    whole = train(config, [*cut, f"output.directory={folder / 'one'}"], comm=comm)
    for name, path in (("folder", folder / "parts"), ("pattern", folder / "parts" / "*.h5")):
        found = train(config, [*cut, f"data.path={path}", f"output.directory={folder / name}"], comm=comm)
        assert found["validation"] == whole["validation"]
        comm.Barrier()
        assert logged_losses(folder / name) == logged_losses(folder / "one")
    said = [r.message for r in caplog.records if "are both trained on and held out" in r.message]
    assert len(said) == (2 if comm.rank == 0 else 0)
    judged = evaluate(folder / "folder", cut, comm=comm)
    assert judged["loss"] == pytest.approx(whole["validation"]["loss"], rel=1e-12)


@pytest.mark.ranks(2)
def test_whole_files_are_held_out(comm, config, caplog):
    folder = config.parent
    cut = ["strategy.height=2", f"data.path={folder / 'parts'}", "data.split=file", "training.epochs=1"]
    train(config, cut, comm=comm)
    comm.Barrier()
    begun = read_log(folder / "out" / "log.jsonl", "begin")[-1]
    assert begun["held_out"] in LENGTHS and begun["samples"] + begun["held_out"] == sum(LENGTHS)
    assert not [r for r in caplog.records if "held out" in r.message]


@pytest.mark.ranks(1, 2)
def test_a_run_goes_on_with_the_samples_it_began_with(comm, config):
    """A resumed run does not train on samples that it held out, also if a renamed file shifts all sample numbers."""
    folder = config.parent
    cut = [f"strategy.height={comm.size}", f"data.path={folder / 'parts'}"]
    train(config, [*cut, "training.epochs=1"], comm=comm)
    wanted = evaluate(folder / "out", comm=comm)

    def rename(before, after):
        comm.Barrier()
        if comm.rank == 0:
            (folder / before).rename(folder / after)
        comm.Barrier()

    rename("parts/run0.h5", "parts/run9.h5")
    for samples in ("validation", "training"):
        with pytest.raises(UserError, match=r'renamed .*; undo that, or evaluate "all"'):
            evaluate(folder / "out", samples=samples, comm=comm)
    assert np.isfinite(evaluate(folder / "out", samples="all", comm=comm)["loss"])
    # A caller that names data asks for these.
    other = evaluate(folder / "out", [f"data.path={folder / 'parts' / '*.h5'}"], comm=comm)
    assert other["loss"] != wanted["loss"]
    with pytest.raises(UserError, match=r"13 of 19 .* 4 files, \w{8}\), got .*13 of 19"):
        train(config, [*cut, "training.epochs=2"], resume=True, comm=comm)
    rename("parts/run9.h5", "parts/run0.h5")
    rename("parts", "elsewhere")
    moved = [f"strategy.height={comm.size}", f"data.path={folder / 'elsewhere'}"]
    assert evaluate(folder / "out", moved, comm=comm) == wanted
    assert train(config, [*moved, "training.epochs=2"], resume=True, comm=comm)["steps"] == 6


@pytest.mark.ranks(2)
def test_a_file_that_differs_is_named_on_all_ranks(comm, config):
    """A file that differs from the others is named on all ranks, although different ranks examine the files."""
    folder = config.parent
    if comm.rank == 0:
        with h5py.File(folder / "parts" / "run1.h5", "r+") as file:
            x = file["inputs"][:, :-1]
            del file["inputs"], file["mask"]
            file["inputs"], file["mask"] = x, np.zeros(x.shape[:-1], np.uint8)
            file["inputs"].attrs["layout"] = "NHWC"
    comm.Barrier()
    cut = ["strategy.height=2", f"data.path={folder / 'parts'}"]
    with pytest.raises(UserError, match=r"^\S*run1.h5: 'inputs': .*run0.h5, got \(15, 16, 3\)"):
        train(config, cut, comm=comm)
    if comm.rank == 0:
        (folder / "parts" / "run3.h5").write_bytes(b"no HDF5")
    comm.Barrier()
    with pytest.raises(UserError, match=r"^\S*run3.h5: "):
        train(config, cut, comm=comm)
    with pytest.raises(UserError, match="expected files, got none by"):
        train(config, ["strategy.height=2", f"data.path={folder / '*.none'}"], comm=comm)


@pytest.mark.ranks(1)
def test_splits_that_the_data_do_not_allow(comm, config):
    with pytest.raises(UserError, match=r"data.split: .*several files"):
        train(config, ["data.split=file"], comm=comm)
    with pytest.raises(UserError, match=r"data.split: .*'simulation'"):
        train(config, ["data.split=group"], comm=comm)
    assert not train(config, ["data.split=file", "data.validation=0"], comm=comm)["validation"]  # nothing is held out


@pytest.mark.ranks(1, 2)
def test_a_run_of_an_older_order_goes_on_by_a_list(comm, config):
    """A run of older versions, which sorted 10 before 2, resumes with a list of files in that order, or is an error."""
    folder, names = config.parent / "parts", ("run1.h5", "run10.h5", "run2.h5", "run3.h5")
    if comm.rank == 0:
        for number, name in reversed(list(enumerate(names))):
            (folder / f"run{number}.h5").rename(folder / name)
    comm.Barrier()
    older = f"data.path={json.dumps([str(folder / name) for name in names])}"
    cut = [f"strategy.height={comm.size}"]
    train(config, [*cut, older, "training.epochs=1"], comm=comm)
    comm.Barrier()
    with pytest.raises(UserError, match=r"changed \(or sorted as text, .*list them"):
        train(config, [*cut, f"data.path={folder}"], resume=True, comm=comm)
    assert train(config, [*cut, older, "training.epochs=2"], resume=True, comm=comm)["stopped"] is None


@pytest.mark.ranks(2)
def test_the_run_on_other_formats_is_that_on_hdf5(comm, config):
    """A run on a group of Zarr, and one on two TIFF files per sample."""
    zarr, tifffile = pytest.importorskip("zarr"), pytest.importorskip("tifffile")
    folder = config.parent
    if comm.rank == 0:
        (folder / "tiff").mkdir()
        with h5py.File(folder / "data.h5") as whole:
            x, mask = whole["inputs"][()], whole["mask"][()]
        group = zarr.open_group(str(folder / "data.zarr"), mode="w")
        group.create_array("inputs", data=x, chunks=(4, 8, 16, 3)).attrs["layout"] = "NHWC"
        group.create_array("mask", data=mask)
        for k in range(len(x)):
            tifffile.imwrite(folder / f"tiff/s{k}_x.tif", x[k], photometric="rgb", tile=(16, 16), compression="zlib")
            tifffile.imwrite(folder / f"tiff/s{k}_m.tif", mask[k])
    comm.Barrier()
    cut = ["strategy.height=2", "output.log_steps=1", "training.epochs=1", "data.split=random"]
    train(config, [*cut, f"output.directory={folder / 'h5'}"], comm=comm)
    names = ['data.inputs="{sample}_x.tif"', 'data.targets="{sample}_m.tif"']
    for name, options in (("data.zarr", []), ("tiff", names)):
        train(config, [*cut, f"data.path={folder / name}", *options, f"output.directory={folder / 'other'}"], comm=comm)
        comm.Barrier()
        assert logged_losses(folder / "other") == logged_losses(folder / "h5")
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder / "other")
        comm.Barrier()


@pytest.mark.ranks(2)
def test_named_files_are_held_out(comm, config):
    folder = config.parent
    cut, names = ["strategy.height=2", f"data.path={folder / 'parts'}", "training.epochs=1"], '["run1", "run2"]'
    train(config, [*cut, f"data.validation={names}", f"output.directory={folder / 'named'}"], comm=comm)
    comm.Barrier()
    begun = read_log(folder / "named" / "log.jsonl", "begin")[-1]
    assert (begun["held_out"], begun["samples"]) == (8, 11)
    with pytest.raises(UserError, match=r"data.validation: .* got 'run9', .*: run0"):
        train(config, [*cut, 'data.validation=["run9"]'], comm=comm)
