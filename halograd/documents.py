"""TOML and JSON files that users edit, read as plain data and validated; and text files written atomically.

All configurations, strategies, plans, machines, profiles and values of the command line are read here. Input that
parsers accept but no reader expects (duplicate keys, NaN, numbers of a thousand digits, very deep tables, dates, lone
surrogates) raises an error. :mod:`halograd.schema` then builds objects from the data.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import UserError

__all__ = [
    "bytes_text",
    "check_output",
    "dotted",
    "is_one_line",
    "one_line",
    "os_reason",
    "parse_json",
    "parse_option",
    "parse_pair",
    "parse_toml",
    "read_json",
    "read_toml",
    "replacing",
    "score_text",
    "shown",
    "shown_path",
    "to_toml",
    "write_whole",
    "writing",
]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


#: Largest permitted file, by kind [B]. The plan of a network of 500 layers has 1 MB, a machine 4 kB.
LARGEST = {"TOML": 256 << 10, "JSON": 16 << 20}
#: Longest permitted line of TOML: the parser's time grows with the square of the length of a dotted key or number.
LONGEST = 4096
#: Largest nesting depth of tables and lists.
DEEPEST = 32
#: Whole numbers have at most this many bits, with the sign.
BITS = 64


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Read the tables of a TOML file. Local.

    Parameters
    ----------
    what
        The file's purpose, such as "configuration", for the message.

    Raises
    ------
    UserError
        The file cannot be read, is too large, is not UTF-8 or TOML, or contains data that `parse_toml` refuses. The
        message has one line.
    """
    return parse_toml(_read(path, what, "TOML"), f"{what} {shown_path(path)}")


def read_json(path: str | Path, what: str) -> Any:
    """Read the data of a JSON file. Local; parameters and errors are those of :func:`read_toml`."""
    return parse_json(_read(path, what, "JSON"), f"{what} {shown_path(path)}")


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse the tables of a TOML text.

    Raises
    ------
    UserError
        The text is not TOML, has too long lines or numbers or too deep nesting, or has infinity, NaN or dates. The
        message starts with `source` and has one line.
    """
    _check_size(len(text), source, "TOML")
    longest = max(map(len, text.splitlines()), default=0)
    if longest > LONGEST:
        raise UserError(f"{source}: expected lines of at most {LONGEST} characters, got one of {longest}")
    return _parsed(tomllib.loads, text, source, "TOML")


def parse_json(text: str, source: str) -> Any:
    """Parse the data of a JSON text. Raises the errors of :func:`parse_toml` (not for long lines), also for duplicate
    keys.
    """
    _check_size(len(text), source, "JSON")
    return _parsed(_loads_json, text, source, "JSON")


def parse_option(option: str, key: str, text: str) -> Any:
    """Parse the value of ``KEY=VALUE`` on the command line as TOML; a bare word or path is a string.

    A shell removes the quotes of a string, so any value that does not start like a quoted string, a list or a table
    may be a string.

    >>> parse_option("--set", "model.widths", "[8, 16]"), parse_option("--set", "data.path", "a/b.h5")
    ([8, 16], 'a/b.h5')

    Raises
    ------
    UserError
        ``OPTION KEY: ...`` in one line.
    """
    source = f"{option} {shown_path(key)}"
    try:
        # A string with a line feed could set further keys, which the check of the keys below finds.
        table = tomllib.loads(f"value = {text}") if len(text) < LONGEST else {}
    except (ValueError, RecursionError) as error:
        bare = isinstance(error, tomllib.TOMLDecodeError) and text and text[0] not in "\"'[{" and "\n" not in text
        table = {"value": text} if bare else {}
    if set(table) != {"value"}:
        several = "one TOML value" if len(table) > 1 else "a TOML value"
        raise UserError(f"{source}: expected {several}, got {shown(text)}")
    _check_plain(table["value"], source)
    return table["value"]


def parse_pair(option: str, text: str, expected: str) -> tuple[str, str]:
    """Return key and value of ``KEY=VALUE`` on the command line; blanks around the key are removed.

    Raises
    ------
    UserError
        ``OPTION: expected ..., got ...`` in one line.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{option}: expected {expected}, got {text!a}")
    return key.strip(), value


def to_toml(value: Any) -> str:
    """Return a value as TOML, on one line.

    >>> to_toml({"widths": [8, 16], "name": "a", "decoder": True})
    '{"widths" = [8, 16], "name" = "a", "decoder" = true}'
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_toml(str(key))} = {to_toml(item)}" for key, item in value.items()) + "}"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    # TOML permits control characters in strings only as escapes.
    return '"' + "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) == "Cc" else c for c in escaped) + '"'


def bytes_text(nbytes: float) -> str:
    """Return a size with a suitable unit.

    >>> bytes_text(1.5 * 2**30), bytes_text(640)
    ('1.5 GiB', '640 B')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} B"


