"""Values in scripts: every one is quoted where it is rendered, or refused in one line.

A template says ``{{ value }}`` and gets one word of the shell; what is no word says so itself by `Raw`. Forgetting
to quote is thus not possible; forgetting to allow is a test that fails.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable
from typing import Any

from halograd.errors import UserError

__all__ = ["Raw", "directive", "folder", "one_line", "toml", "word", "words"]

_PLAIN_DIRECTIVE = re.compile(r"[\w@%+:,./=-]+", re.ASCII)
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)((?:/.*)?)", re.DOTALL)
#: sbatch cuts a line of options off behind this many bytes.
LONGEST_DIRECTIVE = 1000


class Raw(str):
    """Text that is to be rendered as it is: quoted already, or of our own making."""


def one_line(name: str, value: Any) -> str:
    """The text of a value; refused if a line of a script cannot hold it. Local.

    Raises
    ------
    UserError
        Control characters (line feeds among them), and what is not text.
    """
    text = str(value)
    bad = next((c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if bad is not None:
        raise UserError(f"{name}: expected text on one line, got {bad!a} in {_short(text)}; leave that character out")
    return text


def word(value: Any) -> Raw:
    """One word of the shell, which stands for `value` and for nothing else.

    >>> print(word("$(mine)"), word("4"))
    '$(mine)' 4
    """
    return value if isinstance(value, Raw) else Raw(shlex.quote(one_line("script", value)))


def words(values: Iterable[Any]) -> Raw:
    """Several words."""
    return Raw(" ".join(word(value) for value in values))


def directive(value: Any) -> Raw:
    """The value of an option in a line ``#SBATCH --option=VALUE``.

    sbatch itself takes these lines apart, no shell does: blanks end a value and ``#`` begins a comment unless quoted,
    and a backslash takes the next character literally, in quotes too.

    >>> print(directive("4 #x"), directive("gpu"))
    "4 #x" gpu
    """
    text = one_line("#SBATCH", value)
    if len(text.encode()) > LONGEST_DIRECTIVE:
        raise UserError(f"#SBATCH: expected at most {LONGEST_DIRECTIVE} bytes, got {_short(text)}; shorten it")
    if _PLAIN_DIRECTIVE.fullmatch(text):
        return Raw(text)
    return Raw('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')


def folder(value: str) -> Raw:
    """A folder of the machine a job runs on: a path, or ``$NAME/...`` with a variable of the job's environment.

    >>> print(folder("$TMPDIR/my data"), folder("/scratch/$(id)"))
    ${TMPDIR:?is not set on this node}'/my data' '/scratch/$(id)'
    """
    match = _VARIABLE.fullmatch(value)
    if match is None:
        return word(value)
    rest = match[2].rstrip("/")
    return Raw(f"${{{match[1]}:?is not set on this node}}" + (word(rest) if rest else ""))


def toml(value: Any) -> str:
    """A value as in TOML, on one line.

    >>> toml({"widths": [8, 16], "name": "a", "decoder": True})
    '{"widths" = [8, 16], "name" = "a", "decoder" = true}'
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    return _text(str(value))


def _text(text: str) -> str:
    """A basic string of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) == "Cc" else c for c in escaped) + '"'


def _short(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")
