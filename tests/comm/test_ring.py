"""Tests of the ring: sums by messages that use the same memory one after the other."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from halograd.comm import CommError, Communicator, contexts, sums
from halograd.comm.codec import PIECE, UNCHANGED, BFloat16, Codec
from halograd.comm.encoding import Encoding
from halograd.comm.progress import Stage, Work
from halograd.comm.reduction import ReductionSpec
from halograd.comm.ring import Ring
from tests.harness.limits import wait_until

RING = 150_000  # [B]: room for two or three of the sums below
COUNTS = (20_000, 30_011, 25_000, 17_003, 40_000, 20_000, 31_007, 18_000, 22_222)  # elements of 4 bytes
KINDS = [
    ("allreduce", UNCHANGED),
    ("ordered", UNCHANGED),
    ("ordered", BFloat16()),
    ("reduce_scatter", UNCHANGED),
    ("all_gather", UNCHANGED),
]


# -- places, without ranks ------------------------------------------------------------------------


class Gate(Stage):
    """Stage that is over when the test opens it."""

    def __init__(self):
        self.begun = self.open = False

    def begin(self):
        self.begun = True

    def over(self):
        return self.open


def overlapping(ring, numbers):
    """Return whether two of these sums have memory in common."""
    places = [sorted(spans[number] for number in numbers) for spans in (ring.here, ring.inside)]
    return any(end > start for spans in places for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("seed", range(20))
def test_places_are_used_by_one_sum_at_a_time_in_the_order_of_the_starts(seed, monkeypatch):
    monkeypatch.setattr(sums, "RING_BYTES", 1000)
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 700, (12, 2)).tolist()
    ring, gates = Ring([sums.Held(0, *both) for both in sizes]), [Gate() for _ in sizes]
    assert ring.queue is not None and ring.here_bytes <= 1024 and ring.nbytes <= 2048
    operations = [ring.operation(i, [Work([]), gate, Stage()], 1, first=1, last=1) for i, gate in enumerate(gates)]
    for _ in range(3):
        for gate in gates:
            gate.begun = gate.open = False
        order, begun, left = draw.permutation(len(sizes)).tolist(), [], list(range(len(sizes)))
        waiting = list(order)
        while left:
            if waiting and draw.random() < 0.5:
                number = waiting.pop(0)
                operations[number].start()
                ring.queue.operations.append(operations[number])
            while ring.queue.poll() or ring.queue.worked:
                if not ring.queue.operations:
                    break
            begun += [i for i in order if gates[i].begun and i not in begun]
            in_use = [i for i in begun if not operations[i].arrived]
            assert begun == order[: len(begun)] and not overlapping(ring, in_use)
            if in_use:
                gates[in_use[int(draw.integers(len(in_use)))]].open = True
            left = [i for i in left if not (gates[i].begun and operations[i].arrived)]
        assert ring.queue.idle


def test_sums_with_room_for_all_are_independent():
    ring = Ring([sums.Held(7, 100), sums.Held(), sums.Held(0, 0, 200)])
    assert ring.queue is None and (ring.here_bytes, ring.nbytes) == (128, 128 + 256)
    assert len(ring.operation(0, [Stage()], 1).runs[0]) == 1


# -- encoded elements in the memory of the buffer ----------------------------------------------------


class Same(Codec):
    """Codec as wide as the elements, that writes what it reads last."""

    wire, lossy = "uint32", False

    def encode(self, values, wire, work):
        wire[:] = values[::-1].view(np.uint32)[::-1] ^ 1

    def decode(self, wire, out):
        np.bitwise_xor(wire, 1, out=out.view(np.uint32))


class Byte(Codec):
    """Codec of one byte per element."""

    wire = "int8"

    def encode(self, values, wire, work):
        np.copyto(wire, np.rint(values * 16), casting="unsafe")

    def decode(self, wire, out):
        np.divide(wire, np.float32(16), out=out)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("codec", [BFloat16(), Same(), Byte()], ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_elements_are_encoded_in_their_own_memory_with_the_same_bits(size, codec, feedback):
    results = []
    for within in (False, True):
        values, error = np.random.default_rng(size).standard_normal(size).astype(np.float32), np.full(size, 1e-3, "f4")
        encoding = Encoding(codec, values.dtype, [slice(0, 0)])
        if feedback:
            encoding.compensate(error)
        nbytes = size * np.dtype(codec.wire).itemsize
        memory = values.view(np.uint8)[:nbytes] if within else np.zeros(nbytes, np.uint8)
        wire = memory.view(codec.wire)
        encoding.deposit([(wire, values)]).wait()
        encoded = wire.copy()
        encoding.copy_back([(values, wire)]).wait()
        results.append((encoded, values, error))
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


# -- sums over ranks ------------------------------------------------------------------------------


def summand(rank, number, step):
    return np.random.default_rng([rank, number, step]).standard_normal(COUNTS[number]).astype(np.float32)


def mixed(communicator, kinds):
    """Return one sum per count, with the methods in turn and encoding errors kept."""
    chosen = [kinds[i % len(kinds)] for i in range(len(COUNTS))]
    specs = [ReductionSpec(np.zeros(n, "f4"), method=m, codec=codec) for n, (m, codec) in zip(COUNTS, chosen)]
    made = communicator.reductions(specs)
    for one in made:
        if one.encoding is not None:
            one.encoding.compensate(np.zeros(one.buffer.size, "f4"))
    return made


def bits(communicator, made, seed, steps=3):
    """Return the results of a few steps, in which every rank finishes the sums in an order of its own."""
    draw, found = np.random.default_rng([seed, communicator.rank]), []
    for step in range(steps):
        starts = np.random.default_rng([seed, step]).permutation(len(made))  # the same on all ranks
        for number in starts:
            made[number].buffer[:] = summand(communicator.rank, number, step)
            made[number].start()
        finishes = starts[::-1] if seed == 0 else draw.permutation(len(made))
        for number in finishes:
            made[number].finish()
        found += [one.buffer.copy() for one in made]
    return found + [one.encoding.error for one in made if one.encoding is not None]


@pytest.mark.mpi
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:2], KINDS[2:3], KINDS[3:], KINDS], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_order_of_finish_has_the_bits_of_sums_with_memory_of_their_own(comm, kinds, seed, monkeypatch):
    """More sums than places are finished in reversed order, or in another order on every rank."""
    with Communicator(comm, "mpi") as communicator:
        wide = mixed(communicator, kinds)
        expected, whole = bits(communicator, wide, seed), communicator.buffer_bytes
        for one in wide:
            one.close()
        assert communicator.buffer_bytes == 0
        monkeypatch.setattr(sums, "RING_BYTES", RING)
        made = mixed(communicator, kinds)
        assert communicator.size == 1 or communicator.buffer_bytes < whole
        assert communicator.size == 1 or any(one._plan.operation.queue is not None for one in made)
        for one, other in zip(bits(communicator, made, seed), expected):
            np.testing.assert_array_equal(one, other)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("method", "codec"), KINDS, ids=str)
def test_memory_is_that_of_a_few_sums_as_predicted(comm, method, codec, monkeypatch):
    monkeypatch.setattr(sums, "RING_BYTES", 100_000)
    with Communicator(comm, "mpi") as communicator:
        counts = [40_000] * 12 + [100]
        specs = [ReductionSpec(np.zeros(n, "f4"), method=method, codec=codec) for n in counts]
        made, way = communicator.reductions(specs), specs[0].sum
        held = [(4 * n, way.held(n, 4, comm.size, comm.rank)) for n in counts]
        assert communicator.buffer_bytes == sums.held_together(held)
        encoders = len(made) * codec.held(4) if codec is not UNCHANGED else 0
        shares = 12 * (80_000 + 64) if method == "reduce_scatter" else 0
        assert communicator.buffer_bytes - encoders <= 160_000 + min(shares, 100_000) + 1000
        assert made[-1]._plan.operation.queue is None, "a small sum has memory of its own"
        messages = communicator._links._messages
        assert sum(shared.memory.nbytes for shared in messages._shared) <= 160_000 + 64


@pytest.mark.mpi(min_size=2)
def test_small_sums_and_other_collectives_pass_large_sums_that_wait(comm, monkeypatch):
    monkeypatch.setattr(sums, "RING_BYTES", RING)
    with Communicator(comm, "mpi") as communicator:
        made, small = mixed(communicator, KINDS[:1]), communicator.reduction(np.zeros(3))
        in_order = communicator.reduction(np.zeros(3), method="ordered")
        for step in range(5):
            for number, one in enumerate(made):
                one.buffer[:] = number + communicator.rank
                one.start()
                for other in (small, in_order):
                    other.buffer[:] = step
                    other.run()
                    assert (other.buffer == step * comm.size).all()
                assert communicator.allreduce_scalar(1) == comm.size
            for number, one in reversed(list(enumerate(made))):
                one.finish()
                assert (one.buffer == sum(range(comm.size)) + number * comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_the_thread_completes_all_sums_without_their_owner(comm, monkeypatch):
    monkeypatch.setattr(sums, "RING_BYTES", RING)
    with Communicator(comm, "mpi") as communicator:
        made = mixed(communicator, KINDS[:3])
        for one in made:
            one.start()
        wait_until(lambda: not communicator._progress._pending, "the thread to bring them to their ends")
        assert all(one.summed for one in made)
        for one in made:
            one.finish()


@pytest.mark.mpi(min_size=2)
def test_a_failed_sum_gives_its_place_back(comm, monkeypatch):
    monkeypatch.setattr(sums, "RING_BYTES", RING)

    def fail(operation, poll, limit):
        if not poll(limit) and operation.at < 3:
            return False
        raise RuntimeError("the network is down")

    with Communicator(comm, "mpi") as communicator:
        made = mixed(communicator, KINDS[1:2])
        bad = made[1]._plan.operation
        with monkeypatch.context() as patch:
            patch.setattr(bad, "poll", partial(fail, bad, bad.poll))
            for one in made:
                one.start()
            with pytest.raises(CommError, match="the network is down"):
                made[1].finish()
        for one in made[:1] + made[2:]:
            one.finish()
        made[0].run()


@pytest.mark.mpi(min_size=2)
def test_a_ring_after_a_closed_one_uses_its_communicator(comm, monkeypatch):
    monkeypatch.setattr(sums, "RING_BYTES", RING)
    before = contexts.held()
    with Communicator(comm, "mpi") as communicator:
        alone = contexts.held()
        for _ in range(3):
            made = mixed(communicator, KINDS[:1])
            assert contexts.held() == alone + 1
            for one in made:
                one.close()
        mixed(communicator, KINDS[:1])
        mixed(communicator, KINDS[:1])
        assert contexts.held() == alone + 2, "two rings at once"
    assert contexts.held() == before
