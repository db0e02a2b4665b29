"""Tests of the cache of measured times: it is stored, resumed, shared, and repaired after damage."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from halograd.errors import UserError
from halograd.perfmodel.profile import cache
from halograd.perfmodel.profile.cache import Conditions, TimeCache, cache_path

HERE = Conditions("a device", "numpy", "1")


def test_times_are_kept(tmp_path):
    path = tmp_path / "deep" / "times.jsonl"
    cache = TimeCache(path)
    cache.put(HERE, "a", (1e-7, 0.1 + 0.2, 0.0))
    again = TimeCache(path)
    assert again.get(HERE, "a") == (1e-7, 0.1 + 0.2, 0.0)
    assert again.get(HERE, "b") is None
    assert again.get(Conditions("a device", "numpy", "2"), "a") is None


@pytest.mark.parametrize(
    "source", ["kernels/cuda/src/norm.cu", "kernels/cuda/src/common.cuh", "program/runner.py", "layers/pooling.py"]
)
def test_times_of_other_code_are_others(monkeypatch, source):
    """Measured times are not used for other code: the conditions include kernels, CUDA sources and the step program."""

    def changed(path):
        with path.open("rb") as file:
            return file.read() + b" " * str(path).endswith(source)

    before = cache._sources.__wrapped__()
    monkeypatch.setattr(Path, "read_bytes", changed)
    assert cache._sources.__wrapped__() != before


def test_the_later_time_counts(tmp_path):
    path = tmp_path / "t.jsonl"
    cache = TimeCache(path)
    cache.put(HERE, "a", (1.0, 0.0, 0.0))
    cache.put(HERE, "a", (2.0, 0.0, 0.0))
    assert TimeCache(path).get(HERE, "a") == (2.0, 0.0, 0.0)


def test_lines_are_written_every_so_many(tmp_path):
    path = tmp_path / "t.jsonl"
    cache = TimeCache(path, every=2)
    cache.put(HERE, "a", (1.0, 0.0, 0.0))
    assert not path.exists()
    cache.put(HERE, "b", (1.0, 0.0, 0.0))
    assert len(TimeCache(path)) == 2
    cache.put(HERE, "c", (1.0, 0.0, 0.0))
    cache.flush()
    cache.flush()
    assert len(TimeCache(path)) == 3
    assert len(path.read_text().splitlines()) == 3


DAMAGE = [
    "no json",
    '["half a li',
    "[1, 2]",
    '["c", "k", [1.0, 2.0]]',
    '["c", "k", [1.0, NaN, 2.0]]',
    '["c", "k", [1.0, -1.0, 2.0]]',
    '["c", "k", [1.0, "x", 2.0]]',
    '{"c": 1}',
    "null",
    "[[], [], [1.0, 1.0, 1.0]]",
    '["c", "k", [1.0, "1.0", 2.0]]',
    '["c", "k", [1.0, true, 2.0]]',
    "[" * 100_000,
    f'["c", "k", [{"9" * 5000}, 1.0, 1.0]]',
]


@pytest.mark.parametrize("line", DAMAGE)
def test_damaged_lines_are_skipped_with_a_message(tmp_path, caplog, line):
    path = tmp_path / "t.jsonl"
    TimeCache(path).put(HERE, "a", (1.0, 0.0, 0.0))
    path.write_text(f"{line}\n\n{path.read_text()}")
    with caplog.at_level(logging.WARNING, "halograd.perfmodel"):
        cache = TimeCache(path)
    assert cache.damaged == 1 and cache.get(HERE, "a") == (1.0, 0.0, 0.0)
    assert "line 1 is damaged and was skipped" in caplog.text


@pytest.mark.parametrize("before", [b"\xff\xfe\x00\n", b'["a run that was kil'])
def test_bytes_that_are_no_text_or_a_torn_last_line_do_not_harm_the_next(tmp_path, before):
    path = tmp_path / "t.jsonl"
    path.write_bytes(before)
    TimeCache(path).put(HERE, "a", (1.0, 0.0, 0.0))
    again = TimeCache(path)
    assert again.damaged == 1 and again.get(HERE, "a") == (1.0, 0.0, 0.0)


def test_runs_may_write_at_once(tmp_path):
    path, each = tmp_path / "t.jsonl", 50
    code = (
        "import sys; from pathlib import Path; from halograd.perfmodel.profile.cache import Conditions, TimeCache;"
        "cache = TimeCache(Path(sys.argv[1]));"
        "here = Conditions('a device', 'numpy', '1'); name = sys.argv[2] * 3000;"
        f"[cache.put(here, name + str(i), (float(i), 0, 0)) for i in range({each})]"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [run.wait() for run in runs] == [0, 0, 0]
    cache = TimeCache(path)
    assert cache.damaged == 0 and len(cache) == 3 * each
    assert cache.get(HERE, "b" * 3000 + "7") == (7.0, 0.0, 0.0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    cache = TimeCache(tmp_path / "file" / "t.jsonl")
    with pytest.raises(UserError, match=r"expected a path that can be written.*HALOGRAD_CACHE"):
        cache.put(HERE, "a", (1.0, 0.0, 0.0))


def test_a_path_that_cannot_be_is_named(tmp_path):
    with pytest.raises(UserError, match=r"expected a file that can be read.*File name too long.*HALOGRAD_CACHE"):
        TimeCache(tmp_path / ("x" * 300) / "t.jsonl")


def test_a_cache_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"expected a file that can be read.*remove it"):
        TimeCache(tmp_path)


def test_where_the_cache_lies(tmp_path, monkeypatch):
    for name in ("HALOGRAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path() == tmp_path / ".cache" / "halograd" / "kernel_times.jsonl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_path() == tmp_path / "x" / "halograd" / "kernel_times.jsonl"
    monkeypatch.setenv("HALOGRAD_CACHE", str(tmp_path / "y"))
    assert cache_path() == tmp_path / "y" / "kernel_times.jsonl"
    assert cache_path(tmp_path / "z") == Path(tmp_path / "z" / "kernel_times.jsonl")
