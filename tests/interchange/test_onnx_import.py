"""torch modules are exported by both exporters, imported, and compared with torch."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from tests.interchange.support import EXPORTERS, as_module, export, first, last, predicted, samples, shake, torch

pytestmark = pytest.mark.torch


def _modules():
    """Return a dictionary by name: a function that builds a module, and the shape (*spatial, C) of a sample."""
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

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

    def pooled_behind_permutes(m, x):
        y = functional.relu(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return m.linear(functional.adaptive_avg_pool2d(y, 1).flatten(1))

    def blocks(m, x):
        y = as_module(channels_last, norm=nn.LayerNorm(4), first=nn.Linear(4, 8), second=nn.Linear(8, 4))
        y.scale = nn.Parameter(lib.ones(4, 1, 1))
        return y

    def embedded(m, x):
        return m.c(x) + functional.silu(m.f(x.mean((2, 3))))[:, :, None, None]

    def shuffled(m, x):
        n, c, h, w = x.shape
        return lib.relu(x).view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)

    def scales(m, x):
        y = functional.relu(m.norm(m.head(x)))
        z = m.slope(m.norm(m.head(functional.max_pool2d(y, 2))))
        both = functional.interpolate(z, size=x.shape[-2:], mode="bilinear") + m.slope(m.head(y))
        vectors = m.linear(functional.adaptive_avg_pool2d(both, 1).flatten(1))
        return m.linear(functional.relu(vectors))

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
        "clamp": (lambda: as_module(lambda m, x: x.clamp(min=-0.3)), image),
        "leaky relu": (lambda: nn.LeakyReLU(0.2), image),
        "sigmoid": (nn.Sigmoid, image),
        "tanh": (nn.Tanh, image),
        "gelu": (nn.GELU, image),
        "gelu by tanh": (lambda: nn.GELU(approximate="tanh"), image),
        "silu": (nn.SiLU, image),
        "hard swish": (nn.Hardswish, image),
        "hard sigmoid": (nn.Hardsigmoid, image),
        "elu": (lambda: nn.ELU(0.7), image),
        "softmax": (lambda: nn.Softmax(1), image),
        "log softmax": (lambda: nn.LogSoftmax(1), image),
        "softplus": (nn.Softplus, image),
        "softplus, steep": (lambda: nn.Softplus(beta=3), image),
        "mish": (nn.Mish, image),
        "numbers": (lambda: as_module(lambda m, x: (1 - m.c(2 * x / 3 - 1)) * 0.5, c=nn.Conv2d(4, 4, 1)), image),
        "numbers of one channel": (lambda: as_module(lambda m, x: 0.1 * m.c(x) + 3, c=nn.Conv2d(4, 1, 1)), image),
        "differences": (
            lambda: as_module(lambda m, x: lib.relu(-x - m.c(x)) - lib.sigmoid(m.c(x) - x), c=nn.Conv2d(4, 4, 1)),
            image,
        ),
        "summand with fewer extents": (
            lambda: as_module(
                lambda m, x: lib.relu(x + m.c(functional.adaptive_avg_pool2d(x, 1))), c=nn.Conv2d(4, 4, 1)
            ),
            image,
        ),
        "embedding": (lambda: as_module(embedded, c=nn.Conv2d(4, 4, 1), f=nn.Linear(4, 4)), image),
        "channel shuffle": (lambda: as_module(shuffled), image),
        "dropout": (lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.3)), image),
        "max pool": (lambda: nn.MaxPool2d(3, 2, 1), image),
        "max pool, rounded up": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), image),
        "average pool": (lambda: nn.AvgPool2d(3, 2, 1), image),
        "average pool of what is there": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), image),
        "global pool": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), image),
        "global pool behind permutes": (lambda: as_module(pooled_behind_permutes, linear=nn.Linear(4, 3)), image),
        "padding around one position": (
            lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1, padding=1)),
            image,
        ),
        "mean": (lambda: as_module(lambda m, x: x.mean((2, 3))), image),
        "nearest": (lambda: nn.Upsample(scale_factor=2), image),
        "nearest, to a size": (lambda: as_module(lambda m, x: functional.interpolate(x, size=(5, 11))), image),
        "bilinear": (lambda: nn.Upsample(scale_factor=(2, 1.5), mode="bilinear"), image),
        "trilinear": (lambda: nn.Upsample(size=(4, 9, 5), mode="trilinear"), (3, 4, 5, 2)),
        "pad": (lambda: as_module(lambda m, x: functional.pad(x, (1, 2, 0, -3), value=0.5)), image),
        "pad by mirroring": (lambda: nn.ReflectionPad2d((1, 2, 3, 4)), image),
        "pad by repeating": (lambda: nn.ReplicationPad2d((1, 2, 3, 4)), image),
        "slices": (lambda: as_module(halves), image),
        "flatten": (lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4 * 8 * 7, 5)), image),
        "view": (
            lambda: as_module(lambda m, x: m.f(x.view(x.size(0), -1)), f=nn.Linear(4 * 8 * 7, 5, bias=False)),
            image,
        ),
        "flatten, slopes": (lambda: nn.Sequential(nn.Flatten(), nn.PReLU(224), nn.Linear(224, 5)), image),
        "flatten, slope": (lambda: nn.Sequential(nn.Flatten(), nn.PReLU(), nn.Linear(224, 5)), image),
        "flatten, norm": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4 * 56), nn.Linear(224, 5)), image),
        "gate": (lambda: as_module(excited, squeeze=nn.Conv2d(4, 2, 1), expand=nn.Conv2d(2, 4, 1)), image),
        "mask": (lambda: as_module(lambda m, x: x * lib.sigmoid(m.c(x)), c=nn.Conv2d(4, 1, 1)), image),
        "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(4, 18, 1), nn.PixelShuffle(3)), image),
        "pixel unshuffle": (lambda: nn.Sequential(nn.Conv2d(4, 3, 1), nn.PixelUnshuffle(2)), (8, 6, 4)),
        "called again": (
            lambda: as_module(
                scales,
                head=nn.Conv2d(4, 4, 3, padding=1),
                norm=nn.GroupNorm(2, 4),
                slope=nn.PReLU(4),
                linear=nn.Linear(4, 4),
            ),
            image,
        ),
        "residual": (
            lambda: as_module(
                lambda m, x: lib.relu(m.n(m.c(x)) + x), c=nn.Conv2d(4, 4, 3, padding=1), n=nn.BatchNorm2d(4)
            ),
            image,
        ),
        "residual, twice": (
            lambda: as_module(
                lambda m, x: lib.relu(lib.relu(m.n(m.c(x)) + x) + m.d(x)),
                c=nn.Conv2d(4, 4, 1),
                d=nn.Conv2d(4, 4, 1),
                n=nn.BatchNorm2d(4),
            ),
            image,
        ),
        "activations": (
            lambda: nn.Sequential(
                *(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.GroupNorm(2, 4), nn.Tanh()),
                *(nn.ConvTranspose2d(4, 4, 2, 2), nn.ELU(0.7), nn.Conv2d(4, 2, 1), nn.LeakyReLU(0.3), nn.Sigmoid()),
            ),
            image,
        ),
        "channels last": (lambda: blocks(None, None), image),
        "pyramid": (
            lambda: as_module(pyramid, one=nn.Conv2d(4, 3, 1), two=nn.Conv2d(4, 3, 1), norm=nn.BatchNorm2d(3)),
            image,
        ),
    }


NAMES = list(_modules()) if importlib.util.find_spec("torch") else []
#: Modules that the two exporters write differently, or may; the new one takes a second for each.
ALSO_NEW = [
    *("conv", "conv same", "conv transposed", "conv, norm", "group norm", "instance norm", "layer norm", "gelu"),
    *("silu", "relu 6", "elu", "hard swish", "dropout", "max pool, rounded up", "global pool", "bilinear"),
    *("nearest, to a size", "pad", "slices", "view", "gate", "residual", "channels last", "pyramid"),
    *("global pool behind permutes", "pixel shuffle", "pixel unshuffle"),
    *("activations", "mish", "gelu by tanh", "numbers", "differences", "embedding", "channel shuffle"),
]
CASES = [*((name, "old") for name in NAMES), *((name, "dynamo") for name in ALSO_NEW)]
#: Modules for which the new exporter writes more operators without optimization.
TRAINED_NEW = [
    *("conv in groups", "conv, norm", "group norm", "instance norm", "layer norm", "elu", "slices", "gate"),
    *("channels last", "global pool behind permutes"),
]
TRAINED = [*((name, "old") for name in NAMES), *((name, "dynamo") for name in TRAINED_NEW)]


def _imported(name, folder, exporter, training=False):
    """Import a module with random parameters; return the network, the module, and a batch of samples."""
    make, shape = _modules()[name]
    module = make().double()
    shake(module)
    x = samples(*shape)
    # The old exporter does not distinguish a module's learned factor from a buffer.
    buffers = () if name == "channels last" else None
    return hg.onnx.load(export(module, first(x), folder / "m.onnx", exporter, training), buffers=buffers), module, x


def _check_outputs(network, module, x):
    """Check that a network and the module have the same outputs in evaluation."""
    module.eval()
    (ours,) = predicted(network, x).values()
    want = last(module(first(x)))
    np.testing.assert_allclose(ours, want, rtol=0, atol=1e-10 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("name, exporter", CASES)
def test_outputs_are_those_of_torch(name, exporter, tmp_path):
    network, module, x = _imported(name, tmp_path, exporter)
    _check_outputs(network, module, x)


@pytest.mark.parametrize("name, exporter", TRAINED)
def test_what_is_exported_for_training_has_the_parameters_of_torch(name, exporter, tmp_path):
    """A module exported for training has exactly torch's parameters and names, and the same outputs in evaluation."""
    network, module, x = _imported(name, tmp_path, exporter, training=True)
    assert network.parameter_count == sum(p.numel() for p in module.parameters())
    named = {key.rpartition(".")[0] or key for key, _ in module.named_parameters()}
    layers = {key.rpartition("/")[0] for key in network.parameters()}
    assert named <= layers or "" in {key.rpartition(".")[0] for key, _ in module.named_parameters()}
    _check_outputs(network, module, x)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_weights_beside_the_file_and_open_extents(exporter, tmp_path):
    """Large weights in a second file, as the new exporter writes them, are read; `load` gets the open extents."""
    lib = torch()
    module = lib.nn.Sequential(lib.nn.Conv2d(3, 64, 9), lib.nn.ReLU(), lib.nn.Upsample(scale_factor=2)).double()
    x = samples(12, 10, 3)
    names = {0: "n", 2: "h", 3: "w"}
    dynamic = {"dynamic_axes": {"x": names}}
    if exporter == "dynamo":
        dynamic = {"dynamic_shapes": ({axis: lib.export.Dim(name) for axis, name in names.items()},)}
    path = export(module, first(x), tmp_path / "m.onnx", exporter, **dynamic)
    with pytest.raises(UserError, match=r"expected fixed extents of input 'x' .* give them: load\(path, shapes="):
        hg.onnx.load(path)
    for height, width in ((12, 10), (15, 11)):
        x = samples(height, width, 3)
        (ours,) = predicted(hg.onnx.load(path, {"x": (height, width, 3)}), x).values()
        np.testing.assert_allclose(ours, last(module(first(x))), rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="expected shapes of inputs"):
        hg.onnx.load(path, {"y": (12, 10, 3)})
    with pytest.raises(UserError, match=r"expected 3 extents .* of input 'x', got \(12, 3\)"):
        hg.onnx.load(path, {"x": (12, 3)})


