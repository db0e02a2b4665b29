"""Tests that layers of every kind compute the same as torch, forward and backward."""

import operator
from functools import partial
from itertools import product

import pytest

import halograd as hg
from halograd.kernels.geometry import MODES
from tests.layers.cases import (
    ACTIVATIONS,
    ADAPTIVE,
    ADAPTIVE_CASES,
    CEIL,
    GATES,
    NORMS,
    PADS,
    POOLS,
    RESIZES,
    SCALES,
    SHUFFLES,
    TRANSPOSED,
    conv,
    rounded_up,
    transposed,
)
from tests.layers.oracle import check_torch, torch, weights

SHAPE = (7, 6, 3)
BACKENDS = {"numpy": "float64", "onednn": "float32"}
CASES = []


def add(name, make, shapes, function, backend="numpy"):
    """Add a case: input shapes, and a torch function of the inputs and the named parameters."""
    CASES.append(pytest.param(make, shapes, function, BACKENDS[backend], backend, id=f"{name}, {backend}"))


def f(name, axes=""):
    """Return a function that looks up a torch function by name at each call, so that torch is imported late."""
    return lambda *inputs, **more: getattr(torch().nn.functional, f"{name}{axes}{'d' if axes else ''}")(*inputs, **more)


def _channels(x, *numbers):
    """Return a tensor of one value per channel, for ``(N, C, H, W)``."""
    return x.new_tensor(numbers).reshape(-1, 1, 1)


# -- elements and norms ----------------------------------------------------------------------------------

FUNCTIONS = {
    "relu": f("relu"),
    "leaky": lambda x: f("leaky_relu")(x, 0.2),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "gelu": f("gelu"),
    "gelu by tanh": lambda x: f("gelu")(x, approximate="tanh"),
    "silu": f("silu"),
    "elu": lambda x: f("elu")(x, 0.7),
    "hard sigmoid": lambda x: f("relu6")(x + 3) / 6,  # its own divides by 6 in float32
    "hard swish": f("hardswish"),
    "clamp": lambda x: f("hardtanh")(x, -0.5, 0.7),
    "softplus": f("softplus"),
    "mish": f("mish"),
    "affine": lambda x: 0.7 - x / 2,
    "shift": lambda x: x + 0.7,
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(1),
}
for (kind, make), backend in product(ACTIVATIONS.items(), BACKENDS):
    add(kind, partial(make, name="a"), [SHAPE], FUNCTIONS[kind], backend)
for backend in BACKENDS:
    affine = partial(hg.Affine, (-0.5, 2, 0), (0.7, 0, 0.1), "a")
    function = lambda x: x * _channels(x, -0.5, 2, 0) + _channels(x, 0.7, 0, 0.1)  # noqa: E731
    add("affine of channels", affine, [SHAPE], function, backend)

for shape in [(7, 6, 5), (9, 2), (5, 4, 3, 2)]:
    axes = (-1, *(1 for _ in shape[:-1]))
    add(f"scale {shape}", SCALES["scale"], [shape], lambda x, gamma, a=axes: x * gamma.view(a))
    shifted = lambda x, gamma, beta, a=axes: x * gamma.view(a) + beta.view(a)  # noqa: E731
    add(f"scale and shift {shape}", SCALES["scale and shift"], [shape], shifted)
    for name in ("one slope", "slopes"):
        add(f"{name} {shape}", SCALES[name], [shape], lambda x, slope: f("prelu")(x, slope))


def batch_norm(x, gamma, beta):
    return f("batch_norm")(x, None, None, gamma, beta, training=True)


NORMED = {
    "group": lambda x, gamma, beta: f("group_norm")(x, 2, gamma, beta),
    "instance": lambda x, gamma, beta: f("instance_norm")(x, weight=gamma, bias=beta),
    "layer": lambda x, gamma, beta: f("group_norm")(x, 1, gamma, beta),
    "channels": lambda x, gamma, beta: f("layer_norm")(x.movedim(1, -1), gamma.shape, gamma, beta).movedim(-1, 1),
    "rms": lambda x, gamma: f("rms_norm")(x.movedim(1, -1), gamma.shape, gamma, 1e-5).movedim(-1, 1),
}
for shape in [(6,), (9, 4), (7, 5, 3), (4, 5, 6, 2)]:
    add(f"batch norm {shape}", partial(hg.BatchNorm, name="norm"), [shape], batch_norm)
    make = partial(hg.BatchNorm, activation="relu", name="norm")
    add(f"batch norm relu {shape}", make, [shape], lambda *x, **p: batch_norm(*x, **p).relu())
for shape, kind in product([(8, 4), (7, 5, 4), (3, 4, 5, 4)], NORMS):
    add(f"{kind} norm {shape}", NORMS[kind], [shape], NORMED[kind])
