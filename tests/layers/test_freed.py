"""What a layer does not name in the backward pass is overwritten: the gradients are those of a run that keeps all."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import (
    ELU,
    BatchNorm,
    Clamp,
    Conv,
    ConvTranspose,
    Dense,
    Flatten,
    GroupNorm,
    HardSigmoid,
    HardSwish,
    Input,
    LayerNorm,
    LeakyReLU,
    LocalResponseNorm,
    MeanSquaredError,
    Network,
    ReLU,
    Reshape,
    Softplus,
    Tanh,
)
from halograd.testing import random_array
from halograd.training.executor import Executor
from tests.layers.test_lean import LAYERS

NORMS = {
    "batch": BatchNorm,
    "group": lambda activation=None: GroupNorm(2, activation=activation),
    "layer": lambda activation=None: LayerNorm(activation=activation),
    "channels": lambda activation=None: LayerNorm("channels", activation=activation),
}
OTHERS = {
    **{f"{key} norm": lambda x, make=make: make()(x) for key, make in NORMS.items()},
    **{f"{key} norm relu": lambda x, make=make: make(activation="relu")(x) for key, make in NORMS.items()},
    **{f"{key} norm elu": lambda x, make=make: make(activation="elu")(x) for key, make in NORMS.items()},
    "residual": lambda x: BatchNorm()(Conv(8, 1, bias=False)(x), x),
    "residual relu": lambda x: BatchNorm(activation="relu")(Conv(8, 1, bias=False)(x), x),
    "local norm": lambda x: BatchNorm(statistics="local")(x),
    "reshape": lambda x: Reshape((8, 16, 16))(Flatten()(x)),
    "relu": lambda x: ReLU()(x),
    "negative slope": lambda x: LeakyReLU(-0.2)(x),
    "elu": lambda x: ELU()(x),
    "tanh": lambda x: Tanh()(x),
    "clamp": lambda x: Clamp(-0.5, 0.7)(x),
    "hard sigmoid": lambda x: HardSigmoid()(x),
    "hard swish": lambda x: HardSwish()(x),
    "softplus": lambda x: Softplus()(x),
    "responses": lambda x: LocalResponseNorm(3)(x),
    "weight norm": lambda x: Conv(8, 3, padding=1, weight_norm=True, activation="relu")(x),
    "transposed relu": lambda x: ConvTranspose(8, 3, 2, 1, 1, activation="relu")(x),
}


def gradients(build, backend, keeps):
    """Loss and gradients of the second of two steps: a layer between others, whose values nobody keeps."""
    y = build(Conv(8, 1, name="before")(Input((16, 16, 8), "x")))
    y = 0.5 * y  # which needs neither its input nor its output in the backward pass, as the convolution does
    y = Conv(3, 1, name="behind")(y) if len(y.shape) > 1 else Dense(3, name="behind")(y)
    network = Network({"loss": MeanSquaredError(name="mse")(y, Input(y.shape, "t"))})
    kept, dtype = network.layers if keeps else (), "float64" if backend == "numpy" else "float32"
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(network, alone, get_backend(backend), 2, dtype=dtype, probed=["x"], kept=kept) as executor,
    ):
        for step in range(2):
            executor.mode.step = step
            for name, node in network.inputs.items():
                executor.set_input(name, random_array((2, *node.shape), name, step))
            executor.forward()
            loss = executor.loss_value()
            executor.backward()
            executor.reducer.finish()
        found = {key: np.array(array) for key, array in executor.store.grads.items()}
        return found | {"loss": np.array(loss), "dx": executor.gather("x", gradient=True)}


@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("kind", dict.fromkeys([*LAYERS, *OTHERS]))
def test_gradients_without_what_is_not_named(kind, backend):
    build = {**LAYERS, **OTHERS}[kind]
    found, want = (gradients(build, backend, keeps) for keeps in (False, True))
    assert found.keys() == want.keys()
    for key, array in found.items():
        assert np.isfinite(array).all(), key
        assert np.array_equal(array, want[key]), key
