"""Memory and cores of a rank: the minimum of the machine, its control groups and Slurm's allocation."""

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from halograd import limits, measuring
from halograd.cli.doctor import probe_threads
from halograd.comm import Communicator
from halograd.device import HOST, DeviceMemory
from halograd.kernels import get_backend
from halograd.limits import Cores, memory_size, usable_cores
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.profile import device
from halograd.perfmodel.profile.cache import Oversubscription
from halograd.training import log
from tests.training.steps import NETWORKS

MIB = 1 << 20
JOB = "system.slice/slurmstepd.scope/job_7"
STEP = f"/{JOB}/step_0/user/task_0"
V1 = "5:cpu,cpuacct:/other\n4:memory:{}\n"
V2 = "0::{}\n"


def tree(root, lines, limits):
    """Return a directory with ``proc/self/cgroup`` and these limits of control groups."""
    for name, text in {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{k}": v for k, v in limits.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("lines", "limits", "least"),
    [
        (V2.format("/"), {"memory.max": 40 * MIB}, 40),
        (V2.format(STEP), {f"{STEP[1:]}/memory.max": 9 * MIB, "memory.max": "max"}, 9),
        (V2.format(STEP), {f"{JOB}/memory.max": 8 * MIB, f"{STEP[1:]}/memory.max": "max"}, 8),
        (V2.format("/a/b"), {"a/memory.max": 5 * MIB, "a/b/memory.max": 7 * MIB}, 5),
        (V2.format("/a/b"), {"unified/a/memory.max": 5 * MIB}, 5),
        (V1.format("/slurm/uid_0/job_7"), {"memory/slurm/uid_0/memory.limit_in_bytes": 6 * MIB}, 6),
        (V1.format("/a"), {"memory/a/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.limit_in_bytes": 3 * MIB}, 3),
        (V1.format("/a") + V2.format("/b"), {"memory/a/memory.limit_in_bytes": 4 * MIB, "b/memory.max": 2 * MIB}, 2),
        (V1.format("/a"), {"other/memory.limit_in_bytes": MIB, "memory/a/memory.limit_in_bytes": 4 * MIB}, 4),
        (V2.format("/../../up"), {"memory.max": 11 * MIB}, 11),
    ],
)  # fmt: skip
def test_the_least_of_all_groups_above(tmp_path, lines, limits, least):
    root = tree(tmp_path, lines, limits)
    assert memory_size(1, root, {}) == least * MIB
    assert memory_size(4, root, {}) == least * MIB // 4


@pytest.mark.parametrize(
    ("variables", "least"),
    [
        ({"SLURM_MEM_PER_NODE": "20"}, 20),
        ({"SLURM_MEM_PER_CPU": "7", "SLURM_CPUS_ON_NODE": "3"}, 21),
        ({"SLURM_MEM_PER_NODE": "0"}, 40),
        ({"SLURM_MEM_PER_NODE": "90"}, 40),
        ({"SLURM_MEM_PER_NODE": "many", "SLURM_MEM_PER_CPU": "7"}, 40),
    ],
)
def test_what_slurm_gave(tmp_path, variables, least):
    root = tree(tmp_path, V2.format("/a"), {"a/memory.max": 40 * MIB})
    assert memory_size(1, root, variables) == least * MIB


def test_no_limit(tmp_path):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_size(1, tmp_path, {}) == whole
    assert memory_size(2, tree(tmp_path, V2.format("/"), {"memory.max": "max"}), {}) == whole // 2