def dotted(path: Iterable[str | int], before: str = "") -> str:
    """Return the path of an entry as a string: ``layers.conv1.height``, ``milestones[2]``; unusual keys are quoted.

    `before` is the beginning of the string, such as the path of the table that has the entry.
    """
    text = before
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            plain = len(step) <= 60 and re.fullmatch(r"[\w+>,=:/ -]+", step)
            text += ("." if text else "") + (step if plain else shown(step))
    return text


def shown(value: object) -> str:
    """Return a value for a message, as one short line.

    >>> shown(True), shown("a\\nb")
    ('true', "'a\\\\nb'")
    """
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown_path(path: str | Path) -> str:
    """Return a path for a message: unchanged if it is printable, else with escapes."""
    text = str(path)
    return text if text and text.isprintable() else repr(text)


def one_line(value: object) -> str:
    """Return a string, or the message of an error (its class if it has no message), without line breaks.

    >>> one_line(OSError()), one_line("a\\n b")
    ('OSError', 'a b')
    """
    return " ".join(str(value).split()) or (type(value).__name__ if isinstance(value, BaseException) else "")


def is_one_line(text: str) -> bool:
    """Return whether a string has neither control characters nor line separators nor lone surrogates."""
    return not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


def _read(path: str | Path, what: str, kind: str) -> str:
    """Return the text of a file. Reads one byte more than permitted, to detect a file that is too large."""
    source = f"{what} {shown_path(path)}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST[kind] + 1)
        _check_size(len(data), source, kind)
        # Some editors write a byte order mark first, which TOML and JSON do not permit.
        return data.decode("utf-8-sig")
    except OSError as error:
        reason = f"got an error ({error.strerror})"
    except UnicodeDecodeError as error:
        reason = f"got one that is not UTF-8 text (byte {error.start})"
    # A UserError is a ValueError too, and would get the message below.
    except UserError:
        raise
    except ValueError:
        reason = "got a path with a NUL character"
    raise UserError(f"{source}: expected a {kind} file to read, {reason}; check the path") from None


def _check_size(size: int, source: str, kind: str) -> None:
    if size > LARGEST[kind]:
        raise UserError(f"{source}: expected at most {LARGEST[kind] >> 10} KiB of {kind}, got more; check the path")


def _parsed(loads: Any, text: str, source: str, kind: str) -> Any:
    try:
        data = loads(text)
    except RecursionError:
        # The parser's own recursion failed, before `_check_plain` could count the levels.
        reason = f"tables or lists within one another more than {DEEPEST} deep"
    except ValueError as error:
        reason = f"an error: {' '.join(str(error).split())[:200]}"
    else:
        _check_plain(data, source)
        return data
    raise UserError(f"{source}: expected valid {kind}, got {reason}")


def _loads_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse_constant, parse_int=_whole)


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"expected every key once, got {shown(twin)} twice")
    return table


def _whole(text: str) -> int:
    if len(text) > BITS:  # converting millions of digits would take hours
        raise ValueError(f"expected whole numbers of at most {BITS} bits, got one of {len(text)} digits")
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, got {name}")


def _check_plain(data: Any, source: str) -> None:
    """Raise UserError for values that parsers accept but no reader expects. `data` may be too deep for recursion."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), data)]
    _check_value(source, (), data)
    while waiting:
        path, table = waiting.pop()
        if len(path) >= DEEPEST:
            raise UserError(
                f"{source}: expected tables and lists at most {DEEPEST} deep, got more in {dotted(path[:1])}"
            )
        entries: Any = table.items() if isinstance(table, dict) else enumerate(table if isinstance(table, list) else ())
        for step, value in entries:
            _check_value(source, (*path, step), value)
            if isinstance(value, dict | list):
                waiting.append(((*path, step), value))


def _check_value(source: str, path: Sequence[str | int], value: Any) -> None:
    fault = _fault(value) or (_fault(path[-1]) if path else "")
    if fault:
        raise UserError(": ".join(filter(None, (source, dotted(path), f"expected {fault}"))))


def _fault(value: Any) -> str:
    """Return a string "EXPECTED, got VALUE" for a value that no reader expects; empty for a valid value."""
    if isinstance(value, float):
        return "" if abs(value) < float("inf") else f"a finite number, got {value}"
    if isinstance(value, int):
        # One bit is the sign.
        return "" if value.bit_length() < BITS else f"a whole number of at most {BITS} bits, got one of more"
    if isinstance(value, str):
        return "text of Unicode characters, got half a surrogate pair" if re.search("[\ud800-\udfff]", value) else ""
    plain = value is None or isinstance(value, dict | list)
    return "" if plain else f"a text, a number, true or false, a list or a table, got the date or time {value}"


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8. It appears under its name, or replaces an existing file, when it is complete. Local.

    A pipe or device (such as ``/dev/stdout``) is written directly.

    Raises
    ------
    OSError
        The file cannot be written; an existing file stays unchanged, and no partial file is left.
    """
    # If the path is a link, the rename replaces its target and not the link.
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        final.write_text(text, encoding="utf-8")
        return
    with replacing(final) as partial:
        partial.write_text(text, encoding="utf-8")


