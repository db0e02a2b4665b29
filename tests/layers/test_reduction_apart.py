"""Chunks of equal numbers of layers as Le et al. cut them, and layers that lie apart because they may be replicated."""

import pytest

from halograd.layers.reduction_chunks import Gradient, GradientLayer, chunks_of
from halograd.layers.reduction_scheme import Scheme


def chain(count, dense=0):
    """Layers in the order of backward: `dense` dense ones, then others; every second one followed by a norm."""
    layers = []
    for i in range(count):
        kind = "dense" if i < dense else "weights"
        layers.append(GradientLayer(f"layer{i}", kind, (Gradient(f"layer{i}/w", 0, 10),)))
        if i % 2:
            layers.append(GradientLayer(f"norm{i}", "other", (Gradient(f"norm{i}/scale", 0, 1),)))
    return layers


def sizes_of_the_paper(layers, k):
    """Le et al. 2018, Section 4.2, of `layers` layers; in the order of backward."""
    if layers % k == 0:
        return [k] * (layers // k - 1) + [1] * k
    return [k] * (layers // k) + [1] * (layers - k * (layers // k))


@pytest.mark.parametrize("count", [1, 2, 7, 12])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 7, 12, 20])
def test_chunks_of_layers_are_those_of_the_paper(count, k):
    chunks = chunks_of(chain(count), Scheme("host_accumulate", chunk=k), 1 << 20, 4)
    found = [sum(name.startswith("layer") for name in chunk.layers) for chunk in chunks]
    trailing = found[-1:] == [0]  # a norm behind the last layer with weights
    assert found[: len(found) - trailing] == sizes_of_the_paper(count, k)


@pytest.mark.parametrize("replicated", [0, 1, 2])
@pytest.mark.parametrize(
    "scheme", [{}, {"name": "blocking"}, {"name": "two_chunks", "first_layers": 4}, {"name": "per_layer"}]
)
def test_layers_that_lie_apart_are_in_chunks_of_their_own(scheme, replicated):
    """However many of them are replicated now: dense1 and dense2 are the first two in the order of computation."""
    layers, apart = chain(8, dense=3), frozenset({"layer1", "layer2"})
    chunks = chunks_of(layers, Scheme(**scheme, replicated_dense=replicated), 100, 4, apart)
    names = [g.name for chunk in chunks for g in chunk.gradients]
    assert sorted(names) == sorted(g.name for layer in layers for g in layer.gradients)
    for chunk in chunks:
        assert set(chunk.layers) <= apart or not set(chunk.layers) & apart
    assert [c.layers for c in chunks if c.replicated] == [("layer1",), ("layer2",)][2 - replicated :]
    order = [g.name for layer in layers if layer.name not in apart for g in layer.gradients]
    assert [n for n in names if n.partition("/")[0] not in apart] == order
