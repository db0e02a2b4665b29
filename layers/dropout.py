"""Dropout of elements, channels and whole samples. The mask depends on the seed, the step, the layer and global indices
only, so it is the same under every cut.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Box
from ..kernels import DropoutMask
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from .layer import ElementwiseLayer, Layer, Passes
from .merge import product

__all__ = ["ChannelDropout", "Dropout", "StochasticDepth"]


class Dropout(ElementwiseLayer):
    """Dropout: in training, each element is zeroed with probability `rate` and the others are scaled by ``1 / (1 -
    rate)``.

    In evaluation the layer is the identity.

    Parameters
    ----------
    rate
        Probability in ``[0, 1)``.

    Notes
    -----
    The mask is a function of the run's seed, the step, the layer's name and the element's position in the global array
    (:class:`halograd.kernels.DropoutMask`). It costs no communication and is not stored: backward draws it again, and
    so does a resumed run.

    References
    ----------
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, Figure 16. A counter
    replaces the sequence (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
    """

    # The mask is drawn in both passes.
    passes = Passes((1.25, 1), (1.25, 1))

    def __init__(self, rate: float, name: str | None = None) -> None:
        super().__init__(name)
        self.rate = _checked(self, rate)

    def lower(self, context: Context) -> Lowered:
        shape, box = context.output.layout.shape, context.box
        # No communication: the input is copied if it is not packed.
        x = context.gather(0, context.needed(0)).run()
        kernel = context.kernel(partial(_DropoutKernel, self.rate, shape, box), x=x.view, y=context.y)
        context.run(kernel, "forward", timing=context.timing("forward"))

        def backward() -> None:
            kernel.add(dy=context.dy, dx=context.gradient(0))
            context.run(kernel, "backward", timing=context.timing("backward_data"))

        return Lowered(backward)


class _SharedDropout(ElementwiseLayer):
    """Dropout of groups of elements, with one random number per group: the product with a mask that is broadcast."""

    def __init__(self, rate: float, name: str | None = None) -> None:
        super().__init__(name)
        self.rate = _checked(self, rate)

    def _shared(self, extent: int, channels: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        """Return how many random numbers a sample of `extent` channels has, and the range of them that a block with
        these channels uses.
        """
        raise NotImplementedError

    def lower(self, context: Context) -> Lowered:
        # Ranks that hold different elements of one group draw the same number for it.
        (samples, *_, channels), (batch, *space, extent) = context.box.ranges, context.output.layout.shape
        numbers, own = self._shared(extent, channels)
        box = Box.of_ranges([samples, own])
        ones = context.keep(box.shape, context.wide, "statistics", fill=1.0)
        # The dropout of ones is the factor of each group: 0 or 1 / (1 - rate).
        drawn = context.scratch(box.shape, context.wide)
        kernel = context.kernel(partial(_DropoutKernel, self.rate, (batch, numbers), box), x=ones, y=drawn)
        context.run(kernel, "forward")
        # (n, 1, ..., channels or 1), which broadcasts over the positions.
        factor = drawn.reshape(box.shape[0], *(1 for _ in space), box.shape[1])
        views = {"x": context.inputs[0].view, "g": factor, "y": context.y}
        context.run(context.kernel(product, **views), timing=context.timing("forward"))

        def backward() -> None:
            views = {"x": context.dy, "g": factor, "y": context.gradient(0)}
            context.run(context.kernel(product, **views), timing=context.timing("backward_data"))

        return Lowered(backward)


class ChannelDropout(_SharedDropout):
    """Dropout of whole feature maps: all positions of a channel of a sample (Tompson et al. 2015; Dropout2d and
    Dropout3d of torch, SpatialDropout of Keras).

    In training, each channel of each sample is zeroed with probability `rate`, and the others are scaled by ``1 / (1 -
    rate)``. In evaluation the layer is the identity.

    Parameters
    ----------
    rate
        Probability in ``[0, 1)``.

    Notes
    -----
    The dropped channels are a function of the run's seed, the step, the layer's name, the sample's index in the batch
    and the channel. Communication: none.
    """

    def _shared(self, extent: int, channels: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        return extent, channels


class StochasticDepth(_SharedDropout):
    """Dropout of whole samples, for the branch of a residual block (Huang et al. 2016; EfficientNet and ConvNeXt use
    it).

    In training, each sample is zeroed with probability `rate`, and the others are scaled by ``1 / (1 - rate)``. In
    evaluation the layer is the identity.

    Parameters
    ----------
    rate
        Probability in ``[0, 1)``.

    Notes
    -----
    The dropped samples are a function of the run's seed, the step, the layer's name and the sample's index in the
    batch. Communication: none.
    """

    def _shared(self, extent: int, channels: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        return 1, (0, 1)


def _checked(layer: Layer, rate: float) -> float:
    if not 0 <= rate < 1:
        raise ValueError(f"{layer.kind}: expected a rate in [0, 1), got {rate}")
    return float(rate)


class _DropoutKernel:
    """Kernel of a dropout: the kernels of the backend in training, a copy in evaluation."""

    def __init__(
        self,
        rate: float,
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
        if self.mode.state is None:  # the caller does not count steps
            # Seed, step, and the index in the batch of the first sample of the part.
            self.mode.state = kernels.device.array([self.mode.seed, self.mode.step, 0], np.uint64)
        # Not hash(), which differs from process to process for strings.
        mask = DropoutMask(rate, zlib.crc32(environment.name.encode()), shape, box.start, self.mode.state)
        self.kernels = kernels.dropout(x, y, dy, dx, mask)

    @reads("x")
    @writes("y")
    def forward(self) -> None:
        self._run(0)

    @reads("dy")
    @writes("dx")
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
