"""Tests of the watchdog with dead or stalled ranks: all ranks of a job in this process, with a simulated clock.

Further tests check the tree of their connections.
"""

import re
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.training import watch
from halograd.training.watch import ANSWERS, GRACE, INTERVAL, TURN, Place, Tree, Watch, describe_stall
from halograd.training.watchdog import oom_kills

PATIENCE = 30.0
TICK = 0.5  # [s]
FANOUT = 2  # so that few ranks have a tree of several levels
CUT_OFF = TURN * (FANOUT + 2)  # for ranks behind a frozen one to give up


class Rank:
    """Simulated rank: its station, and its unread messages."""

    def __init__(self, job, rank):
        self.job, self.rank, self.inbox, self.moves, self.alive, self.frozen = job, rank, deque(), 0, True, False

    def send(self, rank, message):
        if rank in self.job.joined[self.rank] and self.job.ranks[rank].alive:
            self.job.ranks[rank].inbox.append(("heard", self.rank, message))

    def state(self):
        return self.moves if self.job.watched else None

    def place(self, idle):
        return Place(self.moves, "forward", f"layer of {self.rank}", "loss" if self.job.waits else "", "x.py:1", idle)

    def say(self, rank, cause):
        self.job.said.append((self.rank, rank, cause))

    def log(self, rank, cause):
        self.job.logged.append((self.rank, rank, cause))

    def end(self):
        """End the rank; unlike a launcher, this does not end the other ranks."""
        self.leave()

    def leave(self):
        self.job.kill(self.rank, "its process is gone")


class Job:
    """Simulated job: messages arrive at once, except at frozen ranks, and main threads progress at every tick."""

    def __init__(self, size, per_node=3, fanout=FANOUT, patience=PATIENCE):
        self.tree = Tree([f"n{rank // per_node}" for rank in range(size)], fanout)
        self.now, self.watched, self.waits, self.moving = 1000.0, True, True, True
        self.said, self.logged = [], []
        self.joined = [{*self.tree.ups(rank), *self.tree.downs(rank)} for rank in range(size)]
        self.ranks = [Rank(self, rank) for rank in range(size)]
        self.watches = [
            Watch(self.tree, rank, self.joined, patience, self.ranks[rank], lambda: self.now) for rank in range(size)
        ]

    @property
    def alive(self):
        return [rank.rank for rank in self.ranks if rank.alive]

    def kill(self, rank, cause="killed"):
        """Kill a rank; its peers get the end of their connections."""
        self.ranks[rank].alive = False
        for other in self.joined[rank]:
            self.ranks[other].inbox.append(("ended", rank, cause))

    def take_leave(self, rank):
        self.kill(rank, None)

    def freeze(self, *ranks):
        """Stop the processes of these ranks, so that all others finally wait for them."""
        for rank in ranks:
            self.ranks[rank].frozen, self.moving = True, False

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            for rank in self.ranks:
                if rank.alive and not rank.frozen:
                    rank.moves += self.moving
                    self.watches[rank.rank].tick()
            self.deliver()

    def deliver(self):
        while ready := [rank for rank in self.ranks if rank.inbox and rank.alive and not rank.frozen]:
            for rank in ready:
                event, sender, what = rank.inbox.popleft()
                getattr(self.watches[rank.rank], event)(sender, what)
                if rank.alive:
                    self.watches[rank.rank].tick()

    def assert_said(self, speaker, rank, cause):
        """Check that one rank has printed one message, and that all ranks except frozen ones have ended."""
        ((mouth, culprit, text),) = self.said
        assert (mouth, culprit) == (speaker, rank) and cause in text
        assert self.logged == self.said
        assert [rank for rank in self.alive if not self.ranks[rank].frozen] == []


SIZES = [2, 3, 4, 11, 40]


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_sent_while_all_is_well(size):
    job = Job(size)
    job.ranks[0].send = job.ranks[-1].send = None  # not to be called
    job.run(3 * PATIENCE)
    assert job.said == [] and job.alive == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_frozen_rank_is_named(size):
    """The first head that is not frozen names a frozen rank once, and the exchange in which the others wait."""
    for victim in range(size):
        job = Job(size)
        job.run(10)
        job.freeze(victim)
        job.run(PATIENCE + TURN * (victim == 0) + ANSWERS + 2 * INTERVAL + CUT_OFF)
        speaker = job.tree.order[1] if victim == 0 else 0
        job.assert_said(speaker, victim, "no progress for 0.5 min: it does not respond")
        assert f"rank {speaker} on {job.tree.hosts[speaker]}: step 21, forward" in job.said[0][2]


