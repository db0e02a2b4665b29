"""Batch norm by oneDNN, ReLU fused, on its own statistics or on somebody else's.

On other statistics oneDNN's backward primitive leaves out the gradient through mean and variance. It writes
``scale * dy'`` and the sums; when all processes have agreed on the sums, one more pass adds the rest::

    dx += (x - mean) * slope + offset      slope  = -gamma * means[1] / (var + eps)
                                           offset = -gamma * means[0] / sqrt(var + eps)

Its fast kernels take multiples of 16 channels. With 18, eight rows are shown to it as one of 144 channels,
with the per-channel vectors repeated eight times; the statistics are then always somebody else's: ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels.kernel import BatchNormKernels, Kernel, ScratchKernel, chain, idle
from halograd.kernels.numpy.batch_norm import BatchNormArrays, mean_and_variance
from halograd.kernels.numpy.moments import moments, moments_scratch_bytes
from halograd.kernels.onednn import abi as c
from halograd.kernels.onednn.formats import flat_shape, image, vector
from halograd.kernels.onednn.program import Engine, Memory, Program, ReferenceOnly

__all__ = ["OnednnBatchNorm"]

LANES = 16


class _Repeated:
    """Per-channel vectors repeated along rows shown as longer ones; the vectors themselves where they are not."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        self._pairs: list[tuple[Any, Any]] = []

    def __call__(self, array: Any) -> Any:
        """The vector to give to oneDNN in place of `array` ``(C,)``."""
        if self.repeat == 1:
            return array
        copy = np.empty((self.repeat, array.shape[0]), np.float32)
        self._pairs.append((copy, array))
        return copy.reshape(-1)

    def refresh(self) -> None:
        """Take the present values."""
        for copy, array in self._pairs:
            np.copyto(copy, array)


