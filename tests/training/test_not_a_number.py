"""A run notices NaN in what it computes, whatever layers and kernels are in between, on all ranks."""

import numpy as np
import pytest

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Add, BatchNorm, Conv, Input, MaxPool, MeanSquaredError, Network, ReLU
from halograd.layers.strategy import Strategy
from halograd.testing import random_array
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Diverged, Trainer

BATCH, SHAPE = 2, (8, 8, 3)

LAYERS = {
    "convolution": lambda x: Conv(3, 3, padding=1, activation="relu", name="middle")(x),
    "relu": lambda x: ReLU(name="middle")(x),
    "sum": lambda x: Add(activation="relu", name="middle")(x, x),
    "batch norm": lambda x: BatchNorm(activation="relu", name="middle")(x),
    "local batch norm": lambda x: BatchNorm(statistics="local", activation="relu", name="middle")(x),
    "max pooling": lambda x: MaxPool(2, name="middle")(x),
    "overlapping max pooling": lambda x: MaxPool(3, 2, padding=1, name="middle")(x),
}


def network(middle):
    y = middle(Conv(3, 1, name="first")(Input(SHAPE, "x")))
    return Network({"loss": MeanSquaredError(name="loss")(y, Input(y.shape, "target"))}, name="net")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_pixel_of_the_input(comm, name, backend, training):
    """The loss is NaN; a step is given up, and the parameters stay as they are."""
    built = network(LAYERS[name])
    with (
        Communicator(comm) as ranks,
        get_backend(backend) as kernels,
        Executor(built, ranks, kernels, BATCH, Strategy({"height": comm.size}), "float32") as executor,
    ):
        trainer = Trainer(executor, SGD(executor.store), Constant(0.1))
        for key, node in built.inputs.items():
            executor.set_input(key, random_array((BATCH, *node.shape), key))
        trainer.step()
        x = random_array((BATCH, *SHAPE), "x")
        x[1, 2, 5, 1] = np.nan
        executor.set_input("x", x)
        if training:
            with pytest.raises(Diverged, match="the loss is nan"):
                trainer.step()
            assert all(np.isfinite(array).all() for array in executor.store.params.values())
        else:
            executor.forward(training=False)
            assert np.isnan(executor.loss_value())
