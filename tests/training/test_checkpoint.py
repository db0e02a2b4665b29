"""Tests of checkpoints: written, read on several ranks and nodes, damaged, with cut parameters."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.comm.errors import is_agreed
from halograd.data import formats
from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.training import checkpoint, chunk_file
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
from halograd.training.clipping import Clip
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, Adam, AdamW
from halograd.training.root import on_root, read_config
from halograd.training.run import train
from halograd.training.schedules import Constant
from halograd.training.session import Session
from halograd.training.trainer import Diverged, Trainer
from tests.harness import branches
from tests.harness.limits import LIMIT
from tests.layers.cuts import random_strategy
from tests.training.steps import advance, assert_arrays, copied

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
    # A measurement of coverage would write files of its own.
    environment = {key: value for key, value in os.environ.items() if key != branches.VARIABLE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and done.stderr == ""
    reason = "a file of this size is not allowed, by the limit of this process (ulimit -f) or the file system"
    assert done.stdout == f"cannot write {path}: {reason}; nothing was left behind\n"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    other = make_store(seed=9)
    read_checkpoint(path, other)
    assert all((store.params[n] == other.params[n]).all() for n in store.params)


def test_disk_full_at_once(saved, monkeypatch):
    path, store, _ = saved
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DataError, match=r"[\d.]+ KiB of free disk, got 1000 B; free some space, or choose another f"):
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


STEPS, HALF = 6, 3


def cut_network(classes=4):
    x = hg.Input((8, 7, 3), "x")
    y = hg.BatchNorm(activation="relu", name="bn")(hg.Conv(6, 3, padding=1, name="conv1")(x))
    y = hg.MaxPool(2, name="pool")(hg.Conv(5, 3, 2, 1, activation="relu", name="conv2")(y))
    y = hg.Dense(classes, name="dense2")(hg.Dense(7, name="dense1")(hg.Flatten(name="flat")(y)))
    return hg.Network(
        {"prediction": y, "loss": hg.SoftmaxCrossEntropy(name="ce")(y, hg.Input((1,), "target", "int32"))}
    )


def cut_parameters(size):
    """Return a strategy with cuts of filters and of input channels, and one layer on a single rank."""
    if size == 1:
        return Strategy()
    layers = {
        "conv1": {"channel": size},
        "bn": {"channel": size},
        "conv2": {"sample": 1},
        "dense1": {"input_channel": 2},
        "dense2": {"channel": 2},
    }
    return Strategy({"sample": size}, layers, bucket_bytes=1)


def trainer_of_cut(executor, clip_norm=None):
    optimizer = AdamW(executor.store, weight_decay=0.01)
    return Trainer(executor, optimizer, Constant(0.01), clip_norm)


def cut_steps(trainer, numbers):
    losses = advance(trainer, numbers)
    trainer.synchronize()
    return losses


def run(comm, strategy, body):
    """Return the result of `body(trainer)` on a new executor."""
    with Executor(cut_network(), comm, get_backend("numpy"), 4, strategy, "float64", seed=2) as executor:
        return body(trainer_of_cut(executor))


def arrays_of(snapshot):
    """Return every array of a snapshot under a unique name."""
    if snapshot is None:
        return None
    groups = {"params": snapshot.params, "state": snapshot.state, **snapshot.optimizer}
    return copied({f"{kind} {k}": v for kind, group in groups.items() for k, v in group.items()})


@pytest.mark.ranks(1, 2, 3, 4)
def test_written_under_one_strategy_and_resumed_under_another(shared):
    """Training resumes under another strategy: arrays are equal in every bit, and losses continue as in one process."""
    path = shared / "step.h5"
    with Communicator(MPI.COMM_SELF) as alone:
        expected = run(alone, Strategy(), lambda trainer: cut_steps(trainer, range(STEPS)))
    with Communicator(MPI.COMM_WORLD) as comm:

        def write(trainer):
            losses = cut_steps(trainer, range(HALF))
            snapshot = Snapshot.of(trainer.executor.store, trainer.optimizer, comm)
            assert (snapshot is None) == (comm.rank > 0)
            if snapshot is not None:
                write_checkpoint(path, snapshot, TrainingProgress(step=HALF))
            comm.barrier()
            return losses, arrays_of(snapshot)

        def resume(trainer):
            assert read_checkpoint(path, trainer.executor.store, trainer.optimizer).step == HALF
            found = arrays_of(Snapshot.of(trainer.executor.store, trainer.optimizer, trainer.executor.comm))
            return found, cut_steps(trainer, range(HALF, STEPS))

        losses, written = run(comm, cut_parameters(comm.size), write)
        assert losses == pytest.approx(expected[:HALF], rel=1e-11)
        others = [
            Strategy({"height": comm.size}),
            cut_parameters(comm.size),
            random_strategy(cut_network(), comm.size, 5),
        ]
        resumed = [run(comm, strategy, resume) for strategy in others]
        with Communicator(MPI.COMM_SELF) as alone:
            resumed.append(run(alone, Strategy(), resume))
        for found, losses in resumed:
            assert losses == pytest.approx(expected[HALF:], rel=1e-9)
            if written is not None:
                assert set(found) == set(written)
                assert all(np.array_equal(found[k], written[k]) for k in written)


@pytest.mark.ranks(2)
def test_a_snapshot_of_blocks_needs_the_communicator():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(cut_network(), comm, get_backend("numpy"), 4, cut_parameters(comm.size), "float64") as executor,
        pytest.raises(ValueError, match="communicator of the ranks that share"),
    ):
        Snapshot.of(executor.store)


@pytest.mark.ranks(2, 3, 4)
def test_clipping_is_by_the_norm_of_everything():
    with Communicator(MPI.COMM_SELF) as alone, Communicator(MPI.COMM_WORLD) as comm:
        results = []
        for ranks, strategy in ((alone, Strategy()), (comm, cut_parameters(comm.size))):
            with Executor(cut_network(), ranks, get_backend("numpy"), 4, strategy, "float64", seed=2) as executor:
                trainer = trainer_of_cut(executor, clip_norm=0.1)
                losses = cut_steps(trainer, range(STEPS))
                again = Clip(executor.store, ranks, 0.1)
                again.measure()
                results.append((losses, trainer.gradient_norm, float(again.norm)))
        (losses, norm, after), (found, ours, own) = results
        assert norm > 0.1, "the test must clip"
        assert found == pytest.approx(losses, rel=1e-10)
        assert (ours, own) == pytest.approx((norm, after), rel=1e-9)
        assert len(set(comm.allgather_objects(ours))) == 1, "all ranks scale alike"


@pytest.mark.ranks(2, 3)
def test_lars_refuses_cut_parameters():
    with Communicator(MPI.COMM_WORLD) as comm:
        fewer = Strategy({"sample": comm.size}, {"dense1": {"sample": 1}})
        for strategy in (cut_parameters(comm.size), fewer):
            with (
                Executor(cut_network(), comm, get_backend("numpy"), 4, strategy) as executor,
                pytest.raises(UserError, match=r"LARS .* whole parameters: .*; choose sgd"),
            ):
                LARS(executor.store)
        with Executor(cut_network(), comm, get_backend("numpy"), 4) as executor:
            LARS(executor.store)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["conv1/w", "conv2/w", "dense1/b"])
def test_a_bad_block_on_one_rank_is_seen_by_all(name):
    with Communicator(MPI.COMM_WORLD) as comm:

        def spoil(trainer):
            array = trainer.executor.store.params[name]
            holders = [rank for rank, size in enumerate(comm.allgather_objects(array.size)) if size]
            if comm.rank == holders[-1]:
                array.reshape(-1)[-1] = math.nan
            with pytest.raises(Diverged, match=f"parameter {name} .*; lower schedule"):
                trainer.synchronize()

        run(comm, cut_parameters(comm.size), spoil)


@pytest.mark.ranks(2, 4)
def test_ranks_hold_and_update_their_blocks_only():
    """Ranks hold and update only their blocks, so bytes of parameters, gradients and momentum fall with the ranks."""
    with Communicator(MPI.COMM_WORLD) as comm:
        with Executor(cut_network(), comm, get_backend("numpy"), 4, cut_parameters(comm.size), "float64") as executor:
            SGD(executor.store, momentum=0.9)
            shapes = {name: array.shape for name, array in executor.store.params.items()}
            blocks = comm.allgather_objects(shapes)
        filters = [shapes["conv1/w"][0] for shapes in blocks]
        assert sum(filters) == 6 and max(filters) - min(filters) <= 1
        assert [shapes["conv2/w"][0] for shapes in blocks] == [5, *[0] * (comm.size - 1)]
        assert [shapes["dense1/w"][1] for shapes in blocks][:2] == [10, 10]
        assert executor.store.count == cut_network().parameter_count


SMALL = 4096  # bytes under a checksum, so that a small file has many


@pytest.fixture
def restore_path(comm, shared, monkeypatch):
    """Return the path of a checkpoint after one step."""
    found = shared / "step-00000001.h5"
    if comm.rank == 0:
        with monkeypatch.context() as patch, Communicator(MPI.COMM_SELF) as alone:
            patch.setattr(chunk_file, "CHUNK", SMALL)
            with Executor(cut_network(), alone, get_backend("numpy"), 4, dtype="float64", seed=2) as executor:
                trainer = trainer_of_cut(executor)
                cut_steps(trainer, [0])
                write_checkpoint(found, Snapshot.of(executor.store, trainer.optimizer, alone), TrainingProgress(step=1))
    comm.barrier()
    return found


def whole(comm, path):
    """Return parameters and first moments of a checkpoint, read by this rank alone."""
    with Executor(cut_network(), comm, get_backend("numpy"), 4, dtype="float64") as executor:
        trainer = trainer_of_cut(executor)
        read_checkpoint(path, executor.store, trainer.optimizer)
        named = trainer.optimizer.named_state()
        return copied(executor.store.params), named["first_moment"]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("strategy", [lambda size: Strategy({"sample": size}), cut_parameters])
def test_each_byte_is_read_once_per_node(restore_path, monkeypatch, strategy, per_node):
    """One rank of each node reads a checkpoint once; all ranks get parameters, moments, statistics and progress."""
    monkeypatch.setattr(checkpoint, "PART", 1000)
    size, total = MPI.COMM_WORLD.size, restore_path.stat().st_size
    with Communicator(MPI.COMM_SELF) as alone:
        params, moment = whole(alone, restore_path)
    with (
        Communicator(MPI.COMM_WORLD, f"emulated:alpha=0,beta=0,node={per_node}") as comm,
        Executor(cut_network(), comm, get_backend("numpy"), 4, strategy(size), "float64") as executor,
    ):
        trainer = trainer_of_cut(executor)
        with CheckpointReader(restore_path, comm, whole=True) as reader:
            assert reader.restore(executor.store, trainer.optimizer).step == 1
            read = comm.allgather_objects(reader.bytes_read)
        assert read == [total if rank % per_node == 0 else 0 for rank in range(size)]
        for name, array in executor.store.params.items():
            np.testing.assert_array_equal(array, params[name][executor.store.box(name).slices()])
        gathered = Snapshot.of(executor.store, trainer.optimizer, comm)
        if gathered is not None:
            assert_arrays(gathered.optimizer["first_moment"], moment)


@pytest.mark.ranks(1, 2)
def test_parameters_alone_need_a_part_of_the_file(restore_path):
    """Evaluation reads only the chunks of a checkpoint that contain parameters, each once."""
    with (
        Communicator(MPI.COMM_WORLD, "mpi") as comm,
        Executor(cut_network(), comm, get_backend("numpy"), 4, dtype="float64") as executor,
        CheckpointReader(restore_path, comm) as reader,
    ):
        assert reader.progress.step == 1
        reader.restore(executor.store)
        read = reader.bytes_read
        reader.restore(executor.store)
        assert reader.bytes_read == read
        assert (0 < read < 0.8 * restore_path.stat().st_size) if comm.rank == 0 else read == 0


@pytest.mark.ranks(2, 4)
def test_damage_that_one_node_sees_is_found_by_all(restore_path, monkeypatch):
    """If one node finds damage, all ranks use the previous checkpoint; the message names the rank that found it."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        restore_path.with_name("step-00000000.h5").write_bytes(restore_path.read_bytes())
    comm.barrier()
    read_all, last = chunk_file._read_all, comm.size - 1

    def flipped(file, data):
        count = read_all(file, data)
        if comm.rank == last and str(file.name) == str(restore_path) and count == SMALL:
            data[count // 2] ^= 16
        return count

    monkeypatch.setattr(chunk_file, "_read_all", flipped)
    with Communicator(comm, "emulated:alpha=0,beta=0") as ranks:
        with pytest.raises(DamagedCheckpoint, match=f"^rank {last}: checkpoint .*damaged"):
            CheckpointReader(restore_path, ranks, whole=True)
        found, told = CheckpointFolder(restore_path.parent).newest_whole(ranks)
        assert found.path.name == "step-00000000.h5" and found.progress.step == 1
        assert told[0].endswith("set aside as step-00000001.damaged")
        found.close()


@pytest.mark.ranks(2)
def test_nodes_that_see_different_files(restore_path, tmp_path_factory):
    comm = MPI.COMM_WORLD
    mine = tmp_path_factory.mktemp("own") / "step-00000001.h5"
    write_checkpoint(mine, _snapshot(comm.rank), TrainingProgress(step=1))
    want = r"^rank 1: .*expected the same file on all nodes, got another one than rank 0 has"
    with Communicator(comm, "emulated:alpha=0,beta=0") as ranks, pytest.raises(UserError, match=want):
        CheckpointReader(mine, ranks)


def _snapshot(seed):
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(cut_network(), alone, get_backend("numpy"), 4, dtype="float64", seed=seed) as executor,
    ):
        return Snapshot.of(executor.store)


