"""Sums over all ranks of a communicator, in place, while the ranks compute: one algorithm for every link.

::

    deposit    encode this rank's summand where its peers read it
    scatter    a stage of the link: this rank's part of all summands has arrived
    add        add them up in the order of the ranks
    gather     a stage of the link: the sums of all parts have arrived
    return     decode them into the buffer

A link describes these arrays in `SumBuffers`, and how deposited data move; a codec (`halograd.comm.codec`) defines the
format of the data. Without anything to copy back, there is no return. A reduce-scatter has no gather, an all-gather
neither scatter nor add.
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
from .codec import UNCHANGED, Codec
from .counters import Meter
from .errors import CommError
from .progress import Progress, Stage, StagedOperation, Work
from .sums import METHODS, Method, carrying

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Plain",
    "Reduction",
    "ReductionPlan",
    "ReductionSpec",
    "SumBuffers",
    "add_up",
    "check_identical",
    "check_spec",
    "cut",
]

#: Dtypes that a link sums by default.
REDUCIBLE: tuple[str, ...] = ("float32", "float64", "int32", "int64")
# Bytes per piece of work: a piece fits the cache of a core, and a rank waits only briefly for the thread.
PIECE = 256 * 1024

Pairs = Sequence[tuple[Any, Any]]


@dataclass
class SumBuffers:
    """Arrays of a sum, or of a piece of one, on this rank. All arrays are flat.

    Attributes
    ----------
    deposits
        Pairs (target, source) of what this rank copies to where its peers read it.
    scatter
        Stage after which `summands` can be read; None: there is nothing to add.
    summands
        This rank's part of the summands of all ranks, in order. If `total` is one of them, the first may be
        overwritten, too.
    total
        Target of their sum.
    gather
        Stage after which the sources of `returns` can be read, and summands may be overwritten; None: no rank waits
        for the sums of others.
    returns
        Pairs (target, source) of what this rank copies back.
    """

    deposits: Pairs = ()
    scatter: Stage | None = None
    summands: Sequence[Any] = ()
    total: Any = None
    gather: Stage | None = None
    returns: Pairs = ()

    def stages(self, coding: Coding) -> list[Stage]:
        """Return the stages of the sum."""
        stages: list[Stage] = [coding.deposit(self.deposits)]
        if self.scatter is not None:
            stages += [self.scatter, coding.add(self.summands, self.total)]
        if self.gather is not None:
            stages.append(self.gather)
        return [*stages, coding.copy_back(self.returns)] if len(self.returns) else stages


class Coding(Protocol):
    """Protocol of the copies and additions of one reduction, on the buffers of its messages."""

    def deposit(self, pairs: Pairs) -> Stage:
        """Return the stage that copies summands, or parts of them, to where peers read or receive them."""
        ...

    def add(self, summands: Sequence[Any], total: Any) -> Stage:
        """Return the stage that adds up `summands` into `total`, in their order."""
        ...

    def copy_back(self, pairs: Pairs) -> Stage:
        """Return the stage that copies received data to the buffer."""
        ...


class Plain:
    """Copies and additions of elements in their own format, on the host."""

    def deposit(self, pairs: Pairs) -> Stage:
        return Work([partial(np.copyto, t[part], s[part]) for t, s in pairs for part in cut(t)])

    copy_back = deposit

    def add(self, summands: Sequence[np.ndarray], total: np.ndarray) -> Stage:
        # If the target of the sum is a summand other than the first, the sum is made in the array of the first.
        within = any(summand is total for summand in summands[1:])
        result = summands[0] if within else total
        calls = [partial(add_up, [summand[part] for summand in summands], result[part]) for part in cut(total)]
        return Work([*calls, partial(np.copyto, total, result)] if within else calls)


@dataclass
class ReductionPlan:
    """Operations and memory of a sum on this rank. Without an operation, the sum does nothing.

    Attributes
    ----------
    operation
        Stages of the sum.
    progress
        Progress thread that drives them while the ranks compute; None: `finish` drives them.
    queue
        Queue of operations that use the same memory one after the other; `finish` drives it in the order of the starts.
    arrival
        Stage with the arrival time of the sum (`arrived`); None: the sum arrived when the operation was complete.
    direct
        Function that makes the sum at once, for `Reduction.run`; None: `start` and `finish` do.
    encoding
        Encoder of the sum, with the encoding errors (:class:`halograd.comm.encoding.Encoding`); None: messages hold the
        elements as they are.
    nbytes, device_nbytes
        Memory in addition to the buffer and to that of `encoding`, on the host and on a device [B].
    fetch, put
        Functions that copy the buffer from a device before the sum, and back after it.
    close
        Functions that free the resources of the sum.
    """

    operation: StagedOperation | None = None
    progress: Progress | None = None
    queue: deque[StagedOperation] | None = None
    arrival: Any = None
    direct: Callable[[], None] | None = None
    encoding: Any = None
    nbytes: int = 0
    device_nbytes: int = 0
    fetch: Callable[[], None] | None = None
    put: Callable[[], None] | None = None
    close: list[Callable[[], object]] = field(default_factory=list)


# Compared by identity: `==` of two arrays is not a bool.
@dataclass(frozen=True, eq=False)
class ReductionSpec:
    """Arguments of `Communicator.reduction`, which documents them."""

    buffer: Any
    kind: str = "allreduce"
    name: str | None = None
    method: str = "allreduce"
    codec: Codec = UNCHANGED

    @property
    def sum(self) -> Method:
        """Method of the sum with its codec."""
        return carrying(self.method, self.codec)


class Reduction:
    """In-place sum of an array over all ranks; made by `Communicator.reduction`.

    ::

        fill the buffer
        reduction.start()     # does not wait
        ...                   # compute; leave the buffer alone
        reduction.finish()    # waits: the buffer holds the sum

    Collective: all ranks start their reductions in the same order. Any number may be active, and they may be finished
    in any order. The transport chooses the algorithm; the result has the same bits on all ranks. `finish` may be a
    barrier, if the ranks of a node add up in shared memory: it returns only after all ranks have called it. Adjoint:
    the sum of the adjoints, that is, itself.

    Attributes
    ----------
    encoding
        Encoder of an encoded sum of several ranks, with the encoding errors. None: messages hold the elements.
    """

    def __init__(self, buffer: Any, meters: Sequence[Meter], plan: ReductionPlan) -> None:
        self.buffer, self.encoding = buffer, plan.encoding
        self._meter, self._others, self._plan = meters[0], meters[1:], plan
        self._started_at = 0.0
        self.under_way = False
        self.closed = False

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the sum on this rank in addition to the buffer [B], also inside MPI.

        Memory that several sums share is not counted.
        """
        return self._plan.nbytes + (0 if self.encoding is None else self.encoding.nbytes)

    @property
    def device_bytes(self) -> int:
        """Device memory of the sum in addition to the buffer [B]."""
        return self._plan.device_nbytes

    @property
    def summed(self) -> bool:
        """Whether the last started sum has arrived: `finish` does not wait for other ranks, and copies at most."""
        return self._plan.operation is None or self._plan.operation.arrived

    def start(self) -> None:
        """Start to sum the buffer. Does not wait for other ranks.

        Raises
        ------
        CommError
            If the reduction is active or closed (another sum may use the memory of a closed one), or if it has failed.
        """
        self._expect_idle("start", ", got another start()")
        self.under_way = True
        try:
            self._attempt(self._begin)
        except CommError:
            self.under_way = False  # `close` must not wait for a sum that has not begun
            raise

    def _begin(self) -> None:
        plan = self._plan
        if plan.fetch is not None:
            plan.fetch()
        # After `fetch`, whose wait for the device is no communication.
        self._started_at = time.perf_counter()
        self._meter.sent()
        for meter in self._others:
            meter.sent()
        if plan.operation is None:  # one rank, or an empty buffer
            return
        if plan.progress is not None:
            plan.progress.submit(plan.operation)
            return
        plan.operation.start()
        if plan.queue is not None:
            plan.queue.append(plan.operation)

    def finish(self) -> None:
        """Wait until the buffer holds the sum over all ranks.

        Raises
        ------
        CommError
            If the reduction was not started, or if it has failed.
        """
        if not self.under_way:
            raise CommError(f"finish(): expected start() of {self._meter.name} before")
        self.under_way = False  # even if the sum fails, so that `close` does not wait for it again
        self._meter.waits()
        before = time.perf_counter()
        arrived = self._attempt(self._complete)
        after = time.perf_counter()
        self._meter.took(self._started_at, before, arrived or after, after)
        # The upload is only enqueued: the host does not wait for it.
        if self._plan.put is not None:
            self._plan.put()

    def run(self) -> None:
        """Run `start` and `finish`, for small buffers that are needed now."""
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
        # There is no other meter: a hierarchical sum, which has two, has no `direct`.
        self._meter.sent()
        self._attempt(plan.direct)
        after = time.perf_counter()
        self._meter.took(before, before, after, after)
        if plan.put is not None:
            plan.put()

    def close(self) -> None:
        """Free the reduction; finish it first if it is active. Idempotent. Local, but all ranks must call it."""
        if self.under_way:
            self.finish()
        if not self.closed:
            self.closed = True
            queue, operation = self._plan.queue, self._plan.operation
            if queue is not None and operation is not None and operation in queue:
                # An earlier sum has failed: no later one may end this one, whose memory is freed.
                queue.remove(operation)
            for call in self._plan.close:
                call()
            self._plan.close.clear()

    def _expect_idle(self, call: str, got: str = "") -> None:
        if self.closed:
            raise CommError(f"{call}(): expected an open reduction, got a closed one ({self._meter.name})")
        if self.under_way:
            raise CommError(f"{call}(): expected finish() of {self._meter.name} before{got}")

    def _complete(self) -> float:
        """Wait for the sum; return the time when it arrived (`time.perf_counter` [s]), 0 if unknown."""
        plan, operation = self._plan, self._plan.operation
        if operation is None:
            return 0.0
        if plan.progress is not None:
            plan.progress.complete(operation)
        elif plan.queue is not None:
            # Sums in one memory end in the order of their starts, so those started before this one end first.
            while not operation.over:
                self._end_first(plan.queue)
        else:
            operation.wait()
        if plan.arrival is not None:
            return float(plan.arrival.arrived)
        # Without the progress thread, nothing has observed the arrival.
        return operation.completed_at if plan.progress is not None else 0.0

    def _end_first(self, queue: deque[StagedOperation]) -> None:
        """Wait for the first sum of the queue.

        A sum that has failed stays there until its own `finish`, so that no later sum uses the memory, in which other
        ranks may still wait for the failed sum.
        """
        first = queue[0]
        try:
            if first.fault is not None:
                raise first.fault
            first.wait()
        except Exception as fault:
            first.fault = fault
            if first is not self._plan.operation:
                raise CommError(f"reduction {self._meter.name}: a sum started before it has failed: {fault}") from fault
            queue.popleft()
            raise
        queue.popleft()

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CommError:
            raise
        except Exception as fault:
            raise CommError(f"reduction {self._meter.name} of {self.buffer.nbytes} bytes failed: {fault}") from fault
        finally:
            # Also after a failure, so that the watchdog does not report a wait that has ended.
            self._meter.waited()


