"""Margins of batch norms: elements that other ranks own too, normalized by the statistics of the owned elements.

The kernels of a batch norm see the owned box only, so that sums have each element once, in the same order as without a
margin. Further kernels normalize the margin, which is a few thin boxes, and compute its gradients. ::

    +---------------+
    |     margin    |      owned: statistics, forward, sums of the gradients, backward
    +---+-------+---+      margin: forward by the mean and variance of the group; backward by the sums of the group
    |   | owned |   |
    +---+-------+---+
    |               |
    +---------------+
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..dtensor import Box
from ..kernels.access import Access, makes
from ..kernels.kernel import BatchNormArrays, BatchNormKernels, BatchNormTraining, FusedActivation
from ..lowering.context import Context, Gathered
from ..lowering.operations import KernelSpec, Timing
from ..lowering.views import Region, View

__all__ = ["NormMargin", "block"]


class NormMargin:
    """Margin of one batch norm. Without a margin, the kernels of the whole block compute everything.

    Parameters
    ----------
    inputs
        Gathered inputs. The second is added before the activation.
    vectors
        Arrays per channel by name: ``gamma``, ``mean``, ``running_mean``, ``sums``, ...

    Attributes
    ----------
    inputs, y
        Arrays of the owned box; packed.
    """

    def __init__(self, context: Context, inputs: Sequence[Gathered], vectors: Mapping[str, View]) -> None:
        self.context, self._wide = context, context.output.wide
        self._gathered, self._vectors = dict(zip(("x", "residual"), inputs)), vectors
        self._boxes = _around(context.box, context.own) if self._wide else []
        self.inputs, self.y = [x.view for x in inputs], context.y
        self._out: list[tuple[View, View]] = []
        self._kernel: KernelSpec | None = None
        if self._wide:
            # The view of a box is strided if more than the first cut axis has a margin.
            self._views = [value.region.part(context.own) for value in context.inputs]
            self.inputs = [view if view.packed else context.scratch(view.shape, view.dtype) for view in self._views]
            self.y = self._packed(Region(context.y, context.box), context.own)

    def _packed(self, region: Region, box: Box) -> View:
        """Return a packed array for a box; `_write` copies the part of it that lies in the region there."""
        part = box & region.box
        view = region.part(part)
        if part == box and view.packed:
            return view
        array = self.context.scratch(box.shape)
        if part.size:
            self._out.append((Region(array, box).part(part), view))
        return array

    def _write(self) -> None:
        timing = Timing("copy", (), copied=sum(source.nbytes for source, _ in self._out))
        self.context.copy(*self._out, timing=timing)
        self._out = []

    def read(self) -> None:
        """Start the exchanges of the margins, which travel during the sum of the statistics; make owned boxes packed.
        """
        for x in self._gathered.values():
            x.start()
        if not self._wide:
            self._arrive()
            return
        strided = [(view, array) for view, array in zip(self._views, self.inputs) if view is not array]
        self.context.copy(*strided, timing=Timing("copy", (), copied=sum(view.nbytes for view, _ in strided)))

    def _arrive(self) -> None:
        for x in self._gathered.values():
            x.finish()

    def _parts(self, boxes: Sequence[Box]) -> dict[str, View]:
        """Return the inputs in the boxes, by name and number."""
        regions = {name: Region(x.view, x.box) for name, x in self._gathered.items()}
        packed = self.context.packed
        return {f"{name}{i}": packed(r.part(box)) for name, r in regions.items() for i, box in enumerate(boxes)}

    def normalize(self, layer: Any, f: FusedActivation | None) -> None:
        """Add the forward pass of the margin, and the copy of the owned box into the output."""
        if not self._wide:
            return
        context = self.context
        self._arrive()
        if self._boxes:
            views, y = self._parts(self._boxes), Region(context.y, context.box)
            views |= {f"y{i}": self._packed(y, box) for i, box in enumerate(self._boxes)}
            vectors = {k: v for k, v in self._vectors.items() if k != "moments"}
            kernel = context.kernel(partial(_normalizing, layer.eps, f), **views, **vectors)
            timing = _timing(context, self._boxes)
            context.run(kernel, "evaluate", when="evaluation", timing=timing)
            context.run(kernel, "train", when="training", timing=timing)
        self._write()

    def gradients(self, layer: Any, f: FusedActivation | None, count: int) -> dict[str, View]:
        """Return the arrays of the gradients in the owned box: of the output, ``dy``, and of the inputs, ``dx`` and, if
        the activation separates it from ``dy``, ``dresidual``.
        """
        context = self.context
        names = ["dx", "dresidual"][: len(context.inputs) if f is not None else 1]
        values = [context.inputs[i] for i in range(len(names)) if context.needs_gradient(i)]
        boxes = context.output.layout.boxes.joined([value.held_gradient for value in values])
        targets = {
            name: Region(context.gradient(i), context.inputs[i].held_gradient[context.rank])
            for i, name in enumerate(names)
            if context.needs_gradient(i)
        }
        grads = Region(context.gradient_in(boxes), boxes[context.rank])
        if len(context.inputs) > len(names) and context.needs_gradient(1):
            context.pass_gradient(1, context.gradient_for(1))
        margin = _around(grads.box, context.own)
        if margin:
            views = self._parts(margin)
            views |= {f"dy{i}": context.packed(grads.part(box)) for i, box in enumerate(margin)}
            views |= {f"y{i}": context.scratch(box.shape) for i, box in enumerate(margin)}
            for name in names:
                views |= {f"{name}{i}": self._gradient(targets, name, box) for i, box in enumerate(margin)}
            vectors = {k: self._vectors[k] for k in ("gamma", "beta", "mean", "var", "sums", "means")}
            self._kernel = context.kernel(partial(_differentiating, layer.eps, f, count), **views, **vectors)
            self._timing = _timing(context, margin)
        own = {name: self._gradient(targets, name, context.own) for name in names}
        return {"dy": context.packed(grads.part(context.own)), **own}

    def _gradient(self, targets: Mapping[str, Region], name: str, box: Box) -> View:
        return self._packed(targets[name], box) if name in targets else self.context.scratch(box.shape)

    def differentiate(self) -> None:
        """Add the first part of the backward pass of the margin; it overwrites the sums."""
        if self._kernel is not None:
            self.context.run(self._kernel, "begin", timing=self._timing)

    def correct(self) -> None:
        """Add the second part of the backward pass of the margin, which reads the sums of the group."""
        if self._kernel is not None:
            self.context.run(self._kernel, "correct", timing=self._timing)
        self._write()


def _around(box: Box, own: Box) -> list[Box]:
    """Return disjoint boxes that cover what `box` has outside of `own`.

    >>> _around(Box((0, 2), (9, 6)), Box((3, 2), (9, 5)))
    [Box((0, 2), (3, 6)), Box((3, 5), (9, 6))]
    """
    if not own.size:
        return [box] if box.size else []
    boxes, rest = [], box
    for axis, ((a, b), (c, d)) in enumerate(zip(box.ranges, own.ranges)):
        boxes += [rest.replace(axis, a, c), rest.replace(axis, d, b)]
        rest = rest.replace(axis, c, d)
    return [part for part in boxes if part.size]


def _timing(context: Context, boxes: Sequence[Box]) -> Timing:
    """Return the timing of a kernel on all boxes, as of one box of their size."""
    samples, *spatial, channels = boxes[0].shape
    elements = sum(math.prod(box.shape[1:-1]) for box in boxes)
    shape = (samples, elements, *(1 for _ in spatial[1:]), channels)
    return context.timing("boundary", inputs=(shape,) * len(context.inputs), outputs=shape[1:-1])


class _Kernels:
    """Kernels of the boxes of a margin."""

    def __init__(self, parts: Sequence[BatchNormKernels]) -> None:
        self.parts = parts

    def close(self) -> None:
        """Free the backend's kernels."""
        for part in self.parts:
            part.close()


