"""A rank that waits for a flag in shared memory: quick where the peer is near, hardly awake where it is late."""

import pytest

from halograd.comm.transports import flags
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
    made = DrivenClock(tick=0.0).drive(monkeypatch, flags)
    made.offers = []
    monkeypatch.setattr(flags.os, "sched_yield", lambda: made.offers.append(1))
    return made


def test_a_peer_that_is_near_is_awaited_without_a_nap(clock):
    flags._wait(Peer(clock, flags.SPINS - 1), 1)
    assert not clock.offers and not clock.naps
    flags._wait(Peer(clock, flags.SPINS + flags.OFFERS - 1), 1)
    assert len(clock.offers) == flags.OFFERS and not clock.naps


def test_a_peer_that_is_late_is_looked_for_now_and_then(clock):
    peer = Peer(clock, seconds=0.2)
    flags._wait(peer, 1)
    assert 0.2 <= clock.seconds <= 0.2 + flags.LONG_NAP
    assert len(clock.naps) <= flags.NAPS + 0.2 / flags.LONG_NAP
    assert peer.looked <= flags.SPINS + flags.OFFERS + len(clock.naps) + 1
