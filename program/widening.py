"""Wide values: margins that ranks compute, instead of receiving them from other ranks. Pure arithmetic.

The output of a layer whose strategy says ``"wide": true`` is computed on the owned box and on the margin that the
layers that read it need (`Value.held`). So these layers exchange nothing, and the halo that its own input needs is
wider: a run of wide layers exchanges once, at its beginning. ::

    conv1 (wide)   x: halo of 2     y: owned box and a margin of 1
    conv2          x: no halo       y: owned box

In the backward pass, the gradient of a wide value is computed with the margin that the layer before needs
(`Value.held_gradient`), if the value itself is held there; the halo of the gradient of the last layer is wider. Sums
over elements (gradients of parameters, statistics of batch norms) have the elements that a rank owns only.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dtensor import Blocks, Layout
from ..lowering.views import Value
from .program import Step

__all__ = ["layout_held", "widen"]


def layout_held(value: Value) -> Layout:
    """Return the layout whose boxes are those that the ranks compute; they may overlap."""
    return Layout(value.layout.shape, value.held) if value.wide else value.layout


def widen(steps: Sequence[Step]) -> None:
    """Choose the boxes of wide values and of their gradients, before the values get storage. Local.

    A value stays as it is owned if it is an output of the network, if its layer cannot compute margins, or if a layer
    that reads it cannot read them.
    """
    if not any(step.options.get("wide") for step in steps):
        return
    readers: dict[Value, list[Step]] = {}
    for step in steps:
        for value in dict.fromkeys(step.inputs):
            readers.setdefault(value, []).append(step)
    for step in reversed(steps):
        found = readers.get(step.output, [])
        if step.options.get("wide") and found and not step.output.kept and all(map(_widens, (step, *found))):
            step.output.hold(step.output.layout.boxes.joined([_needed(step.output, one) for one in found]))
    for step in steps:
        if step.output.wide:
            boxes = _gradient(step, readers[step.output])
            step.output.hold_gradient(step.output.layout.boxes.joined([boxes]))


def _widens(step: Step) -> bool:
    return step.layer.may_widen(len(step.inputs), step.parts, step.options)


def _needed(value: Value, reader: Step) -> Blocks:
    """Return the boxes of a value that a layer needs for the boxes of its output that it computes."""
    layouts = [one.layout for one in reader.inputs]
    numbers = [i for i, one in enumerate(reader.inputs) if one is value]
    some = [reader.layer.needed_blocks(i, layouts, layout_held(reader.output)) for i in numbers]
    return some[0].joined(some[1:]).clipped(value.layout.shape)


def _gradient(step: Step, readers: Sequence[Step]) -> Blocks:
    """Return the boxes of the gradient of a wide value: those from which the gradients of the inputs follow, if the
    readers can compute them; else the owned ones.
    """
    value, own = step.output, step.output.layout
    some = [
        step.layer.whole_gradient_blocks(Layout(x.layout.shape, x.held_gradient), own)
        for x in step.inputs
        if x.trainable
    ]
    known = [blocks for blocks in some if blocks is not None]
    boxes = own.boxes.joined(known)
    for reader in readers:
        if reader.layer.whole_gradient_blocks(Layout(own.shape, boxes), reader.output.layout) is None:
            return own.boxes
        if reader.layer.stencil is None and not reader.output.held.contain(boxes):
            return own.boxes
    return boxes if value.held.contain(boxes) else own.boxes
