"""Tests of files of predictions, of formats in a user's file, and of predictions for callbacks."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.cli.run import run
from halograd.comm import Communicator
from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.training import apply, evaluation, trained
from halograd.training.evaluation import check_predictions, write_predictions
from halograd.training.parts import PartFile
from halograd.training.run import train
from halograd.training.trained import evaluate
from tests.docs.pages import write_files
from tests.support.inject import refusing
from tests.training.runs import (
    EDGE,
    OPTIONS,
    read_array,
    unet,
    write_arrays,
    write_data,
    write_own,
)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def test_where_predictions_may_be_written(tmp_path):
    check_predictions(tmp_path / "new" / "folder" / "p.h5")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.h5").touch()
    check_predictions(tmp_path / "empty.h5")
    with h5py.File(tmp_path / "old.h5", "w") as file:
        for name in ("prediction", "target", "sample"):
            file[name] = np.zeros(3)
    check_predictions(tmp_path / "old.h5")


@pytest.mark.parametrize(
    "name, message",
    [
        ("folder", "it is a folder; give the name of a file in it"),
        ("text", "expected no file there, or older predictions, got another"),
        ("data.h5", "expected no file there, or older predictions, got another"),
        ("pipe", "expected no file there, or older predictions, got another"),
        ("device", "expected no file there, or older predictions, got another"),
        ("text/p.h5", "file exists"),
        ("/proc/none/p.h5", "no such file or directory"),
        ("p" * 300, "file name too long"),
        ("nul\0", "embedded null byte"),
    ],
)
def test_where_they_may_not(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["inputs"] = np.zeros(3)
    before = listing(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        check_predictions(tmp_path / name)
    assert str(caught.value).startswith(f"cannot write {tmp_path / name}: ") and "\n" not in str(caught.value)
    assert listing(tmp_path) == before


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("fault", [MemoryError("all predictions at once"), RuntimeError("h5py"), OSError("disk")])
def test_whatever_keeps_rank_0_from_writing_is_told_to_the_others(shared, monkeypatch, fault):
    def fail(*_, **__):
        raise fault

    monkeypatch.setattr(evaluation, "atomic_path", fail)
    monkeypatch.setattr(evaluation, "compared_pairs", lambda executor: [])
    monkeypatch.setattr(evaluation, "Gather", lambda executor, names: SimpleNamespace(close=lambda: None))
    samples = SimpleNamespace(dataset=None)
    with Communicator(MPI.COMM_WORLD) as comm:
        session = SimpleNamespace(executor=None, comm=comm, samples=samples, feed=lambda batches: batches)
        with pytest.raises(Exception, match=str(fault)):
            write_predictions(session, [], shared / "p.h5")


@pytest.mark.ranks(1, 2)
def test_found_before_the_evaluation(comm, config, monkeypatch):
    folder = config.parent
    if comm.rank == 0:
        (folder / "mine.h5").write_text("mine")
    comm.Barrier()
    cut = [f"strategy.sample={comm.size}"]
    train(folder / "run.toml", [*cut, "training.epochs=1"], comm=comm)
    for name in ("evaluate_parts", "write_predictions"):
        monkeypatch.setattr(trained, name, lambda *_: pytest.fail("expected no evaluation"))
    with pytest.raises(DataError, match=r"mine\.h5: .*no file.*, got another"):
        evaluate(folder / "out", cut, predictions=folder / "mine.h5", comm=comm)
    comm.Barrier()
    monkeypatch.undo()
    assert (folder / "mine.h5").read_text() == "mine" and trained.write_predictions is write_predictions
    for _ in range(2):  # the second time in place of the first
        evaluate(folder / "out", cut, predictions=folder / "new" / "p.h5", comm=comm)
        comm.Barrier()
        assert [p.name for p in (folder / "new").iterdir()] == ["p.h5"]


TWO_TARGETS = """
from halograd.layers import *

