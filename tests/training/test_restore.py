"""Tests of reading a checkpoint on several ranks and nodes: reads per byte, and the same result on all ranks."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.errors import is_agreed
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
    write_checkpoint,
)
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.executor import Executor
from tests.training.steps import assert_arrays, copied
from tests.training.test_cut_parameters import cut, network, steps, trainer_of

SMALL = 4096  # bytes under a checksum, so that a small file has many


@pytest.fixture
def path(comm, shared, monkeypatch):
    """Return the path of a checkpoint after one step."""
    found = shared / "step-00000001.h5"
    if comm.rank == 0:
        with monkeypatch.context() as patch, Communicator(MPI.COMM_SELF) as alone:
            patch.setattr(chunk_file, "CHUNK", SMALL)
            with Executor(network(), alone, get_backend("numpy"), 4, dtype="float64", seed=2) as executor:
                trainer = trainer_of(executor)
                steps(trainer, [0])
                write_checkpoint(found, Snapshot.of(executor.store, trainer.optimizer, alone), TrainingProgress(step=1))
    comm.barrier()
    return found


def whole(comm, path):
    """Return parameters and first moments of a checkpoint, read by this rank alone."""
    with Executor(network(), comm, get_backend("numpy"), 4, dtype="float64") as executor:
        trainer = trainer_of(executor)
        read_checkpoint(path, executor.store, trainer.optimizer)
        named = trainer.optimizer.named_state()
        return copied(executor.store.params), named["first_moment"]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("strategy", [lambda size: Strategy({"sample": size}), cut])
def test_each_byte_is_read_once_per_node(path, monkeypatch, strategy, per_node):
    """One rank of each node reads a checkpoint once; all ranks get parameters, moments, statistics and progress."""
    monkeypatch.setattr(checkpoint, "PART", 1000)
    size, total = MPI.COMM_WORLD.size, path.stat().st_size
    with Communicator(MPI.COMM_SELF) as alone:
        params, moment = whole(alone, path)
    with (
        Communicator(MPI.COMM_WORLD, f"emulated:alpha=0,beta=0,node={per_node}") as comm,
        Executor(network(), comm, get_backend("numpy"), 4, strategy(size), "float64") as executor,
    ):
        trainer = trainer_of(executor)
        with CheckpointReader(path, comm, whole=True) as reader:
            assert reader.restore(executor.store, trainer.optimizer).step == 1
            read = comm.allgather_objects(reader.bytes_read)
        assert read == [total if rank % per_node == 0 else 0 for rank in range(size)]
        for name, array in executor.store.params.items():
            np.testing.assert_array_equal(array, params[name][executor.store.box(name).slices()])
        gathered = Snapshot.of(executor.store, trainer.optimizer, comm)
        if gathered is not None:
            assert_arrays(gathered.optimizer["first_moment"], moment)


@pytest.mark.ranks(1, 2)
def test_parameters_alone_need_a_part_of_the_file(path):
    """Evaluation reads only the chunks of a checkpoint that contain parameters, each once."""
    with (
        Communicator(MPI.COMM_WORLD, "mpi") as comm,
        Executor(network(), comm, get_backend("numpy"), 4, dtype="float64") as executor,
        CheckpointReader(path, comm) as reader,
    ):
        assert reader.progress.step == 1
        reader.restore(executor.store)
        read = reader.bytes_read
        reader.restore(executor.store)
        assert reader.bytes_read == read
        assert (0 < read < 0.8 * path.stat().st_size) if comm.rank == 0 else read == 0


@pytest.mark.ranks(2, 4)
def test_damage_that_one_node_sees_is_found_by_all(path, monkeypatch):
    """If one node finds damage, all ranks use the previous checkpoint; the message names the rank that found it."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        path.with_name("step-00000000.h5").write_bytes(path.read_bytes())
    comm.barrier()
    read_all, last = chunk_file._read_all, comm.size - 1

    def flipped(file, data):
        count = read_all(file, data)
        if comm.rank == last and str(file.name) == str(path) and count == SMALL:
            data[count // 2] ^= 16
        return count

    monkeypatch.setattr(chunk_file, "_read_all", flipped)
    with Communicator(comm, "emulated:alpha=0,beta=0") as ranks:
        with pytest.raises(DamagedCheckpoint, match=f"^rank {last}: checkpoint .*damaged"):
            CheckpointReader(path, ranks, whole=True)
        found, told = CheckpointFolder(path.parent).newest_whole(ranks)
        assert found.path.name == "step-00000000.h5" and found.progress.step == 1
        assert told[0].endswith("set aside as step-00000001.damaged")
        found.close()


@pytest.mark.ranks(2)
def test_nodes_that_see_different_files(path, tmp_path_factory):
    comm = MPI.COMM_WORLD
    mine = tmp_path_factory.mktemp("own") / "step-00000001.h5"
    write_checkpoint(mine, _snapshot(comm.rank), TrainingProgress(step=1))
    want = r"^rank 1: .*expected the same file on all nodes, got another one than rank 0 has"
    with Communicator(comm, "emulated:alpha=0,beta=0") as ranks, pytest.raises(UserError, match=want):
        CheckpointReader(mine, ranks)


def _snapshot(seed):
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(network(), alone, get_backend("numpy"), 4, dtype="float64", seed=seed) as executor,
    ):
        return Snapshot.of(executor.store)


@pytest.mark.ranks(1, 2)
def test_damage_that_is_met_when_arrays_are_read(path):
    """Arrays of a checkpoint that was not verified are verified when read, before parameters change."""
    if MPI.COMM_WORLD.rank == 0:
        data = bytearray(path.read_bytes())
        with h5py.File(path) as file:
            data[file["params/dense2/b"].id.get_offset()] ^= 1
        path.write_bytes(data)
    MPI.COMM_WORLD.barrier()
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(network(), comm, get_backend("numpy"), 4, dtype="float64") as executor,
        CheckpointReader(path, comm) as reader,
    ):
        before = copied(executor.store.params)
        assert reader.progress.step == 1
        with pytest.raises(DamagedCheckpoint, match=r"checksum of its bytes \d+ to \d+ "):
            reader.restore(executor.store)
        assert all(np.array_equal(array, before[name]) for name, array in executor.store.params.items())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("what", ["network", "dtype"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_all(path, what):
    """A checkpoint of another network or dtype is the same error on all ranks, which names no rank."""
    other, dtype = (network(), "float32") if what == "dtype" else (network(classes=5), "float64")
    message = {"network": "is of another network: ", "dtype": ": expected float32 parameters, got float64"}[what]
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(other, comm, get_backend("numpy"), 4, dtype=dtype) as executor,
        CheckpointReader(path, comm) as reader,
    ):
        with pytest.raises(UserError, match=f"^checkpoint {path} ?{message}") as caught:
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
