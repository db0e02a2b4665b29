"""Tests of padding and transposed convolution, and of every kernel of a convolution under every cut."""

import itertools
import logging
import math
import os

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import Box
from halograd.kernels import get_backend
from halograd.kernels.onednn import OnednnBackend
from halograd.kernels.onednn.conv import ConvChoice
from halograd.kernels.onednn.program import ReferenceOnly
from halograd.layers import ChannelPad, Conv, ConvTranspose, Input, MeanSquaredError, Network, Pad, Roll, Slice, Sphere
from halograd.layers.padding import PadAxis
from halograd.layers.strategy import Strategy
from halograd.testing import check_layer, random_array, run_layer
from halograd.training.executor import Executor
from tests.layers.blocks import computed_in_blocks
from tests.layers.cases import TRANSPOSED, transposed
from tests.layers.geometries import brute_force_taps
from tests.support.refusals import refusals

SHAPE = (7, 6, 3)
DATA = st.data()


@given(
    st.sampled_from(["reflect", "replicate", "circular"]),
    st.integers(1, 9),
    st.integers(0, 8),
    st.integers(0, 8),
    st.data(),
)
def test_pieces_show_the_rows_that_numpy_shows(mode, extent, low, high, data):
    most = {"reflect": extent - 1, "circular": extent}.get(mode, 8)
    low, high = min(low, most), min(high, most)
    names = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    want = np.pad(np.arange(extent), (low, high), names[mode])
    a = data.draw(st.integers(0, len(want) - 1))
    b = data.draw(st.integers(a + 1, len(want)))
    found = []
    for number, span in enumerate(PadAxis(0, low, high, mode).spans(extent)):
        first, last = max(a, span.rows[0]), min(b, span.rows[1])
        if last > first:
            shown = list(range(*span.source(first, last)))
            if mode == "reflect" and number != 1:
                shown.reverse()
            found += shown * (last - first) if mode == "replicate" and number != 1 else shown
    assert found == want[a:b].tolist()


def around_the_sphere(x, north, south, west, east, poles=False, sign=1.0):
    """Return x ``(N, H, W, C)`` padded across the poles and around the longitudes, element by element."""
    n, h, w, c = x.shape
    y = np.empty((n, north + h + south, west + w + east, c))
    for i, j in np.ndindex(y.shape[1:3]):
        row, column, factor = i - north, j - west, np.ones(c)
        if not 0 <= row < h:
            row = -row - 1 + poles if row < 0 else 2 * h - 1 - row - poles
            column, factor = column + w // 2, factor * sign
        y[:, i, j] = factor * x[:, row, column % w]
    return y


SPHERES = {
    "plain": (((3, 2), (2, 5)), Sphere()),
    "poles": (((6, 3), (0, 1)), Sphere(poles=True)),
    "vectors": (((1, 7), (6, 0)), Sphere(sign=(1, -1, -1))),
    "one sign": (((2, 0), (1, 1)), Sphere(poles=True, sign=-1)),
}


@pytest.mark.parametrize("name", SPHERES)
def test_a_sphere_element_by_element(ranks, name):
    (rows, columns), sphere = SPHERES[name]
    found = run_layer(lambda: Pad((rows, columns), sphere, name="p"), [SHAPE], ranks, {})
    want = around_the_sphere(random_array((2, *SHAPE), "x0"), *rows, *columns, sphere.poles, sphere.sign)
    if found is not None:
        np.testing.assert_array_equal(found["y"], want)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["plain", "vectors"])
def test_a_sphere_is_exact_under_all_cuts(name):
    amounts, sphere = SPHERES[name]
    check_layer(lambda: Pad(amounts, sphere, name="p"), SHAPE, axes=("height", "width"))
    check_layer(lambda: Pad(amounts, sphere, name="p"), SHAPE, axes=("height", "channel"), gradient=False)


@pytest.mark.mpi
@pytest.mark.parametrize("cut", [("height", "width"), ("height", "channel"), ("channel", "width")])
def test_channels_of_zeros_are_exact_under_all_cuts(cut):
    """Also more than a block has."""
    check_layer(lambda: ChannelPad(1, 5, name="p"), (5, 6, 4), axes=cut)


