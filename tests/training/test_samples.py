"""Tests of runs on samples in many files, of any size, augmented or invalid: under every cut."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd import Callback
from halograd.data import DataError, split
from halograd.errors import UserError
from halograd.training import apply
from halograd.training.checkpoint import read_header
from halograd.training.log import read_log
from halograd.training.run import train
from halograd.training.trained import evaluate
from tests.training.cuts import CUTS, check_resumed, logged_losses, overrides_of
from tests.training.runs import EDGE, SAMPLES, read_array, write_arrays, write_config, write_own, written

LENGTHS = (4, 7, 1, 7)


@written
def many_files(folder):
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
def test_the_run_is_that_of_one_file(comm, many_files, caplog):
    folder = many_files.parent
    cut = [f"strategy.height={comm.size}", "data.open_files=2", "output.log_steps=1"]
    whole = train(many_files, [*cut, f"output.directory={folder / 'one'}"], comm=comm)
    for name, path in (("folder", folder / "parts"), ("pattern", folder / "parts" / "*.h5")):
        found = train(many_files, [*cut, f"data.path={path}", f"output.directory={folder / name}"], comm=comm)
        assert found["validation"] == whole["validation"]
        comm.Barrier()
        assert logged_losses(folder / name) == logged_losses(folder / "one")
    said = [r.message for r in caplog.records if "are both trained on and held out" in r.message]
    assert len(said) == (2 if comm.rank == 0 else 0)
    judged = evaluate(folder / "folder", cut, comm=comm)
    assert judged["loss"] == pytest.approx(whole["validation"]["loss"], rel=1e-12)


@pytest.mark.ranks(2)
def test_whole_files_are_held_out(comm, many_files, caplog):
    folder = many_files.parent
    cut = ["strategy.height=2", f"data.path={folder / 'parts'}", "data.split=file", "training.epochs=1"]
    train(many_files, cut, comm=comm)
    comm.Barrier()
    begun = read_log(folder / "out" / "log.jsonl", "begin")[-1]
    assert begun["held_out"] in LENGTHS and begun["samples"] + begun["held_out"] == sum(LENGTHS)
    assert not [r for r in caplog.records if "held out" in r.message]


@pytest.mark.ranks(1, 2)
def test_a_run_goes_on_with_the_samples_it_began_with(comm, many_files):
    """A resumed run does not train on samples that it held out, also if a renamed file shifts all sample numbers."""
    folder = many_files.parent
    cut = [f"strategy.height={comm.size}", f"data.path={folder / 'parts'}"]
    train(many_files, [*cut, "training.epochs=1"], comm=comm)
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
        train(many_files, [*cut, "training.epochs=2"], resume=True, comm=comm)
    rename("parts/run9.h5", "parts/run0.h5")
    rename("parts", "elsewhere")
    moved = [f"strategy.height={comm.size}", f"data.path={folder / 'elsewhere'}"]
    assert evaluate(folder / "out", moved, comm=comm) == wanted
    assert train(many_files, [*moved, "training.epochs=2"], resume=True, comm=comm)["steps"] == 6


@pytest.mark.ranks(2)
def test_a_file_that_differs_is_named_on_all_ranks(comm, many_files):
    """A file that differs from the others is named on all ranks, although different ranks examine the files."""
    folder = many_files.parent
    if comm.rank == 0:
        with h5py.File(folder / "parts" / "run1.h5", "r+") as file:
            x = file["inputs"][:, :-1]
            del file["inputs"], file["mask"]
            file["inputs"], file["mask"] = x, np.zeros(x.shape[:-1], np.uint8)
            file["inputs"].attrs["layout"] = "NHWC"
    comm.Barrier()
    cut = ["strategy.height=2", f"data.path={folder / 'parts'}"]
    with pytest.raises(UserError, match=r"^\S*run1.h5: 'inputs': .*run0.h5, got \(15, 16, 3\)"):
        train(many_files, cut, comm=comm)
    if comm.rank == 0:
        (folder / "parts" / "run3.h5").write_bytes(b"no HDF5")
    comm.Barrier()
    with pytest.raises(UserError, match=r"^\S*run3.h5: "):
        train(many_files, cut, comm=comm)
    with pytest.raises(UserError, match="expected files, got none by"):
        train(many_files, ["strategy.height=2", f"data.path={folder / '*.none'}"], comm=comm)


@pytest.mark.ranks(1)
def test_splits_that_the_data_do_not_allow(comm, many_files):
    with pytest.raises(UserError, match=r"data.split: .*several files"):
        train(many_files, ["data.split=file"], comm=comm)
    with pytest.raises(UserError, match=r"data.split: .*'simulation'"):
        train(many_files, ["data.split=group"], comm=comm)
    assert not train(many_files, ["data.split=file", "data.validation=0"], comm=comm)[
        "validation"
    ]  # nothing is held out


@pytest.mark.ranks(1, 2)
def test_a_run_of_an_older_order_goes_on_by_a_list(comm, many_files):
    """A run of older versions, which sorted 10 before 2, resumes with a list of files in that order, or is an error."""
    folder, names = many_files.parent / "parts", ("run1.h5", "run10.h5", "run2.h5", "run3.h5")
    if comm.rank == 0:
        for number, name in reversed(list(enumerate(names))):
            (folder / f"run{number}.h5").rename(folder / name)
    comm.Barrier()
    older = f"data.path={json.dumps([str(folder / name) for name in names])}"
    cut = [f"strategy.height={comm.size}"]
    train(many_files, [*cut, older, "training.epochs=1"], comm=comm)
    comm.Barrier()
    with pytest.raises(UserError, match=r"changed \(or sorted as text, .*list them"):
        train(many_files, [*cut, f"data.path={folder}"], resume=True, comm=comm)
    assert train(many_files, [*cut, older, "training.epochs=2"], resume=True, comm=comm)["stopped"] is None


@pytest.mark.ranks(2)
def test_the_run_on_other_formats_is_that_on_hdf5(comm, many_files):
    """A run on a group of Zarr, and one on two TIFF files per sample."""
    needs = "needs Zarr and TIFF: pip install 'halograd[formats]'"
    zarr, tifffile = (pytest.importorskip(name, reason=needs) for name in ("zarr", "tifffile"))
    folder = many_files.parent
    if comm.rank == 0:
        (folder / "tiff").mkdir()
        x, mask = read_array(folder / "data.h5", "inputs"), read_array(folder / "data.h5", "mask")
        group = zarr.open_group(str(folder / "data.zarr"), mode="w")
        group.create_array("inputs", data=x, chunks=(4, 8, 16, 3)).attrs["layout"] = "NHWC"
        group.create_array("mask", data=mask)
        for k in range(len(x)):
            tifffile.imwrite(folder / f"tiff/s{k}_x.tif", x[k], photometric="rgb", tile=(16, 16), compression="zlib")
            tifffile.imwrite(folder / f"tiff/s{k}_m.tif", mask[k])
    comm.Barrier()
    cut = ["strategy.height=2", "output.log_steps=1", "training.epochs=1", "data.split=random"]
    train(many_files, [*cut, f"output.directory={folder / 'h5'}"], comm=comm)
    names = ['data.inputs="{sample}_x.tif"', 'data.targets="{sample}_m.tif"']
    for name, options in (("data.zarr", []), ("tiff", names)):
        train(
            many_files,
            [*cut, f"data.path={folder / name}", *options, f"output.directory={folder / 'other'}"],
            comm=comm,
        )
        comm.Barrier()
        assert logged_losses(folder / "other") == logged_losses(folder / "h5")
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder / "other")
        comm.Barrier()


@pytest.mark.ranks(2)
def test_named_files_are_held_out(comm, many_files):
    folder = many_files.parent
    cut, names = ["strategy.height=2", f"data.path={folder / 'parts'}", "training.epochs=1"], '["run1", "run2"]'
    train(many_files, [*cut, f"data.validation={names}", f"output.directory={folder / 'named'}"], comm=comm)
    comm.Barrier()
    begun = read_log(folder / "named" / "log.jsonl", "begin")[-1]
    assert (begun["held_out"], begun["samples"]) == (8, 11)
    with pytest.raises(UserError, match=r"data.validation: .* got 'run9', .*: run0"):
        train(many_files, [*cut, 'data.validation=["run9"]'], comm=comm)


PATCHES_NET = """
import halograd as hg