@pytest.mark.ranks(1, 2)
def test_a_stored_machine_has_the_memory_of_this_job(shared, monkeypatch):
    """A job in a group of 2 GiB plans with 2 GiB, and not with the memory when the machine was measured."""
    path = shared / "machine.toml"
    for file in (path, measuring.record_path(path)):
        file.touch()
    stored = Machine.load("p100-cluster")
    monkeypatch.setattr(measuring.Profile, "load", lambda path: SimpleNamespace(machine=stored))
    monkeypatch.setattr(device, "memory_size", lambda ranks: 2048 * MIB // ranks)
    with Communicator(MPI.COMM_WORLD) as comm, get_backend("numpy") as kernels:
        comm.barrier()
        measured = measuring.Measuring(comm, kernels, NETWORKS["mesh"](), 4, folder=shared)
        assert measured.known_machine(path) == replace(stored, memory=2048 * MIB // comm.size)


@pytest.mark.ranks(1, 2)
def test_a_plan_for_devices_has_their_memory(monkeypatch):
    """On GPUs the host's memory is no limit: their own is."""
    monkeypatch.setattr(device, "memory_size", lambda ranks: 2048 * MIB // ranks)
    with Communicator(MPI.COMM_WORLD) as comm:
        gpu = SimpleNamespace(memory=lambda: DeviceMemory(5 * MIB, 3 * MIB, (80 + comm.rank) * MIB))
        assert device.rank_memory(comm, gpu) == 80 * MIB
        assert device.rank_memory(comm, HOST) == 2048 * MIB // comm.size


V1_CPU = "7:cpu,cpuacct:{}\n4:memory:/other\n"


def quota(folder, time, period=100_000):
    """Return the files of a CPU quota of a version 1 control group, by name."""
    return {f"{folder}/cpu.cfs_quota_us": time, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("lines", "limits", "cores"),
    [
        (V2.format("/"), {"cpu.max": "150000 100000"}, 1.5),
        (V2.format("/"), {"cpu.max": "max 100000"}, math.inf),
        (V2.format(STEP), {f"{STEP[1:]}/cpu.max": "max 100000", f"{JOB}/cpu.max": "40000 20000"}, 2),
        (V2.format("/a/b"), {"a/cpu.max": "300000 100000", "a/b/cpu.max": "700000 100000"}, 3),
        (V2.format("/a/b"), {"unified/a/cpu.max": "300000 100000"}, 3),
        (V1_CPU.format("/a/b"), quota("cpu/a", 250_000) | quota("cpu/a/b", -1), 2.5),
        (V1_CPU.format("/a"), quota("cpu,cpuacct/a", 400_000), 4),
        (V1_CPU.format("/a") + V2.format("/b"), quota("cpu/a", 400_000) | {"b/cpu.max": "200000 100000"}, 2),
        (V1_CPU.format("/a"), quota("cpu/a", 100_000, 0) | quota("cpu/other", 100_000), math.inf),
        (V2.format("/"), {"cpu.max": ""}, math.inf),
    ],
)  # fmt: skip
def test_the_least_quota_of_cores_of_all_groups_above(tmp_path, lines, limits, cores):
    assert usable_cores(tree(tmp_path, lines, limits), {}).quota == cores


def test_cores_without_a_limit_are_those_that_the_process_may_run_on(tmp_path):
    found = usable_cores(tmp_path, {})
    assert found == Cores(frozenset(os.sched_getaffinity(0))) and found.count == len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path, {"SLURM_CPUS_PER_TASK": "1"}).count == 1
    assert usable_cores(tmp_path, {"SLURM_CPUS_PER_TASK": "4096"}).count == len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path, {"SLURM_CPUS_PER_TASK": "many"}).task == math.inf


def test_a_process_reads_the_quota_once_and_its_cores_each_time(tmp_path, monkeypatch):
    """A process reads its control group's quota once, but its cores at each call, because they may change."""
    root = tree(tmp_path, V2.format("/"), {"cpu.max": "300000 100000"})
    assert usable_cores(root, {}).quota == 3
    monkeypatch.setattr(limits, "_read", lambda path: pytest.fail(f"{path} was read again"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5}, raising=False)
    assert usable_cores(root, {"SLURM_CPUS_PER_TASK": "4"}) == Cores(frozenset({5}), quota=3.0, task=4)


@pytest.mark.parametrize(
    ("processes", "count"),
    [
        ([Cores(frozenset(range(16)), quota=2.0)] * 4, 2),  # a container's quota for all processes
        ([Cores(frozenset(range(16)), quota=0.5)], 1),
        ([Cores(frozenset(range(16)), task=2)] * 4, 8),  # Slurm's cores for each task
        ([Cores(frozenset(range(4)), task=2)] * 4, 4),
        ([Cores(frozenset({0})), Cores(frozenset({1}), quota=9.0)], 2),
    ],
)
def test_cores_of_the_ranks_of_a_node(processes, count):
    assert Cores.together(processes) == count


@pytest.fixture
def container(monkeypatch, tmp_path):
    """Set a quota of one core, as `docker run --cpus=1` does, for all code that determines this process's cores."""
    root = tree(tmp_path, V2.format("/"), {"cpu.max": "100000 100000"})
    monkeypatch.setattr(usable_cores, "__defaults__", (root, {}))


def test_who_chooses_by_cores_sees_the_quota(container):
    several = SimpleNamespace(threads=1, device=SimpleNamespace(is_host=True))
    assert Oversubscription.here(2, several) == Oversubscription(2, cores=1)
    (finding,) = probe_threads([usable_cores()] * 2)
    assert finding.status == "warn" and finding.value.endswith("2 ranks on this node, 1 cores")
    some = len(os.sched_getaffinity(0))
    assert log._cores().endswith(" (1 at a time)") == (some > 1)
