"""Tests of whole samples in validations of runs that train on windows: equal to evaluations, under every cut."""

import json

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.data import DataError
from halograd.errors import UserError
from halograd.layers import Strategy
from halograd.models import build
from halograd.training import apply, evaluate, train
from halograd.training.applying import TABLE
from halograd.training.log import read_log
from halograd.training.whole import planned_or_similar
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import write_config

#: Samples of 22 x 26, of which windows of 16 x 16 are trained on; the network divides multiples of 4.
WHOLE = ["data.augment={crop = true}", 'data.evaluate="whole"', "training.epochs=1"]
METRICS = ['output.metrics=["dice"]']


def test_a_plan_that_does_not_fit_whole_samples():
    """A plan whose layers are cut along samples gives way to a cut of space where there is one sample."""
    network = build("mesh", resolution=32, channels=3, widths=[4, 6], convs=1, decoder=True)
    planned = Strategy({"sample": 2, "height": 2}, {"conv1_1": {"sample": 1, "height": 2, "width": 2}})
    assert planned_or_similar(planned, network, 4, 2) is planned
    found = planned_or_similar(planned, network, 4, 1).parts_of("conv2_1")
    assert {axis for axis, parts in found.items() if parts > 1} == {"height", "width"}
    assert planned_or_similar(planned, network, 4096, 1) is planned


def write(folder):
    rng = np.random.default_rng(2)
    with h5py.File(folder / "data.h5", "w") as file:
        file["inputs"] = rng.standard_normal((10, 22, 26, 3)).astype(np.float32)
        file["inputs"].attrs["layout"] = "NHWC"
        file["mask"] = (file["inputs"][..., 0] > file["inputs"][..., 1]).astype(np.uint8)
    return write_config(folder)


def validation(out):
    (entry,) = read_log(out / "log.jsonl", "validation")
    return {key: value for key, value in entry.items() if key not in ("event", "time", "epoch", "step")}


@pytest.mark.ranks(1, 2, 4)
def test_validations_are_evaluations_of_whole_samples(comm, config, capsys):
    for number, cut in enumerate(CUTS[comm.size]):
        out = config.parent / f"cut{number}"
        trained = train(config, [*WHOLE, *METRICS, *overrides_of(cut), f"output.directory={out}"], comm=comm)
        again = evaluate(out, comm=comm)
        comm.barrier()
        if comm.rank == 0:
            assert "whole samples are evaluated: 3 of 22x26 (" in capsys.readouterr().out
            found = validation(out)
            alone = evaluate(out, ["data.augment={crop = false}"], comm=MPI.COMM_SELF)
            for name, value in found.items():
                assert value == trained["validation"][name]
                assert value == pytest.approx(alone[name], rel=1e-10) == pytest.approx(again[name], rel=1e-10)
            middle = evaluate(out, ['data.evaluate="middle"', "strategy={sample = 1}"], comm=MPI.COMM_SELF)
            assert middle["loss"] != pytest.approx(found["loss"], rel=1e-3)


@pytest.mark.ranks(1, 2)
def test_predictions_of_whole_samples(comm, config):
    train(config, [*WHOLE, f"strategy.height={comm.size}"], comm=comm)
    evaluate("out", [], "all", "judged.h5", comm)
    apply("out", ["data.h5"], "p.h5", comm=comm)
    with h5py.File("judged.h5") as judged, h5py.File("p.h5") as applied:
        order = np.argsort(judged["sample"][()])
        np.testing.assert_allclose(judged["prediction"][()][order], applied["prediction"][()], rtol=1e-9, atol=1e-12)


def test_refusals(working):
    config = write(working)
    text = config.read_text()
    model = '[model]\nname = "lenet5"\nclasses = 2\nchannels = 3\nresolution = 16\n'
    text = text[text.index("[data]") :].replace("validation = 0.3", 'targets = "label"')
    config.write_text(model + text)
    with h5py.File("data.h5", "a") as file:
        file["label"] = np.arange(10) % 2
    with pytest.raises(UserError, match=r"data.extents: .* 22 x 26: .*/w depends on"):
        train(config, WHOLE, comm=MPI.COMM_SELF)


