"""Tests of all kinds of layers and random networks under all cuts, also on fewer ranks: as one process; gradients."""

from collections import Counter
from functools import partial
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import axis_names
from halograd.kernels.geometry import MODES
from halograd.testing import check_layer, compare, run_layer
from tests.layers.cases import (
    ACTIVATIONS,
    ADAPTIVE,
    ADAPTIVE_CASES,
    CEIL,
    GATES,
    LAYERS,
    MAPS,
    NORMS,
    PADS,
    POOLS,
    RESIZES,
    SCALES,
    SHUFFLES,
    SPATIAL,
    TRANSPOSED,
    conv,
    rounded_up,
    transposed,
)
from tests.layers.geometries import CROWDED, NASTY, skew
from tests.layers.graphs import Centre, Gate, Graphs, poison, run
from tests.support.grids import axes_in_turn

SHAPE = (7, 6, 3)
SHAPES = [SHAPE, (9, 2), (6, 7, 6, 2), (5,)]
ONEDNN = {"dtype": "float32", "backend": "onednn"}
BACKENDS = {"numpy": {}, "onednn": ONEDNN}
HALOS = {name: {"gradient": False, "options": {"halo": name}} for name in ("pad", "overlap")}
#: Every grid of the ranks, blocks that are uneven or empty, more ranks than rows, axes with channels among them.
MARKS = {
    "grids": pytest.mark.mpi,
    "uneven": pytest.mark.mpi,
    "many ranks": pytest.mark.many_ranks,
    "uneven, many ranks": pytest.mark.many_ranks,
    "oversubscribed": pytest.mark.ranks(6, 8),
    "channels": pytest.mark.ranks(2, 3, 4),
    "derivative": (),
}
#: Smallest number of ranks of these cases, where it is not 1.
SMALLEST = {"oversubscribed": 6, "channels": 2}
CASES = []
KINDS = Counter()  # number of cases of "grids" by kind of layer and number of axes


def add(cut, name, make, shape, **options):
    """Add a case: a layer or a function that creates it, the shapes of its inputs, options of `check_layer`."""
    turn = None
    if cut == "grids":
        kind = name.split()[0], len(axes_of(shape, options))
        turn = KINDS[kind] + list(KINDS).index(kind) if kind in KINDS else len(KINDS)
        KINDS[kind] += 1
    CASES.append(pytest.param(cut, make, shape, options, turn, marks=MARKS[cut], id=f"{name}: {cut}"))


def axes_of(shape, options):
    """Return the axes that are cut: by default samples and the spatial axes of the first input."""
    if "axes" in options:
        return options["axes"]
    first = shape[0] if isinstance(shape[0], tuple) else shape
    return axis_names(len(first) + 1)[:-1]


def behind(make, first):
    return lambda: lambda x: make()(first()(x))


def window(geometry, channels=2):
    """Return the input shape of a geometry, and its other settings."""
    spatial, *rest = geometry
    return (*spatial, channels), rest


# -- elements --------------------------------------------------------------------------------------------

for kind, make in ACTIVATIONS.items():
    for shape in SHAPES:
        add("grids", f"{kind} {shape}", make, shape, gradient=False, batch=3)
    add("grids", f"{kind} behind a layer, onednn", behind(make, partial(hg.MaxPool, 2)), (9, 8, 3), **ONEDNN)
    add("uneven", kind, make, SHAPE, gradient=False)
    add("derivative", kind, make, (5, 4, 3))

for axes in [("sample", "height", "width"), ("sample", "height", "channel")]:
    affine = partial(hg.Affine, range(5), [1, 2, 3, 4, 0.5], "l")
    add("channels", f"affine of channels {axes}", affine, (7, 6, 5), axes=axes)

for name, make in SCALES.items():
    for shape in [(7, 6, 5), (9, 2), (5, 4, 3, 2), (4,)]:
        add("grids", f"{name} {shape}", make, shape, batch=3, gradient=shape == (7, 6, 5))
    add("channels", name, make, (7, 6, 5), axes=("sample", "height", "channel"), gradient=False)
    add("uneven, many ranks", name, make, (7, 6, 5), gradient=False)
    # Which has a halo of the gradient.
    before = partial(hg.Conv, 3, 3, padding=1, name="c")
    add("grids", f"{name} behind a convolution", behind(make, before), (7, 6, 5), gradient=False)

dropout = partial(hg.Dropout, 0.4)
for shape in SHAPES:
    add("grids", f"dropout {shape}", dropout, shape, batch=3)
