"""Tests of the training step: formulas on one process, clipping against torch, NaN on any rank, random combinations."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd import training
from halograd.comm import Communicator, Reduction
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.testing import grids, random_array
from halograd.training.clipping import Clip
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD, Adam
from halograd.training.schedules import Constant, StepDecay
from halograd.training.trainer import Diverged, Trainer
from tests.training.combinations import Case, differences, trained
from tests.training.steps import assert_arrays, copied

BATCH, STEPS, RATE, MOMENTUM = 4, 4, 0.5, 0.9


def fill_gradients(store):
    rng = np.random.default_rng(3)
    for array in store.grads.values():
        array[...] = rng.standard_normal(array.shape)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("max_norm, scale", [(1.0, None), (1e9, 1.0)])
def test_clip(make_store, bucket_bytes, max_norm, scale):
    store = make_store(bucket_bytes)
    fill_gradients(store)
    norm = np.sqrt(sum(np.sum(g * g) for g in store.grads.values()))
    clip = Clip(store, None, max_norm)
    clip.measure()
    found = float(clip.factor[0]), float(clip.norm)
    assert found == pytest.approx((scale or max_norm / (norm + 1e-6), norm), rel=1e-14)


@pytest.mark.torch
def test_clip_of_torch(make_store):
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    store = make_store()
    fill_gradients(store)
    twins = [torch.nn.Parameter(torch.tensor(g)) for g in store.grads.values()]
    for twin in twins:
        twin.grad = twin.detach().clone()
    torch.nn.utils.clip_grad_norm_(twins, 0.7)
    clip = Clip(store, None, 0.7)
    clip.measure()
    for twin, gradient in zip(twins, store.grads.values()):
        np.testing.assert_allclose(clip.factor * gradient, twin.grad.numpy(), rtol=1e-13)


def test_public_names():
    assert all(hasattr(training, name) for name in training.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        training.Trainr  # noqa: B018


def network():
    x, t = hg.Input((8, 6, 2), "x"), hg.Input((8, 6, 1), "target")
    y = hg.BatchNorm(activation="relu", name="bn1")(hg.Conv(3, 3, padding=1, bias=False, name="conv1")(x))
    y = hg.Conv(1, 3, padding=1, name="conv2")(y)
    return hg.Network({"prediction": y, "loss": hg.BinaryCrossEntropyWithLogits(name="bce")(y, t)}, name="two")


def fill(executor, step):
    executor.set_input("x", random_array((executor.batch, 8, 6, 2), "x", step))
    executor.set_input("target", (random_array((executor.batch, 8, 6, 1), "t", step) > 0).astype(float))


def reference(clip):
    """Return losses and parameters of SGD with momentum on one process, by its formula."""
    losses, velocity = [], {}
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(network(), alone, get_backend("numpy"), BATCH, None, "float64") as e,
    ):
        for step in range(STEPS):
            fill(e, step)
            e.forward(training=True)
            e.backward()
            losses.append(e.loss_value())
            e.reducer.finish()
            norm = np.sqrt(sum(np.sum(g * g) for g in e.store.grads.values()))
            scale = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
            for name, p in e.store.params.items():
                velocity[name] = MOMENTUM * velocity.get(name, 0) + scale * e.store.grads[name]
                p -= RATE * 0.5**step * velocity[name]
        return losses, copied(e.store.params)


@pytest.mark.mpi
@pytest.mark.parametrize("clip", [None, 0.05])
def test_steps(comm, clip):
    """Losses and parameters equal those of one process on every grid, with updates delayed to the next step."""
    losses, params = reference(clip)
    with Communicator(comm) as ranks:
        for parts in grids(ranks.size, ("sample", "height", "width")):
            strategy = Strategy(parts, bucket_bytes=64)
            with Executor(network(), ranks, get_backend("numpy"), BATCH, strategy, "float64") as executor:
                optimizer = SGD(executor.store, momentum=MOMENTUM)
                trainer = Trainer(executor, optimizer, StepDecay(RATE, (1, 2, 3), 0.5), clip)
                found = []
                for step in range(STEPS):
                    fill(executor, step)
                    found.append(trainer.step())
                trainer.synchronize()
                assert found == pytest.approx(losses, rel=1e-12)
                assert (trainer.gradient_norm is None) == (clip is None)
                for name, want in params.items():
                    np.testing.assert_allclose(executor.store.params[name], want, rtol=1e-10, atol=1e-12)


@pytest.mark.mpi
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_update_is_made_by_the_optimizer_that_began_it(comm, clip):
    """Another trainer finishes the updates of the first one, with or without a call of `synchronize`."""
    found = []
    with Communicator(comm) as ranks:
        for synchronized in (True, False):
            strategy = Strategy({"height": ranks.size}, bucket_bytes=64)
            with Executor(network(), ranks, get_backend("numpy"), BATCH, strategy, "float64") as executor:
                for number, rate in enumerate((0.1, 0.5)):
                    optimizer = SGD(executor.store, momentum=0.9 * (1 - number))
                    trainer = Trainer(executor, optimizer, Constant(rate), clip if number else None)
                    fill(executor, number)
                    trainer.step()
                    if synchronized:
                        trainer.synchronize()
                trainer.synchronize()
                found.append(copied(executor.store.params))
    assert_arrays(*found)


@pytest.mark.mpi
@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
def test_executors_that_share_parameters_finish_the_updates_of_each_other(comm, scheme):
    """Two trainers with batches of two sizes, and an evaluation, with or without calls of `synchronize`."""
    found = []
    with Communicator(comm) as ranks:
        strategy = Strategy({"height": ranks.size}, bucket_bytes=64, reduction=Scheme(scheme))

        def executor(batch, **options):
            return Executor(network(), ranks, get_backend("numpy"), batch, strategy, "float64", **options)

        for synchronized in (True, False):
            with executor(BATCH) as large, executor(2, store=large.store) as small:
                optimizer = SGD(large.store, momentum=MOMENTUM)
                trainers = [Trainer(made, optimizer, Constant(RATE)) for made in (large, small)]
                with executor(BATCH, store=large.store, trainable=False) as evaluated:
                    losses = []
                    for number in (0, 1, 1, 0):
                        fill(trainers[number].executor, number)
                        losses.append(trainers[number].step())
                        if synchronized:
                            trainers[number].synchronize()
                        fill(evaluated, 7)
                        evaluated.forward(training=False)
                        losses.append(evaluated.loss_value())
                found.append(losses)
    assert found[0] == found[1]


def test_a_backward_pass_that_an_error_ends_updates_nothing():
    """Sums that it has started are dropped; the next batches train as if there had been none."""
    found = []
    with Communicator(MPI.COMM_SELF) as alone:
        for broken in (False, True):
            strategy = Strategy({}, bucket_bytes=1)
            with Executor(network(), alone, get_backend("numpy"), BATCH, strategy, "float64") as executor:
                trainer = Trainer(executor, SGD(executor.store, momentum=MOMENTUM), Constant(RATE))
                for number in (0, 1, 2):
                    fill(executor, number)
                    if number != 1:
                        trainer.step()
                    elif broken:
                        calls = executor._backward
                        last, calls[-1] = calls[-1], interrupt
                        with pytest.raises(KeyboardInterrupt):
                            trainer.step()
                        calls[-1] = last
                trainer.synchronize()
                found.append(copied(executor.store.params))
    assert_arrays(*found)


def interrupt():
    raise KeyboardInterrupt


BAD = {
    "loss": ("conv2/b", np.nan, None, "the loss is nan; lower schedule.learning_rate, or set training.clip_norm"),
    "gradients": ("bn1/gamma", 1e30, 1.0, "the norm of the gradients is inf; lower schedule.learning_rate"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", BAD)
def test_diverged(comm, case):
    """A loss or gradient that is not finite stops all ranks before it changes the parameters."""
    name, value, clip, message = BAD[case]
    with Communicator(comm) as ranks, Executor(network(), ranks, get_backend("numpy"), BATCH) as executor:
        trainer = Trainer(executor, SGD(executor.store), Constant(0.1), clip)
        fill(executor, 0)
        params = executor.store.params
        trainer.step()
        trainer.synchronize()
        params[name][...] = value
        before = copied(params)
        with np.errstate(all="ignore"), pytest.raises(Diverged, match=f"step 1: {message}"):
            trainer.step()
        executor.reducer.finish()
        assert_arrays(params, before)
        params["conv1/w"][0, 1, 1, 0] = np.inf
        params["conv2/b"][...] = 0
        with pytest.raises(Diverged, match=r"step 1: parameter conv1/w .*; lower"):
            trainer.synchronize()
        params["conv1/w"][0, 1, 1, 0] = 0
        executor.store.state["norm1/mean"] = np.array([0.0, np.nan])  # as it is after the statistics of a bad batch
        with pytest.raises(Diverged, match="step 1: running statistic norm1/mean"):
            trainer.synchronize()


@pytest.mark.mpi
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_second_trainer_leaves_the_last_update_to_the_first(comm, clip):
    """Its own optimizer would make this update with the state and the rate of no step; sums of its checks are freed."""
    found = []
    for synchronizes in (True, False):
        strategy = Strategy({"height": comm.size}, reduction=Scheme("sharded"))
        with Communicator(comm) as ranks:
            with Executor(network(), ranks, get_backend("numpy"), BATCH, strategy, "float64") as executor:
                trainer = Trainer(executor, SGD(executor.store, momentum=MOMENTUM), Constant(RATE), clip)
                fill(executor, 0)
                trainer.step()
                if synchronizes:
                    trainer.synchronize()
                opened = sum(not item.closed for item in ranks._open)
                again = Trainer(executor, Adam(executor.store), Constant(0.01), clip)
                assert sum(not item.closed for item in ranks._open) == opened
                fill(executor, 1)
                again.step()
                again.synchronize()
                found.append(copied(executor.store.params))
            assert all(item.closed for item in ranks._open if isinstance(item, Reduction)), "sums end with the executor"
    assert_arrays(found[1], found[0])


@pytest.mark.mpi
@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
def test_executors_of_one_store_train_in_turn(comm, scheme):
    """An update that waits for the next pass of one executor is made before the passes of another one."""
    found = []
    for synchronizes in (True, False):
        strategy = Strategy({"height": comm.size}, reduction=Scheme(scheme))
        with (
            Communicator(comm) as ranks,
            Executor(network(), ranks, get_backend("numpy"), BATCH, strategy, "float64") as first,
            Executor(network(), ranks, get_backend("numpy"), BATCH, strategy, "float64", store=first.store) as second,
        ):
            optimizer, losses = SGD(first.store, momentum=MOMENTUM), []
            trainers = [Trainer(executor, optimizer, Constant(RATE)) for executor in (first, second)]
            for step in range(4):
                trainer = trainers[step % 2]
                fill(trainer.executor, step)
                losses.append(trainer.step())
                if synchronizes:
                    trainer.synchronize()
            trainer.synchronize()
            found.append({**copied(first.store.params), "losses": np.array(losses)})
    assert_arrays(found[1], found[0])


@pytest.mark.mpi
def test_needs_gradients(comm):
    with (
        Communicator(comm) as ranks,
        Executor(network(), ranks, get_backend("numpy"), BATCH, trainable=False) as executor,
        pytest.raises(ValueError, match=r"executor: .*trainable=True, got trainable=False"),
    ):
        Trainer(executor, SGD(executor.store), Constant(0.1))


SAMPLES, SHAPE = 2, (8, 8, 3)
LAYERS = {
    "convolution": lambda x: hg.Conv(3, 3, padding=1, activation="relu", name="middle")(x),
    "relu": lambda x: hg.ReLU(name="middle")(x),
    "sum": lambda x: hg.Add(activation="relu", name="middle")(x, x),
    "batch norm": lambda x: hg.BatchNorm(activation="relu", name="middle")(x),
    "local batch norm": lambda x: hg.BatchNorm(statistics="local", activation="relu", name="middle")(x),
    "max pooling": lambda x: hg.MaxPool(2, name="middle")(x),
    "overlapping max pooling": lambda x: hg.MaxPool(3, 2, padding=1, name="middle")(x),
}


def around(middle):
    y = middle(hg.Conv(3, 1, name="first")(hg.Input(SHAPE, "x")))
    return hg.Network({"loss": hg.MeanSquaredError(name="loss")(y, hg.Input(y.shape, "target"))}, name="net")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_pixel_of_the_input(comm, name, backend, training):
    """One NaN in the input makes the loss NaN through every layer; the parameters do not change."""
    built = around(LAYERS[name])
    with (
        Communicator(comm) as ranks,
        get_backend(backend) as kernels,
        Executor(built, ranks, kernels, SAMPLES, Strategy({"height": comm.size}), "float32") as executor,
    ):
        trainer = Trainer(executor, SGD(executor.store), Constant(0.1))
        for key, node in built.inputs.items():
            executor.set_input(key, random_array((SAMPLES, *node.shape), key))
        trainer.step()
        x = random_array((SAMPLES, *SHAPE), "x")
        x[1, 2, 5, 1] = np.nan
        executor.set_input("x", x)
        if training:
            with pytest.raises(Diverged, match="the loss is nan"):
                trainer.step()
            assert all(np.isfinite(array).all() for array in executor.store.params.values())
        else:
            executor.forward(training=False)
            assert np.isnan(executor.loss_value())


#: The oracle of batches in parts, averages, factors, schemes and weights of losses under other cuts.
CASES = 18


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(CASES))
def test_as_one_process(seed):
    case = Case(seed)
    with Communicator(MPI.COMM_SELF) as alone:
        want = trained(case, alone, Strategy())
    with Communicator(MPI.COMM_WORLD) as comm:
        wrong = differences(trained(case, comm, case.strategy(comm.size)), want)
        comm.agree(AssertionError(f"{case}: {', '.join(wrong)}") if wrong else None)
