"""torch modules whose functions are written as several operators, and tokens of images, imported and compared."""

import importlib.util

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from tests.interchange.support import (
    EXPORTERS,
    as_module,
    check_step,
    export,
    first,
    last,
    predicted,
    samples,
    shake,
    together,
    torch,
)

pytestmark = pytest.mark.torch
SHAPE = (6, 5, 3)


def _functions():
    """Return a dictionary by name: a function after a convolution of four channels, and the kinds of layers that
    it becomes.
    """
    lib = torch()
    functional = lib.nn.functional
    respond = functional.local_response_norm

    def attention(m, y):
        pooled = functional.adaptive_avg_pool2d(y, 1), functional.adaptive_max_pool2d(y, 1)
        return y * lib.sigmoid(m.d(pooled[0]) + m.d(pooled[1]))

    def gate(m, y):
        return lib.sigmoid(m.d(y).mean((2, 3)))[:, :, None, None]

    def spatial(m, y):
        both = lib.cat([lib.max(y, 1)[0].unsqueeze(1), lib.mean(y, 1).unsqueeze(1)], 1)
        return y * lib.sigmoid(m.d(lib.cat([both, y.amax(1, keepdim=True), y.mean(1, keepdim=True)], 1))[:, :1])

    def response(m, y, axes=(2, 3), channels=1):
        y = y.permute(0, 2, 3, 1) if channels == 3 else y
        g = lib.norm(y, p=2, dim=axes, keepdim=True)
        made = y * (g / (g.mean(channels, keepdim=True) + 1e-6)) + y
        return made.permute(0, 3, 1, 2) if channels == 3 else made

    def norm(m, y, axes, centered=True):
        u = y - y.mean(axes, keepdim=True) if centered else y
        return u / lib.sqrt(u.pow(2).mean(axes, keepdim=True) + 1e-3)

    return {
        "gelu, and half of its input": (
            lambda m, y: (lambda h: h * (1 + lib.erf(y / 2**0.5)) + h)(0.5 * y),
            None,
        ),
        "selu": (lambda m, y: functional.selu(y), ["ELU", "Affine"]),
        "softplus by its parts": (lambda m, y: lib.log(1 + lib.exp(y)), ["Softplus"]),
        "norm over channels": (lambda m, y: norm(m, y, 1), ["LayerNorm"]),
        "norm over space": (lambda m, y: norm(m, y, (2, 3)), ["InstanceNorm"]),
        "root mean square": (lambda m, y: norm(m, y, 1, False), ["RMSNorm"]),
        "norm by variance": (
            lambda m, y: (y - y.mean(1, keepdim=True)) * lib.rsqrt(y.var(1, keepdim=True, unbiased=False) + 1e-3),
            ["LayerNorm"],
        ),
        "circular padding": (lambda m, y: functional.pad(y, (1, 2, 2, 0), mode="circular"), None),
        "repeated rows": (lambda m, y: lib.cat([y[:, :, :1], y, y[:, :, -1:]], 2)[:, :, :-2], None),
        "roll": (lambda m, y: lib.roll(y, (1, -2), (2, 3)), ["Roll"]),
        "rows that are joined": (lambda m, y: lib.cat([y[:, :, 3:], lib.tanh(y[:, :, 1:4])], 2), None),
        "zeros that are joined": (lambda m, y: lib.cat([lib.zeros_like(y[:, :, :2]), y[:, :, 2:]], 2), None),
        "channels of zeros": (
            lambda m, y: lib.cat([y, lib.zeros_like(y)], 1) + functional.pad(y, (0, 0, 0, 0, 1, 3)),
            ["ChannelPad", "ChannelPad", "Add"],
        ),
        "every second row": (lambda m, y: functional.pad(y[:, :, 1::2, ::2], (1, 1, 1, 2)), None),
        "mean along one axis": (lambda m, y: y + y.mean(3, keepdim=True), ["AveragePool", "BroadcastAdd"]),
        "mean along each axis": (
            lambda m, y: y * (y.mean(3, keepdim=True) + y.amax(2, keepdim=True)),
            ["AveragePool", "Resize", "MaxPool", "BroadcastAdd", "Multiply"],
        ),
        "sum over space": (lambda m, y: y * (y.sum((2, 3), keepdim=True) / 30), None),
        "channels by numbers": (lambda m, y: y[:, [2, 3, 0, 1]], ["Slice", "Slice", "Concat"]),
        "channels that are shifted": (
            lambda m, y: lib.cat(lib.split(y, [1, 3], 1)[::-1], 1),
            ["Slice", "Slice", "Concat"],
        ),
        "one channel": (lambda m, y: y * y[:, 2].unsqueeze(1), ["Slice", "Multiply"]),
        "repeated channels": (lambda m, y: y.repeat(1, 2, 1, 1), ["Concat"]),
        "repeated over space": (lambda m, y: y + m.d(y).mean((2, 3)).view(2, 4, 1, 1).repeat(1, 1, 6, 5), None),
        "halves of a gate": (
            lambda m, y: y[:, :2] * (lambda g: g[:, :2] + g[:, 2:])(m.d(y).mean((2, 3)).view(2, 4, 1, 1)),
            None,
        ),
        "largest over space": (lambda m, y: y.amax((2, 3)), ["GlobalMaxPool"]),
        "attention of channels": (attention, None),
        "clamp": (lambda m, y: y.clamp(-0.3, 0.4), ["Clamp"]),
        "clamp from below": (lambda m, y: y.clamp(min=-0.3), ["Clamp"]),
        "clamp from above": (lambda m, y: y.clamp(max=0.2), ["Clamp"]),
        "clamp to one": (lambda m, y: y.clamp(0, 1), ["Clamp"]),
        "hardtanh": (lambda m, y: functional.hardtanh(y, -0.7, 0.8), ["Clamp"]),
        "celu": (lambda m, y: functional.celu(y, 0.5), ["Affine", "ELU", "Affine"]),
        "celu of one": (lambda m, y: functional.celu(y), ["ELU"]),
        "softplus": (lambda m, y: functional.softplus(y), ["Softplus"]),
        "softplus, steep": (lambda m, y: functional.softplus(y, 3.0), ["Affine", "Softplus", "Affine"]),
        "sum of a stack": (lambda m, y: lib.stack([y, lib.tanh(y), y * 0.5], 1).sum(1), ["Tanh", "Affine", "Add"]),
        "sum of a stack of samples": (lambda m, y: lib.stack([y, lib.tanh(y)]).sum(0), ["Tanh", "Add"]),
        "mean of a stack": (lambda m, y: lib.stack([y, lib.tanh(y)], -1).mean(-1), ["Tanh", "Add", "Affine"]),
        "gate that is expanded": (lambda m, y: y * gate(m, y).expand_as(y), None),
        "summand that is expanded": (lambda m, y: gate(m, y).expand_as(y) + y, None),
        "expanded": (lambda m, y: lib.cat([y, gate(m, y).expand(-1, -1, *y.shape[2:])], 1), None),
        "convolutional attention": (spatial, None),
        "response normalization": (response, None),
        "response normalization, channels last": (lambda m, y: response(m, y, (1, 2), 3), None),
        "unit vectors": (lambda m, y: functional.normalize(y, dim=1) + y / (1 + y.abs().sum(1, keepdim=True)), None),
        "deviations": (lambda m, y: (y - y.amin(1, keepdim=True)) / (y.std((2, 3), keepdim=True) + 0.1), None),
        "mean of samples": (lambda m, y: y - y.mean((1, 2, 3), keepdim=True), None),
        "flips": (lambda m, y: lib.flip(y, [1, 2]) + y.flip(3), ["Flip", "Flip", "Add"]),
        "functions": (
            lambda m, y: lib.exp(y * 0.1) + lib.log(y * y + 1) + y.abs() + lib.sqrt(y**2 + 0.1) + 2 / (y**2 + 1),
            None,
        ),
        "convolution across channels": (
            lambda m, y: y * m.d(y.mean((2, 3)).unsqueeze(1)).sigmoid().squeeze(1)[:, :, None, None],
            None,
        ),
        "local response norm": (lambda m, y: respond(y, 3, 0.1, 0.7, 1.5), ["LocalResponseNorm"]),
        "of an even size": (lambda m, y: respond(y, 4, alpha=1.0), ["LocalResponseNorm"]),
    }


