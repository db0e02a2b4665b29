"""The program of a step: layers, values, and operations in order, as plain data; see `docs/program.md`.

:func:`lines_of` lists a program as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..device import wide
from ..kernels.summed import SummedConvolution, on_tensor_cores
from ..layers.layer import Layer
from ..layers.parameter import Parameter
from ..layers.reduction_chunks import GradientChunk
from ..lowering.operations import KernelSpec, Operation, Run, Total, Transfer
from ..lowering.views import Buffer, Value, View
from .arena import Placement, placement_of

__all__ = ["Program", "Segment", "Step", "Target", "lines_of", "name_of"]


@dataclass(eq=False)
class Step:
    """One layer in the order of computation, with its input and output values.

    Attributes
    ----------
    owner
        Name of the other layer whose parameters the layer uses (`Network.owners`); "": it has its own.
    frozen
        Whether the layer's parameters are not trained, so that their gradients are not computed.
    """

    name: str
    layer: Layer
    inputs: list[Value]
    output: Value
    options: Mapping[str, Any]
    parts: Mapping[str, int]
    owner: str = ""
    frozen: bool = False

    @property
    def arrays_of(self) -> str:
        """Name of the layer under which the parameters are stored."""
        return self.owner or self.name

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Sample shapes of the inputs."""
        return [value.layout.shape[1:] for value in self.inputs]

    def under(self, parts: Mapping[str, int], inputs: list[Value], output: Value) -> Step:
        """Return the step of the same layer under another cut."""
        other = Step(self.name, self.layer, inputs, output, self.options, parts, self.owner, self.frozen)
        # Descriptions of whole arrays do not depend on the cut, so all candidates of a plan share them.
        vars(other).update(parameters=self.parameters, states=self.states)
        return other

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Whole parameters by short name, also if they belong to another layer (`owner`)."""
        return self.layer.parameters(*self.shapes)

    @cached_property
    def states(self) -> Mapping[str, Parameter]:
        """Descriptions of the whole untrained arrays, by short name."""
        return self.layer.state(*self.shapes)


@dataclass(frozen=True)
class Target:
    """Rank, batch and options for which a program is compiled.

    Attributes
    ----------
    batch
        Global number of samples.
    size, rank
        Size of the communicator, and rank of this process.
    dtype
        Dtype of activations.
    trainable
        Whether there is a backward pass.
    overlaps
        Whether ``halo = "auto"`` computes while halos travel.
    looks
        Whether the host may read results within a step and branch on them, because arrays are in its memory.
    probed
        Names of inputs whose gradients are computed too.
    padded_channels
        Function ``padded_channels(channels, dtype)`` that returns the number of channels in memory of an input that
        only convolutions read, see :meth:`halograd.kernels.Backend.padded_channels`; None: no padding.
    kept
        Names of layers whose outputs are kept until a step has ended, in addition to the outputs of the network.
    fuses_sums
        Function that returns whether one kernel computes a convolution and the sums of a norm, see
        :meth:`halograd.kernels.Backend.fuses_sums`; the default, which plans use, is that of cuDNN.
    rounds
        Whether kernels write gradients of parameters with `Parameter.rounded` in 16 bits, if activations have 16 bits;
        see :attr:`halograd.kernels.Backend.rounds_gradients`.
    """

    batch: int
    size: int = 1
    rank: int = 0
    dtype: np.dtype = field(default_factory=lambda: np.dtype("float32"))
    trainable: bool = True
    overlaps: bool = False
    looks: bool = True
    probed: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    padded_channels: Callable[[int, np.dtype], int] | None = None
    rounds: bool = True
    fuses_sums: Callable[[SummedConvolution], bool] = on_tensor_cores


@dataclass(eq=False)
class Segment:
    """Consecutive operations of one layer in one pass.

    Attributes
    ----------
    again
        Whether the operations repeat those of the forward pass (`halograd.program.recompute`).
    before
        Operations of the previous step that complete the layer's parameters; see `halograd.program.gradients`.
    after
        Operations on the gradients that this layer completes.
    """

    name: str
    operations: list[Operation] = field(default_factory=list)
    again: bool = field(default=False, kw_only=True)
    before: list[Operation] = field(default_factory=list)
    after: list[Operation] = field(default_factory=list)


@dataclass(eq=False)
class Program:
    """Operations of one rank in a step.

    Attributes
    ----------
    network
        Name of the network.
    target
        Rank, batch and options for which the program is compiled.
    steps
        Layers in order of computation, including redistributions.
    values
        Values of inputs and layers, by name.
    inputs
        Values of the inputs, by name.
    forward, backward
        Operations of the two passes, layer by layer.
    loss
        View of the loss of this rank's block, float64 ``(1,)``; None if there is no loss.
    terms
        Terms of the loss in evaluation, each as two float64 ``(1,)`` views: this rank's part of the term, and the sum
        of weights over all ranks by which the term is divided; the second is None if there is no such sum.
    exposed
        Kernels, by layer, of dense layers that can compute the gradient of the whole batch on every rank.
    end
        Operations on gradients at the end of the backward pass.
    buckets
        Buckets of gradients; operations on gradients refer to them by number.
    unfused
        Names of layers, each with what a pass did not fuse and the reason, for the listing.
    """

    network: str
    target: Target
    steps: list[Step] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    forward: list[Segment] = field(default_factory=list)
    backward: list[Segment] = field(default_factory=list)
    loss: View | None = None
    terms: list[tuple[View, View | None]] = field(default_factory=list)
    exposed: dict[str, KernelSpec] = field(default_factory=dict)
    end: list[Operation] = field(default_factory=list)
    buckets: tuple[GradientChunk, ...] = ()
    unfused: tuple[tuple[str, str], ...] = ()

    def __iter__(self) -> Iterator[Operation]:
        """Yield all operations in the order of execution: forward pass, backward pass, operations on gradients."""
        for segment in (*self.forward, *self.backward):
            yield from (*segment.before, *segment.operations, *segment.after)
        yield from self.end

    @property
    def wide(self) -> np.dtype:
        """Dtype of parameters, of their gradients and of states."""
        return wide(self.target.dtype)

    @property
    def kept(self) -> list[Buffer]:
        """Buffers that occupy the arena for a whole step, used or not: inputs, outputs of the network and other kept
        values, gradients of probed inputs.
        """
        # Outputs are read when a step has ended, inputs are written before it begins.
        values = [v.region.view.buffer for v in self.values.values() if v.read or v.kept]
        probed = [self.values[name].gradient for name in sorted(self.target.probed)]
        return [*values, *(region.view.buffer for region in probed if region is not None)]

    def layer_of(self, segment: Segment) -> str:
        """Return the layer to which a segment belongs, or the probed input: ``"conv1 (sum)"`` belongs to conv1."""
        # A name of a layer may end in brackets too.
        return segment.name if segment.name in self._names else segment.name.rpartition(" (")[0]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(step.name for step in self.steps)

    @cached_property
    def placement(self) -> Placement:
        """Offsets of the buffers of the layers in the arena; operations on gradients do not change them."""
        segments = (*self.forward, *self.backward)
        return placement_of([operation for segment in segments for operation in segment.operations], self.kept)


def lines_of(program: Program, layers: frozenset[str] | None = None) -> Iterator[str]:
    """Yield lines of text for the operations in order, with the arrays that they use; with `layers`, only for
    operations of these layers.

    ::

        forward  conv1    start halo: [2x8x4x3] @0 -> [2x8x6x3] @4096
        forward  conv1    conv_forward(x [2x8x6x3] @4096, w [4x3x3x3] conv1/w, y [2x8x4x4] @512)

    Operations of the forward pass that the backward pass repeats begin with ``again``. Lines that begin with
    ``unfused`` name kernels that a pass could not fuse.
    """
    rank, target = program.target.rank, program.target
    total = program.placement.size
    kind = f"batch {target.batch}, {target.dtype.name}, arena of {total} B"
    yield f"program of {program.network}: rank {rank} of {target.size}, {kind}"
    for way, segments in (("forward", program.forward), ("backward", program.backward)):
        for segment in segments:
            if layers is None or program.layer_of(segment) in layers:
                for operation in (*segment.before, *segment.operations, *segment.after):
                    yield f"{'again' if segment.again else way:8} {operation.layer:20} {_text(program, operation)}"
    for layer, text in program.unfused:
        if layers is None or layer in layers:
            yield f"{'unfused':8} {layer:20} {text}"
    for operation in program.end if layers is None else ():
        yield f"{'end':8} {operation.layer:20} {_text(program, operation)}"


def _text(program: Program, operation: Operation) -> str:
    when = f" [{operation.when}]" if operation.when else ""
    if isinstance(operation, Transfer):
        exchange = operation.exchange
        source, target = _view(program, exchange.source), _view(program, exchange.target)
        return f"{operation.end} {exchange.kind}: {source} -> {target}{when}"
    if isinstance(operation, Total):
        total = operation.sum
        ranks = f"{total.groups.members_each} ranks"
        return f"{operation.end} sum of {total.kind}: {_view(program, total.view)}, {ranks}{when}"
    if not isinstance(operation, Run):
        return f"{operation.describe()}{when}"
    more = f", guards {len(operation.guarded)} operations" if operation.guarded else ""
    used = ", ".join(f"{name} {_view(program, view)}" for name, view in operation.arrays.items())
    return f"{name_of(operation)}({used}){more}{when}"


def name_of(operation: Run) -> str:
    """Return the name of the kernel of an operation, and of the method that it runs."""
    # Layers bind the settings of a kernel by `partial`: the name is that of the function.
    make = getattr(operation.kernel.make, "func", operation.kernel.make)
    return getattr(make, "__name__", str(make)).strip("_") + (f".{operation.method}" if operation.method else "")


def _view(program: Program, view: View) -> str:
    """Return shape and location of a view: an offset in the arena [B], or the name of a parameter."""
    shape = "x".join(map(str, view.shape))
    if view.buffer.location is not None:
        return f"[{shape}] {view.buffer.location[1]}"
    return f"[{shape}] @{program.placement.offsets.get(view.buffer, 0)}"