@pytest.mark.ranks(1, 2)
def test_damage_that_is_met_when_arrays_are_read(restore_path):
    """Arrays of a checkpoint that was not verified are verified when read, before parameters change."""
    if MPI.COMM_WORLD.rank == 0:
        data = bytearray(restore_path.read_bytes())
        with h5py.File(restore_path) as file:
            data[file["params/dense2/b"].id.get_offset()] ^= 1
        restore_path.write_bytes(data)
    MPI.COMM_WORLD.barrier()
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(cut_network(), comm, get_backend("numpy"), 4, dtype="float64") as executor,
        CheckpointReader(restore_path, comm) as reader,
    ):
        before = copied(executor.store.params)
        assert reader.progress.step == 1
        with pytest.raises(DamagedCheckpoint, match=r"checksum of its bytes \d+ to \d+ "):
            reader.restore(executor.store)
        assert all(np.array_equal(array, before[name]) for name, array in executor.store.params.items())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("what", ["network", "dtype"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_all(restore_path, what):
    """A checkpoint of another network or dtype is the same error on all ranks, which names no rank."""
    other, dtype = (cut_network(), "float32") if what == "dtype" else (cut_network(classes=5), "float64")
    message = {"network": "is of another network: ", "dtype": ": expected float32 parameters, got float64"}[what]
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(other, comm, get_backend("numpy"), 4, dtype=dtype) as executor,
        CheckpointReader(restore_path, comm) as reader,
    ):
        with pytest.raises(UserError, match=f"^checkpoint {restore_path} ?{message}") as caught:
            reader.restore(executor.store)
        assert is_agreed(caught.value, comm.size)


def test_a_link_set_back_by_hand(tmp_path):
    """If a user sets latest.h5 to an older checkpoint, a run resumes from it and keeps the newer ones."""
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (5, 10):
        (tmp_path / f"step-{step:08d}.h5").touch()
    (tmp_path / "latest.h5").write_text("step-00000005.h5\n")
    assert [p.name for p in folder._candidates()] == ["step-00000005.h5"]
    (tmp_path / "latest.h5").write_text("step-00000007.h5\n")
    assert [p.name for p in folder._candidates()] == ["step-00000010.h5", "step-00000005.h5"]
    with pytest.raises(UserError, match="all are damaged"):
        folder.newest_whole()


_opened: list[str] | None = None


def _listen(event: str, arguments: tuple) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], (str, bytes, Path)):
        _opened.append(Path(str(arguments[0])).name)