NAMES = list(_functions()) if importlib.util.find_spec("torch") else []


def _module(name):
    nn = torch().nn
    function, _ = _functions()[name]
    layers = {"c": nn.Conv2d(3, 4, 3, padding=1)}
    if name == "convolution across channels":
        layers["d"] = nn.Conv1d(1, 1, 3, padding=1)
    if name in ("attention of channels", "gate that is expanded", "summand that is expanded", "expanded"):
        layers["d"] = nn.Conv2d(4, 4, 1)
    if name in ("repeated over space", "halves of a gate", "convolutional attention"):
        layers["d"] = nn.Conv2d(4, 4, 1)
    return as_module(lambda m, x: function(m, m.c(x)), **layers).double()


#: Functions whose results have other extents, or that are one layer by the old exporter only.
APART = ["largest over space", "circular padding"]


def _check(name, module, exporter, folder):
    """Return the imported network, after a check that it computes the same as its module, with the expected layers."""
    x = samples(*SHAPE)
    network = hg.onnx.load(export(module, first(x), folder / "m.onnx", exporter, training=True))
    assert network.parameter_count == sum(p.numel() for p in module.parameters())
    _, kinds = _functions().get(name, (None, None))
    if kinds is not None:
        assert [node.layer.kind for node in network.layers.values()][1:] == kinds
    check_step(network, module, x)
    return network