def test_when_a_frozen_rank_0_is_reported():
    job = Job(4, per_node=4, fanout=16)
    job.freeze(0)
    job.run(PATIENCE)
    assert job.said == []
    job.run(TURN + ANSWERS + 3 * TICK)
    assert len(job.said) == 1
    assert all(f"rank {rank} on n0: step" in job.said[0][2] for rank in (1, 2, 3))


def test_ranks_that_stall_one_after_the_other():
    """Later reports of stalled ranks do not restart the round of requests."""
    job = Job(40)
    job.freeze(0)
    for rank in range(1, 40):
        job.run(TICK)
        for late in job.ranks[rank + 1 :]:
            late.moves += 1
    job.run(PATIENCE - 39 * TICK)
    assert job.said == []
    job.run(TURN + ANSWERS + 4 * TICK)
    assert [(speaker, rank) for speaker, rank, _ in job.said] == [(job.tree.order[1], 0)]


@pytest.mark.parametrize("count", [2, 3])
def test_frozen_heads(count):
    """The first live head prints the message; if all heads are frozen, there is none."""
    job = Job(11)
    heads = job.tree.order[:3]
    job.freeze(*heads[:count])
    job.run(PATIENCE + 2 * TURN + ANSWERS + 2 * INTERVAL + CUT_OFF)
    if count == 2:
        job.assert_said(heads[2], 0, "it does not respond")
    else:
        assert job.said == []


def test_a_head_that_wakes_up_while_it_is_asked():
    """A head that resumes during a round of requests causes no second message."""
    for after in range(int((TURN + ANSWERS) / TICK) - 1):
        job = Job(11)
        job.freeze(0)
        job.run(PATIENCE + 2 * TICK + after * TICK)
        assert job.said == []
        job.ranks[0].frozen = False
        job.run(2 * TURN + ANSWERS + CUT_OFF)
        assert len(job.said) == 1 and job.alive == []


def test_a_rank_that_waits_for_none_is_named():
    """If all ranks respond, the rank that is in no exchange is named as the cause."""
    job = Job(11)
    job.run(5)
    job.moving = False
    job.ranks[7].place = lambda idle: Place(3, "data", "", "", "loader.py:103", idle)
    job.run(PATIENCE + 2 * INTERVAL + GRACE)
    job.assert_said(0, 7, "no progress for 0.5 min: step 4, data, not in an exchange (at loader.py:103)")


@pytest.mark.parametrize("hours", [0.02, 1, 48])
def test_a_suspended_job(hours):
    """A job whose processes are all suspended and continued later, some of them earlier, causes no report."""
    job = Job(11)
    job.run(10.1)
    job.moving = False  # in a kernel that takes long
    job.run(PATIENCE / 2)
    job.now += 3600 * hours
    job.freeze(0, 4, 9)
    job.run(2)
    for rank in job.ranks:
        rank.frozen = False
    job.run(PATIENCE / 2 - 6 * INTERVAL)
    assert job.said == []
    job.moving = True
    job.run(2 * PATIENCE)
    assert job.said == [] and job.alive == list(range(11))


def test_a_lock_that_is_held_for_less_than_the_limit():
    """A call that locks the interpreter of rank 0 causes no report while the others wait for less than the limit."""
    job = Job(4)
    job.run(10)
    job.freeze(0)
    job.run(PATIENCE - INTERVAL)
    job.ranks[0].frozen, job.moving = False, True
    job.run(2 * PATIENCE)
    assert job.said == []


def test_no_limit():
    job = Job(4, patience=0.0)
    job.freeze(0)
    job.run(10 * PATIENCE)
    assert job.said == []


def test_ranks_that_are_not_watched_yet():
    """Planning and building have no time limit, because ranks are not watched yet."""
    job = Job(4)
    job.watched = job.moving = False
    job.run(3 * PATIENCE)
    assert job.said == []


