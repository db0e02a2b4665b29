"""Tests of parameters that are cut, have extents, are frozen, or do not influence the loss: under every cut."""

import contextlib

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.reduction_chunks import dense_layers
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.lowering.operations import Run
from halograd.perfmodel.cost.account import layers_memory
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from halograd.testing import grids, random_array
from halograd.training import train as train_run
from halograd.training.checkpoint import Snapshot, TrainingProgress, read_checkpoint, write_checkpoint
from halograd.training.clipping import Clip
from halograd.training.executor import Executor
from halograd.training.optimizers import LAMB, LARS, SGD, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.layers.cuts import random_strategy
from tests.models.gated import embedded, gated
from tests.perfmodel.test_cost_reductions import MPI_ALONE, SHARED, TWO_PER_NODE, faults_of
from tests.training.reductions import BUCKET, check_strategy
from tests.training.steps import NETWORKS, assert_arrays, copied, descend, fill

#: Scheme, transport with ranks that share memory by it, options of all layers.
CASES = [
    (Scheme("blocking"), MPI_ALONE, {}),
    (Scheme("per_layer", deterministic=True), SHARED, {"recompute": "block"}),
    (Scheme("two_chunks", first_layers=2), SHARED, {}),
    (Scheme("bucketed"), TWO_PER_NODE, {"recompute": "pointwise"}),
    (Scheme("hierarchical"), TWO_PER_NODE, {}),
    (Scheme("host_accumulate"), SHARED, {}),
    (Scheme("sharded"), MPI_ALONE, {}),
    (Scheme("sharded", replicated_dense=1), TWO_PER_NODE, {}),
]


@pytest.fixture(autouse=True)
def extents_network(monkeypatch):
    monkeypatch.setitem(NETWORKS, "embedded", embedded)


def cuts(size):
    """Return cuts of all layers by the axes of extents, and one with other cuts of some layers and unequal blocks."""
    if size == 1:
        return [Strategy()]
    halves = {"sample": size // 2, "width": 2} if size % 2 == 0 else {"width": size}
    layers = {"positions": {"channel": size}, "rows": {"height": [1, 2, *[1] * (size - 2)]}, "columns": {"sample": 1}}
    return [Strategy(halves), Strategy({"height": size}), Strategy({"width": size}, layers)]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]} {CASES[i][1][0][:8]}")
def test_steps_are_those_of_one_process_and_traffic_and_memory_as_predicted(number):
    scheme, (transport, per_node), options = CASES[number]
    if transport == TWO_PER_NODE[0] and MPI.COMM_WORLD.size % 2:
        transport, per_node = SHARED
    given = cuts(MPI.COMM_WORLD.size)[number % 3]
    strategy = Strategy(given.parts, given.layers, options, BUCKET, scheme)
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        check_strategy("embedded", comm, strategy, "float64")
        faults = faults_of("embedded", comm, strategy, per_node)
        comm.agree(AssertionError(f"rank {comm.rank}: " + "; ".join(faults[:4])) if faults else None)


def run(comm, strategy, body, network):
    with Executor(network(), comm, get_backend("numpy"), 4, strategy, "float64", seed=2, parts=2) as executor:
        optimizer = AdamW(executor.store, weight_decay=0.01, average=0.9, factors={"rows": 0.5})
        return body(Trainer(executor, optimizer, Constant(0.01), 0.5))


def steps(trainer, numbers):
    losses = []
    for number in numbers:
        fill(trainer.executor, 2 * number)
        trainer.add()
        fill(trainer.executor, 2 * number + 1)
        losses.append(trainer.step())
    trainer.synchronize()
    return losses


def arrays_of(trainer):
    snapshot = Snapshot.of(trainer.executor.store, trainer.optimizer, trainer.executor.comm)
    if snapshot is None:
        return None, None
    return snapshot, copied({f"{kind} {k}": v for kind, group in snapshot.groups.items() for k, v in group.items()})


