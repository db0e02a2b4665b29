"""Tests of a format of predictions in a user's file: the same under every cut, after interruptions and errors."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.data import DataError
from halograd.errors import UserError
from halograd.training import apply, train
from halograd.training.parts import PartFile
from tests.docs.pages import write_files
from tests.support.inject import refusing
from tests.training.runs import EDGE, write_config

#: Cuts by the number of ranks; the last ones leave a rank without a block of some outputs, or cut a batch in two.
CUTS = {1: [{}], 2: [{"height": 2}, {"sample": 2}], 3: [{"width": 3}, {"height": 3}], 4: [{"height": 2, "width": 2}]}
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
def trained(comm, config):
    """Return the working folder, with a run in ``out``, samples without labels in ``new``, and the user's files."""
    folder = config.parent
    if comm.rank == 0:
        write_files("extending.md", folder)
        (folder / "own.py").write_text(OWN)
        (folder / "new").mkdir()
        rng = np.random.default_rng(11)
        for number, samples in enumerate(FILES):
            with h5py.File(folder / "new" / f"{number}.h5", "w") as file:
                file["inputs"] = rng.standard_normal((samples, EDGE, EDGE, 3))
                file["inputs"].attrs["layout"] = "NHWC"
        train(config, ["training.epochs=1", "strategy.sample=1"], comm=MPI.COMM_SELF)
        apply("out", ["new"], "want.h5", ["strategy.sample=1"], comm=MPI.COMM_SELF)
    comm.barrier()
    return folder


def write(folder):
    write_config(folder)


def want() -> np.ndarray:
    with h5py.File("want.h5") as file:
        return file["prediction"][()]


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
def test_under_every_cut(comm, trained, name):
    """Results of a user's writer, on all ranks or rank 0, are bitwise those in HDF5, and no part remains."""
    for number, cut in enumerate(CUTS[comm.size]):
        sets = sets_of(cut, 2 if "sample" in cut else 3)
        apply("out", ["new"], f"same{number}.h5", sets, comm=comm)
        found = apply("out", ["new"], f"result{number}", sets, comm=comm, format=name)
        assert found["samples"] == found["computed"] == sum(FILES)
        comm.barrier()
        if comm.rank == 0:
            with h5py.File(f"same{number}.h5") as file:
                same = file["prediction"][()]
            np.testing.assert_allclose(same, want(), rtol=1e-9, atol=1e-12)
            result = trained / f"result{number}"
            got = npy(result) if result.is_dir() else np.fromfile(result).reshape(same.shape)
            assert got.tobytes() == same.tobytes()
            if result.is_dir():
                lines = [f"{Path('new', f'{k}.h5')} {n}" for k in (0, 1) for n in range(FILES[k])]
                assert (result / "samples.txt").read_text().splitlines() == lines
            assert [path.name for path in trained.iterdir() if "result" in path.name] == [f"result{number}"]
            os.rename(result, trained / "seen" if number == 0 else trained / f"s{number}")
        comm.barrier()


@pytest.mark.ranks(1, 2, 3)
def test_an_interrupted_job_continues_in_any_format(comm, trained, monkeypatch):
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
    np.testing.assert_allclose(npy(trained / "result"), want(), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Failing", ValueError, "no sample is good enough"),
        ("Full", DataError, r"other.* can be written.*No space left .*; free"),
    ],
)
def test_a_mistake_of_a_writer_loses_nothing(comm, trained, name, error, message):
    """An error of a writer on any rank is raised on all and leaves the parts, so that no sample is computed again."""
    sets = sets_of({"height": comm.size}, 2)
    with pytest.raises(error, match=message):
        apply("out", ["new"], "other", sets, comm=comm, format=f"own.py:{name}")
    comm.barrier()
    if name == "Failing" and comm.rank == 0:
        shares = [sum(FILES) * k // comm.size for k in range(comm.size + 1)]
        assert {path.name for path in (trained / "marks").iterdir()} == {f"{a}-{b}" for a, b in pairwise(shares)}
    if comm.rank == 0:
        assert [path.name for path in trained.iterdir() if "other" in path.name] == ["other.parts"]
        os.rename(trained / "other.parts", trained / "result.parts")
    comm.barrier()
    found = apply("out", ["new"], "result", sets, comm=comm, format="npy.py:Npy:digits=3")
    assert found["computed"] == 0 and found["samples"] == sum(FILES)
    comm.barrier()
    np.testing.assert_allclose(npy(trained / "result"), want(), rtol=1e-9, atol=1e-12)
    assert not list(trained.glob("result.*"))


@pytest.mark.ranks(1, 2)
def test_refusals(comm, trained):
    """Unknown formats, wrong methods, and files of other programs are errors on all ranks before any computation."""
    sets = sets_of({"height": comm.size}, 2)
    if comm.rank == 0:
        (trained / "mine").mkdir()
        (trained / "mine" / "notes").write_text("mine")
        (trained / "text").write_text("mine")
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
    assert (trained / "mine" / "notes").read_text() == (trained / "text").read_text() == "mine"
    assert not list(trained.glob("*.parts"))


@pytest.mark.ranks(1, 2)
def test_an_older_folder_is_replaced_at_the_end(comm, trained):
    sets = sets_of({"height": comm.size}, 2)
    for what in ("logits", "probabilities"):
        apply("out", ["new"], "result", sets, what, comm, format="npy.py:Npy:digits=3")
        comm.barrier()
        found = npy(trained / "result")
        comm.barrier()
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-want())), rtol=1e-6)
    assert not [path.name for path in trained.iterdir() if path.name.startswith((".", "result."))]


@pytest.mark.ranks(2, 3)
def test_a_file_that_differs_on_one_rank(comm, trained, monkeypatch):
    """A writer's file that is missing or different on one rank is an error on all ranks."""
    elsewhere = trained / "elsewhere"
    for got in ("none", "another one"):
        if comm.rank == comm.size - 1:
            elsewhere.mkdir(exist_ok=True)
            if got == "another one":
                (elsewhere / "own.py").write_text(OWN + "# edited\n")
            monkeypatch.chdir(elsewhere)
        with pytest.raises(UserError, match=f"own.py: .*on all ranks, got {got} in .*elsewhere"):
            apply(trained / "out", trained / "new", trained / "result", comm=comm, format="own.py:One")
        monkeypatch.chdir(trained)
    comm.barrier()
    assert not list(trained.glob("result*"))


def test_hdf5_without_links(comm, trained):
    """On a file system without hard links, the output is a copy of the only part."""
    with refusing("link", 1):
        apply("out", ["new"], "copy.h5", ["strategy.sample=1"], comm=MPI.COMM_SELF)
    assert (trained / "copy.h5").read_bytes() == (trained / "want.h5").read_bytes()
    assert not (trained / "copy.h5.parts").exists()


def test_from_the_command_line(comm, trained, capsys):
    words = ["apply", "out", "new", "-o", "result", "--format", "npy.py:Npy:digits=3", "--set", "training.batch=2"]
    assert run(words) == 0
    assert "result: 7 samples, by step " in capsys.readouterr().out
    np.testing.assert_allclose(npy(trained / "result"), want(), rtol=1e-9, atol=1e-12)
    assert run([*words[:-4], "--format", "none"]) == 2
    assert "--format: expected hdf5" in capsys.readouterr().err