def _kinds(name, folder) -> list[str]:
    """Return the kinds of layers of an imported module, in order."""
    make, shape = _modules()[name]
    network = hg.onnx.load(export(make(), first(samples(*shape)).float(), folder / "m.onnx", "old", training=True))
    return [node.layer.kind for node in network.layers.values()]


def test_layers_are_as_few_as_can_be(tmp_path):
    """Import yields few layers: norms fuse activations and shortcuts, and a pooling gives vectors if possible.

    The activation of an output remains a layer.
    """
    assert _kinds("residual, twice", tmp_path) == ["Conv", "BatchNorm", "Conv", "Add", "ReLU"]
    assert _kinds("residual", tmp_path) == ["Conv", "BatchNorm"]
    assert _kinds("conv, norm", tmp_path) == ["Conv", "BatchNorm", "ReLU"]
    assert _kinds("activations", tmp_path) == [
        *("Conv", "BatchNorm", "GroupNorm", "ConvTranspose", "ELU", "Conv", "Sigmoid")
    ]
    assert _kinds("pixel unshuffle", tmp_path) == ["Conv", "PixelUnshuffle"]
    assert _kinds("group norm 3d", tmp_path) == ["GroupNorm", "ReLU"]
    gate = ["GlobalAveragePool", "Dense", "ReLU", "Dense", "HardSigmoid", "Multiply"]
    assert _kinds("gate", tmp_path) == gate
    assert "AveragePool" in _kinds("pyramid", tmp_path)


