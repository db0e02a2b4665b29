"""All of first_day.md is executed in order: files, Python and commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, commands_of
from tests.harness.limits import LIMIT
from tests.launch import find_mpiexec

EXAMPLE = ROOT / "examples" / "first_day.py"
PAGE = [block for block in blocks() if block.page.name == "first_day.md"]
TITLE = re.compile(r'title="([^"]+)"')


def title(block: Block) -> str:
    """Return the file name in the title of a block; empty if it has none."""
    line = block.page.read_text(encoding="utf-8").splitlines()[block.line - 1]
    return "".join(TITLE.findall(line))


def test_what_is_quoted_is_in_the_example():
    quoted = [block for block in PAGE if title(block) == "examples/first_day.py"]
    assert len(quoted) == 2
    for block in quoted:
        assert block.text in EXAMPLE.read_text(encoding="utf-8"), f"{block.place}: expected what the example has"


def call(words: list[str], folder: Path) -> str:
    """Run a command of the page in a folder and return its output."""
    programs = {"halograd": [sys.executable, "-m", "halograd"], "mpirun": [find_mpiexec()], "python": [sys.executable]}
    full = [part for word in words for part in programs.get(word, [word])]
    full = [str(EXAMPLE) if word == "examples/first_day.py" else word for word in full]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        full, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def losses(run: Path) -> list[float]:
    """Return the validation losses of a run, from its log."""
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "validation"]


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_day_goes_as_the_page_says(tmp_path, monkeypatch, capsys):
    for name in ("torch", "onnxscript", "onnxruntime", "safetensors"):
        pytest.importorskip(name, reason="needs torch as oracle: pip install 'halograd[oracle]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day").mkdir()
    said: dict[str, str] = {}
    space: dict[str, object] = {}
    for block in PAGE:
        if title(block) == "examples/first_day.py":
            continue
        if title(block):
            (tmp_path / title(block)).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, block.place, "exec"), space)
            said[f"python {block.line}"] = capsys.readouterr().out
        elif block.language == "sh":
            for words in commands_of(block):
                if words[0] != "pip":
                    said[shlex.join(words)] = call(words, tmp_path)
    compare(said, tmp_path / "day")


def compare(said: dict[str, str], day: Path) -> None:
    """Check the losses, the printed text and the files of the page's commands."""
    one, four = losses(day / "by-hand"), losses(day / "on-four")
    assert four == pytest.approx(one[:4], rel=1e-3) and len(one) == 5
    shown = "".join(block.text for block in PAGE if block.language == "text")
    python = [text for command, text in said.items() if command.startswith("python ")]
    assert len(python) == 4
    for text in python:
        assert text in shown, f"expected the page to show what its Python prints, got {text!r}"
    (status,) = (text for command, text in said.items() if command.startswith("halograd status"))
    assert status.count("finished") == 2 and (day / "by-hand" / "report.html").exists()
    (script,) = (text for command, text in said.items() if command.startswith("halograd submit"))
    assert script.startswith("#!/bin/bash") and "--ntasks-per-node=4" in script
    assert (day / "by-hand.onnx").exists() and (day / "by-hand.safetensors").exists()
