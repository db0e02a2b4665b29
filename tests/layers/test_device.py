"""Tests of layers on the double of a device, also in 16 bits, and of the memory and halos of their steps."""

import contextlib
from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.device import as_dtype
from halograd.dtensor import axis_names
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.testing import grids, random_array, run_layer
from halograd.training.executor import Executor
from tests.kernels.cuda.host import HostBackend, HostLauncher, compiler
from tests.layers.cases import LAYERS
from tests.layers.norms import Probe, step
from tests.support.fake_device import FakeBackend
from tests.support.lean import check_allocations


class Sharpen(hg.Layer):
    """Custom layer that uses only NumPy functions, which device arrays implement."""

    stencil = hg.Stencil(kernel=3, padding=1)

    def parameters(self, shape):
        return {"amount": hg.Parameter((shape[-1],), init="ones", decay=False)}

    def forward(self, inputs, params, box):
        (x,) = inputs
        return x[:, 1:-1, 1:-1] - params["amount"] * laplacian(x)

    def backward(self, dy, inputs, params, box):
        (x,) = inputs
        dx = np.zeros_like(x)
        dx[:, 1:-1, 1:-1] = dy
        weighted = params["amount"] * dy
        for part in (dx[:, :-2, 1:-1], dx[:, 2:, 1:-1], dx[:, 1:-1, :-2], dx[:, 1:-1, 2:]):
            part -= weighted
        dx[:, 1:-1, 1:-1] += 4 * weighted
        return [dx], {"amount": -np.sum(dy * laplacian(x), axis=(0, 1, 2))}


class OnTheHost(Sharpen):
    """Custom layer that wrongly creates host arrays on a device."""

    def forward(self, inputs, params, box):
        return np.zeros(box.shape)


def laplacian(x):
    around = x[:, :-2, 1:-1] + x[:, 2:, 1:-1] + x[:, 1:-1, :-2] + x[:, 1:-1, 2:]
    return around - 4 * x[:, 1:-1, 1:-1]


SPATIAL = [(7, 6, 4)]
OF_DEVICES = {**LAYERS, "custom": (lambda: Sharpen("l"), SPATIAL)}


def same(found, expected):
    for key, want in expected.items():
        bound = 1000 * np.finfo("float64").eps * max(1.0, np.abs(want).max(initial=0))
        np.testing.assert_allclose(found[key], want, rtol=0, atol=bound, err_msg=key)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", OF_DEVICES)
def test_layers_compute_what_they_compute_on_the_host(turn, name):
    make, shapes = OF_DEVICES[name]
    with Communicator(MPI.COMM_WORLD) as comm:
        axes = axis_names(len(shapes[0]) + 1)[1:-1] or ("sample",)
        axis = axes[(turn + comm.size) % len(axes)]
        kernels = FakeBackend()
        expected = run_layer(make, shapes, comm, {axis: comm.size}, steps=2)
        found = run_layer(make, shapes, comm, {axis: comm.size}, steps=2, backend=kernels)
        with comm.agreement():
            same(found or {}, expected or {})
        assert set(kernels.device.synchronizations) <= {"get()"}, "only to look at the results"
        kernels.close()


NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="needs g++ to run CUDA kernels on the CPU")


def several(x, t):
    """Return a weighted sum of losses, one of them for training only."""
    return (
        hg.SoftmaxCrossEntropy()(x, t)
        + 0.5 * hg.Dice("softmax")(x, t)
        + hg.training_only(2 * hg.Tversky(0.2, 1, "softmax")(x, t))
    )


LOSSES = {
    "mean squared": (lambda: hg.MeanSquaredError("loss"), (6, 5, 3), (6, 5, 3)),
    "mean absolute": (lambda: hg.AbsoluteError("loss"), (6, 5, 3), (6, 5, 3)),
    "huber": (lambda: hg.Huber(0.3, name="loss"), (6, 5, 3), (6, 5, 3)),
    "similarity": (lambda: hg.StructuralSimilarity(2.0, 3, name="loss"), (6, 5, 3), (6, 5, 3)),
    "gradients": (lambda: hg.GradientError("sobel", name="loss"), (6, 5, 3), (6, 5, 3)),
    "ensemble": (lambda: hg.CRPS(3, name="loss"), (6, 5, 3), (6, 5, 1)),
    "focal": (lambda: hg.Focal(name="loss"), (6, 5, 3), (6, 5, 3)),
    "binary": (lambda: hg.BinaryCrossEntropyWithLogits(name="loss"), (6, 5, 3), (6, 5, 3)),
    "tversky": (lambda: hg.Tversky(0.3, 0.7, "softmax", name="loss"), (6, 5, 3), (6, 5, 1)),
    "several": (lambda: several, (6, 5, 3), (6, 5, 1)),
    "dice": (lambda: hg.Dice("softmax", name="loss"), (6, 5, 3), (6, 5, 1)),
    "dice per sample": (lambda: hg.Dice("sigmoid", "sample", name="loss"), (6, 5, 3), (6, 5, 3)),
    "cross-entropy": (lambda: hg.SoftmaxCrossEntropy(name="loss"), (6, 5, 3), (6, 5, 1)),
    "weighted": (
        lambda: hg.SoftmaxCrossEntropy([1.0, 2.0, 0.5], "weights", 0.1, ignore_index=2, name="loss"),
        (6, 5, 3),
        (6, 5, 1),
    ),
}


