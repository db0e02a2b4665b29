"""Objects built from plain data: strict types, keys in messages, and tables of function parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field, model_validator

from halograd.errors import UserError
from halograd.schema import STRICT, As, Below1, Count, FilePath, Positive, Table, Text, build, check_fields, table_of


class Parts(Table):
    height: Count = 1
    width: Count = 1


class Round(Table):
    kind: Literal["round"]
    radius: Positive


class Flat(Table):
    kind: Literal["flat"]
    side: Positive = 1.0

    @model_validator(mode="after")
    def _sides(self) -> Flat:
        if self.side == 3:
            raise ValueError("side: expected another one than 3, got 3")
        return self


@dataclass(frozen=True)
class Inner:
    __pydantic_config__ = STRICT

    share: Below1 = 0.0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "inner")


@dataclass(frozen=True)
class Outer:
    __pydantic_config__ = STRICT

    count: Count
    parts: Annotated[Mapping[str, int], As(Parts)] = field(default_factory=dict)
    layers: Mapping[str, Annotated[Mapping[str, int], As(Parts)]] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    shape: Annotated[Round | Flat, Field(discriminator="kind")] | None = None
    device: Literal["auto"] | Count | Annotated[list[Count], Field(min_length=1)] = "auto"
    by_ranks: Mapping[Annotated[int, Field(ge=2)], float] = field(default_factory=dict)
    path: FilePath = "a"
    title: Text = "b"
    flag: bool = False


def test_what_is_made():
    data = {"count": 2, "parts": {"width": 3}, "layers": {"a": {"height": 2}}, "inner": {"names": ["x", "y"]}}
    made = build(Outer, {**data, "shape": {"kind": "round", "radius": 1}, "by_ranks": {"4": 1}, "device": [1]})
    assert made == Outer(
        2, {"width": 3}, {"a": {"height": 2}}, Inner(names=("x", "y")), Round(kind="round", radius=1.0), [1], {4: 1.0}
    )
    assert type(made.parts) is dict and type(made.inner.names) is tuple and type(made.by_ranks[4]) is float


def test_numbers_of_numpy_and_mappings_count_as_what_they_hold():
    made = build(Outer, {"count": np.int64(3), "layers": {"a": {"height": np.int32(2)}}, "device": np.arange(1, 3)})
    assert made == Outer(3, {}, {"a": {"height": 2}}, device=[1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "2"}, "count: expected a whole number, got '2'"),
        ({"count": True}, "count: expected a whole number, got true"),
        ({"count": 2.0}, "count: expected a whole number, got 2.0"),
        ({"count": 0}, "count: expected a whole number >= 1, got 0"),
        ({"count": 2**31}, "count: expected a whole number <= 2147483647, got 2147483648"),
        ({"count": object}, "count: expected a whole number, got \"<class 'object'>\""),
        ({"flag": 1}, "flag: expected true or false, got 1"),
        ({"cuont": 2}, "cuont: unknown key; expected one of count, parts, layers, inner, .*; did you mean count?"),
        ({"parts": {"hight": 2}}, "parts.hight: unknown key; expected one of height, width; did you mean height?"),
        ({"parts": [["height", 2]]}, "parts: expected a table, got [['height', 2]]"),
        ({"layers": {"a": {"width": 0}}}, "layers.a.width: expected a whole number >= 1, got 0"),
        ({"layers": {"a\nb": {"wdth": 0}}}, "layers.'a\\nb'.wdth: unknown key; expected one of height, width; did"),
        ({"inner": {"share": 1}}, "inner.share: expected a number < 1, got 1"),
        ({"inner": {"share": "0"}}, "inner.share: expected a number, got '0'"),
        ({"inner": {"names": "xy"}}, "inner.names: expected a list, got 'xy'"),
        ({"inner": {"names": ["x", 2]}}, "inner.names[1]: expected a text in quotes, got 2"),
        ({"inner": {"nmes": []}}, "inner.nmes: unknown key; expected one of share, names; did you mean names?"),
        ({"inner": 3}, "inner: expected a table, got 3"),
        ({"shape": {"kind": "oval"}}, "shape.kind: expected one of 'round', 'flat', got 'oval'"),
        ({"shape": {"radius": 1}}, "shape.kind: expected a value, got nothing; this key is required"),
        ({"shape": {"kind": "round"}}, "shape.radius: expected a value, got nothing; this key is required"),
        ({"shape": {"kind": "round", "side": 1}}, "shape.side: unknown key; expected one of kind, radius"),
        ({"shape": {"kind": "flat", "side": 3}}, "shape.side: expected another one than 3, got 3"),
        ({"device": "gpu"}, "device: expected one of 'auto' or a whole number or a list, got 'gpu'"),
        ({"device": 0}, "device: expected one of 'auto' or a whole number >= 1 or a list, got 0"),
        ({"device": [0]}, "device[0]: expected a whole number >= 1, got 0"),
        ({"by_ranks": {"1": 1.0}}, "by_ranks.1: expected a whole number >= 2, got '1'"),
        ({"by_ranks": {"two": 1.0}}, "by_ranks.two: expected a whole number, got 'two'"),
        ({"by_ranks": {"4": None}}, "by_ranks.4: expected a number, got None"),
        ({"path": ""}, "path: expected a path that is not empty and has no control characters, got ''"),
        ({"path": "a\0b"}, "path: expected a path that is not empty and has no control characters, got 'a\\x00b'"),
        ({"path": "x" * 256}, "path: expected a path of at most 2048 bytes and 255 per name, got 'xxxx"),
        ({"path": "abc/" * 600}, "path: expected a path of at most 2048 bytes and 255 per name, got 'abc/"),
        ({"title": "a\nb"}, "title: expected a text of one line of at most 255 characters, got 'a\\nb'"),
        ({"title": "x" * 500 + "\n"}, "title: expected a text of one line of at most 255 characters, got 'xxxx"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(UserError) as caught:
        build(Outer, {"count": 1, **change}, "f.json", "at")
    told = str(caught.value)
    begin, _, end = f"f.json: at.{message}".partition(".*")
    assert told.startswith(begin) and told.endswith(end) and told.isprintable()


@pytest.mark.parametrize("data", [None, 3, [], "x", True])
def test_other_data_than_a_table(data):
    with pytest.raises(UserError, match=r"^f: expected a table, got "):
        build(Outer, data, "f")


def test_a_path_counts_as_its_text():
    """As in ``hg.fit(..., init=Path("weights.safetensors"))``: not as the text "PosixPath('weights.safetensors')"."""
    assert build(Outer, {"count": 1, "path": Path("a") / "b"}).path == "a/b"


def test_dataclasses_made_in_python_are_checked_too():
    with pytest.raises(UserError, match=r"^inner.share: expected a number < 1, got 2$"):
        Inner(2)
    with pytest.raises(UserError, match=r"^inner.names: expected a list, got 3$"):
        Inner(names=3)  # type: ignore[arg-type]


def general(size: Count, width: Positive = 1.0, *, sizes: Sequence[Count] = ()) -> None: ...


def special(width: Below1 = 0.5, **options: Any) -> None: ...


def test_tables_of_functions():
    table = table_of(special, general)
    assert sorted(table.model_fields) == ["size", "sizes", "width"]
    given = build(table, {"sizes": (1, 2)})
    assert given.model_fields_set == {"sizes"} and given.sizes == [1, 2]
    for data, message in (
        ({"width": 1.0}, "width: expected a number < 1, got 1.0"),
        ({"size": 1.5}, "size: expected a whole number, got 1.5"),
        ({"sizes": [0]}, r"sizes\[0\]: expected a whole number >= 1, got 0"),
        ({"options": {}}, "options: unknown key; expected one of width, size, sizes"),
    ):
        with pytest.raises(UserError, match=f"^model.{message}"):
            build(table, data, at="model")
