"""Dropout whose mask depends on global indices only: the same on every decomposition."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtensor import Box
from ..kernels import DropoutMask
from .costs import Passes
from .layer import Layer, Shape

if TYPE_CHECKING:
    from ..program.context import Context

__all__ = ["Dropout"]


class Dropout(Layer):
    """Training: each element is zeroed with probability `rate`, the others are scaled by ``1 / (1 - rate)``.
    Evaluation: identity.

    Parameters
    ----------
    rate
        In ``[0, 1)``.

    Notes
    -----
    What is dropped follows from the run's seed, the step, the layer's name and the element's position in the global
    array (:class:`halograd.kernels.DropoutMask`). A mask costs no communication and is not kept: backward
    draws it again, as a resumed run does.

    References
    ----------
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, Figure 16. A counter
    replaces the sequence (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
    """

    # The mask is drawn in both passes.
    passes = Passes((1.25, 1), (1.25, 1))
    cuts_channels = "channelwise"

    def __init__(self, rate: float, name: str | None = None) -> None:
        super().__init__(name)
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: expected a rate in [0, 1), got {rate}")
        self.rate = float(rate)

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])

    def lower(self, context: Context) -> Callable[[], None]:
        shape, box = context.output.layout.shape, context.box
        # No communication: the input is copied if it is not packed.
        x = context.gather(0, context.needed(0))
        kernel = context.kernel(partial(_DropoutKernel, self, shape, box), x=x.view, y=context.y)
        x.start()
        x.finish()
        context.run(kernel, "forward", uses=("x", "y"), timing=context.timing("forward"))

        def backward() -> None:
            kernel.add(dy=context.dy, dx=context.gradient(0))
            context.run(kernel, "backward", uses=("dy", "dx"), timing=context.timing("backward_data"))

        return backward


class _DropoutKernel:
    """The backend's kernels in training; a copy in evaluation."""

    def __init__(
        self,
        layer: Dropout,
        shape: tuple[int, ...],
        box: Box,
        environment: Any,
        x: Any,
        y: Any,
        dy: Any = None,
        dx: Any = None,
    ) -> None:
        self.mode, kernels = environment.mode, environment.kernels
        self.pairs = (x, y), (dy, dx)
        if self.mode.state is None:  # made by a caller that does not count steps
            self.mode.state = kernels.device.array([self.mode.seed, self.mode.step], np.uint64)
        mask = DropoutMask(layer.rate, zlib.crc32(environment.name.encode()), shape, box.start, self.mode.state)
        self.kernels = kernels.dropout(x, y, dy, dx, mask)

    def forward(self) -> None:
        self._run(0)

    def backward(self) -> None:
        self._run(1)

    def _run(self, i: int) -> None:
        if self.mode.training:
            self.kernels[i]()
        else:
            source, target = self.pairs[i]
            np.copyto(target, source)

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernel in self.kernels:
            if kernel is not None:
                kernel.close()
