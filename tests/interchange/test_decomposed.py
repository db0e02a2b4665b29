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

    return {
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
        "local response norm": (lambda m, y: respond(y, 3, 0.1, 0.7, 1.5), ["LocalResponseNorm"]),
        "of an even size": (lambda m, y: respond(y, 4, alpha=1.0), ["LocalResponseNorm"]),
    }


NAMES = list(_functions()) if importlib.util.find_spec("torch") else []


def _module(name):
    nn = torch().nn
    function, _ = _functions()[name]
    layers = {"c": nn.Conv2d(3, 4, 3, padding=1)}
    if name in ("attention of channels", "gate that is expanded", "summand that is expanded", "expanded"):
        layers["d"] = nn.Conv2d(4, 4, 1)
    return as_module(lambda m, x: function(m, m.c(x)), **layers).double()


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


@pytest.mark.parametrize("name", ["largest over space", "softplus, steep"])
def test_functions_of_the_new_exporter(name, tmp_path):
    _check(name, _module(name), "dynamo", tmp_path)


def test_all_functions_of_the_new_exporter_in_one_file(tmp_path):
    names = [name for name in NAMES if name != "largest over space"]
    network = _check("", together(*map(_module, names)), "dynamo", tmp_path)
    kinds = [node.layer.kind for node in network.layers.values()]
    assert kinds.count("Clamp") == 5 and kinds.count("LocalResponseNorm") == kinds.count("Softplus") == 2
    assert kinds.count("Add") == 4 and kinds.count("GlobalMaxPool") == 1


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_local_response_norm_of_signals(exporter, tmp_path):
    lib = torch()
    norm = lib.nn.LocalResponseNorm(3, alpha=0.5)
    module, x = lib.nn.Sequential(lib.nn.Conv1d(3, 4, 3), norm).double(), samples(7, 3)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", exporter, training=True))
    assert [node.layer.kind for node in network.layers.values()] == ["Conv", "LocalResponseNorm"]
    check_step(network, module, x)
