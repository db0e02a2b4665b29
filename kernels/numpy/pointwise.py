"""Activations, sums of arrays, and dropout in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..checks import same_elements
from ..kernel import FusedActivation, Kernel, ScratchKernel
from ..memory import nbytes_of, round_up
from ..pointwise import DropoutMask
from .activation import KINDS
from .windows import NumpyWindows

__all__ = ["NumpyPointwise", "axis_counters", "first_counter", "global_counters", "mix64", "mix64_inplace"]

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): 2^64 divided by the golden
# ratio, and the factors and shifts of its finalizer.
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
#: Elements hashed at a time, so that the buffers stay in the second-level cache.
_DRAWN = 1 << 14
#: Elements of an activation computed at a time, for the same reason.
_PIECE = 1 << 15

class NumpyPointwise(NumpyWindows):
    """Elementwise kernels in NumPy; arrays of activations and sums may have any strides."""

    def _activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> tuple[Kernel, Kernel | None]:
        """Build an elementwise function and its gradient."""
        functions = KINDS[kind]
        forward = self._elementwise(functions.forward, (x, y), kind, alpha)
        return forward, None if dx is None else self._elementwise(functions.gradient, (x, y, dy, dx), kind, alpha)

    def _elementwise(self, function: Callable[..., None], arrays: Sequence[Any], kind: str, alpha: float) -> Kernel:
        """Build a function of arrays and of the buffers of an activation.

        Packed arrays are computed in pieces that stay in the cache, others at once.
        """
        buffers, pieces, scratch = KINDS[kind].buffers, [tuple(arrays)], self.scratch
        dtype = KINDS[kind].dtype or arrays[0].dtype
        if all(a.flags.c_contiguous for a in arrays):
            # A piece of each array and the buffers stay in the cache over all passes of the function.
            flat = [a.reshape(-1) for a in arrays]
            starts = range(0, flat[0].size, _PIECE)
            pieces = [tuple(a[i : i + _PIECE] for a in flat) for i in starts]
        size = round_up(nbytes_of(pieces[0][0].shape, dtype))

        def bind() -> Callable[[], None]:
            steps = [
                (*arrays, [scratch.view(arrays[0].shape, dtype, i * size) for i in range(buffers)], alpha)
                for arrays in pieces
            ]

            def run() -> None:
                # An infinity times 0 is NaN by definition, and an exponential may be 0: no warnings.
                with np.errstate(all="ignore"):
                    for step in steps:
                        function(*step)

            return run

        return ScratchKernel(bind, scratch, buffers * size, f"numpy:{kind}")

    def _add(self, xs: list[Any], y: Any, activation: FusedActivation | None) -> Kernel:
        """Build ``y = f(sum of xs)``; `y` may be one or several of `xs`."""
        terms = [x for x in xs if not same_elements(x, y)]
        times = len(xs) - len(terms)  # number of terms that are `y` itself

        def run() -> None:
            # The terms that are `y` itself first: the sum overwrites them.
            if times > 1:
                np.multiply(y, times, out=y)
            elif not times and len(terms) > 1:
                np.add(terms[0], terms[1], out=y)
            elif not times:
                np.copyto(y, terms[0])
            for term in terms[0 if times else 2 :]:
                np.add(y, term, out=y)

        return self.activated(Kernel(run, "numpy:add"), y, activation)

    def _dropout(self, x: Any, y: Any, dy: Any, dx: Any, mask: DropoutMask) -> tuple[Kernel, Kernel | None]:
        """Build dropout. Backward draws the mask again."""
        return self._dropped(x, y, mask), None if dx is None else self._dropped(dy, dx, mask)

    def _dropped(self, x: Any, y: Any, mask: DropoutMask) -> Kernel:
        outer, inner = global_counters(mask.shape, mask.start, x.shape)
        # Some outer positions at a time, with all inner ones: their counters are the sums of one of each.
        step, threshold = max(1, _DRAWN // max(1, inner.size)), np.uint64(int(mask.rate * 2**64))
        shape, factor, scratch = (min(step, outer.size), inner.size), 1.0 / (1.0 - mask.rate), self.scratch
        size = round_up(nbytes_of(shape, np.uint64))
        source, target = (a.reshape(outer.size, inner.size) for a in (x, y))

        def bind() -> Callable[[], None]:
            hashes, shifted = scratch.view(shape, np.uint64), scratch.view(shape, np.uint64, size)
            dropped, steps = scratch.view(shape, np.bool_, 2 * size), []
            for part in (slice(i, min(i + step, outer.size)) for i in range(0, outer.size, step)):
                count = part.stop - part.start
                work = (hashes[:count], shifted[:count], dropped[:count])
                steps.append((outer[part, None], source[part], target[part], *work))

            def run() -> None:
                offset = first_counter(mask)
                for counters, source, target, z, work, out in steps:
                    np.add(counters, inner, out=z)
                    np.add(z, offset, out=z)
                    mix64_inplace(z, work)
                    np.less(z, threshold, out=out)
                    np.multiply(source, factor, out=target)
                    # Assign 0 instead of multiplying by 0: a dropped infinite element must not become NaN.
                    np.copyto(target, 0, where=out)

            return run

        kept = self.own.add(outer, inner)
        return ScratchKernel(bind, scratch, 2 * size + nbytes_of(shape, np.bool_), "numpy:dropout", kept)


def first_counter(mask: DropoutMask) -> np.uint64:
    """Return the term that all counters ``key + GOLDEN * index`` of a call share: the key, from the current seed and
    step and the mask's salt, plus the offset of the samples before this part of the batch.
    """
    seed, number, first = mask.state.tolist()
    key = mix64(mix64(mix64(seed) + number) + mask.salt)
    # `first` is the number of samples before this part of the batch.
    return np.uint64((key + first * math.prod(mask.shape[1:]) * _GOLDEN) & _MASK)


def mix64(value: int) -> int:
    """Return `value` mixed by SplitMix64, that is, by an addition and the finalizer.

    It is a bijection of 64-bit numbers. Each bit of the result depends on all bits of `value`.
    """
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> _SHIFTS[0])) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> _SHIFTS[1])) * _FACTORS[1]) & _MASK
    return z ^ (z >> _SHIFTS[2])


def mix64_inplace(z: Any, work: Any) -> None:
    """Apply `mix64` without its first addition to every element of `z` (uint64), in place; `work` has the same shape.
    """
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None)):
        np.right_shift(z, np.uint64(shift), out=work)
        np.bitwise_xor(z, work, out=z)
        if factor is not None:
            np.multiply(z, np.uint64(factor), out=z)


def global_counters(
    shape: Sequence[int], start: Sequence[int], extents: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return two flat arrays, over the outer axes and over the last one or two, whose sums are ``GOLDEN * index``
    modulo 2**64.

    `index` is the row-major position in an array of `shape` of each element of the block of `extents` that begins at
    `start`, in the order of the block.
    """
    split = max(1, len(shape) - 2)
    outer, inner = (
        axis_counters(shape, start, extents, axes) for axes in (range(split), range(split, len(shape)))
    )
    return outer, inner


def axis_counters(
    shape: Sequence[int], start: Sequence[int], extents: Sequence[int], axes: Sequence[int]
) -> np.ndarray:
    """Return what the positions along some axes add to ``GOLDEN * index`` (see :func:`global_counters`), as a flat
    array over these axes.
    """
    total = np.zeros((1,), np.uint64)
    for axis in axes:
        # Python's integers, because the product exceeds 64 bits; NumPy's products and sums wrap around, as they should.
        step = (math.prod(shape[axis + 1 :]) * _GOLDEN) & _MASK
        index = np.arange(start[axis], start[axis] + extents[axis], dtype=np.uint64)
        total = (total[:, None] + index * np.uint64(step)).reshape(-1)
    return total