@pytest.mark.parametrize("name", NAMES)
def test_functions_in_several_operators_are_those_of_torch(name, tmp_path):
    _check(name, _module(name), "old", tmp_path)


@pytest.mark.parametrize("name", [*APART, "softplus, steep"])
def test_functions_of_the_new_exporter(name, tmp_path):
    _check(name, _module(name), "dynamo", tmp_path)


def test_all_functions_of_the_new_exporter_in_one_file(tmp_path):
    names = [name for name in NAMES if name not in APART]
    network = _check("", together(*map(_module, names)), "dynamo", tmp_path)
    kinds = [node.layer.kind for node in network.layers.values()]
    assert kinds.count("Clamp") == 6 and kinds.count("LocalResponseNorm") == 2 and kinds.count("Softplus") == 3
    assert [kinds.count(kind) for kind in ("Roll", "LayerNorm", "Flip", "GlobalMaxPool")] == [1, 2, 2, 1]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_local_response_norm_of_signals(exporter, tmp_path):
    lib = torch()
    norm = lib.nn.LocalResponseNorm(3, alpha=0.5)
    module, x = lib.nn.Sequential(lib.nn.Conv1d(3, 4, 3), norm).double(), samples(7, 3)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", exporter, training=True))
    assert [node.layer.kind for node in network.layers.values()] == ["Conv", "LocalResponseNorm"]
    check_step(network, module, x)


@pytest.mark.parametrize("mode, size", [("linear", 11), ("nearest-exact", 10), ("nearest", 5)])
def test_interpolation_that_the_new_exporter_takes_apart(mode, size, tmp_path):
    """Gathered rows, and their weighted sums, become one layer."""
    lib = torch()
    resize = as_module(lambda m, x: lib.nn.functional.interpolate(x, size=size, mode=mode))
    module, x = lib.nn.Sequential(lib.nn.Conv1d(3, 4, 3), resize).double(), samples(9, 3)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", "dynamo", training=True))
    assert [node.layer.kind for node in network.layers.values()] == ["Conv", "Resize"]
    check_step(network, module, x)


#: Shape of a sample, ``(*spatial, C)``.
IMAGE = (4, 6, 8)


