"""Names in the text of a page become links to their entries: keys of a configuration, commands, Python names."""

from __future__ import annotations

import re
from functools import lru_cache

from halograd.training.config import Config

from . import api, commands, configuration

__all__ = ["linked"]

#: Code within a line that is not the text of a link already, nor in a heading.
WORD = re.compile(r"(?<![\[`])`([^`\n]+)`(?![\]`])")
PYTHON = re.compile(r"(?:hg|halograd)((?:\.\w+)+)(?:\(.*\))?")
KEY = re.compile(r"(\w+(?:\.\w+)+)(?: = .*)?")


def linked(text: str) -> str:
    """A stretch of a page, without code blocks, whose names are links."""
    lines = text.split("\n")
    return "\n".join(line if line.startswith("#") else WORD.sub(_link, line) for line in lines)


def _link(match: re.Match[str]) -> str:
    words = match[1]
    target = _command(words) or _key(words)
    if target:
        return f"[`{words}`]({target})"
    path = _python(words)
    return f"[`{words}`][{path}]" if path else match[0]


def _command(words: str) -> str:
    """``halograd plan mesh_2k`` leads to the entry of the command, the longest that fits."""
    fits = [name for name in _commands() if f"{words} ".startswith(f"{name} ")]
    return f"commands.md#{max(fits, key=len).replace(' ', '-')}" if fits else ""


def _key(words: str) -> str:
    """``output.timeline = true`` leads to the entry of the key."""
    match = KEY.fullmatch(words)
    return f"configuration.md#{match[1]}" if match and match[1] in _keys() else ""


def _python(words: str) -> str:
    """``hg.fit(...)`` and ``halograd.data.Dataset`` lead to where the name is defined."""
    match = PYTHON.fullmatch(words)
    return _names().get(f"halograd{match[1]}", "") if match else ""


@lru_cache(maxsize=1)
def _commands() -> tuple[str, ...]:
    return tuple(name for name, _ in commands.all_commands())


@lru_cache(maxsize=1)
def _keys() -> frozenset[str]:
    return frozenset(
        f"{section.anchor}.{key.name}" for section in configuration.sections(Config) for key in section.keys
    )


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    """Where public names are defined, by all the paths at which they are offered."""
    offered = {"halograd": api.exported(api.package())}
    for folder in api.FOLDERS:
        offered |= api.public(api.package()[folder])
    for module in api.TOP:
        offered[module] = api.exported(api.package()[module.removeprefix("halograd.")])
    return {f"{module}.{name}": api.home(module, name) for module, found in offered.items() for name in found}
