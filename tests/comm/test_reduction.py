"""Tests of reductions: sums in place, on split groups, in rank order, rounded; bfloat16; faults."""

import re

import numpy as np
import pytest

from halograd.comm import CommError, Communicator
from halograd.comm.codec import UNCHANGED, BFloat16
from halograd.comm.reduction import ReductionSpec
from tests.harness.limits import wait_until

pytestmark = pytest.mark.mpi
over_mpi = pytest.mark.parametrize("communicator", ["mpi"], indirect=True)
on_a_node = pytest.mark.parametrize("communicator", ["shared", "auto", "emulated:alpha=1e-5,beta=1e-11"], indirect=True)


def filled(communicator, number, count=1000, dtype=np.float64):
    return (np.arange(count) % 17 + 100 * communicator.rank + number).astype(dtype)


def total(communicator, number, count=1000, dtype=np.float64):
    ranks = communicator.size
    return (ranks * (np.arange(count) % 17 + number) + 100 * ranks * (ranks - 1) // 2).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_the_buffer_becomes_the_sum(communicator, dtype):
    buffer = np.zeros((10, 100), dtype)
    reduction = communicator.reduction(buffer)
    for step in range(3):
        buffer[...] = filled(communicator, step, dtype=dtype).reshape(10, 100)
        if step == 1:
            reduction.run()
        else:
            reduction.start()
            reduction.finish()
        np.testing.assert_array_equal(buffer.ravel(), total(communicator, step, dtype=dtype))


def test_sums_of_a_split_group(communicator):
    group = communicator.split(communicator.rank % 2, key=-communicator.rank)
    members = [rank for rank in reversed(range(communicator.size)) if rank % 2 == communicator.rank % 2]
    assert group.ranks == tuple(members)
    expected = sum(members)
    for reduction in (group.reduction(np.zeros(5)), *group.reductions([ReductionSpec(np.zeros(n)) for n in (1, 5, 0)])):
        reduction.buffer[...] = communicator.rank
        reduction.run()
        assert (reduction.buffer == expected).all()


def test_the_order_of_calls_is_checked(communicator):
    reduction = communicator.reduction(np.zeros(4), name="bucket 3")
    with pytest.raises(CommError, match=r"finish\(\): expected start\(\) of bucket 3 before"):
        reduction.finish()
    reduction.start()
    with pytest.raises(CommError, match=r"start\(\): expected finish\(\) of bucket 3 before"):
        reduction.start()
    with pytest.raises(CommError, match=r"expected finish\(\) of bucket 3 before"):
        reduction.run()
    reduction.close()
    assert reduction.closed
    for call, name in ((reduction.start, "start"), (reduction.run, "run")):
        with pytest.raises(CommError, match=rf"{name}\(\): expected an open reduction, got a closed one"):
            call()
    reduction.close()


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        ([1.0], "expected a NumPy array, got list"),
        (np.zeros(3, np.float16), "expected one of float32, float64, int32, int64, got float16; convert"),
        (np.zeros((4, 4))[:, ::2], r"expected a writeable C-contiguous array, got strides \(32, 16\)"),
    ],
)
def test_a_bad_buffer_on_one_rank_is_an_error_on_all(communicator, buffer, message):
    last = communicator.size - 1
    where = f"rank {last}: " if last else ""  # one rank alone is all ranks
    with pytest.raises(CommError, match=f"^{where}buffer: {message}"):
        communicator.reduction(buffer if communicator.rank == last else np.zeros(3))


@pytest.mark.mpi(min_size=2)
def test_buffers_must_be_alike(communicator):
    unlike = r"rank 1.*: buffer: expected shape \(3,\) and float64 by .* as on rank 0, got shape \(2,\)"
    with pytest.raises(CommError, match=unlike):
        communicator.reduction(np.zeros(3 if communicator.rank == 0 else 2))


