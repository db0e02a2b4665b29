"""Sums by nodes, and shards: the training of one process, the bytes of the formula, nothing allocated."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator, shards
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.models import lenet5
from halograd.training.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, Adam, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.harness.limits import wait_until
from tests.support.lean import check_allocations
from tests.training.reductions import BUCKET, advance, build, check_grids, check_strategy, trainer_of
from tests.training.test_exactness import RATE

SCHEMES = [Scheme("hierarchical"), Scheme("host_accumulate"), Scheme("host_accumulate", chunk=3), Scheme("sharded")]
WITH_DENSE = [Scheme("host_accumulate", chunk=2, replicated_dense=1), Scheme("sharded", replicated_dense=2)]
NODES_OF_TWO = "emulated:alpha=1e-5,beta=1e-11,node=2"


def strategy_of(comm, scheme):
    return Strategy({"sample": comm.size}, bucket_bytes=BUCKET, reduction=scheme)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("name", "dtype"), [("lenet", "float64"), ("mesh", "float32")])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_ten_steps_are_those_of_one_process(name, dtype, scheme):
    with Communicator(MPI.COMM_WORLD) as comm:
        check_grids(name, comm, scheme, dtype)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("scheme", SCHEMES + WITH_DENSE, ids=str)
def test_nodes_of_two_ranks_give_the_same(scheme):
    with Communicator(MPI.COMM_WORLD, NODES_OF_TWO) as comm:
        check_strategy("lenet", comm, strategy_of(comm, scheme), "float64")


@pytest.mark.mpi(min_size=2)
def test_shards_by_messages_of_mpi_give_the_same():
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        check_strategy("lenet", comm, strategy_of(comm, Scheme("sharded")), "float64")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("transport", ["auto", NODES_OF_TWO])
def test_gradients_of_blocks_are_summed_by_those_who_hold_them(transport, scheme):
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        size = comm.size
        layers = {
            "conv2": {"channel": size},
            "dense3": {"input_channel": 2},
            "relu3": {"sample": size},
            "dense4": {"channel": size},
            "dense5": {"sample": 1},
        }
        strategy = Strategy({"sample": size}, layers, bucket_bytes=BUCKET, reduction=scheme)
        check_strategy("lenet", comm, strategy, "float64")


# -- bytes, memory, threads ---------------------------------------------------------------------


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["auto", NODES_OF_TWO])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_bytes_and_messages_of_a_step_are_those_of_the_formula(scheme, transport):
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        size, rank = comm.size, comm.rank
        with build("lenet", comm, strategy_of(comm, scheme)) as executor:
            trainer = trainer_of(executor)
            advance(trainer, [0])
            trainer.settle()
            comm.counters.reset()
            advance(trainer, [1, 2])
            trainer.settle()
            buckets = [b.grads for b in executor.store.buckets]
        kinds = ("allreduce", "node", "reduce_scatter", "all_gather")
        found = {k: (comm.counters[k].messages, comm.counters[k].bytes) for k in kinds}
        whole = 2 * len(buckets), 2 * sum(g.nbytes for g in buckets)
        own = [shards(g.size, size, g.itemsize)[rank] for g in buckets]
        parts = 2 * len(buckets), 2 * sum(g[part].nbytes for g, part in zip(buckets, own))
        per_node = size if transport == "auto" else 2
        first, near = rank % per_node == 0, rank // per_node * per_node + 1 < size
        expected = dict.fromkeys(kinds, (0, 0))
        if scheme.name == "sharded" and size > 1:
            expected |= {"reduce_scatter": whole, "all_gather": parts}
        elif scheme.name != "sharded" and size > 1:
            expected |= {"allreduce": whole if size > per_node and first else (0, 0)}
            expected |= {"node": whole if near else (0, 0)}
        assert found == expected


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["auto", NODES_OF_TWO])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_step_allocates_no_array(scheme, transport):
    """Gradients have 400 KiB: any temporary of a quarter of them would be seen."""
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        network = lenet5(classes=4, resolution=36)
        with Executor(network, comm, get_backend("onednn"), 4, strategy_of(comm, scheme)) as executor:
            assert sum(b.grads.nbytes for b in executor.store.buckets) > 400 << 10
            trainer = trainer_of(executor)
            advance(trainer, range(2))
            for _ in range(2):
                trainer.step()
            check_allocations(comm, lambda: [trainer.step() for _ in range(2)], 96 * 1024)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [SGD, Adam], ids=["momentum", "adam"])
def test_each_rank_keeps_the_state_of_its_shard(make):
    with Communicator(MPI.COMM_WORLD) as comm:
        states = {}
        for scheme in (Scheme("bucketed"), Scheme("sharded")):
            with build("lenet", comm, strategy_of(comm, scheme)) as executor:
                make(executor.store, *((0.5,) if make is SGD else ()))
                states[scheme.name] = executor.predicted_bytes["optimizer state"]
        # A shard ends with a cache line, one per bucket and state array.
        spare = 64 * len(executor.store.buckets) * (1 if make is SGD else 2)
        assert abs(states["sharded"] - states["bucketed"] / comm.size) <= spare
        assert comm.allreduce_scalar(states["sharded"]) == states["bucketed"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", NODES_OF_TWO])
def test_gradients_come_back_while_backward_goes_on(transport):
    """Le et al., step B-4-3. A layer late in backward waits, and finds the sum of the first chunk in the gradients."""
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        seen = []
        with build("lenet", comm, strategy_of(comm, Scheme("host_accumulate"))) as executor:
            reducer = executor.reducer
            first, passed = executor.store.buckets[0].grads, reducer.ready

            def ready(layer):
                if layer == "conv1":
                    wait_until(lambda: reducer._sums[0].total.summed, "the sum of the first chunk")
                    norms = comm.allgather_objects(float(first[:8] @ first[:8]))
                    assert len(set(norms)) == 1
                    seen.append(norms[0])
                passed(layer)

            reducer.ready = ready
            advance(trainer_of(executor), [0])
            reducer.finish()
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
            trainer.settle()
            found.append((norms, {k: v.copy() for k, v in executor.store.params.items()}))
    assert max(found[0][0]) > 0.3
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-11)
    for key, array in found[0][1].items():
        np.testing.assert_allclose(found[1][1][key], array, rtol=0, atol=1e-11)


def resumed(comm, path, first, second, make, steps=2):
    """Parameters after some steps by one strategy, a checkpoint, and some by another; and those without a break."""
    with build("lenet", comm, first, "float64") as executor:
        trainer = Trainer(executor, make(executor.store), Constant(RATE))
        advance(trainer, range(steps))
        trainer.settle()
        snapshot = Snapshot.of(executor.store, trainer.optimizer, comm)
        with comm.agreement():
            if snapshot is not None:
                write_checkpoint(path, snapshot)
        advance(trainer, range(steps, 2 * steps))
        trainer.settle()
        expected = Snapshot.of(executor.store, trainer.optimizer, comm)
        expected = expected and {k: v.copy() for k, v in {**expected.params, **flat(expected.optimizer)}.items()}
    with build("lenet", comm, second, "float64") as executor:
        trainer = Trainer(executor, make(executor.store), Constant(RATE))
        read_checkpoint(path, executor.store, trainer.optimizer)
        advance(trainer, range(steps, 2 * steps))
        trainer.settle()
        found = Snapshot.of(executor.store, trainer.optimizer, comm)
        return found and {**found.params, **flat(found.optimizer)}, expected


def flat(states):
    return {f"{key}: {name}": array for key, arrays in states.items() for name, array in arrays.items()}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("way", ["into", "out of", "with other"])
def test_checkpoints_are_whole_and_resume_under_any_scheme(tmp_path, way, cut):
    """Into shards, out of them, and with shards of other buckets."""
    with Communicator(MPI.COMM_WORLD) as comm:
        path = comm.bcast(str(tmp_path / "step.h5"))
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
            trainer.settle()
            before = {k: v.copy() for k, v in executor.store.params.items()}
            executor.forward(training=True)
            executor.backward()
            executor.reducer.discard()
            trainer.settle()
            for key, array in executor.store.params.items():
                np.testing.assert_array_equal(array, before[key])
            advance(trainer, [2])
            trainer.settle()
            assert any((array != before[key]).any() for key, array in executor.store.params.items())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_sums_by_nodes_need_shared_memory(scheme):
    with (
        Communicator(MPI.COMM_WORLD, "mpi") as comm,
        pytest.raises(UserError, match=rf'by which ranks share memory with "{scheme.name}", got "mpi"; choose .*auto'),
    ):
        build("lenet", comm, strategy_of(comm, scheme))


@pytest.mark.mpi(min_size=1)
def test_lars_needs_whole_gradients():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        build("lenet", comm, strategy_of(comm, Scheme("sharded"))) as executor,
        pytest.raises(UserError, match=r'optimizer.kind: expected sgd, adam or adamw with .* "sharded", got lars'),
    ):
        LARS(executor.store)


@pytest.mark.mpi(min_size=2)
def test_shards_of_state_stay_where_they_are():
    with Communicator(MPI.COMM_WORLD) as comm, build("lenet", comm, strategy_of(comm, Scheme("sharded"))) as executor:
        optimizer = SGD(executor.store, momentum=0.5)
        with pytest.raises(ValueError, match=r"named_state\(\): expected the communicator of the ranks"):
            optimizer.named_state()
        executor.reduce_by(Scheme("bucketed"))
        with pytest.raises(ValueError, match=r"bind\(\): expected the shards for which the state was made"):
            optimizer.bind()
