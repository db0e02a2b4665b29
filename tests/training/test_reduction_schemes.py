"""Tests of gradient reduction under every scheme: results, bytes, hierarchical sums."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator, shards
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.reduction_chunks import chunks_of, gradient_layers
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.models import lenet5
from halograd.training.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, Adam, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.harness.limits import wait_until
from tests.support.lean import check_allocations
from tests.training.reductions import BUCKET, NODES_OF_TWO, alone, build, check_grids, check_strategy, train, trainer_of
from tests.training.steps import RATE, advance, assert_arrays, copied, fill

CHUNKS = [
    Scheme("blocking"),
    Scheme("per_layer"),
    Scheme("two_chunks", first_layers=3),
    Scheme("bucketed", deterministic=True),
    Scheme("two_chunks", first_layers=2, deterministic=True),
]
BY_NODES = [Scheme("hierarchical"), Scheme("host_accumulate"), Scheme("host_accumulate", chunk=3)]
SHARDS = [Scheme("sharded")]
SCHEMES = BY_NODES + SHARDS
WITH_DENSE = [Scheme("host_accumulate", chunk=2, replicated_dense=1), Scheme("sharded", replicated_dense=2)]
ROUNDED = [
    Scheme("two_chunks", first_layers=3, payload="bfloat16"),
    Scheme("two_chunks", first_layers=3, payload="bfloat16", error_feedback=False),
]
WITH_NORMS = [Scheme("two_chunks", first_layers=3), Scheme("per_layer", deterministic=True), *BY_NODES, *SHARDS]
LINE = 64  # [B]: parameters begin at multiples of it


def over(schemes, *transports, marks=()):
    """Return test parameters: each scheme over each transport."""
    return [pytest.param(s, t, id=f"{s} {t.partition(':')[0]}", marks=marks) for t in transports for s in schemes]


def strategy_of(size, scheme, layers=None):
    return Strategy({"sample": size}, layers or {}, bucket_bytes=BUCKET, reduction=scheme)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    ("name", "dtype", "scheme"),
    [
        *(("lenet", "float64", scheme) for scheme in CHUNKS + SCHEMES),
        *(("mesh", "float32", scheme) for scheme in WITH_NORMS),
    ],
    ids=str,
)
def test_ten_steps_are_those_of_one_process(turn, name, dtype, scheme):
    with Communicator(MPI.COMM_WORLD) as comm:
        check_grids(name, comm, turn, scheme, dtype)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("scheme", "transport"),
    [
        *over(CHUNKS + SHARDS, "mpi"),
        *over(WITH_DENSE, NODES_OF_TWO),
        *over(SCHEMES, NODES_OF_TWO, marks=pytest.mark.nightly),
    ],
)
def test_other_transports_give_the_same(scheme, transport):
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        check_strategy("lenet", comm, strategy_of(comm.size, scheme), "float64")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("scheme", "transport"), over(CHUNKS + SCHEMES, "auto") + over(SCHEMES, NODES_OF_TWO))
def test_gradients_of_blocks_are_summed_by_those_who_hold_them(scheme, transport):
    """With cut filters, cut input channels and a layer on one rank, only ranks with equal blocks sum gradients."""
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        size = comm.size
        layers = {
            "conv2": {"channel": size},
            "dense3": {"input_channel": 2},
            "relu3": {"sample": size},
            "dense4": {"channel": size},
            "dense5": {"sample": 1},
        }
        check_strategy("lenet", comm, strategy_of(size, scheme, layers), "float64")


def expected_traffic(scheme, comm, per_node, sizes):
    """Return messages and bytes of a step by the formulas of docs/gradient_reduction.md; `sizes` are of the chunks."""
    size, rank, nbytes = comm.size, comm.rank, 4 * sum(sizes)
    whole, nothing = (len(sizes), nbytes), (0, 0)
    found = dict.fromkeys(("allreduce", "node", "reduce_scatter", "all_gather"), nothing)
    if size == 1:
        return found
    if scheme.name == "sharded":
        parts = [shards(n, size, 4)[rank] for n in sizes]
        return found | {"reduce_scatter": whole, "all_gather": (len(sizes), 4 * sum(p.stop - p.start for p in parts))}
    if scheme.name in ("hierarchical", "host_accumulate"):
        first, near = rank % per_node == 0, rank // per_node * per_node + 1 < size
        return found | {
            "allreduce": whole if size > per_node and first else nothing,
            "node": whole if near else nothing,
        }
    return found | {"allreduce": (len(sizes), nbytes // 2 if scheme.payload == "bfloat16" else nbytes)}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    ("scheme", "transport"),
    over([*CHUNKS, Scheme("bucketed"), *ROUNDED], "mpi", "auto") + over(SCHEMES, "auto", NODES_OF_TWO),
)
def test_bytes_and_messages_of_a_step_are_those_of_the_formula(scheme, transport):
    """Messages and bytes of a step are those of the formula: one message per chunk, padded to cache lines."""
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        strategy = strategy_of(comm.size, scheme)
        network = lenet5(classes=4, resolution=28)
        layers = gradient_layers(network, parameter_blocks(network, strategy, comm.size))
        chunks = chunks_of(layers, scheme, BUCKET, 4)
        sizes = [sum(-(-4 * g.size // LINE) * LINE // 4 for g in chunk.gradients) for chunk in chunks]
        with build("lenet", comm, strategy) as executor:
            trainer = trainer_of(executor)
            advance(trainer, [0])
            trainer.synchronize()
            comm.counters.reset()
            advance(trainer, [1, 2])
            trainer.synchronize()
        expected = expected_traffic(scheme, comm, 2 if transport == NODES_OF_TWO else comm.size, sizes)
        found = {kind: (comm.counters[kind].messages, comm.counters[kind].bytes) for kind in expected}
        assert found == {kind: (2 * messages, 2 * nbytes) for kind, (messages, nbytes) in expected.items()}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    ("scheme", "transport"),
    over([*CHUNKS[:4], Scheme("bucketed", payload="bfloat16"), ROUNDED[1]], "mpi", "auto")
    + over(SCHEMES, "auto", NODES_OF_TWO),
)
def test_a_step_allocates_no_array(scheme, transport):
    """A step allocates no array; gradients have 400 KiB, so a temporary of a quarter of them would be detected."""
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        network = lenet5(classes=4, resolution=36)
        with Executor(network, comm, get_backend("onednn"), 4, strategy_of(comm.size, scheme)) as executor:
            assert sum(b.grads.nbytes for b in executor.store.buckets) > 400 << 10
            trainer = trainer_of(executor)
            advance(trainer, range(2))
            for _ in range(2):
                trainer.step()
            check_allocations(comm, lambda: advance(trainer, [2, 3]), 96 * 1024)


@pytest.mark.mpi(min_size=1)
def test_error_feedback_takes_the_memory_of_the_gradients():
    with Communicator(MPI.COMM_WORLD) as comm:
        for scheme, keeps in ((ROUNDED[0], True), (ROUNDED[1], False), (Scheme("bucketed"), False)):
            with build("lenet", comm, strategy_of(comm.size, scheme)) as executor:
                held = executor.memory.bytes
                assert held.get("gradient error", 0) == (held["parameter gradient"] if keeps else 0)


@pytest.mark.mpi(min_size=2)
def test_deterministic_sums_have_the_same_bits_under_every_transport_and_scheme():
    found = []
    for transport in ("mpi", "shared", "emulated:alpha=1e-5,beta=1e-11"):
        with Communicator(MPI.COMM_WORLD, transport) as comm:
            for name, k in (("blocking", 0), ("per_layer", 0), ("bucketed", 0), ("two_chunks", 3)):
                strategy = Strategy(
                    {"sample": comm.size}, bucket_bytes=BUCKET, reduction=Scheme(name, k, deterministic=True)
                )
                found.append((transport, name, train("lenet", comm, strategy, "float32").params))
    for transport, name, params in found[1:]:
        for key, array in params.items():
            np.testing.assert_array_equal(array, found[0][2][key], err_msg=f"{key} with {name} over {transport}")


def off(comm, rate, **settings):
    """Return the largest difference of parameters from one process after all steps, over all ranks. Collective."""
    scheme = Scheme("per_layer", payload="bfloat16", **settings)
    whole = alone("lenet", "float32", rate).params
    params = train("lenet", comm, strategy_of(comm.size, scheme), "float32", rate).params
    worst = float(np.max([np.abs(params[key] - whole[key]).max() for key in params]))
    comm.agree(None if np.isfinite(worst) else AssertionError(f"parameters differ by {worst}"))
    return comm.allreduce_scalar(worst, "max")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_bfloat16_with_error_feedback_stays_near_one_process(transport):
    """With error feedback, parameters after rounded sums stay within two roundings of one process.

    The error is one rounding of the summands and one of their sum, each of 2^-8 of a gradient, before feedback; with
    momentum 0.5 it doubles in the end. Gradients are below 1.5 in the last steps. The learning rate is one at which
    training is smooth, because small differences grow at a kink.
    """
    rate, gradient = 0.003, 1.5
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        near = off(comm, rate)
        assert near <= 2 * 2 * 2.0**-8 * gradient * rate
        assert off(comm, rate, error_feedback=False) > 3 * near, "without, every step leaves an error"


@pytest.mark.mpi(min_size=2)
def test_blocking_sums_are_over_when_backward_is():
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"sample": comm.size}, reduction=Scheme("blocking"))
        with build("lenet", comm, strategy) as executor:
            fill(executor, 0)
            executor.forward()
            executor.backward()
            before = copied(executor.store.grads)
            executor.reducer.finish()
            assert_arrays(before, executor.store.grads)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_training_goes_on_as_before_when_a_scheme_is_refused(transport):
    expected = alone("lenet", "float64").losses
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        strategy = strategy_of(comm.size, Scheme("per_layer", deterministic=True))
        with build("lenet", comm, strategy, "float64") as executor:
            trainer = trainer_of(executor)
            losses = advance(trainer, range(3))
            with pytest.raises(ValueError, match="expected replicated layers among"):
                trainer.reduce_by(Scheme("per_layer", replicated_dense=2))
            if transport == "mpi":
                with pytest.raises(UserError, match='memory with "hierarchical", got "mpi"'):
                    trainer.reduce_by(Scheme("hierarchical"))
            losses += advance(trainer, range(3, len(expected)))
            trainer.synchronize()
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


class Spans:
    """Recorder that stores its spans."""

    def __init__(self):
        self.found = []

    def span(self, name, category, t0, t1):
        self.found.append((name, category, t0, t1))


@pytest.mark.mpi(min_size=2)
def test_the_first_chunk_starts_when_backward_has_passed_its_layers():
    with Communicator(MPI.COMM_WORLD) as comm:
        comm.instruments.recorder = spans = Spans()
        scheme = Scheme("two_chunks", first_layers=3)  # the three dense layers of LeNet-5
        with build("lenet", comm, Strategy({"sample": comm.size}, reduction=scheme)) as executor:
            fill(executor, 0)
            executor.forward()
            spans.found.clear()
            executor.backward()
            executor.reducer.finish()
        passed = {name: (t0, t1) for name, category, t0, t1 in spans.found if category == "backward"}
        sums = sorted(t0 for name, category, t0, _ in spans.found if (name, category) == ("allreduce", "communication"))
        assert len(sums) == 2
        assert passed["dense3"][1] <= sums[0] <= passed["conv2"][0]
        assert passed["conv1"][1] <= sums[1]


@pytest.mark.mpi(min_size=1)
def test_bfloat16_needs_float32():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        pytest.raises(UserError, match=r'reduction.payload: .*"float32" .*, got "float64"'),
    ):
        strategy = Strategy({"sample": comm.size}, reduction=Scheme(payload="bfloat16"))
        build("lenet", comm, strategy, "float64")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [SGD, Adam], ids=["momentum", "adam"])
def test_each_rank_keeps_the_state_of_its_shard(make):
    with Communicator(MPI.COMM_WORLD) as comm:
        states = {}
        for scheme in (Scheme("bucketed"), Scheme("sharded")):
            with build("lenet", comm, strategy_of(comm.size, scheme)) as executor:
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
        with build("lenet", comm, strategy_of(comm.size, Scheme("host_accumulate"))) as executor:
            advance(trainer_of(executor), [0])
            executor.reducer.finish()
        assert seen, "the sum of the first chunk is back before backward is over"


@pytest.mark.mpi(min_size=2)
def test_only_one_thread_works_beside():
    with Communicator(MPI.COMM_WORLD) as comm:
        for scheme in SCHEMES:
            with build("lenet", comm, strategy_of(comm.size, scheme)) as executor:
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
        with Communicator(world) as comm, build("lenet", comm, strategy_of(comm.size, asked), "float64") as executor:
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
        with Communicator(MPI.COMM_WORLD) as comm, build("lenet", comm, strategy_of(comm.size, scheme)) as executor:
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
        build("lenet", comm, strategy_of(comm.size, scheme))


@pytest.mark.mpi(min_size=1)
def test_lars_needs_whole_gradients():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        build("lenet", comm, strategy_of(comm.size, Scheme("sharded"))) as executor,
        pytest.raises(UserError, match=r'kind: .*sgd, .*"sharded", got lars'),
    ):
        LARS(executor.store)


@pytest.mark.mpi(min_size=2)
def test_shards_of_state_stay_where_they_are():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        build("lenet", comm, strategy_of(comm.size, Scheme("sharded"))) as executor,
    ):
        optimizer = SGD(executor.store, momentum=0.5)
        with pytest.raises(ValueError, match=r"named_state\(\): .*communicator"):
            optimizer.named_state()
        executor.reduce_by(Scheme("bucketed"))
        with pytest.raises(ValueError, match=r"bind\(\): .*shards"):
            optimizer.bind()
