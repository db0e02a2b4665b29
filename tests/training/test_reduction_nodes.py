"""Tests of hierarchical and sharded sums of gradients: overlap, clipping, checkpoints, errors."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, Adam, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.harness.limits import wait_until
from tests.training.reductions import BUCKET, NODES_OF_TWO, build, trainer_of
from tests.training.steps import RATE, advance, assert_arrays, copied

SCHEMES = [Scheme("hierarchical"), Scheme("host_accumulate"), Scheme("host_accumulate", chunk=3), Scheme("sharded")]
WITH_DENSE = [Scheme("host_accumulate", chunk=2, replicated_dense=1), Scheme("sharded", replicated_dense=2)]


def strategy_of(comm, scheme):
    return Strategy({"sample": comm.size}, bucket_bytes=BUCKET, reduction=scheme)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [SGD, Adam], ids=["momentum", "adam"])
def test_each_rank_keeps_the_state_of_its_shard(make):
    with Communicator(MPI.COMM_WORLD) as comm:
        states = {}
        for scheme in (Scheme("bucketed"), Scheme("sharded")):
            with build("lenet", comm, strategy_of(comm, scheme)) as executor:
                make(executor.store, **({"momentum": 0.5} if make is SGD else {}))
                states[scheme.name] = executor.predicted_bytes["optimizer state"]
        # A shard ends with a cache line, one per bucket and state array.
        spare = 64 * len(executor.store.buckets) * (1 if make is SGD else 2)
        assert abs(states["sharded"] - states["bucketed"] / comm.size) <= spare
        assert comm.allreduce_scalar(states["sharded"]) == states["bucketed"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", NODES_OF_TWO])
def test_gradients_come_back_while_backward_goes_on(transport, monkeypatch):
    """The sum of the first chunk is complete during backward of later layers (Le et al., step B-4-3)."""
    recorded, seen = Executor._recorded, []

    def waiting(self, layer, phase, calls):
        def summed():
            first = self.store.buckets[0].grads
            wait_until(lambda: self.reducer._states[0].total.summed, "the sum of the first chunk")
            norms = self.comm.allgather_objects(float(first[:8] @ first[:8]))
            assert len(set(norms)) == 1
            seen.append(norms[0])

        return recorded(self, layer, phase, [*calls, summed] if (layer, phase) == ("conv1", "backward") else calls)

    monkeypatch.setattr(Executor, "_recorded", waiting)
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        with build("lenet", comm, strategy_of(comm, Scheme("host_accumulate"))) as executor:
            advance(trainer_of(executor), [0])
            executor.reducer.finish()
        assert seen, "the sum of the first chunk is back before backward is over"


@pytest.mark.mpi(min_size=2)
def test_only_one_thread_works_beside():
    with Communicator(MPI.COMM_WORLD) as comm:
        for scheme in SCHEMES:
            with build("lenet", comm, strategy_of(comm, scheme)) as executor:
                advance(trainer_of(executor), range(2))
                beside = [t.name for t in threading.enumerate() if t.name.startswith("halograd")]
                assert beside in (["halograd-progress"], [])
                executor.reducer.finish()


# -- clipping, checkpoints, faults ----------------------------------------------------------------


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("scheme", SCHEMES + WITH_DENSE, ids=str)
def test_clipping_scales_by_the_norm_of_one_process(scheme):
    found = []
    for world, asked in ((MPI.COMM_SELF, Scheme()), (MPI.COMM_WORLD, scheme)):
        with Communicator(world) as comm, build("lenet", comm, strategy_of(comm, asked), "float64") as executor:
            trainer = Trainer(executor, SGD(executor.store, momentum=0.5), Constant(RATE), clip_norm=0.3)
            norms = []
            for number in range(4):
                advance(trainer, [number])
                norms.append(trainer.gradient_norm)
            trainer.synchronize()
            found.append((norms, copied(executor.store.params)))
    assert max(found[0][0]) > 0.3
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-11)
    for key, array in found[0][1].items():
        np.testing.assert_allclose(found[1][1][key], array, rtol=0, atol=1e-11)


def resumed(comm, path, first, second, make, steps=2):
    """Return the parameters after a checkpoint and a change of strategy, and those without an interruption."""
    with build("lenet", comm, first, "float64") as executor:
        trainer = Trainer(executor, make(executor.store), Constant(RATE))
        advance(trainer, range(steps))
        trainer.synchronize()
        snapshot = Snapshot.of(executor.store, trainer.optimizer, comm)
        with comm.agreement():
            if snapshot is not None:
                write_checkpoint(path, snapshot)
        advance(trainer, range(steps, 2 * steps))
        trainer.synchronize()
        expected = Snapshot.of(executor.store, trainer.optimizer, comm)
        expected = expected and copied({**expected.params, **flat(expected.optimizer)})
    with build("lenet", comm, second, "float64") as executor:
        trainer = Trainer(executor, make(executor.store), Constant(RATE))
        read_checkpoint(path, executor.store, trainer.optimizer)
        advance(trainer, range(steps, 2 * steps))
        trainer.synchronize()
        found = Snapshot.of(executor.store, trainer.optimizer, comm)
        return found and {**found.params, **flat(found.optimizer)}, expected


def flat(states):
    return {f"{key}: {name}": array for key, arrays in states.items() for name, array in arrays.items()}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("way", ["into", "out of", "with other"])
def test_checkpoints_are_whole_and_resume_under_any_scheme(shared, way, cut):
    """A checkpoint is resumed with shards, without shards, and with shards of other buckets."""
    with Communicator(MPI.COMM_WORLD) as comm:
        path = shared / "step.h5"
        layers = {"dense3": {"channel": comm.size}, "dense4": {"channel": max(1, comm.size - 1)}} if cut else {}
        plain = Strategy({"sample": comm.size}, layers, bucket_bytes=BUCKET)
        sharded = Strategy({"sample": comm.size}, layers, bucket_bytes=BUCKET, reduction=Scheme("sharded"))
        other = Strategy({"sample": comm.size}, bucket_bytes=100, reduction=Scheme("sharded"))
        first, second = {"into": (plain, sharded), "out of": (sharded, plain), "with other": (sharded, other)}[way]
        found, expected = resumed(comm, path, first, second, lambda store: AdamW(store, weight_decay=0.01))
        with comm.agreement():
            assert (found is None) == (expected is None) == (comm.rank > 0)
            for key, array in (expected or {}).items():
                np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-10, err_msg=key)


@pytest.mark.mpi(min_size=1)
def test_a_step_that_went_wrong_leaves_the_parameters():
    for scheme in SCHEMES:
        with Communicator(MPI.COMM_WORLD) as comm, build("lenet", comm, strategy_of(comm, scheme)) as executor:
            trainer = trainer_of(executor)
            advance(trainer, range(2))
            trainer.synchronize()
            before = copied(executor.store.params)
            executor.forward(training=True)
            executor.backward()
            executor.reducer.discard()
            trainer.synchronize()
            assert_arrays(before, executor.store.params)
            advance(trainer, [2])
            trainer.synchronize()
            assert any((array != before[key]).any() for key, array in executor.store.params.items())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_sums_by_nodes_need_shared_memory(scheme):
    with (
        Communicator(MPI.COMM_WORLD, "mpi") as comm,
        pytest.raises(UserError, match=rf'memory with "{scheme.name}", got "mpi"; .*auto'),
    ):
        build("lenet", comm, strategy_of(comm, scheme))


@pytest.mark.mpi(min_size=1)
def test_lars_needs_whole_gradients():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        build("lenet", comm, strategy_of(comm, Scheme("sharded"))) as executor,
        pytest.raises(UserError, match=r'kind: .*sgd, .*"sharded", got lars'),
    ):
        LARS(executor.store)


@pytest.mark.mpi(min_size=2)
def test_shards_of_state_stay_where_they_are():
    with Communicator(MPI.COMM_WORLD) as comm, build("lenet", comm, strategy_of(comm, Scheme("sharded"))) as executor:
        optimizer = SGD(executor.store, momentum=0.5)
        with pytest.raises(ValueError, match=r"named_state\(\): .*communicator"):
            optimizer.named_state()
        executor.reduce_by(Scheme("bucketed"))
        with pytest.raises(ValueError, match=r"bind\(\): .*shards"):
            optimizer.bind()
