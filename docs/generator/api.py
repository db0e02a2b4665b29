"""Reference of the Python names: a page per folder, and an entry per public name where it is defined.

Public names are those in the ``__all__`` of a package, or, for a package without one, of its modules. A name that
several packages export has one entry, in the folder that defines it; the pages of other folders link to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import griffe

from .docstrings import row, to_markdown

__all__ = ["FOLDERS", "names", "page", "public"]

ROOT = Path(__file__).resolve().parent.parent.parent
#: Folders with their own page. `cli`, `demo` and `report` are commands: see commands.md.
FOLDERS = (
    *("comm", "data", "device", "dtensor", "interchange", "jobs", "kernels", "layers", "lowering", "models"),
    *("perfmodel", "program", "training"),
)
#: Modules outside of these folders that scripts import.
TOP = ("halograd.onnx", "halograd.testing", "halograd.auto")
#: Position after the end of a sentence, excluding dots in code and abbreviations.
SENTENCE = re.compile(r"(?<!et al)(?<!Eq)(?<!i\.e)\.\s(?=[A-Z`\"](?:[^`]|`[^`]*`)*$)")


@lru_cache(maxsize=1)
def package() -> griffe.Module:
    """Return the whole library as parsed by griffe, without importing it."""
    loaded = griffe.load("halograd", search_paths=[str(ROOT)], docstring_parser="numpy", resolve_aliases=True)
    assert isinstance(loaded, griffe.Module)
    return loaded


def public(module: griffe.Module) -> dict[str, list[str]]:
    """Return the public names by the dotted path of the package or module that exports them; `module` comes first."""
    exports = {module.path: exported(module)} if exported(module) else {}
    for below in sorted(_modules(module), key=lambda m: m.path):
        if below.is_init_module:
            exports |= public(below)
        elif module.is_init_module and not exported(module) and exported(below):
            exports[below.path] = exported(below)
    return exports


def exported(module: griffe.Module) -> list[str]:
    """Return the names in ``__all__`` of a module."""
    return [str(name) for name in module.exports or ()]


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    return (m for m in module.members.values() if isinstance(m, griffe.Module))


def home(module: str, name: str) -> str:
    """Return the dotted path at which a public name is defined."""
    member = package()[module.removeprefix("halograd").lstrip(".")][name] if module != "halograd" else package()[name]
    return member.final_target.path if member.is_alias else member.path


def page(folder: str) -> str:
    """Return the Markdown of the page of a folder."""
    module = package()[folder]
    lines = [f"# halograd.{folder}", "", *_about(module), *_files(module)]
    seen: set[str] = set()
    for offering, offered in public(module).items():
        lines += ["", f"## `{offering}` {{#{offering}}}" if offering != module.path else "## Names", ""]
        lines += [] if offering == module.path else _about(package()[offering.removeprefix("halograd.")])
        lines += _entries(offering, offered, f"halograd.{folder}.", seen)
    return "\n".join(lines) + "\n"


def names() -> str:
    """Return the Markdown of all names of ``import halograd as hg``, with the entries that are on no other page."""
    offered = sorted(exported(package()))
    lines = ["| `hg.` | |", "|---|---|"]
    lines += [row(f"[`{name}`][{home('halograd', name)}]", summary(home("halograd", name))) for name in offered]
    elsewhere = {
        home(module, name)
        for folder in FOLDERS
        for module, names in public(package()[folder]).items()
        for name in names
    }
    own = [name for name in offered if home("halograd", name) not in elsewhere]
    lines += ["", "## Offered here only", ""]
    for name in own:
        lines += [f"::: halograd.{name}", ""]
    for module in TOP:
        there = package()[module.removeprefix("halograd.")]
        lines += [f"## `{module}` {{#{module}}}", "", *_about(there)]
        lines += _entries(module, exported(there), f"{module}.", set())
    return "\n".join(lines)


def summary(path: str) -> str:
    """Return the first sentence of an object's docstring, formatted for a table cell."""
    thing = package()[path.removeprefix("halograd.")]
    text = thing.docstring.value.split("\n\n")[0] if thing.docstring else ""
    sentence = SENTENCE.split(" ".join(text.split()), maxsplit=1)[0]
    return to_markdown(sentence.rstrip(".:"), thing)[0]


def _entries(offering: str, offered: list[str], inside: str, seen: set[str]) -> list[str]:
    """Return entries of the names that the folder defines, and links to names that it only re-exports."""
    entries, passed_on = [], []
    for name in offered:
        path = home(offering, name)
        if path.startswith(inside) and path not in seen:
            entries += [f"::: {offering}.{name}", ""]
            seen.add(path)
        else:
            passed_on.append(f"[`{name}`][{path}]")
    links = [f"Defined elsewhere, and offered here too: {', '.join(passed_on)}.", ""] if passed_on else []
    return links + entries


def _about(module: griffe.Module) -> list[str]:
    return [to_markdown(module.docstring.value, module)[0], ""] if module.docstring else []


def _files(module: griffe.Module) -> list[str]:
    """Return a table of the modules of a folder, each with the first line of its docstring."""
    rows = []
    for below in sorted(_modules(module), key=lambda m: m.path):
        path = below.path.removeprefix("halograd.").replace(".", "/")
        rows.append(row(f"`{path}{'/' if below.is_init_module else '.py'}`", summary(below.path)))
    return ['??? abstract "Files"', "", *(f"    {line}" for line in ("| file | |", "|---|---|", *rows)), ""]