before = partial(hg.Conv, 3, 3, padding=1, name="c")
add("uneven", "dropout", behind(dropout, before), (6, 7, 2), gradient=False)
add("channels", "dropout", dropout, (7, 6, 5), batch=3, axes=("sample", "height", "channel"), gradient=False)
add("channels", "dropout of vectors", dropout, (5,), batch=3, axes=("sample", "channel"), gradient=False)
for kind in (hg.StochasticDepth, hg.ChannelDropout):
    name, make = kind.__name__, partial(kind, 0.5)
    for shape in [SHAPE, (9, 2), (5, 4, 3, 2), (4,)]:
        add("grids", f"{name} {shape}", make, shape, batch=5)
    add("channels", name, make, SHAPE, batch=5, axes=("sample", "height", "channel"), gradient=False)

# -- norms -----------------------------------------------------------------------------------------------

norm = partial(hg.BatchNorm, name="norm")
for shape, batch in [((12, 3), 3), ((7, 5, 3), 1), ((7, 5, 3), 3), ((3, 7, 4, 2), 2), ((6,), 9)]:
    add("many ranks", f"batch norm {shape} x {batch}", norm, shape, batch=batch)
for options in [{"activation": "relu"}, {"affine": False}, {"eps": 0.5}]:
    add("grids", f"batch norm {options}", partial(norm, **options), (7, 5, 3), batch=2)
for relu, (name, backend) in product([None, "relu"], BACKENDS.items()):
    make, more = partial(norm, activation=relu), {**backend, "gradient": name == "numpy"}
    add("uneven", f"batch norm {relu} with a residual, {name}", make, [(7, 6, 5)] * 2, batch=3, **more)
    add("uneven", f"batch norm {relu} with a residual of 16 channels, {name}", make, [(9, 3, 16)] * 2, batch=2, **more)
    add("grids", f"batch norm {relu} in float32, {name}", make, (9, 7, 18), batch=3, **{**backend, "dtype": "float32"})
relu = partial(norm, activation="relu")
for rows in (32, 6):
    add("uneven", f"batch norm of {rows} rows", relu, (rows, 7, 2), batch=3)
for name, backend in BACKENDS.items():
    more = {"axes": ("sample", "height", "channel"), "gradient": False, **backend}
    add("channels", f"batch norm, {name}", relu, (7, 5, 5), batch=2, **more)

for kind, make in NORMS.items():
    add("many ranks", f"{kind} norm", make, (7, 5, 4), batch=3)
    for rows in (32, 6):
        add("uneven", f"{kind} norm of {rows} rows", partial(make, activation="relu"), (rows, 7, 4), batch=2)
    for batch in (1, 5):
        add("grids", f"{kind} norm of vectors x {batch}", make, (6,), batch=batch)
for kind, shape in product(["group", "channels"], [(12, 4), (3, 5, 4, 2)]):
    add("grids", f"{kind} norm {shape}", NORMS[kind], shape, batch=3)

settings = {
    "size": 5,
    "alpha": 0.7,
    "beta": 0.75,
    "k": 2.0,
}  # large enough alpha that its gradient's second term matters
make = partial(hg.LocalResponseNorm, **settings)
for shape in [(7, 6, 9), (9, 4), (5, 4, 3, 6), (8,)]:
    add("grids", f"response norm {shape}", make, shape, gradient=False, batch=3)
add("uneven", "response norm", make, (7, 6, 4), gradient=False)
for size in (1, 2, 3, 4, 5, 8, 40):
    add(
        "derivative", f"response norm of {size}", partial(hg.LocalResponseNorm, **{**settings, "size": size}), (4, 3, 7)
    )

# -- windows ---------------------------------------------------------------------------------------------

for halo, more in HALOS.items():
    for name, geometry in NASTY.items():
        shape, rest = window(geometry)
        add("grids", f"convolution {name}, {halo}", conv(rest), shape, **more)
        add("grids", f"convolution {name}, {halo}, onednn", conv(rest), shape, batch=1, **{**more, **ONEDNN})
        if name in CROWDED:
            add("oversubscribed", f"convolution {name}, {halo}", conv(rest), shape, **more)
    for rows, stride in product((32, 6), (1, 2)):
        add("uneven", f"convolution of {rows} rows by {stride}, {halo}", conv((3, stride, 1, 1)), (rows, 7, 2), **more)
    for own in [{"groups": 2}, {"bias": False}, {"activation": "relu"}, {"groups": 4, "activation": "relu"}]:
        add("grids", f"convolution {own}, {halo}", conv((3, 2, 1, 1), 4, **own), (9, 8, 4), **more)
    # Outputs that read only padding are the bias, on ranks that hold no input for them too.
    for name, backend in BACKENDS.items():
        make = conv((2, 1, ((4, 5), (0, 3)), 1))
        add("grids", f"convolution of padding, {halo}, {name}", make, (6, 6, 2), **{**more, **backend})
