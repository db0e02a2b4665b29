"""Data files: rejected input that parsers accept, every message, atomic writes, and mutants of every kind of file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.documents import (
    LARGEST,
    LONGEST,
    dotted,
    parse_json,
    parse_option,
    parse_toml,
    read_json,
    read_toml,
    write_whole,
)
from halograd.errors import UserError
from tests.mutants import KINDS, campaign

texts = st.text(st.characters(exclude_categories=("Cs",)))
numbers = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@given(plain)
def test_json_is_read_as_it_is(data):
    assert parse_json(json.dumps(data), "x") == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "expected valid JSON, got tables or lists within one another more than 32 deep"),
        ("[" * 33 + "]" * 33, "expected tables and lists at most 32 deep, got more in [0]"),
        ('{"a": [' * 20 + "]}" * 20, "expected tables and lists at most 32 deep, got more in a"),
        ("9" * 5000, "expected whole numbers of at most 64 bits, got one of 5000 digits"),
        ('{"a": [1, 18446744073709551616]}', "a[1]: expected a whole number of at most 64 bits, got one of more"),
        ('{"a": 1, "b": 2, "a": 3}', "expected valid JSON, got an error: expected every key once, got 'a' twice"),
        ('{"a": NaN}', "expected valid JSON, got an error: expected finite numbers, got NaN"),
        ("[-Infinity]", "expected finite numbers, got -Infinity"),
        ("[1e999]", "[0]: expected a finite number, got inf"),
        ('{"a": "\\ud800"}', "a: expected text of Unicode characters, got half a surrogate pair"),
        ('{"a\\udfff": 1}', "expected text of Unicode characters, got half a surrogate pair"),
        ("", "expected valid JSON, got an error: Expecting value: line 1 column 1 (char 0)"),
        ("{'a': 1}", "expected valid JSON, got an error: Expecting property name"),
        (" " * (LARGEST["JSON"] + 1), "expected at most 16384 KiB of JSON, got more"),
    ],
)
def test_json_that_is_refused(text, message):
    with pytest.raises(UserError) as caught:
        parse_json(text, "s.json")
    told = str(caught.value)
    assert told.startswith("s.json: ") and told.isprintable() and len(told) < 300
    assert message in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 1000 + "]" * 1000, "expected valid TOML, got tables or lists within one another more than 32"),
        ("a = " + "[" * 40 + "]" * 40, "expected tables and lists at most 32 deep, got more in a"),
        (".".join("a" * 40) + " = 1", "expected tables and lists at most 32 deep, got more in a"),
        ("a." * 4000 + "a = 1", f"expected lines of at most {LONGEST} characters, got one of 8005"),
        ("#\n" * (LARGEST["TOML"] // 2 + 1), "expected at most 256 KiB of TOML, got more"),
        ("a = " + "9" * 3000, "a: expected a whole number of at most 64 bits, got one of more"),
        ("a = 0x" + "f" * 3000, "a: expected a whole number of at most 64 bits, got one of more"),
        ("[a]\nb = [1.0, nan]", "a.b[1]: expected a finite number, got nan"),
        ("a = 1979-05-27", "a: expected a text, a number, true or false, a list or a table, got the date or time 19"),
        ("a = 07:32:00", "got the date or time 07:32:00"),
        ("a = 1\na = 2", "expected valid TOML, got an error: Cannot overwrite a value"),
        ('"a\\nb" = inf', "'a\\nb': expected a finite number, got inf"),
    ],
)  # fmt: skip
def test_toml_that_is_refused(text, message):
    with pytest.raises(UserError) as caught:
        parse_toml(text, "run.toml")
    told = str(caught.value)
    assert told.startswith(f"run.toml: {message}") or message in told
    assert told.isprintable() and len(told) < 300


@pytest.mark.parametrize("read", [read_toml, read_json])
def test_files_that_cannot_be_read(tmp_path, read):
    kind = read.__name__[-4:].upper()
    (tmp_path / "no text").write_bytes(b'{"a": "\xff"}')
    (tmp_path / "large").write_bytes(b"\xc3\xa9" * LARGEST[kind])
    for path, message in (
        ("none", rf"thing \S*none: expected a {kind} file to read, got an error \(No such file or directory\); check"),
        (".", rf"expected a {kind} file to read, got an error \(Is a directory\)"),
        ("no text", r"got one that is not UTF-8 text \(byte 7\)"),
        ("a\0b", r"thing '.*a\\x00b': expected a .* got a path with a NUL character"),
        ("large", rf"large: expected at most {LARGEST[kind] >> 10} KiB of {kind}, got more"),
        ("x" * 300, r"got an error \(File name too long\)"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read(tmp_path / path, "thing")
        assert str(caught.value).isprintable()


def test_marks_of_utf8_and_endings_of_other_systems(tmp_path):
    (tmp_path / "a.toml").write_bytes(b'\xef\xbb\xbf[a]\r\nb = "\xc3\xa9"\r\n')
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a":\r\n "\xc3\xa9"}')
    assert read_toml(tmp_path / "a.toml", "x") == {"a": {"b": "é"}}
    assert read_json(tmp_path / "a.json", "x") == {"a": "é"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("4", 4), ("1e-3", 1e-3), ("true", True), ('"4"', "4"), ("[1, [2]]", [1, [2]]), ("{a = 1}", {"a": 1})),
        *(("a/b c.h5", "a/b c.h5"), ("mesh", "mesh"), ("-x", "-x"), ("1x", "1x"), ("$HOME", "$HOME")),
    ],
)
def test_values_of_the_command_line(text, value):
    assert parse_option("--set", "a.b", text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--set a.b: expected a TOML value, got ''"),
        ("[" * 3000, "--set a.b: expected a TOML value, got '[[[["),
        ("9" * 5000, "--set a.b: expected a TOML value, got '9999"),
        ("9" * 3000, "--set a.b: expected a whole number of at most 64 bits, got one of more"),
        ("nan", "--set a.b: expected a finite number, got nan"),
        ("[1, inf]", "--set a.b: [1]: expected a finite number, got inf"),
        ("1979-05-27", "--set a.b: expected a text, a number, true or false, a list or a table, got the date"),
        ("1\nc = 2", "--set a.b: expected one TOML value, got '1\\nc = 2'"),
    ],
)
def test_values_of_the_command_line_that_are_refused(text, message):
    with pytest.raises(UserError) as caught:
        parse_option("--set", "a.b", text)
    assert str(caught.value).startswith(message) and str(caught.value).isprintable()


def test_places():
    assert dotted(["layers", "conv1->width=2", "height", 3]) == "layers.conv1->width=2.height[3]"
    assert dotted(["a\nb", "c"], "model") == "model.'a\\nb'.c" and dotted(["x" * 500]) == f"'{'x' * 56}..."


# -- writing ------------------------------------------------------------------------------------------


def test_readers_see_one_whole_text_or_the_other(tmp_path):
    path, texts = tmp_path / "plan.json", ["a" * 100_000, "b" * 200_000]
    write_whole(path, texts[0])
    over = threading.Event()

    def write() -> None:
        for text in itertools.cycle(texts):
            write_whole(path, text)
            if over.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    try:
        while len(seen) < 60 or len(set(seen)) < 2:
            seen.append(path.read_text())
    finally:
        over.set()
        writer.join()
    assert set(seen) == set(texts) and os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_what_was_there_stays_if_it_cannot_be_written(tmp_path, monkeypatch, fails):
    path = tmp_path / "plan.json"
    write_whole(path, "old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_links_and_what_is_no_file(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("folder/plan.json")
    write_whole(link, "über")
    assert link.is_symlink() and (tmp_path / "folder" / "plan.json").read_text(encoding="utf-8") == "über"
    write_whole("/dev/null", "gone")
    assert not os.path.isfile("/dev/null")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "plan.json", "")


MUTANTS = 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutant_is_used_or_refused_in_one_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, faults = campaign(kind, range(MUTANTS), tmp_path)
    assert not faults, "\n".join(faults)
    assert found["accepted"] and found["refused"], "expected mutants of both sorts"
