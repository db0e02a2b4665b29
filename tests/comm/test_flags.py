"""A rank that waits for a flag in shared memory: quick where the peer is near, hardly awake where it is late."""

import pytest

from halograd.comm import progress
from halograd.comm.transports import memory
from tests.support.clock import DrivenClock


class Peer:
    """A flag that is raised after so many looks at it, or at some time of a clock."""

    def __init__(self, clock, looks=0, seconds=0.0):
        self.clock, self.looks, self.seconds, self.looked = clock, looks, seconds, 0

    def __getitem__(self, index):
        self.looked += 1
        return int(self.looked > self.looks and self.clock.seconds >= self.seconds)


@pytest.fixture
def clock(monkeypatch):
    """Stands still but for naps; `offers` counts how often the core was offered to others."""
    made = DrivenClock(tick=0.0).drive(monkeypatch, progress)
    made.offers = []
    monkeypatch.setattr(progress.os, "sched_yield", lambda: made.offers.append(1))
    return made


def test_a_peer_that_is_near_is_awaited_without_a_nap(clock):
    memory._wait(Peer(clock, memory.SPINS - 1), 1)
    assert not clock.offers and not clock.naps
    memory._wait(Peer(clock, memory.SPINS + progress.OFFERS - 1), 1)
    assert len(clock.offers) == progress.OFFERS and not clock.naps


def test_a_peer_that_is_late_is_looked_for_now_and_then(clock):
    peer = Peer(clock, seconds=0.2)
    memory._wait(peer, 1)
    assert 0.2 <= clock.seconds <= 0.2 + progress.LONG_NAP
    assert len(clock.naps) <= progress.NAPS + 0.2 / progress.LONG_NAP
    assert peer.looked <= memory.SPINS + progress.OFFERS + len(clock.naps) + 1
