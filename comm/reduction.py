"""Sums over all ranks of a communicator, in place, while the ranks compute: one algorithm over every link.

::

    deposit    encode this rank's summand where its peers get it from
    scatter    a move of the link: the own part of all summands is here
    add        in the order of the ranks
    gather     a move of the link: the sums of all parts are here
    give back  decode them to the buffer

A link says in a `Room` where all of this lies, and how what is deposited moves; a codec, what travels. Where nothing
has to be copied, a step is left out; a reduce-scatter has no gather, an all-gather no scatter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..device import on_device
from .counters import Meter
from .errors import CommError
from .progress import Progress, Stage, StagedOperation, Work
from .sums import METHODS

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Plain", "Reduction", "ReductionPlan", "ReductionSpec", "Room", "add_up", "check_alike", "check_spec", "cut"]

#: Types of arrays that are summed, if a link does not say otherwise.
REDUCIBLE: tuple[str, ...] = ("float32", "float64", "int32", "int64")
# Worked on at once [B]: fits the cache of a core, and a rank that waits for the thread does not wait long.
PIECE = 256 * 1024

Pairs = Sequence[tuple[Any, Any]]


@dataclass
class Room:
    """Where a sum, or a piece of one, lies on this rank. All arrays are flat.

    Attributes
    ----------
    deposits
        Targets and sources: what this rank copies where its peers get it from.
    scatter
        After it `summands` can be read; None: there is nothing to add.
    summands
        This rank's part of the summands of all ranks, in order. If `total` is one of them, they are overwritten.
    total
        Where their sum goes.
    gather
        After it the sources of `returns` can be read, and summands may be overwritten; None: no rank waits.
    returns
        Targets and sources: what this rank copies back.
    """

    deposits: Pairs = ()
    scatter: Stage | None = None
    summands: Sequence[Any] = ()
    total: Any = None
    gather: Stage | None = None
    returns: Pairs = ()

    def stages(self, codec: Codec) -> list[Stage]:
        """Return the stages of the sum."""
        found: list[Stage] = [codec.deposit(self.deposits)]
        if self.scatter is not None:
            found += [self.scatter, codec.add(self.summands, self.total)]
        if self.gather is not None:
            found.append(self.gather)
        return [*found, codec.give_back(self.returns)] if len(self.returns) else found


class Codec(Protocol):
    """What travels, and the arithmetic on it."""

    def deposit(self, pairs: Pairs) -> Stage:
        """Copy summands, or parts of them, to where they travel from."""
        ...

    def add(self, summands: Sequence[Any], total: Any) -> Stage:
        """Add up summands in their order."""
        ...

    def give_back(self, pairs: Pairs) -> Stage:
        """Copy what has travelled to the buffer."""
        ...


class Plain:
    """Elements as they are, on the host."""

    def deposit(self, pairs: Pairs) -> Stage:
        return Work([partial(np.copyto, t[part], s[part]) for t, s in pairs for part in cut(t)])

    give_back = deposit

    def add(self, summands: Sequence[np.ndarray], total: np.ndarray) -> Stage:
        # If the sum goes where another summand than the first lies, it is made in the place of the first.
        within = any(one is total for one in summands[1:])
        result = summands[0] if within else total
        calls = [partial(add_up, [one[part] for one in summands], result[part]) for part in cut(total)]
        return Work([*calls, partial(np.copyto, total, result)] if within else calls)


@dataclass
class ReductionPlan:
    """How a sum is made on this rank; nothing is done without an operation.

    Attributes
    ----------
    operation
        The stages of a run.
    progress
        Drives them while the ranks compute; None: `finish` does.
    queue
        Where operations wait that use the same memory one after the other, driven by `finish` in the order of their
        starts.
    arrival
        A move that knows since when the sum was there (`arrived`); None: when the operation was complete.
    direct
        Makes the sum at once, for `Reduction.run`; None: `start` and `finish` do.
    codec
        With ``"bfloat16"``: what rounding takes away (:class:`halograd.comm.rounding.Rounded`).
    nbytes, device_nbytes
        Memory beside the buffer, on the host and on a device [B].
    fetch, put
        Copy the buffer from a device before, and back afterwards.
    close
        Gives back what the sum holds.
    """

    operation: StagedOperation | None = None
    progress: Progress | None = None
    queue: deque[StagedOperation] | None = None
    arrival: Any = None
    direct: Callable[[], None] | None = None
    codec: Any = None
    nbytes: int = 0
    device_nbytes: int = 0
    fetch: Callable[[], None] | None = None
    put: Callable[[], None] | None = None
    close: list[Callable[[], object]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ReductionSpec:
    """What is to be summed, and how; see `Communicator.reduction`."""

    buffer: Any
    kind: str = "allreduce"
    name: str | None = None
    method: str = "allreduce"


class Reduction:
    """In-place sum of an array over all ranks; made by `Communicator.reduction`.

    ::

        fill the buffer
        reduction.start()     # does not wait
        ...                   # compute; leave the buffer alone
        reduction.finish()    # waits: the buffer holds the sum

    Collective: all ranks start their reductions in the same order; any number may be under way, and they
    may be finished in any order. The algorithm is the transport's choice; the result has the same bits on all ranks.
    `finish` may be where the ranks of a node meet and add up: until all have called it, none returns.
    Adjoint: the sum of the adjoints, that is, itself.

    Attributes
    ----------
    codec
        Of a rounded sum of several ranks: what rounding took away. None: nothing is rounded.
    """

    def __init__(self, buffer: Any, meters: Sequence[Meter], plan: ReductionPlan) -> None:
        self.buffer, self.codec = buffer, plan.codec
        self._meter, self._others, self._plan = meters[0], meters[1:], plan
        self._started_at = 0.0
        self.under_way = False
        self.closed = False

    @property
    def buffer_bytes(self) -> int:
        """Memory that the sum takes beside the buffer on this rank's host, in MPI or in shared memory [B]."""
        return self._plan.nbytes + (0 if self.codec is None else self.codec.nbytes)

    @property
    def device_bytes(self) -> int:
        """Memory that the sum takes beside the buffer on a device [B]."""
        return self._plan.device_nbytes

    @property
    def summed(self) -> bool:
        """Whether the sum that was started last has been made: `finish` does not wait for other ranks."""
        return self._plan.operation is None or self._plan.operation.arrived

    def start(self) -> None:
        """Begin to sum the buffer. Does not wait.

        Raises
        ------
        CommError
            If it is under way, or closed: what it held may serve another sum by now.
        """
        self._expect_idle("start", ", got another start()")
        self.under_way = True
        plan = self._plan
        if plan.fetch is not None:
            plan.fetch()
        self._started_at = time.perf_counter()
        self._meter.sent()
        for meter in self._others:
            meter.sent()
        if plan.operation is None:
            return
        if plan.progress is not None:
            plan.progress.submit(plan.operation)
            return
        plan.operation.start()
        if plan.queue is not None:
            plan.queue.append(plan.operation)

    def finish(self) -> None:
        """Return when the buffer holds the sum over all ranks.

        Raises
        ------
        CommError
            If the reduction was not started, or failed, be it on the progress thread.
        """
        if not self.under_way:
            raise CommError(f"finish(): expected start() of {self._meter.name} before")
        self.under_way = False
        self._meter.waits()
        before = time.perf_counter()
        arrived = self._complete() if self._plan.progress is None else self._attempt(self._complete)
        after = time.perf_counter()
        self._meter.took(self._started_at, before, arrived or after, after)
        if self._plan.put is not None:
            self._plan.put()

    def run(self) -> None:
        """`start` and `finish` at once, for small buffers that are needed now."""
        self._expect_idle("run")
        plan = self._plan
        if plan.direct is None:
            self.start()
            self.finish()
            return
        if plan.fetch is not None:
            plan.fetch()
        self._meter.waits()
        before = time.perf_counter()
        self._meter.sent()
        self._attempt(plan.direct)
        after = time.perf_counter()
        self._meter.took(before, before, after, after)
        if plan.put is not None:
            plan.put()

    def close(self) -> None:
        """Finish if under way; idempotent. Local, but all ranks do it."""
        if self.under_way:
            self.finish()
        if not self.closed:
            self.closed = True
            for call in self._plan.close:
                call()
            self._plan.close.clear()

    def _expect_idle(self, call: str, got: str = "") -> None:
        if self.closed:
            raise CommError(f"{call}(): expected an open reduction, got a closed one ({self._meter.name})")
        if self.under_way:
            raise CommError(f"{call}(): expected finish() of {self._meter.name} before{got}")

    def _complete(self) -> float:
        """Wait; return when the sum was there (`time.perf_counter` [s]), 0 if not known."""
        plan, operation = self._plan, self._plan.operation
        if operation is None:
            return 0.0
        if plan.progress is not None:
            plan.progress.complete(operation)
        elif plan.queue is not None:
            while not operation.over:
                plan.queue.popleft().wait()
        else:
            operation.wait()
        if plan.arrival is not None:
            return float(plan.arrival.arrived)
        return operation.completed_at if plan.progress is not None else 0.0

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CommError:
            raise
        except Exception as fault:
            raise CommError(f"reduction {self._meter.name} of {self.buffer.nbytes} bytes failed: {fault}") from fault


