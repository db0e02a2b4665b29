"""Networks of the user, from a function in a file (``net.py:build``) or in a module (``package.module:build``)."""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic.errors import PydanticUserError

from halograd import schema
from halograd.errors import UserError
from halograd.user_code import SCRIPT, describe, load

from ..layers import Network
from .foreign import FOREIGN, build_foreign

__all__ = ["build_own", "call_own", "give", "is_made", "load_function", "options_of_own", "source_of"]

#: Objects that a script has registered, by location.
_MADE: dict[str, Any] = {}


def give(network: Any, name: str) -> str:
    """Register an object that a script has created, and return its location as a string. Local; every rank calls it."""
    where = f"{SCRIPT}:{name}"
    _MADE[where] = network
    return where


def is_made(where: str) -> bool:
    """Return whether a location is that of an object that a script has registered (:func:`give`)."""
    return where in _MADE


def foreign_kind(where: str) -> str:
    """Return ``torch`` or ``onnx`` for the source ``torch:FILE.py:FUNCTION`` or ``onnx:FILE``, else an empty string."""
    kind = where.partition(":")[0]
    return kind if kind in FOREIGN else ""


def build_own(where: str, settings: Mapping[str, Any]) -> Network:
    """Return the network that a function of the user builds from the options `settings`, or the registered or foreign
    network at this location. Local; every rank calls it.

    Raises
    ------
    UserError
        If there is no such function, an option is unknown or invalid, or the function raises an error or returns
        something else.
    """
    # Networks that exist already take no options.
    if where in _MADE:
        return _MADE[where]
    if foreign_kind(where):
        kind, _, location = where.partition(":")
        return build_foreign(kind, location, settings)
    function = load_function(where)
    options = _checked(function, settings)
    try:
        network = function(**options)
    except Exception as error:
        raise UserError(f"model: {where} failed: {describe(error)}") from error
    if not isinstance(network, Network):
        raise UserError(
            f"model: {where}: expected a function that returns a halograd.Network, got {type(network).__name__}"
        )
    return network


def options_of_own(where: str) -> tuple[str, ...]:
    """Return the names of the options of a user's function; empty for networks of scripts, torch or ONNX."""
    if is_made(where) or foreign_kind(where):
        return ()
    return tuple(inspect.signature(load_function(where)).parameters)


def call_own(where: str, key: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of the user and return its result; an object of a script is returned itself. Local.

    `where` is the location of the function, `key` the configuration key that names it.

    Raises
    ------
    UserError
        There is no such function, or it raises an error.
    """
    if where in _MADE:
        return _MADE[where]
    function = load_function(where, key)
    try:
        return function(*arguments, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}: {where} failed: {describe(error)}") from error


def load_function(where: str, key: str = "model.file") -> Callable[..., Any]:
    """Return the function at ``FILE.py:NAME`` or ``MODULE:NAME``. Local.

    Raises
    ------
    UserError
        See :func:`halograd.user_code.load`; also if the location is that of an object of a script.
    """
    location, _, name = where.rpartition(":")
    if location == SCRIPT:
        raise UserError(
            f"{key}: {name!r} was made by a script, not by a function in a file; use it there (halograd.fit), or give "
            f'such a function by --set {key}="FILE.py:FUNCTION"'
        )
    return load(where, key)


def source_of(where: str) -> tuple[str, str]:
    """Return location and checksum of the file of a function, which a run records as the source of its network. Local.

    For a network of torch or ONNX, the location is ``torch`` or ``onnx``, and torch has no checksum.
    """
    kind, _, location = where.partition(":")
    if foreign_kind(where):  # a kept file may be moved with its run
        return kind, f"{zlib.crc32(Path(location).read_bytes()):08x}" if kind == "onnx" else ""
    script = where.startswith(f"{SCRIPT}:")
    # An object of a script has the file of the script, if any: a notebook has none.
    file = getattr(sys.modules["__main__"], "__file__", None) if script else inspect.getsourcefile(load_function(where))
    text = Path(file).read_bytes() if file is not None else b""
    return where, f"{zlib.crc32(text):08x}"


def _checked(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, checked by the annotations of a function, as far as these exist and can be evaluated."""
    parameters = inspect.signature(function).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    # A function with **options takes further ones, which have no annotation to check.
    free = {k: v for k, v in options.items() if k not in named} if len(named) < len(parameters) else {}
    rest = {k: v for k, v in options.items() if k not in free}
    try:
        table = schema.table_of(function)
    except (NameError, TypeError, PydanticUserError):  # annotations for static tools only
        return {**options}
    checked = schema.build(table, rest, at="model")
    return {**{option: getattr(checked, option) for option in rest}, **free}