def frozen():
    return embedded().freeze("positions", "conv1")


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("network", "scheme"), [(embedded, "bucketed"), (frozen, "sharded")])
def test_restart_under_other_cuts_and_ranks(shared, network, scheme):
    """Clipped steps of parts of batches with averages go on under other cuts, from a file of equal bits."""
    path = shared / "step.h5"

    def write(trainer):
        losses = steps(trainer, range(2))
        snapshot, arrays = arrays_of(trainer)
        if snapshot is not None:
            write_checkpoint(path, snapshot, TrainingProgress(step=2))
        trainer.executor.comm.barrier()
        return losses, arrays, trainer.gradient_norm

    def resume(trainer):
        read_checkpoint(path, trainer.executor.store, trainer.optimizer)
        _, arrays = arrays_of(trainer)
        losses = steps(trainer, range(2, 4))
        return arrays, losses, trainer.gradient_norm

    def whole(trainer):
        losses = steps(trainer, range(2))
        norm = trainer.gradient_norm
        return losses + steps(trainer, range(2, 4)), norm, trainer.gradient_norm

    with Communicator(MPI.COMM_SELF) as alone:
        expected, norm, last = run(alone, Strategy(), whole, network)
    assert norm > 0.5, "the test must clip"
    with Communicator(MPI.COMM_WORLD) as comm:
        every = [Strategy(s.parts, s.layers, reduction=Scheme(scheme)) for s in cuts(comm.size)]
        losses, written, found = run(comm, every[-1], write, network)
        assert losses == pytest.approx(expected[:2], rel=1e-11) and found == pytest.approx(norm, rel=1e-9)
        resumed = [run(comm, strategy, resume, network) for strategy in every]
        with Communicator(MPI.COMM_SELF) as alone:
            resumed.append(run(alone, Strategy(), resume, network))
    for arrays, losses, found in resumed:
        assert losses == pytest.approx(expected[2:], rel=1e-9) and found == pytest.approx(last, rel=1e-9)
        if written is not None:
            assert set(arrays) == set(written) and all(np.array_equal(arrays[k], written[k]) for k in written)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_optimizers_of_whole_parameters_refuse_boxes(kind):
    with Communicator(MPI.COMM_WORLD) as comm:
        with (
            Executor(embedded(), comm, get_backend("numpy"), 4, Strategy({"height": 2})) as executor,
            pytest.raises(UserError, match=rf"{kind.__name__} .* spatial extents"),
        ):
            kind(executor.store)
        with Executor(embedded(), comm, get_backend("numpy"), 4, Strategy({"sample": 2})) as executor:
            kind(executor.store)


FROZEN = {
    "unet": ("down0*", "up1", "bottom_*_a"),
    "lenet": ("conv1", "dense4"),
    "gated": ("gate", "conv", "coarse"),
    "between": ("normed", "frozen_up", "wide"),
}


def between():
    """Return a network with frozen layers of every kind after a trained one, and a trained layer on the same value."""
    x, target = hg.Input((12, 10, 3), name="x"), hg.Input((4,), name="target")
    h = hg.Conv(4, 3, weight_norm=True, name="normed")(hg.Conv(4, 3, name="first")(x))
    up = [hg.ConvTranspose(3, 3, stride=2, padding=1, name=name)(h) for name in ("trained_up", "frozen_up")]
    h = hg.GlobalAveragePool()(hg.BatchNorm(name="norm")(hg.Add()(*up)))
    prediction = hg.Dense(4, name="last")(hg.Dense(6, weight_norm=True, name="wide")(h))
    return hg.Network({"loss": hg.MeanSquaredError()(prediction, target), "prediction": prediction}, "between")


def whole(name):
    made = {"gated": lambda: gated(12, 3, 4), "between": between}
    return made.get(name, NETWORKS.get(name))()


def frozen_network(name):
    return whole(name).freeze(*FROZEN[name])


def gradients(made):
    """Return the whole gradients of the first step in one process."""
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(made, alone, get_backend("numpy"), 4, None, "float64", seed=3) as e,
    ):
        fill(e, 0)
        e.forward()
        e.backward()
        e.reducer.finish()
        return copied(e.store.grads)


@pytest.mark.parametrize("name", FROZEN)
def test_gradients_of_the_others_are_as_before(name):
    made = frozen_network(name)
    assert {"unet": 6, "lenet": 2, "gated": 3, "between": 3}[name] <= len(
        made.frozen
    ) and not made.frozen & made.trained
    of_all, found = gradients(whole(name)), gradients(made)
    for key, want in of_all.items():
        if key.partition("/")[0] in made.frozen:
            assert not found[key].any() and (want.any() or "bias" in key or key.endswith("/b"))
        else:
            np.testing.assert_array_equal(found[key], want, err_msg=key)


