"""Runs with damaged and odd HDF5 files: exit code 0 or 2, one line if rejected, never a traceback or a hang.

    python -m tests.training.fuzz_hdf5                        every mutation once, each in a separate process
    python -m tests.training.fuzz_hdf5 --rounds 20            random parts of each drawn twenty times
    python -m tests.training.fuzz_hdf5 --ranks 2 --only virtual

The program prints a line for every failed case, and one with the counts; its exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from tests.harness.limits import scaled
from tests.launch import find_mpiexec
from tests.training import hdf5_storage_mutations  # noqa: F401  (adds to MUTATIONS)
from tests.training.hdf5_mutations import MUTATIONS, write

LIMIT = scaled(60.0)  # [s]: whatever takes longer hangs
CONFIG = """
[model]
name = "mesh"
resolution = 8
channels = 2
widths = [3]
convs = 1
decoder = true
[data]
path = "{folder}/data.h5"
validation = 0.25
normalize = {normalize}
[optimizer]
kind = "sgd"
[schedule]
learning_rate = 0.01
[training]
epochs = 1
batch = 2
[backend]
kernels = "numpy"
[output]
directory = "{folder}/out"
"""


def prepare(folder: Path, name: str, seed: int) -> list[str]:
    """Write the data set and the configuration of a case; return the arguments of the command line."""
    rng = np.random.default_rng([seed, sum(name.encode())])
    write(folder, seed)
    MUTATIONS[name][1](folder, rng)
    normalize = "false" if rng.integers(2) else "true"
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, normalize=normalize))
    return ["train", str(folder / "run.toml")]


def launched(arguments: list[str], ranks: int) -> tuple[int | None, str]:
    """Return exit code and output of a run on several ranks; None if it had to be killed."""
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "halograd", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, errors="replace"
    ) as process:
        try:
            said = process.communicate(timeout=LIMIT)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
    return process.returncode, said


def forked(arguments: list[str], said: Path) -> tuple[int | None, str]:
    """Return exit code and output of a run on one rank, in a fork of this process."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 1
        try:
            from halograd.cli.run import run

            code = run(arguments)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    deadline = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None, said.read_text(errors="replace")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]), said.read_text(errors="replace")


def judge(outcome: str, code: int | None, said: str) -> str | None:
    """Return a description of the fault of a run's end; None if there is none."""
    errors = re.findall(r"^halograd: error: .*$", said, re.M)
    warnings = re.findall(r"^(?:halograd: |WARNING:).*data\.h5.*$", said, re.M)
    if code is None:
        return f"hangs for {LIMIT:g} s"
    if code < 0 and outcome == "any":
        return None  # the HDF5 library is not proof against changed bytes; the counts tell of it
    if code not in (0, 2):
        return f"exit code {code}"
    if "Traceback" in said:
        return "a traceback"
    if (code == 2) != (len(errors) == 1):
        return f"exit code {code} with {len(errors)} lines of errors"
    if outcome == "refused" and code != 2:
        return "expected to be refused"
    if outcome in ("sound", "warned") and (code != 0 or bool(warnings) != (outcome == "warned")):
        return f"expected to be {outcome}, got exit code {code} and {len(warnings)} warnings"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--say", action="store_true", help="print what every run has said")
    options = parser.parse_args()
    names = [name for name in MUTATIONS if re.search(options.only, name)]
    import halograd.auto
    import halograd.cli.commands
    import halograd.training.run  # noqa: F401  (once, before the forks)

    ends: Counter[str] = Counter()
    bad = 0
    for seed in range(options.seed, options.seed + options.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "data"
                folder.mkdir()
                arguments = prepare(folder, name, seed)
                said_file = Path(temporary) / "said.txt"
                code, said = forked(arguments, said_file) if options.ranks == 1 else launched(arguments, options.ranks)
            wrong = judge(MUTATIONS[name][0], code, said)
            crashed = code is not None and code < 0
            ends["refused" if code == 2 else "trained" if code == 0 else "crashed" if crashed else "other"] += 1
            if wrong is not None or crashed or options.say:
                bad += wrong is not None
                lines = [f"{name}, seed {seed}: {wrong or 'as it should be'}", *said.splitlines()[-12:]]
                print("\n    ".join(lines), flush=True)
    counts = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
    print(f"{sum(ends.values())} cases on {options.ranks} rank(s): {counts}; {bad} not as they should be")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
