"""Tests of channels: data arrive for every pattern, and exchanges do not disturb each other."""

import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator
from halograd.comm.channel import ChannelSpec
from halograd.comm.transports import memory

pytestmark = pytest.mark.mpi(min_size=2)

REPETITIONS = 50


def pattern(size, seed, largest=5000):
    """Return the number of elements from rank p to rank q, the same on all ranks; about half of them are zero."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, largest, (size, size)) * (rng.random((size, size)) < 0.5)
    np.fill_diagonal(counts, 0)
    return counts


def open_channel(communicator, counts, dtype=np.float32, **options):
    rank = communicator.rank
    sends = {q: int(n) for q, n in enumerate(counts[rank]) if q != rank}
    recvs = {p: int(n) for p, n in enumerate(counts[:, rank]) if p != rank}
    return communicator.channel(sends, recvs, dtype, **options)


def message(source, target, step, count, dtype):
    """Return values that fit every dtype, and differ for each step and (nearly) each element."""
    return ((np.arange(count) + 7 * source + 3 * target + 11 * step) % 120).astype(dtype)


def pack(channel, rank, step):
    for peer, count in channel.send_counts.items():
        channel.send_buffer(peer, channel.slot)[:] = message(rank, peer, step, count, channel.dtype)


def check(channel, rank, step):
    for peer, count in channel.recv_counts.items():
        received = channel.recv_buffer(peer, channel.slot)
        np.testing.assert_array_equal(received, message(peer, rank, step, count, channel.dtype))


def exchange(channel, rank, steps, nap=lambda moment, step: None):
    """Pack, send and check the messages of several steps; `nap` is called before each of these moments of a step."""
    for step in range(steps):
        nap("pack", step)
        pack(channel, rank, step)
        channel.start()
        nap("finish", step)
        channel.finish()
        nap("read", step)
        check(channel, rank, step)
        nap("release", step)
        channel.release()


@pytest.mark.parametrize("seed", [0, 1])
def test_random_patterns_with_ranks_out_of_step(communicator, seed):
    rank = communicator.rank
    channel = open_channel(communicator, pattern(communicator.size, seed))
    draw = np.random.default_rng(100 * seed + rank)
    # Each rank is slow now and then: before packing, before waiting, before reading, before giving back.
    exchange(channel, rank, REPETITIONS, lambda moment, step: time.sleep(1e-3 if draw.random() < 0.15 else 0.0))


def test_one_way_only(communicator):
    counts = np.zeros((communicator.size, communicator.size), int)
    counts[0, 1:] = 3000
    channel = open_channel(communicator, counts)
    assert channel.peers == (tuple(range(1, communicator.size)) if communicator.rank == 0 else (0,))

    def nap(moment, step):
        if communicator.rank == 1 and step % 10 == 0 and moment == "pack":
            time.sleep(2e-3)  # a slow reader: the sender must not overwrite what it reads

    exchange(channel, communicator.rank, REPETITIONS, nap)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_several_channels_at_once_may_finish_in_any_order(communicator, order):
    rank = communicator.rank
    channels = [open_channel(communicator, pattern(communicator.size, seed)) for seed in (3, 4, 5)]
    for step in range(10):
        for number, channel in enumerate(channels):
            pack(channel, rank, step + number)
            channel.start()
        for number in order:
            channels[number].finish()
            check(channels[number], rank, step + number)
            channels[number].release()


DTYPES = [np.float64, np.float32, ml_dtypes.bfloat16, np.int64, np.int8, np.complex128]


@pytest.mark.parametrize(("dtype", "count"), [*((dtype, 37) for dtype in DTYPES), (np.float32, 300_000)])
def test_every_dtype_odd_counts_and_large_messages(communicator, dtype, count):
    channel = open_channel(communicator, np.full((communicator.size, communicator.size), count), dtype)
    assert channel.dtype == np.dtype(dtype)
    exchange(channel, communicator.rank, 4)


def test_buffers_stay_where_they_are_and_are_aligned(communicator):
    channel = open_channel(communicator, np.full((communicator.size, communicator.size), 5))
    peer = (communicator.rank + 1) % communicator.size

    def addresses():
        buffers = [f(peer, slot) for f in (channel.send_buffer, channel.recv_buffer) for slot in (0, 1)]
        return [b.ctypes.data for b in buffers]

    before = addresses()
    assert all(address % 64 == 0 for address in before)
    exchange(channel, communicator.rank, 3)
    assert addresses() == before
    assert not channel.recv_buffer(peer, 0).flags.writeable
    assert channel.send_buffer(peer, 0).shape == (5,)


class Between:
    """Double of `MPI` whose shared segments begin between two cache lines, as in Open MPI."""

    def __init__(self, wrapped, **replaced):
        self._wrapped = wrapped
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._wrapped, name)

    @classmethod
    def allocate(cls, size, *more):
        window = MPI.Win.Allocate_shared(size + 24, *more)

        def query(rank):
            memory, unit = window.Shared_query(rank)
            return memory.cast("B")[24:], unit

        return cls(window, Shared_query=query)


def test_buffers_are_aligned_wherever_mpi_begins_its_segments(comm, monkeypatch):
    monkeypatch.setattr(memory, "MPI", Between(MPI, Win=Between(MPI.Win, Allocate_shared=Between.allocate)))
    with Communicator(comm, "shared") as communicator:
        channel = open_channel(communicator, np.full((comm.size, comm.size), 40_000))
        for peer in channel.peers:
            buffers = [f(peer, slot) for f in (channel.send_buffer, channel.recv_buffer) for slot in (0, 1)]
            assert [buffer.ctypes.data % 64 for buffer in buffers] == [0] * 4
        exchange(channel, comm.rank, 3)


def test_a_channel_without_peers_is_free(communicator):
    exchange(communicator.channel({}, {}, np.float32), communicator.rank, 3)
    assert communicator.counters.snapshot() == {}


def test_messages_and_bytes_are_counted_by_kind(communicator):
    counts = pattern(communicator.size, seed=6)
    mine = counts[communicator.rank]
    halo = open_channel(communicator, counts)
    other = open_channel(communicator, counts, np.float64, kind="redistribute")
    for channel, repetitions in ((halo, 3), (other, 2)):
        exchange(channel, communicator.rank, repetitions)
    messages, elements = np.count_nonzero(mine), int(mine.sum())
    for kind, repetitions, itemsize in (("halo", 3, 4), ("redistribute", 2, 8)):
        booked = communicator.counters[kind]
        assert (booked.messages, booked.bytes) == (repetitions * messages, repetitions * elements * itemsize)
    communicator.counters.reset()
    assert communicator.counters["halo"].messages == 0


def test_recorder_is_told_of_travel_and_waiting(communicator):
    class Spans(list):
        def span(self, name, category, t0, t1):
            self.append((name, category, t0, t1))

    spans = communicator.instruments.recorder = Spans()
    channel = open_channel(communicator, np.full((communicator.size, communicator.size), 10), name="conv1 x")
    before = time.perf_counter()
    exchange(channel, communicator.rank, 1)
    after = time.perf_counter()
    assert [s[:2] for s in spans] == [("halo: conv1 x", "communication"), ("halo: conv1 x", "wait")]
    assert all(before <= t0 <= t1 <= after for _, _, t0, t1 in spans)


def test_the_order_of_calls_is_checked(communicator):
    channel = open_channel(communicator, np.full((communicator.size, communicator.size), 2), name="face")
    with pytest.raises(CommError, match=r"finish\(\): expected the channel to be started, got idle \(face\)"):
        channel.finish()
    channel.start()
    with pytest.raises(CommError, match=r"start\(\): expected the channel to be idle, got started"):
        channel.start()
    with pytest.raises(CommError, match=r"release\(\): expected the channel to be finished, got started"):
        channel.release()
    channel.finish()
    with pytest.raises(CommError, match="the order is start"):
        channel.start()
    channel.release()
    channel.close()
    channel.close()
    with pytest.raises(CommError, match="expected an open channel, got a closed one"):
        channel.start()


def test_an_exchange_that_fails_is_not_waited_for(communicator, monkeypatch):
    """After a fault of its transport, no wait is reported, and the exchange can be finished."""
    size = communicator.size
    channel, found = open_channel(communicator, np.full((size, size), 3)), []

    def fail():
        found.append(communicator.instruments.waiting)
        raise OSError("cable pulled")

    pack(channel, communicator.rank, 0)
    channel.start()
    with monkeypatch.context() as faulty, pytest.raises(OSError, match="cable pulled"):
        faulty.setattr(channel, "_finish", fail)
        channel.finish()
    assert found == [channel._meter] and communicator.instruments.waiting is None
    channel.finish()
    check(channel, communicator.rank, 0)
    channel.release()


def test_a_wrong_peer_or_slot_is_named(communicator):
    channel = open_channel(communicator, np.full((communicator.size, communicator.size), 2))
    with pytest.raises(CommError, match=rf"peer: expected one of \[.*\] \(send_counts\), got {communicator.rank}"):
        channel.send_buffer(communicator.rank, 0)
    with pytest.raises(CommError, match="slot: expected 0 or 1, got 2"):
        channel.recv_buffer((communicator.rank + 1) % communicator.size, 2)


def test_wrong_counts_on_one_rank_are_an_error_on_all(communicator):
    last = communicator.size - 1
    nobody = {communicator.size: 1} if communicator.rank == last else {}
    with pytest.raises(CommError, match=rf"rank {last}: send_counts: expected peers other than {last}"):
        communicator.channel(nobody, {}, np.float32)
    negative = {1: -1} if communicator.rank == 0 else {}
    with pytest.raises(CommError, match="rank 0: recv_counts: expected a number of elements >= 0 for peer 1, got -1"):
        communicator.channel({}, negative, np.float32)
    sends = {1: 5} if communicator.rank == 0 else {}
    recvs = {0: 4} if communicator.rank == 1 else {}
    with pytest.raises(CommError, match=r"rank 1: recv_counts: expected 5 elements from rank 0 .* got 4"):
        communicator.channel(sends, recvs, np.float32)
    channel = communicator.channel(sends, {0: 5} if communicator.rank == 1 else {}, np.float32)  # still of use
    exchange(channel, communicator.rank, 1)


@pytest.mark.parametrize("case", ["dtype", "itemsize", "none", "extra"])
def test_other_dtypes_or_numbers_of_channels_on_one_rank_are_an_error_on_all(communicator, case):
    last = communicator.rank == communicator.size - 1
    peers = [rank for rank in range(communicator.size) if rank != communicator.rank]
    specs = [ChannelSpec(dict.fromkeys(peers, 4), dict.fromkeys(peers, 4), "float32")]
    if case == "dtype" and last:
        specs = [ChannelSpec(specs[0].sends, specs[0].recvs, "int32")]
    elif case == "itemsize" and last:  # the same number of bytes
        specs = [ChannelSpec(dict.fromkeys(peers, 2), dict.fromkeys(peers, 2), "float64")]
    elif case == "none" and last:
        specs = []
    elif case == "extra" and last:
        specs.append(ChannelSpec({}, {}, "float32"))
    names = {"dtype": "dtype: expected float32 .* got int32", "itemsize": "dtype: expected float32 .* got float64",
             "none": "channels: expected 1 .* got 0", "extra": "channels: expected 1 .* got 2"}  # fmt: skip
    with pytest.raises(CommError, match=names[case]):
        communicator.channels(specs)


def test_closing_the_communicator_finishes_what_is_under_way(communicator):
    channel = open_channel(communicator, np.full((communicator.size, communicator.size), 100))
    channel.start()
    communicator.close()
    assert channel.closed
    communicator.close()


def test_memory_of_closed_channels_is_used_again(comm):
    with Communicator(comm, "shared") as communicator:
        counts = np.full((comm.size, comm.size), 100_000)
        addresses = set()
        for steps in range(5):
            channel = open_channel(communicator, counts)
            addresses.add(channel.send_buffer((comm.rank + 1) % comm.size, 0).ctypes.data)
            exchange(channel, comm.rank, steps)
            channel.close()
        assert len(addresses) == 1


def test_shared_buffers_are_the_peers_own(comm):
    """In shared memory receiving copies nothing: data that the peer writes after the exchange are visible at once."""
    with Communicator(comm, "shared") as communicator:
        channel = open_channel(communicator, np.full((comm.size, comm.size), 4))
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        channel.send_buffer(right, 1)[:] = 10 + comm.rank  # the slot that is not under way
        communicator.barrier()
        assert (channel.recv_buffer(left, 1) == 10 + left).all()
        communicator.barrier()


@pytest.mark.ranks(2, 3, 4, 6)
def test_auto_mixes_shared_memory_and_messages(comm, nodes_of_two):
    with Communicator(comm, "auto") as communicator:
        for seed in range(4):
            exchange(open_channel(communicator, pattern(comm.size, seed)), comm.rank, 10)
        near = [peer for peer in range(comm.size) if peer // 2 == comm.rank // 2]
        assert sorted(communicator._links.neighbors()) == near


@pytest.mark.ranks(3, 4)
def test_auto_counts_the_buffers_of_both_ways(comm, nodes_of_two):
    """Messages have a buffer per direction; in shared memory the sender has two, and the receiver none."""
    counts = np.zeros((comm.size, comm.size), int)
    counts[0, 1:], counts[1, 0], counts[2, 0] = 100, 7, 30
    with Communicator(comm, "auto") as communicator:
        before, channel = communicator.buffer_bytes, open_channel(communicator, counts)
        far = 100 * (comm.size - 2) + 30
        held = {0: 2 * 100 + far, 1: 2 * 7}.get(comm.rank, 100 + 30 * (comm.rank == 2))
        assert channel.buffer_bytes == communicator.buffer_bytes - before == held * channel.dtype.itemsize


@pytest.mark.ranks(3, 4)
def test_shared_and_emulated_refuse_several_nodes(comm, nodes_of_two):
    counts = np.full((comm.size, comm.size), 4)
    far = r"rank 0 .*expected peers on the same node, got rank 2 on another"
    with Communicator(comm, "shared") as communicator, pytest.raises(CommError, match=far):
        open_channel(communicator, counts)
    with Communicator(comm, "emulated:alpha=0,beta=0") as communicator:
        with pytest.raises(CommError, match=rf"expected all {comm.size} ranks on one machine"):
            open_channel(communicator, counts)
        with pytest.raises(CommError, match=rf"expected all {comm.size} ranks on one machine"):
            communicator.reduction(np.ones(3))


def test_too_little_shared_memory_is_an_error_not_a_bus_error(comm, monkeypatch):
    import os

    if comm.rank == 0:
        status = os.statvfs("/dev/shm")
        full = os.statvfs_result((*status[:4], 0, *status[5:10]))
        monkeypatch.setattr(os, "statvfs", lambda path: full)
    shortage = r"shared transport: .* use transport='mpi'"
    with Communicator(comm, "shared") as communicator, pytest.raises(CommError, match=shortage):
        open_channel(communicator, np.full((comm.size, comm.size), 4))


def test_channels_made_together_are_of_one_device(comm):
    """Channels that are opened together need the same kind of device on all ranks; a mixture is an error on all."""
    elsewhere = SimpleNamespace(is_host=False, name="a device")
    none = ChannelSpec({}, {}, np.float32)
    with Communicator(comm) as communicator:
        with pytest.raises(CommError, match=r"device: expected that of the first channel, .*, got a device"):
            communicator.channels([none, ChannelSpec({}, {}, np.float32, device=elsewhere)])
        spec = ChannelSpec({}, {}, np.float32, device=elsewhere) if comm.rank else none
        with pytest.raises(CommError, match="device: expected the host on all ranks or on none, got both"):
            communicator.channels([spec])
        assert communicator.channels([none, none])[1].peers == ()
