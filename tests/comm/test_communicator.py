"""Tests of communicators: agreement on faults, small objects, splitting, closing."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from halograd.comm import CommError, Communicator

pytestmark = pytest.mark.mpi


class PickyError(Exception):
    """Exception whose constructor needs more than a text."""

    def __init__(self, key, value):
        super().__init__(f"{key}={value}")


@pytest.fixture
def plain(comm):
    with Communicator(comm, "mpi") as made:
        yield made


@pytest.mark.parametrize("fault", [ValueError, FileNotFoundError, CommError])
def test_a_fault_of_one_rank_is_raised_on_all(plain, fault):
    last = plain.size - 1
    own = fault("the file is too short") if plain.rank == last else None
    with pytest.raises(fault, match=f"^{named(plain, last)}the file is too short$") as caught:
        plain.agree(own)
    assert type(caught.value) is fault
    assert caught.value.agreed == plain.size
    assert caught.value.arose_here == (plain.rank == last)
    assert caught.value.__cause__ is own or caught.value is own


def named(comm, rank):
    """Return the prefix of a message that names the faulty rank; empty for a single rank."""
    return f"rank {rank}: " if comm.size > 1 else ""


def test_a_fault_that_all_ranks_have_is_raised_as_it_is(plain):
    own = PickyError("lr", -1)
    with pytest.raises(PickyError, match=r"^lr=-1$") as caught:
        plain.agree(own)
    assert caught.value is own and own.agreed == plain.size and own.arose_here == (plain.rank == 0)


def test_no_fault_no_error(plain):
    plain.agree(None)


def test_the_lowest_rank_speaks_for_several(plain):
    where = rf"rank 0 \(and {plain.size - 1} more\): " if plain.size > 1 else "^'"
    with pytest.raises(KeyError, match=rf"{where}no such layer 0"):
        plain.agree(KeyError(f"no such layer {plain.rank}"))


@pytest.mark.mpi(min_size=2)
def test_an_error_of_many_arguments_becomes_a_comm_error(plain):
    with pytest.raises(CommError, match=r"rank 0: PickyError: lr=-1"):
        plain.agree(PickyError("lr", -1) if plain.rank == 0 else None)


def test_agreement_over_a_body(plain):
    with pytest.raises(ZeroDivisionError, match=f"^{named(plain, 0)}division"), plain.agreement():
        1 / plain.rank
    with plain.agreement():
        pass


def test_a_fault_agreed_on_twice_is_told_once(plain):
    with pytest.raises(ValueError, match=rf"^{named(plain, 0)}bad$"), plain.agreement():
        plain.agree(ValueError("bad") if plain.rank == 0 else None)


def test_a_split_group_names_ranks_of_the_whole(plain):
    group = plain.split(plain.rank // 2)
    last = min(plain.rank // 2 * 2 + 1, plain.size - 1)
    with pytest.raises(ValueError, match=f"{named(group, last)}odd"):
        group.agree(ValueError("odd") if plain.rank == last else None)


def test_ranks_without_a_color_are_in_no_group(plain):
    group = plain.split(0 if plain.rank == 0 else None)
    assert (group is None) == (plain.rank != 0)
    if group is not None:
        assert (group.rank, group.size, group.ranks) == (0, 1, (0,))


@pytest.mark.parametrize("color", [-1, 1 << 31])
def test_a_color_that_mpi_does_not_have_is_refused_on_all_ranks(plain, color):
    with pytest.raises(CommError, match=rf"{named(plain, 0)}split\(\): expected None or a color .* got {color}; "):
        plain.split(color if plain.rank == 0 else 0)


def test_a_split_group_has_channels_and_counters_of_its_own_ranks(communicator):
    group = communicator.split(0, key=-communicator.rank)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    peers = ({right: 3}, {left: 3}) if group.size > 1 else ({}, {})
    channel = group.channel(*peers, np.float32)
    for peer in peers[0]:
        channel.send_buffer(peer, channel.slot)[:] = communicator.rank
    channel.start()
    channel.finish()
    for peer in peers[1]:
        assert (channel.recv_buffer(peer, channel.slot) == group.ranks[left]).all()
    channel.release()
    assert group.counters is communicator.counters
    assert communicator.counters["halo"].messages == len(peers[0])
    group.close()
    group.close()


def test_small_objects(plain):
    last = plain.size - 1
    assert plain.bcast({"lr": plain.rank}, root=last) == {"lr": last}
    assert plain.allgather_objects(str(plain.rank)) == [str(r) for r in range(plain.size)]
    plain.barrier()


def test_scalars(plain):
    n = plain.size
    assert plain.allreduce_scalar(plain.rank + 0.5) == n * (n - 1) / 2 + n / 2
    assert plain.allreduce_scalar(plain.rank, "max") == n - 1
    assert plain.allreduce_scalar(float(plain.rank), "min") == 0.0
    count = plain.allreduce_scalar(2**60 + plain.rank, "max")
    assert count == 2**60 + n - 1 and isinstance(count, int)
    with pytest.raises(CommError, match=r"operation: expected one of \['max', 'min', 'sum'\], got 'mean'"):
        plain.allreduce_scalar(1.0, "mean")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "transport: expected auto, mpi, shared, emulated, or \"FILE.py:CLASS\", got ''"),
        ("tcp", "transport: expected auto, mpi, shared, emulated, or .*, got 'tcp'"),
        ("mpi:fast", "transport: expected settings of mpi as in \"mpi:key=value,key=value\", got 'mpi:fast'"),
        ("mpi:alpha=1", "transport: expected mpi, which has no settings, got 'mpi:alpha=1'"),
        ("emulated", "transport.alpha: expected a value, got nothing"),
        ("emulated:alpha=1", "transport.beta: expected a value, got nothing"),
        ("emulated:alpha=1,beta=x", "transport.beta: expected a number, got 'x'"),
        ("emulated:alpha=-1,beta=0", "transport.alpha: expected a number >= 0, got -1"),
        ("emulated:alpha=1,beta=nan", "transport.beta: expected a finite number, got nan"),
        ("emulated:alpha=1,beta=0,gamma=2", "transport.gamma: unknown key; expected one of alpha, beta, node"),
        ("emulated:alpha=1,beta=0,node=0", "transport.node: expected a whole number >= 1, got 0"),
        ("net.py:Slow", "transport: expected a Python file, got 'net.py'"),
    ],
)
def test_an_unknown_transport_is_refused(comm, text, message):
    with pytest.raises(CommError, match=message):
        Communicator(comm, text)


@pytest.mark.ranks(2)
def test_a_transport_that_one_rank_does_not_have(comm, working, tmp_path, monkeypatch):
    """A transport file that is missing on one rank is an error on all ranks."""
    Path("net.py").write_text("from halograd.comm.transport import Mpi as Own\n")
    if comm.rank == 1:  # as on the local disk of another node
        monkeypatch.chdir(tmp_path)
    comm.Barrier()
    with pytest.raises(CommError, match=r"^rank 1: transport: expected a Python file, got 'net.py'"):
        Communicator(comm, "net.py:Own")


def test_a_lower_thread_level_is_refused(comm, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    with pytest.raises(CommError, match="MPI thread level: expected THREAD_MULTIPLE"):
        Communicator(comm)


def shared_mappings():
    with open(f"/proc/{os.getpid()}/maps") as maps:
        return sum(line.split()[1] == "rw-s" for line in maps)


def exchange_once(communicator):
    peers = {peer: 100_000 for peer in range(communicator.size) if peer != communicator.rank}
    channel = communicator.channel(peers, peers, np.float32)
    channel.start()
    channel.finish()
    communicator.reduction(np.zeros(100)).run()


def test_closing_frees_windows_thread_and_groups(comm):
    from mpi4py import MPI

    with Communicator(comm, "shared") as communicator:
        exchange_once(communicator)  # what MPI itself maps when ranks first meet
    gc.collect()  # what other tests have left is not to go in between
    before = shared_mappings()
    communicator = Communicator(comm, "shared")
    group = communicator.split(0)
    for owner in (communicator, group):
        exchange_once(owner)
    reduction = communicator.reduction(np.zeros(100))
    reduction.start()
    assert shared_mappings() > before or comm.size == 1
    mine = [communicator.mpi, group.mpi, *(owner._links._memory.node for owner in (communicator, group))]
    communicator.close()
    assert group.closed and communicator.closed
    assert all(handle == MPI.COMM_NULL for handle in mine), "MPI has some 2000 communicators only"
    assert shared_mappings() == before
    assert "halograd-progress" not in [thread.name for thread in threading.enumerate()]
    communicator.close()
    for call in (lambda: communicator.channel({}, {}, "f4"), lambda: communicator.split(0)):
        with pytest.raises(CommError, match="expected an open communicator, got a closed one"):
            call()


def test_a_local_fault_does_not_wait_for_the_others(comm):
    """A rank that leaves a communicator by its own error does not close it, because closing is collective."""
    communicator = Communicator(comm, "mpi")
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match="mine alone"), communicator:
            raise RuntimeError("mine alone")
        assert not communicator.closed
    communicator.close()
    assert communicator.closed
