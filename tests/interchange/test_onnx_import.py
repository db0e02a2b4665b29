"""Modules of torch, exported by both exporters, imported, and compared with torch itself."""

from __future__ import annotations

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from tests.interchange.support import EXPORTERS, export, first, last, predicted, samples, shake, torch

pytestmark = pytest.mark.torch


def _modules():
    """By name: what makes a module, and the shape (*spatial, C) of a sample."""
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    class Of(nn.Module):
        """A function of its input, with layers."""

        def __init__(self, function, **layers):
            super().__init__()
            self.function = function
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, x):
            return self.function(self, x)

    def excited(m, x):
        gate = m.expand(functional.relu(m.squeeze(functional.adaptive_avg_pool2d(x, 1))))
        return x * functional.hardsigmoid(gate)

    def channels_last(m, x):
        y = m.norm(x.permute(0, 2, 3, 1))
        return x + m.second(functional.gelu(m.first(y))).permute(0, 3, 1, 2) * m.scale

    def pyramid(m, x):
        y = functional.relu(m.norm(m.one(functional.adaptive_avg_pool2d(x, 1))))
        return lib.cat([m.two(x), functional.interpolate(y, size=x.shape[-2:], mode="bilinear")], 1)

    def halves(m, x):
        one, two = x.chunk(2, 1)
        return one[:, :, 1:-1] + two[:, :, :6, :]

    def blocks(m, x):
        y = Of(channels_last, norm=nn.LayerNorm(4), first=nn.Linear(4, 8), second=nn.Linear(8, 4))
        y.scale = nn.Parameter(lib.ones(4, 1, 1))
        return y

    image = (8, 7, 4)
    return {
        "conv": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (1, 2)), image),
        "conv in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), image),
        "conv same": (lambda: nn.Conv2d(4, 6, 4, padding="same"), image),
        "conv 1d": (lambda: nn.Conv1d(3, 4, 3, 2, 1), (9, 3)),
        "conv 3d": (lambda: nn.Conv3d(2, 3, 3, 1, (0, 1, 2)), (4, 5, 3, 2)),
        "conv transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1), image),
        "conv transposed in groups": (lambda: nn.ConvTranspose2d(4, 6, 4, 2, groups=2, bias=False), image),
        "batch norm": (lambda: nn.BatchNorm2d(4, eps=1e-3, momentum=0.3), image),
        "conv, norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()), image),
        "group norm": (lambda: nn.GroupNorm(2, 4), image),
        "group norm 3d": (lambda: nn.Sequential(nn.GroupNorm(4, 4), nn.ReLU()), (3, 4, 5, 4)),
        "instance norm": (lambda: nn.InstanceNorm2d(4), image),
        "instance norm, affine": (lambda: nn.InstanceNorm2d(4, affine=True), image),
        "layer norm": (lambda: nn.LayerNorm([4, 8, 7], elementwise_affine=False), image),
        "layer norm of vectors": (lambda: nn.LayerNorm(4), (4,)),
        "relu": (nn.ReLU, image),
        "relu 6": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU6()), image),
        "clamp": (lambda: Of(lambda m, x: x.clamp(min=-0.3)), image),
        "leaky relu": (lambda: nn.LeakyReLU(0.2), image),
        "sigmoid": (nn.Sigmoid, image),
        "tanh": (nn.Tanh, image),
        "gelu": (nn.GELU, image),
        "silu": (nn.SiLU, image),
        "hard swish": (nn.Hardswish, image),
        "hard sigmoid": (nn.Hardsigmoid, image),
        "elu": (lambda: nn.ELU(0.7), image),
        "softmax": (lambda: nn.Softmax(1), image),
        "dropout": (lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.3)), image),
        "max pool": (lambda: nn.MaxPool2d(3, 2, 1), image),
        "max pool, rounded up": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), image),
        "average pool": (lambda: nn.AvgPool2d(3, 2, 1), image),
        "average pool of what is there": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), image),
        "global pool": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), image),
        "mean": (lambda: Of(lambda m, x: x.mean((2, 3))), image),
        "nearest": (lambda: nn.Upsample(scale_factor=2), image),
        "nearest, to a size": (lambda: Of(lambda m, x: functional.interpolate(x, size=(5, 11))), image),
        "bilinear": (lambda: nn.Upsample(scale_factor=(2, 1.5), mode="bilinear"), image),
        "trilinear": (lambda: nn.Upsample(size=(4, 9, 5), mode="trilinear"), (3, 4, 5, 2)),
        "pad": (lambda: Of(lambda m, x: functional.pad(x, (1, 2, 0, -3), value=0.5)), image),
        "pad by mirroring": (lambda: nn.ReflectionPad2d((1, 2, 3, 4)), image),
        "pad by repeating": (lambda: nn.ReplicationPad2d((1, 2, 3, 4)), image),
        "slices": (lambda: Of(halves), image),
        "flatten": (lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4 * 8 * 7, 5)), image),
        "view": (lambda: Of(lambda m, x: m.f(x.view(x.size(0), -1)), f=nn.Linear(4 * 8 * 7, 5, bias=False)), image),
        "flatten, norm": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4 * 56), nn.Linear(224, 5)), image),
        "gate": (lambda: Of(excited, squeeze=nn.Conv2d(4, 2, 1), expand=nn.Conv2d(2, 4, 1)), image),
        "mask": (lambda: Of(lambda m, x: x * lib.sigmoid(m.c(x)), c=nn.Conv2d(4, 1, 1)), image),
        "residual": (
            lambda: Of(lambda m, x: lib.relu(m.n(m.c(x)) + x), c=nn.Conv2d(4, 4, 3, padding=1), n=nn.BatchNorm2d(4)),
            image,
        ),
        "channels last": (lambda: blocks(None, None), image),
        "pyramid": (
            lambda: Of(pyramid, one=nn.Conv2d(4, 3, 1), two=nn.Conv2d(4, 3, 1), norm=nn.BatchNorm2d(3)),
            image,
        ),
    }


NAMES = list(_modules()) if __import__("importlib").util.find_spec("torch") else []


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_torch(name, exporter, tmp_path):
    make, shape = _modules()[name]
    module = make().double()
    shake(module)
    x = samples(*shape)
    path = export(module, first(x), tmp_path / "m.onnx", exporter)
    network = hg.onnx.load(path)
    module.eval()
    (ours,) = predicted(network, x).values()
    want = last(module(first(x)))
    np.testing.assert_allclose(ours, want, rtol=0, atol=1e-10 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_for_training_has_the_parameters_of_torch(name, exporter, tmp_path):
    """In number, so that none is missing and none is trained twice; names are those of torch."""
    make, shape = _modules()[name]
    module = make().double()
    shake(module)
    network = hg.onnx.load(export(module, first(samples(*shape)), tmp_path / "m.onnx", exporter, training=True))
    assert network.parameter_count == sum(p.numel() for p in module.parameters())
    named = {key.rpartition(".")[0] for key, _ in module.named_parameters()} - {""}
    layers = {key.rpartition("/")[0] for key in network.parameters()}
    assert named - {"scale"} <= layers | {"scale"}


def test_refusals_name_the_node(tmp_path):
    lib = torch()
    module = lib.nn.Sequential(lib.nn.Conv2d(4, 4, 1), lib.nn.PixelShuffle(2))
    path = export(module, lib.zeros(2, 4, 8, 8), tmp_path / "m.onnx", "old")
    with pytest.raises(UserError, match=r"node '/1/DepthToSpace' \(DepthToSpace\): expected an operator that has a"):
        hg.onnx.load(path)