def cut(array: np.ndarray) -> list[slice]:
    """Return the slices of a flat array of at most `PIECE` bytes each."""
    step = max(1, PIECE // array.itemsize)
    if 0 < array.size <= step:
        return [slice(0, array.size)]
    return [slice(i, min(i + step, array.size)) for i in range(0, array.size, step)]


def add_up(summands: Sequence[np.ndarray], out: np.ndarray) -> None:
    """``out = summands[0] + summands[1] + ...``, in this order; at least two. Overflow gives inf, as in MPI."""
    with np.errstate(all="ignore"):
        np.add(summands[0], summands[1], out=out)
        for other in summands[2:]:
            np.add(out, other, out=out)


def check_spec(spec: ReductionSpec) -> None:
    """Raise CommError unless this is a sum that this rank can give. Local."""
    buffer, on_host = spec.buffer, on_device(spec.buffer) is None
    if spec.method not in METHODS:
        raise CommError(f"method: expected one of {', '.join(METHODS)}, got {spec.method!r}")
    if on_host and not isinstance(buffer, np.ndarray):
        raise CommError(f"buffer: expected a NumPy array, got {type(buffer).__name__}")
    if on_host:
        check_type(spec)
    if not buffer.flags.c_contiguous or (on_host and not buffer.flags.writeable):
        raise CommError(
            f"buffer: expected a {'writeable ' if on_host else ''}C-contiguous array, got strides {buffer.strides} "
            f"for shape {buffer.shape}; reduce a packed copy"
        )
    if METHODS[spec.method].codec == "bfloat16" and buffer.dtype != np.float32:
        raise CommError(f"buffer: expected float32 to be rounded to bfloat16, got {buffer.dtype}")


def check_type(spec: ReductionSpec, summable: Sequence[str] = REDUCIBLE) -> None:
    """Raise CommError unless the link sums arrays of this type. Local."""
    dtype = spec.buffer.dtype
    if METHODS[spec.method].adds and dtype.name not in summable:
        raise CommError(f"buffer: expected one of {', '.join(summable)}, got {dtype}; convert it to float32")


def likeness(specs: Sequence[ReductionSpec]) -> list[str]:
    """Return what ranks must have in common, a text per sum. Local."""
    return [
        f"shape {spec.buffer.shape} and {spec.buffer.dtype.name} by {spec.method!r} on "
        f"{'the host' if on_device(spec.buffer) is None else 'a device'}"
        for spec in specs
    ]


def check_alike(mpi_comm: MPI.Intracomm, first: int, mine: Sequence[str]) -> None:
    """Raise CommError unless `likeness` is that of the first rank, which is called `first`. Collective, to be agreed
    on."""
    wanted = mpi_comm.bcast(mine, root=0)
    if len(mine) != len(wanted):
        raise CommError(f"buffers: expected {len(wanted)} as on rank {first}, got {len(mine)}")
    for other, own in zip(wanted, mine):
        if own != other:
            raise CommError(f"buffer: expected {other} as on rank {first}, got {own}")
