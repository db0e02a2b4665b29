"""Tests of the stages of hierarchical sums, with all ranks in one process, driven in any order."""

import numpy as np
import pytest

from halograd.comm import progress as module
from halograd.comm.counters import Instruments, Meter
from halograd.comm.errors import CommError
from halograd.comm.progress import Progress, Work
from halograd.comm.reduction import PIECE, Reduction
from halograd.comm.rounds import side_by_side
from halograd.comm.sums import Method
from halograd.comm.transport import Emulated
from halograd.comm.transports import emulated, nodes
from halograd.comm.transports.memory import FLAG_BYTES, Flags
from halograd.comm.transports.nodes import Attempt, NodeGroup, plan_by_nodes
from tests.support.clock import DrivenClock

BYTES = 8 * PIECE


class LocalBlock:
    """A `SharedBlock` in the memory of one process."""

    def __init__(self, memories, mine):
        self.memories, self.mine, self.ranks = memories, mine, len(memories)
        self.flags = Flags(self, dict.fromkeys(range(self.ranks), 0), mine)

    def segment(self, rank):
        return self.memories[rank]

    def view(self, rank, first, nbytes, dtype=np.uint8):
        return self.memories[rank][FLAG_BYTES + first : FLAG_BYTES + first + nbytes].view(dtype)

    def sync(self):
        pass

    def free(self):
        pass


class Driven(Progress):
    """Progress without a thread; the test calls its polls."""

    def _launch(self):
        pass

    def advance(self):
        """Do a piece of work if possible; return whether something was done."""
        return self._advance(tuple(self._pending))

    @property
    def idle(self):
        return not self._pending


def make(node_of, counts, seconds=0.0, in_background=True):
    """Return the progress driver of each rank, and its sums; `counts` are their numbers of elements."""
    rooms = [[np.zeros(BYTES, np.uint8) for _ in node_of] for _ in counts]
    several, drivers, sums = len(set(node_of)) > 1, [], []
    heads = [list(node_of).index(node) for node in sorted(set(node_of))]
    network = Emulated(seconds / {2: 1, 3: 3}[len(heads)], 0.0) if several else None
    for rank in range(len(node_of)):
        here = [r for r in range(len(node_of)) if node_of[r] == node_of[rank]]
        node_group, progress = NodeGroup(rank, here, heads if several else here[:1], network=network), Driven()
        drivers.append(progress)
        sums.append([])
        for memories, count in zip(rooms, counts):
            buffer = np.zeros(count)
            method = Method(by_nodes=True, in_background=in_background)
            planning = plan_by_nodes(buffer, method, node_group, progress)
            block = LocalBlock(memories, rank)
            (plan,) = side_by_side([planning], lambda requests, block=block: [block for _ in requests])
            meters = [Meter(Instruments(), kind, "sum", 1, buffer.nbytes) for kind in ("allreduce", "node")]
            sums[-1].append(Reduction(buffer, meters, plan))
    return drivers, sums


