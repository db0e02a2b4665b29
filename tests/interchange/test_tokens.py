"""torch modules that turn images into tokens and back, imported and compared with torch."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from tests.interchange.support import EXPORTERS, as_module, export, first, last, predicted, samples, shake, torch

pytestmark = pytest.mark.torch

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


NAMES = list(_modules()) if importlib.util.find_spec("torch") else []


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NAMES)
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
