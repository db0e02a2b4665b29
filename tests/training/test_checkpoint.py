"""Tests of checkpoints: written and read with different buckets, and files that are rejected without loss."""

import os
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest

from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.training.checkpoint import (
    CheckpointReader,
    DamagedCheckpoint,
    Snapshot,
    TrainingProgress,
    read_checkpoint,
    read_header,
    write_checkpoint,
)
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.optimizers import SGD, Adam
from tests.harness.limits import LIMIT
from tests.training.steps import copied

PROGRESS = TrainingProgress(77, 5, {"epoch": 3, "position": 12, "shuffle": "epoch"}, {"mean": [0.1, 1 / 3]})


def scramble(store, optimizer=None):
    rng = np.random.default_rng(1)
    arrays = [*store.params.values(), *store.state.values()]
    for group in optimizer.named_state().values() if optimizer else ():
        arrays += group.values()
    for array in arrays:
        array[...] = rng.standard_normal(array.shape)
    if optimizer:
        optimizer.step = 77


@pytest.fixture
def saved(make_store, tmp_path):
    store = make_store()
    optimizer = Adam(store)
    scramble(store, optimizer)
    path = tmp_path / "step-00000077.h5"
    write_checkpoint(path, Snapshot.of(store, optimizer), PROGRESS, "a = 1\n")
    return path, store, optimizer


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_round_trip(saved, make_store, bucket_bytes):
    path, store, optimizer = saved
    other = make_store(bucket_bytes, seed=9)
    twin = Adam(other)
    assert read_checkpoint(path, other, twin) == PROGRESS
    assert twin.step == 77
    for mine, theirs in ((store.params, other.params), (store.state, other.state)):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])
    for key, arrays in optimizer.named_state().items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, twin.named_state()[key][name])
    assert read_header(path) == (PROGRESS, "a = 1\n")


def test_parameters_alone(saved, make_store):
    path, store, _ = saved
    other = make_store(seed=9)
    read_checkpoint(path, other)
    assert all((store.params[n] == other.params[n]).all() for n in store.params)


def refused(path, store, message, optimizer=None):
    """Check that reading raises an error of one line, and changes nothing."""
    before = copied(store.params)
    with pytest.raises(UserError) as caught:
        read_checkpoint(path, store, optimizer)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert all((store.params[n] == before[n]).all() for n in before)


def test_other_network(saved, make_store):
    store = make_store(first=(5, 3, 1))
    want = "is of another network: expected 'scale1/w: parameter 5x3x1', got 'scale1/w: parameter 5x3x3'"
    refused(saved[0], store, want)
    want = "is of another network: expected 'first: Scale 8x8x2', got 'scale1: Scale 8x8x2'"
    refused(saved[0], make_store(name="first"), want)


def test_other_dtype(saved, make_store):
    refused(saved[0], make_store(dtype="float32"), "expected float32 parameters, got float64; set training.dtype")


def test_other_optimizer(saved, make_store):
    store = make_store()
    want = "expected the optimizer SGD with ['momentum'], got Adam with ['first_moment', 'second_moment']"
    refused(saved[0], store, want, SGD(store, momentum=0.9))


def test_no_optimizer(make_store, tmp_path):
    store = make_store()
    write_checkpoint(tmp_path / "a.h5", Snapshot.of(store))
    refused(tmp_path / "a.h5", store, "expected the state of an optimizer, got parameters only", SGD(store))


def test_missing(make_store, tmp_path):
    refused(tmp_path / "none.h5", make_store(), "expected a file, there is none")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_truncated(saved, make_store, part):
    path = saved[0]
    os.truncate(path, int(path.stat().st_size * part))
    refused(path, make_store(), "it is truncated or damaged")


def test_names_another_one(saved, make_store):
    path, store, _ = saved
    write_checkpoint(path.with_name("step-00000050.h5"), Snapshot.of(store))
    os.truncate(path, 100)
    refused(path, make_store(), "; use another one: step-00000050.h5")
    path.unlink()
    refused(path, make_store(), "expected a file, there is none; use another one: step-00000050.h5")


@pytest.mark.parametrize("name", ["params/scale1/w", "state/scale3/mean", "optimizer/first_moment/scale2/b"])
def test_one_bit(saved, make_store, name):
    path = saved[0]
    with h5py.File(path, "r") as file:
        at = file[name].id.get_offset()
    flip(path, at)
    store = make_store()
    size = path.stat().st_size
    refused(path, store, f"it is truncated or damaged (the checksum of its bytes 4096 to {size - 4} is wrong)")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_byte_of_a_file_counts(saved, make_store):
    """One flipped bit anywhere in the structures of a file is an error of damage."""
    path, whole = saved[0], saved[0].read_bytes()
    for at in (*range(0, 4096, 97), *range(4096, len(whole), 211), *range(len(whole) - 4, len(whole))):
        flip(path, at)
        with pytest.raises(DamagedCheckpoint, match="it is truncated or damaged"):
            CheckpointReader(path, whole=True)
        path.write_bytes(whole)
    CheckpointReader(path, whole=True).close()


