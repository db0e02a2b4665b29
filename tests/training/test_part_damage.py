"""Tests of damaged parts of predictions: they are computed anew or rejected. `part_damage.py` tries more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.training.damage import campaign
from tests.training.part_damage import GOOD, MUTATIONS, Job, case_of, outcome


def test_no_damage_is_accepted():
    """No damaged part is accepted; a child process executes the cases, so that a hang or a crash is detected."""
    counted = campaign(4 * len(MUTATIONS), program="tests.training.part_damage")
    assert set(counted) <= GOOD and counted.total() == 4 * len(MUTATIONS), counted
    assert counted["anew"] > 30 and counted["refused"] > 2, counted


@pytest.mark.ranks(2)
def test_of_one_of_two_ranks(comm, working):
    """After damage to one rank's part, all ranks compute anew or raise the same error, for every mutation."""
    job, counted = Job(working, comm), Counter[str]()
    for number in range(3 * len(MUTATIONS)):
        name = case_of(job, 3, number)
        found = outcome(job)
        assert found in GOOD, f"{name}, case {number}: {found}"
        counted[found] += 1
    assert counted["anew"] > 20, counted


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("other", ["seed", "sources", "settings"])
def test_of_another_job_nothing_is_continued(comm, working, other):
    """A job does not continue parts of another run, of other source files of the samples, or of other settings."""
    job = Job(working, comm, others=False)
    changed = {"seed": job.exchange, "sources": job.touch, "settings": lambda: None}[other]
    sets = ["data.normalize=false"] if other == "settings" else []
    job.interrupt(job.out, 3)
    job.root(changed)
    computed = job.run(job.out, sets=[*job.sets, *sets])["computed"]
    assert computed == 8
    job.interrupt(job.out, 3)
    assert job.run(job.out)["computed"] == 2
