"""The stages of sums by nodes, with ranks that live in one process and are driven in any order."""

import numpy as np
import pytest

from halograd.comm.counters import Instruments, Meter
from halograd.comm.errors import CommError
from halograd.comm.transports import accumulator as module
from halograd.comm.transports import node_sum
from halograd.comm.transports.accumulator import PIECE, TALLIES, Accumulator, Pieces, Tally, Team
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.node_sum import Across, EmulatedAcross, NodeSum, Room
from tests.support.clock import DrivenClock

BYTES = 8 * PIECE


class LocalPlaces:
    """As `Places`, in memory of one process."""

    def __init__(self, memories, mine):
        self.memories, self.mine = memories, mine

    def views(self, first, nbytes):
        return [memory[first : first + nbytes] for memory in self.memories]

    def view(self, rank, first, nbytes):
        return self.memories[rank][first : first + nbytes]

    def sync(self):
        pass

    def give_back(self):
        pass


class Nobody:
    """A progress thread that does nothing by itself."""

    def employ(self, worker):
        pass


def team_of(node_of, rank, memories):
    ranks = range(len(node_of))
    here = [r for r in ranks if node_of[r] == node_of[rank]]
    heads = [list(node_of).index(node) for node in sorted(set(node_of))]
    return Team(LocalPlaces(memories, rank), here, heads)


def make(node_of, counts, seconds=0.0, in_background=True):
    """Per rank its accumulator, and its sums of these numbers of elements."""
    tallies = [np.zeros(TALLIES * ALIGNMENT, np.uint8) for _ in node_of]
    rooms = [[np.zeros(BYTES, np.uint8) for _ in node_of] for _ in counts]
    accumulators, sums = [], []
    for rank in range(len(node_of)):
        team = team_of(node_of, rank, tallies)
        accumulators.append(Accumulator(team, Nobody()))
        sums.append([])
        for memories, count in zip(rooms, counts):
            buffer = np.zeros(count)
            several = len(set(node_of)) > 1
            totals = (EmulatedAcross if several else Across).totals_needed
            room = Room(lambda nbytes, m=memories, r=rank: LocalPlaces(m, r), team, buffer, totals)
            way = EmulatedAcross(team, room, seconds) if several else Across(team, room)
            meters = [Meter(Instruments(), kind, "sum", 1, buffer.nbytes) for kind in ("allreduce", "node")]
            sums[-1].append(NodeSum(buffer, *meters, accumulators[-1], room, way, in_background))
    return accumulators, sums


