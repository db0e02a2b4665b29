"""Jobs on a real Slurm with two nodes: they run, and continue after failures and preemption."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from mpi4py import MPI  # noqa: F401  (before `submit` asks for it not to be started)

from halograd.cli.run import run as halograd
from halograd.data import generate
from tests.harness.limits import wait_until
from tests.jobs.examples import losses, write_config
from tests.jobs.private_slurm import PrivateSlurm
from tests.launch import find_mpiexec

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
GATE = ROOT / "tests" / "support" / "gate"
STEPS = 12


@dataclass
class Site:
    """Folder with a configuration and data, and the Slurm that uses it."""

    folder: Path
    slurm: PrivateSlurm

    def submit(self, run: str, *options: object, until: int | None = None, nodes: int = 2) -> str:
        """Run ``halograd submit`` on `nodes` x 2 ranks into this directory; return the number of the (last) job.

        The job makes `until` steps, and no more before it is signaled or released.
        """
        self.gate(run).unlink(missing_ok=True)
        if until is not None:
            self.gate(run).write_text(str(until))
        command = ["submit", "mesh.toml", "--nodes", nodes, "--ranks-per-node", 2, "--set", f"output.directory={run}"]
        environment = ["--env", f"PYTHONPATH={GATE}:{ROOT}", "--env", f"HALOGRAD_TEST_GATE={self.gate(run)}"]
        out, err = StringIO(), StringIO()
        here = mock.patch.dict(os.environ, {**self.slurm.environment, "PWD": str(self.folder)}, clear=True)
        with here, redirect_stdout(out), redirect_stderr(err):
            before = os.getcwd()
            os.chdir(self.folder)
            try:
                code = halograd(list(map(str, [*command, *environment, *options])))
            finally:
                os.chdir(before)
        assert code == 0, err.getvalue()
        return out.getvalue().partition(":")[0].split()[-1]

    def losses(self, run: str) -> dict[int, float]:
        return losses(self.folder / run)

    def reach(self, run: str, job: str, step: int) -> None:
        """Wait until a run has completed this step."""
        what = f"step {step}"
        wait_until(
            lambda: max(self.losses(run), default=0) >= step,
            lambda: f"{what}, got {self.losses(run)}; {self.slurm.log(job)}",
        )

    def gate(self, run: str) -> Path:
        """Return the file with the number of steps that a job may make."""
        return self.folder / f"{run}.gate"

    def let_go_on(self, run: str) -> None:
        """Let a job make all its remaining steps."""
        self.gate(run).unlink()

    def complete(self, job: str, restarts: int) -> str:
        """Wait until a job has completed with this number of restarts, and return its log."""
        self.slurm.wait(job, "COMPLETED", Restarts=str(restarts))
        return self.slurm.log(job)


@pytest.fixture(scope="module")
def site(slurm, tmp_path_factory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    write_config(folder)
    generate(folder / "mesh.h5", 32, 12, 1)
    return Site(folder, slurm)


@pytest.fixture(autouse=True)
def no_leftovers(site: Site) -> Iterator[None]:
    """Check after every test that ended jobs left no process, shared memory or unfinished file."""
    yield
    if site.slurm.call("squeue", "-h").strip():
        return  # the job that runs into its time limit
    assert site.slurm.leftovers() == []
    names = [p.name for p in site.folder.rglob("*")]
    assert not [name for name in names if name.endswith((".partial", ".new", ".tmp", ".damaged"))], names
    assert not list(site.folder.glob("halograd-*")), "expected staged data to be removed"


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> dict[int, float]:
    """Return the losses of an undisturbed run."""
    job = site.submit("undisturbed")
    log = site.complete(job, 0)
    found = site.losses("undisturbed")
    assert sorted(found) == list(range(1, STEPS + 1)), log
    assert "training ended with code 0; go on: no" in log and f"trained to step {STEPS}" in log
    return found


@pytest.fixture(scope="module")
def limited(site: Site) -> str:
    """Return a job that Slurm signals 30 to 60 s after its start, near its time limit (it checks twice a minute)."""
    return site.submit("limited", "--time", 2, "--warning", 60, until=3)


@pytest.fixture(scope="module")
def planned(site: Site) -> str:
    """Return the training job of a chain that first measures and plans."""
    return site.submit("planned", "--kind", "plan-then-train", "--set", "strategy=auto", "--set", "strategy.budget=0")


# -- normal runs --------------------------------------------------------------------------------


def test_training_by_srun_runs_to_the_end(disturbed, limited, planned, undisturbed, site):
    assert undisturbed[STEPS] < undisturbed[1]
    assert (site.folder / "undisturbed" / "checkpoints" / "latest.h5").exists()


def test_training_by_mpirun_runs_to_the_end(undisturbed, site):
    log = site.complete(site.submit("mpirun", "--launcher", "mpirun", *seeing_gpus(site)), 0)
    assert site.losses("mpirun") == undisturbed
    assert gpus_seen(log) == {0: "0", 1: "1", 2: "0", 3: "1"}


def test_every_task_of_a_sweep_trains(undisturbed, site):
    """All tasks of a sweep train, read staged data and remove them."""
    options = ["--sweep", "schedule.learning_rate=0.01,0.02", "--stage", site.folder, "--set", "training.epochs=2"]
    job = site.submit("sweep", *options, *seeing_gpus(site))
    for task in (0, 1):
        assert gpus_seen(site.complete(f"{job}_{task}", 0)) == {0: "0", 1: "1", 2: "0", 3: "1"}
    first, second = site.losses("sweep/000"), site.losses("sweep/001")
    assert first[1] == second[1] == undisturbed[1] and first[4] != second[4]


def seeing_gpus(site: Site) -> list[object]:
    """Return options for a job that reserves GPUs and computes on CPUs; its ranks print the visible GPUs."""
    python = site.folder / "python"
    told = 'echo "rank ${PMI_RANK} sees GPU $CUDA_VISIBLE_DEVICES"; set -- "$@" --set backend.kernels=auto'
    python.write_text(f'#!/bin/bash\ncase $* in *train*) {told} ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    gpus = ["--gpus-per-node", 2, "--set", "backend.kernels=cudnn"]
    return [*gpus, "--python", python, "--mpi", "pmi2", "--mpirun", find_mpiexec()]


def gpus_seen(log: str) -> dict[int, str]:
    """Return the visible GPU by rank, from a log."""
    return {int(rank): gpu for rank, gpu in re.findall(r"^rank (\d) sees GPU (.*)$", log, re.M)}


def test_a_chain_measures_plans_and_trains(planned, site):
    site.complete(planned, 0)
    profile, plan = (site.slurm.log(str(int(planned) - k)) for k in (2, 1))
    assert "planned/machine.toml: written" in profile and "planned/plan.json: written" in plan
    assert max(site.losses("planned")) == STEPS


def test_names_reach_slurm_literally(site):
    name = "a $(touch PWNED) \"b\" 'c' \\ #d; %j"
    job = site.submit("named", "--job-name", name, "--sbatch", "hold")
    assert site.slurm.call("squeue", "-h", f"--jobs={job}", "--format=%j") == f"{name}\n"
    site.slurm.call("scancel", job)
    assert not list(site.folder.rglob("PWNED"))


# -- failures and preemption --------------------------------------------------------------------


def signal_script(site: Site, job: str) -> None:
    """Send a job the signal that Slurm sends before a time limit."""
    site.slurm.call("scancel", "--batch", "--signal=USR1", job)


def signal_ranks(site: Site, job: str) -> None:
    site.slurm.call("scancel", "--signal=TERM", job)


def kill_rank(site: Site, job: str) -> None:
    ranks = [pid for pid in site.slurm.processes(f"SLURM_JOB_ID={job}") if is_rank(pid, 3)]
    os.kill(ranks[0], signal.SIGKILL)
    pids = lambda: site.slurm.processes(f"SLURM_JOB_ID={job}")  # noqa: E731
    wait_until(lambda: not [pid for rank in range(4) for pid in pids() if is_rank(pid, rank)], "all ranks to end")


def fail_node(site: Site, job: str) -> None:
    site.slurm.fail_node("n2")
    site.slurm.wait(job, "PENDING")
    site.slurm.call("scontrol", "hold", job)  # else the next failure could affect it too
    site.slurm.start_node("n2")


def preempt(site: Site, job: str) -> None:
    """Submit a job to the partition of higher priority that needs all cores of both nodes, and wait for its end."""
    urgent = site.slurm.call(
        "sbatch", "--parsable", "-purgent", "-N2", "--ntasks-per-node=8", "--wrap=srun true", cwd=site.folder
    )
    site.slurm.wait(urgent.strip(), "COMPLETED")


def is_rank(pid: int, rank: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"SLURM_PROCID={rank}".encode() in environment and command[1:4] == [b"-m", b"halograd", b"train"]


OUTAGES = {"node": fail_node, "urgent": preempt}
SIGNALS = {"script": signal_script, "ranks": signal_ranks, "killed": kill_rank}


@pytest.fixture(scope="module")
def disturbed(site: Site) -> dict[str, str]:
    """Return jobs by run, each disturbed at its third step. They wait for Slurm while other tests run."""
    found = {}
    for run, disturb in OUTAGES.items():
        found[run] = site.submit(run, until=3)
        site.reach(run, found[run], 3)
        disturb(site, found[run])
        site.let_go_on(run)
    site.slurm.call("scontrol", "release", found["node"])
    found |= {run: site.submit(run, until=3) for run in SIGNALS}
    for run, disturb in SIGNALS.items():
        site.reach(run, found[run], 3)
        disturb(site, found[run])
    for run in SIGNALS:
        site.slurm.wait(found[run], "PENDING", "RUNNING", Restarts="1")
        site.let_go_on(run)
    return found


def survive(site: Site, undisturbed: dict[int, float], run: str, job: str) -> str:
    """Check that a disturbed job is requeued once and has the losses of the undisturbed run; return its log."""
    log = site.complete(job, 1)
    assert site.losses(run) == undisturbed, log
    assert log.count("starting from the beginning") == 1
    return log


@pytest.mark.parametrize("run", OUTAGES)
def test_slurm_itself_brings_a_job_back_into_the_queue(run, undisturbed, disturbed, site):
    """Slurm requeues a job after a node failure, and after preemption by a higher partition."""
    survive(site, undisturbed, run, disturbed[run])


@pytest.mark.parametrize("run", ["script", "ranks"])
def test_a_signal_leads_to_a_checkpoint_and_back_into_the_queue(run, undisturbed, disturbed, site):
    log = survive(site, undisturbed, run, disturbed[run])
    assert "training ended with code 75; go on: yes" in log


def test_a_killed_rank_ends_the_job_which_goes_on_from_its_checkpoint(undisturbed, disturbed, site):
    """A killed rank ends the job with one message that names it, and the job continues from its checkpoint."""
    log = survive(site, undisturbed, "killed", disturbed["killed"])
    assert "go on: yes" in log and re.search(r"rank 3 of 4 on|n2: task 3: Killed", log), log


def test_a_signal_when_all_is_trained_does_not_bring_a_job_back(undisturbed, site):
    log = site.complete(site.submit("late", "--env", "HALOGRAD_TEST_LATE=1"), 0)
    assert f"trained to step {STEPS}" in log and "training ended with code 0; go on: no" in log, log
    assert site.losses("late") == undisturbed


def test_a_cancelled_job_stays_so_and_goes_on_elsewhere(undisturbed, site):
    """A canceled job writes a checkpoint and is not requeued; the run continues on one node with another cut."""
    job = site.submit("elsewhere", until=3)
    site.reach("elsewhere", job, 3)
    site.slurm.call("scancel", job)
    site.slurm.wait(job, "CANCELLED", Restarts="0")
    stopped = len(site.losses("elsewhere"))
    assert 3 <= stopped < STEPS
    cut = ["--set", "strategy.sample=2", "--set", "strategy.height=1"]
    site.complete(site.submit("elsewhere", *cut, nodes=1), 0)
    found = site.losses("elsewhere")
    assert {s: v for s, v in found.items() if s <= stopped} == {s: v for s, v in undisturbed.items() if s <= stopped}
    # Sums in another order differ by some eps of float32, which a dozen steps of Adam enlarge.
    assert found == pytest.approx(undisturbed, rel=1e-3)


def test_a_chain_goes_on_until_a_job_is_through(undisturbed, site):
    last = site.submit("chain", "--chain", 3, until=3)
    first, second = (str(int(last) - k) for k in (2, 1))
    site.reach("chain", first, 3)
    signal_script(site, first)
    site.slurm.wait(first, "FAILED", Restarts="0")
    site.let_go_on("chain")
    site.complete(second, 0)
    site.slurm.wait(last, "CANCELLED")
    assert site.losses("chain") == undisturbed


def test_a_time_limit_leads_to_a_checkpoint_and_back_into_the_queue(limited, undisturbed, site):
    """The signal that Slurm sends before a time limit makes the job write a checkpoint and requeues it."""
    wait_until(lambda: site.slurm.fields(limited)["Restarts"] != "0", lambda: site.slurm.log(limited))
    site.let_go_on("limited")
    site.slurm.wait(limited, "COMPLETED")
    assert "training ended with code 75; go on: yes" in site.slurm.log(limited)
    assert site.losses("limited") == undisturbed