for own in [{}, {"groups": 2}, {"activation": "relu"}]:
    add("derivative", f"convolution {own}", conv((3, 2, 1, 1), 4, **own), (7, 6, 2))

for name, geometry in TRANSPOSED.items():
    shape, rest = window(geometry)
    add("grids", f"transposed {name}", transposed(rest), shape, gradient=False)
    add("grids", f"transposed {name}, onednn", transposed(rest), shape, **ONEDNN, batch=1)
    if name in ("k3 s2 p1 op1", "halo wider than a block", "padding beyond the kernel"):
        add("oversubscribed", f"transposed {name}", transposed(rest), shape, gradient=False)
    if name in ("k3 s2 p1 op1", "dilation", "padding beyond the kernel"):
        add("derivative", f"transposed {name}", transposed(rest, 2), shape)
for rows in (32, 6):
    add("uneven", f"transposed of {rows} rows", transposed((3, 2, 1, 1, 1)), (rows, 7, 2), gradient=False)
for own in [{"groups": 2}, {"bias": False}, {"groups": 4, "bias": False}]:
    add("grids", f"transposed {own}", transposed((3, 2, 1, 1, 1), 4, **own), (7, 8, 4), gradient=False)

for kind, pool in POOLS.items():
    for name, geometry in NASTY.items():
        shape, rest = window(geometry)
        for cut in ["grids"] + ["oversubscribed"] * (name in CROWDED):
            add(cut, f"{kind} pool {name}", partial(pool, *rest), shape, gradient=False)
    for rows in (32, 6):
        add("uneven", f"{kind} pool of {rows} rows", partial(pool, 3, 2, 1), (rows, 7, 2), gradient=False)
    add("grids", f"{kind} pool, onednn", partial(pool, 3, 2, ((1, 0), (0, 1))), (11, 9, 3), **ONEDNN)
    add("derivative", f"{kind} pool", partial(pool, 3, 2, 1), (7, 6, 2))
    for name, geometry in CEIL.items():
        shape, rest = window(geometry)
        add("grids", f"{kind} pool rounded up {name}", partial(rounded_up, kind, *rest), shape, gradient=False)
    add("uneven, many ranks", f"{kind} pool rounded up", partial(rounded_up, kind, 3, 2, 1), (6, 8, 2), gradient=False)

for kind, pool in ADAPTIVE.items():
    for name, (spatial, size) in ADAPTIVE_CASES.items():
        add("grids", f"adaptive {kind} {name}", partial(pool, size), (*spatial, 2))
        if name in ("overlaps", "one", "one row"):
            add("uneven, many ranks", f"adaptive {kind} {name}", partial(pool, size), (*spatial, 2), gradient=False)
    more = {"axes": ("sample", "height", "channel"), "gradient": False}
    add("channels", f"adaptive {kind}", partial(pool, (3, 4)), (7, 6, 5), **more)

for shape, batch in product([(7, 6, 2), (9, 3), (6, 7, 6, 2)], (1, 3)):
    add("grids", f"global average {shape} x {batch}", hg.GlobalAveragePool, shape, batch=batch)
    add("grids", f"global maximum {shape} x {batch}", hg.GlobalMaxPool, shape, batch=batch)
add("uneven", "global average", hg.GlobalAveragePool, (6, 7, 2), batch=2)
add("uneven, many ranks", "global maximum", hg.GlobalMaxPool, (6, 7, 2), batch=2)
add("channels", "global maximum", hg.GlobalMaxPool, (7, 6, 5), axes=("sample", "width", "channel"), gradient=False)
make = behind(hg.GlobalAveragePool, partial(hg.MaxPool, 3, 2))
add("grids", "global average behind a layer in float32", make, (9, 8, 2), dtype="float32", batch=2)

for (name, (spatial, how)), mode in product(RESIZES.items(), MODES):
    make, shape = partial(hg.Resize, **how, mode=mode), (*spatial, 2)
    add("grids", f"resize {name}, {mode}", make, shape, gradient=False)
    if mode in ("linear", "cubic") and name in ("triple and double", "half", "to a size", "to one", "3-D"):
        add("grids", f"resize {name}, {mode}, aligned", partial(make, align_corners=True), shape, gradient=False)
    if mode in ("linear", "cubic") and name in ("double", "half", "to one"):
        add("oversubscribed", f"resize {name}, {mode}", make, shape, gradient=False)
for mode in MODES:
    make = partial(hg.Resize, 1.5, mode=mode)
    add("channels", f"resize {mode}", make, (7, 6, 5), axes=("height", "channel"), gradient=False)
    add("derivative", f"resize {mode}", make, (5, 4, 2))
    for how in ({"scale": 2}, {"size": (9, 5)}):
        add("uneven", f"resize {how}, {mode}", partial(hg.Resize, **how, mode=mode), (7, 6, 2), gradient=False)