class OnednnBatchNorm:
    """Builds the kernels of one batch norm; see :meth:`Backend.batch_norm`.

    Raises
    ------
    ReferenceOnly
        Where rows cannot be joined to multiples of 16 channels, or there is one element per channel.
    """

    def __init__(self, engine: Engine, arrays: BatchNormArrays) -> None:
        self.engine, self.a = engine, arrays
        n, _, rows, channels = flat_shape(arrays.x)
        self.repeat = LANES // math.gcd(channels, LANES)
        if rows % self.repeat or rows == self.repeat:
            n, rows = 1, n * rows
        if rows % self.repeat:
            raise ReferenceOnly(
                f"oneDNN's batch norm is slow on {rows} rows of {channels} channels: expected channels that {LANES} "
                f"divides, or rows that {self.repeat} divides"
            )
        self.shape = (n, 1, rows // self.repeat, channels * self.repeat)
        # Whether the primitive computes the statistics.
        self.own = arrays.local and self.repeat == 1
        self.flags = c.SCALE | c.SHIFT
        self.flags |= 0 if self.own else c.GLOBAL_STATISTICS
        self.flags |= c.FUSE_RELU if arrays.relu else 0
        self._mask: Any = None

    def kernels(self) -> BatchNormKernels:
        """All four kernels."""
        a = self.a
        program, descriptor = self._forward()
        forward, statistics = program.kernel(), idle()
        if a.local and not self.own:
            forward = chain(self._statistics(), Kernel(mean_and_variance(a), "numpy:mean and variance"), forward)
        elif not a.local:
            statistics = self._statistics()
        if a.dx is None:
            return BatchNormKernels(statistics, forward, None, None)
        sums = self._backward(descriptor)
        if not a.local:
            return BatchNormKernels(statistics, forward, sums, self._correction(a.means))
        if not self.own:
            means = np.empty_like(a.means)
            divide = Kernel(lambda: np.divide(a.sums, a.rows, out=means), "numpy:means")
            sums = chain(sums, divide, self._correction(means))
        return BatchNormKernels(statistics, forward, sums, idle())

    def _statistics(self) -> Kernel:
        """Sums by NumPy: oneDNN has them only together with a normalised output, twice the memory traffic."""
        scratch, a = self.engine.scratch, self.a
        return ScratchKernel(
            lambda: moments(a.x, a.sums, scratch), scratch, moments_scratch_bytes(a.x), "numpy:moments"
        )

    def _image(self, p: Program, array: Any) -> Memory:
        return image(p, array.reshape(self.shape))

    def _forward(self) -> tuple[Program, int]:
        a, p, repeated = self.a, Program(self.engine), _Repeated(self.repeat)
        x, y = self._image(p, a.x), self._image(p, a.y)
        # Inference would take mean and variance as given even where they are to be computed.
        inference = a.dx is None and not self.own
        kind = c.FORWARD_INFERENCE if inference else c.FORWARD_TRAINING
        pd = p.descriptor("batch_normalization_forward", kind, x.desc, y.desc, a.eps, self.flags)
        arguments = {c.SRC: x, c.DST: y}
        for index, array in ((c.MEAN, a.mean), (c.VARIANCE, a.var), (c.GAMMA, a.gamma), (c.BETA, a.beta)):
            arguments[index] = vector(p, repeated(array))
        mask = p.wanted(pd, c.WORKSPACE)
        if mask and p.size(mask):
            arguments[c.WORKSPACE] = p.kept(mask)
            self._mask = arguments[c.WORKSPACE].array
        if self.repeat > 1:
            p.call(repeated.refresh)
        p.step(pd, arguments)
        return p, pd

    def _backward(self, hint: int) -> Kernel:
        a, p, repeated = self.a, Program(self.engine), _Repeated(self.repeat)
        x, dy, dx = self._image(p, a.x), self._image(p, a.dy), self._image(p, a.dx)
        pd = p.descriptor("batch_normalization_backward", c.BACKWARD, dx.desc, dy.desc, x.desc, a.eps, self.flags, hint)
        sums = np.empty((2, self.repeat, a.x.shape[-1]), np.float32)
        arguments = {c.SRC: x, c.DIFF_DST: dy, c.DIFF_SRC: dx}
        for index, array in ((c.MEAN, a.mean), (c.VARIANCE, a.var), (c.GAMMA, a.gamma)):
            arguments[index] = vector(p, repeated(array))
        arguments |= {c.DIFF_BETA: vector(p, sums[0].reshape(-1)), c.DIFF_GAMMA: vector(p, sums[1].reshape(-1))}
        if self._mask is not None:
            arguments[c.WORKSPACE] = p.array(self._mask, p.borrowed(p.wanted(pd, c.WORKSPACE)))
        if self.repeat > 1:
            p.call(repeated.refresh)
        p.step(pd, arguments)
        p.call(lambda: np.add.reduce(sums, axis=1, dtype=np.float64, out=a.sums))
        return p.kernel()

    def _correction(self, means: Any) -> Kernel:
        a, p, repeated = self.a, Program(self.engine), _Repeated(self.repeat)
        slope, offset = np.empty((2, a.x.shape[-1]), np.float32)
        x, dx = self._image(p, a.x), self._image(p, a.dx)
        broadcast = (1, a.x.shape[-1] * self.repeat, 1, 1)
        mean, by, plus = (vector(p, repeated(v), broadcast) for v in (a.mean, slope, offset))
        operations = p.attributes(("binary", c.BINARY_MULTIPLY, by.desc), ("binary", c.BINARY_ADD, plus.desc), ("sum",))
        pd = p.descriptor("binary", c.BINARY_SUBTRACT, x.desc, mean.desc, dx.desc, attributes=operations)
        arguments = {c.SRC: x, c.SRC_1: mean, c.DST: dx}
        arguments |= {c.POST_OPERATION | c.SRC_1: by, (2 * c.POST_OPERATION) | c.SRC_1: plus}
        p.call(self._coefficients(means, slope, offset))
        if self.repeat > 1:
            p.call(repeated.refresh)
        p.step(pd, arguments)
        return p.kernel()

    def _coefficients(self, means: Any, slope: Any, offset: Any) -> Callable[[], None]:
        a = self.a
        inverse, scaled = np.empty((2, a.x.shape[-1]))

        def run() -> None:
            np.add(a.var, a.eps, out=inverse)
            np.sqrt(inverse, out=inverse)
            np.divide(a.gamma, inverse, out=scaled)
            np.negative(scaled, out=scaled)
            np.multiply(scaled, means[0], out=offset, casting="same_kind")
            np.multiply(scaled, means[1], out=scaled)
            np.divide(scaled, inverse, out=slope, casting="same_kind")

        return run