def build(ignore: bool = True, weights: bool = False):
    x, t = hg.Input((8, 8, 2), name="x"), hg.Input((8, 8, 1), name="mask", dtype="int32")
    y = hg.Conv(3, 3, padding=1)(hg.Conv(4, 3, padding=1, activation="relu")(x))
    loss = hg.SoftmaxCrossEntropy(ignore_index=-1)(y, t) if ignore else hg.SoftmaxCrossEntropy()(y, t)
    if weights:
        loss = hg.SoftmaxCrossEntropy(normalization="weights")(y, t, hg.Input((8, 8, 1), name="valid"))
    return hg.Network({"prediction": y, "loss": loss}, name="patches")
"""
DATA = """[data]
path = "parts"
validation = 0.3
inputs = {x = "image"}
targets = {mask = "label"}
patches = 3
"""
SIZES = ((4, 12, 10), (3, 6, 16), (2, 8, 8))
OWN = """
from halograd.data import open_dataset

def open(path):
    return open_dataset(path, {"x": "image"}, {"mask": "label"}, several_sizes=True)
"""
NEAR = ["data.foreground=0.4", "data.foreground_classes=[2]", "data.augment={flips=['height'], rotate=20}"]


@written
def patches(folder):
    (folder / "parts").mkdir()
    rng = np.random.default_rng(5)
    for i, (n, *grid) in enumerate(SIZES):
        arrays = {"image": rng.standard_normal((n, *grid, 2)), "label": rng.integers(0, 3, (n, *grid)).astype(np.uint8)}
        write_arrays(folder / "parts" / f"s{i}.h5", arrays, image="NHWC")
    write_own(folder, PATCHES_NET, DATA)
    (folder / "own.py").write_text(OWN)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("sets", [[], [*NEAR, "training.steps_per_epoch=3"]], ids=["patches", "foreground"])
def test_patches_as_in_one_process(comm, patches, sets):
    check_resumed(comm, patches, sets, [overrides_of(cut) for cut in CUTS[comm.size][:1]])
    steps = read_log(patches.parent / "cut0/log.jsonl", "begin")[0]["steps_per_epoch"]
    assert steps == (3 if sets else 6 * 3 // 4)


@pytest.mark.ranks(1)
def test_what_is_said_and_refused(comm, patches, capfd):
    said = ["output.progress=true", "data.evaluate=middle"]
    train(patches, [*NEAR[:2], *said, "training.epochs=1"], comm=comm)
    said = " ".join(capfd.readouterr())
    assert "windows of 8x8 in samples of 6x8 to 12x16; the foreground of 'mask' was found in " in said
    assert "only the middle window of every sample is evaluated, 8x8 of 6x8 to 12x16 (" in said
    one = ["data.path=parts/s2.h5", "data.validation=0", "output.directory=one"]
    for sets, message in (
        (["model.ignore=false"], "data.patches: expected samples of at least 8x8 elements, the network's window, got "
         "6x16 in parts/s1.h5, sample 0, beyond which the target 'mask' has no value; give its loss weights"),
        (["data.patches=0"], "parts/s1.h5: 'image': expected samples of shape (12, 10, 2) as in parts/s0.h5, got"),
        (["data.file=own.py:open", "data.patches=0"], "data.patches: expected 1 or more for samples of different"),
        (["training.batch=40"], "expected at most 18, the training samples (3 patches of each) of parts, got 40"),
        ([*one, "data.patches=0", "training.batch=2", NEAR[0]], "data.foreground: expected data.patches = 1 or more"),
        ([*one, NEAR[0], "data.foreground_classes=[7]"], "data.foreground: expected classes 7 in 'mask' of the"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(message)) as error:
            train(patches, ["output.directory=no", *sets], comm=comm)
        assert "\n" not in str(error.value)
    sets = ["data.path=parts/s2.h5", "data.validation=0", "training.steps_per_epoch=5", "training.epochs=2"]
    assert train(patches, [*sets, "output.directory=two"], comm=comm)["steps"] == 10
    own, masked = ["data.file=own.py:open"], ["model.weights=true", "data.invalid=mask"]
    for number, sets in enumerate(([], own, masked)):
        train(patches, [*sets, f"output.directory=same{number}", "training.epochs=1"], comm=comm)
    first, *others = (logged_losses(patches.parent / f"same{number}") for number in range(3))
    assert others == [pytest.approx(first, rel=1e-12)] * 2, "padding does not count, by class or by weight"


@pytest.mark.ranks(1, 2)
def test_a_class_that_does_not_exist_is_found_before_windows_are_drawn(comm, patches):
    """A window with it may be drawn after hours of training, so parts of many samples are read at the start."""
    folder = patches.parent / "parts7"
    if comm.rank == 0:
        shutil.copytree(patches.parent / "parts", folder)
        with h5py.File(folder / "s0.h5", "r+") as file:
            file["label"][3, 11, 9] = 7
    comm.Barrier()
    with pytest.raises(DataError, match=r"s0\.h5: target 7 in sample 3 of 'label' at \(11, 9, 0\)"):
        train(patches, ["data.path=parts7", "output.directory=late"], comm=comm)
    assert not (patches.parent / "late" / "log.jsonl").exists()


RULES = (
    'data.augment={flips = ["height", "width"], turns = true, shifts = ["width"], noise = 0.05, contrast = 0.1, '
    'brightness = 0.1, vectors = [["channel 2", "channel 0"]]}'
)
SMOOTH = (
    "data.augment={rotate = 40, scale = [0.8, 1.3], elastic = {magnitude = 1.5, spacing = 5}, blur = [0.5, 0.9], "
    "gamma = [0.7, 1.4], flips = ['width'], crop = true, probability = {scale = 0.5}}"
)
CROP = "data.augment={flips = ['height'], crop = true}"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "rules",
    [[RULES], [CROP, "model.resolution=12"], [SMOOTH, "model.resolution=12"]],
    ids=["turned", "cropped", "warped"],
)
def test_augmented_as_in_one_process(comm, config, rules):
    check_resumed(comm, config, rules, [overrides_of(cut) for cut in CUTS[comm.size]])
    if comm.rank == 0 and len(rules) == 1:
        train(
            config,
            ["training.epochs=2", 'schedule.kind="constant"', f"output.directory={config.parent / 'plain'}"],
            comm=MPI.COMM_SELF,
        )
        assert logged_losses(config.parent / "plain") != pytest.approx(logged_losses(config.parent / "alone"), rel=1e-3)
        # Statistics are those of the samples as they are.
        plain, varied = (
            read_header(config.parent / f"{run}/checkpoints/latest.h5")[0].normalization for run in ("plain", "alone")
        )
        assert plain == varied


@pytest.mark.ranks(1)
def test_evaluation_and_predictions(comm, config):
    """After training with crops, evaluation uses the middle of each sample, and `apply` the whole sample."""
    out = config.parent / "out"
    sets = [CROP, "model.resolution=12", "training.epochs=1"]
    train(config, sets, comm=comm)
    evaluate(out, predictions=config.parent / "judged.h5", samples="all", comm=comm)
    apply(out, [str(config.parent / "data.h5")], config.parent / "p.h5", [f"model.resolution={EDGE}"], comm=comm)
    with h5py.File(config.parent / "data.h5") as file, h5py.File(config.parent / "middle.h5", "w") as middle:
        middle.create_dataset("inputs", data=file["inputs"][:, 2:14, 2:14]).attrs["layout"] = "NHWC"
    apply(out, [str(config.parent / "middle.h5")], config.parent / "m.h5", comm=comm)
    with h5py.File(config.parent / "judged.h5") as judged, h5py.File(config.parent / "m.h5") as applied:
        order = np.argsort(judged["sample"])
        np.testing.assert_allclose(judged["prediction"][()][order], applied["prediction"][()], rtol=1e-9)
    with h5py.File(config.parent / "p.h5") as file:
        assert file["prediction"].shape[1:3] == (EDGE, EDGE)
    with pytest.raises(UserError, match=r"data.augment.crop: .* 20x20"):
        train(config, [*sets, "model.resolution=20", f"output.directory={config.parent / 'x'}"], comm=comm)
    with pytest.raises(DataError, match=r"data\.augment\.flips: .*got 'depth'"):
        train(config, ["data.augment={flips = ['depth']}", f"output.directory={config.parent / 'x'}"], comm=comm)


#: Samples, and where; one is the first, which is read before the run.
HOLES = {0: (0, 0, 1), 8: (15, 2, 0), 11: (7, 7, 2)}


@written
def invalid_data(folder):
    write_config(folder)
    with h5py.File(folder / "data.h5", "a") as file:
        for number, (sample, at) in enumerate(HOLES.items()):
            file["inputs"][(sample, *at)] = (np.nan, np.inf, -np.inf)[number]


@pytest.mark.mpi
@pytest.mark.parametrize("invalid", ["skip", "fill"])
def test_invalid_as_in_one_process(comm, invalid_data, invalid, caplog):
    sets = [f'data.invalid="{invalid}"', "training.epochs=2"]

    def run(out, cut, comm):
        more = [*overrides_of(cut), f"output.directory={invalid_data.parent / out}"]
        train(invalid_data, [*sets, "training.epochs=1", *more], comm=comm)
        train(invalid_data, [*sets, *more], resume=True, comm=comm)
        return evaluate(invalid_data, [*sets, *more], "all", invalid_data.parent / f"{out}.h5", comm)

    found = [run(f"cut{number}", cut, comm) for number, cut in enumerate(CUTS[comm.size])]
    if comm.rank:
        return
    want = run("alone", {}, MPI.COMM_SELF)
    for one in found:
        assert one["loss"] == pytest.approx(want["loss"], rel=1e-9)
    (begin, _) = read_log(invalid_data.parent / "alone/log.jsonl", "begin")
    kept = SAMPLES - (len(HOLES) if invalid == "skip" else 0)
    assert begin["invalid"] == len(HOLES) and begin["samples"] + begin["held_out"] == kept
    with h5py.File(invalid_data.parent / "alone.h5") as file:
        assert set(file["sample"]) == set(range(SAMPLES)) - (set(HOLES) if invalid == "skip" else set())
        assert np.isfinite(file["prediction"][()]).all()
    said = [record.getMessage() for record in caplog.records if "data.invalid" in record.getMessage()]
    assert said and "data.h5, sample 0: nan in channel 1" in said[0] and f"{len(HOLES)} of {SAMPLES} samples" in said[0]


@pytest.mark.ranks(1)
def test_others(comm, invalid_data):
    """NaN is an error by default; predictions for data with gaps work; targets are never filled."""
    with pytest.raises(DataError, match="expected finite numbers: repair"):
        train(invalid_data, comm=comm)
    sets, skip = ['data.invalid="fill"', "training.epochs=1"], ['data.invalid="skip"', "training.epochs=1"]
    train(invalid_data, [*sets, f"output.directory={invalid_data.parent / 'filled'}"], comm=comm)
    data, target = [str(invalid_data.parent / "data.h5")], invalid_data.parent / "filled"
    apply(target, data, invalid_data.parent / "p.h5", sets, comm=comm)
    assert np.isfinite(read_array(invalid_data.parent / "p.h5")).all()
    with pytest.raises(DataError, match="expected finite numbers"):
        apply(target, data, invalid_data.parent / "q.h5", skip, comm=comm)
    with h5py.File(invalid_data.parent / "data.h5", "a") as file:
        file["mask"][0, 3, 3] = 7
    with pytest.raises(DataError, match="target 7 in sample 0"):
        train(invalid_data, sets, comm=comm)
    found = train(invalid_data, skip, comm=comm)
    assert np.isfinite(found["loss"])
    with h5py.File(invalid_data.parent / "data.h5", "a") as file:
        for sample in split(SAMPLES, 0.3, seed=7)[0]:
            file["inputs"][sample] = np.nan
    assert np.isfinite(evaluate(target, ['data.invalid="skip"'], comm=comm)["loss"]), "no training sample is left"
    with pytest.raises(UserError, match=r"data\.invalid: .*'skip', 'fill' or 'mask'"):
        train(invalid_data, ['data.invalid="mend"'], comm=comm)


@pytest.mark.ranks(1, 2)
def test_callbacks_get_no_samples_that_are_left_out(comm, invalid_data):
    shown = Callback()
    shown.samples = (1, 8)
    with pytest.raises(UserError, match=r'callbacks: .*"skip".* 8'):
        train(invalid_data, ['data.invalid="skip"'], comm=comm, callbacks=[shown])


DOCS = Path(__file__).parents[2] / "docs/data.md"


def code(heading: str) -> str:
    """Return the example below a heading of docs/data.md."""
    return re.split(r"```python\n|```", DOCS.read_text(encoding="utf-8").split(f"### {heading}\n")[1])[1]


PADDED = """
import halograd as hg