def cut(array: np.ndarray) -> list[slice]:
    """Return slices of at most `PIECE` bytes that cover a flat array."""
    step = max(1, PIECE // array.itemsize)
    if 0 < array.size <= step:
        return [slice(0, array.size)]
    return [slice(i, min(i + step, array.size)) for i in range(0, array.size, step)]


def add_up(summands: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Add up `summands` (at least two) into `out`, in order. Overflow gives inf, as in MPI."""
    with np.errstate(all="ignore"):
        np.add(summands[0], summands[1], out=out)
        for other in summands[2:]:
            np.add(out, other, out=out)


def check_spec(spec: ReductionSpec) -> None:
    """Raise CommError unless this rank can make the sum. Local."""
    buffer, on_host = spec.buffer, on_device(spec.buffer) is None
    if spec.method not in METHODS:
        raise CommError(f"method: expected one of {', '.join(METHODS)}, got {spec.method!r}")
    if on_host and not isinstance(buffer, np.ndarray):
        raise CommError(f"buffer: expected a NumPy array, got {type(buffer).__name__}")
    if on_host:  # on a device, the dtypes depend on the transport (`Maker._link`)
        check_type(spec)
    # The flags of CuPy's arrays have no `writeable`.
    if not buffer.flags.c_contiguous or (on_host and not buffer.flags.writeable):
        raise CommError(
            f"buffer: expected a {'writeable ' if on_host else ''}C-contiguous array, got strides {buffer.strides} "
            f"for shape {buffer.shape}; reduce a packed copy"
        )
    check_codec(spec)


def check_codec(spec: ReductionSpec) -> None:
    """Raise CommError unless the codec can encode this sum. Local."""
    codec, dtype = spec.codec, spec.buffer.dtype
    if codec.identity:
        return
    if not METHODS[spec.method].encodes:
        known = ", ".join(name for name, method in METHODS.items() if method.encodes)
        raise CommError(f"method: expected one of {known} with the codec {codec}, got {spec.method!r}")
    if not codec.takes(dtype.name):
        raise CommError(f"buffer: expected {codec.dtype} to be encoded as {codec}, got {dtype}")


def check_type(spec: ReductionSpec, summable: Sequence[str] = REDUCIBLE) -> None:
    """Raise CommError unless the dtype is `summable`, or the method sums nothing. Local."""
    dtype = spec.buffer.dtype
    if spec.sum.adds and dtype.name not in summable:
        raise CommError(f"buffer: expected one of {', '.join(summable)}, got {dtype}; convert it to float32")


def properties(specs: Sequence[ReductionSpec]) -> list[str]:
    """Return, for each sum, a string of the properties that must be the same on all ranks. Local."""
    return [
        f"shape {spec.buffer.shape} and {spec.buffer.dtype.name} by {spec.method!r} as {spec.codec} on "
        f"{'the host' if on_device(spec.buffer) is None else 'a device'}"
        for spec in specs
    ]


def check_identical(mpi_comm: MPI.Intracomm, first: int, mine: Sequence[str]) -> None:
    """Raise CommError unless `mine` (from `properties`) is the same as on the first rank. Collective.

    Messages of errors call that rank `first`. The caller makes all ranks agree on the error.
    """
    expected = mpi_comm.bcast(mine, root=0)
    if len(mine) != len(expected):
        raise CommError(f"buffers: expected {len(expected)} as on rank {first}, got {len(mine)}")
    for other, own in zip(expected, mine):
        if own != other:
            raise CommError(f"buffer: expected {other} as on rank {first}, got {own}")
