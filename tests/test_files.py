"""Small files are seen whole or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import threading

import pytest

from halograd.files import write_whole


def test_whoever_reads_meanwhile_sees_one_text_or_the_other(tmp_path):
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
