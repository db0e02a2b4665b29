"""Tests of imported values: torch's parameters are trained, constants are not, computed weights are an error."""

from __future__ import annotations

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
    together,
    torch,
)

pytestmark = pytest.mark.torch
SHAPE = (6, 5, 3)


def _numbers(*shape: int, name: str = "numbers"):
    """Return random values from 0.5 to 1.5."""
    return torch().tensor(1 + 0.5 * np.clip(samples(*shape, name=name)[0], -1, 1))


def _with_buffers(function, **buffers):
    """Return a module with this function, a convolution, and these buffers."""
    module = as_module(function, c=torch().nn.Conv2d(3, 4, 3, padding=1))
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


def _fixed():
    """Return modules by name that multiply by constants or add them."""
    lib = torch()
    one = {"mean": _numbers(1, 3, 1, 1, name="m"), "std": _numbers(1, 3, 1, 1)}
    frozen = {key: _numbers(3, name=key) for key in ("weight", "bias", "running_mean", "running_var")}

    def frozen_norm(m, x):
        factor = m.weight * (m.running_var + 1e-5).rsqrt()
        shift = m.bias - m.running_mean * factor
        return m.c(x * factor.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1))

    return {
        "standardized data": lambda: _with_buffers(lambda m, x: m.c((x - m.mean) / m.std), **one),
        "quotient": lambda: _with_buffers(lambda m, x: m.c(x / m.std), **one),
        "difference": lambda: _with_buffers(lambda m, x: m.c(m.mean - x), **one),
        "product": lambda: _with_buffers(lambda m, x: m.c(x * m.std), **one),
        "units of the output": lambda: _with_buffers(lambda m, x: m.c(x) * m.s + 2 * m.s, s=_numbers(4, 1, 1)),
        "computed from buffers": lambda: _with_buffers(lambda m, x: m.c(x * (m.std * 2 + 1)), **one),
        "one number": lambda: _with_buffers(lambda m, x: m.c(x) * m.s, s=_numbers(1)),
        "behind a transpose": lambda: _with_buffers(
            lambda m, x: m.c((x.permute(0, 2, 3, 1) / m.s - m.s).permute(0, 3, 1, 2)), s=_numbers(3)
        ),
        "of vectors": lambda: _with_buffers(lambda m, x: m.c(x).mean((2, 3)) * m.s, s=_numbers(4)),
        "frozen batch norm": lambda: _with_buffers(frozen_norm, **frozen),
        "literal": lambda: _with_buffers(
            lambda m, x: m.c(x * lib.tensor([0.25, 0.5, 2], dtype=x.dtype).view(3, 1, 1) - 0.45)
        ),
    }


FIXED = list(_fixed()) if importlib.util.find_spec("torch") else []