def build():
    x = Input((16, 16, 3), "x")
    y = Conv(1, 3, padding=1)(x)
    fine, coarse = Input((16, 16, 1), "mask"), Input((16, 16, 1), "other")
    loss = BinaryCrossEntropyWithLogits()(y, fine) + 0.5 * Dice()(y, coarse)
    loss = loss + MeanSquaredError()(Conv(1, 1)(x), Input((16, 16, 1), "field"))
    return Network({"prediction": y, "loss": loss}, name="own")
"""


def test_one_prediction_beside_two_targets(tmp_path, monkeypatch):
    """For one prediction with two targets, scores and datasets of the second pair have both names."""
    monkeypatch.chdir(tmp_path)
    path = write_own(tmp_path, TWO_TARGETS)
    targets = "data.targets={mask = 'mask', other = 'mask', field = 'mask'}"
    train(path, [targets, "training.epochs=1"])
    found = evaluate("out", predictions=tmp_path / "p.h5")
    assert {"iou", "prediction other iou"} <= set(found) and found["iou"] == found["prediction other iou"]
    with h5py.File(tmp_path / "p.h5") as file:
        np.testing.assert_array_equal(file["prediction"], file["prediction other/prediction"])
        assert len(file) == 7 and "conv2/target" in file
    check_predictions(tmp_path / "p.h5")


CALLBACK_CUTS = {1: {}, 2: {"height": 2}, 4: {"sample": 2, "width": 2}}


class Shown(hg.Callback):
    def __init__(self, samples=(17, 0, 3, 5, 6), every=2):
        self.samples, self.every, self.found = samples, every, {}

    def on_predictions(self, epoch, found):
        assert found.samples == tuple(self.samples)
        self.found[epoch] = found


@pytest.mark.ranks(1, 2, 4)
def test_they_are_those_of_apply_and_change_nothing(comm, shared):
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    some = OPTIONS | {"comm": comm, "strategy": CALLBACK_CUTS[comm.size], "average": 0.5}
    shown, data = [Shown(), Shown((1,), 3), hg.Callback()], str(shared / "data.h5")
    run = hg.fit(unet(), data, shared / "out", callbacks=shown, **some)
    plain = hg.fit(unet(), data, shared / "plain", **some)
    run.apply(data, shared / "p.h5")
    assert run.losses == plain.losses and run.history["loss"] == plain.history["loss"]
    assert list(shown[0].found) == [1, 2] and list(shown[1].found) == [2], "every second epoch and the last one"
    found = shown[0].found[2]
    comm.barrier()
    if comm.rank:
        assert not found.outputs and not found.inputs
        return
    with h5py.File(shared / "p.h5") as predicted, h5py.File(data) as file:
        at = list(found.samples)
        np.testing.assert_allclose(found.outputs["prediction"], predicted["prediction"][()][at], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(found.inputs["target"][..., 0], file["mask"][()][at])
        assert set(found.outputs) == {"prediction"} and set(found.inputs) == {"x", "target"}
        known, x = run.normalization()["x"], file["inputs"][()][at].astype(float)
        np.testing.assert_allclose(found.inputs["x"], (x - known.mean) / known.std, rtol=1e-6, atol=1e-6)
    assert not np.allclose(found.outputs["prediction"], shown[0].found[1].outputs["prediction"])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("samples", "every"), [([0, 19], 1), ([-1], 1), ([1], 0)])
def test_other_samples_are_refused(comm, shared, samples, every):
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    with pytest.raises(UserError, match=r"callbacks: .* 0 to 18 and every >= 1"):
        hg.fit(unet(), str(shared / "data.h5"), shared / "out", comm=comm, callbacks=[Shown(samples, every)], **OPTIONS)


@pytest.mark.ranks(2)
def test_ranks_that_differ(comm, shared):
    """Other samples, or samples on some ranks only, are an error on all ranks; a local callback is not."""
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    data, some = str(shared / "data.h5"), OPTIONS | {"comm": comm, "epochs": 1}
    for number, callbacks in enumerate(([Shown((comm.rank,))], [Shown((1,))][comm.rank :])):
        with pytest.raises(UserError, match=r"callbacks: .*on all ranks, got .* and"):
            hg.fit(unet(), data, shared / f"out{number}", callbacks=callbacks, **some)
    assert hg.fit(unet(), data, shared / "out", callbacks=[hg.Callback()][comm.rank :], **some).losses


#: Cuts by the number of ranks; the last ones leave a rank without a block of some outputs, or cut a batch in two.
WRITER_CUTS = {
    1: [{}],
    2: [{"height": 2}, {"sample": 2}],
    3: [{"width": 3}, {"height": 3}],
    4: [{"height": 2, "width": 2}],
}
FILES = (3, 4)

#: Writers of one file, which rank 0 writes alone: in order, in two runs over the samples, and with mistakes.
OWN = '''
import os
from pathlib import Path
import numpy as np
from halograd.data import Writer

class One(Writer):
    """An array of all samples in one file, after the number of its rows."""

    def begin(self, predictions, path):
        assert not path.exists()
        path.write_bytes(b"")

    def write(self, predictions, path, samples):
        (array,) = predictions.outputs.values()
        assert len(samples) == len(array)
        with open(path, "ab") as file:
            for k in samples:
                file.write(array[k, : array.shape[1] // 2].tobytes() + array[k, array.shape[1] // 2 :].tobytes())

class Failing(One):
    parallel = True

    def write(self, predictions, path, samples):
        Path("marks").mkdir(exist_ok=True)
        Path("marks", f"{samples.start}-{samples.stop}").touch()
        if samples.stop == 7:
            raise ValueError("no sample is good enough")

class Full(Failing):
    def write(self, predictions, path, samples):
        raise OSError(28, "No space left on device", str(path))

class Wrong(One):
    def write(self, path, samples):
        pass

class Half(Writer):
    def begin(self, predictions, path):
        pass
'''


@pytest.fixture
def trained_with_writers(comm, config):
    """Return the working folder, with a run in ``out``, samples without labels in ``new``, and the user's files."""
    folder = config.parent
    if comm.rank == 0:
        write_files("extending.md", folder)
        (folder / "own.py").write_text(OWN)
        (folder / "new").mkdir()
        rng = np.random.default_rng(11)
        for number, samples in enumerate(FILES):
            x = rng.standard_normal((samples, EDGE, EDGE, 3))
            write_arrays(folder / "new" / f"{number}.h5", {"inputs": x}, inputs="NHWC")
        train(config, ["training.epochs=1", "strategy.sample=1"], comm=MPI.COMM_SELF)
        apply("out", ["new"], "want.h5", ["strategy.sample=1"], comm=MPI.COMM_SELF)
    comm.barrier()
    return folder


