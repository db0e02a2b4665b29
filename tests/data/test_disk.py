"""Tests of files on file systems with and without locks, and of structures that another rank has read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data import structure
from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError, atomic_path
from halograd.dtensor.box import Box
from tests.harness.limits import LIMIT

N, EDGE = 3, 4

# Errors of flock on many mounts of Lustre (ENOSYS) and NFS (ENOLCK, EOPNOTSUPP).
WITHOUT_LOCKS = """
#include <errno.h>
#include <stdlib.h>
int flock(int descriptor, int operation) {
  (void)descriptor, (void)operation;
  errno = atoi(getenv("FLOCK_SAYS"));
  return -1;
}
"""

READS = """
import logging, sys
logging.basicConfig(format="halograd: %(message)s")
from halograd.data.dataset import Hdf5Dataset
with Hdf5Dataset(sys.argv[1]) as data, Hdf5Dataset(sys.argv[1]) as again:
    print(data.fields["x"].shape, again.fields["x"].shape)
"""

WRITES = """
import h5py, sys
with h5py.File(sys.argv[1], "r+", locking=True):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=np.arange(N * EDGE * EDGE * 2.0).reshape(N, EDGE, EDGE, 2))
        file["inputs"].attrs["layout"] = "NHWC"
        file["mask"] = np.ones((N, EDGE, EDGE), np.uint8)
        file["simulation"] = np.array([0, 0, 1])
    return path


@pytest.fixture(scope="module")
def no_locks(tmp_path_factory) -> Path:
    """Return a library to preload, in which flock fails."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, to stand in for a file system without locks")
    folder = tmp_path_factory.mktemp("flock")
    (folder / "flock.c").write_text(WITHOUT_LOCKS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "flock.so", folder / "flock.c"], check=True)
    return folder / "flock.so"


@pytest.mark.parametrize("answer, told", [(38, False), (37, True), (95, True)], ids=["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_no_locks_to_be_had(path, no_locks, answer, told):
    environment = {**os.environ, "LD_PRELOAD": str(no_locks), "FLOCK_SAYS": str(answer)}
    done = subprocess.run(
        [sys.executable, "-c", READS, path], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0 and done.stdout == "(4, 4, 2) (4, 4, 2)\n", done.stderr
    lines = done.stderr.splitlines()
    if told:
        (line,) = lines  # one warning, although two files were opened
        assert line.startswith(f"halograd: {path}: this file system has no file locks (E") and "reading without" in line
    else:
        assert not lines


def test_a_file_that_is_being_written(path):
    command, pipe = [sys.executable, "-c", WRITES, path], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "open\n"
        with pytest.raises(DataError, match="another process is writing to it; wait"):
            Hdf5Dataset(path)
        writer.communicate("")  # its input ends
    with Hdf5Dataset(path) as data:
        assert len(data) == N


def test_another_ranks_structure_is_not_looked_for_again(path, monkeypatch):
    """A data set with the structure from another rank opens only its two datasets, at the first read."""
    with Hdf5Dataset(path) as first:
        found = first.structure
    looked: list[str] = []
    monkeypatch.setattr(structure, "groups", lambda *a: looked.append("groups"))
    monkeypatch.setattr(structure, "channel_names", lambda *a: looked.append("names"))
    path.rename(path.with_name("away.h5"))
    data = Hdf5Dataset(path, structure=found)  # nothing is opened
    assert (len(data), data.fields["x"].shape, data.fields["target"].shape) == (N, (EDGE, EDGE, 2), (EDGE, EDGE, 1))
    assert data.groups is not None and data.groups.tolist() == [0, 0, 1]
    path.with_name("away.h5").rename(path)
    out = np.empty((N, EDGE, EDGE, 2), np.float32)
    data.read("x", range(N), Box.of_shape(out.shape), out)
    data.close()
    assert out.reshape(-1).tolist() == list(range(out.size)) and not looked


def test_another_file_than_rank_0_has_seen(path):
    with Hdf5Dataset(path) as first:
        found = first.structure
    with h5py.File(path, "w") as file:
        file["inputs"], file["mask"] = np.zeros((N, 8, 8, 2)), np.zeros((N, 8, 8))
    data, out = Hdf5Dataset(path, structure=found), np.empty((1, EDGE, EDGE, 2))
    message = r"expected 'inputs' to be \(3, 4, 4, 2\), .* as when the run began, got \(3, 8, 8, 2\); it was"
    with pytest.raises(DataError, match=message):
        data.read("x", [0], Box.of_shape(out.shape), out)
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        data.read("x", [0], Box.of_shape(out.shape), out)


def test_folders_are_made_for_a_file_that_is_written(tmp_path):
    """Writing a file creates its folders; they are removed if writing fails, unless they contain other files."""
    out = tmp_path / "several/folders/out.h5"
    with pytest.raises(ZeroDivisionError), atomic_path(out, parents=True) as partial:
        partial.write_text("half")
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="GiB of free disk, got"), atomic_path(out, 1 << 60, parents=True):
        pytest.fail("expected no place for so much")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), atomic_path(out, parents=True):
        (tmp_path / "several/others").touch()
        1 / 0  # noqa: B018
    assert [path.name for path in (tmp_path / "several").iterdir()] == ["others"]
    with atomic_path(out, parents=True) as partial:
        partial.write_text("whole")
    assert [path.name for path in out.parent.iterdir()] == ["out.h5"]
