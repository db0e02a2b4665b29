"""Documents of headings, paragraphs, tables and pictures, as Markdown or as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Block", "Code", "Heading", "Picture", "TableBlock", "Text", "to_html", "to_markdown"]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
img { max-width: 100%; height: auto; } code, pre { background: #f4f4f4; border-radius: 4px; padding: 0 0.25em; }
pre { padding: 0.7em 1em; overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: 0.25rem 0.9rem; text-align: right; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
table.text td, table.text th { text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #999; } td { border-bottom: 1px solid #ddd; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading; `level` 1 is the title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; ``**bold**`` and ```code``` have their Markdown meaning."""

    text: str


@dataclass(frozen=True)
class Code:
    """A block of code, for the reader to copy."""

    text: str


@dataclass(frozen=True)
class TableBlock:
    """A table; the first row is the head. By default, all columns but the first are numbers, aligned right."""

    rows: Sequence[Sequence[str]]
    columns: Literal["numbers", "text"] = "numbers"


@dataclass(frozen=True)
class Picture:
    """A PNG file in the folder of the document."""

    path: Path
    text: str


Block = Heading | Text | Code | TableBlock | Picture


def to_markdown(blocks: Sequence[Block]) -> str:
    """Return the document as Markdown; pictures are links."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """Return the document as one HTML page that contains its pictures, which are read from their files."""
    title = html.escape(next((block.text for block in blocks if isinstance(block, Heading)), ""))
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n{body}\n</html>\n"
    )


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Code):
        return f"```\n{block.text}\n```"
    if isinstance(block, Picture):
        return f"![{block.text}]({block.path.name})"
    if isinstance(block, Text):
        return block.text
    head, *rows = block.rows
    rule = [":---", *["---:" if block.columns == "numbers" else ":---"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
    if isinstance(block, Code):
        return f"<pre>{html.escape(block.text)}</pre>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.path.read_bytes()).decode("ascii")
        return f'<img alt="{html.escape(block.text)}" src="data:image/png;base64,{data}">'
    if isinstance(block, Text):
        return f"<p>{_inline(block.text)}</p>"
    head, *rows = block.rows
    lines = [_row(head, "th"), *(_row(row, "td") for row in rows)]
    kind = "" if block.columns == "numbers" else ' class="text"'
    return f"<table{kind}>\n" + "\n".join(lines) + "\n</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{_inline(cell)}</{tag}>" for cell in cells) + "</tr>"


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
