"""Write generated tables into the pages in the repository: ``python -m docs.generator``.

They are the tables of the configuration, and figures that the library computes. The site generates the tables again,
with links; in the pages they are plain Markdown. A test compares the pages with the sources.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from . import configuration, figures

__all__ = ["PAGE", "PAGES", "renewed"]

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"
PAGES = (PAGE, PAGE.with_name("when_to_cut.md"))
TABLES = {
    "configuration": configuration.run_tables,
    "machine": configuration.machine_tables,
    "strategy": configuration.strategy_tables,
    "memory_by_ranks": figures.memory_by_ranks,
    "recomputation": figures.recomputation,
}
GENERATED = re.compile(r"(^<!-- generated: (\w+) -->$).*?(^<!-- end -->$)", re.M | re.S)


def renewed(page: str) -> str:
    """Return the page with tables that are generated again from the sources."""
    return GENERATED.sub(lambda match: f"{match[1]}\n\n{plain(TABLES[match[2]]())}\n\n{match[3]}", page)


def plain(text: str) -> str:
    """Return Markdown of the site as plain Markdown: without anchors, and with names instead of links."""
    text = re.sub(r" ?\{ ?#[^}]*\}", "", text)
    text = re.sub(r"<autoref [^>]*><code>(.*?)</code></autoref>", lambda match: f"`{html.unescape(match[1])}`", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
