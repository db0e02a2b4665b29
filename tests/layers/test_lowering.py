"""Tests of cut channels: the summand of each rank, exact under every cut, messages; needs of layers as intervals."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import Box
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.lowering import partial_boxes, read_boxes
from halograd.layers.strategy import AXES, Strategy, layout_of
from halograd.testing import check_layer, random_array
from halograd.training.executor import Executor
from tests.layers.cuts import IMAGE, drawn_parts
from tests.layers.geometries import CROWDED, NASTY, skew
from tests.layers.graphs import Centre, Gate, poison

CHANNELS = ("channel", "input_channel")
BACKENDS = [("numpy", "float64"), ("onednn", "float32")]

# -- arithmetic -----------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """Draw output shape, input channels, parts, and number of idle ranks."""
    made, read = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    spatial = draw(st.sampled_from([(), (3,), (4, 2)]))
    shape = (draw(st.integers(1, 3)), *spatial, made)
    return shape, read, draw(drawn_parts(made, read)), draw(st.integers(0, 2))


@given(cases())
def test_summands_of_every_output_cover_the_input_channels_once(case):
    """The ranks with summands of an output element read disjoint blocks that together are all input channels."""
    shape, read, parts, idle = case
    output = layout_of(shape, parts, math.prod(parts.values()) + idle)
    partial = partial_boxes(output, parts)
    blocks = read_boxes(partial, read, parts)
    summed = np.zeros((*shape, read), int)
    for box, block in zip(partial, blocks):
        summed[(*box.slices(), slice(*block.ranges[-1]))] += 1
    # Blocks without elements compute nothing: what is missing is missing for a whole element, never in part.
    assert (summed == 1).all()


@given(cases())
def test_a_rank_computes_a_summand_of_what_it_owns(case):
    shape, _, parts, idle = case
    output = layout_of(shape, parts, math.prod(parts.values()) + idle)
    for owned, box in zip(output.boxes, partial_boxes(output, parts)):
        assert box.contains(owned) and box.ranges[:-1] == owned.ranges[:-1]
        assert bool(box.size) == bool(owned.size)
        if parts["input_channel"] == 1:
            assert box == owned


@given(cases())
def test_reading_keeps_everything_but_the_channels(case):
    shape, read, parts, idle = case
    ranks = math.prod(parts.values()) + idle
    needed = layout_of((*shape[:-1], read), {**parts, "channel": 1, "input_channel": 1}, ranks).boxes
    needed = needed.replace(-1, ((0, read),) * (parts["channel"] * parts["input_channel"]))
    for want, got in zip(needed, read_boxes(needed, read, parts)):
        assert got.ranges[:-1] == want.ranges[:-1] and want.contains(got)
        assert parts["input_channel"] > 1 or got == want


# -- exactness ------------------------------------------------------------------------------------


def conv(name, filters=5, **options):
    _, kernel, stride, padding, dilation = NASTY[name]
    return lambda: hg.Conv(filters, kernel, stride, padding, dilation, **options)


def axes(name):
    """Return the channel axes and one of the spatial axes in turn; test_exact covers cuts of all of them."""
    others = ("depth", "height", "width")[3 - len(NASTY[name][0]) :]
    return (others[list(NASTY).index(name) % len(others)], *CHANNELS)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", NASTY)
def test_convolutions_exact_on_every_grid(name, monkeypatch):
    poison(monkeypatch)
    check_layer(conv(name), (*NASTY[name][0], 3), axes=axes(name), gradient=False, tolerance=256)


@pytest.mark.ranks(2, 3, 4)
def test_all_axes_at_once():
    check_layer(lambda: hg.Conv(5, 3, 2, 1, activation="relu"), (9, 8, 4), axes=IMAGE, gradient=False, batch=3)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend, dtype", BACKENDS)
@pytest.mark.parametrize(("filters", "channels"), [(7, 4), (4, 7), (4, 4)])
def test_exact_with_relu_and_without_bias(filters, channels, backend, dtype):
    shape, options = (6, 7, channels), {"gradient": False, "backend": backend, "dtype": dtype, "batch": 1}
    check_layer(lambda: hg.Conv(filters, 3, padding=1, activation="relu"), shape, axes=("height", *CHANNELS), **options)
    check_layer(lambda: hg.Conv(filters, 3, 2, 1, bias=False), shape, axes=CHANNELS, **options)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("spatial", [(32, 7), (6, 7)])
def test_exact_on_uneven_and_empty_blocks(spatial, monkeypatch):
    skew(monkeypatch)
    poison(monkeypatch)
    layer = lambda: hg.Conv(5, 3, 2, 1, activation="relu")  # noqa: E731
    check_layer(layer, (*spatial, 3), axes=("height", *CHANNELS), gradient=False, batch=3)


@pytest.mark.ranks(6, 8)
@pytest.mark.parametrize("name", CROWDED)
def test_exact_on_more_ranks_than_rows(name):
    check_layer(conv(name, filters=8, activation="relu"), (*NASTY[name][0], 4), axes=axes(name), gradient=False)


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("backend, dtype", BACKENDS)
@pytest.mark.parametrize(("batch", "bias"), [(1, True), (3, True), (3, False)])
def test_dense_exact_on_every_grid(batch, bias, backend, dtype):
    options = {"gradient": False, "backend": backend, "dtype": dtype}
    check_layer(lambda: hg.Dense(7, bias), (9,), batch=batch, axes=("sample", *CHANNELS), **options)


def chain():
    x = hg.Input((6, 5, 4), "x")
    y = hg.Conv(6, 3, padding=1, activation="relu", name="a")(x)
    y = hg.Conv(5, 3, 2, 1, bias=False, name="b")(hg.ReLU(name="r")(y))
    y = hg.Dense(4, name="d")(hg.Flatten(name="f")(y))
    return hg.Network({"y": y, "loss": hg.MeanSquaredError(name="loss")(y, hg.Input((4,), "target"))})


def gradients(comm, strategy, kernels):
    """Return the whole gradients of a step of `chain`, and the loss; on rank 0. Collective."""
    with Executor(chain(), comm, kernels, 3, strategy, "float64", probed=["x"]) as executor:
        for name, node in executor.network.inputs.items():
            executor.set_input(name, random_array((3, *node.shape), name))
        executor.forward()
        loss = executor.loss_value()
        executor.backward()
        executor.reducer.finish()
        found = executor.store.gather(comm, executor.store.grads)
        if found is not None:
            found = {k: v.copy() for k, v in found.items()}
        dx = executor.gather("x", gradient=True)
    return (None if found is None or dx is None else {**found, "dx": dx}), loss


FEWER = {
    "on one rank": {"a": {"sample": 1}, "b": {"channel": 2}, "d": {"channel": 2}},
    "sums on fewer": {"a": {"input_channel": 2}, "r": {"width": 2}, "b": {"input_channel": 2}, "d": {"sample": 2}},
    "on all, then on one": {"a": {"channel": 3}, "b": {"sample": 1}, "f": {"sample": 1}, "d": {"input_channel": 3}},
}


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("name", FEWER)
def test_layers_on_fewer_ranks(name):
    with Communicator(MPI.COMM_WORLD) as comm, get_backend("numpy") as kernels:
        found, loss = gradients(comm, Strategy({"sample": comm.size}, FEWER[name]), kernels)
        with Communicator(MPI.COMM_SELF) as alone:
            want, expected = gradients(alone, Strategy(), kernels)
    assert loss == pytest.approx(expected, rel=1e-13)
    for key, array in want.items() if found else ():
        np.testing.assert_allclose(found[key], array, rtol=1e-12, atol=1e-13, err_msg=key)


# -- what is held and what moves ------------------------------------------------------------------

BATCH, ROWS, COLUMNS, READ, MADE = 4, 8, 5, 8, 12


def wide(parts):
    """Return a network of one convolution with `parts` between whole samples; all activations are float32."""
    x = hg.Input((ROWS, COLUMNS, READ), "x")
    y = hg.Conv(READ, 1, name="before")(x)
    y = hg.Conv(MADE, 3, padding=1, name="wide")(y)
    y = hg.ReLU(name="after")(y)
    target = hg.Input(y.shape, "target")
    network = hg.Network({"loss": hg.BinaryCrossEntropyWithLogits(name="loss")(y, target)})
    whole = {"height": math.prod(parts.values())}
    channels = {k: v for k, v in parts.items() if k != "input_channel"}
    channels["channel"] = parts.get("channel", 1) * parts.get("input_channel", 1)
    layers = {"before": {**parts, "channel": parts.get("input_channel", 1), "input_channel": 1}}
    layers["before"]["sample"] = parts.get("sample", 1) * parts.get("channel", 1)
    return network, Strategy(whole, {**layers, "wide": parts, "after": channels})


def traffic(comm, parts):
    """Return counters of a step with the layer `wide` on this rank, shapes of its parameters, buckets. Collective."""
    network, strategy = wide(parts)
    with Executor(network, comm, get_backend("numpy"), BATCH, strategy, "float32") as executor:
        for name, node in network.inputs.items():
            executor.set_input(name, random_array((BATCH, *node.shape), name))
        for _ in range(2):
            comm.counters.reset()
            executor.forward()
            executor.loss_value()
            executor.backward()
            executor.reducer.finish()
        shapes = {k: v.shape for k, v in executor.store.params.items() if k.startswith("wide/")}
        return comm.counters.snapshot(), shapes, executor.store.buckets


def nbytes(counted, kind):
    return counted[kind].bytes if kind in counted else 0


@pytest.mark.ranks(2, 4)
def test_the_gradient_of_a_filter_block_is_summed_by_its_holders_only():
    """The gradient of a filter block is summed among its holders only; a block of one rank is not summed."""
    with Communicator(MPI.COMM_WORLD) as comm:
        for sample in (1, 2):
            channel = comm.size // sample
            counted, shapes, buckets = traffic(comm, {"sample": sample, "channel": channel})
            assert shapes == {"wide/w": (MADE // channel, 3, 3, READ), "wide/b": (MADE // channel,)}
            several = [b for b in buckets if b.holders.members_each > 1]
            mine = [b for b in buckets if "wide/w" in b.names]
            assert len(mine) == 1 and (mine[0] in several) == (sample > 1)
            assert mine[0].grads.size >= 9 * READ * MADE // channel
            assert nbytes(counted, "allreduce") == sum(b.grads.nbytes for b in several)


@pytest.mark.ranks(2, 4)
def test_filter_cuts_gather_x_and_bring_its_gradient_back():
    """A cut of filters gathers x and returns its gradient.

    x comes whole from `before`, which cuts samples: each rank gathers the parts that other ranks own, and returns their
    gradients. There are no partial sums.
    """
    with Communicator(MPI.COMM_WORLD) as comm:
        counted, _, _ = traffic(comm, {"channel": comm.size})
        share = BATCH * ROWS * COLUMNS * READ * 4 // comm.size
        assert nbytes(counted, "channel") == 0
        # Forward the own block goes to all others; backward what was computed for the others goes to them.
        sent = nbytes(counted, "redistribute") + nbytes(counted, "halo")
        others = comm.size - 1
        y = BATCH * ROWS * COLUMNS * MADE * 4 // comm.size**2
        # From blocks of samples to blocks of channels, gathered, and back; then y to the loss's rows and back.
        x = BATCH * ROWS * COLUMNS * READ * 4 // comm.size**2
        assert nbytes(counted, "halo") == 2 * others * share
        assert sent - nbytes(counted, "halo") == 2 * others * (x + y)


@pytest.mark.ranks(2, 4)
def test_cuts_of_the_sum_add_partial_sums_and_gather_their_gradient():
    """A cut of input channels sums partial results y and gathers their gradient.

    Every rank has a summand of all of y and owns 1/P of it: it sends every other rank that rank's part. Its own part of
    dy goes to all ranks. x is read without messages.
    """
    with Communicator(MPI.COMM_WORLD) as comm:
        counted, shapes, _ = traffic(comm, {"input_channel": comm.size})
        assert shapes["wide/w"] == (MADE, 3, 3, READ // comm.size)
        assert shapes["wide/b"] == ((MADE,) if comm.rank == 0 else (0,))
        block = BATCH * ROWS * COLUMNS * MADE * 4 // comm.size
        assert nbytes(counted, "channel") == 2 * (comm.size - 1) * block
        assert nbytes(counted, "halo") == 0


RANKS = 8


class Window(hg.Layer):
    """Custom layer that declares only a stencil."""

    def __init__(self):
        super().__init__()
        self.stencil = hg.Stencil(3, 2, ((2, 0), (0, 1)), 2)


class Diagonal(hg.Layer):
    """Custom layer whose needs along the width depend on the height, so that they are no product of intervals."""

    def input_boxes(self, box, *shapes):
        return (box.replace(2, box.start[2] + box.start[1], box.stop[2] + box.start[1]),)


LAYERS = {
    "relu": (hg.ReLU, 1),
    "conv": (lambda: hg.Conv(6, 3, padding=1), 1),
    "conv, stride 2": (lambda: hg.Conv(6, (5, 2), 2, ((1, 2), (0, 1))), 1),
    "conv, dilated": (lambda: hg.Conv(6, 3, 1, "same", dilation=2), 1),
    "transposed": (lambda: hg.ConvTranspose(4, 3, 2, 1, 1), 1),
    "max pool": (lambda: hg.MaxPool(3, 2, 1), 1),
    "average pool": (lambda: hg.AveragePool(2, 2), 1),
    "bilinear": (lambda: hg.Resize(2, mode="bilinear"), 1),
    "nearest, any ratio": (lambda: hg.Resize(size=(13, 7)), 1),
    "own stencil": (Window, 1),
    "two reaches": (lambda: Gate(2), 2),
    "whole samples": (Centre, 1),
    "concat": (hg.Concat, 3),
}
CUTS = [(1, 1, 4, 2, 1, 1), (2, 1, 3, 1, 1, 1), (3, 1, 1, 2, 1, 1), (8, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)]


def check(layer, shapes, some):
    parts, samples = dict(zip(AXES, some)), [shape[1:] for shape in shapes]
    output = layout_of((shapes[0][0], *layer.output_shape(*samples)), parts, RANKS)
    inputs = [layout_of(shape, parts, RANKS) for shape in shapes]
    for i, shape in enumerate(shapes):
        found = layer.needed_blocks(i, inputs, output).clipped(shape)
        for made, have in zip(output.boxes, found):
            want = layer.input_boxes(made, *samples)[i] & Box.of_shape(shape) if made.size else made
            assert have == want or not (want.size or have.size), (made, want)
    found = layer.gradient_blocks(inputs[0], output)
    for owned, have in zip(inputs[0].boxes, found or ()):
        want = layer.gradient_box(owned, samples[0], output.shape[1:])
        assert have == want or not (have.size or want.size)


@pytest.mark.parametrize("some", CUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_need_what_they_say(name, some):
    make, inputs = LAYERS[name]
    check(make(), [(3, 12, 9, 4)] * inputs, some)


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("kind", [hg.Conv, hg.MaxPool])
def test_nasty_geometries(name, kind):
    shape, kernel, stride, padding, dilation = NASTY[name]
    layer = (
        hg.Conv(3, kernel, stride, padding, dilation)
        if kind is hg.Conv
        else hg.MaxPool(kernel, stride, padding, dilation)
    )
    for some in CUTS:
        check(layer, [(2, *shape, 2)], some)


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 8))
def test_any_window(kernel, stride, padding, dilation, blocks):
    layer = hg.Conv(2, kernel, stride, padding, dilation)
    try:
        layer.output_shape((11, 10, 2))
    except ValueError:
        assume(False)  # it reads only padding somewhere
    check(layer, [(1, 11, 10, 2)], (1, 1, blocks, 1, 1, 1))


@pytest.mark.parametrize("some", [(1, 1, 1, 1, 4, 1), (2, 1, 2, 1, 2, 1)])
def test_channels(some):
    for layer in (hg.ReLU(), hg.MaxPool(3, 2, 1), hg.Concat()):
        check(layer, [(3, 12, 9, 6)] * (2 if isinstance(layer, hg.Concat) else 1), some)
    check(hg.Dense(9), [(5, 7)], (2, 1, 1, 1, 1, 1))


def test_what_is_no_product_is_refused():
    with pytest.raises(UserError, match=r"Diagonal: expected the box needed of its inputs to be a product"):
        layout = layout_of((1, 8, 8, 2), {"height": 4}, 4)
        Diagonal().needed_blocks(0, [layout], layout)


class Weighting(hg.Layer):
    """Custom layer ``y = x * g``, whose second input may have other extents."""

    def forward(self, inputs, params, box):
        return inputs[0] * inputs[1]

    def backward(self, dy, inputs, params, box):
        x, g = inputs
        axes = tuple(axis for axis, n in enumerate(g.shape) if n < dy.shape[axis])
        return [dy * g, (dy * x).sum(axes, keepdims=True)], {}


class WeightingByChannel(Weighting):
    def input_boxes(self, box, *shapes):
        return box, Box.of_ranges([box.ranges[0], *[(0, 1)] * (box.ndim - 2), box.ranges[-1]])


class Sums(hg.Layer):
    """Custom layer with fewer axes than its input."""

    def output_shape(self, *shapes):
        return shapes[0][-1:]


def test_inputs_of_other_extents_are_not_filled_up_with_padding():
    """The default boxes of a gate ``(1, 1, C)`` would have one element, and zeros at all other positions."""
    x, g = hg.Input((6, 5, 2), "x"), hg.Input((1, 1, 2), "gate")
    with pytest.raises(ValueError, match=r"Weighting: .* the output \(6, 5, 2\), got \(6, 5, 2\), \(1, 1, 2\)"):
        Weighting()(x, g)
    with pytest.raises(ValueError, match=r"Sums: .* the output \(2,\), got \(6, 5, 2\); override input_boxes"):
        Sums()(x)
    assert Weighting()(x, x).shape == WeightingByChannel()(x, g).shape == x.shape


@pytest.mark.mpi
def test_a_custom_gate_per_channel():
    check_layer(WeightingByChannel, [(6, 5, 2), (1, 1, 2)])


class Scaled(hg.Layer):
    """y = a * x, whose gradient of a is a sum over all positions."""

    def parameters(self, shape):
        return {"a": hg.Parameter((shape[-1],), "ones")}

    def forward(self, inputs, params, box):
        return params["a"] * inputs[0]

    def backward(self, dy, inputs, params, box):
        return [params["a"] * dy], {"a": np.sum(dy * inputs[0], axis=(0, 1, 2))}


def test_a_layer_of_the_user_adds_in_float32_where_activations_have_16_bits():
    """NumPy adds 4096 ones in bfloat16 to 256: most of a gradient of parameters would be lost."""
    with get_backend("numpy") as kernels, Communicator(MPI.COMM_SELF) as comm:
        kernels.emulate = True
        x = hg.Input((64, 64, 2), "x")
        network = hg.Network({"loss": hg.MeanSquaredError()(Scaled("scaled")(x), hg.Input((64, 64, 2), "t"))})
        with Executor(network, comm, kernels, 1, Strategy({}), "bfloat16") as executor:
            executor.device.assign(executor.store.params["scaled/a"], np.ones(2, np.float32))
            executor.set_input("x", np.ones((1, 64, 64, 2)))
            executor.set_input("t", np.zeros((1, 64, 64, 2)))
            executor.forward()
            executor.loss_value()
            executor.backward()
            executor.reducer.finish()
            # d/da of the mean of (a x - t)^2 over 2 channels is 2 a x^2 / 2.
            np.testing.assert_allclose(executor.store.grads["scaled/a"], 1, rtol=1e-2)