# -- places ----------------------------------------------------------------------------------------------

for mode, amounts in PADS.items():
    make = partial(hg.Pad, amounts, mode, name="p")
    add("grids", f"pad {mode}", partial(hg.Pad, amounts, mode, 0.5, "p"), SHAPE, gradient=mode != "constant")
    add("channels", f"pad {mode}", make, SHAPE, axes=("height", "channel"), gradient=False)
    add("uneven, many ranks", f"pad {mode}", make, SHAPE, gradient=False)
    for shape in [(9, 2), (6, 5, 4, 2)]:  # three times as many elements are summed in the comparison as the input has
        make = partial(hg.Pad, (2, 3), mode, name="p")
        add("grids", f"pad {mode} {shape}", make, shape, gradient=False, tolerance=128.0)
for name, shape, amounts in [("sphere", SHAPE, ((3, 2), (2, 5))), ("sphere of levels", (3, 4, 6, 2), (1, 2))]:
    make = partial(hg.Pad, amounts, hg.Sphere(poles=name == "sphere"), name="p")
    add("grids", name, make, shape, gradient=False, tolerance=128.0)
    add("uneven, many ranks", name, make, shape, gradient=False, tolerance=128.0)
for shape, shift in [(SHAPE, (3, -2)), ((9, 2), 4), ((6, 5, 4, 2), (1, 0, -1))]:
    add("grids", f"roll {shape}", partial(hg.Roll, shift), shape, gradient=shape == SHAPE)
add("channels", "roll", partial(hg.Roll, (3, -2)), SHAPE, axes=("height", "channel"), gradient=False)
add("uneven, many ranks", "roll", partial(hg.Roll, (3, -2)), SHAPE, gradient=False)
for amounts in [((-2, -1), (0, -3)), ((-6, 4), (2, -5)), -1]:
    add("grids", f"rows taken away {amounts}", partial(hg.Pad, amounts, name="p"), SHAPE)

for name, (make, shape) in SHUFFLES.items():
    add("grids", f"shuffle {name}", make, shape, gradient=len(shape) == 3)
    within = ("shuffle", "shuffle by 3", "unshuffle", "unshuffle by position", "unshuffle by 3", "of channels")
    if name in within:  # blocks begin within a cell
        add("channels", f"shuffle {name}", make, shape, axes=("height", "channel"), gradient=False)
        add("uneven, many ranks", f"shuffle {name}", make, shape, gradient=False)
both = behind(partial(hg.PixelShuffle, 2), partial(hg.PixelUnshuffle, 2))
for shape in [(6, 3), (4, 6, 3), (4, 2, 6, 3)]:
    add("grids", f"shuffle and back {shape}", both, shape, gradient=False)

for shape, batch in product(MAPS, (1, 5)):
    (features,) = hg.Flatten().output_shape(shape)
    axes = ("sample", *("depth", "height", "width")[4 - len(shape) :])
    more = {"batch": batch, "axes": axes, "gradient": False}
    add("grids", f"reshape {shape} x {batch}", partial(hg.Reshape, shape), (features,), **more)
add("grids", "reshape of maps", behind(partial(hg.Reshape, (8, 3, 2)), hg.Flatten), (4, 6, 2))
for shape, batch in product([(6, 7, 2), (9, 3), (6, 7, 6, 2), (4,)], (1, 3)):
    add("grids", f"flatten {shape} x {batch}", hg.Flatten, shape, batch=batch, gradient=False)
add("uneven", "flatten", hg.Flatten, (6, 7, 2), gradient=False)
for batch, bias in product((1, 2, 5), (True, False)):
    add("grids", f"dense {bias} x {batch}", partial(hg.Dense, 3, bias), (7,), batch=batch)
add("derivative", "dense", behind(partial(hg.Dense, 3, name="d"), hg.Flatten), (3, 4, 2))

# -- several inputs --------------------------------------------------------------------------------------

for count, activation in product((1, 2, 4), (None, "relu")):
    add("grids", f"sum of {count}, {activation}", partial(hg.Add, activation), [SHAPE] * count, gradient=False)
for channels in [(3,), (1, 4), (2, 1, 3)]:
    add("grids", f"concat {channels}", hg.Concat, [(7, 6, c) for c in channels], gradient=False)
for shape in [(9, 2), (6, 7, 6, 2), (5,)]:
    add("grids", f"sum {shape}", hg.Add, [shape, shape], gradient=False, batch=3)
    add("grids", f"concat {shape}", hg.Concat, [shape, shape], gradient=False, batch=3)
