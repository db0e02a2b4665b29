"""Batch norm by oneDNN, ReLU fused, on its own statistics or on somebody else's.

On other statistics oneDNN's backward primitive leaves out the gradient through mean and variance. It writes
``scale * dy'`` and the sums; when all processes have agreed on the sums, one more pass adds the rest::

    dx += (x - mean) * slope + offset      slope  = -gamma * means[1] / (var + eps)
                                           offset = -gamma * means[0] / sqrt(var + eps)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels.kernel import BatchNormKernels, Kernel, ScratchKernel
from halograd.kernels.numpy.batch_norm import BatchNormArrays
from halograd.kernels.numpy.moments import moments, moments_scratch_bytes
from halograd.kernels.onednn import abi as c
from halograd.kernels.onednn.formats import flat_shape, image, vector
from halograd.kernels.onednn.program import Engine, Memory, Program

__all__ = ["OnednnBatchNorm"]


class OnednnBatchNorm:
    """Builds the kernels of one batch norm; see :meth:`Backend.batch_norm`."""

    def __init__(self, engine: Engine, arrays: BatchNormArrays) -> None:
        self.engine, self.a = engine, arrays
        self.shape = flat_shape(arrays.x)
        self.flags = c.SCALE | c.SHIFT
        self.flags |= 0 if arrays.local else c.GLOBAL_STATISTICS
        self.flags |= c.FUSE_RELU if arrays.relu else 0
        self._mask: Any = None

    def kernels(self) -> BatchNormKernels:
        """All four kernels."""
        a = self.a
        idle = Kernel(lambda: None, "onednn:nothing to do")
        forward_program, descriptor = self._forward()
        statistics = idle if a.local else self._statistics()
        if a.dx is None:
            return BatchNormKernels(statistics, forward_program.kernel(), None, None)
        sums = self._backward(descriptor)
        data = idle if a.local else self._correction()
        return BatchNormKernels(statistics, forward_program.kernel(), sums, data)

    def _statistics(self) -> Kernel:
        """Sums by NumPy: oneDNN has them only together with a normalised output, twice the memory traffic."""
        scratch, a = self.engine.scratch, self.a
        return ScratchKernel(
            lambda: moments(a.x, a.sums, scratch), scratch, moments_scratch_bytes(a.x), "numpy:moments"
        )

    def _image(self, p: Program, array: Any) -> Memory:
        return image(p, array.reshape(self.shape))

    def _forward(self) -> tuple[Program, int]:
        a, p = self.a, Program(self.engine)
        x, y = self._image(p, a.x), self._image(p, a.y)
        # Inference would take mean and variance as given even where they are to be computed.
        inference = a.dx is None and not a.local
        kind = c.FORWARD_INFERENCE if inference else c.FORWARD_TRAINING
        pd = p.descriptor("batch_normalization_forward", kind, x.desc, y.desc, a.eps, self.flags)
        arguments = {c.SRC: x, c.DST: y, c.MEAN: vector(p, a.mean), c.VARIANCE: vector(p, a.var)}
        arguments |= {c.GAMMA: vector(p, a.gamma), c.BETA: vector(p, a.beta)}
        mask = p.wanted(pd, c.WORKSPACE)
        if mask and p.size(mask):
            arguments[c.WORKSPACE] = p.kept(mask)
            self._mask = arguments[c.WORKSPACE].array
        p.step(pd, arguments)
        return p, pd

    def _backward(self, hint: int) -> Kernel:
        a, p = self.a, Program(self.engine)
        x, dy, dx = self._image(p, a.x), self._image(p, a.dy), self._image(p, a.dx)
        pd = p.descriptor("batch_normalization_backward", c.BACKWARD, dx.desc, dy.desc, x.desc, a.eps, self.flags, hint)
        sums = np.empty((2, a.x.shape[-1]), np.float32)
        arguments = {c.SRC: x, c.DIFF_DST: dy, c.DIFF_SRC: dx}
        arguments |= {c.MEAN: vector(p, a.mean), c.VARIANCE: vector(p, a.var), c.GAMMA: vector(p, a.gamma)}
        arguments |= {c.DIFF_BETA: vector(p, sums[0]), c.DIFF_GAMMA: vector(p, sums[1])}
        if self._mask is not None:
            arguments[c.WORKSPACE] = p.array(self._mask, p.borrowed(p.wanted(pd, c.WORKSPACE)))
        p.step(pd, arguments)
        p.call(lambda: np.copyto(a.sums, sums))
        return p.kernel()

    def _correction(self) -> Kernel:
        a, p = self.a, Program(self.engine)
        channels = a.x.shape[-1]
        slope, offset = np.empty((2, channels), np.float32)
        p.call(self._coefficients(slope, offset))
        x, dx = self._image(p, a.x), self._image(p, a.dx)
        broadcast = (1, channels, 1, 1)
        mean, by, plus = (vector(p, v, broadcast) for v in (a.mean, slope, offset))
        operations = p.attributes(("binary", c.BINARY_MULTIPLY, by.desc), ("binary", c.BINARY_ADD, plus.desc), ("sum",))
        pd = p.descriptor("binary", c.BINARY_SUBTRACT, x.desc, mean.desc, dx.desc, attributes=operations)
        arguments = {c.SRC: x, c.SRC_1: mean, c.DST: dx}
        arguments |= {c.POST_OPERATION | c.SRC_1: by, (2 * c.POST_OPERATION) | c.SRC_1: plus}
        p.step(pd, arguments)
        return p.kernel()

    def _coefficients(self, slope: Any, offset: Any) -> Callable[[], None]:
        a = self.a
        inverse, scaled = np.empty((2, a.x.shape[-1]))

        def run() -> None:
            np.add(a.var, a.eps, out=inverse)
            np.sqrt(inverse, out=inverse)
            np.divide(a.gamma, inverse, out=scaled)
            np.negative(scaled, out=scaled)
            np.multiply(scaled, a.means[0], out=offset, casting="same_kind")
            np.multiply(scaled, a.means[1], out=scaled)
            np.divide(scaled, inverse, out=slope, casting="same_kind")

        return run