def loss_and_gradient(make, shape, target, comm, kernels, parts, wrong=False, weights=None):
    nodes = [hg.Input(shape, "x"), hg.Input(target, "t", "compute" if target == shape else "int64")]
    nodes += [] if weights is None else [hg.Input(weights, "w")]
    network = hg.Network({"loss": make()(*nodes)})
    with Executor(network, comm, kernels, 2, Strategy(parts), "float64", probed=["x"]) as executor:
        executor.set_input("x", random_array((2, *shape), "x"))
        targets = np.floor(np.abs(random_array((2, *target), "t")) * 100) % shape[-1]
        targets = targets / 2 if target == shape else targets
        executor.set_input("t", targets + 7 if wrong else targets)
        if weights is not None:
            executor.set_input("w", np.maximum(random_array((2, *weights), "w"), 0))
        executor.forward()
        loss = executor.loss_value()
        executor.backward()
        return loss, executor.gather("x", gradient=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_compute_what_they_compute_on_the_host(name):
    from halograd.kernels.numpy import NumpyBackend

    make, shape, target = LOSSES[name]
    with Communicator(MPI.COMM_WORLD) as comm:
        kernels, parts = FakeBackend(), {"height": comm.size}
        expected, gradient = loss_and_gradient(make, shape, target, comm, NumpyBackend(), parts)
        found, ours = loss_and_gradient(make, shape, target, comm, kernels, parts)
        assert found == pytest.approx(expected, rel=1e-13)
        if comm.rank == 0:
            np.testing.assert_allclose(ours, gradient, rtol=0, atol=1e-14)
        assert set(kernels.device.synchronizations) <= {"get()"}
        kernels.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("weights", [(6, 5, 1), (1, 1, 1), (1,)], ids=str)
@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=NEEDS_COMPILER)])
def test_weighted_losses_compute_what_they_compute_on_the_host(cuda, weights):
    """Weighted losses on a device equal those on the host, by device kernels or by functions of its arrays."""
    from halograd.kernels.numpy import NumpyBackend

    with Communicator(MPI.COMM_WORLD) as comm:
        kernels = FakeBackend(HostBackend(HostLauncher()) if cuda else None)
        for name, (make, shape, target) in LOSSES.items():
            if name == "several":
                continue
            for normalization in ("count", "weights"):

                def made(make=make, normalization=normalization):
                    return make().changed(normalization=normalization)

                given = shape, target, comm
                parts = {"width": comm.size}
                expected, gradient = loss_and_gradient(made, *given, NumpyBackend(), parts, weights=weights)
                found, ours = loss_and_gradient(made, *given, kernels, parts, weights=weights)
                assert found == pytest.approx(expected, rel=1e-13), name
                if comm.rank == 0:
                    np.testing.assert_allclose(ours, gradient, rtol=0, atol=1e-14, err_msg=name)
        assert set(kernels.device.synchronizations) <= {"get()"}
        kernels.close()


@pytest.mark.ranks(1)
@NEEDS_COMPILER
def test_a_target_that_is_no_class_makes_the_loss_undefined():
    """A target that is no class makes the loss NaN on a device, where the host does not read targets."""
    make, shape, target = LOSSES["cross-entropy"]
    kernels = FakeBackend(HostBackend(HostLauncher()))
    with Communicator(MPI.COMM_WORLD) as comm:
        loss, _ = loss_and_gradient(make, shape, target, comm, kernels, {}, wrong=True)
    kernels.close()
    assert np.isnan(loss)


@pytest.mark.ranks(1)
def test_a_custom_layer_that_returns_an_array_of_the_host_is_refused():
    kernels = FakeBackend()
    with Communicator(MPI.COMM_WORLD) as comm, pytest.raises(ValueError, match="expected an array on fake:0"):
        run_layer(lambda: OnTheHost("l"), SPATIAL, comm, {}, backend=kernels)
    kernels.close()


