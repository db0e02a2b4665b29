"""Runner of a program: kernels, exchanges and sums of this rank's operations, as lists of calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.reduction import ReductionSpec
from ..device import Branch
from ..dtensor import End, Exchange, reductions_in_groups
from ..kernels import KernelError, Substitute
from ..kernels.guards import GUARDS
from ..lowering.operations import ExchangeSpec, ForkEnd, KernelSpec, Operation, Release, Run, Sum, Total, Transfer
from ..lowering.views import Buffer, Region, View
from .poison import Poison
from .program import Program, Segment, name_of
from .recording import Item
from .traffic import sums_of

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["Call", "Environment", "Mode", "Runner"]


@dataclass
class Mode:
    """Values that may change from step to step; shared by all kernels of an executor.

    Attributes
    ----------
    training
        Whether batch statistics and dropout are active; else running statistics are used, and no dropout.
    step
        Number of the training step. Together with `seed` it determines all random numbers.
    seed
        Seed of the run.
    valid
        Number of valid samples of the batch (the last batch of an epoch may be short).
    part
        Index of the part, for a batch that is computed in consecutive parts.
    size
        Number of samples of a part: the first sample of this part has the index ``part * size`` in the batch.
    parts
        Number of parts of a batch in training.
    counting
        Whether losses only add up their sums of weights, before the first part of a batch is computed.
    state
        `seed`, `step` and the index of the first sample, in the memory of the kernels: uint64 ``(3,)``.
        :meth:`write_state` writes the last two before every pass.
    loss_scale
        With float16, the factor of the gradients of the loss: float64 ``(1,)`` on the device; else None.
    """

    training: bool = True
    step: int = 0
    seed: int = 0
    valid: int = 0
    part: int = 0
    size: int = 0
    parts: int = 1
    counting: bool = False
    state: Any = None
    loss_scale: Any = None
    _written_part: int = 0

    def write_state(self) -> None:
        """Write the per-pass values into `state`. On a device, the write is enqueued on the stream."""
        self.state[1:2].fill(self.step)
        if self._written_part != self.part:
            self.state[2:].fill(self.part * self.size)
            self._written_part = self.part


Call = Callable[[], object]


@dataclass(frozen=True)
class Environment:
    """Environment in which kernels are created.

    Attributes
    ----------
    kernels
        Backend.
    mode
        Values that change from step to step.
    name
        Name of the layer.
    """

    kernels: Any
    mode: Mode
    name: str


class Runner:
    """Program bound to this rank's arrays. The constructor is collective over `comm`.

    Parameters
    ----------
    program
        Program to run.
    comm, kernels
        Communicator and backend.
    arrays
        Arrays outside the arena, by kind and name: ``arrays["params"]["conv/w"]``.
    mode
        Values that change from step to step.
    debug
        Whether arrays have separate memory, with guard bytes and poison (:class:`Poison`), and error messages name the
        operation.

    Attributes
    ----------
    forward, backward
        Calls of the operations of each segment, in the order of the program; without operations on gradients.
    arena
        Memory of all arrays that are not in `arrays`, zeroed; empty with `debug`.
    poison
        With `debug`, the detector of undeclared accesses; else None.
    substitutes
        Names of layers, each with a kernel that the backend replaced by another.
    """

    def __init__(
        self,
        program: Program,
        comm: Communicator,
        kernels: Any,
        arrays: Mapping[str, Mapping[str, Any]],
        mode: Mode,
        debug: bool = False,
    ) -> None:
        self._debug = debug
        self.program, self.comm, self.kernels, self.mode = program, comm, kernels, mode
        self.substitutes: list[tuple[str, Substitute]] = []
        self._elsewhere = arrays
        placement = program.placement
        self.arena = kernels.zeros((0 if debug else placement.size,), np.dtype("uint8"))
        self._arrays: dict[Buffer, Any] = {}
        self._instances: dict[object, Any] = {}
        self._forks = defaultdict[KernelSpec, Branch](kernels.device.fork)
        for buffer in placement.offsets:
            # The arena is zeroed already.
            if buffer.kept and buffer.fill:
                self._array(buffer).fill(buffer.fill)
        kernels.take_substitutes()  # drops those of earlier programs
        try:
            self._open(program)  # first: kernels may take sums as arguments
            self.poison = Poison(program, self.view) if debug else None
            self.forward = [self._bind(segment) for segment in program.forward]
            self.backward = [self._bind(segment) for segment in program.backward]
        except BaseException:
            self.close()  # a kernel or a sum that is refused must not keep the channels
            raise

    def view(self, view: View) -> Any:
        """Return the array of a view."""
        return view.resolve(self._array(view.buffer))

    def region(self, region: Region) -> Any:
        """Return the array of a region."""
        return self.view(region.view)

    def instance(self, spec: KernelSpec | Sum) -> Any:
        """Return the result of a kernel's `make`, or the reduction of a sum; None if this rank takes no part in it."""
        return self._instances[spec]

    def _array(self, buffer: Buffer) -> Any:
        if buffer not in self._arrays:
            if buffer.location is not None:
                kind, name = buffer.location
                self._arrays[buffer] = self._elsewhere[kind][name]
            elif self._debug:  # in the arena, the guards of one array would overlap with later arrays
                self._arrays[buffer] = self.kernels.zeros(buffer.shape, buffer.dtype)
            else:
                start = self.program.placement.offsets[buffer]
                flat = self.arena[start : start + buffer.nbytes].view(buffer.dtype)
                self._arrays[buffer] = flat.reshape(buffer.shape)
        return self._arrays[buffer]

    def _bind(self, segment: Segment) -> list[Call]:
        calls = [self._call(operation) for operation in segment.operations]
        # Those that the backend has recorded while it made the kernels of this segment.
        self.substitutes += [(segment.name, substitute) for substitute in self.kernels.take_substitutes()]
        return calls

    def item(self, segment: Segment, operation: Operation, call: Call) -> Item:
        """Return the call of an operation, with its properties for graphs (:class:`Item`). Local."""
        travels = _travels(operation)
        # A run starts its fork, which a `ForkEnd` finishes.
        starts = isinstance(operation, Run) or (isinstance(operation, Transfer | Total) and operation.end == "start")
        return Item(
            call, segment.name, self._held(operation), self._pairs.get(travels), starts, operation.when, segment.again
        )

    def _call(self, operation: Operation) -> Call:
        call = self._plain(operation)
        guarded = [self._call(o) for o in operation.guarded] if isinstance(operation, Run) else []
        if self.poison is None:
            return partial(_guard, call, guarded) if guarded else call
        if isinstance(operation, Run):
            call = partial(_placed, f"layer {operation.layer!r}, {name_of(operation)}", call)
        return self.poison.watched(operation, call, guarded)

    def _plain(self, operation: Operation) -> Call:
        if isinstance(operation, Run):
            call = self._run(operation)
            return partial(self._forks[operation.kernel], call) if operation.forked else call
        if isinstance(operation, ForkEnd):
            return self._forks[operation.kernel].join
        if isinstance(operation, Transfer):
            return getattr(self._instances[operation.exchange], operation.end)
        if isinstance(operation, Release):
            return _nothing  # it matters only for the placement in the arena
        assert isinstance(operation, Total)
        # None on a rank that is in no group of the sum.
        total = self._instances[operation.sum]
        return _nothing if total is None else getattr(total, operation.end)

    def _held(self, operation: Operation) -> bool:
        """Return whether a graph may contain an operation: the host must not take part in it."""
        if isinstance(operation, Run):
            alone = operation.kernel.recordable and not operation.kernel.sums
            return alone and all(map(self._held, operation.guarded))
        if self.comm.size == 1 or isinstance(operation, ForkEnd | Release):
            return True
        choice = self.comm.devices.choice
        # The host makes hierarchical and encoded sums.
        by_host = isinstance(operation, Total) and not operation.sum.algorithm.on_devices
        return choice is not None and choice.captures and not by_host

    @cached_property
    def _pairs(self) -> dict[object, int]:
        """Numbers of exchanges and sums in the order of operations, the same on all ranks; negative for forks."""
        travels = dict.fromkeys(_travels(operation) for operation in self.program)
        travels.pop(None, None)
        forks = [key for key in travels if isinstance(key, KernelSpec)]
        moves = [key for key in travels if not isinstance(key, KernelSpec)]
        return {key: number for number, key in enumerate(moves)} | {key: -1 - i for i, key in enumerate(forks)}

    def _once(self, key: Any, make: Callable[[Any], Any]) -> Any:
        # Several operations may run one kernel, such as the two passes of a layer.
        if key not in self._instances:
            self._instances[key] = make(key)
        return self._instances[key]

    def _run(self, operation: Run) -> Call:
        kernel = self._once(operation.kernel, partial(self._kernel, operation.layer))
        return kernel if operation.method is None else getattr(kernel, operation.method)

    def _kernel(self, name: str, kernel: KernelSpec) -> Any:
        arrays = {key: None if view is None else self.view(view) for key, view in kernel.views.items()}
        arrays |= {key: None if sum_ is None else self._instances[sum_] for key, sum_ in kernel.sums.items()}
        try:
            return kernel.make(Environment(self.kernels, self.mode, name), **arrays)
        except KernelError as error:
            raise KernelError(f"{name}: {error}") from error

    def _open(self, program: Program) -> None:
        """Create all exchanges together, and all sums together.

        If they were created one by one, each would take several collectives of all ranks.
        """
        exchanges = dict.fromkeys(o.exchange for o in program if isinstance(o, Transfer))
        opened = Exchange.together(self.comm, [self._arguments(exchange) for exchange in exchanges])
        self._instances.update(zip(exchanges, opened))
        sums = sums_of(program)
        specs = [(o.groups, ReductionSpec(self.view(o.view), o.kind, o.name, o.method)) for o in sums]
        for total, reduction in zip(sums, reductions_in_groups(self.comm, specs)):
            self._instances[total] = None if reduction is None else UnderWay(reduction)

    def _arguments(self, exchange: ExchangeSpec) -> dict[str, Any]:
        return {
            "source": End(exchange.sources, self.view(exchange.source), exchange.source_origin),
            "target": End(exchange.targets, self.view(exchange.target), exchange.target_origin),
            "combine": exchange.combine,
            "kind": exchange.kind,
            "name": exchange.name,
        }

    def close(self) -> None:
        """Free kernels, channels and reductions. Local."""
        for item in self._instances.values():
            # Many kernels are plain functions, which hold nothing.
            if hasattr(item, "close"):
                item.close()