def build():
    x, target, inside = (hg.Input((8, 8, 8, 1), name) for name in ("x", "target", "inside"))
    y = hg.Conv(1, 3, padding=1)(x)
    loss = hg.BinaryCrossEntropyWithLogits(normalization="weights")(y, target, inside)
    return hg.Network({"prediction": y, "loss": loss}, name="padded")
"""


@pytest.mark.ranks(1, 2)
def test_samples_of_several_sizes(comm, working):
    """The example that pads samples of different size trains; its loss is the mean over the existing voxels."""
    sizes, rng = [(4, 6, 5), (8, 4, 8), (7, 8, 6), (8, 8, 8)], np.random.default_rng(0)
    if comm.rank == 0:
        with h5py.File("patients.h5", "w") as file:
            for patient, extents in enumerate(sizes):
                file[f"{patient}/image"] = rng.random((*extents, 1))
                file[f"{patient}/mask"] = rng.integers(0, 2, (*extents, 1))
        Path("data.py").write_text(code("Samples of different size"))
        table = '[data]\npath = "patients.h5"\nfile = "data.py:open_padded"\nvalidation = 0\nnormalize = false\n'
        write_own(working, PADDED, table)
    comm.barrier()
    sets = ["training.epochs=1", f"strategy.height={comm.size}"]
    train("run.toml", sets, comm=comm)
    found = evaluate("run.toml", sets, "all", "p.h5", comm)
    if comm.rank == 0:
        with h5py.File("p.h5") as file:
            losses = []
            for k, sample in enumerate(file["sample"]):
                inside = tuple(slice(n) for n in sizes[sample])
                y, t = (file[name][k][inside].astype(float) for name in ("prediction", "target"))
                losses.append((np.logaddexp(0, y) - t * y).ravel())
        assert found["loss"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)


WINDOW_NET = """
import halograd as hg

