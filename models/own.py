"""Networks of the user: a function in a file (``net.py:build``) or in a module (``package.module:build``)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic.errors import PydanticUserError

from halograd import schema
from halograd.documents import shown
from halograd.errors import UserError

from ..layers import Network

__all__ = ["build_own", "call_own", "give", "is_made", "is_own", "load_function", "options_of_own", "source_of"]

#: Stands in place of a file for objects that a script has made.
_SCRIPT = "script"
_MADE: dict[str, Any] = {}


def is_own(name: str) -> bool:
    """Return whether a model's name is the place of a function.

    >>> is_own("net.py:build"), is_own("resnet50")
    (True, False)
    """
    return ":" in name


def give(made: Any, name: str) -> str:
    """Register an object that a script has made, and return the text that stands for it. Local; every rank calls it."""
    where = f"{_SCRIPT}:{name}"
    _MADE[where] = made
    return where


def is_made(where: str) -> bool:
    """Return whether this text stands for an object that a script has made (:func:`give`)."""
    return where in _MADE


def build_own(where: str, given: Mapping[str, Any]) -> Network:
    """Return the network that a function of the user makes of these options. Local; every rank calls it.

    Raises
    ------
    UserError
        If there is no such function, if it has no option of a given name or type, if it raises an error, or if it
        returns something else than a network.
    """
    if where in _MADE:
        return _MADE[where]
    function = load_function(where)
    options = _checked(function, given)
    try:
        made = function(**options)
    except Exception as error:
        raise UserError(f"model: {where} made no network: {_said(error)}") from error
    if not isinstance(made, Network):
        raise UserError(
            f"model: {where}: expected a function that returns a halograd.Network, got {type(made).__name__}"
        )
    return made


def options_of_own(where: str) -> tuple[str, ...]:
    """Return the names of the options that a function of the user takes; those of a network of a script are none."""
    return () if is_made(where) else tuple(inspect.signature(load_function(where)).parameters)


def call_own(where: str, key: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of the user and return its result. Local.

    `where` is the place of the function, `key` the entry of the configuration that gave it.

    Raises
    ------
    UserError
        If there is no such function, or it raises an error.
    """
    if where in _MADE:
        return _MADE[where]
    function = load_function(where, key)
    try:
        return function(*arguments, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}: {where} failed: {_said(error)}") from error


def load_function(where: str, key: str = "model.file") -> Callable[..., Any]:
    """Return the function at ``FILE.py:NAME`` or ``MODULE:NAME``. Local.

    A file may import others from its folder. Repeated calls execute it once, unless it has changed.

    Raises
    ------
    UserError
        If there is no such file, module or function, or it raises an error while it is imported.
    """
    place, _, name = where.rpartition(":")
    if place == _SCRIPT:
        raise UserError(
            f"{key}: {name!r} was made by a script, not by a function in a file; use it there (halograd.fit), or give "
            f'such a function by --set {key}="FILE.py:FUNCTION"'
        )
    if not place or not name.isidentifier():
        raise UserError(f'{key}: expected "FILE.py:FUNCTION" or "MODULE:FUNCTION", got {shown(where)}')
    module = _module_of_file(Path(place), key) if place.endswith(".py") else _module(place, key)
    found = getattr(module, name, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise UserError(
            f"{key}: expected a function {name!r} in {place}, got {', '.join(there) or 'none'}; name one of these"
        )
    return found


def source_of(where: str) -> tuple[str, str]:
    """Return the place of a function and a checksum of its file: a run records both as its model. Local."""
    script = where.startswith(f"{_SCRIPT}:")
    file = getattr(sys.modules["__main__"], "__file__", None) if script else inspect.getsourcefile(load_function(where))
    text = Path(file).read_bytes() if file is not None else b""
    return where, f"{zlib.crc32(text):08x}"


def _module(name: str, key: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # `python -m` adds it; the installed command does not
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{key}: {shown(name)} cannot be imported: {_said(error)}") from error


def _module_of_file(path: Path, key: str) -> ModuleType:
    try:
        real = path.resolve(strict=True)
        state = real.stat()
    except OSError as error:
        raise UserError(
            f"{key}: expected a Python file, got {shown(str(path))} ({(error.strerror or '').lower()}); a path is "
            f"relative to the working folder, {os.getcwd()}"
        ) from error
    # The name is unique for a file in one state.
    mark = zlib.crc32(f"{real} {state.st_mtime_ns} {state.st_size}".encode())
    name = f"halograd_own_{real.stem}_{mark:08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, real)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(real.parent) not in sys.path:
        sys.path.append(str(real.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{key}: {path} cannot be imported: {_said(error)}") from error
    return module


#: Folders and files of the library. Files of the user may lie beside them, in a clone.
_LIBRARY = [path.resolve() for path in Path(schema.__file__).parent.iterdir()]


def _said(error: Exception) -> str:
    """Return an error as one line, with the place in the user's code where it was raised."""
    what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(_is_inside(frame.filename, folder) for folder in _LIBRARY) and "importlib" not in frame.filename
    ]
    return what if not own else f"{what} ({own[-1].filename}, line {own[-1].lineno})"


def _is_inside(name: str, folder: Path) -> bool:
    return Path(name).resolve().is_relative_to(folder)


def _checked(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check options by the annotations of a function; an option without annotation may be anything."""
    taken = inspect.signature(function).parameters.values()
    named = {parameter.name for parameter in taken if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    free = {k: v for k, v in given.items() if k not in named} if len(named) < len(taken) else {}
    wanted = {k: v for k, v in given.items() if k not in free}
    try:
        table = schema.table_of(function)
    except (NameError, TypeError, PydanticUserError):  # annotations for static tools only
        return {**given}
    checked = schema.build(table, wanted, at="model")
    return {**{option: getattr(checked, option) for option in wanted}, **free}