def test_axes_of_a_sphere():
    """Latitudes and longitudes are the last two axes, or those that modes per axis name."""
    x, turned = Input((4, 5, 6, 2), "x"), Input((6, 5, 2), "turned")
    assert Pad(1, Sphere(longitude=2))(x).shape == (6, 7, 8, 2)
    assert list(Network(Pad(1, "sphere", name="p")(x)).layers) == ["p_height", "p_width", "p"]
    assert Pad(1, "sphere")(x).shape == (6, 7, 8, 2)
    layers = Network(Pad(1, ("circular", Sphere(longitude=0)), name="p")(turned)).layers
    assert list(layers) == ["p_width", "p_height"]  # across the poles first


MODES = ["reflect", "replicate", "circular", "sphere", ("zeros", "circular"), ("sphere", "circular")]


@pytest.mark.mpi
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_convolutions_pad_in_modes(mode):
    """A convolution with a mode of padding is the convolution without padding after a Pad, and keeps its name."""
    given = tuple("constant" if one == "zeros" else one for one in mode) if isinstance(mode, tuple) else mode

    def parts():
        pad, conv = Pad(((1, 1), (2, 2)), given, name="c_pad"), Conv(4, (3, 5), activation="silu", name="c")
        return lambda x: conv(pad(x))

    make = lambda: Conv(4, (3, 5), 1, (1, 2), padding_mode=mode, activation="silu", name="c")  # noqa: E731
    check_layer(make, SHAPE, gradient=mode == "sphere", tolerance=256.0)
    with Communicator(MPI.COMM_SELF) as alone:
        found, want = (run_layer(layer, [SHAPE], alone, {}) for layer in (make, parts))
    assert found.keys() == want.keys()
    for key in found:
        np.testing.assert_array_equal(found[key], want[key])


def test_a_convolution_that_is_called_twice_shares_its_padding():
    conv = Conv(3, 3, padding="same", padding_mode=("zeros", "circular"), name="c")
    network = Network(conv(conv(Input(SHAPE))))
    assert {"c", "c#2", "c_pad_width", "c_pad_width#2"} <= set(network.layers)
    assert list(network.parameters()) == ["c/w", "c/b"]
    kept = Conv(3, 3, 2, padding=1, padding_mode=("zeros", "circular"))
    assert kept.stencil.padding == ((1, 1), 0) and kept(Input(SHAPE)).shape == (4, 3, 3)
    assert Conv(3, 3, padding=1, padding_mode="zeros")(Input(SHAPE)).inputs[0].layer.name == "x"


@pytest.mark.mpi
def test_a_shift_comes_back():
    def layers():
        there, back = Roll((2, -1), name="there"), Roll((-2, 1), name="back")
        return lambda x: back(there(x))

    check_layer(layers, SHAPE, gradient=False)
    with Communicator(MPI.COMM_SELF) as alone:
        there, back = (run_layer(make, [SHAPE], alone, {}) for make in (lambda: Roll((2, -1)), layers))
    x = random_array((2, *SHAPE), "x0")
    np.testing.assert_array_equal(there["y"], np.roll(x, (2, -1), (1, 2)))
    np.testing.assert_array_equal(back["y"], x)


def test_every_mode_but_the_constant_is_a_layer_per_axis():
    x = Input(SHAPE)
    layers = Network(Pad(((1, 0), (2, 2)), "reflect", name="p")(x)).layers
    assert list(layers) == ["p_height", "p_width"] and all(node.layer.kind == "Pad" for node in layers.values())
    assert Pad(0, "reflect")(x) is x
    assert Pad(1)(x).shape == (9, 8, 3) == Pad((1, 1))(x).shape