for axis, extents in {"width": [(1, 2), (8, 2)], "height": [(5, 3, 2), (1, 3, 2), (2, 3, 2)]}.items():
    make = partial(hg.Concat, "c", axis=axis)
    add("channels", f"concat along {axis}", make, extents, axes=("sample", "height", "width", "channel"))
make = lambda: lambda a, b: hg.Concat()(hg.Add("relu")(a, b), a)  # noqa: E731
add("uneven", "concat of a sum", make, [SHAPE, SHAPE], gradient=False)
CUT = {"axes": ("sample", "width", "channel"), "gradient": False}
# The blocks of the inputs do not lie where those of the output do, nor do all ranks hold a part of each input.
for (name, backend), channels in product(BACKENDS.items(), [(3, 4), (1, 5, 2), (4, 4)]):
    make = partial(hg.Concat, name="c")
    add("channels", f"concat {channels}, {name}", make, [(5, 6, c) for c in channels], **CUT, **backend)
for name, make in {
    "sum, relu": lambda: hg.Add("relu"),
    "relu": lambda: lambda a, b: hg.Add()(hg.ReLU()(a), b),
    "max pool": lambda: lambda a, b: hg.MaxPool(3, 2, 1)(hg.Add()(a, b)),
    "average pool": lambda: lambda a, b: hg.AveragePool(2)(hg.Add()(a, b)),
    "global average": lambda: lambda a, b: hg.GlobalAveragePool()(hg.Add()(a, b)),
}.items():
    add("channels", name, make, [(7, 6, 5)] * 2, **CUT)

for kind in (hg.Multiply, hg.BroadcastAdd):
    for name, gate in GATES.items():
        add("grids", f"{kind.__name__} {name}", kind, [SHAPE, gate], batch=3)
        if name in ("whole", "per channel", "per position", "per column and channel"):  # of one channel: one owner
            add("channels", f"{kind.__name__} {name}", kind, [SHAPE, gate], **CUT)
        if name in ("whole", "per channel", "per row"):
            add("uneven, many ranks", f"{kind.__name__} {name}", kind, [SHAPE, gate], gradient=False)
    for shape in [(9, 2), (6, 5, 4, 2)]:
        for gate in (shape, shape[-1:], (*shape[:-1], 1)):
            add("grids", f"{kind.__name__} {shape} {gate}", kind, [shape, gate], gradient=False)


# -- chains ----------------------------------------------------------------------------------------------


def chain(*makers):
    """Return a function that creates a chain of layers; `makers` are functions that create one of them."""
    return lambda: hg.Sequential(*(make() for make in makers))


def conv3(filters, name, **more):
    return partial(hg.Conv, filters, 3, padding=1, name=name, **more)


for (name, backend), (halo, more) in product(BACKENDS.items(), HALOS.items()):
    # Halos wider than the block of a neighbor, and ranks without elements.
    wide = partial(hg.Conv, 4, 5, padding=2, name="b"), partial(hg.Conv, 2, 3, 2, padding=1, name="c")
    make = chain(partial(hg.MaxPool, 2), conv3(3, "a", activation="relu"), *wide)
    add("grids", f"chain of convolutions, {halo}, {name}", make, (9, 8, 2), **{**more, **backend})
for (kind, activation), (name, backend) in product(ACTIVATIONS.items(), BACKENDS.items()):
    if "soft" not in kind:  # backward may read the output from the array of the convolution, which has halos
        make = chain(partial(hg.Conv, 3, 1, name="before"), activation, conv3(2, "after"))
        add("grids", f"activation {kind} in a chain, {name}", make, (7, 6, 2), gradient=False, **backend)
for kind, pool in POOLS.items():
    make = chain(partial(hg.MaxPool, 2), conv3(3, "c"), partial(pool, 3, 2, 1), hg.ReLU)
    add("grids", f"chain with {kind} pool", make, (9, 8, 2), gradient=False)
for kind, pool in ADAPTIVE.items():  # of equal elements
    around = partial(hg.Pad, 3, "circular", name="p")
    make = chain(conv3(3, "b", activation="relu"), around, partial(pool, (5, 4)), conv3(2, "c"))
    add("grids", f"chain with adaptive {kind} pool", make, (7, 6, 2), gradient=False)
doubled = chain(partial(hg.MaxPool, 2), partial(hg.Resize, 2, mode="bilinear"), partial(hg.MaxPool, 3, 1, 1))
add("grids", "chain with a resize, onednn", doubled, (9, 8, 3), **ONEDNN)
for name, backend in BACKENDS.items():
    float32 = {**backend, "dtype": "float32"}
    make = chain(conv3(4, "c"), hg.GlobalMaxPool, partial(hg.Dense, 2, name="d"))
    add("grids", f"chain with a global maximum, {name}", make, (9, 8, 2), **float32)
    normed = partial(hg.Conv, 6, 3, 2, padding=1, activation="relu", weight_norm=True, name="l")
    make = chain(normed, hg.Flatten, partial(hg.Dense, 3, weight_norm=True, name="d"))
    add("grids", f"chain with weight norms, {name}", make, (7, 6, 4), **float32)
    trunk = conv3(3, "c", activation="relu"), partial(hg.MaxPool, 2), hg.Flatten
    make = chain(*trunk, partial(hg.Dense, 5, name="d1"), partial(hg.Dense, 4, name="d2"))
    add("grids", f"chain of a classifier, {name}", make, (8, 7, 2), gradient=False, batch=3, **backend)
