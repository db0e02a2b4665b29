"""Tests of reduction schemes, chunks of gradients and replicated layers against stated rules and papers."""

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import Layout
from halograd.errors import UserError
from halograd.layers.dense import RowGather, padded_rows
from halograd.layers.reduction_chunks import (
    Gradient,
    GradientLayer,
    chunks_of,
    gradient_layers,
    replicable_layers,
    replicated_layers,
    saves_traffic,
)
from halograd.layers.reduction_scheme import NAMES, Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.models import mesh, resnet, resnet50, vgg_a
from halograd.program.runner import UnderWay
from halograd.testing import random_array

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


SETTINGS = {"two_chunks": {"first_layers": 3}, "host_accumulate": {"chunk": 5}}


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_with_the_strategy(tmp_path, name):
    strategy = Strategy({"sample": 2}, reduction=Scheme(name, **SETTINGS.get(name, {})))
    strategy.save(tmp_path / "s.json")
    assert Strategy.load(tmp_path / "s.json") == strategy


def test_a_strategy_without_one_sums_buckets(tmp_path):
    (tmp_path / "s.json").write_text('{"parts": {"height": 2}, "bucket_bytes": 7}')
    assert Strategy.load(tmp_path / "s.json").reduction == Scheme("bucketed")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "ring"}, "reduction.name: expected one of 'blocking', 'per_layer', .* or 'auto', got 'ring'"),
        ({"name": ["bucketed"]}, r"reduction.name: expected one of .*, got \['bucketed'\]"),
        ({"payload": "float16"}, "reduction.payload: expected float32, bfloat16, or \"FILE.py:CLASS\", got 'float16'"),
        ({"name": "two_chunks"}, r"reduction.first_layers: expected the number .* \(>= 1\) with two_chunks, got 0"),
        (
            {"first_layers": 3},
            "first_layers: expected name = \"two_chunks\" with it, got 'bucketed'; remove one of them",
        ),
        ({"chunk": 3}, "reduction.chunk: expected name = \"host_accumulate\" with it, got 'bucketed'"),
        ({"chunk": 0}, "reduction.chunk: expected a whole number >= 1, got 0"),
        ({"replicated_dense": 1.5}, "reduction.replicated_dense: expected a whole number, got 1.5"),
        ({"replicated_dense": True}, "reduction.replicated_dense: expected a whole number, got true"),
        ({"deterministic": 1}, "reduction.deterministic: expected true or false, got 1"),
        ({"bucket": 1}, "reduction.bucket: unknown key; expected one of name, first_layers, chunk, replicated_dense"),
        ("bucketed", "reduction: expected a table, got 'bucketed'"),
        (
            {"name": "sharded", "payload": "bfloat16"},
            "reduction.payload: expected one of the schemes blocking, .*two_chunks.* with 'bfloat16', got 'sharded'",
        ),
        ({"name": "hierarchical", "deterministic": True}, "reduction.deterministic: .* got 'hierarchical'; choose one"),
    ],
)
def test_what_is_refused_in_one_line(tmp_path, data, message):
    with pytest.raises(UserError, match=message) as found:
        Strategy(reduction=data)
    assert "\n" not in str(found.value)
    (tmp_path / "s.json").write_text(json.dumps({"parts": {}, "reduction": data}))
    with pytest.raises(UserError, match=message) as found:
        Strategy.load(tmp_path / "s.json")
    assert str(found.value).startswith(f"strategy {tmp_path / 's.json'}: reduction")


@pytest.mark.parametrize(
    ("scheme", "network", "message"),
    [
        (
            Scheme("two_chunks", 17),
            vgg_a(resolution=32, width=0.1),
            "at most the 16 convolutions, dense layers and pool",
        ),
        (Scheme(replicated_dense=4), vgg_a(resolution=32, width=0.1), r"at most the 3 dense layers of .* got 4"),
        (Scheme(replicated_dense=1), mesh(16, 2, (4,), 1), r"expected at most the 0 dense layers of 'mesh' .* got 1"),
    ],
)
def test_counts_that_the_network_does_not_have(scheme, network, message):
    with pytest.raises(UserError, match=message):
        Strategy(reduction=scheme).validate(network, 1)


def test_in_words():
    assert str(Scheme()) == "bucketed"
    assert str(Scheme("two_chunks", 9, replicated_dense=2)) == "two_chunks(9) + replicated_dense(2)"
    rounded = Scheme("per_layer", payload="bfloat16", error_feedback=False, deterministic=True)
    assert str(rounded) == "per_layer, bfloat16 without error feedback, deterministic"
    assert str(Scheme("host_accumulate", chunk=4)) == "host_accumulate(4)"


TRANSPORTS = ["auto", "mpi", "emulated:alpha=1e-4,beta=1e-9"]


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("features", [(1,), (3, 7), (16, 32), (25088, 1000), (10, 84)])
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_padded_rows_are_the_fewest_of_whole_cache_lines(rows, features, itemsize):
    found = padded_rows(rows, features, itemsize)
    fitting = (n for n in range(rows, rows + 65) if all(n * f * itemsize % 64 == 0 for f in features))
    assert found == next(fitting)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("batch, features, dtype", [(7, 5, "float64"), (2, 84, "float32"), (64, 700, "float32")])
def test_every_rank_has_all_rows_again_and_again(batch, features, dtype, transport):
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        layout = Layout.blocks((batch, features), (min(batch, comm.size), 1), comm.size)
        own = np.zeros(layout.boxes[comm.rank].shape, dtype)
        rows = padded_rows(-(-batch // comm.size), [features], own.itemsize)
        array = np.zeros((comm.size * rows, features), dtype)
        reduction = comm.reduction(array.reshape(-1), kind="replicated_dense", name="rows", method="all_gather")
        gather = RowGather(array, UnderWay(reduction), own, comm.rank * rows)
        comm.counters.reset()
        for step in range(3):
            whole = random_array((batch, features), "rows", step).astype(dtype)
            own[...] = whole[layout.boxes[comm.rank].slices()]
            gather.put()
            own[...] = math.nan  # it may serve others now
            gather.start()
            gather.finish()
            gather.finish()  # nothing is under way: returns at once
            for rank, box in enumerate(layout.boxes):
                part = gather.array[rank * rows : (rank + 1) * rows]
                np.testing.assert_array_equal(part[: box.shape[0]], whole[box.slices()])
                assert not part[box.shape[0] :].any()
        sent = comm.counters["replicated_dense"]
        several = int(comm.size > 1)
        assert (sent.messages, sent.bytes) == (3 * several, 3 * rows * features * own.itemsize * several)
        reduction.close()
