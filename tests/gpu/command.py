"""The command ``python -m halograd.gpucheck [PART ...]``: it runs parts of the GPU check, keeps and prints the results.

Results are appended to a file of JSON lines. A check with a recorded result is not run again: after an interruption
the user repeats the call to continue, on another machine too (`--out`, `--resume`). Exit code 0: all checks passed, or
there is no GPU; 1: a check failed; 3: the time of the call ended before the last check.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.facts import commit, missing
from tests.gpu.kept import Kept
from tests.gpu.parts import PARTS
from tests.gpu.results import BAD, STATES, Result, Results
from tests.gpu.runner import ROOT, Part, Runner
from tests.gpu.table import table
from tests.gpu.wheels import WheelError, lacking, unpack
from tests.harness.limits import slowness

__all__ = ["main"]

#: Duration of one call from its start [s]; three calls, and the starts of three machines, fit into half an hour.
SECONDS = 540.0
RESULTS_NAME = "gpu-check.jsonl"
FACTS_SECONDS = 90.0
WELL, FAILED, UNFINISHED = 0, 1, 3


def parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    """Parse and return the options of the command line."""
    names = "\n".join(f"  {part.name:13} {part.question}" for part in parts)
    parser = argparse.ArgumentParser(
        prog="python -m halograd.gpucheck",
        description=__doc__,
        epilog=f"parts, in this order:\n{names}\n  {'table':13} print what is recorded",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = [*(part.name for part in parts), "table"]
    parser.add_argument("parts", nargs="*", metavar="PART", help="which parts (default: all)")
    parser.add_argument("--results", type=Path, help=f"file (default: {RESULTS_NAME}, in --out if that is given)")
    parser.add_argument("--out", type=Path, help="folder that is kept: results, log and caches are written there")
    parser.add_argument("--resume", type=Path, help="folder from --out of an earlier call, to continue it")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of this call (default: %(default)g)")
    again = "forget what is recorded of these parts; with 'failed' what went wrong only"
    parser.add_argument("--again", nargs="?", const="all", choices=("all", "failed"), help=again)
    wheels = "folder of wheels that this machine may lack (see tests/gpu/wheels.py); needs no package index"
    parser.add_argument("--wheels", type=Path, help=wheels)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in choices]
    if unknown:
        parser.error(f"expected parts out of {', '.join(choices)}, got {unknown[0]!r}")
    return options


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Execute the command line and return its exit code (see the module's docstring)."""
    begin = time.monotonic()
    options = parse(arguments, parts)
    try:
        kept = Kept(options.out, options.resume)
    except FileNotFoundError as error:
        _print(str(error))
        return 2
    results = Results((options.results or (options.out or Path()) / RESULTS_NAME).absolute())
    selected = [part for part in parts if not options.parts or part.name in options.parts]
    complete = True
    if selected:
        lacks = _prepare(options, results)
        if lacks is not None:
            return lacks
        seconds = options.seconds - (time.monotonic() - begin)
        runner = Runner(results, seconds, {**_limits(), **kept.environment}, _print, commit(), after_part=kept.save)
        if options.again:
            for part in selected:
                results.again(part.name, STATES if options.again == "all" else BAD)
        complete = runner.run(*selected)
    _print(table(results, parts))
    _print(f"recorded in {results.path}")
    names = {part.name for part in selected} or {part.name for part in parts}
    if any(result.status in BAD for result in results.all() if result.part in names | {"gpu"}):
        return FAILED
    return WELL if complete else UNFINISHED


def _prepare(options: argparse.Namespace, results: Results) -> int | None:
    """Unpack wheels and check the requirements; return the exit code if nothing can be run."""
    if options.wheels is not None:
        try:
            text, environment = unpack(options.wheels)
        except WheelError as error:
            _print(str(error))
            return 2
        _print(text)
        os.environ.update(environment)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    gpu = _first_gpu()
    found = _facts(results)
    lacks = missing(found)
    if options.wheels is None and (names := lacking()):
        remedy = (
            "make gpu-tools where there is a package index; where there is none, carry .gpu-wheels (make gpu-wheels)"
        )
        lacks.append(f"the packages {', '.join(names)} ({remedy})")
    if not gpu and not found.get("devices"):
        _print(f"needs {'; '.join(lacks)}: nothing is checked without a GPU")
        return WELL
    if lacks:
        text = f"a GPU answers ({gpu or 'through the driver'}), and something is missing: {'; '.join(lacks)}"
        results.add(Result("gpu", "needs", "what a GPU needs", "failed", text))
        _print(f"failed   {text}")
        return FAILED
    results.add(Result("gpu", "needs", "what a GPU needs", "ok", str(found["devices"][0]["name"])))
    return None


def _limits() -> Mapping[str, str]:
    """Return environment variables that lengthen all limits on a slow machine."""
    return {"HALOGRAD_TEST_SLOWNESS": f"{slowness():.2f}"}


def _first_gpu() -> str:
    """Return the first line of ``nvidia-smi -L``; empty if there is no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=FACTS_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return lines[0] if done.returncode == 0 and lines else ""


def _facts(results: Results) -> dict[str, Any]:
    """Record and return versions and devices, which a separate process finds, or the last output of that process."""
    command = [sys.executable, "-m", "tests.gpu.facts"]
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FACTS_SECONDS, check=False, cwd=ROOT)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
        found = {"facts": f"unknown: {error}"}
    results.write(facts=found)
    _print("\n".join(f"{key}: {value}" for key, value in found.items()))
    return found


def _print(line: str) -> None:
    print(line, flush=True)
