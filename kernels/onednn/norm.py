"""Batch norm by oneDNN with fused ReLU, with computed or given statistics.

With given statistics, oneDNN's backward primitive leaves out the gradient through mean and variance. It writes ``dx =
gamma / sqrt(var + eps) * dy'`` and the sums; after the sums are reduced over all processes, one more pass adds the
gradient through mean and variance::

    dx += (x - mean) / sqrt(var + eps) * slope + offset      slope  = -gamma * means[1] / sqrt(var + eps)
                                                             offset = -gamma * means[0] / sqrt(var + eps)

oneDNN's fast kernels take multiples of 16 channels. Eight rows of 18 channels are passed as one row of 144, with the
per-channel vectors repeated eight times; our own code then combines the statistics of the eight copies of a channel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.documents import bytes_text

from ...device import is_low
from ..checks import same_elements
from ..kernel import (
    BatchNormArrays,
    BatchNormKernels,
    Kernel,
    chain,
    deferred,
    either,
    fallback,
    idle,
)
from ..memory import aligned_empty
from ..norm_parts import mean_and_variance
from . import abi as c
from .conv import flat_shape, image, vector
from .pointwise import Finite
from .program import OnednnEngine, OnednnMemory, PrimitiveList, ReferenceOnly

__all__ = ["OnednnBatchNorm"]

CHANNELS = 16  # multiple of channels that oneDNN's fast kernels take
FAR = 100.0  # limit of mean^2 / var, above which a float32 mean is too inaccurate
LARGEST = 1 << 31  # size of an array whose offsets do not fit into 32 bits, in which the primitive computes them [B]
BLOCK_BYTES = 1 << 18  # piece of the correction per thread [B], small because it is read again at once


class _Repeated:
    """Per-channel vectors repeated along merged rows; the vectors themselves if rows are not merged."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        self._pairs: list[tuple[Any, Any]] = []

    def __call__(self, array: Any) -> Any:
        """Return the vector that oneDNN takes in place of `array` ``(C,)``."""
        if self.repeat == 1:
            return array
        copy = aligned_empty((self.repeat, array.shape[0]), np.float32)
        self._pairs.append((copy, array))
        return copy.reshape(-1)

    def refresh(self) -> None:
        """Copy the current values of the vectors."""
        for copy, array in self._pairs:
            np.copyto(copy, array)