test_refusals = refusals(
    (lambda: Pad(1, "mirror"), "mode: expected one of constant, reflect, replicate, circular, sphere, got 'mirror'"),
    (lambda: Pad(1, ("reflect", "mirror")), "circular, sphere, got 'mirror'"),
    (lambda: Pad(1, ("sphere", "reflect")), 'expected "circular" along the longitudes, axis 1 of 2'),
    (lambda: Pad(1, ("reflect",))(Input(SHAPE)), "expected one, or one for each of 2 spatial axes"),
    (lambda: Pad(1, "sphere")(Input((6, 7, 2))), "expected an even number of longitudes, .* got 7"),
    (lambda: Pad(((8, 0), (1, 1)), "sphere")(Input(SHAPE)), r"at most 7 rows of 7 in the mode sphere, got \(8, 0\)"),
    (lambda: Pad(((0, 0), (7, 0)), "sphere")(Input(SHAPE)), "at most 6 rows of 6 in the mode circular"),
    (lambda: Pad(((7, 0), (0, 0)), Sphere(poles=True))(Input(SHAPE)), "at most 6 rows of 7 in the mode sphere"),
    (lambda: Pad(1, "sphere")(Input((6, 2))), "latitudes and longitudes as the last two of 1 spatial axes"),
    (lambda: Pad(1, Sphere(sign=(1, -1)))(Input(SHAPE)), "sign: expected one per channel, 3, got 2"),
    (lambda: Sphere(sign=2), "sign: expected 1 or -1"),
    (lambda: Conv(2, 3, padding=1, padding_mode="constant"), "one of zeros, reflect, .* got 'constant'"),
    (lambda: Conv(2, 3, padding=4, padding_mode="reflect")(Input((4, 5, 2))), "at most 3 rows of 4 in the mode"),
    (lambda: Roll(1.5)(Input(SHAPE)), "expected a number of rows, or one for each of 2 spatial axes, got 1.5"),
    (lambda: Roll((1, 2, 3))(Input(SHAPE)), "one for each of 2 spatial axes"),
    (lambda: Pad(7, "reflect")(Input(SHAPE)), r"expected at most 6 rows of 7 in the mode reflect, got \(7, 7\)"),
    (lambda: Pad(7, "circular")(Input(SHAPE)), "expected at most 6 rows of 6 in the mode circular"),
    (lambda: Pad(-1, "circular")(Input(SHAPE)), "expected numbers of rows >= 0 in the mode circular"),
    (lambda: Pad(-4)(Input(SHAPE)), r"expected at least one row of \(7, 6\) to remain, got \(-1, -2\)"),
    (lambda: ChannelPad(1, -1), "expected numbers >= 0, got 1, -1; a Slice removes channels"),
    (lambda: ChannelPad(1, 2)(Input((4,))), r"ChannelPad: expected samples with spatial axes"),
    (lambda: Slice(2, 2), "expected first < last, both >= 0, got 2, 2"),
    (lambda: Slice(1, 4)(Input(SHAPE)), "expected at most 3, the channels of the input, got 4"),
    (lambda: Pad(((1, 1),))(Input(SHAPE)), "a pair for each of 2 spatial axes"),
)


@st.composite
def drawn(draw):
    columns = []
    for _ in range(2):
        kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        pads = (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
        more = draw(st.integers(0, max(stride, dilation) - 1))
        columns.append((draw(st.integers(6, 9)), kernel, stride, pads, more, dilation))
    return tuple(zip(*columns))


def output_shape(layer, shape):
    try:
        return layer.output_shape(shape)
    except ValueError:
        return None


@pytest.mark.mpi
@settings(max_examples=10)
@given(geometry=drawn())
def test_exact_on_drawn_geometries(geometry):
    spatial, *rest = geometry
    assume(output_shape(transposed(rest)(), (*spatial, 2)) is not None)
    check_layer(transposed(rest), (*spatial, 2), gradient=False, batch=1)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_input_boxes_hold_every_input_that_reaches_an_output(name):
    spatial, *geometry = TRANSPOSED[name]
    layer = transposed(geometry)()
    shape = (*spatial, 2)
    out = layer.output_shape(shape)
    for axis, (w, n, m) in enumerate(zip(layer.windows(shape), spatial, out)):
        for a in range(m):
            for b in range(a + 1, m + 1):
                box = Box.of_shape((1, *out)).replace(axis + 1, a, b)
                start, stop = layer.input_boxes(box, shape)[0].ranges[axis + 1]
                taps = {i: brute_force_taps(w.kernel, w.stride, w.pad_lo, w.dilation, i) for i in range(n)}
                reaching = [i for i, reached in taps.items() if any(a <= o < b for o in reached)]
                assert not reaching or (start <= reaching[0] and reaching[-1] < stop)
                assert 0 <= start <= stop <= n


@settings(max_examples=300)
@given(st.data())
def test_a_block_of_any_outputs_can_be_timed(data):
    """The work of a block of any extents can be timed, also of one that the padding would leave empty."""
    kernel, stride, dilation = (
        data.draw(st.tuples(n, n)) for n in (st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
    )
    padding = data.draw(st.one_of(st.just("same"), st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2)))
    more = [0 if padding == "same" else data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation)]
    layer = ConvTranspose(3, kernel, stride, padding, more, dilation)
    block = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    own = [(n - 1) * w.stride + w.extent - w.pad_lo - w.pad_hi for n, w in zip(block, layer.windows((*block, 2)))]
    wanted = tuple(max(1, m if data.draw(st.booleans()) else data.draw(st.integers(1, 12))) for m in own)
    local, shape = layer.of_outputs((*block, 2), wanted)
    assert local.output_shape(shape) == (*wanted, 3) and shape[-1] == 2
    assert all(n == m for n, m, have, want in zip(shape, block, own, wanted) if have == want)
    assert (local is layer) == (tuple(own) == wanted)


