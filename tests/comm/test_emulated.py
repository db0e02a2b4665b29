"""Tests of the emulated network: messages, their arrival times, and sleeping ranks. Tests drive one clock per rank."""

import numpy as np
import pytest

from halograd.comm import Communicator
from halograd.comm.transports import emulated

pytestmark = pytest.mark.mpi(min_size=2)

ALPHA, BETA = 0.05, 1e-7
COUNT = 50_000  # float32: 200 kB, 20 ms
TRAVEL = ALPHA + BETA * 4 * COUNT
# Readings of the clock in one exchange, and the last nap, together [s].
READINGS = 5e-5


@pytest.fixture
def clock(network_clock):
    return network_clock


@pytest.fixture
def network(comm, clock):
    with Communicator(comm, f"emulated:alpha={ALPHA},beta={BETA}") as made:
        yield made


def ring(communicator):
    right, left = (communicator.rank + 1) % communicator.size, (communicator.rank - 1) % communicator.size
    return communicator.channel({right: COUNT}, {left: COUNT}, np.float32), right, left


def awake(clock, seconds):
    """Return the time [s] in which the rank did not sleep, and forget its naps."""
    asleep, clock.naps = sum(clock.naps), []
    return seconds - asleep


def test_a_message_takes_alpha_plus_beta_bytes_and_no_cpu(network, clock):
    channel, right, left = ring(network)
    for step in range(3):
        channel.send_buffer(right, channel.slot)[:] = network.rank + step
        begin = clock.seconds = 10.0 * step
        channel.start()
        channel.finish()
        seconds = clock.seconds - begin
        assert TRAVEL <= seconds < TRAVEL + READINGS
        assert len(clock.naps) <= 1 + emulated.LATE / emulated.NAP
        assert awake(clock, seconds) < emulated.LATE + READINGS
        assert (channel.recv_buffer(left, channel.slot) == left + step).all()
        channel.release()


def test_a_late_sender_delays_its_message(network, clock):
    channel, right, left = ring(network)
    late = 0.2
    for step in range(3):
        channel.send_buffer(right, channel.slot)[:] = 1
        begin = 10.0 * step
        clock.seconds = begin + late * (network.rank == 0)
        channel.start()
        channel.finish()
        channel.release()
        if network.rank == 0:
            assert clock.naps == [] and clock.seconds < begin + late + READINGS
        else:
            expected = TRAVEL + late * (left == 0)
            assert expected <= clock.seconds - begin < expected + READINGS


def test_messages_travel_while_the_main_thread_computes(network, clock):
    channel, right, left = ring(network)
    for _ in range(3):
        channel.send_buffer(right, channel.slot)[:] = 3
        network.barrier()
        clock.seconds = 0.0
        channel.start()
        clock.seconds += 2 * TRAVEL
        channel.finish()
        assert clock.naps == [] and clock.seconds < 2 * TRAVEL + READINGS
        assert (channel.recv_buffer(left, channel.slot) == 3).all()
        channel.release()


def test_the_recorder_sees_the_travel_not_the_wait(network, clock):
    class Spans(list):
        def span(self, name, category, t0, t1):
            self.append((category, t1 - t0))

    channel, _, _ = ring(network)
    spans = network.instruments.recorder = Spans()
    channel.start()
    clock.seconds += 2 * TRAVEL
    channel.finish()
    channel.release()
    (_, travel), (_, wait) = spans
    assert travel == pytest.approx(TRAVEL, abs=READINGS)
    assert wait < READINGS


@pytest.mark.parametrize("count", [20_000, 800_000], ids=["small", "large"])
def test_an_all_reduce_takes_the_time_of_the_faster_algorithm_from_the_last_start(network, clock, count):
    ranks, buffer, late = network.size, np.ones(count), 0.1
    ring = 2 * (ranks - 1) * ALPHA + 2 * (ranks - 1) / ranks * BETA * buffer.nbytes
    doubling = {2: 1, 3: 3, 4: 2}[ranks] * (ALPHA + BETA * buffer.nbytes)
    assert (ring < doubling) is (ranks > 2 and count == 800_000)
    seconds_of_sum = min(ring, doubling)
    reduction = network.reduction(buffer)
    for step in range(3):
        begin = 10.0 * step
        clock.seconds = begin + late * (network.rank == ranks - 1)
        reduction.start()
        reduction.finish()
        seconds = clock.seconds - begin
        assert late + seconds_of_sum <= seconds < late + seconds_of_sum + READINGS
        assert awake(clock, seconds) < late + emulated.LATE + READINGS
        assert (buffer == float(ranks) ** (step + 1)).all()


def test_all_reduces_travel_while_the_main_thread_computes(network, clock):
    reductions = [network.reduction(np.ones(10_000)) for _ in range(3)]
    computed = 2 * (network.size - 1) * ALPHA + 0.1
    for step in range(3):
        clock.seconds = 10.0 * step
        for reduction in reductions:
            reduction.start()
        clock.seconds += computed
        before = clock.seconds
        for reduction in reductions:
            reduction.finish()
            assert (reduction.buffer == float(network.size) ** (step + 1)).all()
        assert clock.naps == [] and clock.seconds - before < 3 * READINGS


def test_without_latency_nothing_is_waited_for(comm, clock):
    with Communicator(comm, "emulated:alpha=0,beta=0") as network:
        channel, right, left = ring(network)
        for step in range(20):
            clock.seconds = 10.0 * step
            channel.send_buffer(right, channel.slot)[:] = step
            channel.start()
            channel.finish()
            assert (channel.recv_buffer(left, channel.slot) == step).all()
            assert clock.seconds - 10.0 * step < READINGS
            channel.release()
