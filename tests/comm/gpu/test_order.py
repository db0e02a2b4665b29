"""Tests of the order checker, of the order of transports' work, and of the doubles against CuPy. Needs no GPU."""

import inspect

import pytest

from halograd.comm import CommError
from halograd.comm.gpu import nccl
from halograd.comm.gpu.streams import Passage
from halograd.comm.sums import METHODS as METHODS_OF_ALL
from halograd.comm.sums import shards
from tests.support.fake_cuda import FakeCuda, FakeCupy, FakeEvent, FakeStream
from tests.support.fake_nccl import DTYPES, FakeCommunicator, FakeNccl
from tests.support.gpu_ranks import gpu_ranks
from tests.support.happens_before import Ordered, check_collectives, find_races
from tests.support.trace import Entry, Trace


def op(name, stream, reads=(), writes=()):
    return Entry("op", name, stream, tuple(reads), tuple(writes))


def record(event, stream, version=1):
    return Entry("record", "record", stream, event=(event, version))


def wait(event, stream, version=1):
    return Entry("wait", "wait", stream, event=(event, version))


A, PART, BEHIND = (0, 100, 200), (0, 150, 160), (0, 200, 300)


@pytest.mark.parametrize(
    ("entries", "races"),
    [
        ([op("w", 1, (), [A]), op("r", 1, [A])], 0),
        ([op("w", 1, (), [A]), op("r", 2, [A])], 1),
        ([op("r", 1, [A]), op("w", 2, (), [PART])], 1),
        ([op("w", 1, (), [A]), op("w", 2, (), [BEHIND])], 0),
        ([op("r", 1, [A]), op("r", 2, [A])], 0),
        ([op("w", 1, (), [A]), record("e", 1), wait("e", 2), op("r", 2, [A])], 0),
        ([record("e", 1), op("w", 1, (), [A]), wait("e", 2), op("r", 2, [A])], 1),
        ([op("w", 1, (), [A]), record("e", 1), op("r", 2, [A]), wait("e", 2)], 1),
        ([op("w", 1, (), [A]), record("e", 1), Entry("host wait", "h", event=("e", 1)), op("r", 2, [A])], 0),
        # The second record of an event is another one than the first.
        ([record("e", 1), op("w", 1, (), [A]), record("e", 1, 2), wait("e", 2), op("r", 2, [A])], 1),
        ([record("e", 1), op("w", 1, (), [A]), record("e", 1, 2), wait("e", 2, 2), op("r", 2, [A])], 0),
        # By way of a third stream.
        ([op("w", 1, (), [A]), record("e", 1), wait("e", 2), record("f", 2), wait("f", 3), op("r", 3, [A])], 0),
    ],
)
def test_operations_that_are_not_ordered(entries, races):
    assert len(find_races([entries])) == races


def call(comm, number, stream, *calls):
    return Entry("op", f"{calls[0][1]} number {number}", stream, nccl=(comm, number, calls))


def total(me, count):
    return (me, "allReduce", count, 7, 0, -1, 2)


def test_calls_of_nccl_that_do_not_match():
    def check(one, other):
        return check_collectives([one, other])

    assert check([call("c", 1, 5, total(0, 4))], [call("c", 1, 6, total(1, 4))]) == []
    assert "meets" in check([call("c", 1, 5, total(0, 4))], [call("c", 1, 5, total(1, 8))])[0]
    sends, receives = call("c", 1, 5, (0, "send", 1, 16)), call("c", 1, 5, (1, "recv", 0, 16))
    assert check([sends], [receives]) == []
    assert "16" in check([sends], [call("c", 1, 5, (1, "recv", 0, 12))])[0]
    assert check([sends], []) == ["rank 0: send number 1 waits for ever"]
    # Both send first, and receive when that is over: each waits for the other.
    first, second = (0, "send", 1, 4), (0, "recv", 1, 4)
    there, back = (1, "send", 0, 4), (1, "recv", 0, 4)
    apart = [call("c", 1, 5, first), call("c", 2, 5, second)], [call("c", 1, 5, there), call("c", 2, 5, back)]
    assert len(check(*apart)) == 2
    assert check([call("c", 1, 5, first, second)], [call("c", 1, 5, there, back)]) == []
    # Two communicators on one stream, in another order on the other rank.
    a, b = (lambda me: call("a", 1, 5, total(me, 4))), (lambda me: call("b", 1, 5, total(me, 4)))
    assert check([a(0), b(0)], [a(1), b(1)]) == []
    assert len(check([a(0), b(0)], [b(1), a(1)])) == 2


def test_the_clock_tells_what_may_run_at_once():
    trace = [op("pack", 1), record("e", 1), wait("e", 2), op("send", 2), op("kernel", 1)]
    ordered = Ordered([trace])
    assert ordered.before((0, 0), (0, 3)) and not ordered.before((0, 3), (0, 4)) and not ordered.before((0, 4), (0, 3))


# -- what is left out is seen -----------------------------------------------------------------------


def some_of_everything(r):
    """Run exchanges and sums repeatedly, with buffers that are reused at once."""
    comm, device, other = r.comm, r.device, 1 - r.comm.rank
    channel = comm.channel({other: 50}, {other: 50}, "float32", device=device)
    sums = [comm.reduction(device.zeros((n,), "float32"), method=m) for n, m in METHODS]
    for run in range(3):
        channel.send_buffer(other, channel.slot).fill(run)
        channel.start()
        for total in sums:
            total.buffer.fill(run)
            total.start()
        channel.finish()
        channel.recv_buffer(other, channel.slot).copy()
        channel.release()
        for total in sums:
            total.finish()
            total.buffer.copy()


METHODS = [(300, "allreduce"), (320, "reduce_scatter"), (300, "ordered"), (300, "all_gather"), (40000, "allreduce")]


