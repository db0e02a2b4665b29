"""Tests of `apply` and `evaluate` with other data and ranks than in training: derived settings, user's ones, errors."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.errors import UserError
from halograd.training import apply, evaluate, train
from tests.training.runs import EDGE, write_config, write_own

LARGE = 2 * EDGE
#: A run of so many ranks, whose steps have two parts.
OF_FOUR = '[strategy]\nsample = 2\nheight = 2\nhalo = "pad"\n'
FIVE = ["strategy.sample=1", "strategy.height=1", f"model.resolution={LARGE}", "training.batch=1"]
FIVE += ["training.accumulate=1"]
NET = """
import halograd as hg

def build(SIGNATURE):
    x = hg.Input((edge, edge, 3), name="x")
    y = hg.Conv(1, 3, padding=1)(x)
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, hg.Input(y.shape, name="target"))})
"""


def write_samples(path: Path, shape: tuple[int, ...], layout: str | None = "NHWC", mask: bool = False) -> None:
    rng = np.random.default_rng(3)
    with h5py.File(path, "w") as file:
        file["inputs"] = rng.standard_normal(shape).astype(np.float32)
        if layout is not None:
            file["inputs"].attrs["layout"] = layout
        if mask:
            file["mask"] = (file["inputs"][..., 0] > 0).astype(np.uint8)


@pytest.fixture
def trained(comm, working):
    """Train a run in ``out``, and write ``four.toml``, a configuration for four ranks."""
    if comm.rank == 0:
        config = write_config(working)
        train(config, ["training.epochs=1", "strategy.sample=1"], comm=MPI.COMM_SELF)
        text = config.read_text().replace("[strategy]\n", OF_FOUR).replace("batch = 4", "batch = 4\naccumulate = 2")
        (working / "four.toml").write_text(text)
        write_samples(working / "one.h5", (1, LARGE, LARGE, 3))
        write_samples(working / "large.h5", (5, LARGE, LARGE, 3), mask=True)
    comm.barrier()
    return working


def read(path: str) -> np.ndarray:
    with h5py.File(path) as file:
        return file["prediction"][()]


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_sample_of_another_size(comm, trained):
    """A sample of another size needs no settings, and gives the predictions of five settings by hand."""
    if comm.rank == 0:
        found = apply("four.toml", ["one.h5"], "by-hand.h5", FIVE, comm=MPI.COMM_SELF)
        assert found["settings"] == []
    comm.barrier()
    found = apply("four.toml", ["one.h5"], "out.h5", comm=comm)
    cut = {1: [], 2: ["height=2"], 3: ["height=3"], 4: ["height=2", "width=2"]}[comm.size]
    wanted = [f"model.resolution={LARGE}", "training.batch=1", "strategy.sample=1", *(f"strategy.{one}" for one in cut)]
    assert found["settings"] == wanted and found["samples"] == 1
    np.testing.assert_allclose(read("out.h5"), read("by-hand.h5"), rtol=1e-9, atol=1e-12)
    assert read("out.h5").shape == (1, LARGE, LARGE, 1)


@pytest.mark.ranks(1, 2)
def test_evaluates_what_it_predicts(comm, trained):
    """Evaluation of samples of another size has the predictions of `apply`, and the same scores under any cut."""
    if comm.rank == 0:
        alone = evaluate("four.toml", [*FIVE, "data.path=large.h5"], "all", comm=MPI.COMM_SELF)
    alone = comm.bcast(alone if comm.rank == 0 else None)
    found = evaluate("four.toml", ["data.path=large.h5"], "all", "judged.h5", comm)
    apply("four.toml", ["large.h5"], "out.h5", comm=comm)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12) and found["iou"] == pytest.approx(alone["iou"])
    with h5py.File("judged.h5") as file:
        np.testing.assert_array_equal(file["prediction"][()], read("out.h5")[file["sample"][()]])
        assert file["prediction"].shape == (5, LARGE, LARGE, 1)
    with pytest.raises(UserError, match=r"another network: .*'conv1_1/w: parameter"):
        evaluate("four.toml", ["data.path=large.h5", "model.widths=[5, 6]"], "all", comm=comm)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "sets, message",
    [
        ([f"model.resolution={EDGE}"], r"expected samples of shape \(16, 16, 3\) .*, got \(32, 32, 3\) in one.h5"),
        (["training.batch=2", "training.accumulate=1"], "training.batch: expected at most 1, the samples of .*, got 2"),
        (["training.accumulate=1"], "training.batch: expected at most 1, the samples of one.h5, got 4"),
        (["strategy.height=2"], r"strategy: 2 height x 2 sample needs 4 ranks, the run has .; start 4 ranks"),
        (["strategy={sample = 5}"], "strategy: 5 sample needs 5 ranks, the run has"),
    ],
)
def test_what_the_user_sets_stays(comm, trained, sets, message):
    with pytest.raises(UserError, match=message):
        apply("four.toml", ["one.h5"], "out.h5", sets, comm=comm)
    assert not Path("out.h5").exists()


def test_a_cut_that_fits_stays(trained):
    """With the ranks and the sample size of training no setting is derived; with few samples only the batch is."""
    write_samples(Path("few.h5"), (3, EDGE, EDGE, 3))
    write_samples(Path("many.h5"), (4, EDGE, EDGE, 3))
    assert apply("out", ["many.h5"], "p.h5", comm=MPI.COMM_SELF)["settings"] == []
    assert apply("out", ["few.h5"], "p.h5", comm=MPI.COMM_SELF)["settings"] == ["training.batch=3"]
    assert apply("out", ["few.h5", "many.h5"], "p.h5", comm=MPI.COMM_SELF)["settings"] == []


def test_order_of_axes(trained):
    """A file needs no order of axes if only one axis has the network's number of channels."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((2, EDGE, EDGE, 3))
    for name, array in (("last", x), ("first", np.moveaxis(x, -1, 1))):
        with h5py.File(f"{name}.h5", "w") as file:
            file["inputs"] = array
        layout = {"last": "NHWC", "first": "NCHW"}[name]
        settings = apply("out", [f"{name}.h5"], f"p-{name}.h5", comm=MPI.COMM_SELF)["settings"]
        assert settings[0] == f'data.layout="{layout}"'
    np.testing.assert_array_equal(read("p-last.h5"), read("p-first.h5"))
    write_samples(Path("open.h5"), (1, 3, EDGE, 3), None)
    with pytest.raises(UserError, match=r"open.h5: '/inputs' .*'layout'; set data.layout"):
        apply("out", ["open.h5"], "p.h5", comm=MPI.COMM_SELF)
    write_samples(Path("bare.h5"), (EDGE, EDGE, 3))
    with pytest.raises(UserError, match=r"got \(16, 3\) in bare.h5; .*'inputs'"):
        apply("out", ["bare.h5"], "p.h5", comm=MPI.COMM_SELF)
    for name, message in (("none", "none.h5: no such file"), ("text", "text.h5: expected an HDF5 file")):
        Path("text.h5").write_text("mine")
        with pytest.raises(UserError, match=message):
            apply("out", [f"{name}.h5"], "p.h5", comm=MPI.COMM_SELF)


