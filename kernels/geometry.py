"""Geometry of operations on plain arrays: sliding windows, channels that are padded in memory, and resampling.

Pure arithmetic. :class:`Geometry` has kernel, stride, dilation, padding and groups of a sliding operation;
:class:`Resampling` gives the inputs that an output reads on one axis, and their weights. Positions are exact: they are
rational numbers, so no position depends on rounding or on the cut of an axis. With a ratio of p inputs per q outputs,
output ``o + q`` reads inputs at a distance of p from those of output o, with the same weights, except at the ends: a
block of outputs is a few strided *runs*, each one multiply-add of strided views::

    scale 2, linear        outputs   0    1  2   3  4   5  6   7
                           inputs    0   0 1 0 1 1 2 1 2 2 3 ...
                           weights   1   3:1 1:3 3:1 1:3 ...     runs: {0}, {1, 3, 5}, {2, 4, 6}, {7}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from .kernel import KernelError
from .memory import packed_strides

__all__ = [
    "MODES", "Geometry", "Resampled", "Resampling", "StridedRun", "channels_first", "channels_in_memory", "read_part",
    "tensor_core_channels",
]  # fmt: skip


def tensor_core_channels(channels: int, dtype: Any) -> int:
    """Return the number of channels that a convolution input should have for tensor cores: a multiple of 8 for 16-bit
    types.

    Up to eight channels stay as they are: cuDNN has engines for first layers. For other counts, cuDNN would make a
    padded copy in its workspace at every call (measured on 2048 x 2048: 192 MiB for 18 channels, none for 24).

    >>> [tensor_core_channels(n, "float16") for n in (1, 3, 8, 18, 24)], tensor_core_channels(18, "float32")
    ([1, 3, 8, 24, 24], 18)
    """
    access = 8  # channels of 16 bits in an access of 16 bytes
    return channels if np.dtype(dtype).itemsize != 2 or channels <= access else -(-channels // access) * access


def channels_first(shape: Sequence[int], spatial: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return extents ``(N, C, *spatial)`` and strides [elements] of a packed array ``(N, *spatial, C)``, as libraries
    describe it; with `spatial`, of its leading part with these extents.

    >>> channels_first((2, 5, 6, 3)), channels_first((1, 5, 6, 3), (4, 6))
    (((2, 3, 5, 6), (90, 1, 18, 3)), ((1, 3, 4, 6), (72, 1, 18, 3)))
    """
    n, *inner, channels = shape
    inner = list(inner if spatial is None else spatial)
    outer, *strides, last = packed_strides(shape)
    if n == 1:
        # The leading rows of a single sample are packed. The sample stride must show this, or libraries treat them as
        # strided.
        outer = packed_strides((n, *inner, channels))[0]
    return (n, channels, *inner), (outer, last, *strides)


def channels_in_memory(array: Any) -> int | None:
    """Return the distance between adjacent positions of an array ``(N, *spatial, C)``, in channels.

    None if the array would not be packed without the extra channels.

    >>> a = np.zeros((2, 5, 4, 24))
    >>> channels_in_memory(a), channels_in_memory(a[..., :18]), channels_in_memory(a[:, 1:, :, :18])
    (24, 24, None)
    """
    size = np.dtype(array.dtype).itemsize
    *outer, channels = array.shape
    if array.strides[-1] != size and channels > 1:
        return None
    # The innermost axis with several positions gives the distance; each axis outside must continue where it ends.
    channel_stride = array.strides[-2] if outer[-1] > 1 else None
    run = channel_stride
    for n, stride in zip(reversed(outer), reversed(array.strides[:-1])):
        if n == 1:  # NumPy gives such an axis any stride
            continue
        if run is None:
            run = channel_stride = stride
        if stride != run:
            return None
        run = stride * n
    channel_stride = channels * size if channel_stride is None else channel_stride
    # Positions of a broadcast or overlapping view are closer than their channels.
    return channel_stride // size if channel_stride % size == 0 and channel_stride >= channels * size else None