def nothing(*args, **kwargs):
    return None


def two_ranks(monkeypatch, transport):
    with gpu_ranks(monkeypatch, transport) as r:
        some_of_everything(r)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["nccl", "mpi-cuda"])
def test_everything_is_ordered(transport, monkeypatch):
    two_ranks(monkeypatch, transport)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("left_out", ["enter", "join"])
def test_a_way_into_a_lane_or_back_that_is_left_out(left_out, monkeypatch):
    monkeypatch.setattr(Passage, left_out, nothing)
    with pytest.raises(AssertionError, match=r"rank [01]: .* and rank [01]: "):
        two_ranks(monkeypatch, "nccl")


@pytest.mark.ranks(2)
def test_a_rank_that_sums_in_another_order_is_seen(monkeypatch):
    """The double compares the calls of the ranks while they run, so sums in different orders are an error."""
    with pytest.raises(CommError, match="ranks make different calls"), gpu_ranks(monkeypatch, "nccl") as r:
        sums = [r.comm.reduction(r.device.zeros((n,), "float32")) for n in (8, 16)]
        for total in sums if r.comm.rank else sums[::-1]:
            total.start()
        for total in sums:
            total.finish()


@pytest.mark.ranks(2)
def test_a_message_and_a_kernel_may_run_at_once(monkeypatch):
    """Work that the host enqueues between start and finish is not ordered with the message, in either direction."""
    with gpu_ranks(monkeypatch, "nccl") as r:
        other, device = 1 - r.comm.rank, r.device
        channel = r.comm.channel({other: 50}, {other: 50}, "float32", device=device)
        interior = device.zeros((9,), "float32")
        device.trace.mark("begin")
        channel.send_buffer(other, 0).fill(1)
        channel.start()
        interior.fill(2)
        channel.finish()
        channel.recv_buffer(other, 0).copy()
        channel.release()
        trace = device.trace.entries
        first = [e.name for e in trace].index("begin")
        at = {e.name: (0, i) for i, e in enumerate(trace) if e.kind == "op" and i > first}
        kernel, last = [(0, i) for i, e in enumerate(trace) if e.name == "fill" and i > first][1], at["copy"]
        message, packing = at["recv+send number 1"], at["fill"]
        assert packing == kernel, "the last of both"
        ordered = Ordered([trace])
        assert not ordered.before(kernel, message) and not ordered.before(message, kernel)
        assert ordered.before(message, last) and ordered.before(kernel, last)
        comm_stream = next(e.stream for e in trace if e.nccl is not None)
        assert device.cuda.streams[comm_stream].priority < 0 and comm_stream != device.compute.ptr


def test_shards_are_what_the_tests_think():
    assert len({s.stop - s.start for s in shards(320, 2, 4)}) == 1
    assert len({s.stop - s.start for s in shards(300, 2, 4)}) == 2
    assert nccl.URGENT < 40000 * 4
    made_on_devices = {name for name, method in METHODS_OF_ALL.items() if method.on_devices}
    assert made_on_devices == {"allreduce", "ordered", "reduce_scatter", "all_gather"}


cupy = pytest.importorskip("cupy", reason="needs CuPy (no GPU): pip install 'halograd[gpu]'")


@pytest.fixture(scope="module")
def doubles_nccl():
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("needs NCCL (no GPU): pip install nvidia-nccl-cu13 (300 MB)")
    return nccl


def arguments(doc):
    """Return the number of arguments in a Cython signature such as ``f(self, intptr_t a, int b)``."""
    return doc.splitlines()[0].partition("(")[2].partition(")")[0].count(",") + 1


CALLS = ["send", "recv", "allReduce", "reduceScatter", "reduce", "allGather", "broadcast"]


@pytest.mark.parametrize("name", [*CALLS, "commSplit", "abort", "destroy", "check_async_error"])
def test_calls_of_nccl(name, doubles_nccl):
    real = getattr(doubles_nccl.NcclCommunicator, name).__doc__
    ours = inspect.signature(getattr(FakeCommunicator, name)).parameters
    assert real is None or arguments(real) == len(ours), real


def test_constants_of_nccl(doubles_nccl):
    for name, (number, _) in DTYPES.items():
        assert getattr(doubles_nccl, name) == number
    assert doubles_nccl.NCCL_SUM == FakeNccl.NCCL_SUM
    for name in ("groupStart", "groupEnd", "get_unique_id", "get_version"):
        assert callable(getattr(doubles_nccl, name)) and callable(getattr(FakeNccl, name))
    assert doubles_nccl.NcclConfig(split_share=1).split_share == FakeNccl.NcclConfig(split_share=1).split_share
    assert len(doubles_nccl.get_unique_id()) == 128 and isinstance(doubles_nccl.get_unique_id(), bytes)


def test_the_runtime():
    double = FakeCupy(FakeCuda(Trace(0), lambda event: None, lambda: None))
    for name in vars(double.cuda.runtime):
        assert callable(getattr(cupy.cuda.runtime, name)), name
    for name in vars(double.cuda):
        assert hasattr(cupy.cuda, name), name


def test_streams_and_events():
    for double, real in ((FakeStream, cupy.cuda.Stream), (FakeEvent, cupy.cuda.Event)):
        own = {"enqueue", "run_to", "come_to"}  # of the double's inside
        names = {name for name, item in vars(double).items() if not name.startswith("_") and name not in own}
        assert all(hasattr(real, name) for name in names), names
    keywords = set(inspect.signature(cupy.cuda.Event.__init__).parameters)
    assert "disable_timing" in keywords
    assert {"non_blocking", "priority"} <= set(inspect.signature(cupy.cuda.Stream.__init__).parameters)
