"""Dropout whose mask depends on global indices only: the same on every decomposition."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.dtensor import Box
from halograd.layers.costs import Passes
from halograd.layers.layer import Layer, Shape

if TYPE_CHECKING:
    from halograd.program.context import Context
    from halograd.program.views import View

__all__ = ["Dropout", "global_counters", "mix64", "mix64_inplace"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
#: Elements hashed at a time: the buffers stay in the second-level cache.
_CHUNK = 1 << 14


class Dropout(Layer):
    """Training: each element is zeroed with probability `rate`, the others are scaled by ``1 / (1 - rate)``.
    Evaluation: identity.

    Parameters
    ----------
    rate
        In ``[0, 1)``.

    Notes
    -----
    An element is dropped if ``hash(key + GOLDEN * index) < rate * 2**64``, with the finaliser of SplitMix64 as hash,
    `index` the element's position in the global array in row-major order, and `key` a hash of the run's seed, the
    step and the layer's name. A mask costs one byte per element and no communication, and a resumed run draws
    the same ones.

    References
    ----------
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, Figure 16. A counter
    replaces the sequence (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
    """

    # Reads its bytes or draws them again.
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
        views: dict[str, View | None] = {"x": context.inputs[0].view, "y": context.y}
        if not context.fused:
            views["dropped"] = context.scratch(box.shape, "bool")
            rows, columns = _counted(shape, box)
            some = (2, min(_rows(columns, _CHUNK), rows), columns)
            views |= {"hashes": context.scratch(some, "uint64")}
        kernel = context.kernel(partial(_DropoutKernel, self, shape, box), **views)
        kernel.recordable = context.fused  # else the host draws
        context.run(kernel, "forward", uses=tuple(views), timing=context.timing("forward"))

        def backward() -> None:
            kernel.add(dy=context.dy, dx=context.gradient(0))
            uses = ("dy", "dx") if context.fused else ("dropped", "dy", "dx")
            context.run(kernel, "backward", uses=uses, timing=context.timing("backward_data"))

        return backward


def _counted(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Elements of a box along the outer axes, and along the last two."""
    split = max(1, len(shape) - 2)
    return math.prod(box.shape[:split]), math.prod(box.shape[split:])


def _rows(columns: int, chunk: int) -> int:
    return max(1, chunk // max(1, columns))


class _DropoutKernel:
    """Draws what is dropped by counters; the backend's kernel draws it again instead of keeping it."""

    def __init__(self, layer: Dropout, shape: tuple[int, ...], box: Box, environment: Any, **arrays: Any) -> None:
        self.scale = 1.0 / (1.0 - layer.rate)
        self.threshold = np.uint64(int(layer.rate * 2**64))
        self.salt = zlib.crc32(environment.name.encode())
        self.mode = environment.mode
        some: list[Any] = [arrays.get(k) for k in ("x", "y", "dy", "dx")]
        self.x, self.y, self.dy, self.dx = some
        self.fused: list[Any] = []
        kernels = environment.kernels
        if kernels.cuda is not None:
            if self.mode.state is None:  # bound by somebody who does not count steps
                self.mode.state = kernels.device.array([self.mode.seed, self.mode.step], np.uint64)
            pairs = [(self.x, self.y), (self.dy, self.dx)][: 1 if self.dx is None else 2]
            options = (layer.rate, self.salt, shape, box.start, self.mode.state)
            self.fused = [kernels.cuda.dropout(*pair, *options) for pair in pairs]
            return
        self.dropped, (self.hashes, self.shifted) = arrays["dropped"], arrays["hashes"]
        self.outer, self.inner = (kernels.device.array(a) for a in global_counters(shape, box))

    def forward(self) -> None:
        if not self.y.size:
            return
        if not self.mode.training:
            np.copyto(self.y, self.x)
            return
        if self.fused:
            self.fused[0]()
            return
        self._draw(np.uint64(mix64(mix64(mix64(self.mode.seed) + self.mode.step) + self.salt)))
        np.multiply(self.x, self.scale, out=self.y)
        # Set, not multiplied by zero: an infinite element that is dropped must not become NaN.
        np.copyto(self.y, 0, where=self.dropped)

    def _draw(self, key: np.uint64) -> None:
        """Fill `dropped`."""
        rows = self.dropped.reshape(self.outer.size, self.inner.size)
        step = max(1, self.hashes.shape[0])
        for first in range(0, self.outer.size, step):
            outer = self.outer[first : first + step]
            z, t = self.hashes[: outer.size], self.shifted[: outer.size]
            np.add(outer[:, None], self.inner, out=z)
            np.add(z, key, out=z)
            mix64_inplace(z, t)
            np.less(z, self.threshold, out=rows[first : first + outer.size])

    def backward(self) -> None:
        if not self.mode.training:
            np.copyto(self.dx, self.dy)
            return
        if self.fused:
            self.fused[1]()
            return
        np.multiply(self.dy, self.scale, out=self.dx)
        np.copyto(self.dx, 0, where=self.dropped)

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernel in self.fused:
            kernel.close()


def mix64(value: int) -> int:
    """The finaliser of SplitMix64: a bijection of 64-bit numbers in which every bit depends on all bits."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> _SHIFTS[0])) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> _SHIFTS[1])) * _FACTORS[1]) & _MASK
    return z ^ (z >> _SHIFTS[2])


def mix64_inplace(z: Any, work: Any) -> None:
    """`mix64` of every element of `z` (uint64) without its first addition, in place; `work` has the same shape."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None)):
        np.right_shift(z, np.uint64(shift), out=work)
        np.bitwise_xor(z, work, out=z)
        if factor is not None:
            np.multiply(z, np.uint64(factor), out=z)


def global_counters(shape: tuple[int, ...], box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays, of the outer axes and of the last two, whose sums are ``GOLDEN * index`` modulo 2**64.

    `index` is the row-major position in an array of `shape` of each element of `box`, in the order of the box.
    """
    split = max(1, len(shape) - 2)
    parts = []
    for axes in (range(split), range(split, len(shape))):
        total = np.zeros((1,), np.uint64)
        for axis in axes:
            step = (math.prod(shape[axis + 1 :]) * _GOLDEN) & _MASK
            index = np.arange(box.start[axis], box.start[axis] + box.shape[axis], dtype=np.uint64)
            total = (total[:, None] + index * np.uint64(step)).reshape(-1)
        parts.append(total)
    return parts[0], parts[1]