#: With 300 equal rows, whose gradients are added up in more than 16 bits.
IN_16_BITS = {**LAYERS, "pad repeated": (lambda: hg.Pad(((0, 0), (300, 2)), "replicate", name="l"), [(7, 6, 4)])}

#: The loss is a sum of terms of both signs; here it is smaller than a term, so its error is compared with the largest.
CANCELLING = ("response norm", "rows")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_layers(name):
    kernels, (make, shapes) = FakeBackend(), IN_16_BITS[name]
    axes = axis_names(len(shapes[0]) + 1)[1:-1] or ("sample",)
    shift = {f"x{i}": rounding(f"x{i}", shape) for i, shape in enumerate(shapes)}
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in islice(grids(comm.size, axes), 2):
            expected = run_layer(make, shapes, comm, parts, dtype="float32", shift=shift)
            found = run_layer(make, shapes, comm, parts, dtype="bfloat16", backend=kernels, shift=shift)
            if expected and name in CANCELLING:
                expected["loss"], found["loss"] = ([*r["loss"], np.abs(expected["y"]).max()] for r in (expected, found))
            wrong = [k for k in expected or () if not near(found[k], expected[k])]
            comm.agree(AssertionError(f"{parts}: {wrong} differ") if wrong else None)
    kernels.close()


@pytest.mark.ranks(1)
def test_sines_of_steps_that_16_bits_would_round():
    """bfloat16 holds whole numbers up to 256: the step 999 of a diffusion model would have the sines of 1000."""
    kernels, steps = FakeBackend(), np.array([[999.0], [257.0]])
    shift, phase = {"x0": steps - random_array((2, 1), "x0", 0)}, steps * 10_000.0 ** (-np.arange(3) / 3)
    with Communicator(MPI.COMM_WORLD) as comm:
        found = run_layer(*LAYERS["sines"], comm, {}, dtype="bfloat16", backend=kernels, shift=shift)
    kernels.close()
    expected = np.concatenate([np.cos(phase), np.sin(phase)], 1)
    np.testing.assert_allclose(found["y"].astype(np.float64), expected, atol=2**-8)


def rounding(name, shape):
    """Return the rounding error of the random inputs of a test in bfloat16."""
    x = random_array((2, *shape), name, 0)
    return x.astype(as_dtype("bfloat16")).astype(np.float64) - x


