"""Dropout whose mask depends on global indices only: the same on every decomposition."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from halograd.dtensor import Box
from halograd.layers.binding import Binding
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator

__all__ = ["Dropout", "global_counters", "mix64", "mix64_inplace"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
#: Elements hashed at a time: the buffers stay in the second-level cache.
_CHUNK = 1 << 14
#: On a device, where each chunk costs some launches.
_DEVICE_CHUNK = 1 << 22


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

    cuts_channels = "channelwise"

    def __init__(self, rate: float, name: str | None = None) -> None:
        super().__init__(name)
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: expected a rate in [0, 1), got {rate}")
        self.rate = float(rate)

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])

    def bind(self, binding: Binding) -> Operator:
        return _DropoutOperator(binding)


class _DropoutOperator(Operator):
    def __init__(self, b: Binding) -> None:
        assert isinstance(b.layer, Dropout)
        self.b = b
        self.scale = 1.0 / (1.0 - b.layer.rate)
        self.threshold = np.uint64(int(b.layer.rate * 2**64))
        self.salt = zlib.crc32(b.name.encode())
        self.fused: list[Any] = []
        if b.kernels.cuda is not None:
            self.fused.append(self._fuse(b.inputs[0].array, b.output.array))
            return
        self.dropped = b.memory.keep(b.box.shape, np.dtype(bool), "activation")
        device = b.kernels.device
        self.outer, self.inner = (device.array(a) for a in global_counters(b.output.layout.shape, b.box))
        self.rows = max(1, (_CHUNK if device.is_host else _DEVICE_CHUNK) // max(1, self.inner.size))
        shape = (2, min(self.rows, self.outer.size), self.inner.size)
        self.hashes, self.shifted = b.scratch(shape, np.dtype(np.uint64))

    def _fuse(self, x: Any, y: Any) -> Any:
        """The backend's kernel, which draws the mask again instead of keeping it."""
        b = self.b
        assert isinstance(b.layer, Dropout)
        shape, start = b.output.layout.shape, b.box.start
        if b.mode.state is None:  # bound by somebody who does not count steps
            b.mode.state = b.kernels.device.array([b.mode.seed, b.mode.step], np.uint64)
        return b.kernels.cuda.dropout(x, y, b.layer.rate, self.salt, shape, start, b.mode.state)

    def forward(self) -> None:
        b = self.b
        if not b.box.size:
            return
        if not b.mode.training:
            np.copyto(b.output.array, b.inputs[0].array)
            return
        if self.fused:
            self.fused[0]()
            return
        self._draw(np.uint64(mix64(mix64(mix64(b.mode.seed) + b.mode.step) + self.salt)))
        np.multiply(b.inputs[0].array, self.scale, out=b.output.array)
        # Set, not multiplied by zero: an infinite element that is dropped must not become NaN.
        np.copyto(b.output.array, 0, where=self.dropped)

    def _draw(self, key: np.uint64) -> None:
        """Fill `dropped`."""
        rows = self.dropped.reshape(self.outer.size, self.inner.size)
        for first in range(0, self.outer.size, self.rows):
            outer = self.outer[first : first + self.rows]
            z, t = self.hashes[: outer.size], self.shifted[: outer.size]
            np.add(outer[:, None], self.inner, out=z)
            np.add(z, key, out=z)
            mix64_inplace(z, t)
            np.less(z, self.threshold, out=rows[first : first + outer.size])

    def bind_backward(self) -> None:
        self.dx = self.b.gradient(0)
        if self.fused:
            self.fused.append(self._fuse(self.b.output.dy, self.dx))

    def backward(self) -> None:
        b = self.b
        if not b.mode.training:
            np.copyto(self.dx, b.output.dy)
            return
        if self.fused:
            self.fused[1]()
            return
        np.multiply(b.output.dy, self.scale, out=self.dx)
        np.copyto(self.dx, 0, where=self.dropped)


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