head = partial(hg.Conv, 3, 3, activation="gelu", name="c"), partial(hg.Dense, 6, activation="tanh", name="d")
add("grids", "chain of a head", chain(head[0], hg.Flatten, head[1]), (7, 6, 4), gradient=False)
cells = partial(hg.PixelUnshuffle, 2), conv3(8, "b"), partial(hg.PixelShuffle, 2), conv3(2, "c")
add("grids", "chain for super-resolution", chain(*cells), (10, 6, 2), gradient=False)
tokens = partial(hg.Reshape, (-1, 4)), conv3(4, "tokens"), partial(hg.Conv, 4, 1, name="each")
make = chain(conv3(4, "first"), *tokens, partial(hg.Reshape, (6, 5, 4)), conv3(2, "last"))
add("grids", "chain of an image, tokens, and an image", make, (6, 5, 2), gradient=False)
generated = chain(partial(hg.Dense, 6 * 7 * 2, name="d"), partial(hg.Reshape, (6, 7, 2)), conv3(3, "c"))
add("uneven, many ranks", "chain of a generator", generated, (5,), axes=("sample", "height", "width"), batch=3)
ends = partial(hg.Pad, ((0, 0), (1, 1)), "circular", name="c"), partial(hg.Pad, ((1, 1), (0, 0)), "replicate", name="r")
add("grids", "chain of a periodic convolution", chain(*ends, partial(hg.Conv, 4, 3, name="conv")), SHAPE)


def branches(build, *makers):
    """Return a function that creates layers, and the function of nodes that `build` makes of them."""
    return lambda: partial(build, *(make() for make in makers))


excite = branches(
    lambda pool, dense, gate, conv, x: (y := conv(x)) * gate(dense(pool(y))),
    *(hg.GlobalAveragePool, partial(hg.Dense, 3), hg.Sigmoid, conv3(3, "c")),
)
add("grids", "branches of squeeze and excitation", excite, SHAPE)
add("grids", "branches of a square", lambda: lambda x: x * x, SHAPE)
bent = branches(
    lambda conv, factor, summand, x, numbers: conv(x) * factor(numbers) + summand(numbers),
    *(conv3(3, "c"), partial(hg.Dense, 3, name="f"), partial(hg.Dense, 3, name="s")),
)
add("grids", "branches of numbers of a sample", bent, [SHAPE, (4,)])
arithmetic = lambda: lambda x: (1 - hg.Sigmoid()(x)) * x - 0.5 * x / 3 + 2  # noqa: E731
add("grids", "branches of arithmetic", arithmetic, SHAPE, gradient=False)
add("grids", "branches of a value added to itself", lambda: lambda x: hg.Add()(x, x), SHAPE)
add("grids", "branches of a relu added to itself", lambda: lambda x: hg.Add("relu")(*[hg.ReLU()(x)] * 2), SHAPE)
skip = branches(
    lambda conv, crop, both, x: both(crop(x, small := conv(x)), small),
    *(partial(hg.Conv, 2, 3, name="c"), partial(hg.Crop, name="crop"), partial(hg.Concat, name="both")),
)
add("grids", "branches of convolutions without padding", skip, (7, 6, 5))
for sizes in (5, (2, 1, 2)):
    reverse = branches(
        lambda split, both, x: both(*reversed(split(x))), partial(hg.Split, sizes, "s"), partial(hg.Concat, name="b")
    )
    add("grids", f"branches of pieces {sizes}", reverse, (7, 6, 5))
    add("channels", f"branches of pieces {sizes}", reverse, (7, 6, 5), axes=("height", "channel"))
for kind in (hg.StochasticDepth, hg.ChannelDropout):
    residual = branches(lambda conv, drop, x: x + drop(conv(x)), conv3(3, "c"), partial(kind, 0.5, "d"))
    add("uneven, many ranks", f"branches of {kind.__name__}", residual, SHAPE, batch=5, gradient=False)
