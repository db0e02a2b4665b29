"""Hooks of MkDocs: generated pages, references at marks, and links to the sources."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # hooks are loaded by path

from docs.generator import api, commands, configuration, figures, words  # noqa: E402

#: ``<!-- generated: NAME -->`` in a page is replaced by the result of the function NAME, together with the line before
#: it for readers of a clone, or with their version of the text up to ``<!-- end -->`` (written by `__main__`).
REFERENCES = {
    "configuration": configuration.run_tables,
    "machine": configuration.machine_tables,
    "strategy": configuration.strategy_tables,
    "models": configuration.model_options,
    "commands": commands.reference,
    "names": api.names,
    "memory_by_ranks": figures.memory_by_ranks,
    "recomputation": figures.recomputation,
}
MARK = re.compile(
    r"^(?:\*Not in a clone[^\n]*\n\n)?<!-- generated: (\w+) -->$(?:(?:(?!<!-- gen).)*?^<!-- end -->$)?", re.M | re.S
)
#: A link from a page to a file outside of the site: ``[the trainer](../training/trainer.py)``.
SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
#: Files outside of `docs/` that are pages of the site.
ABOVE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files below `docs/`."""
    for source, page in ABOVE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=from_above(text)))
    for folder in api.FOLDERS:
        files.append(File.generated(config, f"api/{folder}.md", content=api.page(folder)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Insert the references into a page, link names to them, and convert links to sources for the site."""
    page_text = outside_code(markdown, lambda text: with_source_links(text, config.repo_url))
    if "/" not in page.file.src_uri:
        page_text = outside_code(page_text, words.linked)
    return MARK.sub(lambda match: REFERENCES[match[1]](), page_text)


def from_above(text: str) -> str:
    """Return a page of the top folder with its links adapted to `docs/`."""

    def moved(match: re.Match[str]) -> str:
        target = match[1]
        if target.startswith(("http:", "https:", "#")):
            return match[0]
        path, anchor, name = target.partition("#")
        if path in ABOVE:
            return f"]({ABOVE[path]}{anchor}{name})"
        inside = path.removeprefix("docs/")
        return f"]({inside if inside != path else '../' + path}{anchor}{name})"

    return outside_code(text, lambda part: re.sub(r"\]\(([^)\s]+)\)", moved, part))


def with_source_links(text: str, repository: str | None) -> str:
    """Return the text with links to files below the URL `repository`; without a URL, the links become plain text."""

    def linked(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        if not (ROOT / path).exists():
            return match[0]  # a broken link: the strict build reports it
        if path in ABOVE:
            return f"[{words}]({ABOVE[path]}{anchor})"
        return f"[{words}]({repository.rstrip('/')}/blob/main/{path}{anchor})" if repository else words

    return SOURCE_LINK.sub(linked, text)


def outside_code(text: str, change: Any) -> str:
    """Apply `change` to all parts of a page that are not code blocks."""
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.M | re.S)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))
