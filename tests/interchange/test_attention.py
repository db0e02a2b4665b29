"""Attention as torch's exporters write it: outputs and a step of SGD as torch's, weights back in torch."""

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.interchange.onnx_import import load
from halograd.interchange.torch_module import state_for
from halograd.layers import Attention
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


def test_back_in_torch():
    """Three layers hold the rows of one weight, which are joined again."""
    module = modules()["cross"]
    shake(module)
    network = hg.from_torch(module, first(samples(3, 2, C)))
    found = state_for(network, network.initial_values())
    for name, tensor in module.state_dict().items():
        numbers, there = found[name]
        assert there.all()
        np.testing.assert_array_equal(numbers, tensor.numpy())


def test_other_masks_are_refused():
    lib = torch()
    causal = lib.triu(lib.full((6, 6), -np.inf), 1)

    def masked(m, x):
        q, k, v = packed(x, m.qkv)
        return joined(m, (q @ k.transpose(-2, -1) + causal).softmax(-1) @ v, x)

    with pytest.raises(UserError, match="the mask of shifted windows, got another mask"):
        hg.from_torch(as_module(masked, **projections()).double(), first(samples(3, 2, C)))
