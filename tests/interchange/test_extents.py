"""Sums and products with arrays that have extents, as torch exports them: trained or constant, and saved again."""

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.interchange.weights import load_weights, save_weights
from tests.interchange.support import EXPORTERS, as_module, check_step, export, first, last, predicted, samples, shake
from tests.interchange.support import torch as imported_torch

pytestmark = pytest.mark.torch
IMAGE, SIGNAL = (6, 5, 4), (6, 4)


def image():
    lib = imported_torch()
    nn = lib.nn

    def forward(m, x):
        y = (m.conv(x) + m.pos) * m.mask
        y = (y - m.mean_map) / m.std_map
        y = lib.relu(y + m.row) * m.alpha + m.shift
        return m.inner(y) + m.pos - lib.arange(5.0, dtype=y.dtype)

    inner = as_module(lambda m, x: m.gain * (m.offset - x))
    inner.gain, inner.offset = nn.Parameter(lib.ones(6, 1)), nn.Parameter(lib.ones(1, 4, 1, 5))
    made = as_module(forward, conv=nn.Conv2d(4, 4, 1), inner=inner)
    shapes = {"pos": (1, 4, 6, 5), "mask": (6, 5), "row": (6, 1), "alpha": (), "shift": (4, 1, 1)}
    for name, shape in shapes.items():
        setattr(made, name, nn.Parameter(lib.ones(shape)))
    made.register_buffer("mean_map", lib.ones(4, 6, 5))
    made.register_buffer("std_map", lib.ones(1, 1, 6, 5))
    return made, IMAGE


def tokens():
    lib = imported_torch()
    nn = lib.nn

    def forward(m, x):
        y = m.conv(x).flatten(2).transpose(1, 2) + m.pos
        y = lib.cat([m.cls.expand(len(x), -1, -1), m.linear(y) * m.scale + m.bias], 1)
        return lib.cat([m.first.expand(len(x), -1, -1), y.transpose(1, 2)], 2)

    made = as_module(forward, conv=nn.Conv1d(4, 3, 1), linear=nn.Linear(3, 3))
    shapes = {"pos": (1, 6, 3), "scale": (1, 6, 1), "bias": (6, 3), "cls": (1, 1, 3), "first": (1, 3, 2)}
    for name, shape in shapes.items():
        setattr(made, name, nn.Parameter(lib.ones(shape)))
    return made, SIGNAL


def factor_used_twice():
    lib = imported_torch()
    made = as_module(lambda m, x: m.conv(x * m.gain) * m.gain, conv=lib.nn.Conv2d(4, 4, 1))
    made.gain = lib.nn.Parameter(lib.ones(4, 1, 1))
    return made, IMAGE


MODULES = {"image": image, "tokens": tokens, "factor used twice": factor_used_twice}


def loaded(make, folder, exporter):
    module, shape = make()
    module = module.double()
    shake(module)
    for name, buffer in module.named_buffers():
        buffer.data = 0.5 + buffer.data.abs() if name == "std_map" else buffer.data
    x = samples(*shape)
    path = export(module, first(x), folder / "m.onnx", exporter, training=True)
    return hg.onnx.load(path, buffers=[name for name, _ in module.named_buffers()]), module, x


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODULES)
def test_a_step_is_that_of_torch_and_names_are_torchs(name, exporter, tmp_path):
    network, module, x = loaded(MODULES[name], tmp_path, exporter)
    assert network.parameter_count == sum(p.numel() for p in module.parameters())
    arrays = load_weights(network, _saved(module, tmp_path))
    for key, array in network.initial_values().items():
        if key in arrays:
            np.testing.assert_allclose(arrays[key], array, rtol=1e-12, err_msg=key)
    save_weights(network, None, tmp_path / "again.safetensors")
    written = _read(tmp_path / "again.safetensors")
    assert {k: v.shape for k, v in written.items()} == {k: tuple(p.shape) for k, p in module.named_parameters()}
    (want,) = predicted(network, x).values()
    module.eval()
    np.testing.assert_allclose(want, last(module(first(x))), rtol=0, atol=1e-10)
    hg.onnx.save(network, None, tmp_path / "ours.onnx", dtype="float64")
    again = hg.onnx.load(tmp_path / "ours.onnx")
    np.testing.assert_allclose(*predicted(again, x).values(), want, rtol=0, atol=1e-10)
    assert again.parameter_count == network.parameter_count
    check_step(network, module, x)


def _saved(module, folder):
    from safetensors.torch import save_file

    save_file({key: tensor.contiguous() for key, tensor in module.state_dict().items()}, folder / "m.safetensors")
    return folder / "m.safetensors"


def test_factors_that_an_exporter_has_merged_are_trained_and_saved_one_by_one(tmp_path):
    lib = imported_torch()
    blocks = [as_module(lambda m, x: x + m.conv(x) * m.gain, conv=lib.nn.Conv2d(4, 4, 1)) for _ in range(2)]
    for block in blocks:
        block.gain = lib.nn.Parameter(lib.full((4, 1, 1), 0.5))
    path = export(lib.nn.Sequential(*blocks), first(samples(*IMAGE)).float(), tmp_path / "m.onnx", "old")
    network = hg.onnx.load(path, buffers=())
    assert {"0.gain/w", "0.gain_2/w"} < network.parameters().keys()
    values = {name: array + i for i, (name, array) in enumerate(network.initial_values().items())}
    save_weights(network, values, tmp_path / "m.safetensors")
    for name, array in load_weights(network, tmp_path / "m.safetensors").items():
        np.testing.assert_array_equal(array, values[name], err_msg=name)


def _read(path):
    from safetensors.numpy import load_file

    return load_file(path)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: x - m.p, r"\(Sub\): expected a learned array that is added or multiplied, got the parameter 'p'"),
        (lambda m, x: x / m.p, r"\(Div\): expected a learned array .*; write x \+ p in place of x - p, and x \* p"),
        (lambda m, x: x[:, :, :1] + m.p, r"\(Add\): expected an array that is broadcast over samples of \(4, 1, 5\)"),
        (
            lambda m, x: imported_torch().cat([x, m.p[None].expand(len(x), -1, -1, -1)], 2),
            r"\(Concat\): expected learned positions \(1, count, C\) before those of one value .*, got another array",
        ),
        (lambda m, x: (x + m.p) * m.p, r"\(Mul\): expected an array of its own, got 'p' again; use a second param"),
    ],
)
def test_refusals(function, message, tmp_path):
    lib = imported_torch()
    module = as_module(function)
    module.p = lib.nn.Parameter(lib.ones(4, 6, 5))
    path = export(module, first(samples(*IMAGE)).float(), tmp_path / "m.onnx", "old", training=True)
    with pytest.raises(UserError, match=message):
        hg.onnx.load(path, buffers=())