@over_mpi
@pytest.mark.mpi(min_size=2)
def test_a_fault_on_the_progress_thread_is_raised_by_finish(communicator):
    """An error on the progress thread is raised by `finish` of its reduction, and affects no other reduction."""
    bad, good = communicator.reduction(np.ones(20_000), name="bucket 7"), communicator.reduction(np.ones(20_000))
    poll, polled = bad._plan.operation.poll, []

    def fail():
        polled.append(poll())
        if not polled[-1]:
            return False
        raise RuntimeError("the network is down")

    bad._plan.operation.poll = fail
    bad.start()
    good.start()
    wait_until(lambda: polled and polled[-1], "the thread to find it complete")
    with pytest.raises(CommError, match="reduction bucket 7 of 160000 bytes failed: the network is down"):
        bad.finish()
    good.finish()
    assert (good.buffer == communicator.size).all()
    good.run()
    assert (good.buffer == communicator.size**2).all()


class Failing(BFloat16):
    """A codec that fails when a sum of `step` is encoded or decoded."""

    step = ""

    def encode(self, values, wire, work):
        if self.step == "encode":
            raise ValueError("no such number")
        super().encode(values, wire, work)

    def decode(self, wire, out):
        if self.step == "decode":
            raise ValueError("no such number")
        super().decode(wire, out)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("step", ["encode", "decode"])
def test_a_failed_sum_is_an_error_of_its_calls_alone(communicator, step, monkeypatch):
    """The error names the sum, also that of a later sum in the same memory; then nothing waits, and sums are right."""
    fails, started = re.escape("bytes failed: no such number"), False
    bad = communicator.reduction(np.ones(200_000, "f4"), name="bad", codec=Failing())
    good = communicator.reduction(np.ones(200_000, "f4"), name="good", codec=BFloat16())
    monkeypatch.setattr(Failing, "step", step)
    with pytest.raises(CommError, match=f"reduction bad of 800000 {fails}"):
        bad.start()
        started = True
        good.start()
        bad.finish()
    assert communicator.instruments.waiting is None and not bad.under_way
    if started:
        good.finish()
        assert (good.buffer == communicator.size).all()
        bad.start()
        good.start()
        # On the stage of a node, `good` cannot pass a sum before it that has failed.
        if good._plan.queue is not None:
            with pytest.raises(CommError, match="good: a sum started before it has failed: no such number"):
                good.finish()
        with pytest.raises(CommError, match=f"reduction bad of 800000 {fails}"):
            bad.finish()
        if good.under_way:
            good.finish()
    assert communicator.instruments.waiting is None
    monkeypatch.setattr(Failing, "step", "")
    for total in (bad, good):
        total.buffer[:] = 1
        total.run()
        assert (total.buffer == communicator.size).all()


@on_a_node
@pytest.mark.mpi(min_size=2)
def test_a_sum_that_is_closed_after_the_failure_of_another_is_not_ended_later(communicator, monkeypatch):
    bad = communicator.reduction(np.ones(200_000, "f4"), name="bad", codec=Failing())
    good, later = (communicator.reduction(np.ones(200_000, "f4"), name=name) for name in ("good", "later"))
    monkeypatch.setattr(Failing, "step", "decode")
    bad.start()
    good.start()
    for failed in (good, bad):
        with pytest.raises(CommError, match="no such number"):
            failed.finish()
    good.close()
    assert not bad._plan.queue
    later.run()
    assert (later.buffer == communicator.size).all() and (good.buffer == 1).all()


@over_mpi
@pytest.mark.mpi(min_size=2)
def test_it_proceeds_while_the_main_thread_does_not_call_mpi(communicator):
    reduction = communicator.reduction(np.ones(500_000))
    reduction.start()
    wait_until(lambda: not communicator._progress._pending, "the thread to bring it to its end")
    assert (reduction.buffer == communicator.size).all()
    reduction.finish()


