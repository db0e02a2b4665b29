"""The emulated network: what arrives, when, and at what cost of CPU."""

import time

import numpy as np
import pytest

from halograd.comm import Communicator

pytestmark = pytest.mark.mpi(min_size=2)

ALPHA, BETA = 0.05, 1e-7
COUNT = 50_000  # float32: 200 kB, 20 ms
TRAVEL = ALPHA + BETA * 4 * COUNT
# Other work on the machine delays whoever sleeps; a message that is early is always an error.
SLACK = 0.03


@pytest.fixture
def network(comm):
    with Communicator(comm, f"emulated:alpha={ALPHA},beta={BETA}") as made:
        yield made


def ring(communicator):
    right, left = (communicator.rank + 1) % communicator.size, (communicator.rank - 1) % communicator.size
    return communicator.channel({right: COUNT}, {left: COUNT}, np.float32), right, left


def best(times):
    return min(times)


def test_a_message_takes_alpha_plus_beta_bytes_and_no_cpu(network):
    channel, right, left = ring(network)
    seconds, share = [], []
    for step in range(3):
        channel.send_buffer(right, channel.slot)[:] = network.rank + step
        network.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        channel.start()
        channel.finish()
        seconds.append(time.perf_counter() - begin)
        share.append((time.process_time() - cpu) / seconds[-1])
        assert (channel.recv_buffer(left, channel.slot) == left + step).all()
        channel.release()
    # The barrier lets a neighbor start a little before this rank does.
    assert all(t >= TRAVEL - 0.02 for t in seconds)
    assert best(seconds) < TRAVEL + SLACK
    assert best(share) < 0.1


def test_a_late_sender_delays_its_message(network):
    channel, right, _ = ring(network)
    late, slowest, share = 0.2, [], []
    for _ in range(3):
        channel.send_buffer(right, channel.slot)[:] = 1
        network.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        if network.rank == 0:
            time.sleep(late)
        channel.start()
        channel.finish()
        seconds, used = time.perf_counter() - begin, time.process_time() - cpu
        channel.release()
        if network.rank == 1:
            assert seconds >= late + TRAVEL - 0.02
        share.append(used / seconds)
        slowest.append(network.allreduce_scalar(seconds, "max"))
    assert best(slowest) < late + TRAVEL + 5 * SLACK
    assert best(share) < 0.1


def test_messages_travel_while_the_main_thread_computes(network):
    channel, right, left = ring(network)
    exposed = []
    for _ in range(3):
        channel.send_buffer(right, channel.slot)[:] = 3
        network.barrier()
        channel.start()
        end = time.perf_counter() + 2 * TRAVEL
        while time.perf_counter() < end:
            np.dot(np.ones((50, 50)), np.ones((50, 50)))
        before = time.perf_counter()
        channel.finish()
        exposed.append(time.perf_counter() - before)
        assert (channel.recv_buffer(left, channel.slot) == 3).all()
        channel.release()
    assert best(exposed) < 0.1 * TRAVEL


def test_the_recorder_sees_the_travel_not_the_wait(network):
    class Spans(list):
        def span(self, name, category, t0, t1):
            self.append((category, t1 - t0))

    channel, _, _ = ring(network)
    network.barrier()
    spans = network.recorder = Spans()
    channel.start()
    time.sleep(2 * TRAVEL)
    channel.finish()
    channel.release()
    (_, travel), (_, wait) = spans
    assert TRAVEL - 0.02 <= travel < 2 * TRAVEL
    assert wait < travel


def test_an_all_reduce_takes_the_time_of_a_ring_from_the_last_start(network):
    ranks, buffer = network.size, np.ones(20_000)
    ring_time = 2 * (ranks - 1) * ALPHA + 2 * (ranks - 1) / ranks * BETA * buffer.nbytes
    reduction, late = network.reduction(buffer), 0.1
    seconds, share = [], []
    for step in range(3):
        network.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        if network.rank == ranks - 1:
            time.sleep(late)
        reduction.start()
        reduction.finish()
        seconds.append(time.perf_counter() - begin)
        share.append((time.process_time() - cpu) / seconds[-1])
        assert (buffer == float(ranks) ** (step + 1)).all()
    assert all(t >= late + ring_time - 0.02 for t in seconds)
    assert network.allreduce_scalar(best(seconds), "min") < late + ring_time + 3 * SLACK
    assert best(share) < 0.1


def test_all_reduces_travel_while_the_main_thread_computes(network):
    reductions = [network.reduction(np.ones(10_000)) for _ in range(3)]
    exposed = []
    for step in range(3):
        for reduction in reductions:
            reduction.start()
        time.sleep(2 * (network.size - 1) * ALPHA + 0.1)
        before = time.perf_counter()
        for reduction in reductions:
            reduction.finish()
            assert (reduction.buffer == float(network.size) ** (step + 1)).all()
        exposed.append(time.perf_counter() - before)
    assert network.allreduce_scalar(best(exposed), "min") < 0.02


def test_without_latency_it_is_as_fast_as_messages(comm):
    with Communicator(comm, "emulated:alpha=0,beta=0") as network:
        channel, right, left = ring(network)
        begin = time.perf_counter()
        for step in range(20):
            channel.send_buffer(right, channel.slot)[:] = step
            channel.start()
            channel.finish()
            assert (channel.recv_buffer(left, channel.slot) == step).all()
            channel.release()
        assert time.perf_counter() - begin < 20 * TRAVEL
