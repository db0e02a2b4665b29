"""Conversion of docstrings to Markdown: roles become links; pictures and prompts become code.

Docstrings in the sources are numpydoc with the roles of Sphinx (``:class:`Conv```). Griffe parses the sections, and
calls this extension after all modules are read; the extension converts the texts. A role with an unknown target causes
a warning, and so an error of `mkdocs build --strict`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import griffe

__all__ = ["Docstrings", "row", "to_markdown", "unresolved_roles"]

_log = griffe.get_logger("docs.generator.docstrings")

ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`(?:[^`<]*<)?([^`<>]+)>?`")
#: Code, which is not changed, between parts of text, which are.
CODE = re.compile(r"(``.+?``|`[^`]+`|<autoref .+?</autoref>)", re.S)


class Docstrings(griffe.Extension):
    """Extension of griffe that converts all docstrings of a loaded package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for thing in documented(pkg):
            assert thing.docstring is not None
            text, missing = to_markdown(thing.docstring.value, thing)
            thing.docstring.value = text
            for target in missing:
                _log.warning(f"{thing.path}: expected a name of the library in a role, got `{target}`")


def documented(thing: griffe.Object) -> Iterator[griffe.Object]:
    """Yield `thing` and all objects below it that have a docstring, each where it is defined."""
    if thing.docstring:
        yield thing
    for member in thing.members.values():
        if isinstance(member, griffe.Object):
            yield from documented(member)


def unresolved_roles(package: griffe.Module) -> list[str]:
    """Return ``PATH: TARGET`` for every role of a package with an unknown target."""
    return [
        f"{thing.path}: {target}"
        for thing in documented(package)
        if thing.docstring
        for target in to_markdown(thing.docstring.value, thing)[1]
    ]


def row(*cells: str) -> str:
    """Return a row of a Markdown table. Bars in code are not escaped, because they do not end a cell."""
    parts = (CODE.split(cell) for cell in cells)
    escaped = ("".join(part if k % 2 else part.replace("|", "\\|") for k, part in enumerate(cell)) for cell in parts)
    return f"| {' | '.join(escaped)} |"


def to_markdown(text: str, thing: griffe.Object) -> tuple[str, list[str]]:
    """Return a docstring as Markdown, and the targets of its roles that were not found."""
    missing: list[str] = []

    def link(match: re.Match[str]) -> str:
        written = match[1].strip()
        name = written.lstrip("~")
        target = target_of(name, thing)
        if target is None:
            missing.append(name)
            return f"`{name}`"
        shown = name.rpartition(".")[2] if written.startswith("~") else name
        # `optional`: what has no entry on the site is shown as code.
        return f'<autoref optional identifier="{target}"><code>{html.escape(shown.lstrip("."))}</code></autoref>'

    def prose(part: str) -> str:
        return _escaped(ROLE.sub(link, part))

    blocks = [code if code else prose(words) for words, code in _split(text)]
    return "\n".join(blocks), missing


def target_of(name: str, thing: griffe.Object) -> str | None:
    """Return the path of a role's target in the docstring of `thing`; None if it is unknown or ambiguous.

    The target is in the scope of `thing`, in its class, or the only object with this name.

    A name that starts with a dot is searched in the same module first, then in the whole library.
    """
    package = thing.package
    for path in _candidates(name, thing):
        if canonical := _canonical(package, path):
            return canonical
    ends = [path for path in _all_paths(package) if path.endswith("." + name.lstrip("."))]
    if len(ends) == 1:
        return ends[0]
    return None if name.split(".")[0] != "ctypes" else name


def _candidates(name: str, thing: griffe.Object) -> Iterator[str]:
    if name.startswith("."):
        yield thing.module.path.rpartition(".")[0] + name
        return
    scope: griffe.Object | None = thing
    while scope is not None:
        yield f"{scope.path}.{name}"
        scope = scope.parent if isinstance(scope.parent, griffe.Object) else None
    first, dot, rest = name.partition(".")
    with suppress(griffe.NameResolutionError):
        yield thing.resolve(first) + dot + rest
    yield name


def _canonical(package: griffe.Module, path: str) -> str | None:
    """Return the path of the definition of an object, inherited members included; None if there is no such object."""
    if path != package.path and not path.startswith(package.path + "."):
        return None
    at: Any = package
    try:
        for step in path.split(".")[1:]:
            at = at.all_members[step]
        return at.final_target.path if at.is_alias else at.path
    except (KeyError, griffe.AliasResolutionError):
        return None


@lru_cache(maxsize=1)
def _all_paths(package: griffe.Module) -> list[str]:
    paths: list[str] = []
    waiting: list[griffe.Object] = [package]
    while waiting:
        thing = waiting.pop()
        paths.append(thing.path)
        waiting += [member for member in thing.members.values() if isinstance(member, griffe.Object)]
    return paths


# -- text ------------------------------------------------------------------------------------------


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a docstring: ``(text, "")``, or ``("", code)`` with fenced literal blocks and prompts."""
    words: list[str] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.rstrip().endswith("::") and not line.lstrip().startswith(".."):
            end = _literal_end(lines, at)
            kept = line.rstrip()[:-1].rstrip() if line.strip() != "::" else ""
            words.append(kept[:-1].rstrip() if kept.endswith((". :", ".:")) else kept)
            yield "\n".join(words), ""
            yield "", _fenced(lines[at + 1 : end], "text")
            words, at = [], end
        elif line.lstrip().startswith(">>> ") and "Examples" not in text:
            end = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
            yield "\n".join(words), ""
            yield "", _fenced(lines[at:end], "pycon")
            words, at = [], end
        else:
            words.append(line)
            at += 1
    yield "\n".join(words), ""


def _literal_end(lines: list[str], start: int) -> int:
    """Return the number of the line after the block that is indented more than line `start`."""
    indent = _indent(lines[start])
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > indent):
        end += 1
    while end > start + 1 and not lines[end - 1].strip():
        end -= 1
    return end


def _fenced(lines: list[str], language: str) -> str:
    """Return lines as a code block at their own indentation, so that it stays in its list or section."""
    full = [line for line in lines if line.strip()]
    if not full:
        return ""
    indent = min(map(_indent, full))
    first, last = lines.index(full[0]), len(lines) - lines[::-1].index(full[-1])
    base = " " * (indent if language == "pycon" else max(0, indent - 4))
    inside = [base + line[indent:] if line.strip() else "" for line in lines[first:last]]
    return "\n".join(["", f"{base}```{language}", *inside, f"{base}```", ""])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _escaped(text: str) -> str:
    """Return the text with escapes of characters that have a meaning in HTML or Markdown, but not in a docstring."""
    parts = CODE.split(text)
    for i in range(0, len(parts), 2):
        plain = re.sub(r"<(?=[\w/!])", "&lt;", parts[i])
        parts[i] = re.sub(r"\[(?=[^\[\]]*\]\s?[\[(])", r"\\[", plain)  # "`n` [B] [s]" is not a link
    return "".join(parts)