def npy(folder: Path) -> np.ndarray:
    """Return the predictions that the writer ``Npy`` has written to a folder, in the order of the samples."""
    paths = sorted(folder.glob("prediction-*.npy"))
    assert [path.name for path in paths] == [f"prediction-{k:03d}.npy" for k in range(sum(FILES))]
    return np.array([np.load(path) for path in paths])


def sets_of(cut: dict[str, int], batch: int) -> list[str]:
    sets = [f"strategy.{axis}={n}" for axis, n in {"sample": 1, **cut}.items()]
    return [*sets, f"training.batch={batch}"]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", ["npy.py:Npy:digits=3", "own.py:One"])
def test_under_every_cut(comm, trained_with_writers, name):
    """Results of a user's writer, on all ranks or rank 0, are bitwise those in HDF5, and no part remains."""
    for number, cut in enumerate(WRITER_CUTS[comm.size]):
        sets = sets_of(cut, 2 if "sample" in cut else 3)
        apply("out", ["new"], f"same{number}.h5", sets, comm=comm)
        found = apply("out", ["new"], f"result{number}", sets, comm=comm, format=name)
        assert found["samples"] == found["computed"] == sum(FILES)
        comm.barrier()
        if comm.rank == 0:
            same = read_array(f"same{number}.h5")
            np.testing.assert_allclose(same, read_array("want.h5"), rtol=1e-9, atol=1e-12)
            result = trained_with_writers / f"result{number}"
            got = npy(result) if result.is_dir() else np.fromfile(result).reshape(same.shape)
            assert got.tobytes() == same.tobytes()
            if result.is_dir():
                lines = [f"{Path('new', f'{k}.h5')} {n}" for k in (0, 1) for n in range(FILES[k])]
                assert (result / "samples.txt").read_text().splitlines() == lines
            assert [path.name for path in trained_with_writers.iterdir() if "result" in path.name] == [
                f"result{number}"
            ]
            os.rename(result, trained_with_writers / "seen" if number == 0 else trained_with_writers / f"s{number}")
        comm.barrier()