NODES = [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2)]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("node_of", NODES, ids=str)
def test_sums_are_right_in_whatever_order_ranks_advance(node_of, in_background):
    counts = (5, PIECE // 8 + 3, 1)
    rng = np.random.default_rng(1)
    accumulators, sums = make(node_of, counts, in_background=in_background)
    for step in range(4):
        summands = rng.standard_normal((len(node_of), sum(counts)))
        # Ranks start their sums at different times, and none waits for the others before the next step.
        pending = [(rank, i) for i in range(len(counts)) for rank in range(len(node_of))]
        while pending or any(not s.done for own in sums for s in own):
            rank = int(rng.integers(len(node_of)))
            mine = [item for item in pending if item[0] == rank]
            if mine and rng.integers(2):
                pending.remove(mine[0])
                total, start = sums[rank][mine[0][1]], sum(counts[: mine[0][1]])
                total.buffer[:] = summands[rank, start : start + total.buffer.size]
                total.start()
            accumulators[rank].advance()
        expected = [np.zeros(n) for n in counts]
        for i, start in enumerate(np.cumsum((0, *counts[:-1]))):
            part = summands[:, start : start + counts[i]]
            nodes = [sum_in_order(part[[r for r in range(len(node_of)) if node_of[r] == n]]) for n in set(node_of)]
            expected[i] = sum_in_order(nodes)
        for rank in rng.permutation(len(node_of)):
            for i in rng.permutation(len(counts)):
                sums[rank][i].finish()
                np.testing.assert_array_equal(sums[rank][i].buffer, expected[i], err_msg=f"step {step}")
        assert all(accumulator.idle for accumulator in accumulators)


def sum_in_order(parts):
    total = np.array(parts[0])
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_a_sum_may_begin_before_others_have_read_the_one_before(node_of):
    """What the quick rank deposits for the next one does not touch what the slow one has yet to read."""
    accumulators, sums = make(node_of, (3,))
    for rank, own in enumerate(sums):
        own[0].buffer[:] = rank
        own[0].start()
    for number in range(6):
        quick, slow = (0, 1) if number % 2 else (1, 0)
        while not sums[quick][0].done:
            for accumulator in accumulators:
                accumulator.advance()
        for rank in (quick, slow):
            sums[rank][0].finish()
            assert (sums[rank][0].buffer == 20 * number + 1).all()
            sums[rank][0].buffer[:] = 10 * (number + 1) + rank
            sums[rank][0].start()
            for _ in range(10):
                accumulators[rank].advance()


def test_nothing_is_done_until_all_have_started():
    accumulators, sums = make((0, 0), (3,))
    sums[0][0].start()
    assert accumulators[0].advance()  # its summand
    assert not accumulators[0].advance()
    assert not accumulators[1].advance()
    assert not sums[0][0].done
    assert not accumulators[0].idle
    assert accumulators[1].idle


def test_the_network_takes_its_time_from_the_last_node(monkeypatch):
    clock = DrivenClock(tick=0.0).drive(monkeypatch, node_sum)
    accumulators, sums = make((0, 1), (3,), seconds=1000.0)

    def advance():
        for _ in range(20):
            for accumulator in accumulators:
                accumulator.advance()
        return any(own[0].done for own in sums)

    clock.seconds = 100.0
    sums[0][0].start()
    advance()
    assert not sums[0][0].done
    clock.seconds = 300.0
    sums[1][0].start()
    assert not advance()
    clock.seconds = 1299.0
    assert not advance()
    clock.seconds = 1300.0
    assert advance() and all(own[0].done for own in sums)


class Late(DrivenClock):
    """Begins something in a nap of the rank that waits for it."""

    def __init__(self, seconds, begin):
        super().__init__(tick=0.0)
        self.due, self.begin = seconds, begin

    def sleep(self, seconds):
        super().sleep(seconds)
        if self.seconds >= self.due:
            self.due = float("inf")
            self.begin()


def test_waiting_for_a_late_rank_costs_little(monkeypatch):
    """However many sums wait for it, a poll looks at one per stage; and polls become rare."""
    accumulators, sums = make((0, 0), (3,) * 20)
    looks, reached = [], Tally.reached
    monkeypatch.setattr(Tally, "reached", lambda self, count: (looks.append(count), reached(self, count))[1])

    def begin():
        looked.extend(looks)
        for total in sums[1]:
            total.start()
        while not (accumulators[0].idle and accumulators[1].idle):
            for accumulator in accumulators:
                accumulator.advance()

    looked, clock = [], Late(0.3, begin).drive(monkeypatch, module)
    monkeypatch.setattr(module.os, "sched_yield", lambda: None)
    for total in sums[0]:
        total.start()
    sums[0][0].finish()
    assert len(clock.naps) <= module.NAPS + 0.3 / module.LONG_NAP + 1
    polls = module.OFFERS + len(clock.naps) + 20  # the last to deposit the summands
    assert 0 < len(looked) <= 5 * polls


def test_a_fault_is_raised_by_finish_and_others_go_on():
    accumulators, sums = make((0, 0), (3, 4))
    way = sums[0][0]._way
    way.send, sent = lambda turn: 1 / 0, way.send
    for own in sums:
        for total in own:
            total.buffer[:] = 1
            total.start()
    while not (accumulators[0].idle and accumulators[1].idle):
        for accumulator in accumulators:
            accumulator.advance()
    with pytest.raises(CommError, match=r"reduction sum of 24 bytes failed: .*division by zero"):
        sums[0][0].finish()
    sums[0][1].finish()
    assert (sums[0][1].buffer == 2).all()
    sums[1][0].finish(), sums[1][1].finish()
    way.send = sent
    for own in sums:
        own[0].buffer[:] = 1
        own[0].start()
    while not (accumulators[0].idle and accumulators[1].idle):
        for accumulator in accumulators:
            accumulator.advance()
    for own in sums:
        own[0].finish()
        assert (own[0].buffer == 2).all()


def test_pieces_are_done_one_at_a_time_and_over_again():
    count = PIECE // 8 + 1
    target, sources = np.zeros(count), [np.ones(count), np.full(count, 2.0)]
    pieces = Pieces(target, sources)
    for _ in range(2):
        target[:] = 0
        assert not pieces.advance()
        assert target[0] == 3
        assert target[-1] == 0
        assert pieces.advance()
        assert (target == 3).all()
    nothing = Pieces(target, ())
    assert nothing.advance()
    assert nothing.advance()