class OnednnBatchNorm:
    """Builder of the kernels of one batch norm; see :meth:`Backend.batch_norm`.

    Parameters
    ----------
    plain
        Factory of the kernels that compute what oneDNN does not.

    Raises
    ------
    ReferenceOnly
        If rows cannot be merged to multiples of 16 channels, parameters or statistics have 16 bits, or arrays are so
        large that oneDNN's offsets overflow; from :meth:`kernels` also if there is one element per channel.
    """

    def __init__(
        self, engine: OnednnEngine, arrays: BatchNormArrays, plain: Callable[[BatchNormArrays], BatchNormKernels]
    ) -> None:
        self.engine, self.a, self.plain = engine, arrays, plain
        if any(is_low(v.dtype) for v in (arrays.gamma, arrays.beta, arrays.mean, arrays.var)):
            raise ReferenceOnly("oneDNN's batch norm: expected parameters and statistics in float32, got 16 bits")
        n, _, rows, channels = flat_shape(arrays.x)
        # Before any descriptor: at such sizes the process ends, and there is no error to catch.
        if arrays.x.nbytes >= LARGEST:
            raise ReferenceOnly(
                f"oneDNN's batch norm ends the process with arrays of {bytes_text(LARGEST)} and more: expected a block "
                f"of fewer elements, got {bytes_text(arrays.x.nbytes)}"
            )
        # Fewest rows whose channels together are a multiple of 16.
        self.repeat = CHANNELS // math.gcd(channels, CHANNELS)
        if rows % self.repeat or rows == self.repeat:  # statistics are over samples too: join them to more rows
            n, rows = 1, n * rows
        if rows % self.repeat:
            raise ReferenceOnly(
                f"oneDNN's batch norm is slow on {rows} rows of {channels} channels: expected channels that {CHANNELS} "
                f"divides, or rows that {self.repeat} divides"
            )
        self.shape = (n, 1, rows // self.repeat, channels * self.repeat)
        # Whether oneDNN's primitive computes the statistics. With merged rows it would compute those of every
        # `repeat`-th row.
        self.own = arrays.local and self.repeat == 1
        self.flags = c.SCALE | c.SHIFT
        self.flags |= 0 if self.own else c.GLOBAL_STATISTICS
        self.flags |= c.FUSE_RELU if arrays.activation else 0
        self._mask: Any = None

    def kernels(self) -> BatchNormKernels:
        """Return all four kernels."""
        a = self.a
        program, descriptor = self._forward()
        forward, statistics = self._keeping_nan(program.kernel()), idle()
        if a.local and not self.own:
            # Merged rows: the statistics are computed first, and the primitive takes them as given.
            moments = Kernel(mean_and_variance(a, a.rows), "numpy:mean and variance")
            forward = chain(self._statistics(), moments, forward)
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

    def _keeping_nan(self, forward: Kernel) -> Kernel:
        """Return a forward kernel that preserves NaN: oneDNN's, whose ReLU turns NaN into 0, or NumPy's if there is a
        NaN.

        Statistics of `x` are NaN if an element is. Other statistics may belong to other data, so in that case the
        kernel checks `x`, which takes one more pass over memory.
        """
        a = self.a
        if a.activation is None:
            return forward
        # NumPy computes `y` only, from mean and variance, which are there already.
        arrays = dataclasses.replace(self._alone(), local=False)
        rectified = Kernel(lambda: np.maximum(a.y, 0, out=a.y), "numpy:relu")
        plain = deferred(lambda: chain(self.plain(arrays).forward, rectified))
        if a.dx is not None or a.local or a.of_x:
            return fallback(forward, self._vectors_fail, plain)
        finite = Finite(self.engine, a.x)
        return either(forward, lambda: self._vectors_fail() or finite.fails(), plain, *finite.kernels)

    def _vectors_fail(self) -> bool:
        """Return whether a per-channel value, or a sum of products of these values, is not finite."""
        a = self.a
        # An infinity times 0 is NaN, so no value that is not finite is lost in a product. If a product of finite values
        # overflows, NumPy computes the same.
        with np.errstate(over="ignore", invalid="ignore"):
            return not math.isfinite(float(np.dot(a.mean, a.var)) + float(np.dot(a.gamma, a.beta)))

    def _statistics(self) -> Kernel:
        """Return the kernel of this block's mean and variance, computed by the primitive and converted to float64 sums.

        The primitive also normalizes into `y`, which `forward` overwrites later. This still takes a third of the time
        of sums in NumPy. Its mean is a float32 sum. An error `e` of the mean changes the combined variance of several
        blocks by about ``2 e (mean - mean of all)``. That is no more than the error in the normalized values, except if
        the data are far from zero: then NumPy computes the sums.
        """
        a, p = self.a, PrimitiveList(self.engine)
        if same_elements(a.x, a.y):
            # The primitive would overwrite `x`, which forward() reads again.
            return self._careful_statistics()
        # The stand-ins of 16 bits take memory, which most networks do not need.
        careful = deferred(self._careful_statistics) if is_low(a.x.dtype) else self._careful_statistics()
        x, y = self._image(p, a.x), self._image(p, a.y)
        pd = p.descriptor("batch_normalization_forward", c.FORWARD_TRAINING, x.desc, y.desc, a.eps, 0)
        statistics = aligned_empty((2, self.repeat * a.x.shape[-1]), np.float32)
        p.step(pd, {c.SRC: x, c.DST: y, c.MEAN: vector(p, statistics[0]), c.VARIANCE: vector(p, statistics[1])})
        p.call(self._sums_of(statistics.reshape(2, self.repeat, -1)))
        return fallback(p.kernel(), self._far_from_zero(*statistics), careful)

    def _far_from_zero(self, mean: Any, var: Any) -> Callable[[], bool]:
        """Return a function that returns whether any channel's mean is many times its standard deviation."""
        left, right = (np.empty(mean.shape, np.float32) for _ in range(2))

        def is_far() -> bool:
            np.multiply(mean, mean, out=left)
            np.add(var, self.a.eps, out=right)
            np.divide(left, right, out=left)
            return bool(left.max() > FAR)

        return is_far

    def _sums_of(self, sums: Any) -> Callable[[], None]:
        """Return a function that computes ``a.sums`` from mean and variance of the merged rows, which `sums` holds."""
        # sum x = rows * mean, sum x^2 = rows * (var + mean^2), by channel of a merged row; repeated channels are added.
        a, rows = self.a, self.a.rows / self.repeat
        mean, square = (np.empty(sums.shape[1:]) for _ in range(2))

        def run() -> None:
            np.copyto(mean, sums[0])
            np.multiply(mean, mean, out=square)
            np.add(square, sums[1], out=square)
            np.add.reduce(mean, axis=0, out=a.sums[0])
            np.add.reduce(square, axis=0, out=a.sums[1])
            np.multiply(a.sums, rows, out=a.sums)

        return run

    def _careful_statistics(self) -> Kernel:
        """Return the statistics kernel that is accurate for any mean."""
        return self.plain(dataclasses.replace(self._alone(), local=False)).statistics

    def _alone(self) -> BatchNormArrays:
        """Return the arrays of the forward pass without activation."""
        return dataclasses.replace(self.a, activation=None, dy=None, dx=None)

    def _image(self, p: PrimitiveList, array: Any) -> OnednnMemory:
        return image(p, array.reshape(self.shape))

    def _forward(self) -> tuple[PrimitiveList, int]:
        a, p, repeated = self.a, PrimitiveList(self.engine), _Repeated(self.repeat)
        x, y = self._image(p, a.x), self._image(p, a.y)
        # In inference mode the primitive would take mean and variance as given, even if it must compute them.
        inference = a.dx is None and not self.own
        kind = c.FORWARD_INFERENCE if inference else c.FORWARD_TRAINING
        pd = p.descriptor("batch_normalization_forward", kind, x.desc, y.desc, a.eps, self.flags)
        arguments = {c.SRC: x, c.DST: y}
        for index, array in ((c.MEAN, a.mean), (c.VARIANCE, a.var), (c.GAMMA, a.gamma), (c.BETA, a.beta)):
            arguments[index] = vector(p, repeated(array))
        # Which elements the fused ReLU has let pass; backward reads it, because it has no output.
        mask = p.required(pd, c.WORKSPACE)
        if mask:
            arguments[c.WORKSPACE] = p.kept(mask)
            self._mask = arguments[c.WORKSPACE].array
        if self.repeat > 1:  # parameters and statistics change from call to call
            p.call(repeated.refresh)
        p.step(pd, arguments)
        return p, pd

    def _backward(self, hint: int) -> Kernel:
        a, p, repeated = self.a, PrimitiveList(self.engine), _Repeated(self.repeat)
        x, dy, dx = self._image(p, a.x), self._image(p, a.dy), self._image(p, a.dx)
        pd = p.descriptor("batch_normalization_backward", c.BACKWARD, dx.desc, dy.desc, x.desc, a.eps, self.flags, hint)
        sums = aligned_empty((2, self.repeat, a.x.shape[-1]), np.float32)
        arguments = {c.SRC: x, c.DIFF_DST: dy, c.DIFF_SRC: dx}
        for index, array in ((c.MEAN, a.mean), (c.VARIANCE, a.var), (c.GAMMA, a.gamma)):
            arguments[index] = vector(p, repeated(array))
        arguments |= {c.DIFF_BETA: vector(p, sums[0].reshape(-1)), c.DIFF_GAMMA: vector(p, sums[1].reshape(-1))}
        if self._mask is not None:
            arguments[c.WORKSPACE] = p.array(self._mask, p.borrowed(p.required(pd, c.WORKSPACE)))
        if self.repeat > 1:
            p.call(repeated.refresh)
        p.step(pd, arguments)
        # The primitive sums each of the merged rows' channels; a channel occurs `repeat` times among them.
        p.call(lambda: np.add.reduce(sums, axis=1, dtype=np.float64, out=a.sums))
        return p.kernel()

    def _correction(self, means: Any) -> Kernel:
        """Return the kernel that adds ``(x - mean) / sqrt(var + eps) * slope + offset`` to `dx`.

        It normalizes again with another scale and shift, in scratch that stays in the cache, and adds the result.
        """
        a, p, repeated = self.a, PrimitiveList(self.engine), _Repeated(self.repeat)
        slope, offset = aligned_empty((2, a.x.shape[-1]), np.float32)
        vectors = {
            index: vector(p, repeated(v))
            for index, v in ((c.MEAN, a.mean), (c.VARIANCE, a.var), (c.GAMMA, slope), (c.BETA, offset))
        }
        p.call(self._coefficients(means, slope, offset))
        if self.repeat > 1:
            p.call(repeated.refresh)
        # One row of vectors serves all samples, so rows of several samples are in one block.
        width = self.repeat * a.x.shape[-1]
        x, dx = a.x.reshape(-1, width), a.dx.reshape(-1, width)
        height = max(1, self.engine.threads * BLOCK_BYTES // (4 * width))
        scratch: OnednnMemory | None = None
        flags = c.SCALE | c.SHIFT | c.GLOBAL_STATISTICS
        for first in range(0, len(x), height):
            inputs, gradients = (image(p, part[first : first + height].reshape(1, 1, -1, width)) for part in (x, dx))
            scratch = p.temporary(inputs.desc) if scratch is None else p.part(scratch, inputs.desc, 0)
            desc = inputs.desc
            pd = p.descriptor("batch_normalization_forward", c.FORWARD_INFERENCE, desc, desc, a.eps, flags)
            p.step(pd, {c.SRC: inputs, c.DST: scratch, **vectors})
            p.binary(c.BINARY_ADD, gradients, scratch, gradients)
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
            np.multiply(scaled, means[1], out=slope, casting="same_kind")

        return run