@pytest.mark.ranks(1, 2, 3)
def test_an_interrupted_job_continues_in_any_format(comm, trained_with_writers, monkeypatch):
    """An interrupted job continues after its complete batches in any format, because parts do not depend on it."""
    sets = sets_of({"height": comm.size}, 2)
    written, part = [], PartFile.write

    def failing(self, blocks):
        if self.done == 2 and comm.rank == comm.size - 1:
            raise OSError(28, "No space left on device")
        part(self, blocks)

    with monkeypatch.context() as patched, pytest.raises((OSError, DataError), match="No space left on device"):
        patched.setattr(PartFile, "write", failing)
        apply("out", ["new"], "result", sets, comm=comm)
    monkeypatch.setattr(PartFile, "write", lambda self, blocks: (written.append(self.done), part(self, blocks)))
    found = apply("out", ["new"], "result", sets, comm=comm, format="npy.py:Npy:digits=3")
    assert written == [2, 3] and found["computed"] == 3
    comm.barrier()
    np.testing.assert_allclose(npy(trained_with_writers / "result"), read_array("want.h5"), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Failing", ValueError, "no sample is good enough"),
        ("Full", DataError, r"other.* can be written.*No space left .*; free"),
    ],
)
def test_a_mistake_of_a_writer_loses_nothing(comm, trained_with_writers, name, error, message):
    """An error of a writer on any rank is raised on all and leaves the parts, so that no sample is computed again."""
    sets = sets_of({"height": comm.size}, 2)
    with pytest.raises(error, match=message):
        apply("out", ["new"], "other", sets, comm=comm, format=f"own.py:{name}")
    comm.barrier()
    if name == "Failing" and comm.rank == 0:
        shares = [sum(FILES) * k // comm.size for k in range(comm.size + 1)]
        assert {path.name for path in (trained_with_writers / "marks").iterdir()} == {
            f"{a}-{b}" for a, b in pairwise(shares)
        }
    if comm.rank == 0:
        assert [path.name for path in trained_with_writers.iterdir() if "other" in path.name] == ["other.parts"]
        os.rename(trained_with_writers / "other.parts", trained_with_writers / "result.parts")
    comm.barrier()
    found = apply("out", ["new"], "result", sets, comm=comm, format="npy.py:Npy:digits=3")
    assert found["computed"] == 0 and found["samples"] == sum(FILES)
    comm.barrier()
    np.testing.assert_allclose(npy(trained_with_writers / "result"), read_array("want.h5"), rtol=1e-9, atol=1e-12)
    assert not list(trained_with_writers.glob("result.*"))


@pytest.mark.ranks(1, 2)
def test_refusals(comm, trained_with_writers):
    """Unknown formats, wrong methods, and files of other programs are errors on all ranks before any computation."""
    sets = sets_of({"height": comm.size}, 2)
    if comm.rank == 0:
        (trained_with_writers / "mine").mkdir()
        (trained_with_writers / "mine" / "notes").write_text("mine")
        (trained_with_writers / "text").write_text("mine")
    comm.barrier()
    for out, name, message in (
        ("new.h5", "hdf", r'--format: expected hdf5, hdf5-whole, or "FILE.py:CLASS", got .hdf.; did you mean hdf5'),
        ("new.npy", "npy.py:Npy:digit=3", r"--format.*: unknown key"),
        ("new.npy", "own.py:Wrong", r"Wrong.write: expected a method that takes \(self, predictions, path, samples\)"),
        ("new.npy", "own.py:Half", "expected a class that defines write"),
        ("mine", "npy.py:Npy", "mine: it is a folder; give the name of a file in it"),
        ("text", "npy.py:Npy", "text: expected no file there, or one of an earlier job, got another"),
        ("text", "own.py:One", "text: expected no file there, or one of an earlier job, got another"),
        ("mine", "hdf5", "mine: it is a folder; give the name of a file in it"),
    ):
        with pytest.raises(UserError, match=message):
            apply("out", ["new"], out, sets, comm=comm, format=name)
    comm.barrier()
    assert (
        (trained_with_writers / "mine" / "notes").read_text() == (trained_with_writers / "text").read_text() == "mine"
    )
    assert not list(trained_with_writers.glob("*.parts"))


@pytest.mark.ranks(1, 2)
def test_an_older_folder_is_replaced_at_the_end(comm, trained_with_writers):
    sets = sets_of({"height": comm.size}, 2)
    for what in ("logits", "probabilities"):
        apply("out", ["new"], "result", sets, what, comm, format="npy.py:Npy:digits=3")
        comm.barrier()
        found = npy(trained_with_writers / "result")
        comm.barrier()
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-read_array("want.h5"))), rtol=1e-6)
    assert not [path.name for path in trained_with_writers.iterdir() if path.name.startswith((".", "result."))]


