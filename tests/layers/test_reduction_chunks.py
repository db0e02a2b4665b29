"""Tests of chunks of gradients against stated rules and papers, on real and random networks; replicated layers."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from halograd.errors import UserError
from halograd.layers.reduction_chunks import (
    Gradient,
    GradientLayer,
    chunks_of,
    gradient_layers,
    replicable_layers,
    replicated_layers,
    saves_traffic,
)
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.models import resnet, resnet50, vgg_a

ITEM = 4


@pytest.fixture(scope="module")
def vgg():
    network = vgg_a(width=0.1)
    return gradient_layers(network, parameter_blocks(network, Strategy({"sample": 2}), 2))


def layers_of(chunks):
    return [chunk.layers for chunk in chunks]


DENSE, CONV5 = ("dense3", "dense2", "dense1"), ("conv5_2", "conv5_1")
CONV43, CONV21 = ("conv4_2", "conv4_1", "conv3_2", "conv3_1"), ("conv2_1", "conv1_1")


@pytest.mark.parametrize(
    ("k", "first"), [(3, DENSE), (4, DENSE), (6, DENSE + CONV5), (9, DENSE + CONV5 + CONV43[:2]), (1, DENSE[:1])]
)
def test_two_chunks_of_vgg_a_are_those_of_the_paper(vgg, k, first):
    """The two chunks of VGG-A are those of Lee et al., Section V-C4, where poolings count as layers (k = 3, 6, 9)."""
    everything = DENSE + CONV5 + CONV43 + CONV21
    chunks = layers_of(chunks_of(vgg, Scheme("two_chunks", k), 1, ITEM))
    assert chunks == [first, everything[len(first) :]]


def test_two_chunks_with_all_layers_in_the_first_are_one(vgg):
    assert len(chunks_of(vgg, Scheme("two_chunks", 16), 1, ITEM)) == 1


def test_replicated_layers_are_the_first_dense_ones_and_count_as_layers(vgg):
    scheme = Scheme("two_chunks", 6, replicated_dense=2)
    assert replicated_layers(vgg, scheme) == {"dense1", "dense2"}
    chunks = chunks_of(vgg, scheme, 1, ITEM)
    assert [chunk.layers for chunk in chunks if chunk.replicated] == [("dense2",), ("dense1",)]
    assert layers_of(c for c in chunks if not c.replicated) == [("dense3", *CONV5), CONV43 + CONV21]


def test_blocking_per_layer_and_buckets(vgg):
    everything = DENSE + CONV5 + CONV43 + CONV21
    assert layers_of(chunks_of(vgg, Scheme("blocking"), 1, ITEM)) == [everything]
    assert layers_of(chunks_of(vgg, Scheme("per_layer"), 1 << 40, ITEM)) == [(name,) for name in everything]
    assert layers_of(chunks_of(vgg, Scheme("bucketed"), 1, ITEM)) == [(name,) for name in everything]
    assert layers_of(chunks_of(vgg, Scheme("bucketed"), 1 << 40, ITEM)) == [everything]


def test_norms_go_with_the_layers_around_them():
    """A chunk ends at a convolution or dense layer, although the norms between have gradients too."""
    network = resnet((1, 1, 1, 1), classes=5, resolution=32, width=4)
    layers = gradient_layers(network, parameter_blocks(network, Strategy(), 1))
    kinds = {layer.name: layer.kind for layer in layers}
    for k in range(1, 9):
        first, rest = chunks_of(layers, Scheme("two_chunks", k), 1, ITEM)
        assert kinds[first.layers[-1]] in ("weights", "dense")
        assert rest.layers[-1] == "conv1"


def test_buckets_are_in_the_order_in_which_backward_finishes_them():
    """Buckets are in the order in which backward completes them, not in that of their first layers."""
    layers = [
        GradientLayer(name, "weights", (Gradient(f"{name}/w", sharing, size),))
        for name, sharing, size in (("d", "all", 1), ("c", "few", 9), ("b", "few", 1), ("a", "all", 1))
    ]
    assert layers_of(chunks_of(layers, Scheme("bucketed"), 8 * ITEM, ITEM)) == [("c",), ("b",), ("d", "a")]
    assert layers_of(chunks_of(layers, Scheme("two_chunks", 4), 1, ITEM)) == [("c", "b"), ("d", "a")]


gradients = st.builds(
    lambda sharing, size: (sharing, size), st.sampled_from(["all", "some", "few"]), st.integers(1, 2000)
)
networks = st.lists(
    st.tuples(st.sampled_from(["dense", "weights", "pooling", "other"]), st.lists(gradients, max_size=3)), max_size=12
)
schemes = st.one_of(
    st.sampled_from(["blocking", "per_layer", "bucketed", "hierarchical", "sharded", "auto"]).map(Scheme),
    st.integers(1, 14).map(lambda k: Scheme("two_chunks", k)),
    st.integers(1, 14).map(lambda n: Scheme("host_accumulate", chunk=n)),
)


def made(described):
    return [
        GradientLayer(f"l{i}", kind, tuple(Gradient(f"l{i}/{j}", *g) for j, g in enumerate(given_)))
        for i, (kind, given_) in enumerate(described)
    ]


@given(networks, schemes, st.integers(1, 5000))
def test_every_gradient_is_in_one_chunk_and_chunks_are_runs(described, scheme, bucket_bytes):
    layers = made(described)
    chunks = chunks_of(layers, scheme, bucket_bytes, ITEM)
    for sharing in ("all", "some", "few"):
        order = [g for layer in layers for g in layer.gradients if g.sharing == sharing]
        assert [g for chunk in chunks if chunk.sharing == sharing for g in chunk.gradients] == order
    for chunk in chunks:
        assert chunk.gradients
        assert chunk.layers == tuple(dict.fromkeys(g.name.partition("/")[0] for g in chunk.gradients))


@given(networks, st.integers(1, 5000))
def test_a_bucket_is_closed_by_the_layer_that_fills_it(described, bucket_bytes):
    layers = made(described)
    number = {layer.name: i for i, layer in enumerate(layers)}
    chunks = chunks_of(layers, Scheme("bucketed"), bucket_bytes, ITEM)
    last = {chunk.sharing: chunk for chunk in chunks}
    for chunk in chunks:
        within = [g.size * ITEM for g in chunk.gradients if g.name.partition("/")[0] != chunk.layers[-1]]
        assert sum(within) < bucket_bytes, "the layers before the last one did not fill it"
        if chunk is not last[chunk.sharing]:
            assert sum(g.size for g in chunk.gradients) * ITEM >= bucket_bytes
    ends = [number[c.layers[-1]] for c in chunks]
    assert ends == sorted(ends), "sums are issued in the order in which backward passes the layers"


def chain(count, dense=0):
    """Return layers in the order of backward: `dense` dense layers, then others; a norm follows every second one."""
    layers = []
    for i in range(count):
        kind = "dense" if i < dense else "weights"
        layers.append(GradientLayer(f"layer{i}", kind, (Gradient(f"layer{i}/w", 0, 10),)))
        if i % 2:
            layers.append(GradientLayer(f"norm{i}", "other", (Gradient(f"norm{i}/scale", 0, 1),)))
    return layers


def sizes_of_the_paper(layers, k):
    """Return the chunk sizes of Le et al. 2018, Section 4.2, for `layers` layers, in the order of backward."""
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
    """Replicated or separate layers have their own chunks, for any number of replicated dense layers."""
    layers, apart = chain(8, dense=3), frozenset({"layer1", "layer2"})
    chunks = chunks_of(layers, Scheme(**scheme, replicated_dense=replicated), 100, 4, apart)
    names = [g.name for chunk in chunks for g in chunk.gradients]
    assert sorted(names) == sorted(g.name for layer in layers for g in layer.gradients)
    for chunk in chunks:
        assert set(chunk.layers) <= apart or not set(chunk.layers) & apart
    assert [c.layers for c in chunks if c.replicated] == [("layer1",), ("layer2",)][2 - replicated :]
    order = [g.name for layer in layers if layer.name not in apart for g in layer.gradients]
    assert [n for n in names if n.partition("/")[0] not in apart] == order


VGG_A = vgg_a()


def test_traffic_of_vgg_a_as_in_the_paper():
    """Traffic of VGG-A is that of Lee et al., III-C2: 102,760,448 gradients, 7,471,104 activations and errors."""
    (features,), (units,) = VGG_A.layers["dense1"].inputs[0].shape, VGG_A.layers["dense1"].shape
    assert (features * units, (features + units) * 256) == (102_760_448, 7_471_104)
    assert saves_traffic(VGG_A.layers["dense1"], 256) and not saves_traffic(VGG_A.layers["dense3"], 1024)


@pytest.mark.parametrize(
    "strategy, batch, names",
    [
        (Strategy({"sample": 4}), 256, ["dense1", "dense2", "dense3"]),
        (Strategy({"sample": 4}), 1024, ["dense1", "dense2"]),
        (Strategy({"sample": 4}), 4096, []),
        (Strategy({"height": 2, "width": 2}), 256, ["dense1", "dense2", "dense3"]),
        (Strategy({"sample": 1}), 256, []),
        (Strategy({"sample": 4}, {"dense2": {"channel": 4}}), 256, ["dense1"]),
        (Strategy({"sample": 4}, {"dense1": {"input_channel": 4}}), 256, []),
        (Strategy({"sample": 4}, {"dense1": {"sample": 1}}), 256, []),
    ],
)
def test_first_layers_that_save_traffic(strategy, batch, names):
    assert replicable_layers(strategy, VGG_A, batch) == names


@pytest.mark.parametrize(
    "layers, count, text",
    [
        ({"dense1": {"channel": 4}}, 1, "'dense1' in 4 blocks of channels; use no replicated_dense"),
        (
            {"dense2": {"channel": 2, "input_channel": 2}},
            3,
            "'dense2' in 4 blocks of channels; use replicated_dense = 1",
        ),
        ({}, 4, "expected at most the 3 dense layers of 'vgg_a' that are trained"),
    ],
)
def test_replicated_layers_that_are_refused(layers, count, text):
    strategy = Strategy({"sample": 4}, layers, reduction={"replicated_dense": count})
    with pytest.raises(UserError, match=r"^reduction\.replicated_dense: expected") as refused:
        strategy.validate(VGG_A, 4)
    assert text in str(refused.value) and "\n" not in str(refused.value)


def test_a_cut_layer_behind_the_replicated_ones_is_fine():
    Strategy({"sample": 4}, {"dense3": {"channel": 4}}, reduction={"replicated_dense": 2}).validate(VGG_A, 4)


def test_a_network_with_one_dense_layer():
    with pytest.raises(UserError, match="at most the 1 dense layers"):
        Strategy({"sample": 4}, reduction={"replicated_dense": 2}).validate(resnet50(), 4)


def test_auto_chooses_the_layers_itself():
    with pytest.raises(UserError, match='expected none with name = "auto", which chooses it, got 1'):
        Strategy(reduction={"name": "auto", "replicated_dense": 1})