def check_output(path: str | Path, what: str, ending: str = "") -> None:
    """Check that `write_whole` can write a file, before its contents are computed. Local; leaves no file.

    Parameters
    ----------
    what
        Start of the message, such as an option.
    ending
        Required ending of the file's name, if any.

    Raises
    ------
    UserError
        The file cannot be written, or has another ending.
    """
    if ending and Path(path).suffix.lower() != ending:
        raise UserError(f"{what} {shown_path(path)}: expected a name that ends with {ending}, got another; change it")
    final = Path(os.path.realpath(path))
    try:
        if final.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if final.exists() and not final.is_file():  # a pipe or a device
            return
        probe = final.with_name(f".{final.name}.{os.getpid()}.partial")
        # Permissions alone do not show it: a file system that is mounted read-only refuses root too.
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{what} {shown_path(path)}: expected a path that can be written, got an error ({reason}); choose another"
        ) from error


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield a temporary path next to `final`; rename it to `final` when the block ends without an error. Local.

    All atomic writes use this. It needs creation, renaming and removal of files, but no links. If the block creates a
    folder, it replaces a file or a folder at `final`, which has another name for a moment.

    Raises
    ------
    OSError
        The file cannot be written; the error has its path. An existing file stays unchanged, and the partial file is
        removed.
    """
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        yield partial
        if partial.is_dir():
            _replace_by_folder(partial, final)
        else:
            _synchronize(partial, os.O_RDWR)
            os.replace(partial, final)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(final)  # errors of a descriptor have no name
        raise
    finally:
        with contextlib.suppress(OSError):  # report the error that ended the block
            _remove(partial)


def _synchronize(path: Path, flags: int) -> None:
    """Wait until a file is on the disk.

    Without this, a rename may reach the disk before the data, and some file systems report a full disk only here.
    """
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_by_folder(partial: Path, final: Path) -> None:
    """Rename a folder; a file or folder at `final` is moved aside first, because no rename replaces it."""
    for path in (*partial.rglob("*"), partial):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            _synchronize(path, os.O_RDONLY)
    if not os.path.lexists(final):
        os.rename(partial, final)
        return
    old = partial.with_suffix(".old")
    os.rename(final, old)
    try:
        os.rename(partial, final)
    except OSError:
        os.rename(old, final)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


#: Remedies of file system errors, by their number.
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit of this process (ulimit -f), or choose another file system",
    errno.EACCES: "change the permissions, or choose another path",
    errno.EPERM: "change the permissions, or choose another path",
    errno.EROFS: "mount it to write, or choose another path",
    errno.EIO: "the disk or its connection fails: see the log of the system, or choose another file system",
    errno.ESTALE: "the file server lost the file: mount the file system again, and start again",
    errno.EXDEV: "this file system cannot rename a file in its folder: choose another",
    errno.EBUSY: "another process uses it: end that one, or choose another path",
    errno.ETXTBSY: "another process uses it: end that one, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "remove the links that point to each other",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files of this machine",
    errno.ENODEV: "mount the file system again",
    errno.ENOTCONN: "mount the file system again",
}


def os_reason(error: OSError) -> str | None:
    """Return reason and remedy of a file system error; None if no remedy is known, as for errors of the program. Local.

    >>> os_reason(OSError(errno.EIO, "Input/output error"))[:25]
    'input/output error; the d'
    """
    if error.errno not in _REMEDIES:
        return None
    return f"{(error.strerror or os.strerror(error.errno)).lower()}; {_REMEDIES[error.errno]}"


@contextlib.contextmanager
def writing(what: str, remedy: str = "", kind: type[UserError] = UserError) -> Iterator[None]:
    """Convert an OSError within the context to an error of class `kind`. Local.

    Parameters
    ----------
    what
        Start of the message, such as an option and its path.
    remedy
        Remedy for every error; by default that of the error's number.
    """
    try:
        yield
    except OSError as error:
        name = error.filename  # a number for an error of a descriptor
        # A .partial file is ours; a path that `what` has already is not repeated.
        named = isinstance(name, str | os.PathLike) and Path(name).suffix != ".partial" and os.fspath(name) not in what
        reason = f"{error.strerror or one_line(error)}{f' at {shown_path(name)}' if named else ''}"
        remedy = remedy or _REMEDIES.get(error.errno or 0, "choose another")
        raise kind(f"{what}: expected a path that can be written, got an error ({reason}); {remedy}") from error


def score_text(value: float, digits: int = 4) -> str:
    """Return a score with `digits` decimals, or, if these are few digits of a small number, with four digits.

    >>> score_text(0.98765), score_text(0.004404368), score_text(1.5e-05), score_text(0.0)
    ('0.9877', '0.004404', '1.5e-05', '0.0000')
    """
    return f"{value:.4g}" if 0 < abs(value) < 10.0 ** (3 - digits) else f"{value:.{digits}f}"