NODES = [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2)]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("node_of", NODES, ids=str)
def test_sums_are_right_in_whatever_order_ranks_advance(node_of, in_background):
    counts = (5, PIECE // 8 + 3, 1)
    rng = np.random.default_rng(1)
    drivers, sums = make(node_of, counts, in_background=in_background)
    for step in range(4):
        summands = rng.standard_normal((len(node_of), sum(counts)))
        # Ranks start their sums at different times, and none waits for the others before the next step.
        pending = [(rank, i) for i in range(len(counts)) for rank in range(len(node_of))]
        while pending or any(not s.summed for own in sums for s in own):
            rank = int(rng.integers(len(node_of)))
            mine = [item for item in pending if item[0] == rank]
            if mine and rng.integers(2):
                pending.remove(mine[0])
                total, start = sums[rank][mine[0][1]], sum(counts[: mine[0][1]])
                total.buffer[:] = summands[rank, start : start + total.buffer.size]
                total.start()
            drivers[rank].advance()
        expected = [np.zeros(n) for n in counts]
        for i, start in enumerate(np.cumsum((0, *counts[:-1]))):
            part = summands[:, start : start + counts[i]]
            nodes = [sum_in_order(part[[r for r in range(len(node_of)) if node_of[r] == n]]) for n in set(node_of)]
            expected[i] = sum_in_order(nodes)
        for rank in rng.permutation(len(node_of)):
            for i in rng.permutation(len(counts)):
                sums[rank][i].finish()
                np.testing.assert_array_equal(sums[rank][i].buffer, expected[i], err_msg=f"step {step}")
        assert all(driver.idle for driver in drivers)


def sum_in_order(parts):
    total = np.array(parts[0])
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_a_sum_may_begin_before_others_have_read_the_one_before(node_of):
    """A fast rank may begin the next sum; its deposit does not overwrite data that a slow rank still has to read."""
    drivers, sums = make(node_of, (3,))
    for rank, own in enumerate(sums):
        own[0].buffer[:] = rank
        own[0].start()
    for number in range(6):
        quick, slow = (0, 1) if number % 2 else (1, 0)
        while not sums[quick][0].summed:
            for driver in drivers:
                driver.advance()
        for rank in (quick, slow):
            sums[rank][0].finish()
            assert (sums[rank][0].buffer == 20 * number + 1).all()
            sums[rank][0].buffer[:] = 10 * (number + 1) + rank
            sums[rank][0].start()
            for _ in range(10):
                drivers[rank].advance()


def test_nothing_is_done_until_all_have_started():
    drivers, sums = make((0, 0), (3,))
    sums[0][0].start()
    assert drivers[0].advance()  # its summand
    assert not drivers[0].advance()
    assert not drivers[1].advance()
    assert not sums[0][0].summed
    assert not drivers[0].idle
    assert drivers[1].idle


def test_the_network_takes_its_time_from_the_last_node(monkeypatch):
    clock = DrivenClock(tick=0.0).drive(monkeypatch, emulated)
    drivers, sums = make((0, 1), (3,), seconds=1000.0)

    def advance():
        for _ in range(20):
            for driver in drivers:
                driver.advance()
        return any(own[0].summed for own in sums)

    clock.seconds = 100.0
    sums[0][0].start()
    advance()
    assert not sums[0][0].summed
    clock.seconds = 300.0
    sums[1][0].start()
    assert not advance()
    clock.seconds = 1299.0
    assert not advance()
    clock.seconds = 1300.0
    assert advance() and all(own[0].summed for own in sums)


class Late(DrivenClock):
    """Clock that starts the other rank's sums during a nap of the waiting rank."""

    def __init__(self, seconds, begin):
        super().__init__(tick=0.0)
        self.due, self.begin = seconds, begin

    def sleep(self, seconds):
        super().sleep(seconds)
        if self.seconds >= self.due:
            self.due = float("inf")
            self.begin()


def test_waiting_for_a_late_rank_costs_little(monkeypatch):
    """A poll examines one sum per stage, for any number of waiting sums; polls become rare while a rank is late."""
    drivers, sums = make((0, 0), (3,) * 20)
    looks, reached = [], Flags.reached
    monkeypatch.setattr(Flags, "reached", lambda self, *args: (looks.append(args), reached(self, *args))[1])

    def begin():
        looked.extend(looks)
        for total in sums[1]:
            total.start()
        while not (drivers[0].idle and drivers[1].idle):
            for driver in drivers:
                driver.advance()

    looked, clock = [], Late(0.3, begin).drive(monkeypatch, module)
    monkeypatch.setattr(module.os, "sched_yield", lambda: None)
    for total in sums[0]:
        total.start()
    sums[0][0].finish()
    assert len(clock.naps) <= module.NAPS + 0.3 / module.LONG_NAP + 1
    polls = module.OFFERS + len(clock.naps) + 20  # the last to deposit the summands
    assert 0 < len(looked) <= 5 * polls


def both_idle(drivers):
    while not all(driver.idle for driver in drivers):
        for driver in drivers:
            driver.advance()


def test_a_fault_is_raised_by_finish_and_others_go_on():
    """An error between nodes is raised on the first ranks of nodes; the other ranks do not wait forever."""
    failing, down = Attempt(Work([lambda: 1 / 0 if down else None])), [True]
    drivers, sums = make((0, 0), (3, 4))
    operation = sums[0][0]._plan.operation
    operation.runs = [[*stages[:4], failing, *stages[4:], Work([failing.raise_fault])] for stages in operation.runs]
    operation._last = 1
    for broken in (True, False):
        for own in sums:
            for total in own:
                total.buffer[:] = 1
                total.start()
        both_idle(drivers)
        if broken:
            with pytest.raises(CommError, match=r"reduction sum of 24 bytes failed: .*division by zero"):
                sums[0][0].finish()
            down.clear()
        else:
            sums[0][0].finish()
            assert (sums[0][0].buffer == 2).all() and (sums[1][0].buffer == 2).all()
        sums[0][1].finish()
        assert (sums[0][1].buffer == 2).all()
        sums[1][0].finish(), sums[1][1].finish()


def test_work_is_done_one_piece_at_a_time_and_over_again():
    count = PIECE // 8 + 1
    target, sources = np.zeros(count), [np.ones(count), np.full(count, 2.0)]
    work = nodes.Plain().add(sources, target)
    for _ in range(2):
        target[:] = 0
        assert not work.over()
        assert target[0] == 3
        assert target[-1] == 0
        assert work.over()
        assert (target == 3).all()
    nothing = Work([])
    assert nothing.over()
    assert nothing.over()