@on_a_node
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("nbytes", [8, 65_528, 65_536, 65_544, 262_136, 262_144, 262_152, 1_000_008])
def test_sums_in_shared_memory_of_every_length(communicator, nbytes, dtype):
    """Sums in shared memory are correct for lengths near the limits of small sums and of whole pieces."""
    count = nbytes // np.dtype(dtype).itemsize
    draw = [np.random.default_rng([rank, count]).standard_normal(count).astype(dtype) for rank in range(4)]
    expected = draw[0].copy()
    for rank in range(1, communicator.size):
        expected += draw[rank]
    reduction = communicator.reduction(np.empty(count, dtype))
    for _ in range(3):
        reduction.buffer[...] = draw[communicator.rank]
        reduction.run()
        np.testing.assert_array_equal(reduction.buffer, expected)


@on_a_node
def test_large_sums_share_one_stage(communicator):
    before = communicator.buffer_bytes
    reductions = [communicator.reduction(np.ones(100_000)) for _ in range(3)]
    staged = communicator.buffer_bytes - before
    assert staged < 2 * 100_000 * 8
    for reduction in reductions:
        reduction.close()
    assert communicator.buffer_bytes - before == staged


def address_of(total):
    """Return the address to which a small sum copies its values."""
    deposit = total._plan.operation.runs[0][0]
    target, _ = deposit.calls[0].args
    return target.ctypes.data


@on_a_node
@pytest.mark.mpi(min_size=2)
def test_memory_of_a_closed_small_sum_is_used_again(communicator):
    first = communicator.reduction(np.ones(1000))
    place = address_of(first)
    first.close()
    again = communicator.reduction(np.full(1000, 2.0))
    assert address_of(again) == place
    again.run()
    assert (again.buffer == 2 * communicator.size).all()


@on_a_node
def test_a_rank_that_comes_late_is_waited_for(communicator):
    small, large = communicator.reduction(np.ones(5)), communicator.reduction(np.ones(50_000))
    for late in range(communicator.size):
        for reduction in (small, large):
            reduction.buffer.fill(1)
            if communicator.rank == late:
                communicator.barrier()
            reduction.start()
            if communicator.rank != late:
                communicator.barrier()  # starting does not wait: all others have started before
        large.finish()
        small.finish()
        assert (small.buffer == communicator.size).all()
        assert (large.buffer == communicator.size).all()


SIZES = (1, 15, 16_391, 150_003)  # fewer than ranks, no multiple of anything, several pieces
HALF_ULP = 2.0**-8


def summand(rank, count, step=0, dtype="float32"):
    return np.random.default_rng([rank, count, step]).standard_normal(count).astype(dtype)


def nearest(values):
    wire, out = np.zeros(values.size, np.uint16), np.zeros(values.size, np.float32)
    BFloat16().encode(values, wire, [np.zeros_like(values) for _ in range(2)])
    BFloat16().decode(wire, out)
    return out


def added(summands):
    total = np.zeros_like(summands[0])
    for one in summands:
        total += one
    return total


def rounded_twice(ranks, count, step=0):
    return nearest(added([nearest(summand(rank, count, step)) for rank in range(ranks)]))


@pytest.mark.parametrize(("dtype", "codec"), [("float32", UNCHANGED), ("float64", UNCHANGED), ("float32", BFloat16())])
@pytest.mark.parametrize("count", SIZES)
def test_ordered_sums_have_the_bits_of_their_definition(communicator, count, dtype, codec):
    """Ordered sums are added up from the first rank to the last; rounded ones are rounded before and after that."""
    total, ranks = communicator.reduction(np.zeros(count, dtype), method="ordered", codec=codec), communicator.size
    for step in range(3):
        total.buffer[...] = summand(communicator.rank, count, step, dtype)
        total.start()
        total.finish()
        expected = added([summand(rank, count, step, dtype) for rank in range(ranks)])
        rounds = ranks > 1 and not codec.identity
        np.testing.assert_array_equal(total.buffer, rounded_twice(ranks, count, step) if rounds else expected)


def compensated(communicator, count):
    """Return a rounded sum with error feedback."""
    total = communicator.reduction(np.zeros(count, "float32"), method="ordered", codec=BFloat16())
    if total.encoding is not None:
        total.encoding.compensate(np.zeros(count, "float32"))
    return total


