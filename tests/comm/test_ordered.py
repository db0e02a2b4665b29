"""Tests of sums in rank order, plain and rounded: the bits are the same for every transport."""

import numpy as np
import pytest

from halograd.comm import CommError, Communicator
from halograd.comm.codec import UNCHANGED, BFloat16
from tests.harness.limits import wait_until

pytestmark = pytest.mark.mpi
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
