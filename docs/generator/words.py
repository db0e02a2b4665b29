"""Links from names in the text of a page to their entries: configuration keys, commands, Python names."""

from __future__ import annotations

import re
from functools import lru_cache

from halograd.training.config import Config

from . import api, commands, configuration

__all__ = ["linked"]

#: Inline code that is not yet the text of a link, and not in a heading.
WORD = re.compile(r"(?<![\[`])`([^`\n]+)`(?![\]`])")
PYTHON = re.compile(r"(?:hg|halograd)((?:\.\w+)+)(?:\(.*\))?")
KEY = re.compile(r"(\w+(?:\.\w+)+)(?: = .*)?")


def linked(text: str) -> str:
    """Return a part of a page, which has no code blocks, with links from its names."""
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
    """Return the link target of a command such as ``halograd plan mesh_2k``: the longest matching name, or empty."""
    fits = [name for name in _commands() if f"{words} ".startswith(f"{name} ")]
    return f"commands.md#{max(fits, key=len).replace(' ', '-')}" if fits else ""


def _key(words: str) -> str:
    """Return the link target of a key such as ``output.timeline = true``; empty if there is no such key."""
    match = KEY.fullmatch(words)
    return f"configuration.md#{match[1]}" if match and match[1] in _keys() else ""


def _python(words: str) -> str:
    """Return the link target of a Python name such as ``hg.fit(...)``; empty if there is no such name."""
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
    """Return the path of the definition of each public name, by all paths that export the name."""
    offered = {"halograd": api.exported(api.package())}
    for folder in api.FOLDERS:
        offered |= api.public(api.package()[folder])
    for module in api.TOP:
        offered[module] = api.exported(api.package()[module.removeprefix("halograd.")])
    return {f"{module}.{name}": api.home(module, name) for module, names in offered.items() for name in names}
