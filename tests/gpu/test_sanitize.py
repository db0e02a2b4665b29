"""Tests of the use of compute-sanitizer with a stub: success, findings, unsupported devices, and a missing program."""

import json
import re
import sys

import pytest

from halograd.kernels.cuda.sources import FOLDER, text_of
from tests.gpu import sanitize

SOURCES = sorted(path.stem for path in FOLDER.glob("*.cu"))


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
    found = sanitize.sanitize("memcheck", ["mesh"])
    assert (found["check"], found["status"]) == ("memcheck mesh", status) and detail in found["detail"]
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:2] == ["--tool", "memcheck"] and arguments[-3:] == ["-m", "tests.gpu.small_step", "mesh"]


def test_races_are_sought_in_our_own_kernels(stub, tmp_path):
    stub(["RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"], 0)
    sanitize.sanitize("racecheck")
    chosen = re.search(r"--kernel-regex kns=(\S+)", (tmp_path / "arguments").read_text())[1]
    ours = {name for source in SOURCES for name in re.findall(r"KERNEL\((\w+), \w+\) \{", text_of(source))}
    assert all(re.fullmatch(chosen, name) for name in ours) and len(ours) > 20
    for other in ("sm90_xmma_fprop_implicit_gemm_bf16bf16", "cub_forward_kernel"):
        assert not re.search(chosen, other)


def test_without_it(stub, monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "PLACE", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["sanitize", "racecheck", "mesh"])
    assert sanitize.main() == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f.get("status") for f in found] == [None, "missing"]
    assert found[0] == {"begin": "racecheck mesh"} and found[1]["check"] == "racecheck mesh"