def test_what_lies_before_all_that_is_trained_has_no_backward_pass():
    made = NETWORKS["lenet"]().freeze("conv1", "conv2")
    with Communicator(MPI.COMM_SELF) as alone, Executor(made, alone, get_backend("numpy"), 4, None, "float64") as e:
        reached = {segment.name for segment in e.program.backward}
    assert "dense3" in reached and not reached & {"conv1", "conv2", "pool1", "pool2", "maxpool1", "flatten"}


def filters(program):
    """Return the layers that have a separate kernel for the gradients of their parameters."""
    runs = [one for segment in program.backward for one in segment.operations if isinstance(one, Run)]
    return {one.layer for one in runs if one.timing is not None and one.timing.phase == "backward_filter"}


@pytest.mark.parametrize("name", FROZEN)
def test_nothing_is_computed_or_kept_for_gradients_that_nobody_reads(name):
    made, frozen = whole(name), frozen_network(name)
    programs = [compile_program(one, Strategy(), Target(batch=4)) for one in (made, frozen)]
    every, left = map(filters, programs)
    reached = {segment.name for segment in programs[1].backward}
    assert left == (every & reached) - frozen.frozen and every & reached & frozen.frozen
    blocks = parameter_blocks(made, Strategy(), 1)
    kept = [sum(layers_memory(program, blocks).values()) for program in programs]
    assert kept[1] < kept[0]


def test_only_norms_are_trained():
    """If only norms are trained, frozen layers between them propagate errors and compute no gradient of weights."""
    made = NETWORKS["resnet"]()
    trained = {name for name in made.layers if "norm" in name or "bn" in name}
    assert trained
    weights = [name for name in made.layers if name not in trained and made.own_parameters(name)]
    program = compile_program(made.freeze(*weights), Strategy(), Target(batch=4))
    assert not filters(program) and trained <= {segment.name for segment in program.backward}


def test_no_frozen_layer_is_replicated():
    dense = list(dense_layers(NETWORKS["lenet"]()))
    assert "dense4" in dense
    assert list(dense_layers(frozen_network("lenet"))) == [name for name in dense if name != "dense4"]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2, 3), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("name", FROZEN)
def test_under_random_strategies(name, seeds):
    with Communicator(MPI.COMM_SELF) as alone:
        losses, want, _ = descend(frozen_network(name), alone, Strategy(), steps=3)
        untouched = descend(frozen_network(name), alone, Strategy(), steps=3, rate=0.0).params
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        for seed in seeds:
            made = frozen_network(name)
            found, ours, places = descend(made, comm, random_strategy(made, comm.size, seed), steps=3)
            with comm.agreement():
                np.testing.assert_allclose(found, losses, rtol=1e-9)
                for key, array in ours.items():
                    np.testing.assert_allclose(array, want[key][places[key]], rtol=0, atol=1e-9, err_msg=key)
                    same = (array == untouched[key][places[key]]).all()
                    assert same or key.partition("/")[0] not in made.frozen, key
        assert any((want[key] != untouched[key]).any() for key in want)


@pytest.mark.ranks(1, 2)
def test_runs(comm, shared, config):
    """A configuration can freeze layers, and other ones when it is resumed; unknown names are an error."""
    train_run(config, ["training.epochs=1", 'training.freeze=["conv1_1", "bn*"]'], comm=comm)
    found = train_run(
        config, ["training.epochs=2", 'training.freeze=["predict"]', "training.clip_norm=1.0"], True, comm=comm
    )
    assert np.isfinite(found["loss"])
    for value, message in (
        ('["stem*"]', r"expected names or patterns of layers .*conv1_1.*, got 'stem\*'"),
        ('["*"]', "got all of them"),
    ):
        with pytest.raises(UserError, match=rf"training\.freeze: .*{message}"):
            train_run(config, [f"training.freeze={value}", f"output.directory={shared / 'x'}"], comm=comm)


SHAPE, BATCH, STEPS = (5, 4, 2), 3, 3
LEFT_OUT = ("norm", "aside", "dense2")
SCHEMES = [
    {"name": "blocking"},
    {"name": "per_layer"},
    {"name": "bucketed", "deterministic": True},
    {"name": "bucketed", "payload": "bfloat16"},
    {"name": "two_chunks", "first_layers": 2},
    {"name": "hierarchical"},
    {"name": "host_accumulate", "chunk": 2},
    {"name": "sharded"},
    {"name": "bucketed", "replicated_dense": 1},
    {"name": "bucketed", "replicated_dense": 2},
]