def test_weights_are_read_when_they_are_needed(tmp_path):
    """`load` reads no weights; a file that is truncated before they are needed raises an error."""
    lib = torch()
    path = export(lib.nn.Conv2d(3, 64, 9), lib.zeros(2, 3, 9, 9), tmp_path / "m.onnx", "old")
    network = hg.onnx.load(path)
    assert network.initial_values().keys() == {f"{next(iter(network.layers))}/{key}" for key in "wb"}
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"expected 15552 numbers at .*; the file is truncated"):
        network.initial_values()


def _refused():
    """Return modules and their inputs, by the message of the expected error."""
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    def slopes_of_rows(m, x):
        return m.slope(m.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def flattened_in_two_ways(m, x):
        return m.linear(x[:, :, 1:7, :4].flatten(1)) + m.linear(x[:, :, :4, 1:7].flatten(1))

    return {
        r"'/1/Erf' \(Erf\): expected an operator that has a layer": nn.Sequential(
            nn.Conv2d(4, 4, 1), as_module(lambda m, x: lib.erf(x))
        ),
        r"\(LayerNormalization\): expected a factor .* \(4, 8, 8\); take torch.nn.GroupNorm": nn.LayerNorm([4, 8, 8]),
        r"\(Softmax\): expected a softmax over the channels, got axis 3": nn.Softmax(3),
        r"\(Transpose\): expected channels moved to the last axis .* got \(0, 1, 3, 2\)": as_module(
            lambda m, x: x.transpose(2, 3)
        ),
        r"\(Reshape\): expected one that flattens samples, got \(2, 4, 8, 8\) to": as_module(
            lambda m, x: x.reshape(2, 2, 16, 8)
        ),
        r"expected outputs with spatial axes or of dense layers, got '.*', which is flattened": nn.Flatten(),
        r"\(Slice\): expected a step of 1 along samples and channels, got \[2\]; select channels by": as_module(
            lambda m, x: x[:, ::2]
        ),
        r"\(Slice\): expected whole axes of a sample in reversed order": as_module(lambda m, x: x.flip(0)),
        r"\(Greater\): expected a function without cases, got .*; write it as clamp\(\) or relu\(\), or with a mask": (
            as_module(lambda m, x: lib.where(x > 0, x, 0.1 * x))
        ),
        r"\(MatMul\): expected attention with .*, got another product of two values; write it as": as_module(
            lambda m, x: x @ x.transpose(2, 3)
        ),
        r"\(Tile\): expected repeated channels, or values of one position, got \[1, 1, 2, 1\]": as_module(
            lambda m, x: x.repeat(1, 1, 2, 1)
        ),
        r"\(Unsqueeze\): expected the samples 2 at axis 0, got a new axis .*; a stack can be added up": as_module(
            lambda m, x: lib.stack([x, lib.relu(x)]).amax(0)
        ),
        r"\(Mul\): expected .* got an array without a name, a parameter or a buffer; .*constant_folding=": as_module(
            lambda m, x: m.c(x) * m.c.bias[:, None, None], c=nn.Conv2d(4, 4, 1)
        ),
        r"\(Max\): expected an operator that has a layer": as_module(lambda m, x: lib.maximum(x, lib.relu(-x))),
        r"\(ReduceSum\): expected a sum over space, .*, or over channels, got axes \[2\]; keep the axis": as_module(
            lambda m, x: x.sum(2)
        ),
        r"\(ReduceMean\): expected a mean .* got axes \[1\]; keep the axis": as_module(lambda m, x: x.mean(1)),
        r"\(Concat\): expected values that are joined along the channels or in space, got the axis of": as_module(
            lambda m, x: lib.cat([x, x], 0)
        ),
        r"\(AveragePool\): expected sizes rounded down where padding counts": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        r"\(Conv\): expected weights of its own, got those of node '/c/Conv' again; use a second": as_module(
            lambda m, x: functional.conv2d(m.c(x), m.c.weight, stride=2), c=nn.Conv2d(4, 4, 1)
        ),
        r"\(Batch.*\): expected weights of its own, got those of node '/n/Batch.*' again": as_module(
            lambda m, x: m.n(lib.sigmoid(m.n(x))), n=nn.BatchNorm2d(4)
        ),
        r"\(PRelu\): expected one slope, or one per channel along axis 3, got slopes \(1, 8, 1, 1\)": as_module(
            slopes_of_rows, conv=nn.Conv2d(4, 8, 1), slope=nn.PReLU(8)
        ),
        r"\(Gemm\): expected weights of its own, got those of node '/linear/Gemm' again": as_module(
            flattened_in_two_ways, linear=nn.Linear(96, 5)
        ),
        r"\(Pad\): expected rows around the spatial axes": as_module(
            lambda m, x: functional.pad(x, (0, 0, 0, 0, 1, 1), value=1.0)
        ),
    }


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_extents_that_strides_do_not_divide_are_refused_with_what_does(exporter, tmp_path):
    lib = torch()

    def unet(m, x):
        y = m.a(x)
        return lib.cat([m.b(lib.nn.functional.max_pool2d(lib.nn.functional.max_pool2d(y, 2), 2)), y], 1)

    module = as_module(unet, a=lib.nn.Conv2d(3, 4, 3, padding=1), b=lib.nn.ConvTranspose2d(4, 4, 4, 4))
    path = export(module, lib.zeros(2, 3, 16, 16), tmp_path / "m.onnx", exporter)
    message = r"\(Concat\): expected values of one shape .*\(4, 48, 68\) and \(4, 50, 70\).* are multiples of 4$"
    with pytest.raises(UserError, match=message):
        hg.onnx.load(path, {"x": (50, 70, 3)})
    assert hg.onnx.load(path, {"x": (52, 72, 3)}).outputs


def test_what_the_new_exporter_takes_apart_is_named(tmp_path):
    lib = torch()
    module = as_module(lambda m, x: x[:, :, [0, 1, 2], [2, 1, 0]])
    path = export(module, lib.zeros(2, 3, 8, 8), tmp_path / "m.onnx", "dynamo", training=True)
    with pytest.raises(UserError, match=r"\(Transpose\): expected channels .*; an interpolation .* put hg\.Resize"):
        hg.onnx.load(path)


@pytest.mark.parametrize("message", _refused() if importlib.util.find_spec("torch") else [])
def test_refusals_name_the_node(message, tmp_path):
    path = export(_refused()[message], torch().zeros(2, 4, 8, 8), tmp_path / "m.onnx", "old")
    with pytest.raises(UserError, match=message) as found:
        hg.onnx.load(path)
    assert str(found.value).startswith(f"{path}: ") and "; " in str(found.value) and "\n" not in str(found.value)


def test_what_is_no_file_of_onnx_is_refused(tmp_path, monkeypatch):
    torch()
    with pytest.raises(UserError, match="expected an ONNX file, got none: no such file"):
        hg.onnx.load(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("a letter, and no network")
    with pytest.raises(UserError, match="expected an ONNX file, got one that cannot be read"):
        hg.onnx.load(tmp_path / "text.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(UserError, match="expected operators of version 13 or later, got none"):
        hg.onnx.load(tmp_path / "empty.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"expected the library onnx, got none .* 'halograd\[interchange\]'"):
        hg.onnx.load(tmp_path / "text.onnx")


def _by_hand(**external):
    """Write a file with one convolution, whose weights are in another file."""
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")
    helper = onnx.helper
    info = [helper.make_tensor_value_info(name, 1, ["n", 2, 4, 4]) for name in "xy"]
    weights = onnx.TensorProto(name="c.weight", data_type=1, dims=[2, 2, 1, 1], data_location=1)
    for key, value in external.items():
        weights.external_data.add(key=key, value=str(value))
    node = helper.make_node("Conv", ["x", "c.weight"], ["y"], "c")
    graph = helper.make_graph([node], "g", info[:1], info[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def test_weights_outside_of_the_folder_are_not_read(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "w.bin").write_bytes(np.arange(4.0, dtype="<f4").tobytes())
    (folder / "m.onnx").write_bytes(_by_hand(location="../w.bin"))
    with pytest.raises(UserError, match=r"expected weights in a file in the same folder, got '../w.bin'"):
        hg.onnx.load(folder / "m.onnx")
    (folder / "m.onnx").write_bytes(_by_hand(location="w.bin", offset=0))
    assert hg.onnx.load(folder / "m.onnx").initial_values()["c/w"].reshape(2, 2).tolist() == [[0, 1], [2, 3]]
    (folder / "m.onnx").write_bytes(_by_hand(location="w.bin", offset=8))
    with pytest.raises(UserError, match="expected 4 numbers at 8, got 2; the file is truncated"):
        hg.onnx.load(folder / "m.onnx")


def test_operations_without_effect_leave_no_layer(tmp_path):
    """A sequence of operations without effect gives no layers."""
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")
    helper = onnx.helper
    chain = [("Relu", ["x"]), ("Mul", ["0", "one"]), ("Add", ["1", "zero"]), ("Div", ["2", "one"]), ("Tanh", ["3"])]
    nodes = [helper.make_node(kind, inputs, [f"{i}"]) for i, (kind, inputs) in enumerate(chain)]
    infos = [helper.make_tensor_value_info(name, 1, ["n", 3, 4, 4]) for name in ("x", "4")]
    numbers = [onnx.numpy_helper.from_array(np.float32(n), name) for n, name in ((1, "one"), (0, "zero"))]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], numbers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    with pytest.raises(UserError, match="'one', a parameter or a buffer"):  # a factor may be trained from 1 on
        hg.onnx.load(tmp_path / "m.onnx")
    network = hg.onnx.load(tmp_path / "m.onnx", buffers=["one", "zero"])
    assert [node.layer.kind for node in network.layers.values()] == ["ReLU", "Tanh"]


def test_an_output_that_equals_the_input_and_that_others_read(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")
    helper = onnx.helper
    nodes = [helper.make_node("Mul", ["x", "one"], ["same"]), helper.make_node("Relu", ["same"], ["y"])]
    infos = [helper.make_tensor_value_info(name, 1, ["n", 3, 4, 4]) for name in ("x", "same", "y")]
    numbers = [onnx.numpy_helper.from_array(np.float32(1), "one")]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], numbers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    network = hg.onnx.load(tmp_path / "m.onnx", buffers=["one"])
    x = samples(4, 4, 3)
    found = predicted(network, x)
    np.testing.assert_array_equal(found["same"], x)
    np.testing.assert_array_equal(found["y"], np.maximum(x, 0))


@pytest.mark.parametrize("after", [False, True], ids=["alone", "after"])
@pytest.mark.parametrize(
    "kind, attributes, message",
    [
        ("Swish", {"alpha": 1.5}, r"Swish\): expected x \* sigmoid\(x\), alpha = 1, got {'alpha': 1.5}"),
        ("HardSigmoid", {"alpha": 0.3}, r"HardSigmoid\): expected torch's slope 1 / 6 and offset 1 / 2, got {'alpha'"),
        ("HardSigmoid", {}, r"HardSigmoid\): expected torch's slope 1 / 6 and offset 1 / 2, got {}"),
        ("Swish", {}, ""),
        ("Swish", {"alpha": 1.0}, ""),
    ],
)
def test_activations_with_other_numbers_than_those_of_torch_are_refused(tmp_path, kind, attributes, message, after):
    """Also where the layer before could compute the activation."""
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")
    helper = onnx.helper
    weights = onnx.numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w")
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"])] if after else []
    nodes.append(helper.make_node(kind, ["c" if after else "x"], ["a"], **attributes))
    nodes.append(helper.make_node("Relu", ["a"], ["y"]))
    ends = (("x", 3), ("y", 2 if after else 3))
    infos = [helper.make_tensor_value_info(name, 1, ["n", channels, 4, 4]) for name, channels in ends]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [weights] if after else [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]), tmp_path / "m.onnx")
    if not message:
        assert "SiLU" in [node.layer.kind for node in hg.onnx.load(tmp_path / "m.onnx").layers.values()]
        return
    with pytest.raises(UserError, match=message):
        hg.onnx.load(tmp_path / "m.onnx")
