"""Construction of objects from plain data, checked by the annotations of their class, with errors of one line.

A class is a :class:`Table` (pydantic), or a dataclass with ``__pydantic_config__ = STRICT``. Nothing is converted
silently: a string is not a number, true is not 1, and an unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic import create_model as make_table
from pydantic_core import core_schema

from .documents import dotted, is_one_line, shown
from .errors import UserError

__all__ = [
    "LARGEST",
    "MOST",
    "STRICT",
    "As",
    "Below1",
    "Bytes",
    "Count",
    "FilePath",
    "NotNegative",
    "Positive",
    "Shares",
    "Size",
    "Table",
    "Text",
    "Threads",
    "Whole",
    "build",
    "check_fields",
    "nearest",
    "table_of",
]

Built = TypeVar("Built")

#: Settings of every class that a file is read into.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

#: Limit of counts: 32 bits, as in MPI.
MOST = 2**31 - 1
#: Limit of times, rates and factors: products of a few such numbers are still finite.
LARGEST = 1e30
#: Limits of file names and paths [B]: file systems permit no longer names, and a run adds names to its directory.
LONGEST_PATH, LONGEST_NAME = 2048, 255


def _line(text: str) -> str:
    if not text.strip() or not is_one_line(text) or len(text) > LONGEST_NAME:
        raise ValueError(f"expected a text of one line of at most {LONGEST_NAME} characters, got {shown(text)}")
    return text


def _path(text: str) -> str:
    if not text.strip() or not is_one_line(text):
        raise ValueError(f"expected a path that is not empty and has no control characters, got {shown(text)}")
    if len(text.encode()) > LONGEST_PATH or any(len(name.encode()) > LONGEST_NAME for name in text.split("/")):
        raise ValueError(
            f"expected a path of at most {LONGEST_PATH} bytes and {LONGEST_NAME} per name, got {shown(text)}"
        )
    return text


Count = Annotated[int, Field(ge=1, le=MOST)]
#: Relative lengths, one per part.
Shares = Annotated[tuple[Count, ...], Field(min_length=1)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**63)]
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
#: Limit of threads: OpenMP's runtime ends the process without a message if the system cannot start as many.
Threads = Annotated[int, Field(ge=1, le=4096)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, AfterValidator(_line)]
FilePath = Annotated[str, AfterValidator(_path)]


class Table(BaseModel):
    """A table of a file: its keys are the attributes, and other keys are errors."""

    model_config = ConfigDict(**STRICT, frozen=True)


class As:
    """``Annotated[Mapping[...], As(table)]``: a mapping with the keys and values that `table` permits.

    The result contains only the given keys, without defaults.
    """

    def __init__(self, table: type[Table]) -> None:
        self.table = table

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(_set_values, handler.generate_schema(self.table))


def _set_values(table: BaseModel) -> dict[str, Any]:
    return {key: getattr(table, key) for key in type(table).model_fields if key in table.model_fields_set}


def build(kind: type[Built], data: object, source: str = "", at: str = "") -> Built:
    """Build the object of a class from plain data. Local.

    Parameters
    ----------
    kind
        A :class:`Table`, or a dataclass with `STRICT`.
    data
        Data of a file or the command line. NumPy numbers, mappings and paths are converted to plain data.
    source
        File name, for the message.
    at
        Key of the data in the file.

    Raises
    ------
    UserError
        ``source: at.key: expected ..., got ...`` in one line.
    """
    try:
        # As JSON, in which a list may become a tuple and a table an object, but a string is not a number.
        return _adapter(kind).validate_json(json.dumps(data, default=_plain))
    except ValidationError as error:
        raise UserError(": ".join(filter(None, (source, _describe(error, kind, at))))) from None


def check_fields(record: Any, at: str, source: str = "") -> None:
    """Check an object of a dataclass, created by Python code, against the annotations of its class. Local.

    Raises
    ------
    UserError
        See :func:`build`.
    """
    kind: Any = type(record)
    build(table_of(kind), {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}, source, at)


@lru_cache
def table_of(*callables: Callable[..., Any]) -> type[Table]:
    """Return the table of the parameters of functions, or of a dataclass. All keys are optional.

    If several functions have a parameter, the first one's annotation counts, as for ``unet2d(resolution, **options)``
    and ``unet``.
    """
    fields: dict[str, Any] = {}
    for call in callables:
        hints = typing.get_type_hints(call, include_extras=True)
        for name, parameter in inspect.signature(call).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                # The default only makes the key optional: `model_fields_set` has the keys that were given.
                fields.setdefault(name, (hints.get(name, Any), None))
    return make_table(callables[0].__name__, __base__=Table, **fields)


# An adapter compiles the schema of its class, which takes longer than validating one object.
_adapter: Callable[[Any], TypeAdapter[Any]] = lru_cache(TypeAdapter)


def _plain(value: Any) -> Any:
    """Return plain data for a dataclass, a mapping, a path or NumPy data, which JSON cannot represent; else the `repr`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)


# -- messages -----------------------------------------------------------------------------------

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "string_too_short": "a text that is not empty",
    "bool_type": "true or false",
    "none_required": "nothing",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "dataclass_type": "a table",
    "model_attributes_type": "a table",
    "too_short": "{min_length} or more entries",
    "too_long": "{max_length} or fewer entries",
    "greater_than_equal": "{a_number} >= {ge}",
    "greater_than": "{a_number} > {gt}",
    "less_than_equal": "{a_number} <= {le}",
    "less_than": "{a_number} < {lt}",
    "literal_error": "one of {expected}",
    "union_tag_invalid": "one of {expected_tags}",
}


