"""Whole training steps on a device or its double: networks, optimizers, and counts of the device's operations."""

import numpy as np

from halograd.kernels.numpy import NumpyBackend
from halograd.layers import Conv, Input, Layer, MeanSquaredError, Network, ReLU
from halograd.layers.strategy import Strategy
from halograd.models import lenet5, mesh, resnet, unet
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, Adam, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.support.fake_device import FakeBackend, FakeDevice
from tests.training.own_optimizer import RMSprop
from tests.training.steps import fill

STEPS = 3
NETWORKS = {
    "mesh": lambda: mesh(resolution=(20, 16), channels=3, widths=(4, 6), convs=1, decoder=True, pos_weight=3.0),
    "resnet": lambda: resnet((1, 1, 1, 1), classes=5, resolution=36, width=4, name="small resnet"),
    "unet": lambda: unet((16, 24), channels=2, classes=3, width=4, levels=2, name="small unet"),
    "lenet": lambda: lenet5(classes=4, resolution=28),
}
OPTIMIZERS = {
    "sgd": lambda store: SGD(store, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda store: Adam(store, weight_decay=1e-3),
    "adamw": lambda store: AdamW(store, weight_decay=1e-2),
    "lars": lambda store: LARS(store, weight_decay=1e-3),
    "own": lambda store: RMSprop(store, weight_decay=1e-3),
}


def counted(device):
    """Return the number of the host's waits so far if the device is a double."""
    if not isinstance(device, FakeDevice):
        return {}
    return {"syncs": len(device.synchronizations), "waits": device.waits, "idled": device.idled}


def train(
    network,
    comm,
    kernels,
    parts,
    optimizer="sgd",
    clip=None,
    dtype="float64",
    reduction=None,
    steps=STEPS,
    graph=False,
    split=1,
):
    """Return losses, parameters, and the device's counts between the first and the last step. Collective."""
    strategy = Strategy(parts, bucket_bytes=4096, **(reduction or {}))
    losses, counts = [], {}
    with Executor(network, comm, kernels, 4, strategy, dtype, seed=3, graph=graph, parts=split) as executor:
        trainer = Trainer(executor, OPTIMIZERS[optimizer](executor.store), Constant(0.01), clip_norm=clip)
        device = executor.device
        for step in range(steps):
            for part in range(1, split):
                fill(executor, 100 * step + part)
                trainer.add()
            fill(executor, step)
            if step == 1:
                counts = counted(device)
            losses.append(trainer.step())
        counts = {key: count - counts[key] for key, count in counted(device).items() if counts}
        trainer.synchronize()
        params = {k: executor.device.to_host(v).copy() for k, v in executor.store.params.items()}
        return np.array([float(loss) for loss in losses]), params, counts


def assert_near(found, params, expected, wanted, bound):
    """Check that losses and parameters are within `bound` of those of other kernels, relative to their size."""
    np.testing.assert_allclose(found, expected, rtol=bound)
    for key, array in wanted.items():
        np.testing.assert_allclose(params[key], array, rtol=0, atol=bound * max(1, np.abs(array).max()), err_msg=key)


class Doubling(Layer):
    """Layer that allocates arrays in every step."""

    def output_shape(self, shape):
        return shape

    def forward(self, xs, params, box):
        return 2 * xs[0]

    def backward(self, dy, xs, params, box):
        return [2 * dy], {}


def own_layer():
    x, target = Input((12, 8, 2), "x"), Input((12, 8, 3), "target")
    y = Doubling(name="own")(ReLU(name="relu1")(Conv(4, 3, padding=1, name="first")(x)))
    y = Conv(3, 3, padding=1, name="last")(ReLU(name="relu2")(y))
    return Network({"prediction": y, "loss": MeanSquaredError(name="mse")(y, target)}, "own")


ROUNDING = 2.0**-8  # half the distance of neighbors, relative


def close(found, expected, params, ours, start, layers, where=""):
    """Check losses up to one rounding per layer, and the updates of parameters up to a multiple of it."""
    np.testing.assert_allclose(found, expected, rtol=2 * layers * ROUNDING, err_msg=where)
    moved = np.sqrt(sum(np.sum((params[k] - start[k]) ** 2) for k in params))
    apart = np.sqrt(sum(np.sum((params[k] - ours[k].astype(np.float64)) ** 2) for k in params))
    assert apart <= 4 * layers * ROUNDING * moved, f"{where}: {apart:.2e} apart after moving by {moved:.2e}"


def check_rounded(name, comm, kernels, parts, optimizer="sgd", clip=None, dtype="bfloat16", what=""):
    """Check that training in 16 bits is that in float32 up to rounding; return parameters and counts. Collective."""
    network = NETWORKS[name]()
    _, start, _ = train(network, comm, NumpyBackend(), parts, optimizer, clip, steps=0)
    expected, params, _ = train(network, comm, NumpyBackend(), parts, optimizer, clip, "float32")
    found, ours, counts = train(network, comm, kernels, parts, optimizer, clip, dtype)
    close(found, expected, params, ours, start, len(network.layers), what)
    return ours, counts


def both(name, comm, parts, **options):
    """Train on the host and on the device, and check that results agree up to the order of sums."""
    network = NETWORKS[name]()
    expected, params, _ = train(network, comm, NumpyBackend(), parts, **options)
    kernels = FakeBackend()
    try:
        found, ours, counts = train(network, comm, kernels, parts, **options)
    finally:
        kernels.close()
    assert np.isfinite(expected).all()
    assert_near(found, ours, expected, params, 1000 * np.finfo(options.get("dtype", "float64")).eps)
    return counts
