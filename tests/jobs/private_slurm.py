"""A private Slurm on this machine: munged, slurmctld and several slurmd, as children of the tests.

It needs no systemd, no cgroups, nothing in /etc and no data base, and works as root and as an ordinary user. Nodes
are as large as the configuration says, not as the machine is; their GPUs are symbolic links to /dev/null.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from getpass import getuser
from pathlib import Path

from tests.harness import jobs
from tests.harness.limits import LIMIT, grace, scaled, wait_until

SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
#: Variable that marks all processes of a node's daemon.
NODE = "HALOGRAD_TEST_NODE"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={expire}
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MinJobAge=3600
# MPICH names shared memory after the job: no two Slurms of this machine may give the same numbers.
FirstJobId={first}
KillWait=60
CompleteWait=0
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=1,batch_sched_delay=0,sched_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=8 RealMemory=4000 Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL DefaultTime=10 PriorityTier=10 PreemptMode=OFF
"""


def available() -> bool:
    """Return whether the required programs are installed."""
    return all(shutil.which(program, path=SBIN) for program in ("sbatch", "slurmctld", "slurmd", "munged"))


class CannotStart(Exception):
    """Error: a daemon has ended by itself; the message is its last output."""


class PrivateSlurm:
    """Private Slurm: its daemons, and the commands of a user.

    Parameters
    ----------
    folder
        Folder for configuration, logs and state; its path must be short (it contains a socket) and accessible to
        others.
    nodes, gpus
        Number of nodes n1, n2, ..., and of GPUs on each.
    """

    def __init__(self, folder: Path, nodes: int = 2, gpus: int = 2) -> None:
        self.folder, self.nodes = folder, nodes
        self.mark = jobs.new_mark()
        self.environment = jobs.job_environment(self.mark, {"SLURM_CONF": str(folder / "slurm.conf")})
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._segments: set[str] = set()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._configure(gpus)

    # -- daemons -------------------------------------------------------------------------------

    def _configure(self, gpus: int) -> None:
        for name in ("state", "spool", "dev"):
            (self.folder / name).mkdir(parents=True)
        port = _free_ports(self.nodes + 1)
        text = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            user=getuser(),
            folder=self.folder,
            port=port,
            ports=f"{port + 1}-{port + self.nodes}",
            first=secrets.randbelow(60_000_000) + 1,
            nodes=self.nodes,
            gpus=gpus,
            expire=min(60, round(scaled(5))),  # delay of a requeued job [s]
        )
        (self.folder / "slurm.conf").write_text(text)
        for i in range(gpus):
            (self.folder / "dev" / f"nvidia{i}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/nvidia[0-{gpus - 1}]\n")
        # No control groups: without a mount slurmd would end. Nothing here uses them.
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are ready. Raises CannotStart."""
        folder = self.folder
        munge = ["--foreground", "--force", "--num-threads=2", f"--key-file={folder}/munge.key"]
        munge += [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        self._start("munged", *munge, f"--seed-file={folder}/munge.seed")
        self._await((folder / "munge.socket").exists, "the socket of munged")
        self._start("slurmctld", "-D", "-c")
        for node in range(1, self.nodes + 1):
            self.start_node(f"n{node}")
        self._watcher.start()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, and wait until jobs can run there. Raises CannotStart."""
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        self._start("slurmd", "-D", "-N", node, name=node, extra={NODE: node})
        self._await(lambda: self.call("sinfo", "-hNn", node, "-o%t", check=False).split()[:1] == ["idle"], node)

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; raise CannotStart if a daemon ends meanwhile."""

        def over() -> bool:
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    lines = (self.folder / f"{name}.out").read_text(errors="replace").splitlines()
                    raise CannotStart(f"{name} ended with code {daemon.returncode}: {'; '.join(lines[-3:])}")
            return condition()

        wait_until(over, what)

    def _start(self, program: str, *options: str, name: str = "", extra: Mapping[str, str] | None = None) -> None:
        path = shutil.which(program, path=SBIN)
        assert path is not None
        with open(self.folder / f"{name or program}.out", "ab") as out:
            self._daemons[name or program] = subprocess.Popen(
                [path, *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self.environment, "PATH": SBIN, **(extra or {})},
                start_new_session=True,
            )

    def lose_node(self, node: str) -> None:
        """Simulate a power failure: kill the daemon and everything on the node. Slurm does not know yet."""
        pids = self.processes(f"{NODE}={node}") + self.processes(f"SLURMD_NODENAME={node}")
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a running slurmstepd would report the end of its tasks
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        if node in self._daemons:
            self._daemons.pop(node).wait()

    def fail_node(self, node: str) -> None:
        """Simulate a power failure that Slurm detects."""
        self.lose_node(node)
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        self._stopping.set()
        with suppress(subprocess.SubprocessError):
            for _ in range(40):
                if not self.call("squeue", "-h", check=False).strip():
                    break
                self.call("scancel", f"--user={getuser()}", check=False)
                time.sleep(0.1)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        jobs.end(self.mark)
        jobs.remove(self._segments)

    # -- commands of a user --------------------------------------------------------------------

    def call(self, *command: object, check: bool = True, cwd: Path | None = None, **extra: str) -> str:
        """Return the output of a command, including errors."""
        done = subprocess.run(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=LIMIT,
            cwd=cwd,
            env={**self.environment, **extra},
        )
        assert done.returncode == 0 or not check, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def fields(self, job: str) -> dict[str, str]:
        """Return Slurm's fields of a job."""
        text = self.call("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def wait(self, job: str, *states: str, **wanted: str) -> None:
        """Wait until a job has one of these states (default: any final one) and its other fields have these values."""

        def reached() -> bool:
            found = self.fields(job)
            return found["JobState"] in (states or ENDED) and all(found.get(k) == v for k, v in wanted.items())

        def what() -> str:
            found = self.fields(job)
            here = f"{found['JobState']}, {found['Reason']}, {found['Restarts']} restarts; {self.log(job)}"
            return f"job {job} to be {states or ENDED} {wanted}, got {here}"

        wait_until(reached, what)

    def log(self, job: str) -> str:
        """Return the output of a job."""
        path = Path(self.fields(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    # -- leftovers -----------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Return the command lines and shared memory of jobs that still exist after the grace time."""
        deadline = time.monotonic() + grace()
        while (found := self.job_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found + jobs.await_removal(self._segments)

    def _watch(self) -> None:
        """Collect the names of the shared memory of jobs while they run."""
        before = jobs.names_in_shared_memory()
        while not self._stopping.wait(0.2):
            with suppress(OSError):  # a test of this process may have left no file to open
                if jobs.names_in_shared_memory() - before - self._segments:
                    self._segments |= jobs.segments(self.processes("SLURM_JOB_ID="))

    def job_processes(self) -> list[str]:
        """Return the command lines of live processes of jobs."""
        found = []
        for pid in self.processes("SLURM_JOB_ID="):
            with suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    def processes(self, variable: str) -> list[int]:
        """Return the processes of this Slurm with this text in their environment.

        A slurmstepd has no mark: it writes its title over the beginning of its environment.
        """
        own = [f"\0{jobs.MARK}={self.mark}".encode(), f"\0SLURM_CONF={self.folder}/slurm.conf".encode()]
        found = []
        for path in jobs.PROC.glob("[0-9]*/environ"):
            with suppress(OSError):
                environment = b"\0" + path.read_bytes()
                if f"\0{variable}".encode() in environment and any(text in environment for text in own):
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid != os.getpid()]


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive unused ports."""
    for first in range(26000 + os.getpid() % 500 * 8, 32000):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, s in enumerate(sockets):
                s.bind(("127.0.0.1", first + i))
            return first
        except OSError:
            continue
        finally:
            for s in sockets:
                s.close()
    raise RuntimeError("expected free ports below 32000")
