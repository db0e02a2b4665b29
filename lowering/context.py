"""Context in which a layer lowers itself: its arrays on this rank as views, and methods that add operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..device import wide
from ..dtensor import Blocks, Box, Groups, Layout, has_peers
from ..kernels.access import reads, writes
from .operations import ExchangeSpec, KernelSpec, Operation, Run, Sum, Timing, Total, Transfer
from .views import Buffer, Region, Value, View

__all__ = ["Context", "Gathered", "Lowered"]


# Protocols, because this folder is below `layers` and `program`, and must not import them.
class LoweredLayer(Protocol):
    """Protocol of a layer, with the members that the context uses; see :class:`halograd.layers.Layer`."""

    @property
    def kind(self) -> str: ...

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks: ...

    def gradient_blocks(self, x: Layout, output: Layout) -> Blocks | None: ...


class LoweredStep(Protocol):
    """Protocol of a step, with the members that the context uses; see :class:`halograd.program.program.Step`."""

    @property
    def name(self) -> str: ...

    @property
    def layer(self) -> LoweredLayer: ...

    @property
    def inputs(self) -> Sequence[Value]: ...

    @property
    def output(self) -> Value: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def parts(self) -> Mapping[str, int]: ...

    @property
    def frozen(self) -> bool: ...


@dataclass(frozen=True)
class Lowered:
    """Result of `Layer.lower`: functions that add the other operations of the layer.

    Each function adds operations to the context of the layer when it is called; None: there are none to add.

    Attributes
    ----------
    backward
        Adds the backward pass. It is called when the storage of the output's gradient is known.
    finish
        Adds the operations that finish the output if other layers may compute in between. It is called before the first
        layer that reads the output.
    finish_backward
        Adds the operations that finish the gradients of the inputs, as `finish` does. It is called later than
        `backward`, which is not called if the output has no gradient.
    loss
        View of the value of a loss, float64 ``(1,)``.
    terms
        Terms of a loss in evaluation: see `Program.terms`.
    exposed
        Kernel of a dense layer that can compute the gradient of the whole batch: see `Program.exposed`.
    """

    backward: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    finish_backward: Callable[[], None] | None = None
    loss: View | None = None
    terms: tuple[tuple[View, View | None], ...] = ()
    exposed: KernelSpec | None = None


class Context:
    """Context of one layer on one rank while it is lowered. Local; it holds no arrays and no messages.

    `Layer.lower` adds the operations of the forward pass, and returns functions that add the others (:class:`Lowered`).

    Parameters
    ----------
    reread
        Buffers that backward passes of later layers use; complete when the backward pass of this layer is added.

    Attributes
    ----------
    layer, name
        The layer and its name in the network.
    rank, size
        Rank and size of the communicator.
    inputs, output
        Values; `output.view` is this rank's block of the result, packed.
    shapes
        Sample shapes of the inputs.
    box
        Global box of the output that this rank computes: `own`, with a margin if the output is wide (`Value.held`).
    own
        Global box of the output that this rank owns: no other rank adds it to a sum.
    dtype, wide
        Dtype of the output; dtype of statistics, of gradients of parameters, and of parameters that are read exactly.
    params, grads, state
        Views of this layer's arrays by name. `grads` receive only this rank's contribution. If activations have 16
        bits, `grads` and `state` are float32 (except rounded gradients, `Parameter.rounded`), and so are `params` of
        a layer with `exact_parameters`.
    options
        Options of this layer in the strategy (`halo`: "pad" or "overlap", ...).
    parts
        Number of parts along every axis of the layer's process grid.
    trainable
        Whether there is a backward pass.
    frozen
        Whether the parameters are not trained. If so, `grads` are scratch, and kernels that only compute gradients of
        parameters (those timed as ``"backward_filter"``) are left out.
    overlaps_halo
        Whether to compute while halos travel: as set in `options`; with ``"auto"``, if messages cross a network.
    looks
        Whether the host may read results within a step and branch on them; with a device, it would have to wait.
    """

    def __init__(
        self,
        step: LoweredStep,
        arrays: Mapping[str, Mapping[str, View]],
        *,
        trainable: bool = True,
        overlaps: bool = False,
        looks: bool = True,
        reread: Collection[Buffer] = (),
    ) -> None:
        self.layer, self.name = step.layer, step.name
        self.inputs, self.output = tuple(step.inputs), step.output
        self.parts, self.options = step.parts, step.options
        self.params, self.grads, self.state = arrays["params"], arrays["grads"], arrays["state"]
        self.rank, self.size, self.own = self.output.rank, self.output.layout.size, self.output.box
        self.box = self.output.held[self.rank]
        self.shapes = [v.layout.shape[1:] for v in self.inputs]
        self.dtype, self.wide = self.output.dtype, wide(self.output.dtype)
        halo = self.options.get("halo", "auto")
        self.overlaps_halo = halo == "overlap" or (halo == "auto" and overlaps)
        self.trainable, self.frozen, self.looks = trainable, step.frozen, looks
        self._needed: dict[int, Blocks] = {}
        self._operations: list[Operation] = []
        self._reread = reread

    @property
    def y(self) -> View:
        """View of the output; packed."""
        return self.output.view

    def y_again(self) -> View:
        """Return a view of the output for the backward pass; it may be strided.

        If a later layer has gathered the output into an array with halos, and reads this array again in its backward
        pass, the result is a part of that array, and the output itself is not kept.
        """
        # The output stays in memory anyway, and is packed.
        if self.output.kept or self.y.buffer in self._reread:
            return self.y
        for (boxes, _, padded), view in self.output.gathered.items():
            box = boxes[self.rank]
            if view.buffer in self._reread and box.contains(self.box) and not padded:
                return Region(view, box).part(self.box)
        return self.y

    @property
    def dy(self) -> View:
        """View of the gradient of the output; packed. It is available when the backward pass is added."""
        return self.output.dy

    # -- boxes ---------------------------------------------------------------------------------

    def needed(self, i: int) -> Blocks:
        """Return, per rank, the box of input `i` that its box of the output needs; boxes may reach beyond the array."""
        if i not in self._needed:
            self._needed[i] = self._needed_for(i, self.output.held)
        return self._needed[i]

    def _needed_for(self, i: int, outputs: Blocks) -> Blocks:
        layouts = [value.layout for value in self.inputs]
        return self.layer.needed_blocks(i, layouts, self.output.layout_of(outputs))

    def clipped(self, i: int, slack: Sequence[int] | None = None, own: bool = False) -> Blocks:
        """Return `needed`, clipped to the array; with `own`, what the owned boxes of the output need.

        `slack` is, per axis, the number of further elements that the box may include at its end (a stride skips them):
        if the held box ends at most this much later, the box is extended to this end, which often saves a copy.
        """
        value = self.inputs[i]
        needed = self._needed_for(i, self.output.layout.boxes) if own else self.needed(i)
        blocks = needed.clipped(value.layout.shape)
        return blocks if slack is None else blocks.ended(value.held, slack)

    @property
    def gradient_blocks(self) -> Blocks:
        """Boxes of the output's gradient that each rank gathers."""
        x = self.inputs[0]
        blocks = self.layer.gradient_blocks(x.layout_of(x.held_gradient), self.output.layout)
        assert blocks is not None, f"{self.layer.kind} does not gather the gradient of its output"
        return blocks

    # -- arrays of another layer, operations of one kind of pass --------------------------------

    def with_arrays(self, params: Mapping[str, View], grads: Mapping[str, View]) -> Context:
        """Return the same context with other parameters and gradients; both add to one list of operations."""
        # A shallow copy, so that both have the same list of operations.
        other = copy.copy(self)
        other.params, other.grads = params, grads
        return other

    @contextmanager
    def only(self, when: str | None) -> Iterator[None]:
        """Restrict operations added in the ``with`` block to passes of one kind (``"training"``); None: no limit."""
        first = len(self._operations)
        yield
        for operation in self._operations[first:]:
            operation.when = when or operation.when

    def take(self) -> list[Operation]:
        """Return the operations that were added since the last call. For the compiler."""
        operations = list(self._operations)
        # In place: a context made by `with_arrays` has the same list.
        self._operations.clear()
        return operations

    # -- memory --------------------------------------------------------------------------------

    def scratch(self, shape: Sequence[int], dtype: np.dtype | str | None = None) -> View:
        """Return an array that exists only while operations use it; it must be written before it is read."""
        return Buffer(tuple(shape), np.dtype(self.dtype if dtype is None else dtype), "transient").view

    def keep(self, shape: Sequence[int], dtype: np.dtype | str, use: str, fill: float = 0.0) -> View:
        """Return an array that keeps its contents from step to step; `use` is the category of memory (`Buffer.use`)."""
        return Buffer(tuple(shape), np.dtype(dtype), use, kept=True, fill=fill).view

    def needs_gradient(self, i: int) -> bool:
        """Return whether the gradient of input `i` must be computed."""
        return self.inputs[i].trainable

    def gradient(self, i: int) -> View:
        """Return a packed array for the gradient of the owned box of input `i`; this layer writes it."""
        return self.inputs[i].new_contribution()

    def pass_gradient(self, i: int, view: View | None = None) -> None:
        """Share an array: use this view, by default the output's gradient, as a contribution to that of input `i`."""
        self.inputs[i].contributions.append(self.dy if view is None else view)

    # -- operations ----------------------------------------------------------------------------

    def kernel(self, make: Callable[..., Any], **views: View | None) -> KernelSpec:
        """Return a kernel on arrays.

        ``make(environment, **arrays)`` returns the function, or the object with methods, that :meth:`run` runs.
        """
        return KernelSpec(make, views)

    def run(
        self,
        kernel: KernelSpec,
        method: str | None = None,
        *,
        timing: Timing | None = None,
        when: str | None = None,
        guarded: Sequence[Operation] = (),
    ) -> None:
        """Add a run of a kernel, or of one of its methods; no-op for a filter gradient in a frozen layer."""
        if self.frozen and timing is not None and timing.phase == "backward_filter":
            return
        self._operations.append(Run(self.name, kernel, method, timing, tuple(guarded), when=when))

    def operation(self, kernel: KernelSpec, method: str) -> Run:
        """Return the run of a kernel without adding it to the program, for guarded operations."""
        return Run(self.name, kernel, method)

    def copy(self, *pairs: tuple[View, View], timing: Timing | None = None) -> None:
        """Add one kernel for all copies ``(source, target)`` between arrays of the same shape; no-op without copies."""
        if pairs:
            # `recompute` recognizes copies by the function `copying`.
            views = {f"{name}{i}": v for i, pair in enumerate(pairs) for name, v in zip(("source", "target"), pair)}
            self.run(self.kernel(copying, **views), timing=timing)

    def timing(self, phase: str, **changes: Any) -> Timing:
        """Return the timing of a kernel of this layer for the largest blocks of all ranks, with `changes` of fields."""
        outputs: tuple[int, ...] | None = self.output.layout.boxes.longest[1:-1]  # spatial axes
        inputs = tuple(v.layout.boxes.longest for v in self.inputs)
        if phase == "forward" and self.output.wide:
            # A wide output is computed with its margin, from all inputs that this needs.
            inputs = tuple(self.clipped(i).longest for i in range(len(self.inputs)))
            outputs = self.output.held.longest[1:-1]
        elif phase == "backward_data" and any(v.held_gradient != v.layout.boxes for v in self.inputs):
            inputs, outputs = tuple(v.held_gradient.longest for v in self.inputs), None
        return Timing(phase, **{"inputs": inputs, "outputs": outputs, **changes})

    def exchange(
        self,
        sources: Blocks,
        targets: Blocks,
        source: View,
        target: View,
        *,
        source_origin: Sequence[int] | None = None,
        target_origin: Sequence[int] | None = None,
        combine: str = "assign",
        kind: str = "halo",
    ) -> ExchangeSpec:
        """Return an exchange to start and finish; arguments as for :class:`halograd.dtensor.Exchange`."""
        at_source = tuple(sources[self.rank].start if source_origin is None else source_origin)
        at_target = tuple(targets[self.rank].start if target_origin is None else target_origin)
        return ExchangeSpec(sources, targets, source, target, at_source, at_target, combine, kind, self.name)

    def sum(self, groups: Groups, view: View, kind: str, sizes: Sequence[int], name: str | None = None) -> Sum | None:
        """Return an in-place sum over groups of ranks; None if every group has one rank.

        Parameters
        ----------
        sizes
            Size of the array by the number of the group [B].
        """
        return None if groups.members_each == 1 else Sum(groups, view, sizes, kind, name or self.name)

    def start(self, message: ExchangeSpec | Sum | None, when: str | None = None) -> None:
        """Add the start of an exchange or of a sum; no-op for None."""
        self._operations += _end_of(self.name, message, "start", when)

    def finish(self, message: ExchangeSpec | Sum | None, when: str | None = None) -> None:
        """Add the finish of an exchange, or of a sum, which does nothing if the sum was not started; no-op for None."""
        self._operations += _end_of(self.name, message, "finish", when)

    def move(self, exchange: ExchangeSpec) -> None:
        """Add the start and the finish of an exchange."""
        self.start(exchange)
        self.finish(exchange)

    def add_up(self, total: Sum | None, when: str | None = None) -> list[Operation]:
        """Add the start and the finish of a sum, and return the operations."""
        added = [operation for end in ("start", "finish") for operation in _end_of(self.name, total, end, when)]
        self._operations += added
        return added

    # -- boxes of inputs and gradients ---------------------------------------------------------

    def packed(self, view: View) -> View:
        """Return the view, or a packed copy of it if it is strided."""
        if view.packed:
            return view
        copy = self.scratch(view.shape, view.dtype)
        self.copy((view, copy), timing=Timing("copy", (), copied=view.nbytes))
        return copy

    def read(self, i: int) -> View:
        """Return the box of input `i` that a pointwise layer needs for `box`; packed."""
        value = self.inputs[i]
        return self.gather(i, self.clipped(i)).run().view if self.output.wide or value.wide else value.view

    def y_of_gradient(self) -> View:
        """Return the part of :meth:`y_again` in the box of `dy`; it may be strided."""
        return Region(self.y_again(), self.box).part(self.output.held_gradient[self.rank])

    def gradient_for(self, i: int, masked: View | None = None) -> View:
        """Return the gradient of the output in the box of the gradient of input `i`; packed. For pointwise layers.

        `masked` replaces `dy`, as in `gather_gradient`.
        """
        return self.gradient_in(self.inputs[i].held_gradient, masked)

    def gradient_in(self, boxes: Blocks, masked: View | None = None) -> View:
        """Return the gradient of the output in these boxes, as `gradient_for`."""
        if boxes == self.output.held_gradient:
            return self.dy if masked is None else masked
        return self.gather_gradient(boxes, masked).run().view

    def gather(self, i: int, boxes: Blocks, fill: float | None = None, padded: bool = False) -> Gathered:
        """Return the gather of boxes of input `i`, to start and finish; boxes gathered before are not sent again.

        With `fill`, the boxes may reach outside the array, where they hold `fill`. With `padded`, the channels may be
        padded with zeros if the storage is that of the value itself.
        """
        value = self.inputs[i]
        # Without padding, requests with and without `padded` find the same array.
        padded = padded and value.stored_channels > value.layout.shape[-1]
        key = (boxes, fill, padded)
        if key in value.gathered:
            return Gathered(self, value.gathered[key], boxes[self.rank])
        # No element of this rank's box is outside the array, so the storage itself may serve, without a fill.
        if fill is not None and Box.of_shape(value.layout.shape).contains(boxes[self.rank]):
            fill = None
        owned = value.layout.boxes
        gathered = _gathered(self, value.region, value.stored, owned, boxes, "halo", "halo copy", fill, padded)
        value.gathered[key] = gathered.view
        return gathered

    def gather_gradient(self, boxes: Blocks, masked: View | None = None, kind: str = "halo") -> Gathered:
        """Return the gather of boxes of the output's gradient (the halo of `dy`), to start and finish.

        `masked` is a view of this rank's box of other values, which are gathered in place of `dy`: the gradient with
        respect to the input of a fused activation.
        """
        value = self.output
        source = value.gradient if masked is None else Region(masked, value.held_gradient[self.rank])
        assert source is not None
        return _gathered(self, source, value.held_gradient, value.layout.boxes, boxes, kind, "transient", None)

    def return_gradient(self, i: int, boxes: Blocks, owned: Blocks | None = None) -> Returned:
        """Return the array for the gradient of gathered boxes, with the exchange that sums the arrays of all ranks on
        the owners.

        Adjoint of `gather`. `owned` are the boxes outside of which the gradient is zero; None: all.
        """
        value = self.inputs[i]
        target, own = self.gradient(i), value.layout.boxes
        if boxes == own:
            # Nothing was gathered: the gradient is that of the owned box.
            return Returned(self, target, None)
        array, origin = self.scratch(boxes[self.rank].shape, value.dtype), boxes[self.rank].start
        # `array` holds the whole box, also if only a part of it (`owned`) is sent.
        exchange = self.exchange(owned or boxes, own, array, target, source_origin=origin, combine="sum")
        return Returned(self, array, exchange)