def near(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.abs(found - expected).max(initial=0) <= 6 * 2.0**-8 * max(np.abs(expected).max(initial=0), 1e-3)


LEAN_LAYERS = {
    "conv": lambda x: hg.Conv(8, 3, padding=1)(x),
    "conv stride 2": lambda x: hg.Conv(32, 3, 2, 1, activation="relu")(x),
    "transposed": lambda x: hg.ConvTranspose(8, 3, 2, 1, 1)(x),
    "max pool": lambda x: hg.MaxPool(3, 1, 1)(x),
    "average pool": lambda x: hg.AveragePool(3, 1, 1, count_include_pad=False)(x),
    "global average pool": lambda x: hg.GlobalAveragePool()(x),
    "dense": lambda x: hg.Dense(20)(hg.Flatten()(x)),
    "add": lambda x: hg.Add()(hg.ReLU()(x), hg.Tanh()(x)),
    "add relu": lambda x: hg.Add("relu")(hg.ReLU()(x), x),
    "concat": lambda x: hg.Concat()(hg.ReLU()(x), x),
    "leaky": lambda x: hg.LeakyReLU()(x),
    "sigmoid": lambda x: hg.Sigmoid()(x),
    "gelu": lambda x: hg.GELU()(x),
    "silu": lambda x: hg.SiLU()(x),
    "pad": lambda x: hg.Pad(2, "circular")(hg.Pad((1, -1))(x)),
    "gate": lambda x: x * hg.Sigmoid()(hg.Dense(x.shape[-1])(hg.GlobalAveragePool()(x))),
    "embedding": lambda x: x + hg.Dense(x.shape[-1])(hg.GlobalAveragePool()(x)),
    "slopes": lambda x: hg.PReLU("channel")(x),
    "scale": lambda x: hg.Scale(bias=True)(x),
    "stochastic depth": lambda x: hg.StochasticDepth(0.4)(x),
    "global max": lambda x: hg.GlobalMaxPool()(x),
    "adaptive pools": lambda x: hg.AdaptiveAveragePool((3, 5))(hg.AdaptiveMaxPool((9, 8))(x)),
    "pixels": lambda x: hg.PixelUnshuffle(4)(hg.PixelShuffle(2)(x)),
    "reshape": lambda x: hg.Reshape((32, 64, 32))(hg.Flatten()(x)),
    "tokens": lambda x: hg.Reshape((-1, 2 * x.shape[-1]))(x),
    "softmax": lambda x: hg.Softmax()(x),
    "log softmax": lambda x: hg.LogSoftmax()(x),
    "mish": lambda x: hg.Mish()(x),
    "affine": lambda x: 1 - x / 2,
    "channel shuffle": lambda x: hg.ChannelShuffle(2)(x),
    "dropout": lambda x: hg.Dropout(0.3)(x),
    "channel dropout": lambda x: hg.ChannelDropout(0.3)(x),
    "nearest": lambda x: hg.Resize(2)(x),
    "bilinear": lambda x: hg.Resize(2, mode="bilinear")(x),
    "bilinear, any ratio": lambda x: hg.Resize(size=(50, 71), mode="bilinear")(x),
}


NORMS = {
    "batch": hg.BatchNorm,
    "group": lambda activation=None: hg.GroupNorm(2, activation=activation),
    "instance": lambda activation=None: hg.InstanceNorm(activation=activation),
    "layer": lambda activation=None: hg.LayerNorm(activation=activation),
    "channels": lambda activation=None: hg.LayerNorm("channels", activation=activation),
}
OTHERS = {
    **{f"{key} norm": lambda x, make=make: make()(x) for key, make in NORMS.items()},
    **{f"{key} norm relu": lambda x, make=make: make(activation="relu")(x) for key, make in NORMS.items()},
    **{f"{key} norm elu": lambda x, make=make: make(activation="elu")(x) for key, make in NORMS.items()},
    "residual": lambda x: hg.BatchNorm()(hg.Conv(8, 1, bias=False)(x), x),
    "residual relu": lambda x: hg.BatchNorm(activation="relu")(hg.Conv(8, 1, bias=False)(x), x),
    "local norm": lambda x: hg.BatchNorm(statistics="local")(x),
    "reshape": lambda x: hg.Reshape((8, 16, 16))(hg.Flatten()(x)),
    "relu": lambda x: hg.ReLU()(x),
    "negative slope": lambda x: hg.LeakyReLU(-0.2)(x),
    "elu": lambda x: hg.ELU()(x),
    "tanh": lambda x: hg.Tanh()(x),
    "over channels": lambda x: hg.Concat()(hg.ChannelMean()(x), hg.ChannelMax()(x), hg.Exp()(hg.Flip("width")(x))),
    "clamp": lambda x: hg.Clamp(-0.5, 0.7)(x),
    "hard sigmoid": lambda x: hg.HardSigmoid()(x),
    "hard swish": lambda x: hg.HardSwish()(x),
    "softplus": lambda x: hg.Softplus()(x),
    "responses": lambda x: hg.LocalResponseNorm(3)(x),
    "weight norm": lambda x: hg.Conv(8, 3, padding=1, weight_norm=True, activation="relu")(x),
    "wide weight norm": lambda x: hg.Conv(64, 5, 4, 2, weight_norm=True)(x),
    "transposed relu": lambda x: hg.ConvTranspose(8, 3, 2, 1, 1, activation="relu")(x),
}
LEAN_NORMS = [f"{key} norm relu" for key in NORMS] + ["local norm"]


@contextlib.contextmanager
def compiled(build, shape, comm, parts, backend="numpy", batch=2, layers=None):
    """Return a filled executor of `build`'s layers after a pointwise convolution; `layers` have their own cuts."""
    x = hg.Input(shape, "x")
    y = build(hg.Conv(shape[-1], 1, name="before")(x))
    network = hg.Network({"y": y, "loss": Probe("probe")(y, hg.Input(y.shape, "g"))})
    strategy = Strategy(parts, layers or {})
    with Executor(network, comm, get_backend(backend), batch, strategy, "float32", probed=["x"]) as executor:
        executor.set_input("x", random_array((batch, *shape), "x"))
        executor.set_input("g", random_array((batch, *y.shape), "g"))
        yield executor


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("name", [*LEAN_LAYERS, *LEAN_NORMS, "responses", "wide weight norm"])
def test_a_step_allocates_no_array(name, backend):
    """A step allocates no array: every block has at least 256 KiB, more than NumPy's casting buffers."""
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        compiled({**OTHERS, **LEAN_LAYERS}[name], (64, 64, 16), comm, {"width": comm.size}, backend) as executor,
    ):
        step(executor)
        check_allocations(comm, lambda: step(executor), (96 if name in LEAN_NORMS else 192) * 1024)


