"""Tests of reduction schemes: plain data, saved with strategies and plans; invalid ones are rejected in one line."""

import json

import pytest

from halograd.errors import UserError
from halograd.layers.reduction_scheme import NAMES, Scheme
from halograd.layers.strategy import Strategy
from halograd.models import mesh, vgg_a

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
