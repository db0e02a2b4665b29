"""One line for what pydantic found wrong: the key's path, what was expected, what came."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["describe"]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "greater_than_equal": "a number >= {ge}",
    "greater_than": "a number > {gt}",
    "less_than": "a number < {lt}",
    "literal_error": "one of {expected}",
    "union_tag_invalid": "one of {expected_tags}",
}


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault, as ``path: expected ..., got ...``.

    Parameters
    ----------
    model
        The model that refused, to list the keys it knows.
    """
    fault = error.errors(include_url=False)[0]
    tables, path = _follow(model, fault["loc"])
    kind, got, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{path}: unknown key; expected one of {', '.join(_keys(tables))}"
    if kind == "missing":
        return f"{path}: expected a value, got nothing; this key is required"
    if kind == "value_error":
        return f"{path}.{context['error']}"
    if kind == "union_tag_not_found":
        return f"{path}.kind: expected a value, got nothing; this key is required"
    if kind == "union_tag_invalid":
        path, got = f"{path}.kind", context["tag"]
    expected = _EXPECTED.get(kind)
    text = expected.format(**{k: _number(v) for k, v in context.items()}) if expected else fault["msg"]
    return f"{path}: expected {text}, got {_shown(got)}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _follow(model: type[BaseModel], where: Sequence[int | str]) -> tuple[list[type[BaseModel]], str]:
    """The models of the table that `where` lies in, and the path without the names of alternatives."""
    tables: list[type[BaseModel]] = [model]
    path = ""
    for i, step in enumerate(where):
        if isinstance(step, int):
            path += f"[{step}]"
            continue
        tagged = [t for t in tables if len(tables) > 1 and step in _tags(t)]
        if tagged:
            tables = tagged
            continue
        path += f".{step}" if path else str(step)
        if i + 1 < len(where):
            inner = [m for t in tables if step in t.model_fields for m in _models(t.model_fields[step].annotation)]
            tables = inner or tables
    return tables, path


def _tags(model: type[BaseModel]) -> Sequence[str]:
    return typing.get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in typing.get_args(annotation) for m in _models(part)]


def _keys(tables: Sequence[type[BaseModel]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table.model_fields))
