"""Tests of predictions for data without labels: equal under every cut, other extents, metadata, interruptions."""

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
from tests.training.runs import EDGE, read_array, write_arrays, write_config, write_own, write_shared

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
        x = rng.standard_normal((samples, 3, edge, edge))
        write_arrays(folder / name / f"{number}.h5", {"inputs": x}, inputs="NCHW")


@pytest.fixture
def trained(comm, shared):
    """Return the folder of a run in ``out`` and of data without labels in ``new``, the same on all ranks."""
    if comm.rank == 0:
        write_config(shared)
        write_new(shared)
        train(shared / "run.toml", ["training.epochs=1", "strategy.sample=1"], comm=MPI.COMM_SELF)
    comm.barrier()
    return shared


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
    want = read_array(trained / "alone.h5")
    assert want.shape == (sum(FILES), EDGE, EDGE, 1) and want.std() > 0
    for number, cut in enumerate(CUTS.get(comm.size, ())):
        for batch in (4, 3) if "sample" not in cut else (4,):
            sets = [*overrides_of(cut), f"training.batch={batch}"]
            sets += [] if "sample" in cut else ["strategy.sample=1"]
            out = trained / f"{what}-{number}-{batch}.h5"
            found = apply(trained / "out", new, out, sets, what, comm)
            assert found["samples"] == found["computed"] == sum(FILES)
            np.testing.assert_allclose(read_array(out), want, rtol=1e-9, atol=1e-12)
            assert read_array(out).dtype == want.dtype == (np.uint8 if what == "classes" else np.float64)
            assert sources(out) == [(str(trained / "new" / f"{k}.h5"), n) for k in (0, 1) for n in range(FILES[k])]