MODES = ("nearest", "nearest-exact", "linear", "cubic", "area")


@dataclass(frozen=True)
class StridedRun:
    """Outputs ``start + k * step`` for k from 0 to ``count - 1``; each is the sum over taps of ``weight * x[first + k *
    input_step]``.

    Attributes
    ----------
    taps
        Pairs ``(first, weight)``; a single tap has the weight 1.
    """

    start: int
    step: int
    count: int
    input_step: int
    taps: tuple[tuple[int, float], ...]

    def outputs(self, origin: int = 0) -> slice:
        """Return the outputs as a slice of an array that begins at global `origin`."""
        first = self.start - origin
        return slice(first, first + (self.count - 1) * self.step + 1, self.step)

    def inputs(self, tap: int, origin: int = 0) -> slice:
        """Return the inputs of one tap as a slice of an array that begins at global `origin`."""
        first = self.taps[tap][0] - origin
        return slice(first, first + (self.count - 1) * self.input_step + 1, self.input_step)


@dataclass(frozen=True)
class Resampling:
    """Resampling of one axis of `size` inputs to `outputs` outputs, with `ratio` inputs per output.

    Attributes
    ----------
    mode
        ``"linear"``: position ``(o + 1/2) * ratio - 1/2`` between two inputs (half-pixel centers), clamped at the
        ends. ``"cubic"``: the same position between four inputs, by the kernel of Keys (1981) with a = -3/4; the first
        and the last input stand for those outside. ``"nearest-exact"``: the input under the center,
        ``floor((o + 1/2) * ratio)``. ``"nearest"``: ``floor(o * ratio)``. ``"area"``: the mean of the inputs from
        ``floor(o * ratio)`` to ``ceil((o + 1) * ratio) - 1``. All modes match torch.
    aligned
        Whether the position is ``o * ratio`` (aligned corners); only for linear and cubic.
    """

    size: int
    outputs: int
    ratio: Fraction
    mode: str
    aligned: bool = False

    def taps(self, o: int) -> tuple[tuple[int, float], ...]:
        """Return pairs ``(input, weight)`` of one output, in rising order of inputs."""
        if self.mode in ("linear", "cubic"):
            return self._between(o * self.ratio if self.aligned else (o + _HALF) * self.ratio - _HALF)
        if self.mode == "area":
            first, stop = math.floor(o * self.ratio), min(math.ceil((o + 1) * self.ratio), self.size)
            return tuple((i, 1 / (stop - first)) for i in range(first, stop))
        position = (o + _HALF if self.mode == "nearest-exact" else o) * self.ratio
        # Positions are not negative, so int() rounds down.
        return ((min(int(position), self.size - 1), 1.0),)

    def _between(self, position: Fraction) -> tuple[tuple[int, float], ...]:
        """Return the two or four inputs around a position with their weights. Inputs outside are replaced by the
        outermost ones.
        """
        if self.mode == "linear":  # before the center of the first input, outputs equal that input
            position = max(Fraction(0), position)
        first, last = math.floor(position), self.size - 1
        weight = position - first
        if self.mode == "linear":
            # One tap at the end of the array, or exactly at an input: runs copy it instead of multiplying.
            if first >= last or not weight:
                return ((min(first, last), 1.0),)
            return ((first, float(1 - weight)), (first + 1, float(weight)))
        weights: dict[int, Fraction] = {}
        for i, own in enumerate(_cubic(weight), first - 1):
            # The outermost input may stand for several outside: their weights add up.
            inside = min(max(i, 0), last)
            weights[inside] = weights.get(inside, Fraction(0)) + own
        return tuple((i, float(own)) for i, own in weights.items())

    def input_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the inputs that the outputs ``[start, stop)`` read, as a half-open range inside the array."""
        if stop <= start:
            return 0, 0
        # Taps rise with the outputs, so those of the first and the last one bound the range.
        return self.taps(start)[0][0], self.taps(stop - 1)[-1][0] + 1

    def runs(self, start: int, stop: int) -> list[StridedRun]:
        """Return the outputs ``[start, stop)`` as strided runs; each output is in exactly one run."""
        # If all outputs read one input, every run has one output.
        step, input_step = self.ratio.denominator, max(1, self.ratio.numerator)
        runs = []
        for phase in range(start, min(stop, start + step)):
            run: StridedRun | None = None
            # Taps at the ends are clamped, so the outputs of a phase may be several runs.
            for o in range(phase, stop, step):
                taps = self.taps(o)
                if run is not None and taps == _next(run):
                    run = StridedRun(run.start, step, run.count + 1, input_step, run.taps)
                    continue
                if run is not None:
                    runs.append(run)
                run = StridedRun(o, step, 1, input_step, taps)
            if run is not None:
                runs.append(run)
        return runs


_HALF = Fraction(1, 2)
_KEYS = Fraction(-3, 4)


@lru_cache(maxsize=4096)
def _cubic(t: Fraction) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Return the weights of the inputs at -1, 0, 1 and 2 for the position t in [0, 1)."""

    # Keys' kernel at distances of at most 1, and between 1 and 2.
    def near(x: Fraction) -> Fraction:
        return ((_KEYS + 2) * x - (_KEYS + 3)) * x * x + 1

    def far(x: Fraction) -> Fraction:
        return _KEYS * (((x - 5) * x + 8) * x - 4)

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _next(run: StridedRun) -> tuple[tuple[int, float], ...]:
    """Return the taps of an output that would continue the run."""
    return tuple((first + run.count * run.input_step, weight) for first, weight in run.taps)


