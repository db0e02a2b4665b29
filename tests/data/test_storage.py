"""Errors and warnings for data that HDF5 would read as zeros, or from unintended files; files without locks."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5p, h5s

from halograd.data import storage, structure
from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError, atomic_path
from halograd.dtensor.box import Box
from tests.harness.limits import LIMIT

N, SHAPE = 6, (4, 4, 2)
VALUES = np.arange(1.0, 1 + N * 32, dtype=np.float32).reshape(N, *SHAPE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(folder: Path, inputs: h5py.VirtualLayout | np.ndarray | None = None) -> Path:
    """Write the data file with these inputs, or without any; return its path."""
    with h5py.File(folder / "data.h5", "w") as file:
        if isinstance(inputs, h5py.VirtualLayout):
            file.create_virtual_dataset("inputs", inputs)
        elif inputs is not None:
            file["inputs"] = inputs
    return folder / "data.h5"


def part(path: Path, values: np.ndarray = VALUES, name: str = "x") -> Path:
    with h5py.File(path, "a") as file:
        file[name] = values
    return path


def virtual(*sources: tuple[slice, h5py.VirtualSource]) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout(VALUES.shape, np.float32)
    for rows, source in sources:
        layout[rows] = source
    return layout


def source(name: str, samples: int = N, dataset: str = "x") -> h5py.VirtualSource:
    return h5py.VirtualSource(name, dataset, (samples, *SHAPE))


def open_(path: Path, **options: object) -> Hdf5Dataset:
    return Hdf5Dataset(path, targets=None, layout="NHWC", **options)  # type: ignore[arg-type]


def assert_reads(path: Path, expected: np.ndarray = VALUES, **options: object) -> None:
    out = np.empty(VALUES.shape, np.float32)
    with open_(path, **options) as data:
        data.read("x", range(N), Box.of_shape(out.shape), out)
    np.testing.assert_array_equal(out, expected)


def assert_refused(path: Path, message: str, **options: object) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_(path, **options)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Virtual datasets


def test_a_virtual_dataset_of_slices(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A virtual dataset of strided slices, whose sources are in a subfolder, is read correctly."""
    (folder / "parts").mkdir()
    part(folder / "parts" / "even.h5", np.repeat(VALUES[::2], 2, axis=0))
    part(folder / "parts" / "odd.h5", VALUES[1::2])
    even, odd = source("parts/even.h5"), source("parts/odd.h5", 3)
    path = write(folder, virtual((slice(0, N, 2), even[::2]), (slice(1, N, 2), odd)))
    assert_reads(path)
    assert not caplog.records


def test_a_missing_source(folder: Path) -> None:
    part(folder / "a.h5", VALUES[:3])
    layout = virtual((slice(0, 3), source("a.h5", 3)), (slice(3, 6), source("b.h5", 3)))
    path = write(folder, layout)
    assert_refused(path, r"'/inputs' takes numbers from b\.h5, which cannot be read at .*/b\.h5 \(no such file")
    part(folder / "b.h5", VALUES[3:], "y")
    assert_refused(path, r"'/inputs': its source 'x' in .*/b\.h5 is missing, HDF5 would read zeros; restore it")
    with h5py.File(folder / "b.h5", "w") as file:
        file["x"] = h5py.SoftLink("/nowhere")
    assert_refused(path, r"its source 'x' in .*/b\.h5 is missing")
    (folder / "b.h5").write_text("not HDF5")
    with pytest.raises(DataError, match=r"b\.h5: expected an HDF5 file, got something else"):
        open_(path)


@pytest.mark.parametrize("whole", [True, False])
def test_a_source_of_another_shape(folder: Path, whole: bool) -> None:
    part(folder / "a.h5", VALUES[:5])
    path = write(folder, virtual((slice(0, N), source("a.h5") if whole else source("a.h5")[0:N])))
    assert_refused(path, r"'x' in .*/a\.h5 has the shape \(5, 4, 4, 2\), which does not fit the part that it maps")


