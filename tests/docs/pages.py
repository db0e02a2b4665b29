"""Code blocks of the documentation pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks", "commands_of", "write_files"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
FENCE = re.compile(r"^ *```(?P<info>[^\n`]*)\n(?P<text>.*?)^ *```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """Code block: its page, first line, language and text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and line, for messages and test ids."""
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return all blocks, or those of some languages, in the order of pages and lines."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            language = match["info"].split(" ")[0]
            line = text.count("\n", 0, match.start()) + 1
            if not languages or language in languages:
                found.append(Block(page, line, language, match["text"]))
    return found


def write_files(page: str, folder: Path) -> None:
    """Write the Python blocks of a page that start with a file name, ``# rms.py``, to a folder."""
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block.text)
        if block.page.name == page and name:
            (folder / name[1]).write_text(block.text, encoding="utf-8")


def commands_of(block: Block) -> Iterator[list[str]]:
    """Return the words of every command of a block; with prompts, only of lines after ``$ ``."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        parser = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        parser.whitespace_split = True
        words: list[str] = []
        for word in parser:
            if set(word) <= set(";&|"):
                yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words