def build(resolution: int = 16):
    x, t = hg.Input((resolution, resolution, 3), name="x"), hg.Input((resolution, resolution, 1), name="target")
    y = hg.Conv(1, 3, padding=1)(x)
    return hg.Network({"prediction": y, "loss": hg.BinaryCrossEntropyWithLogits()(y, t)}, name="window")
"""


@written
def windowed(folder):
    write_own(folder, WINDOW_NET, settings="resolution = 8\n")


@pytest.mark.ranks(1, 2)
def test_the_middle_window_is_reported(comm, windowed, capfd):
    crop, line = "data.augment={crop=true}", "only the middle window of every sample is evaluated, 8x8 of 16x16 (25 %)"
    for sets, said in (([crop], True), (["model.resolution=16", crop, "output.directory=whole"], False)):
        sets = [*sets, "training.epochs=1", f"strategy.height={comm.size}"]
        train(windowed, [*sets, "output.progress=true"], comm=comm)
        printed = capfd.readouterr()
        assert (line in printed.out + printed.err) == (said and comm.rank == 0)
        evaluate(windowed, sets, "all", comm=comm)
        assert (line in capfd.readouterr().out) == (said and comm.rank == 0)
    whole = ["data.evaluate=whole", f"strategy.height={comm.size}"]
    found = evaluate("out", whole, "all", comm=comm)
    printed = capfd.readouterr().out
    assert np.isfinite(found["loss"]) and "middle window" not in printed


@pytest.mark.ranks(1)
def test_one_sample(comm, windowed):
    with h5py.File("data.h5", "r+") as file:
        x, t = file["inputs"][:1], file["mask"][:1]
        del file["inputs"], file["mask"]
        file["inputs"], file["mask"] = x, t
        file["inputs"].attrs["layout"] = "NHWC"
    sets = ["model.resolution=16", "training.epochs=1", "training.batch=1"]
    with pytest.raises(UserError, match=r"data.validation: .*set data.validation = 0"):
        train(windowed, sets, comm=comm)
    assert np.isfinite(train(windowed, [*sets, "data.validation=0"], comm=comm)["loss"])