def _end_of(layer: str, message: ExchangeSpec | Sum | None, end: str, when: str | None) -> list[Operation]:
    if message is None:
        return []
    if isinstance(message, Sum):
        return [Total(layer, message, end, when=when)]
    return [Transfer(layer, message, end, when=when)]


def _gathered(
    context: Context,
    region: Region,
    stored: Blocks,
    owned: Blocks,
    boxes: Blocks,
    kind: str,
    use: str,
    fill: float | None,
    padded: bool = False,
) -> Gathered:
    """Return the gather of a box: into the storage itself if the box is a packed view of it; else into a copy."""
    box = boxes[context.rank]
    view = region.part(box) if region.box.contains(box) else None
    # The same on all ranks: an exchange is collective, also for a rank that needs no data.
    everyone_has = stored.contain(boxes)
    fits = view is not None and (view.packed or (padded and view.packed_but_for_channels))
    if view is not None and fits and everyone_has:
        return Gathered(context, view, box)
    if view is None or not fits:
        # The padding is written only once, so its array keeps its contents.
        kept = fill is not None
        view = Buffer(box.shape, region.view.dtype, use, kept=kept, fill=fill or 0.0).view
        if everyone_has:  # only this rank copies; no rank communicates
            return Gathered(context, view, box, copied=region.part(box))
    if stored != owned:  # halos that were read from disk, or computed, are not sources: blocks with halos overlap
        stored, region = owned, Region(region.part(owned[context.rank]), owned[context.rank])
    # A view of the storage itself is source and target at once: then only the parts of other ranks are written.
    exchange = context.exchange(
        stored, boxes, region.view, view, source_origin=region.box.start, target_origin=box.start, kind=kind
    )
    return Gathered(context, view, box, exchange)