def write_sizes(folder):
    """Write five files of samples of 22 x 26 and 16 x 20 in turn, and a configuration that reads them."""
    rng = np.random.default_rng(4)
    (folder / "patients").mkdir()
    for number in range(5):
        x = rng.standard_normal((1, *((22, 26), (16, 20))[number % 2], 3)).astype(np.float32)
        with h5py.File(folder / "patients" / f"{number}.h5", "w") as file:
            file["inputs"], file["mask"] = x, (x[..., 0] > x[..., 1]).astype(np.uint8)
            file["inputs"].attrs["layout"] = "NHWC"
    write_config(folder)


SIZES = ['data.path="patients"', "data.augment={crop = true}", "data.validation=0.5", "training.batch=2"]


@pytest.mark.ranks(2)
def test_several_sizes(comm, working):
    """Samples of several sizes are validated whole by default; the scores are those of all of them."""
    if comm.rank == 0:
        write_sizes(working)
    comm.barrier()
    sets = [*SIZES, "training.epochs=2", f"strategy.height={comm.size}"]
    train("run.toml", sets, comm=comm)
    again = evaluate("out", comm=comm)
    every = evaluate("out", [], "all", comm=comm)
    comm.barrier()
    if comm.rank == 0:
        found = read_log(working / "out/log.jsonl", "validation")[-1]
        assert found["loss"] == pytest.approx(again["loss"], rel=1e-10)
        losses = []
        for number in range(5):  # each file by itself, under another configuration
            path = ["data.augment={crop = false}", f'data.path="patients/{number}.h5"']
            losses.append(evaluate("out", path, "all", comm=MPI.COMM_SELF)["loss"])
        assert every["loss"] == pytest.approx(np.mean(losses), rel=1e-10)
        with pytest.raises(UserError, match=r"--predictions: .*one size, got several"):
            evaluate("out", ["strategy={sample = 1}"], "all", "judged.h5", MPI.COMM_SELF)


def read(path):
    with h5py.File(path) as file:
        return file["prediction"][()], file["source_file"].asstr()[()].tolist()


@pytest.mark.ranks(2)
def test_applies_to_each_file(comm, working):
    """Files of samples of several sizes get a file each, as if they were applied by themselves; a job continues."""
    if comm.rank == 0:
        write_sizes(working)
        train("run.toml", [*SIZES, "training.epochs=1", "strategy.sample=1"], comm=MPI.COMM_SELF)
    comm.barrier()
    found = apply("out", ["patients"], "predicted", comm=comm)
    assert found["samples"] == found["computed"] == 5
    assert not any("extents" in one or "resolution" in one for one in found["settings"])
    comm.barrier()
    if comm.rank == 0:
        for number in (0, 1):
            path = f"patients/{number}.h5"
            apply("out", [path], f"alone-{number}.h5", comm=MPI.COMM_SELF)
            (mine, source), (alone, _) = read(f"predicted/{number}.h5"), read(f"alone-{number}.h5")
            assert mine.shape == (1, *((22, 26), (16, 20))[number % 2], 1) and source == [path]
            np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
        table = json.loads((working / "predicted/sources.json").read_text())["files"]
        assert [table[f"{number}.h5"]["source"] for number in range(5)] == [f"patients/{n}.h5" for n in range(5)]
        (working / "predicted/3.h5").unlink()
    comm.barrier()
    # On several ranks the parts are still there.
    assert apply("out", ["patients"], "predicted", comm=comm)["computed"] == (comm.size == 1)
    assert (working / "predicted/3.h5").exists()
    assert apply("out", ["patients"], "predicted", comm=comm)["computed"] == 0
    assert apply("out", ["patients"], "predicted", what="classes", comm=comm)["computed"] == 5
    with pytest.raises(UserError, match=r"--out: .*folder, .*, got one.h5"):
        apply("out", ["patients"], "one.h5", comm=comm)
    apply("out", ["patients"], "whole", comm=comm, format="hdf5-whole")
    comm.barrier()
    if comm.rank == 0:
        assert sorted(path.name for path in (working / "whole").iterdir()) == [*(f"{k}.h5" for k in range(5)), TABLE]
        np.testing.assert_array_equal(read("whole/1.h5")[0] > 0, read("predicted/1.h5")[0])
        damaged = (working / "whole/2.h5").read_bytes()
        (working / "whole/2.h5").write_bytes(damaged[: len(damaged) // 2])
        (working / "mine").mkdir()
        (working / "mine/notes").touch()
    comm.barrier()
    assert apply("out", ["patients"], "whole", comm=comm, format="hdf5-whole")["computed"] == 1
    with pytest.raises(DataError, match=r"cannot write mine: .*empty folder"):
        apply("out", ["patients"], "mine", comm=comm)