@pytest.mark.parametrize("size", SIZES)
def test_a_killed_rank_is_named(size):
    """A killed rank causes one message at once, and all ranks end, even if the launcher ends none."""
    for victim in range(size):
        job = Job(size)
        job.run(10)
        job.kill(victim)
        job.run(2 * TICK)
        assert [(rank, cause) for _, rank, cause in job.said] == [(victim, "killed")]
        job.run(GRACE + TURN)
        job.assert_said(job.tree.order[1] if victim == 0 else 0, victim, "killed")


def test_a_node_with_several_heads_is_killed():
    """If all ranks of a node are killed at once, one message names one of them."""
    for node in range(4):
        job = Job(11)
        victims = [rank for rank, host in enumerate(job.tree.hosts) if host == f"n{node}"]
        for victim in victims:
            job.kill(victim, "its node no longer responds")
        job.run(GRACE + 4 * TURN)
        ((speaker, culprit, _),) = job.said
        assert culprit in victims and speaker == next(rank for rank in job.tree.order if rank not in victims)
        assert job.alive == []


def test_a_killed_rank_while_rank_0_is_frozen():
    job = Job(11)
    job.freeze(0)
    job.kill(7)
    job.run(PATIENCE + TURN + CUT_OFF + 2)
    job.assert_said(job.tree.order[1], 7, "killed")


@pytest.mark.parametrize("rank", [0, 1, 3, 10])
def test_a_rank_with_an_error_of_its_own(rank):
    """A rank prints its own error, the first head logs it, and the remaining ranks end after a while."""
    job = Job(11)
    job.run(10)
    job.watches[rank].dying("ValueError: x", True)
    job.take_leave(rank)
    job.run(GRACE - INTERVAL)
    assert job.said == [] and job.logged == [(0, rank, "ValueError: x")]
    assert len(job.alive) == 10
    job.run(2 * INTERVAL)
    assert job.said == [] and len(job.logged) == 1 and job.alive == []


def test_an_error_that_is_not_logged():
    job = Job(4)
    job.watches[2].dying("UserError: x", False)
    job.take_leave(2)
    job.run(GRACE + INTERVAL)
    assert job.said == job.logged == [] and job.alive == []


def test_ranks_that_have_left_are_not_blamed():
    """Ranks that have left are not named, nor those reached only through them; a rank left alone names itself."""
    job = Job(11)
    job.run(10)
    for rank in range(10, 0, -1):
        job.take_leave(rank)
        job.run(TICK)
    assert job.said == []
    job.moving = job.waits = False
    job.run(PATIENCE + ANSWERS + 2 * INTERVAL + CUT_OFF)
    job.assert_said(0, 0, "no progress for 0.5 min: step 31")


def test_leaving_with_some_still_there():
    """After an inner rank has left, rank 0 names neither it nor ranks reached through it, which end by themselves."""
    job = Job(40)
    job.run(10)
    far = [rank for rank in job.tree.order if rank and rank not in job.joined[0]]
    parent = next(rank for rank in far if job.tree.children(rank))
    job.take_leave(parent)
    job.run(1)
    job.moving = False
    culprit = next(rank for rank in far if rank > parent and rank not in job.tree.children(parent))
    job.ranks[culprit].place = lambda idle: Place(1, "data", "", "", "loader.py:103", idle)
    job.run(PATIENCE + ANSWERS + 2 * INTERVAL)
    assert [(speaker, rank) for speaker, rank, _ in job.said if speaker == 0] == [(0, culprit)]


def test_a_rank_that_cannot_reach_any():
    """A rank without connections reports itself; neither it nor the others name each other."""
    job = Job(4)
    for rank in range(3):
        job.joined[rank].discard(3)
    job.joined[3].clear()
    job.watches = [Watch(job.tree, r, job.joined, PATIENCE, job.ranks[r], lambda: job.now) for r in range(4)]
    job.moving = job.waits = False
    job.run(PATIENCE + 2 * TICK)
    assert [(speaker, rank) for speaker, rank, _ in job.said] == [(3, 3), (0, 0)]


def place(step=4, waiting="", idle=60.0, layer="conv1"):
    return Place(step, "forward", layer, waiting, "flags.py:88", idle)