@pytest.fixture(scope="module")
def hook():
    sys.addaudithook(_listen)  # stays, and does nothing when nobody listens


@pytest.fixture
def opened(hook):
    """Return the list to which the names of files that Python opens on this rank are added."""
    global _opened
    _opened = []
    yield _opened
    _opened = None


@pytest.mark.mpi
def test_all_ranks_have_what_rank_0_has_found(comm):
    calls: list[int] = []

    def call():
        calls.append(1)
        return {"answer": 42}

    assert on_root(comm, call) == {"answer": 42}
    assert len(calls) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [UserError, DataError])
def test_mistakes_are_raised_on_all_ranks_alike(comm, kind):
    def call():
        raise kind("expected a moon, got none")

    with pytest.raises(kind, match=r"^expected a moon, got none$") as caught:
        on_root(comm, call)
    assert comm.size == 1 or (caught.value.agreed and caught.value.arose_here == (comm.rank == 0))


@pytest.mark.mpi(min_size=2)
def test_a_fault_is_raised_on_all_ranks(comm):
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$") as caught:
        on_root(comm, lambda: 1 / 0)
    assert is_agreed(caught.value, comm.size) and caught.value.arose_here == (comm.rank == 0)


class Local:
    """Object that can be unpickled on rank 0 only."""

    def __reduce__(self):
        return _made, ()