for size, backend in product((1, 2, 5, 6, 20), BACKENDS):
    own = {"size": size, "alpha": 0.7, "beta": 0.75, "k": 2.0}
    function = partial(f("local_response_norm"), **own)
    add(f"response norm of {size}", partial(hg.LocalResponseNorm, **own, name="n"), [(7, 6, 9)], function, backend)

# -- windows ---------------------------------------------------------------------------------------------

for spatial, geometry in [
    ((9, 8), (3, 2, 1, 1)),
    ((9, 8), ((2, 4), 1, (1, 2), 1)),
    ((11, 9), (3, 1, 2, 2)),
    ((13,), (5, 3, 2, 1)),
    ((6, 7, 6), (3, 2, 1, 1)),
]:
    for groups, backend in product((1, 2), BACKENDS):
        own, like = geometry[1:], f("conv", len(spatial))
        function = lambda x, w, b, own=own, g=groups, like=like: like(x, weights(w), b, *own, g)  # noqa: E731
        make = conv(geometry, 4, groups=groups)
        add(f"convolution {spatial} {geometry} in {groups}", make, [(*spatial, 2)], function, backend)
for dilation in (1, 2):
    function = lambda x, w, b, d=dilation: f("conv", 2)(x, weights(w), b, padding="same", dilation=d)  # noqa: E731
    add(f"convolution with padding same by {dilation}", conv((4, 1, "same", dilation), 2), [(9, 8, 2)], function)

for name, (spatial, *geometry) in TRANSPOSED.items():
    _, stride, padding, more, dilation = geometry
    if (padding == "same" or isinstance(padding, tuple)) and name != "3-D":
        continue
    for groups, backend in product((1, 2), BACKENDS):
        own, like = (stride, padding, more, groups, dilation), f("conv_transpose", len(spatial))
        function = lambda x, w, b, own=own, like=like: like(x, weights(w), b, *own)  # noqa: E731
        make = transposed(geometry, 4, groups=groups)
        add(f"transposed {name} in {groups}", make, [(*spatial, 2)], function, backend)

#: Functions of torch, given the number of axes, and their options.
POOLED = {
    "max": lambda axes: f("max_pool", axes),
    "average": lambda axes: partial(f("avg_pool", axes), count_include_pad=True),
    "average without pad": lambda axes: partial(f("avg_pool", axes), count_include_pad=False),
}
for kind, (name, (spatial, *own)), backend in product(POOLS, CEIL.items(), BACKENDS):
    like = POOLED[kind](len(spatial))
    function = lambda x, own=own, like=like: like(x, *own, ceil_mode=True)  # noqa: E731
    add(f"{kind} pool rounded up {name}", partial(rounded_up, kind, *own), [(*spatial, 3)], function, backend)
for kind, (spatial, own) in product(
    POOLS, [((9, 8), (3, 2, 1)), ((11,), (2,)), ((6, 7, 8), (3, 2, 1)), ((9, 9), (3, 1))]
):
    pool = hg.MaxPool if kind == "max" else partial(hg.AveragePool, count_include_pad=kind == "average")
    like = POOLED[kind](len(spatial))
    function = lambda x, own=own, like=like: like(x, *own)  # noqa: E731
    add(f"{kind} pool {spatial} {own}", partial(pool, *own, name="p"), [(*spatial, 3)], function)
dilated = partial(hg.MaxPool, 3, 1, 1, 2, name="p")
add("dilated max pool", dilated, [(9, 8, 2)], lambda x: f("max_pool", 2)(x, 3, 1, 1, 2))
add("global average", partial(hg.GlobalAveragePool, "p"), [(5, 4, 3)], lambda x: x.mean((2, 3)))
for kind, (name, (spatial, size)) in product(ADAPTIVE, ADAPTIVE_CASES.items()):
    like = f(f"adaptive_{'max' if kind == 'max' else 'avg'}_pool", len(spatial))
    function = lambda x, size=size, like=like: like(x, size)  # noqa: E731
    add(f"adaptive {kind} {name}", partial(ADAPTIVE[kind], size, "p"), [(*spatial, 3)], function)


def interpolate(x, mode, size=None, scale_factor=None, **more):
    """Return torch's interpolation; for cubic with one or three axes, its rule for two is applied axis by axis."""
    made = torch().nn.functional.interpolate
    axes = x.dim() - 2
    if mode != "cubic" or axes == 2:
        named = {"linear": ("linear", "bilinear", "trilinear")[axes - 1], "cubic": "bicubic"}.get(mode, mode)
        return made(x, size, scale_factor, named, **more)
    assert size is not None or scale_factor is not None
    sizes = [size or int(n * scale_factor) for n in x.shape[2:]] if not isinstance(size, tuple) else size
    scales = None if scale_factor is None else (1, scale_factor)
    for axis, m in enumerate(sizes, start=2):  # each as the last of two axes, of which the other has one row
        rows = x.movedim(axis, -1)
        found = made(rows.reshape(-1, 1, 1, rows.shape[-1]), None if scales else (1, m), scales, "bicubic", **more)
        x = found.reshape(*rows.shape[:-1], m).movedim(-1, axis)
    return x


