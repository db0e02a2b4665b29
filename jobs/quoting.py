"""Quoting of values in scripts, and values of a sweep. Rendering quotes every value, or raises a one-line error.

``{{ value }}`` in a template is one word of the shell; only strings of the type `Raw` are not quoted. So no value is
left unquoted by mistake.
"""

from __future__ import annotations

import itertools
import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from halograd.documents import parse_option, parse_pair, to_toml
from halograd.errors import UserError

__all__ = ["Raw", "checked_line", "directive", "directives", "folder", "parse_sweep", "word", "words"]

_PLAIN_DIRECTIVE = re.compile(r"[\w@%+:,./=-]+", re.ASCII)
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)((?:/.*)?)", re.DOTALL)
#: sbatch truncates a line of options after this many bytes.
LONGEST_DIRECTIVE = 1000


class Raw(str):
    """Text that is rendered unchanged, because it is quoted already or constant."""


def checked_line(name: str, value: Any) -> str:
    """Return a value as a string of one line. Local.

    Raises
    ------
    UserError
        If the value has control characters (such as line feeds), line separators or unpaired surrogates, which a line
        of a script cannot contain; the message names the option `name`.
    """
    text = str(value)
    # Categories of Unicode: controls, surrogates, and separators of lines and of paragraphs.
    bad = next((c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if bad is not None:
        raise UserError(f"{name}: expected text on one line, got {bad!a} in {_short(text)}; leave that character out")
    return text


def word(value: Any) -> Raw:
    """Quote `value` as one word of the shell.

    >>> print(word("$(mine)"), word("4"))
    '$(mine)' 4
    """
    return value if isinstance(value, Raw) else Raw(shlex.quote(checked_line("script", value)))


def words(values: Iterable[Any]) -> Raw:
    """Quote several values as words of the shell."""
    return Raw(" ".join(word(value) for value in values))


def directive(value: Any) -> Raw:
    """Quote the value of an option in a line ``#SBATCH --option=VALUE``.

    sbatch itself parses these lines, without a shell: a blank ends an unquoted value, and ``#`` begins a comment. The
    character after a backslash is literal, even within quotes. Raises UserError for a value of more than
    `LONGEST_DIRECTIVE` bytes, which sbatch would truncate.

    >>> print(directive("4 #x"), directive("gpu"))
    "4 #x" gpu
    """
    text = checked_line("#SBATCH", value)
    if len(text.encode()) > LONGEST_DIRECTIVE:
        raise UserError(f"#SBATCH: expected at most {LONGEST_DIRECTIVE} bytes, got {_short(text)}; shorten it")
    if _PLAIN_DIRECTIVE.fullmatch(text):
        return Raw(text)
    # Backslashes first: those that escape the quotes must stay single.
    return Raw('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')


def directives(options: Iterable[tuple[str, Any]]) -> Raw:
    """Return lines ``#SBATCH --option=VALUE``, or ``#SBATCH --option`` if the value is None.

    >>> print(directives([("nodes", 2), ("requeue", None)]))
    #SBATCH --nodes=2
    #SBATCH --requeue
    """
    return Raw("\n".join(f"#SBATCH --{k}" + ("" if v is None else f"={directive(v)}") for k, v in options))


def folder(value: str) -> Raw:
    """Quote a folder on the machine of a job: a path, or ``$NAME/...`` with a variable of the job's environment.

    >>> print(folder("$TMPDIR/my data"), folder("/scratch/$(id)"))
    ${TMPDIR:?is not set on this node}'/my data' '/scratch/$(id)'
    """
    match = _VARIABLE.fullmatch(value)
    if match is None:
        return word(value)
    # Only the variable is expanded, and an unset one stops the job; the rest is quoted.
    rest = match[2].rstrip("/")
    return Raw(f"${{{match[1]}:?is not set on this node}}" + (word(rest) if rest else ""))


def _short(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


#: Largest number of tasks of an array: Slurm's default, MaxArraySize = 1001, permits indices up to 1000.
MOST = 1000


def parse_sweep(options: Sequence[str]) -> list[list[str]]:
    """Return the overrides (``KEY=VALUE``) of every combination of the values; the last key varies fastest.

    Values are separated by commas; values that contain commas are given as a TOML list. Without options the result is
    empty.

    >>> parse_sweep(["training.batch=2,4", "model.widths=[[8], [8, 16]]"])[1]
    ['training.batch=2', 'model.widths=[8, 16]']

    Raises
    ------
    UserError
        If a key or one of its values occurs twice, a key has no value or is ``output.directory``, or there are too many
        combinations.
    """
    axes: dict[str, list[str]] = {}
    for option in options:
        key, text = parse_pair("--sweep", checked_line("--sweep", option), "KEY=VALUE,VALUE,...")
        if key in axes:
            raise UserError(f"--sweep: expected every key once, got {key} twice")
        if key == "output.directory":
            raise UserError(
                "--sweep: expected another key than output.directory: each task has a folder of its own in it"
            )
        axes[key] = _sweep_values(key, text.strip())
    combinations = 1
    # Counted before the product is made, which could fill the memory.
    for values in axes.values():
        combinations *= len(values)
    if combinations > MOST:
        raise UserError(f"--sweep: expected at most {MOST} combinations, got {combinations}; leave values out")
    # A product of no sequences would have one combination, the empty one.
    return [[f"{k}={v}" for k, v in zip(axes, chosen)] for chosen in itertools.product(*axes.values())] if axes else []


def _sweep_values(key: str, text: str) -> list[str]:
    # A list in brackets has commas within its values, so it is parsed as TOML.
    if text.startswith("["):
        values = [to_toml(value) for value in parse_option("--sweep", key, text)]
    else:
        values = [value.strip() for value in text.split(",")]
    if not values or not all(values):
        raise UserError(f"--sweep {key}: expected values separated by commas, got {text!a}")
    if len(set(values)) != len(values):
        raise UserError(f"--sweep {key}: expected every value once, got {text!a}")
    return values
