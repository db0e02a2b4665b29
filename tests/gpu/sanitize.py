"""Run a tool of compute-sanitizer over small steps, results as JSON lines: ``python -m tests.gpu.sanitize TOOL NAME``.

NAME is a network of tests/training/device_steps.py. racecheck looks at our own kernels only: those of the vendors
synchronize by means that it does not know.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from halograd.kernels.cuda import sources

__all__ = ["find", "main", "options", "sanitize"]

PLACE = "/usr/local/cuda"
PROGRAM = ("-m", "tests.gpu.small_step")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
_FOUND = re.compile(r"^=+ (.*(?:Invalid|Race|hazard|Error|Barrier|leak|Uninitialized).*)$", re.MULTILINE)


def find() -> str | None:
    """Return the path of compute-sanitizer, on PATH or in a CUDA toolkit."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), PLACE]
    beside = [Path(folder, "bin", "compute-sanitizer") for folder in folders if folder]
    return shutil.which("compute-sanitizer") or next((str(path) for path in beside if path.exists()), None)


def options(tool: str) -> list[str]:
    """Return the options of a tool."""
    if tool == "racecheck":
        names = sorted({name for path in sources.FOLDER.glob("*.cu") for name in sources.kernels_of(path.stem)})
        return ["--kernel-regex", f"kns=^({'|'.join(names)})$"]
    # Libraries try calls that fail, and go on: those are no errors of ours.
    return ["--report-api-errors", "no"] if tool == "memcheck" else []


def sanitize(tool: str, names: Sequence[str] = ()) -> dict[str, object]:
    """Run one tool over the steps of the named networks and return its result."""
    check, found = " ".join([tool, *names]), find()
    if found is None:
        return {"check": check, "status": "missing", "detail": "needs compute-sanitizer of the CUDA toolkit"}
    command = [found, "--tool", tool, *options(tool), "--error-exitcode", "99", sys.executable, *PROGRAM, *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    sys.stderr.write(done.stdout[-20000:])
    summary = " ".join(_SUMMARY.findall(done.stdout)[-1:])
    if "not supported" in done.stdout and not summary:
        return {"check": check, "status": "missing", "detail": "compute-sanitizer does not support this device"}
    right = done.returncode == 0 and bool(summary)
    what = "; ".join(dict.fromkeys(_FOUND.findall(done.stdout)))[:1000]
    detail = summary if right else f"exit code {done.returncode}; {summary or 'no summary'}; {what}"
    return {"check": check, "status": "ok" if right else "failed", "detail": detail}


def main() -> int:
    """Print the result of a tool; return exit code 0."""
    tool, *names = sys.argv[1:]
    print(json.dumps({"begin": " ".join([tool, *names])}), flush=True)
    print(json.dumps(sanitize(tool, names)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
