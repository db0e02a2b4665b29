"""Functions and classes of the user, in a file (``net.py:build``) or in a module (``package.module:build``)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .documents import shown
from .errors import UserError

__all__ = ["SCRIPT", "check_files", "checksums", "describe", "is_location", "load"]


#: Replaces the file name in the location of an object that a script has made.
SCRIPT = "script"


def is_location(name: str) -> bool:
    """Return whether a name is the location of an object of the user. Local.

    >>> is_location("net.py:build"), is_location("resnet50")
    (True, False)
    """
    return ":" in name


def checksums(tables: Any) -> dict[str, int | None]:
    """Return the checksum of each Python file named in plain data (``FILE.py:NAME``); None if unreadable. Local."""
    files = {match[1] for text in _texts(tables) if (match := re.match(r"(.+?\.py):", text))}
    return {file: _checksum(Path(file)) for file in sorted(files)}


def check_files(tables: Any, files: Mapping[str, int | None]) -> None:
    """Raise UserError unless the Python files in plain data have the checksums `files` of another rank. Local."""
    for file, checksum in checksums(tables).items():
        if checksum != files[file]:
            raise UserError(
                f"{file}: expected the same file on all ranks, got {'none' if checksum is None else 'another one'} in "
                f"{os.getcwd()}; put it on a file system that all nodes share, and start all ranks in one folder"
            )


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _checksum(file: Path) -> int | None:
    try:
        return zlib.crc32(file.read_bytes())
    except OSError:
        return None


def load(where: str, key: str, kind: str = "function") -> Any:
    """Return the function or class at ``FILE.py:NAME`` or ``MODULE:NAME``. Local.

    A file may import others from its folder. Repeated calls execute it once, unless it has changed.

    Parameters
    ----------
    where
        Location.
    key
        Entry of the configuration that names it, for messages.
    kind
        Expected kind, for messages: ``"function"`` or ``"class"``.

    Raises
    ------
    UserError
        If there is no such file, module or callable object, or if its import raises an error.
    """
    location, _, name = where.rpartition(":")
    if not location or not name.isidentifier():
        registered = kind.upper()
        raise UserError(f'{key}: expected "FILE.py:{registered}" or "MODULE:{registered}", got {shown(where)}')
    module = _module_of_file(Path(location), key) if location.endswith(".py") else _module(location, key)
    member = getattr(module, name, None)
    if not callable(member) or isinstance(member, type) != (kind == "class"):
        # Only what the file itself defines, not the names that it imports.
        own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and callable(v)]
        there = [k for k in own if not k.startswith("_") and isinstance(getattr(module, k), type) == (kind == "class")]
        raise UserError(
            f"{key}: expected a {kind} {name!r} in {location}, got {', '.join(there) or 'none'}; name one of these"
        )
    return member


def _module(name: str, key: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # `python -m` adds it; the installed command does not
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{key}: {shown(name)} cannot be imported: {describe(error)}") from error


def _module_of_file(path: Path, key: str) -> ModuleType:
    try:
        real = path.resolve(strict=True)
        source = real.read_bytes()
    except OSError as error:
        raise UserError(
            f"{key}: expected a Python file, got {shown(str(path))} ({(error.strerror or '').lower()}); a path is "
            f"relative to the working folder, {os.getcwd()}"
        ) from error
    # The module name identifies a file and its contents, so an edited file is a new module.
    mark = zlib.crc32(source, zlib.crc32(bytes(real)))
    name = f"halograd_own_{real.stem}_{mark:08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, real)
    assert spec is not None
    # Registered before it runs, as by Python's import: dataclasses look up their module by its name.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(real.parent) not in sys.path:
        # At the end, so that a file of the user does not hide a module of a library.
        sys.path.append(str(real.parent))
    try:
        # Not `exec_module`: Python takes the bytecode in __pycache__ if size and second of the last change agree, so a
        # file that a script writes twice within a second would run as it was before.
        exec(compile(source, str(real), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        # Else the next call would return the module that ran only in part.
        del sys.modules[name]
        raise UserError(f"{key}: {path} cannot be imported: {describe(error)}") from error
    return module


#: Folders and files of the library. In a clone, files of the user may be next to them.
_LIBRARY = [path.resolve() for path in Path(__file__).parent.iterdir()]


def describe(error: Exception) -> str:
    """Return an error as one line, with the line of the user's code that raised it. Local."""
    what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not any(map(Path(frame.filename).resolve().is_relative_to, _LIBRARY))
    ]
    return what if not own else f"{what} ({own[-1].filename}, line {own[-1].lineno})"