def _modules():
    """Return a dictionary by name: a module, and the kinds of its layers here."""
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    def vision(m, x):
        y = m.patches(x).flatten(2).transpose(1, 2)
        y = y + m.narrow(functional.gelu(m.wide(m.norm(y))))
        y = lib.cat([y[:, 1:3], y], 1)
        return m.head(m.last(y)[:, 0])

    def returned(m, x):
        n, c, h, w = x.shape
        return m.conv(m.each(x.view(n, c, h * w).permute(0, 2, 1)).permute(0, 2, 1).reshape(n, 5, h, w))

    def packed(m, x):
        n, c, h, w = x.shape
        y = x.flatten(2).transpose(1, 2)
        q, k, v = m.project(y).reshape(n, h * w, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = (k.transpose(1, 2).reshape(n, h * w, c) + v.transpose(1, 2).reshape(n, h * w, c)) * q.transpose(
            1, 2
        ).flatten(2)
        return y.transpose(1, 2).view(n, c, h, w)

    def split(m, x):
        a, b = m.project(x.flatten(2).transpose(1, 2)).chunk(2, -1)
        return (a * lib.sigmoid(b)).transpose(1, 2)

    def windows(m, x):
        n, c, h, w = x.shape
        y = x.permute(0, 2, 3, 1).view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        y = m.each(y).view(n, h // 2, w // 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, 6)
        return y.permute(0, 3, 1, 2)

    def positions_first(m, x):
        y = x.flatten(2).permute(2, 0, 1)
        length, n, c = y.shape
        y = y + 2 * m.each(functional.gelu(m.norm(y)).reshape(length * n, c)).view(length, n, c)
        return y.permute(1, 2, 0)

    vision_layers = {"patches": nn.Conv2d(8, 4, 2, 2), "norm": nn.LayerNorm(4), "wide": nn.Linear(4, 8)}
    vision_layers |= {"narrow": nn.Linear(8, 4), "last": nn.LayerNorm(4), "head": nn.Linear(4, 3)}
    kinds = ["Conv", "Reshape", "LayerNorm", "Conv", "GELU", "Conv", "Add", "Pad", "Concat", "LayerNorm", "Pad"]
    return {
        "vision transformer without attention": (as_module(vision, **vision_layers), [*kinds, "Flatten", "Dense"]),
        "back": (
            as_module(returned, each=nn.Linear(8, 5), conv=nn.Conv2d(5, 3, 3, padding=1)),
            ["Reshape", "Conv", "Reshape", "Conv"],
        ),
        "packed projections": (
            as_module(packed, project=nn.Linear(8, 24)),
            ["Reshape", "Conv", *["Slice"] * 3, "Add", "Multiply", "Reshape"],
        ),
        "split": (
            as_module(split, project=nn.Linear(8, 12)),
            ["Reshape", "Conv", "Slice", "Slice", "Sigmoid", "Multiply"],
        ),
        "windows": (as_module(windows, each=nn.Linear(8, 6)), ["Conv"]),
        "positions first": (
            as_module(positions_first, norm=nn.LayerNorm(8), each=nn.Linear(8, 8)),
            ["LayerNorm", "Conv", "Affine", "Add", "Reshape"],
        ),
    }


TOKENS_NAMES = list(_modules()) if importlib.util.find_spec("torch") else []


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", TOKENS_NAMES)
def test_outputs_and_layers(name, exporter, tmp_path):
    """Chains of Reshape and Transpose cost at most one layer; forms in between are never computed."""
    module, kinds = _modules()[name]
    module = module.double()
    shake(module)
    x = samples(*IMAGE)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", exporter))
    (ours,) = predicted(network, x).values()
    want = last(module.eval()(first(x)))
    np.testing.assert_allclose(ours, want, rtol=0, atol=1e-10 * max(1.0, np.abs(want).max()))
    found = [node.layer.kind for node in network.layers.values()]
    assert sorted(found) == sorted(kinds)


def _refused():
    functional = torch().nn.functional
    return {
        r"\(Transpose\): expected channels moved .* got \(0, 2, 1, 3\)": lambda m, x: functional.relu(
            x.transpose(1, 2)
        ),
        r"\(Reshape\): expected one that flattens samples, got \(2, 8, 4, 6\) to \(2, 16, 12\)": lambda m, x: x.reshape(
            2, 16, 12
        ),
        r"\(Gather\): expected channels by their numbers, .* got indices along axis 2": lambda m, x: x[:, :, [0, 2]],
    }


@pytest.mark.parametrize("message", _refused() if importlib.util.find_spec("torch") else [])
def test_orders_that_no_layer_has_are_refused_by_node(message, tmp_path):
    path = export(as_module(_refused()[message]), first(samples(*IMAGE)), tmp_path / "m.onnx", "old")
    with pytest.raises(UserError, match=message):
        hg.onnx.load(path)


def test_an_image_of_one_channel_has_it_last():
    """``(N, 1, H, W)`` is an image of one channel, also where its rows and columns could be positions and channels."""
    lib = torch()
    module = as_module(lambda m, x: sum(m.conv(x).unbind(1)).unsqueeze(1), conv=lib.nn.Conv2d(8, 3, 1))
    (output,) = hg.from_torch(module, lib.zeros(2, 8, 4, 6)).outputs.values()
    assert output.shape == (4, 6, 1)