def everything_taken(communicator, total):
    """Return the sum of all rounding errors so far ``(n,)``, the same on all ranks; zeros for one rank."""
    if communicator.size == 1:
        assert total.encoding is None
        return np.zeros_like(total.buffer)
    assert sum(part.stop - part.start for part in total.encoding.owned) == total.encoding.share_error.size
    total.encoding.collect()
    assert not total.encoding.share_error.any()
    whole = total.encoding.error.copy()
    communicator.reduction(whole).run()
    return whole


@pytest.mark.parametrize("count", [15, 33_003])
def test_what_is_rounded_away_comes_back_in_later_sums(communicator, count):
    """With error feedback, the total of T sums differs from the exact one by one rounding, not by T roundings."""
    steps, mine = 40, np.abs(summand(communicator.rank, count)) + 1
    total = compensated(communicator, count)
    plain = communicator.reduction(np.zeros(count, "float32"), method="ordered", codec=BFloat16())
    exact = steps * sum(np.abs(summand(r, count)).astype("float64") + 1 for r in range(communicator.size))
    found, lossy = np.zeros(count), np.zeros(count)
    for _ in range(steps):
        for one, sums in ((total, found), (plain, lossy)):
            one.buffer[...] = mine
            one.run()
            sums += one.buffer
    left = everything_taken(communicator, total)
    eps = np.finfo("float32").eps
    assert (np.abs(found + left - exact) <= 4 * communicator.size * eps * exact).all()
    assert (np.abs(found - exact) <= 3 * HALF_ULP * exact / steps).all()
    if communicator.size > 1:
        assert np.abs(lossy - exact).max() > 10 * np.abs(found - exact).max(), "without, errors add up"


def test_transports_agree_bit_for_bit(comm):
    count, results = 33_001, []
    for transport in ("mpi", "shared", "auto", "emulated:alpha=1e-5,beta=1e-11"):
        with Communicator(comm, transport) as communicator:
            total = compensated(communicator, count)
            for step in range(4):
                total.buffer[...] = summand(communicator.rank, count, step)
                total.run()
            results.append((total.buffer.copy(), everything_taken(communicator, total)))
    for buffer, left in results[1:]:
        np.testing.assert_array_equal(buffer, results[0][0])
        np.testing.assert_allclose(left, results[0][1], rtol=1e-5, atol=1e-7)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("codec", [UNCHANGED, BFloat16()], ids=str)
@pytest.mark.parametrize("communicator", ["mpi"], indirect=True)
def test_the_progress_thread_adds_up_piece_by_piece(communicator, codec, monkeypatch):
    """The progress thread completes both phases and their additions while the main thread does not call MPI."""
    monkeypatch.setattr("halograd.comm.reduction.PIECE", 4000)
    count = 20_003
    total = communicator.reduction(summand(communicator.rank, count), method="ordered", codec=codec)
    total.start()
    wait_until(lambda: not communicator._progress._pending, "the thread to bring it to its end")
    total.finish()
    plain = added([summand(rank, count) for rank in range(communicator.size)])
    expected = plain if codec.identity else rounded_twice(communicator.size, count)
    np.testing.assert_array_equal(total.buffer, expected)
    total.buffer[...] = summand(communicator.rank, count)
    total.run()
    np.testing.assert_array_equal(total.buffer, expected)


def test_only_float32_is_rounded(communicator):
    with pytest.raises(CommError, match="buffer: expected float32 to be encoded as bfloat16, got float64"):
        communicator.reduction(np.zeros(3), method="ordered", codec=BFloat16())


def test_sums_of_a_library_and_by_nodes_are_not_encoded(communicator):
    for method in ("reduce_scatter", "all_gather", "hierarchical", "accumulate"):
        expected = f"expected one of allreduce, ordered with the codec bfloat16, got '{method}'"
        with pytest.raises(CommError, match=expected):
            communicator.reduction(np.zeros(3, "float32"), method=method, codec=BFloat16())
