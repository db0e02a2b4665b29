"""Operations of a step: kernels, exchanges and sums, in order. Pure data: no arrays, no MPI, no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dtensor import Blocks, Groups
from .views import Buffer, View

__all__ = ["ExchangeSpec", "KernelSpec", "Operation", "Run", "Sum", "Timing", "Total", "Transfer"]


@dataclass(frozen=True)
class Timing:
    """What to price a kernel by.

    Attributes
    ----------
    phase
        Which of the times of a layer it takes: ``"forward"``, ``"backward_data"`` or ``"backward_filter"``.
    inputs
        Local shapes ``(N, *spatial, C)`` of the layer's inputs.
    outputs
        Extent in space of what it makes, where that does not follow.
    filters
        Output channels that it makes, where those are cut.
    """

    phase: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...] | None = None
    filters: int | None = None


@dataclass(eq=False)
class KernelSpec:
    """Local computation on arrays that stay. Made once, run as often as operations say.

    Attributes
    ----------
    make
        ``make(environment, **arrays)`` gives what is run: a function, or an object whose methods are.
    views
        Arrays by the names under which `make` takes them; None is passed on.
    sums
        Sums that it starts and finishes by itself, by the names under which `make` takes them.
    recordable
        Whether a graph of a device can repeat it: it makes no arrays, and does the same in every step.
    """

    make: Callable[..., Any]
    views: dict[str, View | None]
    sums: dict[str, Sum | None] = field(default_factory=dict)
    recordable: bool = True

    def add(self, **views: View | None) -> None:
        """More arrays, such as those of the backward pass, of which the forward pass knows nothing yet."""
        self.views.update(views)


@dataclass(eq=False)
class ExchangeSpec:
    """Boxes that travel between ranks; see :class:`halograd.dtensor.Exchange`, whose arguments these are."""

    sources: Blocks
    targets: Blocks
    source: View
    target: View
    source_origin: tuple[int, ...]
    target_origin: tuple[int, ...]
    combine: str
    kind: str
    name: str

    @property
    def itemsize(self) -> int:
        """Size of an element that travels [B]."""
        return self.source.dtype.itemsize


@dataclass(eq=False)
class Sum:
    """A sum in place over groups of ranks.

    Attributes
    ----------
    groups
        Who sums.
    view
        This rank's array; packed.
    sizes
        Bytes per group, by its number [B].
    kind, name
        Under which it is booked, and for the recorder.
    method
        See `Communicator.reduction`.
    """

    groups: Groups
    view: View
    sizes: Sequence[int]
    kind: str
    name: str
    method: str = "allreduce"


@dataclass(eq=False)
class Operation:
    """One entry of a program.

    Attributes
    ----------
    layer
        Name of the layer, or of the redistribution, that it belongs to.
    when
        ``"training"`` or ``"evaluation"``: left out of passes of the other kind; None: part of both.
    """

    layer: str
    when: str | None = field(default=None, kw_only=True)

    def views(self) -> Iterator[View]:
        """All that it reads or writes."""
        yield from ()

    def buffers(self) -> Iterator[Buffer]:
        """Where these lie."""
        return (view.buffer for view in self.views())


@dataclass(eq=False)
class Run(Operation):
    """Run a kernel, or one method of it.

    Attributes
    ----------
    uses
        Names of the arrays that the method touches; None: all of the kernel.
    timing
        What it is priced by; None: it takes next to no time.
    guarded
        Operations that follow if the method returns true, as it then does on all ranks.
    """

    kernel: KernelSpec
    method: str | None = None
    uses: tuple[str, ...] | None = None
    timing: Timing | None = None
    guarded: tuple[Operation, ...] = ()

    def views(self) -> Iterator[View]:
        for name, view in self.kernel.views.items():
            if view is not None and (self.uses is None or name in self.uses):
                yield view
        for operation in self.guarded:
            yield from operation.views()


@dataclass(eq=False)
class Transfer(Operation):
    """One end of an exchange: ``"start"`` packs and sends, ``"finish"`` waits and unpacks."""

    exchange: ExchangeSpec
    end: str

    def views(self) -> Iterator[View]:
        if self.end == "start":
            yield self.exchange.source
        yield self.exchange.target


@dataclass(eq=False)
class Total(Operation):
    """One end of a sum."""

    sum: Sum
    end: str

    def views(self) -> Iterator[View]:
        yield self.sum.view