def _describe(error: ValidationError, kind: Any, at: str) -> str:
    """Return a string for one fault, preferably an unknown key, because that often explains a missing key."""
    faults = [(fault, *_follow(kind, fault["loc"])) for fault in error.errors(include_url=False)]
    fault, tables, steps = next((p for p in faults if p[0]["type"] in _UNKNOWN), faults[0])
    # Among the alternatives for one value, take the one that matched furthest.
    fault, tables, steps = max((p for p in faults if p[2][: len(steps)] == steps), key=lambda p: len(p[2]))
    path, name, got, context = dotted(steps, at), fault["type"], fault["input"], fault.get("ctx", {})
    if name in _UNKNOWN:
        return f"{path}: unknown key; {_known(steps[-1], tables)}"
    if name == "missing":
        what = "table" if any(map(_is_table, tables)) else "key"
        return f"{path}: expected a value, got nothing; this {what} is required"
    if name == "union_tag_not_found":
        return f"{path}.kind: expected a value, got nothing; this key is required"
    if name == "union_tag_invalid":
        path, got = f"{path}.kind", context["tag"]
    if "error" in context:
        return _of_validator(context["error"], path)
    expected = " or ".join(dict.fromkeys(_expected(other) for other, _, followed in faults if followed == steps))
    return f"{path}: expected {expected}, got {shown(got)}" if path else f"expected {expected}, got {shown(got)}"


def _of_validator(error: Exception, path: str) -> str:
    """Return the message of a validator of the library, after the path unless the message is that of a UserError."""
    text = str(error)
    if isinstance(error, UserError) or not path:
        return text
    # Other messages begin with the name of a field, which continues the path.
    return f"{path}: {text}" if text.startswith("expected") else f"{path}.{text}"


def _expected(fault: Mapping[str, Any]) -> str:
    limits = fault.get("ctx", {})
    whole = any(isinstance(bound, int) for bound in limits.values())
    context = {k: f"{v:g}" if isinstance(v, float) else v for k, v in limits.items()}
    context["a_number"] = "a whole number" if whole else "a number"
    return _EXPECTED[fault["type"]].format(**context) if fault["type"] in _EXPECTED else fault["msg"]


def _known(key: str | int, tables: Iterable[Any]) -> str:
    """Return the known keys, and the nearest one, as a string."""
    keys = list(dict.fromkeys(name for table in tables for name in _fields(table)))
    return f"expected one of {', '.join(keys)}{nearest(str(key), keys)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the nearest known name, or an empty string. Local.

    If one to four names start with `name` and an underscore, they are listed instead.

    >>> nearest("warmup", ["final", "warmup_epochs", "warmup_start"])
    '; did you mean warmup_epochs or warmup_start?'
    """
    names = list(known)
    longer = [known for known in names if name and known.startswith(f"{name}_")]
    near = longer if 0 < len(longer) <= 4 else difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _follow(kind: Any, where: Sequence[int | str]) -> tuple[list[Any], list[int | str]]:
    """Return the types at a path (for an unknown key, those of its table), and the path without alternatives."""
    kinds, steps = _alternatives(kind), list[int | str]()
    for i, step in enumerate(where):
        # A path of pydantic also names the alternative of a union, which is no key of the file.
        branch = [t for t in kinds if len(kinds) > 1 and _is_called(t, step)]
        if branch:
            kinds = branch
            continue
        tagged = [
            t for t in kinds if len(kinds) > 1 and _is_table(t) and step in typing.get_args(_fields(t).get("kind"))
        ]
        inner = [a for t in kinds for a in _inside(t, step)]
        if tagged:
            kinds = tagged
        elif inner:
            kinds, steps = inner, [*steps, step]
        # The last step is a key that no table has.
        elif i + 1 == len(where) and any(map(_is_table, kinds)):
            steps.append(step)
    return kinds, steps


def _is_called(kind: Any, step: int | str) -> bool:
    """Return whether a step of a path names this alternative, as in ``labels.mask.int``."""
    if typing.get_origin(kind) is dict:
        return isinstance(step, str) and step.startswith("dict[")
    # In its paths, pydantic names a number with bounds `constrained-int` or `constrained-float`.
    return not _is_table(kind) and isinstance(kind, type) and step in (kind.__name__, f"constrained-{kind.__name__}")


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        table = next((part.table for part in parts[1:] if isinstance(part, As)), None)
        return [table] if table else _alternatives(parts[0])
    if origin in (typing.Union, types.UnionType):
        return [kind_of_part for part in parts for kind_of_part in _alternatives(part)]
    return [annotation]


def _inside(kind: Any, step: int | str) -> list[Any]:
    """Return the types of the entry `step` of a table, mapping or list; empty for an unknown key."""
    if _is_table(kind):
        fields = _fields(kind)
        return _alternatives(fields[step]) if step in fields else []
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    # "[key]" is the path of pydantic for a fault in the key itself, not in its value.
    if not isinstance(origin, type) or not parts or step == "[key]":
        return []
    if issubclass(origin, Mapping):
        return _alternatives(parts[1])
    if not isinstance(step, int):
        return []
    # list[T] and tuple[T, ...] have one type for all entries, tuple[A, B] one for each.
    return _alternatives(parts[0] if len(parts) < 2 or parts[1] is ... else parts[min(step, len(parts) - 1)])


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def _fields(kind: Any) -> dict[Any, Any]:
    """Return the annotations of a table by key; empty for other types."""
    if not _is_table(kind):
        return {}
    if issubclass(kind, BaseModel):
        tables = {name: [m.table for m in f.metadata if isinstance(m, As)] for name, f in kind.model_fields.items()}
        return {name: tables[name][0] if tables[name] else f.annotation for name, f in kind.model_fields.items()}
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}
