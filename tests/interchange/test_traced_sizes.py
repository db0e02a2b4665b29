"""Tests of models that are imported with other extents than those of their export."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from tests.interchange.support import EXPORTERS, as_module, export, first, last, predicted, samples, torch

pytestmark = pytest.mark.torch
OWN, OTHER = (8, 12, 3), (16, 20, 3)


def _frozen():
    """Return a dictionary by name: a module whose export contains sizes of its input, and the kind of node that
    contains them.
    """
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    def conv(stride=1):
        return nn.Conv2d(3, 4, 3, stride, 1)

    def whole(m, x):
        return m.d(functional.avg_pool2d(m.c(x), x.shape[2:]))

    def pooled(m, x):
        y = m.c(x)
        return lib.cat([y, functional.interpolate(y.mean((2, 3), keepdim=True), size=y.shape[-2:])], 1)

    def expanded(m, x):
        y = m.c(x)
        return y.mean((2, 3), keepdim=True).expand(-1, -1, *y.shape[2:])

    return {
        "resize to the input": (
            lambda: as_module(lambda m, x: functional.interpolate(m.c(x), x.shape[-2:], mode="bilinear"), c=conv(2)),
            "Resize",
        ),
        "resize to another value": (lambda: as_module(pooled, c=conv()), "Resize"),
        "expand": (lambda: as_module(expanded, c=conv()), "Expand"),
        "cut to a half": (lambda: as_module(lambda m, x: m.c(x)[:, :, : x.shape[2] // 2], c=conv()), "Slice"),
        "second half": (lambda: as_module(lambda m, x: m.c(x)[:, :, x.shape[2] // 2 :], c=conv()), "Slice"),
        "middle": (
            lambda: as_module(lambda m, x: m.c(x)[..., x.shape[3] // 4 : x.shape[3] // 4 + 6], c=conv()),
            "Slice",
        ),
        "pool over everything": (
            lambda: as_module(whole, c=conv(), d=nn.Conv2d(4, 2, 1)),
            "AveragePool",
        ),
        "view": (lambda: as_module(lambda m, x: m.c(x).reshape(2, 4, *x.shape[2:]).relu(), c=conv()), "Reshape"),
    }


FROZEN = list(_frozen()) if importlib.util.find_spec("torch") else []


NEW = ("resize to the input", "expand", "second half")


@pytest.mark.parametrize("name, exporter", [*((name, "old") for name in FROZEN), *((name, "dynamo") for name in NEW)])
def test_sizes_of_the_example_are_refused_at_other_extents(name, exporter, tmp_path):
    """At other extents a model with fixed sizes is an error that names the node, even if only the result differs."""
    make, kind = _frozen()[name]
    module, x = make().double(), samples(*OWN)
    path = export(module, first(x), tmp_path / "m.onnx", exporter)
    (y,) = predicted(hg.onnx.load(path, {"x": OWN}), x).values()
    want = last(module(first(x)))
    np.testing.assert_allclose(y.reshape(want.shape), want, rtol=0, atol=1e-12)
    for shape in (OTHER, (16, 12, 3) if name in ("cut to a half", "second half") else (8, 20, 3)):
        with pytest.raises(UserError, match=rf"\({kind}\): expected sizes that follow .* got .*; export with dynamic_"):
            hg.onnx.load(path, {"x": shape})


def _free():
    """Return a dictionary by name: modules that are correct at all extents, although some of their values have a
    fixed size.
    """
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    def gated(m, x):
        y = m.c(x)
        return y[:, :, 1:-1] * lib.sigmoid(m.d(functional.adaptive_avg_pool2d(y, 1)))

    def upsampled(m, x):
        y = functional.max_pool2d(m.n(m.c(x)), 2)
        return lib.cat([m.c(x), functional.interpolate(y, scale_factor=2, mode="bilinear")], 1)

    def classes(m, x):
        y = m.c(x).mean((2, 3))
        return m.l(y).reshape(-1, 2)

    conv = lambda: nn.Conv2d(3, 4, 3, padding=1)  # noqa: E731
    return {
        "gate, slice": lambda: as_module(gated, c=conv(), d=nn.Conv2d(4, 4, 1)),
        "u-net": lambda: as_module(upsampled, c=conv(), n=nn.BatchNorm2d(4)),
        "classes": lambda: as_module(classes, c=conv(), l=nn.Linear(4, 2)),
    }


@pytest.mark.parametrize(
    "name, exporter", [*((name, "old") for name in (_free() if FROZEN else ())), ("u-net", "dynamo")]
)
def test_what_follows_the_input_is_read_at_other_extents(name, exporter, tmp_path):
    module = _free()[name]().double()
    path = export(module, first(samples(*OWN)), tmp_path / "m.onnx", exporter)
    for shape in (OTHER, (5 if name != "u-net" else 6, 12, 3)):
        x = samples(*shape)
        (y,) = predicted(hg.onnx.load(path, {"x": shape}), x).values()
        np.testing.assert_allclose(y, last(module(first(x))), rtol=0, atol=1e-12)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_sizes_follow_the_input_where_the_file_leaves_them_open(exporter, tmp_path):
    lib = torch()
    make, _ = _frozen()["resize to the input"]
    module, names = make().double(), {0: "n", 2: "h", 3: "w"}
    dynamic = {"dynamic_axes": {"x": names}}
    if exporter == "dynamo":
        dynamic = {"dynamic_shapes": (dict.fromkeys(names, lib.export.Dim.DYNAMIC),)}
    path = export(module, first(samples(*OWN)), tmp_path / "m.onnx", exporter, **dynamic)
    x = samples(*OTHER)
    (y,) = predicted(hg.onnx.load(path, {"x": OTHER}), x).values()
    np.testing.assert_allclose(y, last(module(first(x))), rtol=0, atol=1e-12)
