"""Helpers for tests of one loss of random predictions: targets, an executor, value and gradient, scores."""

import numpy as np

from halograd.kernels import get_backend
from halograd.layers import Input, Network
from halograd.layers.strategy import Strategy
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from tests.layers.norms import close

SHAPE, BATCH = (5, 3, 4), 3
AXES = ("sample", "height", "width")
CLASS_WEIGHTS = (0.5, 2.0, 0.0, 1.5)


def target(kind, shape, batch=BATCH):
    """Return a random target of this kind for predictions of this sample shape."""
    rng = np.random.default_rng(7)
    if kind == "class":
        return rng.integers(0, shape[-1], (batch, *shape[:-1], 1))
    if kind == "mask":
        return rng.integers(0, 2, (batch, *shape)).astype(float)
    return rng.random((batch, *shape)) if kind == "share" else rng.standard_normal((batch, *shape))


def make_executor(make, shape, given, comm, parts, dtype="float64", backend="numpy", trainable=True):
    """Create an executor of one loss of an input ``x`` of this sample shape.

    `given` are the other inputs, whose values are set: the target ``t``, and the weights ``w`` if there are any.
    """
    inputs = dict(zip("tw", given))
    nodes = [Input(a.shape[1:], name, "int32" if a.dtype.kind == "i" else "compute") for name, a in inputs.items()]
    network, probed = Network({"loss": make()(Input(shape, "x"), *nodes)}), ["x"] if trainable else []
    kernels, strategy = get_backend(backend), Strategy(parts)
    executor = Executor(network, comm, kernels, len(given[0]), strategy, dtype, trainable=trainable, probed=probed)
    for name, array in inputs.items():
        executor.set_input(name, array)
    return executor


def run_loss(make, inputs, comm, parts, dtype="float64", backend="numpy", valid=None):
    """Return the loss and its gradient, the same on all ranks. Collective over `comm`.

    `inputs` are arrays of the whole batch: prediction, target, perhaps weights. Only the first `valid` samples count;
    by default all do.
    """
    x, *given = inputs
    with make_executor(make, x.shape[1:], given, comm, parts, dtype, backend) as executor:
        executor.set_input("x", x)
        # Twice: what the first step leaves in the buffers must not matter.
        for count in (len(x), len(x) if valid is None else valid):
            executor.mode.valid = count
            executor.forward()
            loss = executor.loss_value()
            executor.backward()
        found = executor.program.values["x"]
        place, block = found.layout.boxes[comm.rank].slices(), executor.runner.view(found.dy)
        # As one message: a `Gather` has channels, which take longer to make than all that is computed here.
        losses, places, blocks = zip(*comm.allgather_objects((loss, place, block)))
        assert len(set(losses)) == 1
        dx = np.full(x.shape, np.nan, block.dtype)
        for place, block in zip(places, blocks):
            dx[place] = block
        return loss, dx


def check(found, want, factor=20):
    """Assert that loss and gradient equal `want` in float64, within `factor` roundings (`close`)."""
    loss, dx = found
    assert abs(loss - want[0]) <= 1e-13 * max(1, abs(want[0])), f"expected a loss of {want[0]}, got {loss}"
    close(dx, want[1], factor=factor)


def scores_of(executor, metrics=()):
    """Return the scores of the current batch from an evaluation. Collective."""
    evaluation = Evaluation(executor, metrics=metrics)
    evaluation.begin()
    executor.forward(training=False)
    evaluation.add()
    found = evaluation.finish()
    evaluation.close()
    return found
