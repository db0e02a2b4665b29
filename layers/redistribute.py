"""Redistribution: the same values under another layout, between layers that are cut differently."""

from __future__ import annotations

from collections.abc import Sequence

from halograd.dtensor import Blocks, Exchange, Layout
from halograd.layers.binding import Binding
from halograd.layers.layer import Layer
from halograd.layers.operator import Operator

__all__ = ["Redistribute"]


class Redistribute(Layer):
    """Identity; the executor puts it between layers whose parts differ.

    Communication per process: what it will own and does not own yet; backward the same, reversed. It travels while
    other branches of the network compute.
    """

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """It sends what is owned straight into its output: nothing is gathered beside the input."""
        return inputs[i].boxes

    def bind(self, binding: Binding) -> Operator:
        return _RedistributeOperator(binding)


class _RedistributeOperator(Operator):
    def __init__(self, b: Binding) -> None:
        self.b = b
        self.exchange = b.exchange_into_output(0)
        self.back: Exchange | None = None

    def launch(self) -> None:
        self.exchange.start()

    def forward(self) -> None:
        self.exchange.finish()

    def bind_backward(self) -> None:
        self.back = self.b.return_output_gradient(0) if self.b.needs_gradient(0) else None

    def backward(self) -> None:
        if self.back is not None:
            self.back.start()

    def settle(self) -> None:
        if self.back is not None:
            self.back.finish()
