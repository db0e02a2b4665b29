"""Reference of the files that users write, generated from the tables (pydantic) that check them.

Type, range and default of a key are those of its field; its text is the docstring below the field, or its entry among
the attributes of the class. A test fails for a key without a text, so every key is explained.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import griffe
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from halograd import models, schema
from halograd.documents import to_toml
from halograd.layers import Strategy
from halograd.layers.reduction_scheme import Scheme
from halograd.perfmodel import machine
from halograd.perfmodel.quantities import UNITS
from halograd.registry import Chosen
from halograd.training.config import Config, ReductionConfig

from .api import package
from .docstrings import row, to_markdown

__all__ = ["ConfigSection", "Key", "machine_tables", "model_options", "run_tables", "sections", "strategy_tables"]

#: Bounds that only keep arithmetic finite; the reference omits them.
BEYOND = (schema.MOST, schema.LARGEST, 1 / schema.LARGEST, 2**63)
PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "any value"}
#: Expected kind of a text, by the name of its check function.
TEXTS = {"_line": "text", "_path": "path", "_size": 'size such as `"16GiB"`'}
#: Start of a table's docstring that repeats the heading.
HEADING = re.compile(r"^``\[[\w.]+\]``(?: with ``kind = [^:]*)?: ")
#: An entry of a list of definitions in the text of a key: ``"value"`` and its meaning in the next lines.
LISTED = re.compile(r'^(``"\w+"``)\n\s*', re.M)
BOUNDS = {"ge": ">= {}", "gt": "> {}", "le": "<= {}", "lt": "< {}"}


#: Tables whose keys are documented in another class.
EXPLAINED_BY = {
    ReductionConfig: Scheme,
    machine.MachineTable: machine.Machine,
    machine.DeviceTable: machine.Machine,
    machine.EfficiencyTable: machine.Efficiency,
    machine.LinkTable: machine.Link,
    machine.CurveTable: machine.Efficiency,
    machine.RuntimeTable: machine.Overheads,
    machine.TopologyTable: machine.Topology,
    machine.ProtocolTable: machine.Protocol,
    machine.VariationTable: machine.Variation,
}


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of a table, with its type and default as texts."""

    name: str
    kind: str
    default: str
    text: str


@dataclasses.dataclass(frozen=True)
class ConfigSection:
    """Table of a file: its name, purpose and keys."""

    heading: str
    anchor: str
    text: str
    keys: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class Inner:
    """Table within a table.

    Attributes
    ----------
    step
        Keys that lead to the table: ``augment``, ``sums.RANKS``.
    kind
        Class of the table.
    names
        Values of its key `kind` if that names a class of a registry.
    several
        Whether classes with other names have other tables.
    """

    step: str
    kind: type
    names: tuple[str, ...] = ()
    several: bool = False


def run_tables() -> str:
    """Return the tables of a run's configuration."""
    return _markdown(sections(Config))


def machine_tables() -> str:
    """Return the tables of a machine file."""
    return _markdown(sections(machine.MachineTable, "machine"))


def strategy_tables() -> str:
    """Return the tables of a strategy (JSON)."""
    return _markdown(sections(Strategy, "strategy-file"))


def sections(root: type, before: str = "") -> list[ConfigSection]:
    """Return the tables of a file in their order: the top-level keys, then each table with its keys."""
    tables: dict[str, ConfigSection] = {}
    waiting: list[tuple[Inner, str]] = [(Inner("", root), "")]
    while waiting:
        table, path = waiting.pop(0)
        section = _section(table, path, before)
        if section.keys or path:
            tables.setdefault(section.anchor, section)
        below = [(inner, f"{path}.{inner.step}".lstrip(".")) for inner in _inner(table.kind)]
        waiting = [*below, *waiting]
    return list(tables.values())


def model_options() -> str:
    """Return a table of each model's options, with types and defaults."""
    lines = ["| model | option | type | default |", "|---|---|---|---|"]
    for name, make in models.MODELS.items():
        defaults = _defaults(name)
        fields = schema.table_of(*models.makers(name)).model_fields
        for i, (option, field) in enumerate(fields.items()):
            # None as a default means that the function chooses.
            default = defaults.get(option)
            shown = "" if default is None else f"`{to_toml(default)}`"
            first = f"[`{name}`][{make.__module__}.{make.__name__}]" if i == 0 else ""
            lines.append(row(first, f"`{option}`", _kind(field.annotation, field.metadata), shown))
    return "\n".join(lines)