class UnderWay:
    """Sum that may be finished at any time: without a start, finish does nothing."""

    def __init__(self, reduction: Any) -> None:
        self._reduction, self.under_way = reduction, False

    def start(self) -> None:
        self.finish()  # the last step may have started the sum and had no backward pass to finish it
        self._reduction.start()
        self.under_way = True  # not after a start that has failed

    def finish(self) -> None:
        if self.under_way:
            self.under_way = False
            self._reduction.finish()

    def close(self) -> None:
        """Free the reduction."""
        self._reduction.close()


def _travels(operation: Operation) -> object:
    """Return the exchange, sum or forked kernel that an operation starts or finishes; None for other operations."""
    if isinstance(operation, Transfer):
        return operation.exchange
    if isinstance(operation, ForkEnd) or (isinstance(operation, Run) and operation.forked):
        return operation.kernel
    return operation.sum if isinstance(operation, Total) else None


def _nothing() -> None:
    pass


def _placed(operation: str, call: Call) -> object:
    """Call a function; error messages about guard bytes contain `operation`, the name of the operation."""
    outer, GUARDS.operation = GUARDS.operation, operation
    try:
        return call()
    finally:
        GUARDS.operation = outer


def _guard(call: Call, guarded: Sequence[Call]) -> None:
    if call():
        for other in guarded:
            other()
