"""Words: identifiers, docstrings, comments, messages and pages use the field's terms (the table of words in STYLE.md).

``python -m tests.test_words [FOLDER...]`` lists every occurrence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Folders that have none of our own words; "" are the pages of the top folder.
FOLDERS = (
    "",
    "benchmarks",
    "comm",
    "data",
    "device",
    "docs",
    "dtensor",
    "examples",
    "halograd",
    "interchange",
    "jobs",
    "kernels",
    "layers",
    "lowering",
    "models",
    "perfmodel",
    "program",
    "training",
)

#: Words of our own, with the field's; inflected forms included.
WORDS = {
    "behind": "after",
    "place|places": "position, rank, slot, offset, location",
    "say|says|tell|tells|told|ask|asks|asked|answer|answers|answered|speak|speaks": "report, request, return, print",
    "judge|judges|judged|judgement": "evaluate, metric",
    "wire|wires": "network",
    "room|rooms": "capacity, buffer layout",
    "alike|apart|beside|besides": "identical, separate, next to, in addition to",
    "crowd|crowds": "oversubscription",
    "by nodes": "hierarchical",
    "book|books|booked": "count",
    "contender|contenders|rival|rivals": "candidate, baseline",
    "settle|settles|settled|give back|gives back|meet|meets|bring|brings": "finish, free, synchronize, copy",
    "lane|lanes|turn|turns|team|teams|ticket|tickets": "stream, queue, slot, node group, event",
    "stamp|stamps|stamped": "timestamp",
    "pulse|pulses": "heartbeat",
    "of nothing": "empty",
}
FIELD = {word: term for words, term in WORDS.items() for word in words.split("|")}
#: Common English in sentences (take place, in place, in turn): only identifiers are checked.
ONLY_NAMES = {"place", "places", "turn", "turns"}
#: Right English: positions in space, lanes of vector registers and warps, communication hidden by computation.
RIGHT = re.compile(
    r"left behind|leaves behind|behind computation|apart from|tell apart|`\w+`(?: samples)? apart"
    r"|(?:32|vector|SIMD|warp|of|all) lanes|lanes of",
    re.IGNORECASE,
)
#: Words that stay, by folder: terms of the field there, and what users override or set.
PUBLIC = {
    "comm": {"wire"},  # `Codec.wire`, the dtype of encoded elements: the wire format
    "docs": {"wire"},
    "kernels": {"lane", "lanes"},  # of a vector access or a warp
    "data": {"place", "turns"},  # `Dataset.place`, the key `augment.turns`
    "perfmodel": {"behind"},  # `reduction_behind`, a key of profiles
    "training": {"place"},  # the same, and a key of the file of a run's lock
}

PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
SEQUENCES = {word for word in FIELD if " " in word}
PROSE = re.compile(rf"\b(?:{'|'.join(set(FIELD) - ONLY_NAMES).replace(' ', chr(92) + 's+')})\b", re.IGNORECASE)
#: The strings and comments of a module, as ruff formats them (no nested quotes in f-strings before Python 3.12).
TEXTS = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#[^\n]*', re.DOTALL)
#: The identifiers of the code around them: all names, and attributes that are assigned.
NAMES = re.compile(r"(?<![\w.])[A-Za-z_]\w*|(?<=\.)[A-Za-z_]\w*(?=\s*(?::[^=\n]+)?=[^=])")


def has_words(text: str) -> bool:
    """Return whether a word of our own occurs in a text, in a sentence or as a part of an identifier."""
    lower = " ".join(text.lower().split())
    return any(part.lower() in FIELD for part in set(PARTS.findall(text))) or any(word in lower for word in SEQUENCES)


def in_prose(text: str, public: Set[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield the offset and the word of each occurrence in a text."""
    right = [match.span() for match in RIGHT.finditer(text)]
    for match in PROSE.finditer(text):
        word = " ".join(match[0].lower().split())
        if word not in public and not any(first <= match.start() < last for first, last in right):
            yield match.start(), word


def in_module(source: str, public: Set[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield the offset and the word of each occurrence in the strings, comments and identifiers of a module."""
    for match in TEXTS.finditer(source):
        if has_words(match[0]):
            yield from ((match.start() + offset, word) for offset, word in in_prose(match[0], public))
    code = TEXTS.sub(lambda match: " " * len(match[0]), source)
    for match in NAMES.finditer(code):
        for part in PARTS.findall(match[0].replace("in_place", "")):
            if part.lower() in FIELD and part.lower() not in public:
                yield match.start(), f"{part.lower()} ({match[0]})"


def occurrences(folder: str) -> Iterator[str]:
    """Yield file, line and word of each occurrence in a folder, or in the pages of the top folder ("")."""
    files = sorted((ROOT / folder).rglob("*")) if folder else [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for path in files:
        if path.suffix in (".py", ".md"):
            text = path.read_text("utf-8")
            if has_words(text):
                search = in_module if path.suffix == ".py" else in_prose
                for offset, word in search(text, PUBLIC.get(folder, frozenset())):
                    yield f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, offset) + 1}: {word}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_words_are_those_of_the_field(folder: str) -> None:
    hits = list(occurrences(folder))
    words = {hit.split(": ")[1].partition(" (")[0] for hit in hits}
    terms = "; ".join(f"{word}: {FIELD[word]}" for word in sorted(words))
    assert not hits, "\n".join([f"expected the terms of the field, got words of our own; write for {terms}", *hits])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"""What is told to a rank."""', ["told"]),
        ("x = 1  # the rank behind it", ["behind"]),
        ('raise ValueError("no room")', ["room"]),
        ('"""Sums that are done by\n    nodes."""', ["by nodes"]),
        ("def settle_all(places, at): ...", ["settle (settle_all)", "places (places)"]),
        ("class Judgement: book = 1", ["judgement (Judgement)", "book (book)"]),
        ("self.lanes = 1 if self.lanes == 1 else file.tell()", ["lanes (lanes)"]),
        ('"""Nothing is left behind; all lanes of a warp, `stride` apart."""', []),
    ],
)
def test_words_are_found(source: str, words: list[str]) -> None:
    assert [word for _, word in in_module(source)] == words
    assert has_words(source)


if __name__ == "__main__":
    for top in sys.argv[1:] or FOLDERS:
        print(*occurrences(top), sep="\n")
