"""Tests of pooling, also adaptive and global, and of resizing: rounding up, equal elements, arithmetic, errors."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import Layout, Window
from halograd.kernels import get_backend
from halograd.kernels.geometry import MODES, Resampling
from halograd.layers import AdaptiveMaxPool, GlobalMaxPool, Input, Pad, ReLU, Resize, pooling
from halograd.layers.pooling import _candidates, _only_padding
from halograd.layers.resized import resized
from halograd.layers.settings import difference, fingerprint
from halograd.models import unet3d
from halograd.testing import check_layer, random_array
from halograd.training.executor import Executor
from tests.layers.cases import ADAPTIVE, CEIL, POOLS
from tests.layers.geometries import brute_force_taps, drawn
from tests.layers.oracle import Called, check_torch, torch
from tests.support.refusals import refusals


def fits(make, spatial, geometry):
    try:
        hg.Input((*spatial, 2), "x")
        make(*geometry)(hg.Input((*spatial, 2), "x"))
    except ValueError as error:
        assert "only padding" in str(error)
        return False
    return True


@pytest.mark.mpi
@pytest.mark.parametrize("kind", POOLS)
@settings(max_examples=8)
@given(geometry=drawn())
def test_exact_on_drawn_geometries(kind, geometry):
    spatial, *rest = geometry
    if fits(POOLS[kind], spatial, rest):
        check_layer(lambda: POOLS[kind](*rest), (*spatial, 2), gradient=False, batch=1)


def test_ceil_mode_is_made_of_padding_only_where_that_counts():
    def kinds(name, **options):
        spatial, *geometry = CEIL[name]
        network = hg.Network(hg.AveragePool(*geometry, ceil_mode=True, name="p", **options)(hg.Input((*spatial, 2))))
        return [node.layer.kind for node in network.layers.values()]

    assert kinds("beyond padding") == ["Pad", "AveragePool"]
    assert kinds("beyond") == kinds("nothing to round") == ["AveragePool"]
    assert kinds("beyond padding", count_include_pad=False) == ["AveragePool"]


def test_windows_of_padding_only_are_found():
    for kernel in range(1, 4):
        for stride in range(1, 4):
            for dilation in range(1, 4):
                for lo in range(5):
                    w = Window(kernel, stride, lo, 4, dilation)
                    for size in range(1, 5):
                        outputs = w.output_size(size)
                        bad = [
                            o
                            for o in range(outputs)
                            if not any(0 <= i < size for i in brute_force_taps(kernel, stride, lo, dilation, o))
                        ]
                        assert _only_padding(w, size, outputs) == (bad[0] if bad else None)


@pytest.mark.parametrize("kind", POOLS)
def test_refuses_windows_of_padding_only(kind):
    with pytest.raises(ValueError, match=r"window 0 on spatial axis 1 reads only padding .* make the padding smaller"):
        POOLS[kind](2, 1, (0, 2))(hg.Input((4, 4, 1)))


def test_refuses_windows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"MaxPool: a window of extent \[5, 5\] does not fit .* enlarge the input"):
        hg.MaxPool(5)(hg.Input((4, 4, 1)))


def test_global_average_pool_refuses_samples_without_space():
    with pytest.raises(ValueError, match="expected samples with spatial axes"):
        hg.GlobalAveragePool()(hg.Input((4,)))


def test_shapes_and_flops():
    assert hg.MaxPool(3, 2, 1)(hg.Input((9, 8, 5))).shape == (5, 4, 5)
    assert hg.AveragePool(2)(hg.Input((9, 8, 5))).shape == (4, 4, 5)
    assert hg.MaxPool(3, 2, "same").output_shape((9, 8, 5)) == (5, 4, 5)
    assert hg.AveragePool(2).flops((8, 8, 3)) == 4 * 4 * 4 * 3
    assert hg.GlobalAveragePool().output_shape((4, 5, 6, 7)) == (7,)
    assert hg.GlobalAveragePool().flops((4, 5, 7)) == 140


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_one_output_is_made_where_the_input_is(kind):
    layers = hg.Network(ADAPTIVE[kind](1, "p")(hg.Input((4, 6, 3)))).layers
    kinds = {"average": "GlobalAveragePool", "max": "GlobalMaxPool"}
    assert [(name, node.layer.kind, node.shape) for name, node in layers.items()] == [
        ("p_global", kinds[kind], (3,)),
        ("p", "Reshape", (1, 1, 3)),
    ]


test_refusals = refusals(
    (lambda: hg.AdaptiveMaxPool((2, 2, 2))(hg.Input((4, 4, 2))), r"AdaptiveMaxPool: expected one number or 2, got"),
    (
        lambda: hg.AdaptiveMaxPool(0)(hg.Input((4, 4, 2))),
        r"AdaptiveMaxPool: nothing would be left of \(4, 4\): \(0, 0\)",
    ),
    (lambda: hg.AdaptiveAveragePool(2)(hg.Input((4,))), "AdaptiveAveragePool: .* does not fit 0 spatial axes"),
)


SHAPES = [(7, 6, 2), (9, 3), (6, 7, 6, 2)]


@pytest.mark.mpi
@pytest.mark.parametrize("axes", [("height", "width"), ("sample", "height"), ("width",)], ids=str)
def test_the_first_of_equal_elements_wins_on_every_grid(axes):
    """The first of equal maxima gets the gradient on every grid, also if they are in blocks of several ranks."""

    def repeated():
        again, zeros = Pad(((2, 3), (2, 2)), "circular", name="p"), ReLU()
        return lambda x: GlobalMaxPool()(zeros(again(x)))

    check_layer(repeated, (5, 4, 3), axes=axes, gradient=False)


@pytest.mark.mpi
def test_exact_where_float32_does_not_hold_the_numbers(monkeypatch):
    """Global max pooling is exact when float32 cannot represent positions, as for 2**24 elements (here: 8)."""
    monkeypatch.setattr(pooling, "_FLOAT32", 8)
    check_layer(GlobalMaxPool, (9, 3), dtype="float32")
    check_layer(lambda: AdaptiveMaxPool(2), (19, 3), dtype="float32")


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_torch(shape):
    pool = getattr(torch().nn.functional, f"adaptive_max_pool{len(shape) - 1}d")
    check_torch(lambda: GlobalMaxPool("p"), [shape], lambda x: pool(x, 1).flatten(1))
    doubled = lambda x: x.repeat(1, 1, *(2 for _ in shape[:-1]))  # noqa: E731
    amounts = [(0, n) for n in shape[:-1]]
    named = lambda: Called(lambda x: GlobalMaxPool("p")(Pad(amounts, "circular", name="c")(x)))  # noqa: E731
    check_torch(named, [shape], lambda x: pool(doubled(x), 1).flatten(1))


@given(
    parts=st.fixed_dictionaries({"sample": st.integers(1, 3), "height": st.integers(1, 9), "width": st.integers(1, 3)})
)
def test_every_block_that_holds_something_has_a_place(parts):
    size = int(np.prod(list(parts.values()))) + 1
    inputs, outputs = Layout.blocks((2, 6, 5, 3), parts, size), Layout.blocks((2, 3), (1, 1), size)
    found, wanted = _candidates(inputs.boxes, outputs.boxes)
    places = {}
    for rank in range(size):
        if inputs.boxes[rank].size:
            places.setdefault(inputs.boxes[rank].ranges[1:3], set()).add(found[rank].ranges[1])
            assert found[rank].shape == (inputs.boxes[rank].shape[0], 1, 2, 3)
        else:
            assert not found[rank].size
    numbers = sorted(first for some in places.values() for first, _ in some)
    assert numbers == list(range(len(places))) and wanted[0].ranges[1] == (0, len(places))


def test_refuses_samples_without_space():
    with pytest.raises(ValueError, match=r"GlobalMaxPool: expected .* got \(4,\)"):
        GlobalMaxPool()(Input((4,)))


# -- arithmetic --------------------------------------------------------------------------------------


@st.composite
def resamplings(draw):
    size, mode = draw(st.integers(1, 9)), draw(st.sampled_from(MODES))
    outputs = draw(st.integers(1, 20))
    if mode in ("linear", "cubic") and draw(st.booleans()):
        return Resampling(size, outputs, Fraction(size - 1, max(1, outputs - 1)), mode, True)
    if mode == "area" or draw(st.booleans()):
        return Resampling(size, outputs, Fraction(size, outputs), mode)
    scale = Fraction(draw(st.integers(1, 7)), draw(st.integers(1, 4)))
    return Resampling(size, max(1, int(size * scale)), 1 / scale, mode)


def row(r, o):
    """Return the weights of all inputs in output `o`, by the definition of the mode."""
    position = o * float(r.ratio) if r.aligned else (o + 0.5) * float(r.ratio) - 0.5
    weights = np.zeros(r.size)
    if r.mode == "nearest":
        weights[min(int(Fraction(o) * r.ratio), r.size - 1)] = 1
    elif r.mode == "nearest-exact":
        weights[min(int((o + Fraction(1, 2)) * r.ratio), r.size - 1)] = 1
    elif r.mode == "area":
        window = slice(o * r.size // r.outputs, -(-(o + 1) * r.size // r.outputs))
        weights[window] = 1 / len(weights[window])
    elif r.mode == "cubic":
        for i in range(int(np.floor(position)) - 2, int(np.floor(position)) + 4):
            weights[min(max(i, 0), r.size - 1)] += keys(abs(position - i))
    else:
        position = min(max(position, 0.0), r.size - 1.0)
        weights = np.maximum(0.0, 1 - np.abs(np.arange(r.size) - position))
    return weights


def keys(x, a=-0.75):
    """Return the cubic convolution kernel of Keys (1981), equation 4 with 3/4 instead of 1/2."""
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


@given(r=resamplings())
def test_taps_follow_the_formulas(r):
    for o in range(r.outputs):
        weights = np.zeros(r.size)
        for i, weight in r.taps(o):
            weights[i] += weight
        assert np.allclose(weights, row(r, o), atol=1e-12)


@given(r=resamplings(), data=st.data())
def test_runs_cover_each_output_once_with_its_taps(r, data):
    start = data.draw(st.integers(0, r.outputs))
    stop = data.draw(st.integers(start, r.outputs))
    lo, hi = r.input_range(start, stop)
    seen = []
    for run in r.runs(start, stop):
        outputs = range(r.outputs)[run.outputs()]
        inputs = [range(r.size)[run.inputs(k)] for k in range(len(run.taps))]
        assert len(outputs) == run.count and all(len(i) == run.count for i in inputs)
        for k, o in enumerate(outputs):
            assert r.taps(o) == tuple((i[k], weight) for i, (_, weight) in zip(inputs, run.taps))
            assert all(lo <= i[k] < hi for i in inputs)
        seen += outputs
    assert sorted(seen) == list(range(start, stop))
    assert 0 <= lo <= hi <= r.size


def test_integer_scales_are_few_runs():
    assert len(Resampling(64, 128, Fraction(1, 2), "nearest").runs(0, 128)) == 2
    assert len(Resampling(64, 128, Fraction(1, 2), "linear").runs(0, 128)) == 4


# -- description -------------------------------------------------------------------------------------


def test_resize_shapes_and_flops():
    assert Resize(2)(Input((5, 4, 3))).shape == (10, 8, 3)
    assert Resize(1.5)(Input((5, 4, 3))).shape == (7, 6, 3)
    assert Resize(size=(3, 9))(Input((5, 4, 3))).shape == (3, 9, 3)
    assert Resize(2).flops((5, 4, 3)) == 0
    assert Resize(2, mode="cubic").flops((5, 4, 3)) == 7 * (10 * 4 * 3 + 10 * 8 * 3)
    assert Resize(2, mode="linear").flops((5, 4, 3)) == 3 * (10 * 4 * 3 + 10 * 8 * 3)


test_errors_name_what_is_wrong = refusals(
    (lambda: Resize(), "expected .* got scale=None and size=None"),
    (lambda: Resize(2, 4), "expected .* got scale=2 and size=4"),
    (lambda: Resize(2, mode="lanczos"), "mode: expected one of nearest, .* got 'lanczos'"),
    (lambda: Resize(2, align_corners=True), "expected the mode linear or cubic, got 'nearest'"),
    (lambda: Resize(2, mode="bicubic")(Input((4, 4, 4, 2))), "mode 'bicubic' does not fit 3 spatial axes"),
    (lambda: Resize(2, mode="bilinear")(Input((4, 2))), "mode 'bilinear' does not fit 1 spatial axes"),
    (lambda: Resize((2, 2, 2))(Input((4, 4, 2))), r"expected one number or 2, got \(2, 2, 2\)"),
    (lambda: Resize(-1)(Input((4, 4, 2))), "a scale must be positive, got -1"),
    (lambda: Resize(0.1)(Input((4, 4, 2))), r"nothing would be left of \(4, 4\): \(0, 0\)"),
    (lambda: Resize(2)(Input((4,))), "does not fit 0 spatial axes"),
)


def halving(edge=16, valid=False):
    """Return a network that halves its samples twice and doubles them again, with unnamed layers and two inputs."""
    x, coarse = hg.Input((edge, edge, 2), name="x"), hg.Input((edge // 2, edge // 2, 1), name="coarse")
    y = hg.Conv(3, 3, padding=1)(x)
    half = hg.Concat()(hg.MaxPool(2, 2)(y), coarse)
    up = hg.Resize(2)(hg.Conv(4, 3, padding=1)(hg.MaxPool(2, 2)(half)))
    y = hg.Conv(1, 3, padding=0 if valid else 1)(hg.Resize(2)(hg.Concat()(half, up)))
    loss = hg.MeanSquaredError()(y, hg.Input(y.shape, "target"), hg.Input((1, y.shape[1], 1), "weights"))
    return hg.Network({"prediction": y, "loss": loss}, frozen=["conv1"])


def shapes(network):
    return {name: node.shape for name, node in network.inputs.items()}


@pytest.mark.parametrize("extents, pads", [((24, 32), []), ((18, 16), ["pad/coarse", "pad/x"])])
def test_extents(extents, pads):
    old = halving()
    made = resized(old, extents)
    height, width = extents
    assert shapes(made) == {
        "x": (height, width, 2),
        "coarse": (height // 2, width // 2, 1),
        "target": (height, width, 1),
        "weights": (1, width, 1),
    }
    assert sorted(name for name in made.layers if name.startswith("pad/")) == pads
    assert made.outputs["prediction"].shape == (height, width, 1)
    assert made.outputs["loss"].inputs[0] is made.outputs["prediction"]
    assert made.frozen == old.frozen and fingerprint(made) == fingerprint(old)
    assert difference(fingerprint(halving(32)), fingerprint(made), extents=False) is None
    assert made.parameters().keys() == old.parameters().keys()


def test_other_windows_are_another_network_at_any_size():
    """Padding may follow from the size of the samples; kernels and strides do not."""

    def pooled(pool, edge):
        return hg.Network({"y": pool(hg.Input((edge, edge, 2), "x"))})

    halves = fingerprint(pooled(hg.MaxPool(2, name="pool"), 8))
    differing = difference(halves, fingerprint(pooled(hg.MaxPool(3, 2, 1, name="pool"), 8)), extents=False)
    assert differing == ("pool: stencil[0][0] 3", "pool: stencil[0][0] 2")
    same = [fingerprint(pooled(hg.MaxPool(3, 2, "same", name="pool"), edge)) for edge in (7, 8)]
    assert same[0] != same[1] and difference(*same, extents=False) is None


def test_valid_convolutions():
    assert shapes(resized(halving(valid=True), (20, 24)))["target"] == (18, 22, 1)


def test_a_model():
    made = resized(unet3d(resolution=16, channels=2, width=2), (13, 16, 21))
    assert shapes(made) == {"x": (13, 16, 21, 2), "target": (13, 16, 21, 1)}
    assert made.layers["pad/x"].shape == (16, 16, 24, 2)


@pytest.mark.parametrize("mode", ["reflect", ("replicate", "zeros")])
@pytest.mark.parametrize("built, extents", [((8, 6), (9, 7)), ((9, 7), (8, 6))])
def test_same_padding_in_a_mode_follows_the_extents(mode, built, extents):
    """With a stride, "same" pads samples of odd and even extents differently."""

    def network(space):
        y = hg.Conv(2, 3, 2, "same", padding_mode=mode, name="conv")(hg.Input((*space, 1), "x"))
        return hg.Network({"y": y})

    made, want = resized(network(built), extents), network(extents)
    assert made.outputs["y"].shape == want.outputs["y"].shape
    assert [(n.shape, vars(n.layer).get("low")) for n in made.nodes] == [
        (n.shape, vars(n.layer).get("low")) for n in want.nodes
    ]


@pytest.mark.parametrize("built, extents", [((8, 6), (9, 7)), ((9, 7), (8, 6)), ((9, 6), (7, 10))])
def test_averages_beyond_the_end_of_samples_of_another_size(built, extents):
    """Whether windows reach beyond the array depends on its extents; what they read there never counts."""
    y = hg.AveragePool(3, 2, ceil_mode=True, name="pool")(hg.Input((*built, 2), "x"))
    network = resized(hg.Network(y), extents)
    x = random_array((2, *extents, 2), "x")
    want = torch().nn.functional.avg_pool2d(torch().tensor(np.moveaxis(x, -1, 1)), 3, 2, ceil_mode=True)
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(network, alone, get_backend("numpy"), 2, dtype="float64", trainable=False) as executor,
    ):
        executor.set_input("x", x)
        executor.forward(training=False)
        np.testing.assert_allclose(executor.gather("pool"), np.moveaxis(want.numpy(), 1, -1), rtol=1e-13)


def test_averages_beyond_padding_that_counts_are_refused_at_another_size():
    network = hg.Network(hg.AveragePool(3, 2, 1, ceil_mode=True)(hg.Input((7, 7, 2), "x")))
    with pytest.raises(ValueError, match="AveragePool: expected windows within the padding"):
        resized(network, (6, 6))


def test_parameters_that_depend_on_the_extents():
    x = hg.Input((8, 8, 1), name="x")
    y = hg.Dense(2)(hg.Flatten()(x))
    network = hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, hg.Input((2,), "target"))})
    with pytest.raises(ValueError, match=r"no samples of 8 x 16: its parameter dense1/w depends on their size"):
        resized(network, (8, 16))
    with pytest.raises(ValueError, match="expected an input of 3 spatial axes, got none"):
        resized(network, (8, 8, 8))


@pytest.mark.parametrize("make", [lambda: hg.Pad(1, "sphere"), lambda: hg.Roll((0, 1))], ids=["sphere", "roll"])
def test_axes_whose_ends_meet_are_not_padded(make):
    x = hg.Input((8, 8, 1), name="x")
    y = hg.Crop()(make()(hg.Concat()(x, hg.ConvTranspose(1, 2, 2)(hg.Conv(1, 2, stride=2)(x)))), x)
    with pytest.raises(ValueError, match="it is circular along an axis that would be"):
        resized(hg.Network({"y": y}), (8, 11))


def test_circular_axes_of_other_arrays_do_not_matter():
    """Tokens have an axis of their own, and a shift of two axes in a branch of images does not fit volumes."""
    x, tokens, image = hg.Input((8, 8, 8, 1), "x"), hg.Input((6, 1), "tokens"), hg.Input((4, 6, 1), "image")
    rolled = hg.GlobalAveragePool()(hg.Roll(1)(tokens)) + hg.GlobalAveragePool()(hg.Roll((1, 2))(image))
    y = hg.ConvTranspose(1, 2, 2)(hg.Conv(1, 2, 2)(x)) * rolled
    assert shapes(resized(hg.Network({"y": y}), (7, 8, 9))) == {"x": (7, 8, 9, 1), "tokens": (6, 1), "image": (4, 6, 1)}


def test_circular_axes_are_not_padded():
    x = hg.Input((16, 16, 1), name="x")
    y = hg.Conv(1, 3, stride=2, padding=(1, 0))(hg.Pad([(0, 0), (1, 1)], "circular")(x))
    network = hg.Network({"y": hg.ConvTranspose(1, 2, stride=2)(y)})
    assert shapes(resized(network, (17, 24))) == {"x": (17, 24, 1)}
    with pytest.raises(ValueError, match="takes no samples of 16 x 17: it is circular along an axis that would be"):
        resized(network, (16, 17))


def test_a_layer_of_fixed_size_is_named_where_it_keeps_samples_from_another_size():
    """It may come from ``interpolate(y, size=x.shape[2:])`` of torch; the fault shows where its output is read."""
    x = hg.Input((16, 16, 2), "x")
    y = hg.Resize(size=16, name="up")(hg.AveragePool(2)(x))
    network = hg.Network({"y": x * y})
    with pytest.raises(ValueError, match=r"takes no samples of 24 x 24: Multiply: .* Layer 'up' .* give it a scale"):
        resized(network, (24, 24))