@dataclass(frozen=True)
class Resampled:
    """Resampling of one axis of a block: outputs ``[start, stop)`` from an input array that begins at `origin`."""

    resampling: Resampling
    start: int
    stop: int
    origin: int = 0

    @property
    def runs(self) -> list[StridedRun]:
        """Runs of the outputs."""
        return self.resampling.runs(self.start, self.stop)

    @property
    def longest(self) -> int:
        """Number of outputs of the longest run with several taps; 0 without such a run."""
        return max((run.count for run in self.runs if len(run.taps) > 1), default=0)

    def input_range(self) -> tuple[int, int]:
        """Return the range of inputs that are read, as positions in the array."""
        first, last = self.resampling.input_range(self.start, self.stop)
        return first - self.origin, last - self.origin

    def table(self) -> tuple[Any, Any]:
        """Return, for each output, the first input that it reads (position in the array) and the weights ``(outputs,
        taps)``.

        Missing weights are 0. Host arrays.
        """
        # The taps of an output are adjacent inputs in every mode, so the first input and the weights give all of them.
        taps = [self.resampling.taps(o) for o in range(self.start, self.stop)]
        weights = np.zeros((len(taps), max((len(pairs) for pairs in taps), default=1)))
        for row, pairs in zip(weights, taps):
            row[: len(pairs)] = [weight for _, weight in pairs]
        return np.array([pairs[0][0] - self.origin for pairs in taps], np.int32), weights


