"""The reader that runs: operations bound to kernels, exchanges and sums of this rank, then a list of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.reduction import ReductionSpec
from ..comm.sums import METHODS
from ..dtensor import End, Exchange, reductions_in_groups
from ..kernels import KernelError, Substitute
from . import operations
from .mode import Mode
from .operations import KernelSpec, Operation, Run, Sum, Total, Transfer
from .program import Program, Segment
from .recording import Item
from .views import Buffer, Region, View

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["Environment", "Pass", "Runner"]

Call = Callable[[], object]


@dataclass(frozen=True)
class Environment:
    """What kernels are made with.

    Attributes
    ----------
    kernels
        Backend.
    mode
        What changes from step to step.
    name
        Of the layer.
    """

    kernels: Any
    mode: Mode
    name: str


@dataclass(frozen=True)
class Pass:
    """The calls of one layer in one pass, of a training step and of an evaluation."""

    name: str
    training: Sequence[Call]
    evaluation: Sequence[Call]

    def run(self, training: bool) -> None:
        for call in self.training if training else self.evaluation:
            call()


class Runner:
    """A program on this rank's arrays. Collective over `comm` to build, in the order of operations; then it only runs.

    Parameters
    ----------
    program
        What to run.
    comm, kernels
        Communicator and backend.
    arrays
        Arrays that lie elsewhere, by kind and name: ``arrays["params"]["conv/w"]``.
    mode
        What changes from step to step.

    Attributes
    ----------
    forward, backward
        Calls, layer by layer.
    arena
        The memory of everything else, zeroed.
    substitutes
        Kernels that others stand in for, by layer.
    """

    def __init__(
        self, program: Program, comm: Communicator, kernels: Any, arrays: Mapping[str, Mapping[str, Any]], mode: Mode
    ) -> None:
        self.program, self.comm, self.kernels, self.mode = program, comm, kernels, mode
        self.substitutes: list[tuple[str, Substitute]] = []
        self._elsewhere = arrays
        placement = program.placement
        self.arena = kernels.zeros((placement.size,), np.dtype("uint8"))
        self._arrays: dict[Buffer, Any] = {}
        self._made: dict[object, Any] = {}
        for buffer in placement.offsets:
            if buffer.kept and buffer.fill:
                self._array(buffer).fill(buffer.fill)
        kernels.take_substitutes()  # those of others are not ours to report
        self._open(program)
        self.forward = [self._bind(segment) for segment in program.forward]
        self.backward = [self._bind(segment) for segment in program.backward]

    def view(self, view: View) -> Any:
        """The array of a view."""
        return view.resolve(self._array(view.buffer))

    def region(self, region: Region) -> Any:
        """The array of a region."""
        return self.view(region.view)

    def made(self, kernel: KernelSpec) -> Any:
        """What the `make` of a kernel has returned."""
        return self._made[kernel]

    def _array(self, buffer: Buffer) -> Any:
        if buffer not in self._arrays:
            if buffer.place is not None:
                kind, name = buffer.place
                self._arrays[buffer] = self._elsewhere[kind][name]
            else:
                start = self.program.placement.offsets[buffer]
                flat = self.arena[start : start + buffer.nbytes].view(buffer.dtype)
                self._arrays[buffer] = flat.reshape(buffer.shape)
        return self._arrays[buffer]

    # -- binding -------------------------------------------------------------------------------

    def _bind(self, segment: Segment) -> Pass:
        calls = [(operation.when, self._call(operation)) for operation in segment.operations]
        self.substitutes += [(segment.name, found) for found in self.kernels.take_substitutes()]
        modes = ([call for when, call in calls if when in (None, kind)] for kind in ("training", "evaluation"))
        return Pass(segment.name, *modes)

    def _call(self, operation: Operation) -> Call:
        if isinstance(operation, Run):
            return self._run(operation)
        if isinstance(operation, Transfer):
            return getattr(self._made[operation.exchange], operation.end)
        assert isinstance(operation, Total)
        total = self._made[operation.sum]
        return _nothing if total is None else getattr(total, operation.end)

    def items(self, segment: Segment) -> list[Item]:
        """The calls of one layer in a pass of training, for graphs. Local."""
        pairs = self._pairs
        return [
            Item(
                self._call(operation),
                segment.name,
                self._held(operation),
                pairs.get(_travels(operation)),
                isinstance(operation, Transfer | Total) and operation.end == "start",
            )
            for operation in segment.operations
            if operation.when in (None, "training")
        ]

    def _held(self, operation: Operation) -> bool:
        """Whether a graph may hold it: nothing in which the host takes part."""
        if isinstance(operation, Run):
            alone = operation.kernel.recordable and not operation.kernel.sums
            return alone and all(map(self._held, operation.guarded))
        if self.comm.size == 1:
            return True
        choice = self.comm.devices.choice
        by_host = isinstance(operation, Total) and not METHODS[operation.sum.method].on_devices
        return choice is not None and choice.captures and not by_host

    @cached_property
    def _pairs(self) -> dict[object, int]:
        """Numbers of the exchanges and sums, in the order of operations, which is the same on all ranks."""
        found = dict.fromkeys(_travels(operation) for operation in self.program)
        found.pop(None, None)
        return {key: number for number, key in enumerate(found)}

    def _once(self, key: Any, make: Callable[[Any], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make(key)
        return self._made[key]

    def _run(self, operation: Run) -> Call:
        made = self._once(operation.kernel, partial(self._kernel, operation.layer))
        call = made if operation.method is None else getattr(made, operation.method)
        if not operation.guarded:
            return call
        return partial(_guard, call, [self._call(guarded) for guarded in operation.guarded])

    def _kernel(self, name: str, kernel: KernelSpec) -> Any:
        arrays = {key: None if view is None else self.view(view) for key, view in kernel.views.items()}
        arrays |= {key: None if sum_ is None else self._made[sum_] for key, sum_ in kernel.sums.items()}
        try:
            return kernel.make(Environment(self.kernels, self.mode, name), **arrays)
        except KernelError as error:
            raise KernelError(f"{name}: {error}") from error

    def _open(self, program: Program) -> None:
        """Make all exchanges together, and all sums: one by one, each would cost some meetings of all ranks."""
        found = dict.fromkeys(o.exchange for o in program if isinstance(o, Transfer))
        made = Exchange.together(self.comm, [self._arguments(one) for one in found])
        self._made.update(zip(found, made))
        sums = list(dict.fromkeys(chain.from_iterable(map(_sums, program))))
        specs = [(one.groups, ReductionSpec(self.view(one.view), one.kind, one.name, one.method)) for one in sums]
        for total, reduction in zip(sums, reductions_in_groups(self.comm, specs)):
            self._made[total] = None if reduction is None else UnderWay(reduction)

    def _arguments(self, made: operations.ExchangeSpec) -> dict[str, Any]:
        return {
            "source": End(made.sources, self.view(made.source), made.source_origin),
            "target": End(made.targets, self.view(made.target), made.target_origin),
            "combine": made.combine,
            "kind": made.kind,
            "name": made.name,
        }

    def close(self) -> None:
        """Free kernels, channels and sums. Local."""
        for item in self._made.values():
            if hasattr(item, "close"):
                item.close()


class UnderWay:
    """A sum that knows whether it is under way: to finish it twice does nothing."""

    def __init__(self, reduction: Any) -> None:
        self._reduction, self.under_way = reduction, False

    def start(self) -> None:
        self.finish()
        self.under_way = True
        self._reduction.start()

    def finish(self) -> None:
        if self.under_way:
            self.under_way = False
            self._reduction.finish()

    def close(self) -> None:
        """Free it; one that is under way is finished first."""
        self._reduction.close()


def _sums(operation: Operation) -> list[Sum]:
    """The sums that an operation takes part in."""
    if isinstance(operation, Total):
        return [operation.sum]
    found = operation.kernel.sums.values() if isinstance(operation, Run) else ()
    return [one for one in found if one is not None]


def _travels(operation: Operation) -> object:
    """The exchange or sum of which an operation is one end."""
    if isinstance(operation, Transfer):
        return operation.exchange
    return operation.sum if isinstance(operation, Total) else None


def _nothing() -> None:
    pass


def _guard(call: Call, guarded: Sequence[Call]) -> None:
    if call():
        for other in guarded:
            other()