class _Normalizing:
    """Forward kernels of a margin: by the statistics of the batch, and by the running ones."""

    def __init__(self, trained: _Kernels, evaluated: _Kernels) -> None:
        self._trained, self._evaluated = trained, evaluated

    def train(self) -> None:
        for part in self._trained.parts:
            part.forward()

    def evaluate(self) -> None:
        for part in self._evaluated.parts:
            part.forward()

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernels in (self._trained, self._evaluated):
            kernels.close()


_READ = ("x*", "residual*", "gamma", "beta")


@makes(
    train=Access((*_READ, "mean", "var"), ("y*",)),
    evaluate=Access((*_READ, "running_*"), ("y*",)),
)
def _normalizing(eps: float, f: FusedActivation | None, environment: Any, **arrays: Any) -> _Normalizing:
    def kernels(mean: Any, var: Any, of_x: bool) -> _Kernels:
        moments = {"mean": mean, "var": var, "of_x": of_x}
        return _Kernels(
            [_kernels_of(environment, arrays, i, eps=eps, activation=f, **moments) for i in _numbers(arrays)]
        )

    batch = kernels(arrays["mean"], arrays["var"], True)
    return _Normalizing(batch, kernels(arrays["running_mean"], arrays["running_var"], False))


class _Differentiating(_Kernels):
    """Backward kernels of a margin. They normalize it again: backward may use what forward stores."""

    def begin(self) -> None:
        for part in self.parts:
            assert part.backward_sums is not None
            part.forward()
            part.backward_sums()

    def correct(self) -> None:
        for part in self.parts:
            assert part.backward_data is not None
            part.backward_data()


@makes(
    begin=Access((*_READ, "dy*", "mean", "var"), ("y*", "dx*", "dresidual*", "sums")),
    correct=Access((*_READ, "y*", "dy*", "dx*", "dresidual*", "mean", "var", "sums"), ("dx*", "means")),
)
def _differentiating(
    eps: float, f: FusedActivation | None, count: int, environment: Any, **arrays: Any
) -> _Differentiating:
    training = BatchNormTraining(count, from_sums=False)
    moments = {"mean": arrays["mean"], "var": arrays["var"], "of_x": True}
    create: Callable[..., BatchNormKernels] = partial(
        _kernels_of, environment, arrays, eps=eps, activation=f, **moments
    )
    return _Differentiating([create(i, training=training) for i in _numbers(arrays)])


def _numbers(arrays: Mapping[str, Any]) -> range:
    return range(sum(name[0] == "x" for name in arrays))


_BOXES = ("x", "y", "dy", "dx", "residual", "dresidual")


def _kernels_of(environment: Any, arrays: Mapping[str, Any], i: int, **more: Any) -> BatchNormKernels:
    """Return the backend's kernels of one box."""
    fields: dict[str, Any] = {name: arrays.get(f"{name}{i}") for name in _BOXES}
    fields |= {name: arrays[name] for name in ("gamma", "beta", "sums", "means")}
    kernels: BatchNormKernels = environment.kernels.batch_norm(BatchNormArrays(**fields, **more))
    return kernels


def block(array: Any, channels: int) -> Any:
    """Return the array of a block with its channels, also if it is empty; None stays None."""
    if array is None or array.size:
        return array
    return array.reshape(*[0] * (array.ndim - 1), channels)