def test_virtual_datasets_of_virtual_datasets(folder: Path) -> None:
    """If a virtual dataset is a source of another, a missing file is reported with the file that refers to it."""
    with h5py.File(folder / "middle.h5", "w") as file:
        file.create_virtual_dataset("x", virtual((slice(0, N), source("a.h5"))))
    path = write(folder, virtual((slice(0, N), source("middle.h5"))))
    part(folder / "a.h5")
    assert_reads(path)
    (folder / "a.h5").unlink()
    with pytest.raises(DataError, match=r"middle\.h5: '/x' takes numbers from a\.h5, which cannot be read"):
        open_(path)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_of_virtual_datasets(folder: Path, length: int) -> None:
    """A virtual dataset that refers to itself, also through other files, is an error; HDF5 would overflow its stack."""
    names = ["data.h5", *(f"{k}.h5" for k in range(1, length))]
    path = write(folder, virtual((slice(0, N), source(names[1 % length], N, "inputs"))))
    for k in range(1, length):
        with h5py.File(folder / names[k], "w") as file:
            file.create_virtual_dataset("inputs", virtual((slice(0, N), source(names[(k + 1) % length], N, "inputs"))))
    assert_refused(path, "'/inputs' is a virtual dataset of itself, or of more than 16 others in a row")


def test_gaps_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Elements without a source are counted; overlapping parts do not compensate a gap."""
    part(folder / "a.h5")
    layout = virtual((slice(0, 4), source("a.h5")[0:4]), (slice(2, 5), source("a.h5")[2:5]))
    expected = VALUES.copy()
    expected[5] = 0
    assert_reads(write(folder, layout), expected)
    (message,) = caplog.messages
    assert "'/inputs': 32 of its 192 elements have no source; missing numbers read as zero" in message
    assert_refused(
        write(folder, virtual()), "expected numbers, but 192 of its 192 elements have no source; it reads as"
    )


def growing(folder: Path, name: bytes, rows: int) -> Path:
    """Return a virtual dataset of unlimited length: over blocks of `rows` samples, or over one growing source if 0."""
    path, unlimited = folder / "data.h5", (h5s.UNLIMITED, *SHAPE)
    space = h5s.create_simple((0, *SHAPE), unlimited)
    space.select_hyperslab((0, 0, 0, 0), (h5s.UNLIMITED, 1, 1, 1), (max(1, rows), *SHAPE), (max(1, rows), *SHAPE))
    other = h5s.create_simple((rows, *SHAPE), None if rows else unlimited)
    if not rows:
        other.select_hyperslab((0, 0, 0, 0), (h5s.UNLIMITED, 1, 1, 1), (1, *SHAPE), (1, *SHAPE))
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_virtual(space, name, b"x", other)
    with h5py.File(path, "w") as file:
        whole = h5s.create_simple((0, *SHAPE), unlimited)
        h5py.h5d.create(file.id, b"inputs", h5py.h5t.NATIVE_FLOAT, whole, properties)
    return path


def test_a_pattern_of_sources(folder: Path) -> None:
    path = growing(folder, b"part-%b-100%%.h5", 2)
    for k in range(3):
        part(folder / f"part-{k}-100%.h5", VALUES[2 * k : 2 * k + 2])
    with open_(path) as data:
        assert sorted(Path(p).name for p in data.structure.files) == [f"part-{k}-100%.h5" for k in range(3)]
    assert_reads(path)
    (folder / "part-2-100%.h5").unlink()
    with open_(path) as data:
        assert len(data) == 4
    (folder / "part-0-100%.h5").unlink()
    assert_refused(path, "is empty: expected samples, got shape")


def test_a_source_that_grows(folder: Path) -> None:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=VALUES, maxshape=(None, *SHAPE))
    assert_reads(growing(folder, b"a.h5", 0))


def test_more_sources_than_files_may_be_open(folder: Path) -> None:
    """More sources than this process may open are an error, because HDF5 would read zeros for the others."""
    layout = virtual(*((slice(k, k + 1), source(f"{k}.h5", 1)) for k in range(N)))
    for k in range(N):
        part(folder / f"{k}.h5", VALUES[k : k + 1])
    path = write(folder, layout)
    assert_reads(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (N + 60, hard))
    try:
        assert_refused(
            path, r"takes numbers from 6 files, this process may open 66; raise that limit \(ulimit -n 134\)"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_prefix_for_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check follows HDF5_VDS_PREFIX, because HDF5 searches for sources in this folder first."""
    part(folder / "a.h5")
    path = write(folder, virtual((slice(0, N), source("a.h5"))))
    other = folder.parent / "other"
    other.mkdir()
    part(other / "a.h5")
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(other))
    assert_refused(path, rf"takes numbers from a\.h5, which is at {other}/a\.h5, outside the folder of")
    monkeypatch.setenv("HDF5_VDS_PREFIX", "${ORIGIN}")
    assert_reads(path)


