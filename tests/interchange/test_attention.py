"""Attention as torch's exporters write it: outputs and a step of SGD as torch's, weights back in torch."""

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.interchange import load_weights, save_weights
from halograd.interchange.onnx_import import load
from halograd.interchange.torch_module import state_for
from halograd.layers import Attention, Roll
from tests.interchange.support import EXPORTERS, as_module, check_step, export, first, samples, shake, together, torch

C, HEADS = 8, 2


def tokens(x):
    """Return an image as tokens ``(N, L, C)``."""
    return x.flatten(2).transpose(1, 2)


def image(t, x):
    return t.transpose(1, 2).reshape(len(x), -1, *x.shape[2:])


def packed(x, qkv):
    """Return queries, keys and values ``(N, heads, L, d)`` of one projection, as timm and torchvision compute them."""
    t = qkv(tokens(x))
    return t.reshape(len(x), t.shape[1], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)


def joined(m, y, x):
    """Return the projection of heads ``(N, heads, L, d)`` as an image."""
    return image(m.proj(y.transpose(1, 2).flatten(2)), x)


def by_function(m, x):
    return joined(m, torch().nn.functional.scaled_dot_product_attention(*packed(x, m.qkv)), x)


def by_products(m, x):
    q, k, v = packed(x, m.qkv)
    scores = (q * 0.3) @ k.transpose(-2, -1)
    return joined(m, scores.softmax(-1) @ v, x)


