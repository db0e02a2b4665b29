"""Tests of torch functions that its exporters write as several operators, or under another operator's name."""

from __future__ import annotations

import importlib.util

import pytest

import halograd as hg
from tests.interchange.support import EXPORTERS, as_module, check_step, export, first, samples, together, torch

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
