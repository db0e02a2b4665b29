"""Operations of a step in order: kernels, exchanges and sums. Pure data: no arrays, no MPI, no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..comm.codec import UNCHANGED, Codec
from ..comm.sums import Method, carrying
from ..dtensor import Blocks, Groups
from ..kernels.access import Access, access_of
from ..kernels.geometry import Geometry
from ..kernels.kernel import FusedActivation
from .views import Buffer, View

__all__ = [
    "ExchangeSpec",
    "ForkEnd",
    "KernelSpec",
    "NormSums",
    "Operation",
    "Release",
    "Run",
    "Sum",
    "Summing",
    "SumsOver",
    "Timing",
    "Total",
    "Transfer",
]


class Timing(NamedTuple):
    """Description of a kernel for the performance model.

    Attributes
    ----------
    phase
        Phase of the layer to which the kernel belongs: ``"forward"``, ``"backward_data"`` or ``"backward_filter"``;
        ``"boundary"`` computes boundary strips of the output again, or its margin; ``"sum"`` adds up the inputs,
        element by element; ``"copy"`` only copies.
    inputs
        Local shapes ``(N, *spatial, C)`` of the layer's inputs.
    outputs
        Spatial extents of the output, if they do not follow from the inputs.
    filters
        Number of output channels, if these are cut.
    copied
        Size of arrays that the kernel copies in addition [B].
    share
        Fraction of the time of the phase that the kernel takes; below 1 if another kernel computes a part of it.
    """

    phase: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...] | None = None
    filters: int | None = None
    copied: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class SumsOver:
    """Sums of a norm over one of its arrays, which the kernel that writes this array may compute in addition.

    Attributes
    ----------
    sums, reader
        Methods of the norm's kernel that compute the sums, and that read them. If statistics are local, only
        `sums` in the backward pass and `reader` in the forward pass are operations, and each does the work of both.
    rest
        Method that replaces `reader` if another kernel computes the sums.
    arrays
        Names of the norm's arrays that the other kernel needs.
    share
        Fraction of the norm's time in this pass that remains without the sums.
    activation
        Activation between the array and the sums.
    refused
        Reason why no other kernel can compute the sums; "": it can.
    """

    sums: str
    reader: str
    rest: str
    arrays: tuple[str, ...]
    share: float
    activation: FusedActivation | None = None
    refused: str = ""


@dataclass(frozen=True)
class NormSums:
    """Sums of a norm that other kernels may compute.

    Attributes
    ----------
    over
        The sums by the array's name in the norm's kernel.
    without
        ``without(names)`` returns a `make` of the norm's kernel whose sums are separate operations, without those over
        the arrays `names`, which other kernels compute.
    eps
        Number that is added to the variance.
    narrow
        Arrays, by name, that replace those of the norm's kernel if another kernel computes the sums over ``x``: that
        kernel writes them without a conversion. Only for sums that are not added up over ranks.
    """

    over: Mapping[str, SumsOver]
    without: Callable[[frozenset[str]], Callable[..., Any]]
    eps: float
    narrow: Mapping[str, View] = field(default_factory=dict)


@dataclass(frozen=True)
class Summing:
    """Variant of a convolution's kernel that also computes the sums of a norm over the array that it writes.

    Attributes
    ----------
    written, names
        Name of the array that the kernel writes, and names of image, weights and output, or of their gradients.
    geometry
        Function that returns the geometry.
    make
        ``make(eps, activation)`` returns a `make` that also takes the arrays of `SumsOver.arrays`.
    methods
        Methods of the kernel by the pass that runs them; empty: the kernel itself runs.
    """

    written: str
    names: tuple[str, str, str]
    geometry: Callable[[], Geometry]
    make: Callable[[float, FusedActivation | None], Callable[..., Any]]
    methods: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class KernelSpec:
    """Kernel: local computation on fixed arrays. It is created once; operations (:class:`Run`) execute it.

    Attributes
    ----------
    make
        Function ``make(environment, **arrays)`` that returns the function to run, or an object whose methods are run.
    views
        Arrays by the names of their parameters in `make`; None is passed unchanged.
    sums
        Sums that the kernel starts and finishes itself, by the names of their parameters in `make`.
    recordable
        Whether a graph of a device can repeat the kernel: it allocates no arrays, and is the same in every step.
    function
        Elementwise function from ``x`` to ``y`` that the kernel computes, if its gradient does not read ``x``; else
        None.
    fuse
        ``fuse(function)`` returns a `make` that applies an elementwise function to ``y`` before it is written; None:
        the kernel cannot.
    norm
        Sums that other kernels may compute for this kernel, a norm.
    summing
        Variant that computes the sums of a norm.
    forks
        Whether the kernel may run at the same time as others: it uses no work space that kernels on other streams use.
    keeps
        Memory that the kernel alone keeps from its forward to its backward method, with any backend [B].
    """

    make: Callable[..., Any]
    views: dict[str, View | None]
    sums: dict[str, Sum | None] = field(default_factory=dict)
    recordable: bool = True
    function: FusedActivation | None = None
    fuse: Callable[[FusedActivation], Callable[..., Any]] | None = None
    norm: NormSums | None = None
    summing: Summing | None = None
    forks: bool = False
    keeps: int = 0

    def add(self, **views: View | None) -> None:
        """Add arrays, such as those of the backward pass, which are not known when the forward pass is lowered."""
        self.views.update(views)


@dataclass(eq=False)
class ExchangeSpec:
    """Arguments of an exchange, with views instead of arrays; see :class:`halograd.dtensor.Exchange`."""

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
        """Size of an element in messages [B]."""
        return self.source.dtype.itemsize


# Compared by identity: two sums with equal arguments are still two sums.
@dataclass(eq=False)
class Sum:
    """Sum in place over groups of ranks.

    Attributes
    ----------
    groups
        Groups of ranks, each with its own sum.
    view
        This rank's array; packed.
    sizes
        Size of the array, by the number of the group [B].
    kind, name
        Kind for the traffic counters, and name for the recorder.
    method
        Method of the sum, see `Communicator.reduction`.
    codec
        Format of the data in messages.
    feedback
        Whether encoding errors are kept for the next sum.
    """

    groups: Groups
    view: View
    sizes: Sequence[int]
    kind: str
    name: str | None
    method: str = "allreduce"
    codec: Codec = UNCHANGED
    feedback: bool = False

    @property
    def algorithm(self) -> Method:
        """Algorithm of the sum: its method with its codec."""
        return carrying(self.method, self.codec)


@dataclass(eq=False)  # compared by identity: the same work may occur several times in a program
class Operation:
    """Entry of a program.

    Attributes
    ----------
    layer
        Name of the layer, or of the redistribution, of the operation; "" for most operations on gradients.
    when
        Passes that run the operation: ``"training"`` or ``"evaluation"`` passes; ``"step"``: the last training pass of
        a step; None: all passes.
    """

    layer: str
    when: str | None = field(default=None, kw_only=True)

    def views(self) -> Iterator[View]:
        """Yield all views that the operation reads or writes."""
        yield from ()

    def buffers(self) -> Iterator[Buffer]:
        """Yield the buffers of all views of the operation."""
        return (view.buffer for view in self.views())

    def held(self) -> Iterator[Buffer]:
        """Yield the buffers that must exist for the operation, used or not."""
        return self.buffers()

    def sums(self) -> Iterator[Sum]:
        """Yield the sums that the operation starts, finishes or contains."""
        yield from ()

    def describe(self) -> str:
        """Return a description of the operation for the listing of a program."""
        return type(self).__name__.lower()


@dataclass(eq=False)
class Run(Operation):
    """Execution of a kernel, or of one of its methods.

    Attributes
    ----------
    timing
        Description for the performance model; None: its time is negligible.
    guarded
        Operations that follow if the method returns true; it returns the same on all ranks.
    forked
        Whether it may run at the same time as later operations, up to its :class:`ForkEnd`.
    """

    kernel: KernelSpec
    method: str | None = None
    timing: Timing | None = None
    guarded: tuple[Operation, ...] = ()
    forked: bool = False

    @property
    def access(self) -> Access:
        """Accesses to arrays, as declared by the kernel."""
        return access_of(self.kernel.make, self.method)

    @property
    def arrays(self) -> dict[str, View]:
        """Arrays that the kernel reads or writes, by the names of their parameters."""
        views = self.kernel.views
        # Arrays that the declaration names, also by prefixes (``source*``); None is not an array.
        return {name: view for name in self.access.used(views) if (view := views[name]) is not None}

    def views(self) -> Iterator[View]:
        yield from self.arrays.values()
        # They may run within this operation, so their arrays are in use as well.
        for operation in self.guarded:
            yield from operation.views()

    def held(self) -> Iterator[Buffer]:
        # A kernel is created with all its arrays, also those that this method does not use.
        yield from (view.buffer for view in self.kernel.views.values() if view is not None)
        for operation in self.guarded:
            yield from operation.held()

    def sums(self) -> Iterator[Sum]:
        yield from (total for total in self.kernel.sums.values() if total is not None)


@dataclass(eq=False)
class ForkEnd(Operation):
    """End of a forked kernel: later operations see its results, and may write what it has read.

    Until then its arrays are in use, so that no other buffer takes their memory.
    """

    kernel: KernelSpec
    arrays: tuple[View, ...]

    def views(self) -> Iterator[View]:
        yield from self.arrays

    def describe(self) -> str:
        return f"join of {self.layer}"


@dataclass(eq=False)
class Release(Operation):
    """Release of buffers whose contents are not needed until later operations write them again. It runs nothing.

    Until then, other buffers may use their memory.
    """

    released: tuple[Buffer, ...]

    # `views` yields nothing: a release does not count as a use of the buffers.
    def describe(self) -> str:
        return f"release {len(self.released)} arrays of {sum(buffer.nbytes for buffer in self.released)} B"


@dataclass(eq=False)
class Transfer(Operation):
    """Start or finish of an exchange: ``"start"`` packs and sends, ``"finish"`` waits and unpacks."""

    exchange: ExchangeSpec
    end: str

    def views(self) -> Iterator[View]:
        if self.end == "start":
            yield self.exchange.source
        # The start, too: it copies the pieces that stay on the rank.
        yield self.exchange.target


@dataclass(eq=False)
class Total(Operation):
    """Start or finish of a sum."""

    sum: Sum
    end: str

    def views(self) -> Iterator[View]:
        yield self.sum.view

    def sums(self) -> Iterator[Sum]:
        yield self.sum