class Gathered:
    """Gathered box of a value on this rank; `view` is packed and holds `box` after `start` and `finish`."""

    def __init__(
        self, context: Context, view: View, box: Box, exchange: ExchangeSpec | None = None, copied: View | None = None
    ) -> None:
        self.view, self.box, self.exchange = view, box, exchange
        self._context, self._copied = context, copied

    @property
    def communicates(self) -> bool:
        """Whether this rank sends or receives messages in the exchange."""
        exchange = self.exchange
        return exchange is not None and has_peers(exchange.sources, exchange.targets, self._context.rank)

    def start(self) -> None:
        """Add the start of the exchange."""
        if self._copied is not None:
            self._context.copy((self._copied, self.view))
        self._context.start(self.exchange)

    def finish(self) -> None:
        """Add the finish of the exchange."""
        self._context.finish(self.exchange)

    def run(self) -> Gathered:
        """Add start and finish, and return the gathered box."""
        self.start()
        self.finish()
        return self


class Returned:
    """Gradient of a gathered box: written into `view`, then summed on the owners by `start` and `finish`."""

    def __init__(self, context: Context, view: View, exchange: ExchangeSpec | None) -> None:
        self.view, self.exchange, self._context = view, exchange, context

    def start(self) -> None:
        self._context.start(self.exchange)

    def finish(self) -> None:
        self._context.finish(self.exchange)

    def run(self) -> None:
        """Add start and finish."""
        self.start()
        self.finish()


@reads("source*")
@writes("target*")
def copying(environment: Any, **arrays: Any) -> Callable[[], None]:
    """Return the kernel that copies every array ``source{i}`` into ``target{i}``, which has the same shape."""
    pairs = [(arrays[f"target{i}"], arrays[f"source{i}"]) for i in range(len(arrays) // 2)]
    return environment.kernels.device.copies(pairs)
