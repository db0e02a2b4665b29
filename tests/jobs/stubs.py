"""Stubs of commands that only record their calls, to run scripts without Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from tests.harness.limits import LIMIT

NAMES = ("srun", "mpirun", "scontrol", "squeue", "sbatch", "scancel", "module")
#: A call is recorded as its words, each ended by NUL, and a line feed. STUB_CODE sets the exit code; `sbatch` keeps
#: scripts.
STUB = """\
#!/bin/bash
name=${0##*/}
shopt -s nullglob
calls=%s
printf '%%s\\0' "$name" "$@" >>"$calls"
printf '\\n\\0' >>"$calls"
case $name in
  squeue) echo "${STUB_STATE-RUNNING}" ;;
  sbatch)
    kept=("$calls".*)
    number=$((101 + ${#kept[@]}))
    if [ -f "${!#}" ]; then cat -- "${!#}"; else cat; fi >"$calls.$number"
    echo "$number;cluster"
    ;;
  srun | mpirun)
    case " $* " in
      *" train "*)
        if [ -n "$STUB_NEWER" ]; then
            mkdir -p "$STUB_NEWER/checkpoints"
            echo step-00000005.h5 >"$STUB_NEWER/checkpoints/latest.h5"
        fi
        exit "${STUB_CODE:-0}"
        ;;
    esac
    ;;
esac
"""


class Stubs:
    """Folder of stubs, to be first on PATH.

    Parameters
    ----------
    folder
        Created; it also contains the recorded calls.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._calls = folder, folder / "calls"
        folder.mkdir()
        for name in NAMES:
            (folder / name).write_text(STUB % shlex.quote(str(self._calls)))
            (folder / name).chmod(0o755)

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a job on 2 nodes."""
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
        path = os.pathsep.join([str(self.folder), os.environ["PATH"]])
        return {**os.environ, **job, "PATH": path, **extra}

    def run(self, script: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a script in bash."""
        return subprocess.run(
            ["bash"],
            input=script,
            capture_output=True,
            text=True,
            env=self.environment(**extra),
            cwd=cwd or self.folder,
            timeout=LIMIT,
        )

    def calls(self, name: str | None = None) -> list[list[str]]:
        """Return the recorded calls of the command `name`, or of all commands."""
        text = self._calls.read_text() if self._calls.exists() else ""
        found = [call.split("\0")[:-1] for call in text.split("\n\0")[:-1]]
        return [call for call in found if name in (None, call[0])]

    def submitted(self) -> list[str]:
        """Return the scripts passed to `sbatch`."""
        return [p.read_text() for p in sorted(self.folder.glob("calls.*"), key=lambda p: int(p.suffix[1:]))]