attended = branches(
    # Without biases of keys, whose gradients are zero but for rounding. The gradients of an input read thrice add up.
    lambda conv, attend, x: (y := conv(x)) + attend(y),
    conv3(8, "c"),
    partial(hg.MultiHeadAttention, 4, width=3, groups=2, qkv_bias=False, bias="relative", name="m"),
)
add("grids", "branches of attention", attended, (6, 5, 4))
add("grids", "slice of vectors", partial(hg.Slice, 1, 4), (5,), gradient=False)


@pytest.mark.parametrize(("cut", "make", "shape", "options", "turn"), CASES)
def test_exact(cut, make, shape, options, turn, monkeypatch):
    if cut.startswith("uneven"):
        skew(monkeypatch)
    options = dict(options)
    if MPI.COMM_WORLD.size > SMALLEST.get(cut, 1):
        options["gradient"] = False
    if turn is not None:
        options["axes"] = axes_in_turn(MPI.COMM_WORLD.size, axes_of(shape, options), turn)
    check_layer(make, shape, **options)


#: Under cuts these are not what one process computes: see test_batch_norm.
OWN_STATISTICS = {name: (lambda name=name: hg.BatchNorm(name), SPATIAL) for name in ("local", "sample")}
FEWER_CASES = {**LAYERS, "custom": (Centre, SPATIAL), **OWN_STATISTICS}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
@pytest.mark.parametrize("name", FEWER_CASES)
def test_exact_on_fewer_ranks(name, backend, dtype, monkeypatch):
    poison(monkeypatch)
    make, shapes = FEWER_CASES[name]
    first = (axis_names(len(shapes[0]) + 1)[1:-1] or ("sample",))[0]
    options = {"backend": backend, "dtype": dtype, "steps": 2}
    with Communicator(MPI.COMM_SELF) as alone, Communicator(MPI.COMM_WORLD) as comm:
        for parts in ({first: 1}, {first: 2}, {"sample": 2}):
            found = run_layer(make, shapes, comm, parts, **options)
            fault = None
            if found is not None and not (name in OWN_STATISTICS and parts != {first: 1}):
                want = run_layer(make, shapes, alone, {}, **options)
                fault = compare(found, want, 256.0, dtype, str(parts))
            comm.agree(fault)


EACH = 4


def seeds(comm, first, group, groups):
    """Return the numbers of the networks of a group; every number of ranks has networks of its own."""
    at = first + ((comm.size - 1) * groups + group) * EACH
    return range(at, at + EACH)


def check(seed, comm, backend="numpy", dtype="float64", keeps=True, debug=False):
    graphs = Graphs(seed)
    network = graphs.network()
    strategy = graphs.strategy(network, comm.size)
    if not keeps:  # an output that is read after the step is kept
        strategy = graphs.recomputed(strategy)
    found = run(network, comm, graphs.batch, strategy, (0, 1), backend, dtype, keeps, debug)
    fault = None
    if comm.rank == 0:
        with Communicator(MPI.COMM_SELF) as alone:
            want = run(Graphs(seed).network(), alone, graphs.batch, None, (1,), keeps=keeps)
        fault = compare(found, want, 512.0, dtype, f"seed {seed}, {strategy}")
    comm.agree(fault)


@pytest.mark.mpi
@pytest.mark.parametrize("group", range(6))
def test_random_networks(group, monkeypatch):
    poison(monkeypatch)
    if group % 3 == 2:
        skew(monkeypatch)
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in seeds(comm, 0, group, 6):
            check(seed, comm)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("group", range(3))
def test_random_networks_that_keep_nothing(group, backend):
    """Random networks are right if the memory of all arrays that later operations do not declare is overwritten."""
    dtype = "float64" if backend == "numpy" else "float32"
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in seeds(comm, 1000, group, 3):
            check(seed, comm, backend, dtype, keeps=False)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("group", range(2))
def test_kernels_of_random_networks_use_what_they_declare(group, backend):
    """Random networks are right if arrays that an operation holds and does not declare are NaN while it runs."""
    dtype = "float64" if backend == "numpy" else "float32"
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in seeds(comm, 2000, group, 2):
            check(seed, comm, backend, dtype, keeps=False, debug=True)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [(3, 7, 2), (2, 1, 2), (5, 3)])
def test_a_layer_that_reads_whole_samples_owes_nothing_where_it_makes_nothing(shape, monkeypatch):
    """Ranks without output add zeros to the gradient of a whole sample, not the undefined contents of their memory."""
    poison(monkeypatch)
    check_layer(Centre, shape)


@pytest.mark.mpi
def test_two_inputs_of_different_halos(monkeypatch):
    skew(monkeypatch)
    check_layer(lambda: Gate(2), [(7, 6, 2)] * 2, batch=3)