STALLS = [
    ([place(waiting="halo: conv1"), place(), place(waiting="loss")], 1, "step 5, forward of layer 'conv1', not in an"),
    ([place(waiting="halo: conv1"), place(), None], 2, "it does not respond"),
    ([place(waiting="loss"), place(step=3, waiting="loss")], 1, "step 4, .* waiting for 'loss' .at flags.py:88"),
    ([place(idle=60, layer=""), place(idle=90)], 1, "'conv1'.*The others: rank 0 on n0: step 5, forward, not in"),
    ([place(waiting="halo")] * 7 + [place()], 7, "The others: rank 0 .*rank 3 on n3: [^;]*; and 3 more"),
]


@pytest.mark.parametrize(("places", "culprit", "text"), STALLS, ids=["idle", "mute", "behind", "longest", "many"])
def test_who_holds_up_the_others(places, culprit, text):
    rank, told = describe_stall([f"n{r}" for r in range(len(places))], dict(enumerate(places)), 90.0)
    assert rank == culprit and told.startswith("no progress for 1.5 min: ") and re.search(text, told)


def test_counting_kills_for_lack_of_memory():
    assert oom_kills() >= 0


# -- the tree -------------------------------------------------------------------------------------


def joined(tree):
    """Return the connected ranks of each rank of a tree."""
    return [{*tree.ups(rank), *tree.downs(rank)} for rank in range(len(tree.hosts))]


@pytest.mark.parametrize("fanout", [1, 2, 3, watch.FANOUT])
@settings(max_examples=20)
@given(per_node=st.integers(1, 9), size=st.integers(1, 100))
def test_connections(fanout, per_node, size):
    """Connections of a tree are known at both ends, are few, and connect all ranks."""
    tree = Tree([f"n{rank // per_node}" for rank in range(size)], fanout)
    assert sorted(tree.order) == list(range(size)) and tree.order[0] == 0
    heads = [rank for rank in range(size) if tree.is_head(rank)]
    assert len(heads) == min(size, fanout + 1) == len({*heads}) and tree.ups(0) == []
    downs = [tree.downs(rank) for rank in range(size)]
    for rank in range(size):
        assert [up for up in range(size) if rank in downs[up]] == sorted(tree.ups(rank))
        assert len(tree.ups(rank)) + len(tree.downs(rank)) <= 2 * fanout
        assert set(tree.children(rank)) <= set(tree.downs(rank))
        if rank in heads:
            assert {*tree.ups(rank), *tree.downs(rank)} >= {*heads} - {rank}
        else:
            assert len(tree.ups(rank)) == 1 and rank in tree.children(tree.ups(rank)[0])
    assert tree.reached(size - 1, joined(tree)) == tree.order


@settings(max_examples=20)
@given(per_node=st.integers(1, 40), size=st.integers(1, 300))
def test_heads_are_on_many_hosts(per_node, size):
    hosts = [f"n{rank // per_node}" for rank in range(size)]
    tree = Tree(hosts)
    heads = [hosts[rank] for rank in range(size) if tree.is_head(rank)]
    assert len(set(heads)) == min(len(set(hosts)), watch.FANOUT + 1)


def test_sixteen_thousand_ranks():
    """With 16,384 ranks each rank needs few connections, and none is far from a head."""
    tree = Tree([f"n{rank // 64}" for rank in range(16_384)])
    connections = joined(tree)
    assert max(map(len, connections)) == 2 * watch.FANOUT < 1024 // 8
    assert tree.reached(0, connections) == tree.order
    depths = []
    for rank in range(0, 16_384, 100):
        depth = 0
        while not tree.is_head(rank):
            (rank,), depth = tree.ups(rank), depth + 1
        depths.append(depth)
    assert max(depths) == 3


def test_what_is_reached():
    """Ranks reached only through a rank that has left, or without a connection, are not reached."""
    tree = Tree(["n"] * 11, fanout=2)
    connections = joined(tree)
    assert (tree.children(0), tree.children(3), tree.ups(9), tree.downs(1)) == ([3, 4], [9, 10], [3], [2, 5, 6])
    assert tree.reached(0, connections, without=[3]) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert tree.reached(9, connections, without=[3]) == [9]
    assert tree.reached(8, connections, without=[0, 1]) == [2, 7, 8]
    lonely = [set() if rank == 4 else others - {4} for rank, others in enumerate(connections)]
    assert (tree.reached(0, lonely), tree.reached(4, lonely)) == ([0, 1, 2, 3, 5, 6, 7, 8, 9, 10], [4])
