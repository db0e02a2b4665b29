"""Messages and sums of device arrays over every transport: the results are right, and all work is ordered."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator
from halograd.comm.codec import UNCHANGED, BFloat16
from halograd.comm.gpu import streams
from halograd.comm.sums import shards
from halograd.dtensor import Groups, group_of
from tests.support import fake_cuda
from tests.support.clock import TICK, DrivenClock
from tests.support.fake_device import FakeDevice
from tests.support.fake_nccl import FakeCommunicator
from tests.support.gpu_ranks import gpu_ranks

TRANSPORTS = ["nccl", "mpi-cuda", "mpi-staged"]


def ring(size, rank, count):
    """Return counts: every rank sends `count` elements to the next rank, and one more to the rank after that."""
    sends, recvs = {}, {}
    for step, more in ((1, 0), (2, 1)):
        if size > step:
            sends[(rank + step) % size] = count + more
            recvs[(rank - step) % size] = count + more
    return sends, recvs


def values(sender, receiver, count, run):
    return np.arange(count) + 1000.0 * sender + 100.0 * receiver + 7 * run


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_arrive_run_after_run(transport, monkeypatch):
    with gpu_ranks(monkeypatch, transport) as r:
        comm, device = r.comm, r.device
        sends, recvs = ring(comm.size, comm.rank, 100)
        channel = comm.channel(sends, recvs, "float32", device=device)
        found = {peer: device.zeros((5, count), "float32") for peer, count in recvs.items()}
        for run in range(5):
            slot = channel.slot
            for peer, count in sends.items():
                source = device.array(values(comm.rank, peer, count, run), "float32")
                np.copyto(channel.send_buffer(peer, slot), source)
            channel.start()
            channel.finish()
            for peer in recvs:
                np.copyto(found[peer][run], channel.recv_buffer(peer, slot))
            channel.release()
        for peer, count in recvs.items():
            expected = [values(peer, comm.rank, count, run) for run in range(5)]
            np.testing.assert_array_equal(found[peer].get(), np.array(expected, np.float32))
        assert r.choice.name == transport


@pytest.mark.ranks(2, 3)
def test_an_exchange_that_fails_is_sent_once(monkeypatch):
    """After a fault of the host channel on one rank, the exchange is finished there without sending again."""
    with gpu_ranks(monkeypatch, "mpi-staged") as r:
        comm, device = r.comm, r.device
        sends, recvs = ring(comm.size, comm.rank, 100)
        channel = comm.channel(sends, recvs, "float32", device=device)

        def fail():
            raise OSError("cable pulled")

        for run in range(3):
            for peer, count in sends.items():
                source = device.array(values(comm.rank, peer, count, run), "float32")
                np.copyto(channel.send_buffer(peer, channel.slot), source)
            channel.start()
            if comm.rank == 0 and run == 1:
                with monkeypatch.context() as faulty, pytest.raises(OSError, match="cable pulled"):
                    faulty.setattr(channel._inner, "_finish", fail)
                    channel.finish()
            channel.finish()
            for peer, count in recvs.items():
                found = channel.recv_buffer(peer, channel.slot).get()
                np.testing.assert_array_equal(found, values(peer, comm.rank, count, run).astype(np.float32))
            channel.release()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_channels_under_way_at_once(transport, monkeypatch):
    with gpu_ranks(monkeypatch, transport) as r:
        comm, device = r.comm, r.device
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        forth = comm.channel({after: 3}, {before: 3}, "float64", device=device)
        back = comm.channel({before: 300}, {after: 300}, "float64", device=device)
        for run in range(4):
            forth.send_buffer(after, forth.slot).fill(10 * comm.rank + run)
            forth.start()
            back.send_buffer(before, back.slot).fill(20 * comm.rank + run)
            back.start()
            forth.finish()
            back.finish()
            one = forth.recv_buffer(before, forth.slot).get()
            other = back.recv_buffer(after, back.slot).get()
            forth.release()
            back.release()
            assert one.tolist() == [10 * before + run] * 3 and other.tolist() == [20 * after + run] * 300


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("count", "dtype"), [(5, "float32"), (96 * 4, "float32"), (3000, "int64")])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums(transport, count, dtype, monkeypatch):
    """Sums of device arrays are exact. With 5 elements some ranks have no shard; with 3000 one shard is shorter."""
    with gpu_ranks(monkeypatch, transport) as r:
        comm, device = r.comm, r.device
        parts = shards(count, comm.size, np.dtype(dtype).itemsize)
        every = [(np.arange(count) % 97 + 3 * rank).astype(dtype) for rank in range(comm.size)]
        total = sum(every)
        for method in ("allreduce", "ordered", "reduce_scatter", "all_gather"):
            buffer = device.zeros((count,), dtype)
            reduction = comm.reduction(buffer, method=method)
            if transport != "mpi-staged" and method == "ordered":  # the shard of every other rank
                own = parts[comm.rank].stop - parts[comm.rank].start
                assert reduction.device_bytes == (comm.size - 1) * own * buffer.itemsize
            for run in range(3):
                np.copyto(buffer, device.array(every[comm.rank] + run, dtype))
                reduction.start()
                reduction.finish()
                found = buffer.get()
                if method == "all_gather":
                    for rank, part in enumerate(parts):
                        np.testing.assert_array_equal(found[part], every[rank][part] + run)
                    continue
                part = parts[comm.rank] if method == "reduce_scatter" else slice(None)
                np.testing.assert_array_equal(found[part], total[part] + run * comm.size)
            reduction.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_under_way_together_are_finished_in_any_order(transport, monkeypatch):
    with gpu_ranks(monkeypatch, transport) as r:
        comm, device = r.comm, r.device
        buffers = [device.zeros((n,), "float64") for n in (10, 40000, 200)]
        sums = [comm.reduction(buffer, name=f"{buffer.size}") for buffer in buffers]
        for run in range(3):
            for i, (buffer, total) in enumerate(zip(buffers, sums)):
                buffer.fill(comm.rank + i + run)
                total.start()
            for total in (sums[1], sums[2], sums[0]):
                total.finish()
            for i, buffer in enumerate(buffers):
                expected = sum(rank + i + run for rank in range(comm.size))
                assert set(buffer.get().tolist()) == {expected}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nccl_sums_types_of_16_bits(dtype, monkeypatch):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with gpu_ranks(monkeypatch, "nccl") as r:
        buffer = r.device.array(np.arange(50) + r.comm.rank, kind)
        r.comm.reduction(buffer).run()
        np.testing.assert_array_equal(buffer.get().astype(int), 2 * np.arange(50) + 1)


@pytest.mark.ranks(2)
def test_others_say_which_types_they_sum(monkeypatch):
    with gpu_ranks(monkeypatch, "mpi-cuda") as r:
        with pytest.raises(CommError, match=r"buffer: expected one of float32, .*, got float16; convert it to float32"):
            r.comm.reduction(r.device.zeros((4,), "float16"))
        gather = r.comm.reduction(r.device.zeros((4,), "float16"), method="all_gather")
        gather.run()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_communicators_that_were_split_have_links_of_their_own(transport, monkeypatch):
    with gpu_ranks(monkeypatch, transport) as r:
        comm, device = r.comm, r.device
        pair, line = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        a, b, c = (device.zeros((70,), "float32") for _ in range(3))
        within, across, whole = pair.reduction(a), line.reduction(b), comm.reduction(c)
        for _ in range(2):
            for buffer in (a, b, c):
                buffer.fill(comm.rank + 1)
            within.start()
            across.start()
            whole.start()
            whole.finish()
            within.finish()
            across.finish()
            assert (
                a.get()[0] == (3 if comm.rank < 2 else 7) and b.get()[0] == (4, 6)[comm.rank % 2] and c.get()[0] == 10
            )
        if comm.rank == 1:
            assert pair.split(None) is None
        else:
            pair.split(None)


LARGE = 40000  # elements of a sum that has the second link


def sums_in_groups(r, groups):
    """Check a small and a large sum over all ranks and over the groups of each grouping, all started together."""
    comms = [(r.comm, range(r.comm.size))]
    for grouping in groups:
        color, group = grouping.color(r.comm.rank), group_of(r.comm, grouping)
        if color is not None:
            comms.append((group, grouping.members(color)))
    for _ in range(2):
        sums = [(c.reduction(r.device.zeros((n,), "float32")), ranks) for n in (70, LARGE) for c, ranks in comms]
        for total, _ in sums:
            total.buffer.fill(r.comm.rank + 1)
            total.start()
        for total, ranks in sums[::-1]:
            total.finish()
            assert set(total.buffer.get()) == {sum(rank + 1 for rank in ranks)}


# On 4 ranks: pairs of neighbors, pairs across, the first pair only, and every rank for itself.
GROUPS = [
    Groups.agreeing((2, 2), (0,), 4),
    Groups.agreeing((2, 2), (1,), 4),
    Groups.agreeing((2, 2), (), 4, first=(0,)),
    Groups.agreeing((4,), (0,), 4),
]


@pytest.mark.ranks(4)
def test_groups_share_the_communicators_of_nccl(monkeypatch):
    """One bootstrap per link; groups are split from both, in one order on all ranks, and closed before them.

    The double checks that no two streams have calls which share buffers, and the order of splits and of closing.
    """
    with gpu_ranks(monkeypatch, "nccl") as r:
        sums_in_groups(r, GROUPS)
        made = r.nccl.communicators
        urgent, large = (c for c in made if c.parent is None)
        assert urgent.shares and large.shares and not urgent.family & large.family
        # The color of a group is its first rank.
        colors = [r.comm.rank // 2 * 2, r.comm.rank % 2, *([0] if r.comm.rank < 2 else [])]
        expected = [(link, color, 2) for color in colors for link in (urgent, large)]
        assert [(c.parent, c.color, c.size) for c in made if c.parent is not None] == expected
        assert (urgent.splits, large.splits) == (3, 3), "also on ranks without a group; none for groups of one rank"
    assert {c.dead for c in made} == {"destroyed"}


@pytest.mark.ranks(4)
def test_groups_without_splits_of_nccl(monkeypatch):
    """If CuPy cannot split on one rank, all ranks create the communicators of groups anew."""
    with gpu_ranks(monkeypatch, "nccl") as r:
        if r.comm.rank == 1:
            monkeypatch.delattr(type(r.nccl), "NcclConfig")
        sums_in_groups(r, GROUPS[:1])
        assert [c.parent for c in r.nccl.communicators] == [None] * 4


@pytest.mark.ranks(4)
def test_a_split_that_nccl_refuses_is_raised_everywhere(monkeypatch):
    def refused(comm, *args):
        split(comm, *args).abort()
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    with gpu_ranks(monkeypatch, "nccl") as r:
        split = FakeCommunicator.commSplit
        if r.comm.rank == 2:
            monkeypatch.setattr(FakeCommunicator, "commSplit", refused)
        with pytest.raises(CommError, match=r"rank 2.*to split a communicator.*NCCL_ERROR_SYSTEM_ERROR"):
            group_of(r.comm, GROUPS[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_traffic_is_counted_alike(transport, monkeypatch):
    with gpu_ranks(monkeypatch, transport) as r:
        comm, other = r.comm, 1 - r.comm.rank
        channel = comm.channel({other: 10}, {other: 10}, "float32", device=r.device, kind="halo")
        channel.start()
        channel.finish()
        channel.release()
        comm.reduction(r.device.zeros((100,), "float64"), kind="sum").run()
        comm.reduction(r.device.zeros((64,), "float32"), kind="gather", method="all_gather").run()
        halo, total, gather = comm.counters["halo"], comm.counters["sum"], comm.counters["gather"]
        assert (halo.messages, halo.bytes, total.messages, total.bytes, gather.bytes) == (1, 40, 1, 800, 128)
        assert comm.device_bytes > 0


@pytest.mark.ranks(2)
def test_sums_of_the_host_go_by_way_of_it(monkeypatch):
    """Hierarchical and rounded sums go through the host, whatever transport carries device arrays."""
    with gpu_ranks(monkeypatch, "nccl") as r:
        for method, codec in (("allreduce", BFloat16()), ("hierarchical", UNCHANGED), ("accumulate", UNCHANGED)):
            buffer = r.device.array(np.full(64, 1.0 + r.comm.rank), "float32")
            total = r.comm.reduction(buffer, method=method, codec=codec)
            total.run()
            assert buffer.get()[0] == 3 and total.buffer_bytes > buffer.nbytes // 2 and total.device_bytes == 0
    assert MPI.COMM_WORLD.size == 2


class Recorder:
    """Recorder of spans that ignores them while it is paused."""

    def __init__(self):
        self.spans, self.paused = [], False

    def span(self, name, category, t0, t1):
        self.spans.append((name, category, t0, t1))


@pytest.mark.ranks(2)
def test_a_recorder_is_told_the_times_of_the_device(monkeypatch):
    clock = DrivenClock().drive(monkeypatch, streams, fake_cuda)
    with gpu_ranks(monkeypatch, "nccl") as r:
        comm, other, recorder = r.comm, 1 - r.comm.rank, Recorder()
        comm.instruments.recorder = recorder
        channel = comm.channel({other: 10}, {other: 10}, "float32", device=r.device, name="conv1")
        total = comm.reduction(r.device.zeros((4,), "float32"), name="loss")
        waits, begin = r.device.host_waits, clock.seconds
        for run in range(9):
            recorder.paused = run == 8
            channel.start()
            total.start()
            total.finish()
            channel.finish()
            channel.release()
        assert r.device.host_waits == waits, "nobody waited for a time"
        names = {name for name, *_ in recorder.spans}
        assert names == {"halo: conv1", "allreduce: loss"}
        told = [s for s in recorder.spans if s[0] == "halo: conv1"]
        assert [category for _, category, *_ in told] == ["communication", "wait"] * (len(told) // 2) and len(told) > 3
        for _, _, first, last in recorder.spans:
            assert begin - 10 * TICK <= first <= last <= clock.seconds


@pytest.mark.ranks(2)
def test_a_staged_message_travels_while_kernels_run(monkeypatch):
    """A staged message overlaps with kernels: the host waits for the copy only after it has enqueued them."""
    device = FakeDevice()
    with Communicator(MPI.COMM_WORLD) as comm:
        other, kernel = 1 - comm.rank, device.zeros((9,), "float32")
        channel = comm.channel({other: 10}, {other: 10}, "float32", device=device)
        for run in range(5):
            channel.send_buffer(other, channel.slot).fill(10 * run + comm.rank)
            waits = device.waits
            channel.start()
            assert device.waits == waits
            kernel.fill(run)
            channel.finish()
            assert device.waits - waits <= 2 and device.idled == 0
            assert set(channel.recv_buffer(other, channel.slot).get()) == {10 * run + other}
            channel.release()
        channel.start()  # closed under way: what was begun is finished
        channel.close()
    device.close()
