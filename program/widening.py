"""Wide values: margins that ranks compute, instead of receiving them from other ranks. Pure arithmetic.

The output of a layer whose strategy has ``"wide": true`` is computed on the owned box and on the margin that its
readers, the layers after it, need (`Value.held`). So the readers exchange nothing, but the layer needs a wider halo of
its own input: a run of wide layers exchanges once, at its beginning. ::

    conv1 (wide)   x: halo of 2     y: owned box and a margin of 1
    conv2          x: no halo       y: owned box

In the backward pass, the gradient of a wide value is computed with the margin that the layer before needs
(`Value.held_gradient`), if the value itself is held there; the halo of the gradient of the last layer is wider. Sums
over elements (gradients of parameters, statistics of batch norms) include only the elements that a rank owns.

The filter gradient of a layer that exchanges nothing in the backward pass has no halo to hide. It hides the sum of the
norm before this layer instead (`hide_sums`). ::

    plain    filter gradient of conv2 | data gradient of conv2      | sums of bn1 |
             halo of dy ......|                                     | all-reduce  | bn1
    wide     data gradient of conv2 | sums of bn1 | filter gradient of conv2      | bn1
                                                  | all-reduce ..|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..dtensor import Blocks
from ..lowering.operations import Operation, Run, Total
from ..lowering.views import Value
from .program import Program, Step

__all__ = ["hide_sums", "widen"]


def widen(steps: Sequence[Step]) -> None:
    """Choose the boxes of wide values and of their gradients, before the values get storage. Local.

    A value keeps its owned boxes if it is an output of the network, if its layer cannot compute margins, or if a layer
    that reads it cannot read margins.
    """
    if not any(step.options.get("wide") for step in steps):
        return
    readers: dict[Value, list[Step]] = {}
    for step in steps:
        for value in dict.fromkeys(step.inputs):
            readers.setdefault(value, []).append(step)
    # Readers first: what they need depends on the boxes that they compute.
    for step in reversed(steps):
        reading = readers.get(step.output, [])
        if step.options.get("wide") and reading and not step.output.kept and all(map(_widens, (step, *reading))):
            step.output.hold(step.output.layout.boxes.joined([_needed(step.output, reader) for reader in reading]))
    for step in steps:
        # In the order of computation: the box depends on those of the gradients of the inputs.
        if step.output.wide:
            boxes = _gradient(step, readers[step.output])
            step.output.hold_gradient(step.output.layout.boxes.joined([boxes]))


def _widens(step: Step) -> bool:
    return step.layer.may_widen(len(step.inputs), step.parts, step.options)


def _needed(value: Value, reader: Step) -> Blocks:
    """Return the boxes of `value` that `reader` needs to compute its output in the boxes that the ranks hold."""
    layouts = [source.layout for source in reader.inputs]
    numbers = [i for i, source in enumerate(reader.inputs) if source is value]
    held = reader.output.layout_of(reader.output.held)
    needed = [reader.layer.needed_blocks(i, layouts, held) for i in numbers]
    return needed[0].joined(needed[1:]).clipped(value.layout.shape)


def _gradient(step: Step, readers: Sequence[Step]) -> Blocks:
    """Return the boxes in which the gradient of the output of `step`, a wide value, is computed: those from which the
    gradients of the inputs follow, or the owned ones if `readers` cannot compute more.
    """
    value, own = step.output, step.output.layout
    needed = [
        step.layer.whole_gradient_blocks(x.layout_of(x.held_gradient), own)
        for x in step.inputs
        if x.trainable
    ]
    known = [blocks for blocks in needed if blocks is not None]
    boxes = own.boxes.joined(known)
    for reader in readers:
        # Several ranks compute summands of the gradient, which are added up on the owners only.
        if reader.layer.whole_gradient_blocks(value.layout_of(boxes), reader.output.layout) is None:
            return own.boxes
        # The gradient of a pointwise layer, such as an activation, may read the layer's output in the same boxes.
        if reader.layer.stencil is None and not reader.output.held.contain(boxes):
            return own.boxes
    return boxes if value.held.contain(boxes) else own.boxes


def hide_sums(program: Program) -> Program:
    """Return the program in which filter gradients run during the sums of the next layers of the backward pass. Local.

    The operations up to the start of such a sum move before the filter gradient. They do not use what it writes. No sum
    or exchange moves past another one, nor past a layer after which sums of gradients may start: their order is the
    same on all ranks.
    """
    if not any(value.wide for value in program.values.values()):
        return program
    trained = {step.name for step in program.steps if step.parameters}
    segments = [list(segment.operations) for segment in program.backward]
    for at, own in enumerate(segments):
        if not own or not _is_filter_gradient(own[-1]):
            continue
        for i in range(at + 1, len(segments)):
            following = segments[i]
            plain = next((k for k, operation in enumerate(following) if not _is_plain(operation)), len(following))
            starts = following[plain : plain + 1]
            if starts and isinstance(starts[0], Total) and starts[0].end == "start":
                # All operations up to the start of the sum; those of other segments are plain, or the loop had ended.
                moved = [operation for operations in segments[at + 1 : i] for operation in operations] + following[
                    : plain + 1
                ]
                own[-1:] = [*moved, own[-1]]
                segments[at + 1 : i + 1] = [*([] for _ in range(at + 1, i)), following[plain + 1 :]]
            if starts or program.backward[i].name in trained:
                break
    backward = [replace(segment, operations=own) for segment, own in zip(program.backward, segments)]
    return replace(program, backward=backward)


def _is_filter_gradient(operation: Operation) -> bool:
    timing = operation.timing if isinstance(operation, Run) else None
    return timing is not None and timing.phase == "backward_filter"


def _is_plain(operation: Operation) -> bool:
    """Return whether an operation communicates nothing."""
    return isinstance(operation, Run) and not operation.guarded and not any(True for _ in operation.sums())
