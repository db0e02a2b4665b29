"""Tests of results on disk after an interruption at any point, and of the table of results."""

import json

from tests.gpu.results import BAD, Result, Results, append
from tests.gpu.runner import Job, Part
from tests.gpu.table import table


def test_what_was_written_is_read_back_by_another(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    mine = Results(path)
    mine.write(facts={"cupy": "14.2.0"})
    mine.write(part="p", job="j", begin="a")
    found = mine.add(Result("p", "j", "a", "failed", "wrong", 1.5, {"error": 0.1}, "abc"))
    mine.write(part="p", job="j", begin="b")
    mine.write(part="p", job="j", done=True)
    other = Results(path)
    assert list(other.all()) == [found] == other.of(("p", "j")) and other.facts == {"cupy": "14.2.0"}
    assert other.done(("p", "j")) and not other.done(("p", "k"))
    assert other.unfinished(("p", "j")) == {"b": 1}


def test_a_torn_line_costs_itself_only(tmp_path):
    path = tmp_path / "r.jsonl"
    append(path, part="p", job="j", check="a", status="ok")
    with path.open("ab") as file:
        file.write(b'{"part": "p", "job": "j", "check": "b", "sta')
    read = Results(path)
    assert [r.check for r in read.all()] == ["a"]
    read.add(Result("p", "j", "c", "ok"))
    path.write_bytes(path.read_bytes() + b"[1]\n\xff\xfe\n")
    assert [r.check for r in Results(path).all()] == ["a", "c"] == [r.check for r in read.all()]


def test_the_last_result_of_a_check_counts_and_some_are_done_again(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    for check, status in (("a", "failed"), ("a", "ok"), ("b", "crashed"), ("c", "ok")):
        results.add(Result("p", check, check, status))
        results.write(part="p", job=check, done=True)
    assert {r.check: r.status for r in results.all()} == {"a": "ok", "b": "crashed", "c": "ok"}
    results.again("p", BAD)
    for read in (results, Results(results.path)):
        assert [r.check for r in read.all()] == ["a", "c"] and not read.done(("p", "b")) and read.done(("p", "a"))
    results.again("p")
    assert list(results.all()) == [] and not results.done(("p", "a"))
    assert len([line for line in results.path.read_text().splitlines() if "check" in json.loads(line)]) == 4


def test_the_table(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    parts = (Part("one", "first?", (Job("j"),)), Part("two", "second?", (Job("j"),)))
    assert "| one | first? | not run | | | |" in table(results, parts)
    results.write(facts={"devices": [{"name": "H100"}], "cupy": "14.2.0"})
    results.add(Result("one", "j", "tests/x.py::test_a", "ok", "1.5 ms/step", 2.0, {"seconds": 1.5e-3}, "abc"))
    results.add(Result("one", "j", "tests/x.py::test_b", "hung", "trace\nkilled after 5 s"))
    results.add(Result("one", "j", "tests/x.py::test_c", "skipped", "ranks 0 and 1 share a GPU"))
    text = table(results, parts)
    assert text.startswith("On H100; cupy 14.2.0; commits abc.")
    assert "| one | first? | 1 | 1 | 1 | 2 |" in text and "| two | second? | not run | | | |" in text
    assert "- one, j: x.py::test_b hung: killed after 5 s" in text
    results.add(Result("one", "j", "tests/x.py::test_d", "hung", "elsewhere\nkilled after 5 s"))
    assert "- one, j: x.py::test_b and 1 more hung: killed after 5 s" in table(results, parts)
    assert "- one: ranks 0 and 1 share a GPU" in text and "- test_a: 1.5 ms/step" in text