def _defaults(name: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for make in models.makers(name):
        for option, parameter in inspect.signature(make).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                defaults.setdefault(option, parameter.default)
    return defaults


# -- tables ----------------------------------------------------------------------------------------


def _section(table: Inner, path: str, before: str) -> ConfigSection:
    thing = _source(table.kind)
    which = " or ".join(f'"{name}"' for name in table.names)
    anchor = ".".join(filter(None, (before, path, table.names[0] if table.several else "")))
    heading = f"`[{path}]`" + (f", `kind = {which}`" if table.several else "") if path else "At the top"
    fields = {name: field for name, field in _fields(table.kind).items() if not _is_section(field)}
    return ConfigSection(heading, anchor, _summary(thing), tuple(_key(table, *item) for item in fields.items()))


def _key(table: Inner, name: str, field: FieldInfo) -> Key:
    kind = _kind(field.annotation, field.metadata)
    if table.names and name == "kind":
        own = () if table.several else ('or `"FILE.py:CLASS"`',)
        kind = ", ".join([*(f'`"{known}"`' for known in table.names), *own])
    return Key(name, kind, _default(field), _text(table.kind, name))


def _fields(table: type) -> dict[str, FieldInfo]:
    if issubclass(table, BaseModel):
        return dict(table.model_fields)
    hints = typing.get_type_hints(table, include_extras=True)
    fields = {}
    for f in dataclasses.fields(table):
        missing = f.default is dataclasses.MISSING
        factory = None if f.default_factory is dataclasses.MISSING else f.default_factory
        fields[f.name] = FieldInfo.from_annotation(hints[f.name])
        fields[f.name].default = PydanticUndefined if missing else f.default
        fields[f.name].default_factory = factory
    return fields


def _inner(table: type) -> Iterator[Inner]:
    """Yield the tables within a table."""
    for name, field in _fields(table).items():
        for inner in _tables_of(field.annotation, field.metadata):
            yield dataclasses.replace(inner, step=name + inner.step)


def _tables_of(annotation: Any, metadata: Any = ()) -> Iterator[Inner]:
    mapped = next((part.table for part in metadata if isinstance(part, schema.As)), None)
    chosen = next((part.tables for part in metadata if isinstance(part, Chosen)), None)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if mapped is not None:
        yield Inner("", mapped)
    elif chosen is not None:
        yield from (Inner("", kind, names, len(chosen) > 1) for kind, names in chosen.items())
    elif origin is Annotated:
        yield from _tables_of(parts[0], parts[1:])
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _tables_of(part)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from (dataclasses.replace(inner, step=f".NAME{inner.step}") for inner in _tables_of(parts[1]))
    elif isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        yield Inner("", annotation)


def _is_section(field: FieldInfo) -> bool:
    return any(True for _ in _tables_of(field.annotation, field.metadata))


# -- texts -----------------------------------------------------------------------------------------


def _kind(annotation: Any, metadata: Any = ()) -> str:
    """Return type and range of a value, in words."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0], parts[1:])
    if origin is Literal:
        return ", ".join(f"`{to_toml(part)}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(dict.fromkeys(_kind(part, metadata) for part in parts if part is not type(None)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table: {_kind(parts[1])} by name"
    if origin is not None:
        return f"list: {_kind(parts[0])}"
    checks = [check for part in metadata for check in (part.metadata if isinstance(part, FieldInfo) else (part,))]
    for check in checks:
        function = getattr(check, "func", None)
        unit = getattr(function, "keywords", {}).get("unit")
        if unit in UNITS:
            return f'{UNITS[unit][0]} such as `"{UNITS[unit][1]}"`'
        if getattr(function, "__name__", "") in TEXTS:
            return TEXTS[function.__name__]
    return " ".join(filter(None, (PLAIN.get(annotation, "text"), _bounds(checks))))


def _bounds(checks: list[Any]) -> str:
    bounds = {name: getattr(check, name) for check in checks for name in BOUNDS if hasattr(check, name)}
    shown = [BOUNDS[name].format(_number(bound)) for name, bound in bounds.items() if bound not in BEYOND]
    return " and ".join(shown)


def _number(value: float) -> str:
    """Return a bound in readable form: 1,000,000 instead of 1e+06."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{to_toml(value)}`"


def _text(table: type, name: str) -> str:
    """Return the docstring of a field, where it is defined, or its entry among the attributes of the class."""
    for kind in (*table.__mro__, EXPLAINED_BY.get(table, object)):
        thing = _source(kind)
        if thing is None:
            continue
        member = thing.members.get(name)
        if member is not None and member.docstring:
            return to_markdown(member.docstring.value, thing)[0]
        described = _described(thing).get(name)
        if described:
            return to_markdown(LISTED.sub(r"\1: ", described), thing)[0]
    return ""


def _described(thing: griffe.Object) -> dict[str, str]:
    """Return the texts in a class's docstring by the name of the attribute or parameter."""
    kinds = (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters)
    parsed = thing.docstring.parse("numpy", warnings=False) if thing.docstring else ()
    return {entry.name: entry.description for part in parsed if part.kind in kinds for entry in part.value}


def _summary(thing: griffe.Object | None) -> str:
    if thing is None or not thing.docstring:
        return ""
    first = thing.docstring.parse("numpy", warnings=False)[0]
    text = HEADING.sub("", str(first.value))
    return to_markdown(text[:1].upper() + text[1:], thing)[0]


def _source(kind: type) -> griffe.Object | None:
    path = f"{kind.__module__}.{kind.__qualname__}"
    if not path.startswith("halograd."):
        return None
    return package()[path.removeprefix("halograd.")]


def _markdown(tables: list[ConfigSection]) -> str:
    lines: list[str] = []
    for section in tables:
        lines += [f"### {section.heading} {{#{section.anchor or 'top'}}}", "", section.text, ""]
        if section.keys:
            lines += ["| key | type | default | |", "|---|---|---|---|"]
        for key in section.keys:
            anchor = f"{section.anchor}.{key.name}".lstrip(".")
            text = " ".join(key.text.split())
            lines.append(row(f"`{key.name}`{{ #{anchor} }}", key.kind, key.default, text))
        lines.append("")
    return "\n".join(lines)