@pytest.mark.parametrize(
    "name, exporter", [*((name, "old") for name in FIXED), ("all", "dynamo"), ("of vectors", "dynamo")]
)
def test_constants_of_the_source_are_not_trained(name, exporter, tmp_path):
    """Constants of an exported module are not trained, and are kept in an export back to ONNX."""
    names = [one for one in FIXED if one != "of vectors"] if name == "all" else [name]
    modules = [_fixed()[one]().double() for one in names]
    module, x = together(*modules) if name == "all" else modules[0], samples(*SHAPE)
    path = export(module, first(x), tmp_path / "m.onnx", exporter, training=True)
    network = hg.onnx.load(path, buffers=[key for key, _ in module.named_buffers()])
    assert {key.rpartition("/")[0].rpartition(".")[2] for key in network.parameters()} == {"c"}
    assert network.parameter_count == sum(p.numel() for p in module.parameters())
    check_step(network, module, x)
    hg.onnx.save(network, None, tmp_path / "again.onnx", dtype="float64")
    again = hg.onnx.load(tmp_path / "again.onnx")
    assert again.parameter_count == network.parameter_count
    (y,), (want,) = predicted(network, x).values(), predicted(again, x).values()
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_the_new_exporter_tells_buffers_itself(training, tmp_path):
    module = together(*(_fixed()[name]().double() for name in ("standardized data", "product", "one number")))
    x = samples(*SHAPE)
    check_step(hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", "dynamo", training)), module, x)


@pytest.mark.parametrize("name", ["quotient", "product", "difference", "computed from buffers", "frozen batch norm"])
def test_the_old_exporter_has_to_be_told(name, tmp_path):
    """The old exporter writes buffers like parameters: they are an error until `buffers` names them."""
    path = export(_fixed()[name]().double(), first(samples(*SHAPE)), tmp_path / "m.onnx", "old", training=True)
    message = r"'(std|mean)'.*this file does not distinguish parameters from.*dynamo=True.*load\(path, buffers="
    if name == "frozen batch norm":
        message = r"computed from '.*; if they are buffers, name them: load\(path, buffers="
    with pytest.raises(UserError, match=message):
        hg.onnx.load(path)


def _learned():
    """Return modules by name with trainable values per channel."""
    lib = torch()
    nn = lib.nn

    def with_scale(function, *shape, **layers):
        module = as_module(function, **layers)
        module.g = nn.Parameter(_numbers(*shape))
        return module

    def last_axis(m, x):
        return x + (m.g * m.c(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

    def neutral(m, x):
        return m.g * m.c(x) + m.h

    def with_neutral():
        module = as_module(neutral, c=nn.Conv2d(3, 3, 1))
        module.g, module.h = nn.Parameter(lib.ones(1)), nn.Parameter(lib.zeros(1))
        return module

    return {
        "factor that begins at 1, and summand at 0": with_neutral,
        "layer scale": lambda: with_scale(lambda m, x: x + m.g * m.c(x), 3, 1, 1, c=nn.Conv2d(3, 3, 1)),
        "layer scale, channels last": lambda: with_scale(last_axis, 3, c=nn.Linear(3, 3)),
        "layer scale of vectors": lambda: with_scale(lambda m, x: m.c(x.mean((2, 3))) * m.g, 4, c=nn.Linear(3, 4)),
        "layer norm without a bias": lambda: as_module(
            lambda m, x: lib.relu(m.n(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2), n=nn.LayerNorm(3, bias=False)
        ),
    }


LEARNED = list(_learned()) if FIXED else []


@pytest.mark.parametrize("name, exporter", [*((name, "old") for name in LEARNED), ("all", "dynamo")])
def test_learned_numbers_are_trained(name, exporter, tmp_path):
    names = [one for one in LEARNED if "vectors" not in one] if name == "all" else [name]
    modules = [_learned()[one]().double() for one in names]
    module, x = together(*modules) if name == "all" else modules[0], samples(*SHAPE)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", exporter, training=True), buffers=())
    assert network.parameter_count == sum(p.numel() for p in module.parameters())
    check_step(network, module, x)


def _computed():
    """Return a dictionary by name: a function that builds a module with computed weights, and the message that
    names them.
    """
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional
    parametrizations = nn.utils.parametrizations

    def conv():
        return nn.Conv2d(3, 4, 3, padding=1)

    def standardized(m, x):
        w = m.c.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return functional.conv2d(x, w, m.c.bias, padding=1)

    originals = r"'parametrizations.weight.original1', '.*0'.*remove_parametrizations"
    return {
        "weight norm": (lambda: parametrizations.weight_norm(conv(), dim=1), originals),
        "older weight norm": (
            lambda: nn.utils.weight_norm(conv(), dim=None),
            "'weight_v', 'weight_g'.*remove_parametrizations",
        ),
        "weight norm, transposed": (
            lambda: parametrizations.weight_norm(nn.ConvTranspose2d(3, 4, 2)),
            r"'parametrizations.weight.original1'",
        ),
        "spectral norm": (
            lambda: parametrizations.spectral_norm(conv()).eval(),
            r"'parametrizations.weight.original'.*remove_parametrizations",
        ),
        "standardized": (lambda: as_module(standardized, c=conv()), r"'c.weight'.*compute them once"),
        "times a number": (
            lambda: as_module(lambda m, x: functional.conv2d(x, m.c.weight * 0.1), c=conv()),
            "'c.weight'.*compute them once",
        ),
    }


#: The old exporter has no product of two vectors, as spectral norm needs it.
COMPUTED = [
    *((name, "old") for name in (_computed() if FIXED else ()) if name != "spectral norm"),
    *((name, "dynamo") for name in ("weight norm", "older weight norm", "spectral norm", "standardized")),
]


@pytest.mark.parametrize("name, exporter", COMPUTED)
def test_weights_that_torch_computes_are_refused(name, exporter, tmp_path):
    """Weights that torch computes are an error; trained directly they would give another model after one step."""
    make, message = _computed()[name]
    module = make()
    options = {"training": module.training}
    path = tmp_path / "m.onnx"
    if exporter == "dynamo" and not module.training:
        options = {"optimize": False}
    export(module, torch().zeros(2, 3, 6, 5), path, exporter, **options)
    message = rf"node '.*' \(Conv(Transpose)?\): expected parameters .*computed from {message}"
    with pytest.raises(UserError, match=message):
        hg.onnx.load(path, buffers=[key for key, _ in module.named_buffers()])


def test_parts_of_a_parameter_are_trained_once():
    """Layers may have different parts of one parameter; elements that two layers would train apart are an error."""
    lib = torch()
    nn, conv2d = lib.nn, lib.nn.functional.conv2d

    def network(forward):
        return hg.from_torch(as_module(forward, c=nn.Conv2d(3, 4, 3)), lib.zeros(2, 3, 6, 5))

    apart = network(lambda m, x: conv2d(x, m.c.weight[:2]) + conv2d(x, m.c.weight[2:]))
    assert [spec.shape for spec in apart.parameters().values()] == [(2, 3, 3, 3)] * 2
    assert len(network(lambda m, x: conv2d(x, m.c.weight[:2]) + conv2d(x + 1, m.c.weight[:2])).parameters()) == 1
    for forward in (
        lambda m, x: conv2d(x, m.c.weight[:2]) + conv2d(x, m.c.weight[1:3]),
        lambda m, x: m.c(x)[:, :2] + conv2d(x, m.c.weight[:2]),
    ):
        with pytest.raises(UserError, match=r"expected weights of its own for 'c_2', got elements of 'c.weight' that"):
            network(forward)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_weight_norm_stays_weight_norm(exporter, tmp_path):
    """Directions and lengths of torch's weight norms, of both forms, are parameters and trained as there."""
    lib = torch()
    nn, normed = lib.nn, lib.nn.utils.parametrizations.weight_norm
    module = nn.Sequential(
        normed(nn.Conv2d(3, 4, 3, padding=1)),
        nn.utils.weight_norm(nn.Conv2d(4, 4, 3, groups=2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        normed(nn.Linear(4, 5, bias=False)),
    ).double()
    x = samples(*SHAPE)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", exporter, training=True))
    assert sorted(network.parameters()) == ["0/b", "0/g", "0/w", "1/b", "1/g", "1/w", "4/g", "4/w"]
    check_step(network, module, x)


def test_other_readers_of_weights_with_lengths_are_refused():
    """A weight norm is one in a convolution or a linear layer; others would read the directions without lengths."""
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional

    def network(again):
        def forward(m, x):
            w = m.c.weight
            return again(functional.conv2d(x, w, padding=1), w)

        module = as_module(forward, c=nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1, bias=False)))
        return hg.from_torch(module, lib.zeros(2, 4, 6, 5))

    twice = network(lambda y, w: functional.conv2d(y, w, padding=1))
    assert sorted(twice.parameters()) == ["c/g", "c/w"] and len(twice.layers) == 2
    for again in (
        lambda y, w: functional.conv_transpose2d(y, w, padding=1),
        lambda y, w: y * w[:, 0, 0, 0].view(4, 1, 1),
        lambda y, w: functional.conv2d(y, w.transpose(0, 1), padding=1),
    ):
        with pytest.raises(UserError, match=r"expected parameters as they are trained, got numbers computed from 'c.p"):
            network(again)


@pytest.mark.parametrize("name", ["weight norm", "standardized"])
def test_weights_that_the_new_exporter_has_folded_are_refused_where_it_says_so(name, tmp_path):
    make, _ = _computed()[name]
    path = export(make(), torch().zeros(2, 3, 6, 5), tmp_path / "m.onnx", "dynamo", training=False)
    with pytest.raises(UserError, match=r"\(Conv\): expected parameters as they are trained, got numbers computed"):
        hg.onnx.load(path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("detached values", r"'node_detach' \(Identity\): .* got a value without a gradient \(detach\)"),
        ("detached weights", r"'node_detach' \(Identity\): .* got a value without a gradient \(detach\)"),
        ("running statistics of samples", r"\(Instance.*\) of module 'n': .* running stat.*track_running_stats=False"),
    ],
)
def test_what_only_the_notes_of_the_new_exporter_show_is_refused(name, message, tmp_path):
    """The operators of these modules are those of other modules; training or evaluating them would differ."""
    lib = torch()
    nn, functional = lib.nn, lib.nn.functional
    make = {
        "detached values": lambda m, x: m.d(m.c(x).detach()),
        "detached weights": lambda m, x: m.d(functional.conv2d(x, m.c.weight.detach(), padding=1)),
        "running statistics of samples": lambda m, x: m.d(m.n(m.c(x))),
    }
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    module = as_module(make[name], c=nn.Conv2d(3, 4, 3, padding=1), d=nn.Conv2d(4, 2, 1), n=norm)
    path = export(module, lib.zeros(2, 3, 6, 5), tmp_path / "m.onnx", "dynamo", training=True)
    with pytest.raises(UserError, match=message):
        hg.onnx.load(path)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_parameters_keep_their_names(exporter, tmp_path):
    """So does that of a convolution with reflected rows, and one that is cast, transposed and reshaped."""
    lib = torch()

    def moved(m, x):
        return lib.nn.functional.conv2d(x, m.c.weight.transpose(0, 1).reshape(3, 4, 1, 1).transpose(0, 1))

    reflected = lib.nn.Sequential(lib.nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    for module, names in (
        (reflected, ["0/w", "0/b"]),
        (as_module(moved, c=lib.nn.Conv2d(3, 4, 1, bias=False)), ["c/w"]),
    ):
        x = samples(*SHAPE)
        path = export(module.double(), first(x), tmp_path / "m.onnx", exporter, training=True)
        network = hg.onnx.load(path)
        assert list(network.parameters()) == names
        check_step(network, module, x)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", ["buffer", "literal"])
def test_a_kernel_that_is_no_parameter_is_refused(kind, exporter, tmp_path):
    """A convolution kernel that is no parameter is an error; otherwise a fixed stencil would be trained."""
    lib = torch()
    kernel = lib.ones(4, 3, 3, 3) / 9

    def blurred(m, x):
        literal = lib.tensor([[[[1.0, 2.0]]] * 3] * 4)
        return m.c(lib.nn.functional.conv2d(x, m.kernel if kind == "buffer" else literal))

    module = as_module(blurred, c=lib.nn.Conv2d(4, 2, 1))
    module.register_buffer("kernel", kernel)
    path = export(module, lib.zeros(2, 3, 6, 5), tmp_path / "m.onnx", exporter, training=True)
    with pytest.raises(UserError, match=r"\(Conv\): expected weights that torch trains, got .*Parameter.*freeze"):
        hg.onnx.load(path, buffers=["kernel"])
    if (kind, exporter) == ("buffer", "old"):
        with pytest.raises(UserError, match=r"got 'kernel', a parameter or a buffer; this file does not"):
            hg.onnx.load(path)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("first", [True, False])
def test_a_weight_of_a_layer_that_is_added_too_is_refused_by_name(first, exporter, tmp_path):
    lib = torch()

    def forward(m, x):
        return m.c(x + m.c.bias[:, None, None]) if first else m.c(x) + m.c.bias[:, None, None]

    module, x = as_module(forward, c=lib.nn.Conv2d(4, 4, 1)), lib.zeros(2, 4, 6, 5)
    path = export(module, x, tmp_path / "m.onnx", exporter, training=True)
    with pytest.raises(UserError, match=r"expected an array of its own, got 'c.bias' again; use a second parameter"):
        hg.onnx.load(path)


def test_imported_constants_go_to_the_channels_of_flattened_features(tmp_path):
    lib = torch()
    module = _with_buffers(lambda m, x: m.f(m.c(x).flatten(1) * m.s), s=_numbers(4 * 30))
    module.f = lib.nn.Linear(4 * 30, 2)
    module = module.double()
    x = samples(*SHAPE)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", "old", training=True), buffers=["s"])
    (y,) = predicted(network, x).values()
    np.testing.assert_allclose(y, last(module(first(x))), rtol=0, atol=1e-12)
    check_step(network, module, x, rate=0.05)
