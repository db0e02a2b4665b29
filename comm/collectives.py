"""Collectives of set-ups, in which a rank that waits leaves its core to others.

A blocking collective spins until the last rank has come. With more ranks than cores, the ranks that spin keep that last
rank from its core, and the scheduler counts them as busy. These collectives are non-blocking ones, polled with naps.
None of them belongs in a step.

Set-ups side by side are generators that ask for something, whose questions of a round are answered together. To set one
thing up, ranks meet some times; a program has hundreds of them, and many ranks on few cores take long to meet. Written
as a generator that yields what it asks for, a set-up shares its meetings with all others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["allgather", "allgather_objects", "alltoall", "barrier", "broadcast_object", "finish", "side_by_side"]

#: A rank offers its core so many times before it naps. Every nap is longer than the one before by so much, up to the
#: longest one: a rank oversleeps by a tenth of its wait at most.
OFFERS = 5
NAP, LONGEST_NAP = 2e-5, 1e-3  # [s]
GROWTH = 1.1


def finish(request: MPI.Request) -> None:
    """Wait for a non-blocking operation without keeping the core busy. Local, but as late as the last rank."""
    for _ in range(OFFERS):
        if request.Test():
            return
        os.sched_yield()
    nap = NAP
    while not request.Test():
        time.sleep(nap)
        nap = min(nap * GROWTH, LONGEST_NAP)


def barrier(comm: MPI.Intracomm) -> None:
    """Return when all ranks have called it. Collective over `comm`."""
    finish(comm.Ibarrier())


def allgather(comm: MPI.Intracomm, values: np.ndarray) -> np.ndarray:
    """Return the values ``(n,)`` of all ranks, ``(ranks, n)``. Collective over `comm`, `n` alike on all ranks."""
    everywhere = np.empty((comm.size, values.size), values.dtype)
    finish(comm.Iallgather(values, everywhere))
    return everywhere


def alltoall(comm: MPI.Intracomm, values: np.ndarray) -> np.ndarray:
    """Return element `rank` of the values ``(ranks,)`` of every rank. Collective over `comm`."""
    received = np.empty_like(values)
    finish(comm.Ialltoall(values, received))
    return received


def allgather_objects(comm: MPI.Intracomm, value: Any) -> list[Any]:
    """Return the small objects of all ranks, in order. Collective over `comm`."""
    from mpi4py.MPI import pickle  # errors are imported where there is no MPI

    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = allgather(comm, np.array([mine.size], np.int64))[:, 0]
    ends = sizes.cumsum()
    everywhere = np.empty(int(ends[-1]), np.uint8)
    finish(comm.Iallgatherv(mine, [everywhere, sizes]))
    return [pickle.loads(one.tobytes()) for one in np.split(everywhere, ends[:-1])]


def broadcast_object(comm: MPI.Intracomm, value: Any, root: int = 0) -> Any:
    """Return the small object that `root` passes. Collective over `comm`."""
    from mpi4py.MPI import pickle

    data = np.array(bytearray(pickle.dumps(value if comm.rank == root else None)), np.uint8)
    size = np.array([data.size], np.int64)
    finish(comm.Ibcast(size, root))
    if comm.rank != root:
        data = np.empty(int(size[0]), np.uint8)
    finish(comm.Ibcast(data, root))
    return value if comm.rank == root else pickle.loads(data.tobytes())


Question = TypeVar("Question")
Answer = TypeVar("Answer")
Made = TypeVar("Made")


def side_by_side(
    steps: Sequence[Generator[Question, Answer, Made]], answer: Callable[[list[Question]], Sequence[Answer]]
) -> list[Made]:
    """Return what the generators return, in their order.

    Collective if `answer` is, which is given the questions of a round and is called as long as there are some.

    >>> def area(name):
    ...     width = yield name + " wide"
    ...     height = yield name + " high"
    ...     return width * height
    >>> def answer(asked):
    ...     print(asked)
    ...     return [len(text) for text in asked]
    >>> side_by_side([area("door"), area("wall")], answer)
    ['door wide', 'wall wide']
    ['door high', 'wall high']
    [81, 81]
    """
    made: dict[int, Made] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(steps)))  # to send None begins a generator
    while answers:
        asked: dict[int, Question] = {}
        for number, given in answers.items():
            try:
                asked[number] = steps[number].send(given)
            except StopIteration as end:
                made[number] = end.value
        answers = dict(zip(asked, answer(list(asked.values())))) if asked else {}
    return [made[number] for number in range(len(steps))]