@pytest.mark.ranks(1, 2)
def test_is_what_evaluation_predicts(comm, trained):
    """Predictions of the training samples equal those of an evaluation; labels are not read."""
    sets = [f"strategy.height={comm.size}", "strategy.sample=1"]
    evaluate(trained / "out", sets, "all", trained / "judged.h5", comm)
    apply(trained / "out", [str(trained / "data.h5")], trained / "applied.h5", sets, comm=comm)
    order = np.argsort(read_array(trained / "judged.h5", "sample"))
    assert [sources(trained / "judged.h5")[k] for k in order] == sources(trained / "applied.h5")
    np.testing.assert_array_equal(read_array(trained / "applied.h5"), read_array(trained / "judged.h5")[order])
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
    assert read_array(trained / "large.h5").shape == (found["samples"], 2 * EDGE, 2 * EDGE, 1)
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
    np.testing.assert_array_equal(read_array(trained / "out.h5"), read_array(trained / "whole.h5"))
    comm.barrier()
    if comm.rank == 0:
        alone = apply(trained / "out", new, trained / "out.h5", ["strategy.sample=1"], comm=MPI.COMM_SELF)
        assert alone["computed"] == sum(FILES) and not (trained / "out.h5.parts").exists()
    comm.barrier()
    found = apply(trained / "out", new, trained / "out.h5", [*sets[:2], "training.batch=4"], comm=comm)
    assert found["computed"] == sum(FILES), "other batches are another job, and a file of ours is replaced"
    np.testing.assert_allclose(read_array(trained / "out.h5"), read_array(trained / "whole.h5"), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
def test_what_is_there_stays_until_another_job_has_ended(comm, trained, monkeypatch):
    """An existing file is replaced only when another job has ended; names that are patterns for HDF5 are permitted."""
    new, sets = [str(trained / "new")], ["strategy.height=2", "strategy.sample=1"]
    out = trained / "50%b.h5"
    apply(trained / "out", new, out, sets, comm=comm)
    before = read_array(out)
    assert np.isfinite(before).all() and before.std() > 0

    def failing(self, blocks):
        write(self, [np.full_like(block, 7) for block in blocks])
        if self.done > 1:
            raise OSError(28, "No space left on device")

    write = PartFile.write
    with monkeypatch.context() as patched, pytest.raises((OSError, DataError), match="No space left on device"):
        patched.setattr(PartFile, "write", failing)
        apply(trained / "out", new, out, sets, "probabilities", comm)
    np.testing.assert_array_equal(read_array(out), before)
    apply(trained / "out", new, out, sets, "classes", comm)
    comm.barrier()
    np.testing.assert_array_equal(read_array(out), before > 0)
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
    whole, away = read_array(trained / "p.h5"), trained / "away"
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
        found = read_array(away / "p.h5")
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
            write_arrays(trained / "many" / name, {"inputs": rng.standard_normal((1, EDGE, EDGE, 3))}, inputs="NHWC")
    comm.barrier()
    sets = [f"strategy.height={comm.size}", "strategy.sample=1"]
    apply(trained / "out", [str(trained / "many")], trained / "p.h5", sets, comm=comm)
    assert sources(trained / "p.h5") == [(str(trained / "many" / name), 0) for name in names]
    for k in (1, 9):
        only = [str(trained / "many" / names[k])]
        apply(trained / "out", only, trained / f"{k}.h5", [*sets, "training.batch=1"], comm=comm)
        np.testing.assert_allclose(
            read_array(trained / "p.h5")[k], read_array(trained / f"{k}.h5")[0], rtol=1e-9, atol=1e-12
        )


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
        found = read_array(path)[: done[-1] * batch]
        assert found.tobytes() == np.repeat(np.arange(done[-1]) + 1.0, batch * np.prod(shape)).astype("f4").tobytes()
        work(path)
        assert read_array(path)[-1].min() == count // batch
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


def test_a_new_part_that_cannot_be_read_is_an_error_of_data(tmp_path, monkeypatch):
    array = PartArray("prediction", Box.of_shape((2, 3)), np.dtype(np.float64))
    monkeypatch.setattr(os, "pread", partial(called, [], "pread", os.pread, True))
    with pytest.raises(DataError, match=r"rank-00000.h5: .* from 0 cannot be read \(Input/output error\)\); check"):
        PartFile(tmp_path / "job" / "rank-00000.h5", 0, [array], 8, 2, "job")


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
    found = read_array(working / "probabilities.h5")
    np.testing.assert_array_equal(found, read_array(working / "logits.h5"))
    np.testing.assert_array_equal(found > 0.5, read_array(working / "classes.h5"))
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
    assert len(read_array(out)) == sum(FILES)


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
    assert set(np.unique(read_array(tmp_path / "p.h5"))) <= {0, 1} and not list(tmp_path.glob("*.parts"))


NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable. {:10d}"
HALF_DATA = '[data]\npath = "data.h5"\ntargets = "target"\n'
HALF = f"""
import halograd as hg

def build():
    x = hg.Input(({EDGE}, {EDGE}, 3), name="x")
    y = hg.Conv(2, 3, padding=1, stride=2)(x)
    loss = hg.MeanSquaredError()(y, hg.Input(y.shape, name="target"))
    return hg.Network({{"whole": hg.Conv(1, 1)(x), "half": y, "label": hg.GlobalAveragePool()(y), "loss": loss}})
"""


def write_map(folder: Path, edge: int = EDGE) -> None:
    """Write two files in netCDF's layout, with two and three samples, different columns, and a map projection."""
    folder.mkdir()
    rng = np.random.default_rng(2)
    for number, samples in enumerate((2, 3), 9):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["inputs"] = rng.standard_normal((samples, edge, edge, 3))
            file["inputs"].attrs.update(layout="NHWC", grid_mapping="crs")
            file["crs"] = 0
            file["crs"].attrs["epsg_code"] = "EPSG:4326"
            axes = {"time": 10.0 * number + np.arange(samples), "lat": np.arange(edge), "lon": number + np.arange(edge)}
            for k, (name, values) in enumerate(axes.items()):
                file[name] = values
                file[name].make_scale(name)
                file["inputs"].dims[k].attach_scale(file[name])


def content(path: Path) -> dict[str, tuple]:
    """Return the datasets of a file by name: scales of the axes, attributes without references, and values or shape."""
    with h5py.File(path) as file:
        return {
            name: (
                [sorted(dim.keys()) for dim in one.dims],
                {k: v for k, v in one.attrs.items() if k not in ("REFERENCE_LIST", "DIMENSION_LIST")},
                one[()].tolist() if one.ndim < 3 else one.shape,
            )
            for name, one in file.items()
        }


@pytest.mark.ranks(1, 2, 4)
def test_has_the_coordinates_of_the_samples(comm, working, caplog):
    """Predictions have the samples' coordinates under every cut; on another grid they have none, with a message."""
    if comm.rank == 0:
        write_map(Path("map"))
        arrays = {"inputs": np.ones((8, EDGE, EDGE, 3)), "target": np.ones((8, EDGE // 2, EDGE // 2, 2))}
        write_arrays(Path("data.h5"), arrays, inputs="NHWC")
        train(write_own(working, HALF, HALF_DATA), ["training.epochs=1"], comm=MPI.COMM_SELF)
        apply("out", ["map"], "alone.h5", ["training.batch=2"], comm=MPI.COMM_SELF)
    comm.barrier()
    cut = [f"strategy.height={comm.size}", "training.batch=2"]
    for what in ("logits", "classes"):
        apply("out", ["map"], f"{what}.h5", cut, what, comm)
        comm.barrier()
        found = content(Path(f"{what}.h5"))
        assert found == content(Path("alone.h5"))
    assert found["time"][2] == [90, 91, 100, 101, 102] and found["lat"][2] == list(range(EDGE))
    assert [row[0] for row in found["lon"][2]] == [9, 9, 10, 10, 10]
    assert found["whole"][:2] == (
        [["time"], ["lat"], [NO_VARIABLE.format(EDGE)], [NO_VARIABLE.format(1)]],
        {"coordinates": "lon", "grid_mapping": "crs", "layout": "NHWC"},
    )
    assert found["half"][:2] == ([["time"], *[[NO_VARIABLE.format(n)] for n in (8, 8, 2)]], {"layout": "NHWC"})
    assert found["label"][0] == [["time"], [NO_VARIABLE.format(2)]]
    assert not [r for r in caplog.records if "coordinates" in r.message]
    if comm.rank == 0:
        with h5py.File("map/9.h5", "a") as file:
            file["time"].attrs["units"] = "hours since 1900-01-01"
        apply("out", ["map"], "time.h5", ["training.batch=2"], comm=MPI.COMM_SELF)
        (said,) = [r.message for r in caplog.records if "coordinates" in r.message]
        assert said.endswith("coordinates of the data: time (in map/10.h5: it has another 'units')")
        there = content(Path("time.h5"))
        assert there["time"][1]["NAME"].decode() == NO_VARIABLE.format(5) and there["lat"] == found["lat"]


@pytest.mark.ranks(1, 2)
def test_samples_of_another_size_have_their_own_coordinates(comm, working):
    cut = [f"strategy.height={comm.size}", "training.batch=2"]
    train(write_shared(comm, working, write_config), ["training.epochs=1", *cut], comm=comm)
    if comm.rank == 0:
        write_map(working / "map", 2 * EDGE)
    comm.barrier()
    apply("out", ["map"], "p.h5", [f"model.resolution={2 * EDGE}", *cut], comm=comm)
    assert content(Path("p.h5"))["lat"][2] == list(range(2 * EDGE))


SAID = """
import halograd as hg

def build(edge=16):
    x = hg.Input((edge, edge, 3), name="x")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    flow, logits = hg.Conv(2, 1, name="flow")(y), hg.Conv(3, 1, name="logits")(y)
    loss = hg.MeanSquaredError()(flow, hg.Input((edge, edge, 2), "speed"))
    loss = loss + hg.SoftmaxCrossEntropy()(logits, hg.Input((edge, edge, 1), "mask", "int32"))
    return hg.Network({"prediction": flow, "kind": logits, "features": y, "loss": loss}, name="said")
"""
SAID_DATA = """[data]
path = "data.h5"
inputs = "u"
[data.targets]
speed = "v"
mask = "label"
"""
SPEED = {"units": "m s-1", "long_name": "velocity", "channel_names": ["u", "v"]}
MASK = {"long_name": "kind of cell", "flag_values": [0, 1, 2], "flag_meanings": "land sea ice", "units": "1"}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("what", ["logits", "classes"])
def test_says_what_the_data_say(comm, working, what):
    """Predictions have the attributes of their target in training, the file those of the new inputs."""
    if comm.rank == 0:
        rng = np.random.default_rng(5)
        write_own(working, SAID, SAID_DATA)
        with h5py.File("data.h5", "w") as file:
            file.create_dataset("u", data=rng.random((12, EDGE, EDGE, 3))).attrs["layout"] = "NHWC"
            file["v"], file["label"] = rng.random((12, EDGE, EDGE, 2)), rng.integers(0, 3, (12, EDGE, EDGE))
            for name, said in (("v", SPEED), ("label", MASK)):
                file[name].attrs.update(said)
            file["v"].attrs["comment"] = np.zeros((2, 2))
        for number in range(2):
            with h5py.File(f"new{number}.h5", "w") as file:
                file.create_dataset("u", data=rng.random((4, EDGE, EDGE, 3))).attrs["layout"] = "NHWC"
                file.attrs.update(title="Ocean", history=f"run {number}", year=np.int32(2020), written_by="somebody")
                file.attrs["nothing"] = h5py.Empty("f")
    comm.barrier()
    sets = ["training.epochs=1", f"strategy.height={comm.size}"]
    train("run.toml", sets, comm=comm)
    apply("out", ["new0.h5", "new1.h5"], "p.h5", sets, what, comm)
    apply("out", ["new0.h5"], "one.h5", sets, what, comm)
    if comm.rank == 0:
        with h5py.File("p.h5") as file, h5py.File("one.h5") as one:
            said = {"title": "Ocean", "year": 2020, "written_by": "halograd apply", "network": "said"}
            found = dict(file.attrs)
            assert ("needs" in found) == (comm.size > 1) and {**found, "needs": ""} == {**said, "needs": ""}
            assert one.attrs["history"] == "run 0"
            found = dict(file["prediction"].attrs)
            assert found.pop("channel_names").tolist() == ["u", "v"]
            assert found == {"layout": "NHWC", "units": "m s-1", "long_name": "velocity"}
            kind = dict(file["kind"].attrs)
            assert kind["long_name"] == "kind of cell" and ("flag_meanings" in kind) == (what == "classes")
            assert dict(file["features"].attrs) == {"layout": "NHWC"}
        with h5py.File("p.h5", "r+") as file:  # so that the next job may replace it
            assert file.attrs["written_by"] == "halograd apply"


LARGE = 2 * EDGE
#: A run of so many ranks, whose steps have two parts.
OF_FOUR = '[strategy]\nsample = 2\nheight = 2\nhalo = "pad"\n'
FIVE = ["strategy.sample=1", "strategy.height=1", f"model.resolution={LARGE}", "training.batch=1"]
FIVE += ["training.accumulate=1"]
ADAPTED_NET = """
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
def adapted_trained(comm, working):
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


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_sample_of_another_size(comm, adapted_trained):
    """A sample of another size needs no settings, and gives the predictions of five settings by hand."""
    if comm.rank == 0:
        found = apply("four.toml", ["one.h5"], "by-hand.h5", FIVE, comm=MPI.COMM_SELF)
        assert found["settings"] == []
    comm.barrier()
    found = apply("four.toml", ["one.h5"], "out.h5", comm=comm)
    cut = {1: [], 2: ["height=2"], 3: ["height=3"], 4: ["height=2", "width=2"]}[comm.size]
    wanted = [f"model.resolution={LARGE}", "training.batch=1", "strategy.sample=1", *(f"strategy.{one}" for one in cut)]
    assert found["settings"] == wanted and found["samples"] == 1
    np.testing.assert_allclose(read_array("out.h5"), read_array("by-hand.h5"), rtol=1e-9, atol=1e-12)
    assert read_array("out.h5").shape == (1, LARGE, LARGE, 1)


@pytest.mark.ranks(1, 2)
def test_evaluates_what_it_predicts(comm, adapted_trained):
    """Evaluation of samples of another size has the predictions of `apply`, and the same scores under any cut."""
    if comm.rank == 0:
        alone = evaluate("four.toml", [*FIVE, "data.path=large.h5"], "all", comm=MPI.COMM_SELF)
    alone = comm.bcast(alone if comm.rank == 0 else None)
    found = evaluate("four.toml", ["data.path=large.h5"], "all", "judged.h5", comm)
    apply("four.toml", ["large.h5"], "out.h5", comm=comm)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12) and found["iou"] == pytest.approx(alone["iou"])
    with h5py.File("judged.h5") as file:
        np.testing.assert_array_equal(file["prediction"][()], read_array("out.h5")[file["sample"][()]])
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
def test_what_the_user_sets_stays(comm, adapted_trained, sets, message):
    with pytest.raises(UserError, match=message):
        apply("four.toml", ["one.h5"], "out.h5", sets, comm=comm)
    assert not Path("out.h5").exists()


def test_a_cut_that_fits_stays(adapted_trained):
    """With the ranks and the sample size of training no setting is derived; with few samples only the batch is."""
    write_samples(Path("few.h5"), (3, EDGE, EDGE, 3))
    write_samples(Path("many.h5"), (4, EDGE, EDGE, 3))
    assert apply("out", ["many.h5"], "p.h5", comm=MPI.COMM_SELF)["settings"] == []
    assert apply("out", ["few.h5"], "p.h5", comm=MPI.COMM_SELF)["settings"] == ["training.batch=3"]
    assert apply("out", ["few.h5", "many.h5"], "p.h5", comm=MPI.COMM_SELF)["settings"] == []


def test_order_of_axes(adapted_trained):
    """A file needs no order of axes if only one axis has the network's number of channels."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((2, EDGE, EDGE, 3))
    for name, array in (("last", x), ("first", np.moveaxis(x, -1, 1))):
        with h5py.File(f"{name}.h5", "w") as file:
            file["inputs"] = array
        layout = {"last": "NHWC", "first": "NCHW"}[name]
        settings = apply("out", [f"{name}.h5"], f"p-{name}.h5", comm=MPI.COMM_SELF)["settings"]
        assert settings[0] == f'data.layout="{layout}"'
    np.testing.assert_array_equal(read_array("p-last.h5"), read_array("p-first.h5"))
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
    body = ADAPTED_NET.replace("SIGNATURE", signature)
    line = "    edge = resolution if isinstance(resolution, int) else resolution[0]\n" if follows else ""
    config = write_own(working, body.replace("    x = hg", f"{line}    x = hg", 1))
    train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
    write_samples(Path("one.h5"), (1, LARGE, LARGE, 3))
    found = apply("out", ["one.h5"], "p.h5", comm=MPI.COMM_SELF)
    size = f"model.resolution={LARGE}" if follows else f"data.extents=[{LARGE}, {LARGE}]"
    assert found["settings"] == [size, "training.batch=1"]
    if not follows:
        apply("out", ["one.h5"], "by-hand.h5", [f"model.edge={LARGE}"], comm=MPI.COMM_SELF)
        np.testing.assert_array_equal(read_array("p.h5"), read_array("by-hand.h5"))
    assert read_array("p.h5").shape == (1, LARGE, LARGE, 1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_size_that_the_network_does_not_divide(comm, adapted_trained):
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
    np.testing.assert_allclose(read_array("out.h5"), read_array("by-hand.h5")[:, :21, :26], rtol=1e-9, atol=1e-12)
    evaluate("plain", ["data.path=odd.h5"], "all", "judged.h5", comm)
    np.testing.assert_allclose(read_array("judged.h5"), read_array("out.h5"), rtol=1e-9, atol=1e-12)


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


def test_windows_stay_windows(adapted_trained):
    """A run trained on cropped samples evaluates the middle window, and applies to whole samples."""
    crop = ["data.path=large.h5", "data.augment={crop = true}", "output.directory=crop"]
    train("run.toml", ["training.epochs=1", "training.batch=2", *crop], comm=MPI.COMM_SELF)
    evaluate("crop", ["training.batch=1"], "all", "judged.h5", MPI.COMM_SELF)
    assert read_array("judged.h5").shape[1:] == (EDGE, EDGE, 1)
    apply("crop", ["large.h5"], "p.h5", comm=MPI.COMM_SELF)
    assert read_array("p.h5").shape[1:] == (LARGE, LARGE, 1)


def test_adapted_from_the_command_line(adapted_trained, capsys):
    assert run(["apply", "four.toml", "one.h5", "-o", "p.h5", "--what", "classes"]) == 0
    settings = f"for these data and ranks: model.resolution={LARGE} training.batch=1 strategy.sample=1"
    assert settings in capsys.readouterr().out
    assert run(["evaluate", "four.toml", "--set", "data.path=large.h5", "--samples", "all"]) == 0
    assert f"for these data and ranks: model.resolution={LARGE} strategy.sample=1" in capsys.readouterr().out
