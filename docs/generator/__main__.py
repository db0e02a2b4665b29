"""Write the tables of the configuration into the page in the repository: ``python -m docs.generator``.

The site generates the tables again, with links; in the page they are plain Markdown. A test compares the page with the
sources.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from . import configuration

__all__ = ["PAGE", "renewed"]

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"
TABLES = {
    "configuration": configuration.run_tables,
    "machine": configuration.machine_tables,
    "strategy": configuration.strategy_tables,
}
PLACE = re.compile(r"(^<!-- generated: (\w+) -->$).*?(^<!-- end -->$)", re.M | re.S)


def renewed(page: str) -> str:
    """Return the page with tables that are generated again from the sources."""
    return PLACE.sub(lambda match: f"{match[1]}\n\n{plain(TABLES[match[2]]())}\n\n{match[3]}", page)


def plain(text: str) -> str:
    """Return Markdown of the site as plain Markdown: without anchors, and with names instead of links."""
    text = re.sub(r" ?\{ ?#[^}]*\}", "", text)
    text = re.sub(r"<autoref [^>]*><code>(.*?)</code></autoref>", lambda match: f"`{html.unescape(match[1])}`", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
