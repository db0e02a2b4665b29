"""Jobs with faults at random: does each end on all ranks in time, and name the rank; is it resumed exactly?

    python benchmarks/faults.py --jobs 40
    python benchmarks/faults.py --launch "mpiexec -n {ranks}" --launch "mpirun.openmpi -n {ranks}" \\
        --launch "srun --mpi=pmi2 --wait=5 --nodes=2 -n {ranks}"

Each job trains a small network on 2 to 4 ranks. One rank, drawn at random, is killed (SIGKILL), stopped (SIGSTOP),
hangs, is in a native call with or without the interpreter's lock, crashes, or raises an error, at a random step in a
random activity. Under srun a node is lost too: all its processes are killed, and Slurm does not know. Launchers are
used in turn. The output has, per job, the time from the fault until no rank is left, and the line that names the rank.
Then the run is resumed, and its losses are compared with those of an undisturbed run.

srun runs in a Slurm that this program starts (`tests/jobs/private_slurm.py`), with two nodes on this machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halograd.data import generate
from halograd.report.status import read_record, status_of
from halograd.training.log import read_log
from halograd.training.watchdog import STALLS, read_positions
from tests.harness import jobs
from tests.jobs.private_slurm import PrivateSlurm

CONFIG = """\
[model]
name = "mesh"
resolution = 32
widths = [8, 12]
convs = 1
decoder = true
[data]
path = "mesh.h5"
validation = 0.25
[optimizer]
kind = "adamw"
[schedule]
kind = "cosine"
learning_rate = 0.01
[training]
epochs = 4
batch = 4
[backend]
kernels = "numpy"
[output]
checkpoint_steps = 2
progress = false
"""
STEPS = 12
FAULTS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": lambda: time.sleep(10**6),
    "native": lambda: ctypes.CDLL(None).sleep(10**6),
    "locked": lambda: ctypes.PyDLL(None).sleep(10**6),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "error": lambda: 1 // 0,
}
LOST = "lost"  # all processes of the rank's node are killed, its daemon of Slurm too
PHASES = ("forward", "backward", "write")
MARGIN = 10.0  # [s]


@dataclass(frozen=True)
class Job:
    """A job: the command that launches it, its number of ranks, and its fault."""

    launch: str
    ranks: int
    fault: str
    victim: int
    phase: str
    step: int


def draw(launches: Sequence[str], jobs: int, seed: int) -> list[Job]:
    """Return jobs with faults at random: launchers in turn, and each with every fault that it permits."""
    rng = random.Random(seed)
    faults = [(launch, fault) for launch in launches for fault in (*[LOST] * launch.startswith("srun"), *FAULTS)]
    drawn = list[Job]()
    for number in range(jobs):
        launch, fault = faults[number % len(faults)]
        ranks, phase = rng.randint(2, 4), rng.choice(PHASES)
        victim = 0 if phase == "write" else rng.randrange(ranks)  # rank 0 writes
        drawn.append(Job(launch, ranks, fault, victim, phase, rng.randrange(3, STEPS - 1)))
    return drawn


def run_rank(folder: Path, job: Job, command: Sequence[str]) -> None:
    """Run ``halograd train`` as one rank of a job, with the fault on its victim (-1: none)."""
    from mpi4py import MPI

    from halograd.cli import main
    from halograd.training.checkpoints import CheckpointFolder
    from halograd.training.executor import Executor

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file
    node = os.environ.get("SLURMD_NODENAME", "")
    if node:  # ranks with equal names of nodes would share the process that monitors them, which survives no node
        platform.node = lambda: node
    MPI.COMM_WORLD.Barrier()
    rank, by_mpi = MPI.COMM_WORLD.rank, listening()
    steps = [0]

    def disturbed(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(self, Executor):
                steps[0] = self.heartbeat.step
            if steps[0] >= job.step and name == job.phase:
                note(listening() - by_mpi)
                if rank == job.victim:
                    (folder / "fault.new").write_text(repr(time.time()))
                    (folder / "fault.new").rename(folder / "fault")
                    FAULTS[job.fault]() if job.fault in FAULTS else time.sleep(10**6)
            return call(self, *arguments, **options)

        setattr(owner, name, method)

    def note(sockets: int) -> None:
        path = folder / f"rank-{rank}.new"
        path.write_text(json.dumps({"pid": os.getpid(), "node": node, "sockets": sockets}))
        path.rename(folder / f"rank-{rank}.json")

    if job.victim >= 0:
        note(0)
        disturbed(Executor, "forward")
        disturbed(Executor, "backward")
        disturbed(CheckpointFolder, "write")
    sys.argv = ["halograd", *command]
    main()


def listening() -> int:
    """Return the number of this process's sockets on which TCP connections are accepted."""
    tables = [Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    accepting = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return sum(one.is_symlink() and os.readlink(one) in accepting for one in Path("/proc/self/fd").iterdir())


def launch(job: Job, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a job as its ranks (`run_rank`) with these arguments of ``halograd``; its output goes to a file."""
    own = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    own |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if job.launch.startswith("srun"):
        own["MPIR_CVAR_CH4_NETMOD"] = "ofi"  # as in our scripts: addresses of UCX are too long for PMI-2
    if "openmpi" in job.launch:
        own["MPI4PY_LIBMPI"] = "libmpi.so.40"
    command = [*shlex.split(job.launch.format(ranks=job.ranks)), sys.executable, __file__, "--rank", str(folder)]
    with (folder / "output.txt").open("a") as out:
        return subprocess.Popen(
            [*command, json.dumps(vars(job)), *map(str, arguments)],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **own},
        )


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def losses(run: Path) -> dict[int, float]:
    """Return the logged losses by step."""
    return {entry["step"]: entry["loss"] for entry in read_log(run / "log.jsonl", "step")}


def settings(job: Job, run: Path, data: Path) -> list[object]:
    """Return the arguments of ``halograd`` for a run of a job."""
    values = [f"output.directory={run}", f"strategy.height={job.ranks}", f"data.path={data}"]
    return ["train", data.with_name("mesh.toml"), "--resume", *(word for value in values for word in ("--set", value))]


def line_of(job: Job, ranks: Sequence[int], output: str, run: Path) -> str:
    """Return the line that names one of these ranks: halograd's, or the launcher's if it was killed; or no text."""
    for rank in ranks:
        own = [line for line in output.splitlines() if re.match(rf"halograd: rank {rank} of {job.ranks}\b", line)]
        if own:
            return own[-1]
        position = read_positions(run / STALLS).get(rank)
        if position is not None and position.line.startswith("Fatal"):
            return f"rank {rank} on {position.host}: {position.line}"
        process = "none" if position is None else str(position.process)
        launchers = rf"process rank {rank} with PID|task {rank}: (?:Killed|Seg)|PID {process} RUNNING AT"
        for line in output.splitlines():
            if re.search(launchers, line):
                return line
    return ""


def disturb(job: Job, run: Path, data: Path, minutes: float, slurm: PrivateSlurm | None) -> dict[str, Any]:
    """Run a job to its fault; return the time until all ranks have ended, the line that names it, and its sockets."""
    folder = run.with_name(f"{run.name}.job")
    folder.mkdir()
    process = launch(job, folder, *settings(job, run, data), "--set", f"run.stall_minutes={minutes}")
    while not (folder / "fault").exists():
        assert process.poll() is None, (folder / "output.txt").read_text()
        time.sleep(0.02)
    begin = float((folder / "fault").read_text())
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(job.ranks)]
    victims, node = [job.victim], ranks[job.victim]["node"]
    if job.fault == LOST and slurm is not None:
        victims = [number for number, rank in enumerate(ranks) if rank["node"] == node]
        begin = time.time()
        slurm.lose_node(node)
    while any(alive(rank["pid"]) for rank in ranks) and time.time() < begin + 120:
        time.sleep(0.02)
    seconds = time.time() - begin
    left = [rank["pid"] for rank in ranks if alive(rank["pid"])]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if job.fault == LOST and slurm is not None:  # srun waits until Slurm knows
        slurm.fail_node(node)
        slurm.start_node(node)
    code = process.wait(60)
    status = status_of(read_record(run))
    return {
        "seconds": seconds,
        "left": len(left),
        "sockets": sum(rank["sockets"] for rank in ranks),
        "code": code,
        "line": line_of(job, victims, (folder / "output.txt").read_text(), run),
        "status": f"{status.state}: {status.detail}",
    }


@contextmanager
def slurm_for(launches: Sequence[str]) -> Iterator[PrivateSlurm | None]:
    """Start a Slurm with two nodes if a launcher is srun, and use it in this process."""
    if not any(command.startswith("srun") for command in launches):
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="halograd-slurm-"))  # its path must be short: it has a socket
    folder.chmod(0o755)
    slurm = PrivateSlurm(folder)
    try:
        slurm.start()
        os.environ["SLURM_CONF"] = slurm.environment["SLURM_CONF"]
        os.environ[jobs.MARK] = slurm.mark  # by which it finds the processes of its nodes
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the jobs, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="first of these jobs to run")
    parser.add_argument("--last", type=int, help="first of these jobs not to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.1, help="run.stall_minutes")
    parser.add_argument("--launch", action="append", help="command of a launcher, with {ranks}")
    arguments = parser.parse_args()
    launches = arguments.launch or [f"{Path(sys.executable).with_name('mpiexec')} -n {{ranks}}"]
    good, whole = 0, dict[tuple[str, int], dict[int, float]]()
    slowest = dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder, slurm_for(launches) as slurm:
        data = Path(folder) / "mesh.h5"
        data.with_name("mesh.toml").write_text(CONFIG)
        generate(data, 32, 16, 1)
        drawn = draw(launches, arguments.jobs, arguments.seed)[arguments.first : arguments.last]
        for number, job in enumerate(drawn, arguments.first):
            key, undisturbed = (job.launch, job.ranks), replace(job, victim=-1)
            if key not in whole:
                run = Path(folder) / f"whole-{len(whole)}"
                run.mkdir()
                code = launch(undisturbed, run, *settings(job, run, data)).wait(300)
                assert code == 0, (run / "output.txt").read_text()
                whole[key] = losses(run)
            run = Path(folder) / f"job-{number}"
            end = disturb(job, run, data, arguments.minutes, slurm)
            resumed = launch(undisturbed, run, *settings(job, run, data)).wait(300)
            exact = resumed == 0 and losses(run) == whole[key] and len(whole[key]) == STEPS
            limit = 60 * arguments.minutes + MARGIN
            fine = end["seconds"] <= limit and not (end["left"] or end["sockets"]) and end["line"] and exact
            good += bool(fine)
            slowest.setdefault(job.launch, []).append(end["seconds"])
            print(
                f"{number:3d} {Path(job.launch.split()[0]).name:14s} {job.ranks} ranks, rank {job.victim} "
                f"{job.fault:7s} in {job.phase:8s} of step {job.step + 1:2d}: {end['seconds']:5.1f} s of {limit:g}, "
                f"{end['left']} left, {end['sockets']} sockets, code {end['code']}, "
                f"resumed {'exactly' if exact else 'OTHERWISE'}; {'good' if fine else 'BAD'}\n"
                f"      {end['line'][:150]}\n      {end['status'][:150]}",
                flush=True,
            )
            if not fine:
                print(Path(f"{run}.job/output.txt").read_text(), (run / "output.txt").read_text(), flush=True)
    for command, seconds in slowest.items():
        print(f"{command}: {len(seconds)} jobs, the slowest ended in {max(seconds):.1f} s")
    print(f"{good} of {len(drawn)} jobs are good")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]), Job(**json.loads(sys.argv[3])), sys.argv[4:])
    else:
        main()