#: Layers that read what they own of their input, without a halo.
POINTWISE = {
    "relu": hg.ReLU,
    "gelu": hg.GELU,
    "hard sigmoid": hg.HardSigmoid,
    "clamp": hg.Clamp,
    "tanh": hg.Tanh,
    "softmax": hg.Softmax,
    "log softmax": hg.LogSoftmax,
    "affine": lambda name: hg.Affine(-0.5, 0.7, name),
    "channel shuffle": lambda name: hg.ChannelShuffle(2, name),
    "dropout": lambda name: hg.Dropout(0.4, name),
    "local response norm": lambda name: hg.LocalResponseNorm(3, name=name),
    "batch norm": lambda name: hg.BatchNorm(name=name),
    "group norm": lambda name: hg.GroupNorm(2, name=name),
    "layer norm": lambda name: hg.LayerNorm("channels", name=name),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("kind", POINTWISE)
def test_the_owned_part_of_an_input_that_has_a_halo_for_another_layer(kind, backend):
    """A pointwise layer reads the owned part of an input that has a halo for another layer; results are exact."""

    def both(x):
        return hg.Add()(POINTWISE[kind](name="own")(x), hg.Conv(4, 3, padding=1, name="c")(x))

    dtype = "float64" if backend == "numpy" else "float32"
    check_layer(lambda: both, (6, 5, 4), backend=backend, dtype=dtype, gradient=False)


class Blur(hg.Layer):
    """Custom layer ``y = amount * (sum of x over three rows)`` per channel, which needs only its block of channels."""

    stencil = hg.Stencil((3, 1), padding=(1, 0))
    cuts_channels = "channelwise"

    def parameters(self, shape):
        return {"amount": hg.Parameter((shape[-1],), "ones", channel_axis=0), "shift": hg.Parameter((1,))}

    def _rows(self, array):
        return [array[:, i : array.shape[1] - 2 + i] for i in range(3)]

    def forward(self, inputs, params, box):
        return params["amount"] * sum(self._rows(inputs[0])) + params["shift"]

    def backward(self, dy, inputs, params, box):
        dx = np.zeros_like(inputs[0])
        for view in self._rows(dx):
            view += params["amount"] * dy
        amount = np.sum(dy * sum(self._rows(inputs[0])), axis=(0, 1, 2))
        return [dx], {"amount": amount, "shift": np.sum(dy, keepdims=True).reshape(1)}


class GateOfChannels(Gate):
    """`Gate` whose channels may be cut: its input boxes follow those of the output."""

    cuts_channels = "channelwise"


@pytest.mark.mpi
def test_channels_of_layers_of_ones_own(monkeypatch):
    """Custom layers with cut channels are exact: parameters along channels are cut, others are whole and summed."""
    poison(monkeypatch)
    axes = ("sample", "height", "channel")
    check_layer(Blur, (7, 5, 6), axes=axes)
    check_layer(lambda: GateOfChannels(1), [(7, 6, 5)] * 2, axes=axes, gradient=False)


# -- check_layer of a loss ---------------------------------------------------------------------------


class Cubic(hg.Loss):
    """mean over positions of w sum_c |x - t|^3; with a `factor` its gradient is wrong."""

    takes_weights = True
    factor = 3

    def local(self, prediction, target, dx, scale, work, weights=None):
        error, weight = prediction - target, scale if weights is None else scale * weights
        if dx is not None:
            np.multiply(error * np.abs(error), self.factor * weight, out=dx)
        return np.sum(weight * np.abs(error) ** 3)


class Wrong(Cubic):
    factor = 3.1


class Slopes(hg.Loss):
    """mean of (d x - d t)^2 for differences d along rows; with `forgets` its gradient omits the halo."""

    stencil = hg.Stencil(kernel=(3, 1))
    forgets = False

    def local(self, prediction, target, dx, scale, work, weights=None):
        error = prediction - target
        slope = error[:, 2:] - error[:, :-2]
        if dx is not None:
            dx.fill(0)
            dx[:, 2:] += 2 * scale * slope
            dx[:, :-2] -= 2 * scale * slope
            if self.forgets and dx.shape[1] < 9:
                dx[:, 0] = dx[:, -1] = 0
        return scale * np.sum(slope**2)


class Forgetful(Slopes):
    forgets = True


@pytest.mark.ranks(1, 2)
def test_check_layer_takes_a_loss():
    shapes = [(9, 8, 3), (9, 8, 3)]
    check_layer(Cubic, shapes)
    check_layer(Cubic("cubic"), [*shapes, (9, 8, 1)])
    check_layer(Slopes, shapes)
    with pytest.raises(AssertionError, match=r"gradient dx0: .* from backward\(\), .* numerically"):
        check_layer(Wrong, shapes)
    if MPI.COMM_WORLD.size > 1:
        with pytest.raises(AssertionError, match="dx0 differs from one process by"):
            check_layer(Forgetful, shapes)