def _made():
    if MPI.COMM_WORLD.rank:
        raise UserError("expected a moon, got none")
    return Local()


@pytest.mark.mpi(min_size=2)
def test_a_result_that_a_rank_cannot_take(comm):
    with pytest.raises(UserError, match=r"^rank 1( \(and \d+ more\))?: .*got none$") as caught:
        on_root(comm, Local)
    assert is_agreed(caught.value, comm.size)


OWN = {
    "optimizer": ["optimizer={kind = 'own.py:Own'}", "from tests.training.own_optimizer import RMSprop as Own"],
    "model": ["model={file = 'own.py:build'}", "def build(): pass"],
    "data": ["data.file='own.py:read'", "def read(): pass"],
    "transport": ["backend.transport='own.py:Own'", "from halograd.comm.transport import Mpi as Own"],
    "metric": ["output.metrics=['own.py:Own']", "Own = None"],
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("there", ["none", "another one"])
@pytest.mark.parametrize("own", OWN)
def test_a_file_of_the_user_that_differs_on_one_rank(comm, config, tmp_path, monkeypatch, own, there):
    """A user's file that is missing or different on one rank is one error on all ranks, before the run begins."""
    setting, text = OWN[own]
    if comm.rank == 1:  # as on the local disk of another node
        monkeypatch.chdir(tmp_path)
    if comm.rank == 0 or (comm.rank == 1 and there != "none"):
        Path("own.py").write_text(f"{text}\n" if comm.rank == 0 else f"{text}  # older\n")
    comm.Barrier()
    message = rf"^rank 1: own\.py: expected the same file on all ranks, got {there} in .*file system that all nodes"
    with pytest.raises(UserError, match=message) as caught:
        train(config, [setting], comm=comm)
    assert is_agreed(caught.value, comm.size)
    comm.Barrier()
    assert not (config.parent / "out").exists()


@pytest.mark.mpi
def test_configuration_plan_and_structure_are_read_once(comm, config, opened, monkeypatch):
    folder = config.parent
    if comm.rank == 0:
        Strategy({"height": comm.size}).save(folder / "cut.json")
    comm.Barrier()
    opened.clear()
    files: list[Path] = []
    open_stored = formats.open_stored
    monkeypatch.setattr("halograd.data.dataset.open_stored", lambda *some: files.append(some[0]) or open_stored(*some))
    sets = [f"strategy={{file = '{folder / 'cut.json'}'}}", "data.normalize=false"]
    config = read_config(comm, folder / "run.toml", sets)
    with Communicator(comm) as ranks, ExitStack() as stack:
        session = Session.open(config, ranks, stack)
        assert session.executor.strategy.parts == {"height": comm.size}
        assert len(session.samples.dataset) == 19
        assert len(files) == (comm.rank == 0)
        list(session.feed(session.in_order(session.samples.training[:4])))
        assert len(files) == 1  # now everyone reads a block
    assert {"run.toml", "cut.json"} & set(opened) == ({"run.toml", "cut.json"} if comm.rank == 0 else set())
