"""Redistribution: the same values under another layout, between layers that are cut differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..dtensor import Blocks, Layout
from .layer import Layer, Passes

if TYPE_CHECKING:
    from ..program.context import Context

__all__ = ["Redistribute"]


class Redistribute(Layer):
    """Identity; the executor puts it between layers whose parts differ.

    Communication per process: what it will own and does not own yet; backward the same, reversed. It travels while
    other branches of the network compute.
    """

    passes = Passes()

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """It sends what is owned straight into its output: nothing is gathered beside the input."""
        return inputs[i].boxes

    def lower(self, context: Context) -> Callable[[], None]:
        value, output = context.inputs[0], context.output
        before, behind = value.layout.boxes, output.layout.boxes
        move = context.exchange(before, behind, value.view, context.y, kind="redistribute")
        context.start(move)
        context.finishing = lambda: context.finish(move)

        def backward() -> None:
            if not context.needs_gradient(0):
                return
            dx = context.gradient(0)
            back = context.exchange(behind, before, context.dy, dx, combine="sum", kind="redistribute")
            context.start(back)
            context.settling = lambda: context.finish(back)

        return backward