def by_einsum(m, x):
    q, k, v = packed(x, m.qkv)
    scores = torch().einsum("blxd,blyd->blxy", q, k) * (C // HEADS) ** -0.5
    return joined(m, torch().einsum("bhxy,bhyd->bhxd", scores.softmax(-1), v), x)


def by_columns(m, x):
    """Return attention of one head with positions last, as diffusion networks compute it."""
    q, k, v = m.conv(x).flatten(2).chunk(3, 1)
    weights = torch().softmax(torch().bmm(q.transpose(1, 2), k) * C**-0.5, 2)
    return torch().bmm(v, weights.transpose(1, 2)).reshape(x.shape)


def shifted(m, x, shift=1, window=2, masks=True):
    """Return attention in shifted windows with a table of relative positions, as Swin computes it."""
    lib = torch()
    n, (h, w) = len(x), x.shape[2:]
    t = lib.roll(x.permute(0, 2, 3, 1), (-shift, -shift), (1, 2))
    t = t.reshape(n, h // window, window, w // window, window, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, window**2, C)
    q, k, v = m.qkv(t).reshape(len(t), window**2, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q * (C // HEADS) ** -0.5) @ k.transpose(-2, -1)
    scores = scores + m.table[m.index.reshape(-1)].reshape(window**2, window**2, HEADS).permute(2, 0, 1).unsqueeze(0)
    if masks:
        around = np.add.outer(2 * (np.arange(h) >= h - shift), 1 * (np.arange(w) >= w - shift))
        around = around.reshape(h // window, window, w // window, window).swapaxes(1, 2).reshape(-1, window**2)
        mask = lib.tensor(np.where(around[:, None] == around[:, :, None], 0.0, -100.0)).to(x.dtype)
        scores = scores.reshape(n, len(mask), HEADS, window**2, window**2) + mask[None, :, None]
        scores = scores.reshape(-1, HEADS, window**2, window**2)
    t = m.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, window**2, C))
    t = t.reshape(n, h // window, w // window, window, window, C).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, C)
    return lib.roll(t, (shift, shift), (1, 2)).permute(0, 3, 1, 2)


def in_windows(**settings):
    lib = torch()
    module = as_module(lambda m, x: shifted(m, x, **settings), **projections())
    module.table = lib.nn.Parameter(lib.zeros(9, HEADS))
    places = np.stack(np.unravel_index(np.arange(4), (2, 2)))
    apart = places[:, :, None] - places[:, None] + 1
    module.register_buffer("index", lib.tensor(apart[0] * 3 + apart[1]))
    return module


@pytest.mark.parametrize("masks", [True, False], ids=["masked", "periodic"])
def test_windows(masks):
    module = in_windows(masks=masks).double()
    shake(module)
    module.qkv.weight.data *= 0.1  # for Swin's -100 to be a mask, scores must be small
    x = samples(4, 6, C)
    network = hg.from_torch(module, {"x": first(x)})
    (layer,) = (node.layer for node in network.nodes if isinstance(node.layer, Attention))
    assert (layer.window, layer.bias) == ((2, 2), "relative")
    assert layer.shift == ((1, 1) if masks else 0)
    assert any(isinstance(node.layer, Roll) for node in network.nodes) is not masks
    check_step(network, module, x)


def projections():
    lib = torch()
    return {"qkv": lib.nn.Linear(C, 3 * C), "proj": lib.nn.Linear(C, C)}


def self_attention(m, x):
    return image(m.a(*[tokens(x)] * 3, need_weights=False)[0], x)


def cross_attention(m, x):
    """Return attention of tokens (L, N, C) to others; the projections of both are rows of one weight."""
    t = x.flatten(2).permute(2, 0, 1)
    return m.a(t, t * 2, t + 1)[0].permute(1, 2, 0).reshape(x.shape)


def modules():
    lib = torch()
    return {
        "function": as_module(by_function, **projections()),
        "products": as_module(by_products, **projections()),
        "einsum": as_module(by_einsum, **projections()),
        "columns": as_module(by_columns, conv=lib.nn.Conv2d(C, 3 * C, 1)),
        "module": as_module(self_attention, a=lib.nn.MultiheadAttention(C, HEADS, batch_first=True)),
        "cross": as_module(cross_attention, a=lib.nn.MultiheadAttention(C, HEADS)),
    }


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_step(tmp_path, exporter):
    module = together(*modules().values()).double()
    shake(module)
    x = samples(3, 2, C)
    network = load(export(module, first(x), tmp_path / "a.onnx", exporter, training=True))
    assert sum(isinstance(node.layer, Attention) for node in network.nodes) == len(modules())
    check_step(network, module, x)


def test_the_operator_of_onnx(tmp_path):
    """From opset 23 on, the new exporter writes one operator."""
    module = modules()["function"].double()
    shake(module)
    x = samples(3, 2, C)
    path = export(module, first(x), tmp_path / "a.onnx", "dynamo", training=True, opset_version=23)
    check_step(load(path), module, x)


def apart(m, x):
    """Return attention to keys and values of other features, whose projections have weights of their own."""
    t = x.flatten(2).permute(2, 0, 1)
    return m.a(t, m.k(t), m.v(t))[0].permute(1, 2, 0).reshape(x.shape)


def test_back_in_torch(tmp_path):
    """Three layers hold the rows of one weight, which are joined again; files of weights have torch's names."""
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'halograd[interchange]'")
    nn = torch().nn
    attention = nn.MultiheadAttention(C, HEADS, kdim=3, vdim=5)
    others = {"k": nn.Linear(C, 3), "v": nn.Linear(C, 5)}
    module = together(modules()["module"], modules()["cross"], as_module(apart, a=attention, **others))
    shake(module)
    network = hg.from_torch(module, first(samples(3, 2, C)))
    arrays, path = network.initial_values(), tmp_path / "w.safetensors"
    found = state_for(network, arrays)
    save_weights(network, arrays, path)
    written, read = __import__("safetensors.numpy").numpy.load_file(path), load_weights(network, path)
    assert found.keys() == written.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        numbers, there = found[name]
        assert there.all()
        np.testing.assert_array_equal(numbers, tensor.numpy())
        np.testing.assert_array_equal(written[name], tensor.numpy())
    assert read.keys() == arrays.keys() and all(np.array_equal(read[name], arrays[name]) for name in arrays)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_dropout_without_a_rate(tmp_path):
    """ONNX's default rate, in attention as elsewhere."""
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")

    def dropped(m, x):
        q, k, v = packed(x, m.qkv)
        return joined(m, m.drop((q @ k.transpose(-2, -1)).softmax(-1)) @ v, x)

    module = as_module(dropped, drop=torch().nn.Dropout(0.25), **projections())
    path = export(module, first(samples(3, 2, C)).float(), tmp_path / "a.onnx", "old", training=True)
    rates = []
    for omitted in (False, True):
        model = onnx.load(path)
        (dropout,) = (node for node in model.graph.node if node.op_type == "Dropout")
        dropout.input[1] = "" if omitted else dropout.input[1]
        onnx.save(model, path)
        rates += [node.layer.dropout for node in load(path).nodes if isinstance(node.layer, Attention)]
    assert rates == [0.25, 0.5]


def test_shifts_around_a_layer_that_moves_positions():
    """Its padding and stride keep the extents, but not the positions: the shifts do not cancel each other."""
    lib = torch()

    def moved(m, x):
        return lib.roll(m.conv(lib.roll(x, 1, 2)), -1, 2)

    module, x = as_module(moved, conv=lib.nn.Conv2d(2, 2, 1, stride=2, padding=1)).double(), samples(3, 3, 2)
    network = hg.from_torch(module, first(x))
    assert [node.layer.kind for node in network.layers.values()] == ["Roll", "Conv", "Roll"]
    check_step(network, module, x)


def test_other_masks_are_refused():
    lib = torch()
    causal = lib.triu(lib.full((6, 6), -np.inf), 1)

    def masked(m, x):
        q, k, v = packed(x, m.qkv)
        return joined(m, (q @ k.transpose(-2, -1) + causal).softmax(-1) @ v, x)

    with pytest.raises(UserError, match="the mask of shifted windows, got another mask"):
        hg.from_torch(as_module(masked, **projections()).double(), first(samples(3, 2, C)))