@dataclass(frozen=True)
class Geometry:
    """Geometry of a window that slides over the spatial axes of an array ``(N, *spatial, C)``.

    Output ``o`` of an axis reads the inputs ``o * stride - lo + dilation * j`` for ``j`` in
    ``range(kernel)``; those outside the array are padding.

    Parameters
    ----------
    kernel, stride, dilation
        One number per spatial axis, at least 1 each.
    padding
        ``(lo, hi)`` per spatial axis. ``lo`` is at least 0; a negative ``hi`` drops that many rows at the end. For
        libraries without negative padding, see :func:`read_part`.
    groups
        Number of groups that the channels of a convolution are divided into; pooling ignores it.

    Raises
    ------
    KernelError
        If the arguments differ in their numbers of axes, there are not 1 to 3 axes, or a value is out of its range.

    Examples
    --------
    >>> Geometry((3, 3), (2, 2), (1, 1), ((1, 1), (1, 1))).output_shape((9, 8))
    (5, 4)
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    def __post_init__(self) -> None:
        # Tuples, whatever the caller passes: a geometry is part of keys of plans and measurements.
        object.__setattr__(self, "kernel", tuple(self.kernel))
        object.__setattr__(self, "stride", tuple(self.stride))
        object.__setattr__(self, "dilation", tuple(self.dilation))
        object.__setattr__(self, "padding", tuple((lo, hi) for lo, hi in self.padding))
        lengths = {len(self.kernel), len(self.stride), len(self.dilation), len(self.padding)}
        if len(lengths) != 1 or not 1 <= self.ndim <= 3:
            raise KernelError(
                "expected kernel, stride, dilation and padding for the same 1, 2 or 3 spatial axes, got "
                f"{self.kernel}, {self.stride}, {self.dilation}, {self.padding}; give one entry per axis"
            )
        if min(*self.kernel, *self.stride, *self.dilation, self.groups) < 1:
            raise KernelError(
                "expected kernel, stride, dilation and groups of at least 1, got "
                f"{self.kernel}, {self.stride}, {self.dilation}, {self.groups}"
            )
        if any(lo < 0 for lo, _ in self.padding):
            raise KernelError(
                f"expected a padding of at least 0 before the first row, got {self.padding}; "
                "begin the input array at the first row that is read"
            )

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int | tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Geometry:
        """Return the geometry from shorthand: one number stands for all axes, one padding for both sides.

        >>> Geometry.of((3, 3), 2, 1).padding
        ((1, 1), (1, 1))
        """
        n = len(kernel)

        def every(value: int | Sequence[int]) -> tuple[int, ...]:
            return (value,) * n if isinstance(value, int) else tuple(value)

        pads = (padding,) * n if isinstance(padding, int) else tuple(padding)
        sides = tuple((p, p) if isinstance(p, int) else p for p in pads)
        return cls(tuple(kernel), every(stride), every(dilation), sides, groups)

    @property
    def ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def taps(self) -> int:
        """Number of positions in the window."""
        return math.prod(self.kernel)

    @property
    def extent(self) -> tuple[int, ...]:
        """Rows from the first to the last tap of each axis, both included."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation))

    def output_shape(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial output shape (floor rule); 0 on an axis where the window does not fit once."""
        if len(spatial) != self.ndim:
            raise KernelError(
                f"expected {self.ndim} spatial extents for the kernel {self.kernel}, got {tuple(spatial)}"
            )
        # The floor of a negative number is at most -1, so a window that does not fit once gives no output.
        return tuple(
            max(0, (n + lo + hi - e) // s + 1)
            for n, (lo, hi), e, s in zip(spatial, self.padding, self.extent, self.stride)
        )


def read_part(spatial: Sequence[int], geometry: Geometry) -> tuple[tuple[int, ...], Geometry]:
    """Return the extents of the leading part that is read of an array of extents `spatial`, and the geometry on this
    part.

    That geometry has no negative padding, which libraries do not support: cuDNN has none, and oneDNN's weight gradients
    read outputs of the dropped rows. Nothing is dropped if the stride skips these rows anyway.

    >>> read_part((9, 9), Geometry.of((3, 3), 2, ((1, -2), (1, -1))))[0]
    (7, 9)
    """
    whole = replace(geometry, padding=tuple((lo, max(0, hi)) for lo, hi in geometry.padding))
    pairs = zip(spatial, geometry.padding, geometry.output_shape(spatial), whole.output_shape(spatial))
    return tuple(n if outputs == more else n + hi for n, (_, hi), outputs, more in pairs), whole