def test_shapes_parameters_and_flops():
    layer = ConvTranspose(6, 3, 2, 1, output_padding=1, groups=2)
    assert layer.output_shape((5, 4, 8)) == (10, 8, 6)
    assert ConvTranspose(6, 4, 3, "same").output_shape((5, 4, 8)) == (15, 12, 6)
    params = layer.parameters((5, 4, 8))
    assert params["w"].shape == (8, 3, 3, 3) and params["b"].shape == (6,)
    assert layer.flops((5, 4, 8)) == 2 * (8 * 9 * 3) * 20


test_errors_name_what_is_wrong = refusals(
    (lambda: ConvTranspose(4, 3, groups=3), r"filters \(4\) must be a positive multiple of groups \(3\)"),
    (lambda: ConvTranspose(4, 3, padding="full"), r"padding: expected 'same', numbers or .*'full'"),
    (lambda: ConvTranspose(4, 3, 2, output_padding=2)(Input((4, 4, 2))), r"output_padding: expected less than"),
    (lambda: ConvTranspose(4, 3, 2, "same", 1)(Input((4, 4, 2))), r"padding 'same' determines the output size"),
    (lambda: ConvTranspose(4, 2, padding=4)(Input((4, 4, 2))), r"leaves nothing of the output"),
    (lambda: ConvTranspose(4, 2, padding=-1)(Input((4, 4, 2))), r"padding: expected numbers >= 0"),
    (lambda: ConvTranspose(4, 2, padding=(1, 1, 1))(Input((4, 4, 2))), r"padding: expected one entry for each of 2"),
    (lambda: ConvTranspose(4, 2, groups=2)(Input((4, 4, 3))), r"3 input channels are not a multiple of groups"),
)


#: Of all geometries so many are tried in the suite; "all" for a campaign.
COUNT = os.environ.get("HALOGRAD_TEST_GEOMETRIES", "12")
CUTS = {"rows": {"height": 4}, "grid": {"height": 2, "width": 2}}
EPS = np.finfo(np.float32).eps


def _geometries():
    """Return geometries and cuts: kernels of 3 to 11, dilation 1 to 4, every padding up to the window's extent."""
    found = []
    for kernel, dilation, cut in itertools.product(range(3, 12), range(1, 5), CUTS):
        extent = dilation * (kernel - 1) + 1
        for padding, edge in itertools.product(range(extent + 1), (12, 33)):
            if edge + 2 * padding >= extent:
                found.append((kernel, dilation, padding, edge, cut))
    return found


GEOMETRIES = _geometries()


def _some():
    if COUNT == "all":
        return GEOMETRIES
    chosen = np.random.default_rng(11).choice(len(GEOMETRIES), int(COUNT), replace=False)
    return [(9, 2, 17, 12, "grid"), (11, 4, 40, 33, "rows"), *(GEOMETRIES[i] for i in sorted(chosen))]


def draw(layer, shape):
    """Draw the arrays of a layer on one sample."""
    sizes = {k: p.shape for k, p in layer.parameters(shape).items()}
    sizes |= {"x": (1, *shape), "dy": (1, *layer.output_shape(shape))}
    return {name: random_array(size, name) for name, size in sizes.items()}


def check(layer, shape, parts, size, onednn, halo, substitutes=None):
    """Compare the blocks of all ranks by oneDNN with one process in float64, within 8 roundings per summand."""
    arrays = draw(layer, shape)
    with get_backend("numpy") as numpy:
        want = computed_in_blocks(layer, numpy, arrays, {}, 1, dtype="float64")
    got = computed_in_blocks(layer, onednn, arrays, parts, size, halo, substitutes=substitutes)
    terms = {"y": arrays["w"][0].size, "dx": arrays["w"][..., 0].size, "dw": arrays["dy"].size, "db": arrays["dy"].size}
    for name, array in want.items():
        bound = 8 * EPS * math.sqrt(terms[name]) * max(1.0, float(np.abs(array).max(initial=0)))
        error = np.abs(got[name] - array).max(initial=0)
        assert error <= bound, f"{layer} {shape} {parts} {name}: {error:.2e} > {bound:.2e}"


def padded(kernel, dilation, padding, filters=2):
    return Conv(filters, kernel, padding=padding, dilation=dilation, name="conv")