def untrained_network():
    """Return a network with a branch outside of the loss that has parameters of all kinds."""
    x = hg.Input(SHAPE, "x")
    y = hg.Conv(3, 3, padding=1, name="conv")(x)
    dense2 = hg.Dense(6, name="dense2")(hg.Flatten(name="flat")(x))
    aside = hg.Conv(2, 1, name="aside")(hg.BatchNorm(name="norm")(y))
    sum_ = hg.Add(name="add")(
        hg.Dense(6, name="dense1")(hg.Flatten(name="flat1")(y)), hg.Dense(6, name="last")(_pooled(y))
    )
    loss = hg.MeanSquaredError(name="mse")(sum_, hg.Input((6,), "target"))
    return hg.Network({"aside": aside, "vector": dense2, "loss": loss})


def _pooled(y):
    return hg.GlobalAveragePool(name="pool")(y)


@contextlib.contextmanager
def training(comm, strategy, dtype="float32"):
    with Executor(untrained_network(), comm, get_backend("numpy"), BATCH, strategy, dtype, seed=2) as executor:
        yield Trainer(executor, SGD(executor.store, momentum=0.5, weight_decay=0.1), Constant(0.05))


def train(trainer, litter):
    """Return this rank's parameters after some steps; before each step gradients are set to `litter`. Collective."""
    executor = trainer.executor
    for step in range(STEPS):
        trainer.synchronize()
        for array in executor.store.grads.values():
            array.fill(litter)
        for name, node in executor.network.inputs.items():
            executor.set_input(name, random_array((BATCH, *node.shape), name, step))
        trainer.step()
    trainer.synchronize()
    return copied(executor.store.params)


def is_left_out(name):
    return name.rpartition("/")[0] in LEFT_OUT


@pytest.mark.mpi
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: "-".join(map(str, s.values())))
def test_what_was_in_the_gradients_before_has_no_part(scheme):
    """Steps do not depend on the gradients' initial values, under every cut, also on ranks without elements."""
    with Communicator(MPI.COMM_SELF) as alone, training(alone, Strategy()) as trainer:
        whole = train(trainer, 0.0)
    # A sum in bfloat16 has 8 bits.
    allowed = 2e-2 if scheme.get("payload") else 2e-5
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in [*grids(comm.size, ("sample", "height")), {"height": comm.size}]:
            with training(comm, Strategy(parts, bucket_bytes=100, reduction=scheme)) as trainer:
                store = trainer.executor.store
                initial = copied(store.params)
                found = train(trainer, 7.0)
                for name, array in found.items():
                    if is_left_out(name):
                        assert not store.grads[name].any(), (parts, name)
                        np.testing.assert_array_equal(array, initial[name], err_msg=f"{parts} {name}")
                    else:
                        want = whole[name][store.box(name).slices()]
                        np.testing.assert_allclose(array, want, rtol=0, atol=allowed, err_msg=f"{parts} {name}")


@pytest.mark.mpi
def test_they_are_in_no_sum():
    with Communicator(MPI.COMM_WORLD) as comm, training(comm, Strategy({"sample": comm.size})) as trainer:
        store = trainer.executor.store
        summed = {name for bucket in store.buckets for name in bucket.names}
        assert summed == {name for name in store.params if not is_left_out(name)}
        train(trainer, 7.0)
        used = np.concatenate([store.grads[name].reshape(-1) for name in summed])
        clip = Clip(store, comm, 1.0)
        clip.measure()
        np.testing.assert_allclose(float(clip.norm), np.linalg.norm(used), rtol=1e-5)


@pytest.mark.mpi(min_size=2)
def test_they_are_in_checkpoints(shared):
    with Communicator(MPI.COMM_WORLD) as comm:
        path = shared / "checkpoint.h5"
        with training(comm, Strategy({"height": comm.size})) as trainer:
            saved = train(trainer, 0.0)
            whole = Snapshot.of(trainer.executor.store, trainer.optimizer, comm)
            if whole is not None:
                write_checkpoint(path, whole)
        comm.barrier()
        with training(comm, Strategy({"sample": comm.size}, reduction={"name": "sharded"})) as trainer:
            with comm.agreement():
                read_checkpoint(path, trainer.executor.store, trainer.optimizer)
            assert_arrays(saved, trainer.executor.store.params)