for (name, (spatial, how)), mode, aligned in product(RESIZES.items(), MODES, (False, True)):
    smooth = mode in ("linear", "cubic")
    if name == "a third" or (aligned and not smooth):
        continue
    given = {"scale_factor": how["scale"]} if "scale" in how else {"size": how["size"]}
    function = partial(interpolate, mode=mode, **given, **({"align_corners": aligned} if smooth else {}))
    make = partial(hg.Resize, **how, mode=mode, align_corners=aligned, name="r")
    add(f"resize {name}, {mode}" + ", aligned" * aligned, make, [(*spatial, 2)], function)

# -- places and several inputs ---------------------------------------------------------------------------

for mode, ((top, bottom), (left, right)) in PADS.items():
    own = {"pad": (left, right, top, bottom), "mode": mode, **({"value": 0.5} if mode == "constant" else {})}
    add(f"pad {mode}", partial(hg.Pad, PADS[mode], mode, 0.5, "p"), [SHAPE], partial(f("pad"), **own))
for mode in ("reflect", "replicate", "circular"):
    make = conv(((3, 5), 2, (1, 2), 1), 4, padding_mode=mode)
    pad = partial(f("pad"), pad=(2, 2, 1, 1), mode=mode)
    function = lambda x, w, b, pad=pad: f("conv", 2)(pad(x), weights(w), b, 2)  # noqa: E731
    add(f"convolution with padding mode {mode}", make, [SHAPE], function)
roll = lambda x: x.roll((3, -2), (2, 3))  # noqa: E731
add("roll", partial(hg.Roll, (3, -2), "r"), [SHAPE], roll)
add("slice", partial(hg.Slice, 1, 3, "s"), [SHAPE], lambda x: x[:, 1:3])
add("channel pad", partial(hg.ChannelPad, 1, 2, "p"), [SHAPE], partial(f("pad"), pad=(0, 0, 0, 0, 1, 2)))
add("flatten", partial(hg.Flatten, "f"), [(3, 4, 2)], lambda x: x.movedim(1, -1).flatten(1))
add("reshape", partial(hg.Reshape, (3, 4, 2), "r"), [(24,)], lambda x: x.view(-1, 3, 4, 2).movedim(-1, 1))
add("dense", partial(hg.Dense, 4, name="d"), [(6,)], lambda x, w, b: f("linear")(x, w, b))


def shuffle(x, factor):
    """Return the pixel shuffle of any number of axes, by reshaping and permuting."""
    axes, (n, channels, *spatial) = x.dim() - 2, x.shape
    cells = x.reshape(n, channels // factor**axes, *[factor] * axes, *spatial)
    order = [0, 1, *(i for axis in range(axes) for i in (2 + axes + axis, 2 + axis))]
    return cells.permute(order).reshape(n, -1, *(m * factor for m in spatial))


def both_shuffles(x, factor):
    found = f("pixel_shuffle")(x, factor)
    assert torch().equal(shuffle(x, factor), found)
    return found


for name, function, own in [
    ("shuffle", both_shuffles, 2),
    ("shuffle by 3", both_shuffles, 3),
    ("unshuffle", f("pixel_unshuffle"), 2),
    ("unshuffle by 3", f("pixel_unshuffle"), 3),
    ("of channels", f("channel_shuffle"), 3),
    ("shuffle 1-D", shuffle, 2),
    ("shuffle 3-D", shuffle, 2),
]:
    make, shape = SHUFFLES[name]
    add(f"shuffle {name}", make, [shape], lambda x, function=function, own=own: function(x, own))


def merged(x):
    """Return the positions of 2 x 2 cells as channels, in the order of torchvision's PatchMerging."""
    rows = [x[..., i::2, j::2] for j in (0, 1) for i in (0, 1)]
    return torch().cat(rows, 1)


make, shape = SHUFFLES["unshuffle by position"]
add("shuffle unshuffle by position", make, [shape], merged)
add("sum", partial(hg.Add, name="a"), [SHAPE] * 3, lambda a, b, c: a + b + c)
add("sum, relu", partial(hg.Add, "relu", name="a"), [SHAPE] * 2, lambda a, b: (a + b).relu())
add("concat", partial(hg.Concat, "c"), [(5, 4, 2), (5, 4, 3)], lambda a, b: torch().cat((a, b), 1))
for name in ("whole", "per channel, with axes", "per position", "per row"):
    add(f"multiply {name}", partial(hg.Multiply, name="m"), [SHAPE, GATES[name]], operator.mul)
    add(f"add {name}", partial(hg.BroadcastAdd, name="m"), [SHAPE, GATES[name]], operator.add)


@pytest.mark.torch
@pytest.mark.parametrize(("make", "shapes", "function", "dtype", "backend"), CASES)
def test_as_torch(make, shapes, function, dtype, backend):
    check_torch(make, shapes, function, dtype, backend)