@pytest.mark.parametrize("signature", ["resolution=16", "resolution=(16, 16)", "edge=16"])
def test_networks_of_the_user(working, signature):
    """Samples of a user's network may have any size, with or without an option `resolution` of its function."""
    follows = signature.startswith("resolution")
    body = NET.replace("SIGNATURE", signature)
    line = "    edge = resolution if isinstance(resolution, int) else resolution[0]\n" if follows else ""
    config = write_own(working, body.replace("    x = hg", f"{line}    x = hg", 1))
    train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
    write_samples(Path("one.h5"), (1, LARGE, LARGE, 3))
    found = apply("out", ["one.h5"], "p.h5", comm=MPI.COMM_SELF)
    size = f"model.resolution={LARGE}" if follows else f"data.extents=[{LARGE}, {LARGE}]"
    assert found["settings"] == [size, "training.batch=1"]
    if not follows:
        apply("out", ["one.h5"], "by-hand.h5", [f"model.edge={LARGE}"], comm=MPI.COMM_SELF)
        np.testing.assert_array_equal(read("p.h5"), read("by-hand.h5"))
    assert read("p.h5").shape == (1, LARGE, LARGE, 1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_size_that_the_network_does_not_divide(comm, trained):
    """Samples of any size need no settings: they are padded with zeros after normalization, predictions are cut."""
    if comm.rank == 0:
        train("run.toml", ["training.epochs=1", "data.normalize=false", "output.directory=plain"], comm=MPI.COMM_SELF)
        write_samples(Path("odd.h5"), (2, 21, 26, 3), mask=True)
        with h5py.File("odd.h5") as file, h5py.File("padded.h5", "w") as padded:
            padded["inputs"] = np.pad(file["inputs"][()], ((0, 0), (0, 3), (0, 2), (0, 0)))
            padded["inputs"].attrs["layout"] = "NHWC"
        apply("plain", ["padded.h5"], "by-hand.h5", ["data.extents=[24, 28]"], comm=MPI.COMM_SELF)
    comm.barrier()
    found = apply("plain", ["odd.h5"], "out.h5", comm=comm)
    assert found["settings"][0] == "data.extents=[21, 26]"
    np.testing.assert_allclose(read("out.h5"), read("by-hand.h5")[:, :21, :26], rtol=1e-9, atol=1e-12)
    evaluate("plain", ["data.path=odd.h5"], "all", "judged.h5", comm)
    np.testing.assert_allclose(read("judged.h5"), read("out.h5"), rtol=1e-9, atol=1e-12)


def test_networks_of_one_size(working):
    """The error of a network with dense layers for samples of another size names the sizes, not a parameter."""
    config = write_config(working)
    text = config.read_text()
    model = '[model]\nname = "lenet5"\nclasses = 2\nchannels = 3\nresolution = 28\n'
    config.write_text(model + text[text.index("[data]") :].replace("validation = 0.3", 'targets = "label"'))
    for name, edge in (("data", 28), ("large", LARGE)):
        write_samples(Path(f"{name}.h5"), (6, edge, edge, 3))
        with h5py.File(f"{name}.h5", "a") as file:
            file["label"] = np.arange(6) % 2
    train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
    message = r"expected samples of shape \(28, 28, 3\) .*, got \(32, 32, 3\) in large.h5"
    with pytest.raises(UserError, match=message):
        apply("out", ["large.h5"], "p.h5", comm=MPI.COMM_SELF)
    with pytest.raises(UserError, match=message):
        evaluate("out", ["data.path=large.h5"], "all", comm=MPI.COMM_SELF)


def test_windows_stay_windows(trained):
    """A run trained on cropped samples evaluates the middle window, and applies to whole samples."""
    crop = ["data.path=large.h5", "data.augment={crop = true}", "output.directory=crop"]
    train("run.toml", ["training.epochs=1", "training.batch=2", *crop], comm=MPI.COMM_SELF)
    evaluate("crop", ["training.batch=1"], "all", "judged.h5", MPI.COMM_SELF)
    assert read("judged.h5").shape[1:] == (EDGE, EDGE, 1)
    apply("crop", ["large.h5"], "p.h5", comm=MPI.COMM_SELF)
    assert read("p.h5").shape[1:] == (LARGE, LARGE, 1)


def test_from_the_command_line(trained, capsys):
    assert run(["apply", "four.toml", "one.h5", "-o", "p.h5", "--what", "classes"]) == 0
    settings = f"for these data and ranks: model.resolution={LARGE} training.batch=1 strategy.sample=1"
    assert settings in capsys.readouterr().out
    assert run(["evaluate", "four.toml", "--set", "data.path=large.h5", "--samples", "all"]) == 0
    assert f"for these data and ranks: model.resolution={LARGE} strategy.sample=1" in capsys.readouterr().out