@pytest.mark.timeout(300 if COUNT != "all" else 3600)
def test_dilated_blocks(onednn):
    """Dilated convolutions by oneDNN are right on all blocks: forward, both gradients, boundary strips."""
    substituted: list = []
    for kernel, dilation, padding, edge, cut in _some():
        for halo in ("pad", "overlap"):
            check(padded(kernel, dilation, padding), (edge, edge, 2), CUTS[cut], 4, onednn, halo, substituted)
    if onednn.version == "3.2.0":
        assert substituted, "geometries that oneDNN 3.2 has no kernels for were to be tried"


OTHERS = {
    "wide padding": (Conv(2, (10, 11), (2, 1), ((34, 35), (15, 15)), (4, 3), name="c"), (15, 26, 4), {"width": 3}),
    "whole sample": (padded(9, 2, 17), (12, 12, 2), {"height": 2, "width": 2}),
    "stride 2": (Conv(5, 10, 2, 36, 4, name="c"), (32, 32, 4), {"width": 3}),
    "stride 3": (Conv(2, 7, 3, 18, 3, name="c"), (13, 13, 2), {"height": 2}),
    "groups": (Conv(4, 9, 1, 32, 4, groups=2, name="c"), (13, 13, 4), {"width": 3}),
    "3-D": (Conv(2, 5, 1, 8, 3, name="c"), (7, 7, 9, 2), {"height": 2, "width": 2}),
    "1-D": (Conv(2, 11, 1, 30, 4, name="c"), (33, 2), {"width": 4}),
    "transposed": (ConvTranspose(2, 7, 3, 6, 0, 3, name="t"), (7, 9, 2), {"height": 2, "width": 2}),
    "transposed, dilation 4": (ConvTranspose(3, 9, 1, 16, 0, 4, name="t"), (33, 16, 2), {"height": 4}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks(onednn, name):
    layer, shape, parts = OTHERS[name]
    for halo in ("pad", "overlap"):
        check(layer, shape, parts, math.prod(parts.values()), onednn, halo)
    check(layer, shape, {}, 1, onednn, "pad")


@pytest.mark.mpi
@pytest.mark.parametrize("halo", ["pad", "overlap"])
@pytest.mark.parametrize("name", ["wide padding", "whole sample", "transposed"])
def test_cut_layers_that_some_ranks_have_no_kernel_for(comm, name, halo):
    """Under MPI a convolution for which some ranks have no oneDNN kernel equals that of one process."""
    layer, shape, _ = OTHERS[name]
    with Communicator(comm) as ranks, OnednnBackend() as kernels:
        got = run_layer(lambda: layer, [shape], ranks, {"width": ranks.size}, dtype="float32", backend=kernels,
                        options={"halo": halo})  # fmt: skip
        if got is None:
            return
        with Communicator(MPI.COMM_SELF) as alone:
            want = run_layer(lambda: layer, [shape], alone, {}, dtype="float64", backend="numpy")
    for key, array in want.items():
        bound = 8 * EPS * math.sqrt(got["y"].size) * max(1.0, float(np.abs(array).max()))
        assert np.abs(got[key] - array).max() <= bound, key


@pytest.mark.mpi
def test_ranks_without_a_kernel_are_named_once(comm, monkeypatch, caplog):
    """One warning names the ranks and the layer for which a fast kernel is missing."""
    if comm.rank == comm.size - 1:
        has = ConvChoice.kernel

        def refuse(self, key, candidates):
            return has(self, key, {"packed": none} if key[2][0] == 3 else candidates)  # filters

        def none():
            raise ReferenceOnly("there is none")

        monkeypatch.setattr(ConvChoice, "kernel", refuse)
    x = Input((8, 8, 2), "x")
    y = Conv(3, 3, padding=1, name="second")(Conv(2, 3, padding=1, name="first")(x))
    network = Network({"loss": MeanSquaredError(name="loss")(y, Input((8, 8, 3), "target"))})
    with (
        caplog.at_level(logging.WARNING, "halograd.kernels"),
        Communicator(comm) as ranks,
        OnednnBackend() as kernels,
        Executor(network, ranks, kernels, 1, Strategy({"height": comm.size}), "float32"),
    ):
        texts = [record.getMessage() for record in caplog.records]
    where = f"rank {comm.size - 1} of {comm.size}" if comm.size > 1 else "the only rank"
    assert len(texts) == (comm.rank == 0)
    for text in texts:
        for what in ("conv_forward", "conv_backward_data", "conv_backward_filter"):
            assert f"{what} of layer 'second' by numpy on {where} (there is none)" in text
        assert "first" not in text
