"""Tests of predictions for data without labels: equal under every cut, other extents, interruptions, and errors."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.data import DataError, open_dataset
from halograd.data.writers import Hdf5, check_result
from halograd.dtensor import Blocks, Box
from halograd.errors import UserError
from halograd.layers.targets import MetricSpec
from halograd.training import apply, applying, evaluate, train
from halograd.training import parts as training_parts
from halograd.training.evaluation import check_predictions
from halograd.training.parts import PartArray, PartFile
from tests.training.cuts import overrides_of
from tests.training.runs import EDGE, write_config, write_own

FILES = (3, 5)
NET = f"""
import halograd as hg

def build():
    x = hg.Input(({EDGE}, {EDGE}, 3), name="x")
    y = hg.Conv(1, 3, padding=1)(x)
    p = hg.Sigmoid()(y)
    loss = hg.Dice("none")(p, hg.Input(p.shape, name="target"))
    return hg.Network({{"prediction": p, "simulation": y, "loss": loss}})
"""
CUTS = {1: ({},), 2: ({"height": 2}, {"sample": 2}), 3: ({"width": 3},), 4: ({"height": 2, "width": 2}, {"sample": 4})}


def write_new(folder: Path, edge: int = EDGE, name: str = "new") -> None:
    """Write files of samples without masks."""
    rng = np.random.default_rng(11)
    (folder / name).mkdir()
    for number, samples in enumerate(FILES):
        with h5py.File(folder / name / f"{number}.h5", "w") as file:
            x = rng.standard_normal((samples, 3, edge, edge))
            file.create_dataset("inputs", data=x).attrs["layout"] = "NCHW"


@pytest.fixture
def trained(comm, shared):
    """Return the folder of a run in ``out`` and of data without labels in ``new``, the same on all ranks."""
    if comm.rank == 0:
        write_config(shared)
        write_new(shared)
        train(shared / "run.toml", ["training.epochs=1", "strategy.sample=1"], comm=MPI.COMM_SELF)
    comm.barrier()
    return shared


def read(path: Path, name: str = "prediction") -> np.ndarray:
    with h5py.File(path) as file:
        return file[name][()]


def sources(out: Path) -> list[tuple[str, int]]:
    """Return the file of each prediction, and the number of the sample in it."""
    with h5py.File(out) as file:
        return list(zip(file["source_file"].asstr()[()], file["source_sample"][()]))


def parts(out: Path) -> list[int]:
    """Return the ranks that have written a part, for the only job of `out`."""
    (folder,) = Path(f"{out}.parts").iterdir()
    return sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob("*.h5"))


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["logits", "probabilities", "classes"])
def test_is_that_of_one_process_under_every_cut(comm, trained, what):
    """Predictions equal those of one process under every cut, also with a short last batch."""
    new = [str(trained / "new")]
    if comm.rank == 0:
        apply(trained / "out", new, trained / "alone.h5", ["strategy.sample=1"], what, MPI.COMM_SELF)
    comm.barrier()
    want = read(trained / "alone.h5")
    assert want.shape == (sum(FILES), EDGE, EDGE, 1) and want.std() > 0
    for number, cut in enumerate(CUTS.get(comm.size, ())):
        for batch in (4, 3) if "sample" not in cut else (4,):
            sets = [*overrides_of(cut), f"training.batch={batch}"]
            sets += [] if "sample" in cut else ["strategy.sample=1"]
            out = trained / f"{what}-{number}-{batch}.h5"
            found = apply(trained / "out", new, out, sets, what, comm)
            assert found["samples"] == found["computed"] == sum(FILES)
            np.testing.assert_allclose(read(out), want, rtol=1e-9, atol=1e-12)
            assert read(out).dtype == want.dtype == (np.uint8 if what == "classes" else np.float64)
            assert sources(out) == [(str(trained / "new" / f"{k}.h5"), n) for k in (0, 1) for n in range(FILES[k])]


@pytest.mark.ranks(1, 2)
def test_is_what_evaluation_predicts(comm, trained):
    """Predictions of the training samples equal those of an evaluation; labels are not read."""
    sets = [f"strategy.height={comm.size}", "strategy.sample=1"]
    evaluate(trained / "out", sets, "all", trained / "judged.h5", comm)
    apply(trained / "out", [str(trained / "data.h5")], trained / "applied.h5", sets, comm=comm)
    order = np.argsort(read(trained / "judged.h5", "sample"))
    assert [sources(trained / "judged.h5")[k] for k in order] == sources(trained / "applied.h5")
    np.testing.assert_array_equal(read(trained / "applied.h5"), read(trained / "judged.h5")[order])
    with h5py.File(trained / "applied.h5") as file:
        assert file["prediction"].attrs["layout"] == "NHWC" and file.attrs["network"] == "mesh"


@pytest.mark.ranks(1, 2, 3)
def test_samples_of_another_size(comm, trained):
    """Predictions of samples of twice the size have that size; a network of other widths is an error."""
    if comm.rank == 0:
        write_new(trained, 2 * EDGE, "large")
    comm.barrier()
    sets = [f"model.resolution={2 * EDGE}", f"strategy.height={comm.size}", "strategy.sample=1", "training.batch=2"]
    found = apply(trained / "out", [str(trained / "large")], trained / "large.h5", sets, comm=comm)
    assert read(trained / "large.h5").shape == (found["samples"], 2 * EDGE, 2 * EDGE, 1)
    with pytest.raises(UserError, match=r"another network: .*'conv1_1/w: parameter"):
        apply(trained / "out", [str(trained / "new")], trained / "x.h5", ["model.widths=[5, 6]", *sets[1:]], comm=comm)


@pytest.mark.ranks(1, 2)
def test_goes_on_where_it_was_interrupted(comm, trained, monkeypatch):
    """An interrupted job resumes after the last batch that all ranks have written; parts of other jobs are removed."""
    new, sets = [str(trained / "new")], [f"strategy.height={comm.size}", "strategy.sample=1", "training.batch=2"]
    apply(trained / "out", new, trained / "whole.h5", sets, comm=comm)
    written = []
    write = PartFile.write

    def failing(self, blocks):
        written.append(self.done)
        if self.done == 2 and comm.rank == comm.size - 1:
            raise OSError(28, "No space left on device")
        write(self, blocks)

    monkeypatch.setattr(PartFile, "write", failing)
    with pytest.raises((OSError, DataError), match="No space left on device"):
        apply(trained / "out", new, trained / "out.h5", sets, comm=comm)
    assert not (trained / "out.h5").exists() and parts(trained / "out.h5") == list(range(comm.size))
    written.clear()
    monkeypatch.setattr(PartFile, "write", lambda self, blocks: (written.append(self.done), write(self, blocks)))
    found = apply(trained / "out", new, trained / "out.h5", sets, comm=comm)
    assert written == [2, 3] and found["computed"] == 4
    np.testing.assert_array_equal(read(trained / "out.h5"), read(trained / "whole.h5"))
    comm.barrier()
    if comm.rank == 0:
        alone = apply(trained / "out", new, trained / "out.h5", ["strategy.sample=1"], comm=MPI.COMM_SELF)
        assert alone["computed"] == sum(FILES) and not (trained / "out.h5.parts").exists()
    comm.barrier()
    found = apply(trained / "out", new, trained / "out.h5", [*sets[:2], "training.batch=4"], comm=comm)
    assert found["computed"] == sum(FILES), "other batches are another job, and a file of ours is replaced"
    np.testing.assert_allclose(read(trained / "out.h5"), read(trained / "whole.h5"), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
def test_what_is_there_stays_until_another_job_has_ended(comm, trained, monkeypatch):
    """An existing file is replaced only when another job has ended; names that are patterns for HDF5 are permitted."""
    new, sets = [str(trained / "new")], ["strategy.height=2", "strategy.sample=1"]
    out = trained / "50%b.h5"
    apply(trained / "out", new, out, sets, comm=comm)
    before = read(out)
    assert np.isfinite(before).all() and before.std() > 0

    def failing(self, blocks):
        write(self, [np.full_like(block, 7) for block in blocks])
        if self.done > 1:
            raise OSError(28, "No space left on device")

    write = PartFile.write
    with monkeypatch.context() as patched, pytest.raises((OSError, DataError), match="No space left on device"):
        patched.setattr(PartFile, "write", failing)
        apply(trained / "out", new, out, sets, "probabilities", comm)
    np.testing.assert_array_equal(read(out), before)
    apply(trained / "out", new, out, sets, "classes", comm)
    comm.barrier()
    np.testing.assert_array_equal(read(out), before > 0)
    assert parts(out) == [0, 1]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("what", ["logits", "classes"])
def test_without_its_parts_no_number_is_a_prediction(comm, trained, what):
    """A file of predictions lists its parts; missing parts read as fill values, and with all parts it is complete."""
    sets = [f"strategy.height={comm.size}", "strategy.sample=1"]
    apply(trained / "out", [str(trained / "new")], trained / "p.h5", sets, what, comm)
    comm.barrier()
    if comm.rank:
        return
    whole, away = read(trained / "p.h5"), trained / "away"
    away.mkdir()
    shutil.copy(trained / "p.h5", away)
    with h5py.File(away / "p.h5") as file:
        needs = file.attrs["needs"].split("\n")
        gone = np.isnan if what == "logits" else partial(np.equal, 255)
        assert gone(file["prediction"][()]).all() and gone(file["prediction"].fillvalue)
    assert needs == [path.relative_to(trained).as_posix() for path in sorted(trained.glob("p.h5.parts/*/*.h5"))]
    assert len(needs) == comm.size
    with pytest.raises(DataError, match=r" p\.h5\.parts.* cannot be read"):
        open_dataset(away / "p.h5", "prediction", None)
    rows = EDGE // comm.size + (EDGE % comm.size > 0)
    for name in needs:
        (away / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(trained / name, away / name)
        found = read(away / "p.h5")
        if name == needs[0]:
            np.testing.assert_array_equal(found[:, : rows - 1], whole[:, : rows - 1])
            assert gone(found[:, rows:]).all()
    np.testing.assert_array_equal(found, whole)
    assert not gone(whole).any()


def test_the_value_of_missing_classes_is_no_class():
    """The fill value of missing classes is the largest integer of the type, and no class, for any number of classes."""
    boxes = Blocks([((0, 1),)] * 3)
    for classes, dtype in ((2, "u1"), (255, "u1"), (256, "u2"), (65_535, "u2"), (65_536, "u4")):
        plain = applying.Output("y", SimpleNamespace(), (4, classes), boxes, np.dtype("f4"), lambda block: block)
        output = applying._of_classes(plain, MetricSpec(classes), "classes")
        assert output.dtype == dtype and classes - 1 < output.fill == np.iinfo(dtype).max
    assert np.isnan(plain.fill)


@pytest.mark.ranks(1, 2)
def test_samples_are_in_the_natural_order_of_their_files(comm, trained):
    """Samples in files of their own are in the natural order of the files' names."""
    names = [f"s{number}.h5" for number in range(1, 13)]
    if comm.rank == 0:
        rng = np.random.default_rng(3)
        (trained / "many").mkdir()
        for name in reversed(names):
            with h5py.File(trained / "many" / name, "w") as file:
                file["inputs"] = rng.standard_normal((1, EDGE, EDGE, 3))
                file["inputs"].attrs["layout"] = "NHWC"
    comm.barrier()
    sets = [f"strategy.height={comm.size}", "strategy.sample=1"]
    apply(trained / "out", [str(trained / "many")], trained / "p.h5", sets, comm=comm)
    assert sources(trained / "p.h5") == [(str(trained / "many" / name), 0) for name in names]
    for k in (1, 9):
        only = [str(trained / "many" / names[k])]
        apply(trained / "out", only, trained / f"{k}.h5", [*sets, "training.batch=1"], comm=comm)
        np.testing.assert_allclose(read(trained / "p.h5")[k], read(trained / f"{k}.h5")[0], rtol=1e-9, atol=1e-12)


