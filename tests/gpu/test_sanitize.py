"""Tests of the use of compute-sanitizer with a stub: success, findings, unsupported devices, and a missing program."""

import json
import sys

import pytest

from tests.gpu import sanitize


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Return a function that installs a stub of the program with an output and an exit code."""

    def put(text, code):
        path = tmp_path / "compute-sanitizer"
        lines = "".join(f"echo '========= {line}'\n" for line in text)
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{lines}exit {code}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    monkeypatch.setenv("PATH", "")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    return put


@pytest.mark.parametrize(
    ("text", "code", "status", "detail"),
    [
        (["COMPUTE-SANITIZER", "ERROR SUMMARY: 0 errors"], 0, "ok", "0 errors"),
        (["RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"], 0, "ok", "0 hazards"),
        (["Invalid __global__ write of size 4 bytes", "ERROR SUMMARY: 1 error"], 99, "failed", "Invalid __global__"),
        (["Target application returned an error"], 1, "failed", "exit code 1; no summary"),
        (["Error: Device not supported. Please refer"], 1, "missing", "does not support this device"),
    ],
)
def test_what_it_says(stub, tmp_path, text, code, status, detail):
    stub(text, code)
    found = sanitize.sanitize("memcheck")
    assert (found["check"], found["status"]) == ("memcheck", status) and detail in found["detail"]
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:2] == ["--tool", "memcheck"] and arguments[-2:] == ["-m", "tests.gpu.small_step"]


def test_without_it(stub, monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "PLACE", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["sanitize", "memcheck", "racecheck"])
    assert sanitize.main() == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f.get("status") for f in found] == [None, "missing", None, "missing"]
    assert found[0] == {"begin": "memcheck"} and found[3]["check"] == "racecheck"
