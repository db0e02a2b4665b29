"""Arrays of layers between their passes: those that are kept for the backward pass, and those that it makes again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ...program.arena import lifetimes
from ...program.program import Program

__all__ = ["Kept", "kept_by_layers"]


@dataclass
class Kept:
    """Sizes of the arrays that a layer makes in the forward pass, and that operations of the backward pass read [B].

    Attributes
    ----------
    kept
        Size of the arrays that occupy memory from one pass to the other.
    again
        Size of the arrays whose memory others use in between, because the backward pass makes them again.
    """

    kept: int = 0
    again: int = 0


def kept_by_layers(program: Program) -> dict[str, Kept]:
    """Return the sizes of the arrays of every layer, and of every redistribution, in order of computation. Local.

    Outputs of the network, and arrays that are kept from step to step, are left out.
    """
    forward = [o for segment in program.forward for o in (*segment.before, *segment.operations, *segment.after)]
    spans = lifetimes(list(program), program.kept)
    by_layer = defaultdict[str, Kept](Kept)
    for operation in forward:
        for buffer in operation.buffers():
            own = spans.pop(buffer, ())  # the first operation that uses an array makes it
            # It is in use on both sides of the boundary between the passes.
            if any(first < len(forward) <= last for first, last in own):
                by_layer[operation.layer].kept += buffer.nbytes
            elif any(first >= len(forward) for first, _ in own):
                by_layer[operation.layer].again += buffer.nbytes
    return {step.name: by_layer[step.name] for step in program.steps if step.name in by_layer}