def test_other_tools_can_read_it(saved):
    path, store, _ = saved
    with h5py.File(path) as file:
        assert file.userblock_size == 4096 and file["config"][()] == b"a = 1\n"
        np.testing.assert_array_equal(file["params/scale3/w"], store.params["scale3/w"])


def test_format_1(make_store, tmp_path):
    """A file of format 1, without checksums of its texts and attributes, is rejected and stays unchanged."""
    with h5py.File(tmp_path / "step-00000005.h5", "w") as file:
        file.attrs["format"] = 1
    want = "expected a checkpoint of format 2, got an HDF5 file without checksums (format 1, or no checkpoint at all)"
    refused(tmp_path / "step-00000005.h5", make_store(), want)
    with pytest.raises(UserError, match=r"there is none: .* format 2, got"):
        CheckpointFolder(tmp_path).newest_whole()
    assert (tmp_path / "step-00000005.h5").exists()


def test_other_format(saved, make_store):
    path, whole = saved[0], bytearray(saved[0].read_bytes())
    whole[16:20] = (99).to_bytes(4, "little")
    whole[4092:4096] = zlib.crc32(whole[:4092]).to_bytes(4, "little")
    path.write_bytes(whole)
    refused(path, make_store(), "expected a checkpoint of format 2, got format 99; use the halograd that wrote it")


@pytest.mark.timeout(60)
def test_what_is_no_file(make_store, tmp_path):
    """Folders and pipes are rejected; a pipe is not opened, because opening would wait for a writer."""
    os.mkfifo(tmp_path / "step-00000005.h5")
    (tmp_path / "step-00000006.h5").mkdir()
    for name in ("step-00000005.h5", "step-00000006.h5"):
        refused(tmp_path / name, make_store(), "got a folder, a pipe or a device; name a file")
    assert CheckpointFolder(tmp_path).newest_whole() == (None, [])


SAVE_IN_LITTLE_SPACE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import HOST_KERNELS, ParameterStore, Memory, np, small_network
from halograd.training.checkpoint import Snapshot, write_checkpoint
store = ParameterStore(small_network(), Memory(HOST_KERNELS), np.dtype("float64"), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    write_checkpoint(sys.argv[1], Snapshot.of(store))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [0, 1000, 6000])
def test_no_space(saved, make_store, limit):
    """Without disk space, writing a checkpoint is an error of one line, and the previous checkpoint is intact."""
    path, store, _ = saved
    assert path.stat().st_size > 6000
    command = [sys.executable, "-c", SAVE_IN_LITTLE_SPACE, path, os.path.dirname(__file__), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and done.stderr == ""
    want = f"cannot write {path}: the file system does not allow a file of this size; nothing was left behind\n"
    assert done.stdout == want
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    other = make_store(seed=9)
    read_checkpoint(path, other)
    assert all((store.params[n] == other.params[n]).all() for n in store.params)


def test_disk_full_at_once(saved, monkeypatch):
    path, store, _ = saved
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DataError, match=r"[\d.]+ KiB of free disk, got 1000 B"):
        write_checkpoint(path, Snapshot.of(store))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_folder_keeps_the_last(make_store, tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    store = make_store()
    for step in (5, 10, 15, 20):
        folder.write(Snapshot.of(store, SGD(store)), TrainingProgress(step=step), "")
    assert sorted(p.name for p in folder.path.iterdir()) == ["latest.h5", "step-00000015.h5", "step-00000020.h5"]
    assert folder.latest is not None and folder.latest.resolve().name == "step-00000020.h5"
    assert read_header(folder.latest)[0].step == 20


def test_folder_removes_what_a_killed_run_left(make_store, tmp_path):
    left = tmp_path / ".step-00000005.h5.123.partial"
    left.write_text("half")
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.write(Snapshot.of(make_store()), TrainingProgress(step=7), "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.h5", "step-00000007.h5"]


def test_empty_folder(tmp_path):
    assert CheckpointFolder(tmp_path / "none", keep=1).latest is None


def test_writing_the_same_step_again(make_store, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    store = make_store()
    for _ in range(2):
        folder.write(Snapshot.of(store), TrainingProgress(step=7), "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.h5", "step-00000007.h5"]
