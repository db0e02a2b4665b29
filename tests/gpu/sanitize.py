"""Run tools of compute-sanitizer over a small step, results as JSON lines: ``python -m tests.gpu.sanitize TOOL``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["find", "main", "sanitize"]

PLACE = "/usr/local/cuda"
PROGRAM = ("-m", "tests.gpu.small_step")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
_FOUND = re.compile(r"^=+ (.*(?:Invalid|Race|hazard|Error|Barrier|leak|Uninitialized).*)$", re.MULTILINE)


def find() -> str | None:
    """Return the path of compute-sanitizer, on PATH or in a CUDA toolkit."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), PLACE]
    beside = [Path(folder, "bin", "compute-sanitizer") for folder in folders if folder]
    return shutil.which("compute-sanitizer") or next((str(path) for path in beside if path.exists()), None)


def sanitize(tool: str, program: Sequence[str] = PROGRAM) -> dict[str, object]:
    """Run one tool and return its result."""
    found = find()
    if found is None:
        return {"check": tool, "status": "missing", "detail": "needs compute-sanitizer of the CUDA toolkit"}
    # Libraries try calls that fail, and go on: those are no errors of ours.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [found, "--tool", tool, *options, "--error-exitcode", "99", sys.executable, *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    sys.stderr.write(done.stdout[-20000:])
    summary = " ".join(_SUMMARY.findall(done.stdout)[-1:])
    if "not supported" in done.stdout and not summary:
        return {"check": tool, "status": "missing", "detail": "compute-sanitizer does not support this device"}
    right = done.returncode == 0 and bool(summary)
    what = "; ".join(dict.fromkeys(_FOUND.findall(done.stdout)))[:1000]
    detail = summary if right else f"exit code {done.returncode}; {summary or 'no summary'}; {what}"
    return {"check": tool, "status": "ok" if right else "failed", "detail": detail}


def main() -> int:
    """Print one result per tool; return exit code 0."""
    for tool in sys.argv[1:]:
        print(json.dumps({"begin": tool}), flush=True)
        print(json.dumps(sanitize(tool)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