#: Layers with channels cut, and how: name -> layers, parts of the one that is called "cut".
CUTS = {
    "filters": (lambda x: hg.Conv(16, 3, padding=1, activation="relu", name="cut")(x), {"channel": 2}),
    "sums": (lambda x: hg.Conv(16, 3, padding=1, activation="relu", name="cut")(x), {"input_channel": 2}),
    "filters, stride 2": (lambda x: hg.Conv(32, 3, 2, 1, name="cut")(x), {"channel": 2}),
    "units": (lambda x: hg.Dense(20, name="cut")(hg.Flatten()(x)), {"channel": 2}),
    "features": (lambda x: hg.Dense(20, name="cut")(hg.Flatten()(x)), {"input_channel": 2}),
    "batch norm": (lambda x: hg.BatchNorm(activation="relu", name="cut")(x), {"channel": 2}),
    "max pool": (lambda x: hg.MaxPool(3, 1, 1, name="cut")(x), {"channel": 2}),
    "concat": (lambda x: hg.Concat(name="cut")(hg.ReLU()(x), x), {"channel": 2}),
    "on one rank": (lambda x: hg.Conv(16, 3, padding=1, name="cut")(x), {"sample": 1}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("name", CUTS)
def test_a_step_with_cut_channels_allocates_no_array(name, backend):
    build, parts = CUTS[name]
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        compiled(build, (64, 64, 16), comm, {"width": comm.size}, backend, layers={"cut": parts}) as executor,
    ):
        step(executor)
        check_allocations(comm, lambda: step(executor), 192 * 1024)


ROW = 6 * 2 * 4
#: Two blocks of 4 rows of 6 positions, 2 channels, float32: layer -> bytes that each rank sends in a step.
HALOS = {
    "k3 pool": (lambda x: hg.MaxPool(3, 1, 1)(x), [2 * ROW, 2 * ROW]),
    "pool without overlap": (lambda x: hg.AveragePool(2)(x), [0, 0]),
    # Outputs 0, 1 read the rows 0..4, outputs 2 read 4..6: rank 0 lacks row 4, whose gradient comes back to rank 1.
    "k3 s2 pool": (lambda x: hg.MaxPool(3, 2)(x), [ROW, ROW]),
    "nearest": (lambda x: hg.Resize(2)(x), [0, 0]),
    "bilinear": (lambda x: hg.Resize(2, mode="bilinear")(x), [2 * ROW, 2 * ROW]),
    "transposed without overlap": (lambda x: hg.ConvTranspose(2, 2, 2)(x), [0, 0]),
    # Row i reaches the outputs 2i - 1 ... 2i + 1: output 7 of rank 0 lacks row 4 of x, whose gradient lacks row 7
    # of dy, 12 positions long.
    "transposed": (lambda x: hg.ConvTranspose(2, 3, 2, 1, 1)(x), [2 * ROW, ROW]),
    "relu": (lambda x: hg.ReLU()(x), [0, 0]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", HALOS)
def test_halo_bytes_are_those_of_the_formula(name):
    build, want = HALOS[name]
    with Communicator(MPI.COMM_WORLD) as comm, compiled(build, (8, 6, 2), comm, {"height": 2}, batch=1) as executor:
        comm.counters.reset()
        step(executor)
        sent = comm.counters.snapshot()["halo"].bytes if "halo" in comm.counters.snapshot() else 0
        assert sent == want[comm.rank]


def gradients(build, backend, keeps):
    """Return loss and gradients of the second of two steps of a layer between others; `keeps` keeps all values."""
    y = build(hg.Conv(8, 1, name="before")(hg.Input((16, 16, 8), "x")))
    y = 0.5 * y  # which needs neither its input nor its output in the backward pass, as the convolution does
    y = hg.Conv(3, 1, name="behind")(y) if len(y.shape) > 1 else hg.Dense(3, name="behind")(y)
    network = hg.Network({"loss": hg.MeanSquaredError(name="mse")(y, hg.Input(y.shape, "t"))})
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
@pytest.mark.parametrize("kind", dict.fromkeys([*LEAN_LAYERS, *OTHERS]))
def test_gradients_without_what_is_not_named(kind, backend):
    build = {**LEAN_LAYERS, **OTHERS}[kind]
    found, want = (gradients(build, backend, keeps) for keeps in (False, True))
    assert found.keys() == want.keys()
    for key, array in found.items():
        assert np.isfinite(array).all(), key
        assert np.array_equal(array, want[key]), key
