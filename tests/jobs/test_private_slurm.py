"""The private Slurm of the tests starts in a container; tests are skipped immediately if it cannot start."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import jobs
from tests.harness.limits import LIMIT
from tests.jobs.private_slurm import available

ROOT = Path(__file__).parents[2]
PROGRAM = """
import shutil, tempfile
from pathlib import Path
from tests.jobs.private_slurm import PrivateSlurm
folder = Path(tempfile.mkdtemp(prefix="halograd-slurm-"))
folder.chmod(0o755)
slurm = PrivateSlurm(folder)
try:
    slurm.start()
    print(slurm.call("srun", "-N2", "sh", "-c", "echo $SLURMD_NODENAME"))
finally:
    slurm.stop()
    shutil.rmtree(folder)
"""
#: Replacements for the programs of a Slurm whose nodes do not start.
BROKEN = {
    "munged": 'for word; do case $word in --socket=*) : >"${word#*=}" ;; esac; done; exec sleep 99999',
    "slurmctld": "exec sleep 99999",
    "slurmd": "echo 'slurmd: error: no moon'; echo 'slurmd: error: slurmd initialization failed'; exit 1",
    **dict.fromkeys(("sbatch", "sinfo", "squeue", "scancel", "scontrol"), "exit 0"),
}


def run(*command, **variables):
    mark = jobs.new_mark()
    environment = jobs.job_environment(mark, {"PYTHONPATH": str(ROOT), **variables})
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=ROOT)
    finally:
        jobs.end(mark)


@pytest.mark.parametrize("groups", ["umount -R /sys/fs/cgroup", "mount -t tmpfs tmpfs /sys/fs/cgroup"])
def test_it_starts_without_control_groups(groups):
    """The private Slurm starts without mounted control groups, as in a container."""
    if not available():
        pytest.skip("needs Slurm (`apt-get install slurm-wlm munge`)")
    isolated = ["unshare", "--mount", "sh", "-c", f'{groups} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or run(*isolated, "true").returncode:
        pytest.skip("needs unshare, control groups that are mounted, and leave to unmount them in a name space")
    done = run(*isolated, sys.executable, "-c", PROGRAM)
    assert done.returncode == 0 and sorted(done.stdout.split()) == ["n1", "n2"], done.stdout + done.stderr


def test_what_cannot_start_is_skipped_with_its_last_words(tmp_path):
    for name, body in BROKEN.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    pytest_ = [sys.executable, "-m", "pytest", "-q", "--color=no", "-rs", "-p", "no:cacheprovider"]
    done = run(*pytest_, "tests/jobs/test_slurm.py", PATH=path)
    assert done.returncode == 0 and " passed" not in done.stdout, done.stdout + done.stderr
    reason = "needs a Slurm that can start on this machine: n1 ended with code 1: slurmd: error: no moon; "
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert lines and all(reason in line for line in lines), done.stdout