@pytest.mark.parametrize("name", ["a.h5", "/nowhere/a.h5"])
@pytest.mark.parametrize("link", [False, True])
def test_the_file_that_is_checked_is_the_one_that_hdf5_reads(
    folder: Path, name: str, link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check follows the search order of HDF5: the folder, the working directory, the target of a symbolic link."""
    path = write(folder, virtual((slice(0, N), source(name))))
    with h5py.File(path, "a") as file:
        file["linked"] = h5py.ExternalLink(name, "/x")
    places = [folder.parent / "links", folder.parent / "work", folder] if link else [folder, folder.parent / "work"]
    if link:
        places[0].mkdir()
        (places[0] / "data.h5").symlink_to(path)
    (folder.parent / "work").mkdir()
    monkeypatch.chdir(folder.parent / "work")
    for k, place in enumerate(places):
        part(place / "a.h5", VALUES + k)
    for k, place in enumerate(places):
        for inputs in ("inputs", "linked"):
            with open_(places[0] / "data.h5", inputs=inputs, allow_external=True) as data:
                assert list(data.structure.files) == [str(place / "a.h5")]
            assert_reads(places[0] / "data.h5", VALUES + k, inputs=inputs, allow_external=True)
        (place / "a.h5").unlink()
    assert_refused(places[0] / "data.h5", r"takes numbers from .*a\.h5, which cannot be read at")


# Other files


def outside(folder: Path) -> Path:
    (folder.parent / "outside").mkdir()
    return folder.parent / "outside"


@pytest.mark.parametrize("how", ["virtual", "link", "external", "symbolic link"])
def test_numbers_from_outside_the_folder(folder: Path, how: str) -> None:
    there = outside(folder)
    if how == "external":
        (there / "raw").write_bytes(VALUES.tobytes())
        path = write(folder)
        with h5py.File(path, "a") as file:
            file.create_dataset("inputs", VALUES.shape, "f4", external=[(str(there / "raw"), 0, VALUES.nbytes)])
    else:
        part(there / "a.h5")
        name = "../outside/a.h5"
        if how == "symbolic link":
            (folder / "a.h5").symlink_to(there / "a.h5")
            name = "a.h5"
        path = write(folder, None if how == "link" else virtual((slice(0, N), source(name))))
        if how == "link":
            with h5py.File(path, "a") as file:
                file["inputs"] = h5py.ExternalLink(name, "/x")
    assert_refused(path, rf"which is at {there}/.*, outside the folder of .*set data\.allow_external = true")
    assert_reads(path, allow_external=True)


def test_a_link_to_the_data_set(folder: Path) -> None:
    """Sources of a data set that is a symbolic link are found next to the link's target."""
    part(folder / "a.h5")
    path = write(folder, virtual((slice(0, N), source("a.h5"))))
    link = outside(folder) / "link.h5"
    link.symlink_to(path)
    assert_reads(link)


def test_an_external_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """External raw files are found in the working directory; a file that is too short is an error, not zeros."""
    path = write(folder)
    with h5py.File(path, "a") as file:
        file.create_dataset("inputs", VALUES.shape, "f4", external=[("raw", 16, 100), ("raw", 116, h5py.h5f.UNLIMITED)])
    monkeypatch.chdir(folder)
    (folder / "raw").write_bytes(b"x" * 16 + VALUES.tobytes())
    assert_reads(path)
    (folder / "raw").write_bytes(b"x" * 16 + VALUES.tobytes()[:-1])
    assert_refused(path, r"expected 784 B in its external file .*/raw, got 783 B; after them HDF5 would read zeros")
    (folder / "raw").unlink()
    os.mkfifo(folder / "raw")
    assert_refused(
        path, r"takes numbers from raw, which cannot be read at .* \(expected a regular file, got a named pipe\)"
    )


def test_other_ranks_see_the_same_files(folder: Path) -> None:
    """Ranks that take the structure from another rank still check that its source files exist on their node."""
    part(folder / "a.h5")
    path = write(folder, virtual((slice(0, N), source("a.h5"))))
    with open_(path) as first:
        found = first.structure
    assert found.files == {os.path.realpath(folder / "a.h5"): (folder / "a.h5").stat().st_size}
    (folder / "a.h5").unlink()
    data, out = open_(path, structure=found), np.empty((1, *SHAPE), np.float32)
    with pytest.raises(DataError, match=r"data\.h5: takes numbers from .*a\.h5, expected \d+ B .*got no such file"):
        data.read("x", [0], Box.of_shape(out.shape), out)


def test_links(folder: Path) -> None:
    path = write(folder)
    with h5py.File(path, "a") as file:
        file["a/b/x"] = VALUES
        file["a/c"] = h5py.SoftLink("b")
        file["inputs"] = h5py.SoftLink("/a/./c/x")
        for k in range(20):
            file[f"link{k}"] = h5py.SoftLink(f"link{k + 1}")
        file["loop"] = h5py.SoftLink("loop/x")
        file["broken"] = h5py.SoftLink("a/b/x/y")
    assert_reads(path)
    for name in ("link0", "loop"):
        assert_refused(path, f"'{name}' is a loop of links, or more than 16; name the dataset itself", inputs=name)
    for name in ("broken", "a", "", "/", "a/b/x/y", "nothing"):
        assert_refused(path, rf"expected a dataset '{name}', got a/b/x \(6, 4, 4, 2\); name one of these", inputs=name)


# Numbers that were never written


@pytest.mark.parametrize("chunks", [None, (1, *SHAPE)])
def test_a_dataset_that_was_never_written(folder: Path, chunks: tuple | None, caplog: pytest.LogCaptureFixture) -> None:
    path = write(folder)
    with h5py.File(path, "a") as file:
        file.create_dataset("inputs", VALUES.shape, "f4", chunks=chunks)
        file.create_dataset("filled", VALUES.shape, "f4", chunks=chunks, fillvalue=3.5)
    assert_refused(path, "'/inputs': expected numbers, but .* never written; it reads as zero: write the numbers")
    assert not caplog.records
    with open_(path, inputs="filled"):
        (message,) = caplog.messages
    assert "'/filled': " in message and "never written; missing numbers read as its fill value 3.5" in message


def test_faulty_datasets_do_not_count_as_nested(folder: Path) -> None:
    """Coordinates that cannot be used are left out; the others of the file are checked by the same object."""
    path = write(folder, VALUES)
    with h5py.File(path, "a") as file:
        checker = storage.Storage(path)
        for k in range(storage.DEEPEST + 1):
            file.create_dataset(f"gap{k}", (2,), "f4")
            with pytest.raises(DataError, match="never written"):
                checker.check(file, f"gap{k}")
        assert checker.check(file, "inputs")


def test_chunks_that_were_never_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(folder)
    with h5py.File(path, "a") as file:
        file.create_dataset("inputs", VALUES.shape, "f4", chunks=(1, 2, 4, 2))[:4] = VALUES[:4]
    with open_(path):
        (message,) = caplog.messages
    assert (
        "'/inputs': 4 of its 12 chunks were never written; missing numbers read as zero: write them, unless" in message
    )


def test_a_slow_count_is_announced(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder)
    with h5py.File(path, "a") as file:
        file.create_dataset("inputs", data=VALUES, chunks=(1, 1, 1, 1))
    monkeypatch.setattr(storage, "_SLOW", 100)
    with open_(path):
        assert [m for m in caplog.messages if "counting which of its 192 chunks were written" in m]


def test_a_filter_that_is_not_installed(folder: Path) -> None:
    path = write(folder)
    with h5py.File(path, "a") as file:
        file.create_dataset("inputs", data=VALUES, chunks=(1, *SHAPE), compression="gzip")
    content = path.read_bytes()
    at = content.index(b"deflate\0")  # its number is 8 bytes before the name
    path.write_bytes(content[: at - 8] + (31999).to_bytes(2, "little") + content[at - 6 :])
    assert_refused(
        path, r"'/inputs' is stored with the filter 31999 \(deflate\), which is not installed; install its plugin"
    )


DISK_N, EDGE = 3, 4

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
def disk_path(tmp_path: Path) -> Path:
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=np.arange(DISK_N * EDGE * EDGE * 2.0).reshape(DISK_N, EDGE, EDGE, 2))
        file["inputs"].attrs["layout"] = "NHWC"
        file["mask"] = np.ones((DISK_N, EDGE, EDGE), np.uint8)
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
def test_no_locks_to_be_had(disk_path, no_locks, answer, told):
    environment = {**os.environ, "LD_PRELOAD": str(no_locks), "FLOCK_SAYS": str(answer)}
    done = subprocess.run(
        [sys.executable, "-c", READS, disk_path], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0 and done.stdout == "(4, 4, 2) (4, 4, 2)\n", done.stderr
    lines = done.stderr.splitlines()
    if told:
        (line,) = lines  # one warning, although two files were opened
        assert (
            line.startswith(f"halograd: {disk_path}: this file system has no file locks (E")
            and "reading without" in line
        )
    else:
        assert not lines


def test_a_file_that_is_being_written(disk_path):
    command, pipe = [sys.executable, "-c", WRITES, disk_path], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "open\n"
        with pytest.raises(DataError, match="another process is writing to it; wait"):
            Hdf5Dataset(disk_path)
        writer.communicate("")  # its input ends
    with Hdf5Dataset(disk_path) as data:
        assert len(data) == DISK_N


def test_another_ranks_structure_is_not_looked_for_again(disk_path, monkeypatch):
    """A data set with the structure from another rank opens only its two datasets, at the first read."""
    with Hdf5Dataset(disk_path) as first:
        found = first.structure
    looked: list[str] = []
    monkeypatch.setattr(structure, "groups", lambda *a: looked.append("groups"))
    monkeypatch.setattr(structure, "channel_names", lambda *a: looked.append("names"))
    disk_path.rename(disk_path.with_name("away.h5"))
    data = Hdf5Dataset(disk_path, structure=found)  # nothing is opened
    assert (len(data), data.fields["x"].shape, data.fields["target"].shape) == (
        DISK_N,
        (EDGE, EDGE, 2),
        (EDGE, EDGE, 1),
    )
    assert data.groups is not None and data.groups.tolist() == [0, 0, 1]
    disk_path.with_name("away.h5").rename(disk_path)
    out = np.empty((DISK_N, EDGE, EDGE, 2), np.float32)
    data.read("x", range(DISK_N), Box.of_shape(out.shape), out)
    data.close()
    assert out.reshape(-1).tolist() == list(range(out.size)) and not looked


def test_another_file_than_rank_0_has_seen(disk_path):
    with Hdf5Dataset(disk_path) as first:
        found = first.structure
    with h5py.File(disk_path, "w") as file:
        file["inputs"], file["mask"] = np.zeros((DISK_N, 8, 8, 2)), np.zeros((DISK_N, 8, 8))
    data, out = Hdf5Dataset(disk_path, structure=found), np.empty((1, EDGE, EDGE, 2))
    message = r"expected 'inputs' to be \(3, 4, 4, 2\), .* as when the run began, got \(3, 8, 8, 2\); it was"
    with pytest.raises(DataError, match=message):
        data.read("x", [0], Box.of_shape(out.shape), out)
    disk_path.unlink()
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
    (tmp_path / "file").touch()
    message = r"cannot write .*/file/new/out\.h5: "
    with pytest.raises(DataError, match=message), atomic_path(tmp_path / "file/new/out.h5", parents=True):
        pytest.fail("expected no folder in a file")
    (tmp_path / "file").unlink()
    with pytest.raises(ZeroDivisionError), atomic_path(out, parents=True):
        (tmp_path / "several/others").touch()
        1 / 0  # noqa: B018
    assert [path.name for path in (tmp_path / "several").iterdir()] == ["others"]
    with atomic_path(out, parents=True) as partial:
        partial.write_text("whole")
    assert [path.name for path in out.parent.iterdir()] == ["out.h5"]