@pytest.mark.ranks(2, 3)
def test_a_file_that_differs_on_one_rank(comm, trained_with_writers, monkeypatch):
    """A writer's file that is missing or different on one rank is an error on all ranks."""
    elsewhere = trained_with_writers / "elsewhere"
    for got in ("none", "another one"):
        if comm.rank == comm.size - 1:
            elsewhere.mkdir(exist_ok=True)
            if got == "another one":
                (elsewhere / "own.py").write_text(OWN + "# edited\n")
            monkeypatch.chdir(elsewhere)
        with pytest.raises(UserError, match=f"own.py: .*on all ranks, got {got} in .*elsewhere"):
            apply(
                trained_with_writers / "out",
                trained_with_writers / "new",
                trained_with_writers / "result",
                comm=comm,
                format="own.py:One",
            )
        monkeypatch.chdir(trained_with_writers)
    comm.barrier()
    assert not list(trained_with_writers.glob("result*"))


def test_hdf5_without_links(comm, trained_with_writers):
    """On a file system without hard links, the output is a copy of the only part."""
    with refusing("link", 1):
        apply("out", ["new"], "copy.h5", ["strategy.sample=1"], comm=MPI.COMM_SELF)
    assert (trained_with_writers / "copy.h5").read_bytes() == (trained_with_writers / "want.h5").read_bytes()
    assert not (trained_with_writers / "copy.h5.parts").exists()


def test_from_the_command_line(comm, trained_with_writers, capsys):
    words = ["apply", "out", "new", "-o", "result", "--format", "npy.py:Npy:digits=3", "--set", "training.batch=2"]
    assert run(words) == 0
    assert "result: 7 samples, by step " in capsys.readouterr().out
    np.testing.assert_allclose(npy(trained_with_writers / "result"), read_array("want.h5"), rtol=1e-9, atol=1e-12)
    assert run([*words[:-4], "--format", "none"]) == 2
    assert "--format: expected hdf5" in capsys.readouterr().err