def test_parts_of_killed_ranks_are_continued(tmp_path, monkeypatch):
    """A part whose rank was killed at any time contains as many batches as its progress record states."""
    monkeypatch.setattr(training_parts, "RECORD_SECONDS", 0.0)
    shape, count, batch = (16, 9, 2), 40, 2
    array = PartArray("prediction", Box.of_shape((batch, *shape)), np.dtype(np.float32))

    def work(path, begun=lambda: None):
        with PartFile(path, 0, [array], count, batch, "job") as part:
            for number in range(part.done, count // batch):
                begun()
                part.write([np.full((batch, *shape), number + 1.0)])
            part.record()

    rng, done = np.random.default_rng(5), []
    for attempt in range(40):
        path = tmp_path / "job" / f"{attempt}.h5"
        heard, said = os.pipe()
        child = os.fork()
        if not child:
            work(path, partial(os.write, said, b"."))
            os._exit(0)
        for _ in range(int(rng.integers(1, count // batch))):
            os.read(heard, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)
        os.close(said)
        with PartFile(path, 0, [array], count, batch, "job") as part:
            done.append(part.done)
            assert part.fault is None or part.fault == "there is no record of its progress"
            assert part.done or part.fault
        found = read(path)[: done[-1] * batch]
        assert found.tobytes() == np.repeat(np.arange(done[-1]) + 1.0, batch * np.prod(shape)).astype("f4").tobytes()
        work(path)
        assert read(path)[-1].min() == count // batch
    assert min(done) < max(done), "otherwise this would show nothing"


@pytest.mark.parametrize("fails", ["fsync", "pwrite", "replace", "open"])
def test_progress_is_not_ahead_of_the_disk(tmp_path, monkeypatch, fails):
    """Data are on the disk before the progress record; after a failed write the record is the previous one."""
    monkeypatch.setattr(training_parts, "RECORD_SECONDS", 0.0)
    array = PartArray("prediction", Box.of_shape((2, 3)), np.dtype(np.float64))
    path, calls = tmp_path / "job" / "rank-00000.h5", []
    with PartFile(path, 0, [array], 8, 2, "job") as part:
        part.write([np.ones((2, 3))])
        with monkeypatch.context() as patched:
            for name in ("pwrite", "fsync", "replace", "open"):
                patched.setattr(os, name, partial(called, calls, name, getattr(os, name), name == fails))
            with pytest.raises(DataError, match=r"rank-00000.*Input/output error"):
                part.write([np.full((2, 3), 2.0)])
    order = ["pwrite", "fsync", "open", "fsync", "replace"]
    assert calls == order[: order.index(fails) + 1] and not list(path.parent.glob(".*"))
    with PartFile(path, 0, [array], 8, 2, "job") as part:
        assert (part.done, part.fault) == (1, None)


def test_two_jobs_do_not_share_a_part(tmp_path):
    """Two jobs do not use the same part: the second begins anew, and the first cannot finish with its file."""
    array = PartArray("prediction", Box.of_shape((2, 3)), np.dtype(np.float64))
    path = tmp_path / "job" / "rank-00000.h5"
    with PartFile(path, 0, [array], 4, 2, "job") as first:
        first.write([np.ones((2, 3))])
        with PartFile(path, 0, [array], 4, 2, "job") as second:
            assert second.fault == "there is no record of its progress"
            second.write([np.ones((2, 3))])
            with pytest.raises(DataError, match=r"rank-00000.h5: .*the file of this job"):
                first.record()
            assert not path.with_suffix(".progress").exists()
            second.record()
    with PartFile(path, 0, [array], 4, 2, "job") as third:
        assert (third.done, third.fault) == (1, None)


def called(calls, name, function, fails, *arguments, **options):
    """Record a call, then make it, or fail like a broken disk."""
    calls.append(name)
    if fails:
        raise OSError(5, os.strerror(5), *arguments[:1] * isinstance(arguments[0], Path))
    return function(*arguments, **options)


def test_of_probabilities_they_are_what_it_computes(working):
    """Predictions of a loss of probabilities are probabilities; a reserved output name is an error before the run."""
    train(write_own(working, NET), ["training.epochs=1"], comm=MPI.COMM_SELF)
    write_new(working)
    for what in applying.WHAT:
        apply(working / "out", ["new"], working / f"{what}.h5", what=what, comm=MPI.COMM_SELF)
    found = read(working / "probabilities.h5")
    np.testing.assert_array_equal(found, read(working / "logits.h5"))
    np.testing.assert_array_equal(found > 0.5, read(working / "classes.h5"))
    assert 0 < found.min() < 0.4
    for name in ("0.h5", "1.h5"):
        with h5py.File(working / "new" / name, "a") as file:
            file["simulation"] = np.arange(len(file["inputs"]))
    with pytest.raises(UserError, match=r"output 'simulation': .*another name"):
        apply(working / "out", ["new"], working / "p.h5", comm=MPI.COMM_SELF)
    train(write_own(working, NET.replace("simulation", "source_file")), ["output.directory=o"], comm=MPI.COMM_SELF)
    with pytest.raises(UserError, match=r"output 'source_file': .*another name"):
        apply(working / "o", ["new"], working / "p.h5", comm=MPI.COMM_SELF)


@pytest.mark.ranks(1, 2)
def test_refusals(comm, trained):
    new, sets = [str(trained / "new")], ["strategy.sample=1", f"strategy.height={comm.size}"]
    if comm.rank == 0:
        (trained / "mine.h5").write_text("mine")
    comm.barrier()
    for out, what, message in (
        ("mine.h5", "logits", r"mine.h5: expected no file there, or one of an earlier job, got another"),
        ("out.h5", "masks", "--what: expected one of logits, probabilities, classes, got 'masks'"),
    ):
        with pytest.raises((UserError, DataError), match=message):
            apply(trained / "out", new, trained / out, sets, what, comm)
    out = trained / "missing/folder/out.h5"
    with pytest.raises(DataError, match="no such file"):
        apply(trained / "out", [str(trained / "none.h5")], out, sets, comm=comm)
    with pytest.raises(UserError, match=r"training.batch: .* 3, .*0.h5, got 4"):
        apply(trained / "out", [str(trained / "new/0.h5")], out, [*sets, "training.batch=4"], comm=comm)
    for data in (np.ones((2, EDGE, EDGE, 3)), [trained / "new", 3]):
        with pytest.raises(UserError, match=r"data: .*, got (ndarray|list)"):
            apply(trained / "out", data, out, sets, comm=comm)
    assert not (trained / "missing").exists()
    apply(trained / "out", trained / "new", out, sets, comm=comm)
    assert len(read(out)) == sum(FILES)


@pytest.mark.parametrize("check", [partial(check_result, Hdf5()), check_predictions])
def test_what_others_have_written_is_not_replaced(tmp_path, check):
    """A file of another program is never replaced, even if it resembles predictions."""
    for number, (names, attributes) in enumerate(
        [(("prediction",), {}), (("prediction", "target", "sample", "notes"), {"network": "seismic"})]
    ):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file.attrs.update(attributes)
            for name in names:
                file[name] = np.zeros(3)
        with pytest.raises(DataError, match="expected no file there"):
            check(path)
    check(tmp_path / "new" / "none.h5")
    assert not (tmp_path / "new").exists()


def test_from_the_command_line(tmp_path, capsys):
    write_config(tmp_path)
    write_new(tmp_path)
    train(tmp_path / "run.toml", ["training.epochs=1"], comm=MPI.COMM_SELF)
    words = [
        str(tmp_path / "out"),
        str(tmp_path / "new/0.h5"),
        str(tmp_path / "new/1.h5"),
        "-o",
        str(tmp_path / "p.h5"),
    ]
    assert run(["apply", *words, "--what", "classes"]) == 0
    assert f"{tmp_path / 'p.h5'}: 8 samples, by step " in capsys.readouterr().out
    assert set(np.unique(read(tmp_path / "p.h5"))) <= {0, 1} and not list(tmp_path.glob("*.parts"))
