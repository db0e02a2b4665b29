"""Memory of a rank: the least of the machine, its control groups and what Slurm gave."""

import os

import pytest

from halograd.perfmodel.profile.device import memory_size

MIB = 1 << 20
JOB = "system.slice/slurmstepd.scope/job_7"
STEP = f"/{JOB}/step_0/user/task_0"
V1 = "5:cpu,cpuacct:/other\n4:memory:{}\n"
V2 = "0::{}\n"


def tree(root, lines, limits):
    """A directory with ``proc/self/cgroup`` and these limits of control groups."""
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
