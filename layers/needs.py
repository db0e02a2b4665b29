"""The boxes that every rank needs of a layer's inputs, and of its output's gradient, as products of intervals.

Pure arithmetic, in three forms:

- A :class:`Stencil` gives one window per spatial axis, and windows give the needs axis by axis.
- A layer with :meth:`Layer.input_boxes` or :meth:`Layer.gradient_box` gives the needs of one box. :func:`probe` calls
  that method for one axis at a time and takes the product. For layers of the user it compares the product with whole
  boxes of some ranks, and rejects a layer that mixes axes.
- The small operand of an elementwise operation is cut along the axes that it has: :func:`operand_blocks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Integral
from typing import Any

from halograd.errors import UserError

from ..dtensor import Blocks, Box, Interval, Intervals, Window
from ..lowering.views import View

__all__ = [
    "Shape",
    "Stencil",
    "all_of",
    "check_spatial",
    "is_broadcast",
    "operand_blocks",
    "probe",
    "reaching",
    "sliding",
    "spread",
    "with_axes",
    "without_space",
]

#: Shape of one sample, ``(*spatial, C)``.
Shape = tuple[int, ...]
#: Number of ranks whose boxes `probe` compares with the product.
CHECKS = 6

_PerAxis = int | Sequence[int]


@dataclass(frozen=True)
class Stencil:
    """Kernel, stride, padding and dilation of a layer that slides a window over the spatial axes.

    Attributes
    ----------
    kernel, stride, dilation
        One number for all spatial axes or one per axis.
    padding
        ``"same"`` (output size ``ceil(n / stride)``; an odd element is added at the end, as in TensorFlow and torch),
        one number for both sides of all axes, one per axis, or one ``(lo, hi)`` pair per axis.
    rounding
        ``"floor"``: windows lie within the padded array. ``"ceil"``: one more window, if it begins before the padding
        at the end, may reach beyond the padded array.
    """

    kernel: _PerAxis
    stride: _PerAxis = 1
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0
    dilation: _PerAxis = 1
    rounding: str = "floor"

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "padding", "dilation"):
            # Hashable, because `_windows` is cached by the stencil.
            object.__setattr__(self, name, _hashable(getattr(self, name)))

    def windows(self, spatial: Sequence[int]) -> tuple[Window, ...]:
        """Return one window per spatial axis, for inputs of these global spatial sizes."""
        return self._windows(tuple(spatial))

    @lru_cache(maxsize=16384)  # noqa: B019  (small, and needed many times per layer and cut)
    def _windows(self, spatial: tuple[int, ...]) -> tuple[Window, ...]:
        axes = len(spatial)
        kernel, stride = spread("kernel", self.kernel, axes), spread("stride", self.stride, axes)
        dilation = spread("dilation", self.dilation, axes)
        pads = self._pads(spatial, kernel, stride, dilation)
        windows = tuple(Window(k, s, lo, hi, d) for k, s, (lo, hi), d in zip(kernel, stride, pads, dilation))
        return windows if self.rounding == "floor" else tuple(map(_reaching_beyond, windows, spatial))

    def _pads(self, spatial, kernel, stride, dilation) -> list[tuple[int, int]]:
        padding = self.padding
        if isinstance(padding, str):
            if padding != "same":
                raise ValueError(f"padding: expected 'same', numbers or (lo, hi) pairs, got {padding!r}")
            return [_same(n, k, s, d) for n, k, s, d in zip(spatial, kernel, stride, dilation)]
        if isinstance(padding, int):
            return [(padding, padding)] * len(spatial)
        if len(padding) != len(spatial):
            raise ValueError(f"padding: expected one entry for each of {len(spatial)} spatial axes, got {padding}")
        return [(p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in padding]

    def output_spatial(self, spatial: Sequence[int], what: str) -> tuple[int, ...]:
        """Return the global spatial output sizes.

        Raises ValueError, naming `what`, if a window does not fit once, or without spatial axes.
        """
        check_spatial(spatial, what)
        windows = self.windows(spatial)
        sizes = tuple(w.output_size(n) for w, n in zip(windows, spatial))
        if min(sizes, default=1) < 1:
            raise ValueError(
                f"{what}: a window of extent {[w.extent for w in windows]} does not fit into {tuple(spatial)} with "
                f"padding {[(w.pad_lo, w.pad_hi) for w in windows]}; enlarge the input or the padding"
            )
        return sizes


def check_spatial(spatial: Sequence[int], what: str) -> None:
    """Raise ValueError, naming `what`, for samples without spatial axes, for which the layer would do nothing."""
    if not spatial:
        raise ValueError(
            f"{what}: expected samples with spatial axes (*spatial, C), got vectors (C,); a signal of one channel has "
            "the shape (n, 1)"
        )


def _hashable(value: Any) -> Any:
    """Convert lists and arrays of numbers to tuples of Python numbers."""
    if isinstance(value, Integral):
        return int(value)
    return tuple(map(_hashable, value)) if isinstance(value, Iterable) and not isinstance(value, str) else value


def spread(what: str, value: _PerAxis, axes: int) -> tuple[int, ...]:
    """Return one number per axis. Raises ValueError, naming `what`, for a wrong count of numbers."""
    if isinstance(value, int):
        return (value,) * axes
    if len(value) != axes:
        raise ValueError(f"{what}: expected one number or {axes}, got {tuple(value)}")
    return tuple(value)


def _reaching_beyond(w: Window, size: int) -> Window:
    """Return the window with enough padding for the last window that begins before the padding at the end.

    >>> _reaching_beyond(Window(3, 2, 1, 1, 1), 6).pad_hi, _reaching_beyond(Window(2, 2, 1, 1, 1), 5).pad_hi
    (2, 1)
    """
    # The formula of the output size, with ceil instead of floor.
    outputs = -(-(size + w.pad_lo + w.pad_hi - w.extent) // w.stride) + 1
    # torch drops a last window that would begin in the padding at the end.
    outputs -= (outputs - 1) * w.stride >= size + w.pad_lo
    end = (outputs - 1) * w.stride + w.extent - size - w.pad_lo if outputs > 0 else 0
    return Window(w.kernel, w.stride, w.pad_lo, max(w.pad_hi, end), w.dilation)


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    extent = dilation * (kernel - 1) + 1
    # What the last window reaches beyond the array; with a stride beyond the kernel it may end before the array does.
    total = max(0, (-(-size // stride) - 1) * stride + extent - size)
    return total // 2, total - total // 2


def sliding(windows: Sequence[Window], output: Blocks, channels: Intervals) -> Blocks:
    """Return, per rank, the box of inputs that its outputs read through windows; it may reach outside the array.

    `channels` are the intervals of input channels.
    """
    spatial = [_read(w, axis) for w, axis in zip(windows, output.axes[1:-1])]
    return Blocks((output.axes[0], *spatial, channels), output.size)


def reaching(windows: Sequence[Window], inputs: Blocks, outputs: Sequence[int], channels: Intervals) -> Blocks:
    """Return, per rank, the box of outputs from which the gradient of its inputs follows.

    `outputs` are the global output sizes along the spatial axes, `channels` the intervals of output channels.
    """
    spatial = [_reach(w, axis, n) for w, axis, n in zip(windows, inputs.axes[1:-1], outputs)]
    return Blocks((inputs.axes[0], *spatial, channels), inputs.size)


@lru_cache(maxsize=16384)
def _read(window: Window, axis: Intervals) -> Intervals:
    return tuple(window.input_range(a, b) if b > a else (0, 0) for a, b in axis)


@lru_cache(maxsize=16384)
def _reach(window: Window, axis: Intervals, outputs: int) -> Intervals:
    return tuple(window.output_range(a, b, outputs) for a, b in axis)


@lru_cache(maxsize=16384)
def all_of(axis: Intervals, size: int) -> Intervals:
    """Return the whole axis for every nonempty part, and an empty interval for the others."""
    return tuple((0, size) if b > a else (0, 0) for a, b in axis)


def probe(of: Callable[[Box], Box], blocks: Blocks, ndim: int, what: str, check: bool) -> Blocks:
    """Return the boxes with `ndim` axes that `of` computes from the boxes of `blocks`, one axis at a time.

    `of` is called with an interval of one axis and the whole of the other axes. The first axis of its argument and of
    its result holds samples, the last one channels. If the numbers of axes differ, all ranks get the spatial intervals
    that `of` computes from the whole array.

    Raises
    ------
    UserError
        With `check`, if `of` mixes axes; the text names `what`.
    """
    whole = [_all(axis) for axis in blocks.axes]
    same = ndim == len(blocks.axes)
    axes: list[Intervals] = []
    for axis in range(ndim):
        # Between arrays with different numbers of axes, only samples and channels correspond.
        at = axis if same else {0: 0, ndim - 1: len(blocks.axes) - 1}.get(axis)
        if at is None:
            axes.append((of(Box.of_ranges(whole)).ranges[axis],))
            continue
        axes.append(_along(partial(_at, of, whole, at, axis), blocks.axes[at], axis in (0, ndim - 1)))
    needed = Blocks(axes, blocks.size)
    if check:
        _check(of, blocks, needed, what)
    return needed


def _along(of: Callable[[Interval], Interval], pieces: Intervals, outer: bool) -> Intervals:
    """Map every interval of one axis by `of`.

    For an `outer` axis (samples or channels), three calls decide whether `of` changes no interval, or maps all to the
    same one; if so, the other intervals need no call.
    """
    # A plan of thousands of ranks has as many intervals: samples and channels are unchanged or whole in most layers.
    full = [piece for piece in pieces if piece[1] > piece[0]]
    if outer and len(full) > 2:
        ends = [(piece, of(piece)) for piece in (full[0], full[len(full) // 2], full[-1])]
        if all(piece == moved for piece, moved in ends):
            return tuple(piece if piece[1] > piece[0] else (0, 0) for piece in pieces)
        if all(moved == ends[0][1] for _, moved in ends):
            return tuple(ends[0][1] if piece[1] > piece[0] else (0, 0) for piece in pieces)
    return tuple(of(piece) for piece in pieces)


def _all(axis: Intervals) -> Interval:
    full = [(a, b) for a, b in axis if b > a] or [(0, 0)]
    return min(a for a, _ in full), max(b for _, b in full)


def _at(of: Callable[[Box], Box], whole: Sequence[Interval], at: int, axis: int, piece: Interval) -> Interval:
    """Return the range on `axis` of the box that `of` computes from a box with `piece` on axis `at`."""
    if piece[1] <= piece[0]:
        return 0, 0
    return of(Box.of_ranges([*whole[:at], piece, *whole[at + 1 :]])).ranges[axis]


def _check(of: Callable[[Box], Box], blocks: Blocks, result: Blocks, what: str) -> None:
    # Ends, and some between: the layers that mix axes do so almost everywhere.
    for rank in {n * (blocks.placed - 1) // (CHECKS - 1) for n in range(CHECKS)}:
        box = blocks[rank]
        if not box.size:
            continue
        want, have = of(box), result[rank]
        # Empty boxes are equal wherever they are.
        if want != have and (want.size or have.size):
            raise UserError(
                f"{what}: expected the box needed of its inputs to be a product of the needs of single axes; for {box} "
                f"got {want} instead of {have}: cut this layer along samples only"
            )


def is_broadcast(small: Shape, whole: Shape) -> bool:
    """Return whether a sample shape broadcasts to another with as many axes: each extent is 1 or equal.

    >>> is_broadcast((1, 6, 1), (7, 6, 3)), is_broadcast((2, 6, 1), (7, 6, 3))
    (True, False)
    """
    return len(small) == len(whole) and all(n in (1, full) for n, full in zip(small, whole))


def operand_blocks(shape: Shape, boxes: Blocks) -> Blocks:
    """Return, per rank, the part of a small operand that belongs to the rank's box of the larger operand.

    Parameters
    ----------
    shape
        Shape of the small operand: ``(N, *spatial, C)`` with 1 for any extent, or ``(N, C)``.
    boxes
        Boxes of the larger operand. A rank with an empty box needs nothing.
    """
    if len(shape) < len(boxes.axes):
        boxes = without_space(boxes)

    def of_one(low: int, high: int) -> Interval:
        return (0, min(1, high - low))  # nothing for an empty interval

    return boxes.map(None, *(of_one if n == 1 else None for n in shape[1:]))


def with_axes(view: View, axes: int) -> View:
    """Return a view ``(N, C)`` as ``(N, 1, .., C)`` with `axes` axes; a view with as many axes is unchanged."""
    shape = view.shape
    return view if len(shape) == axes else view.reshape(shape[0], *(1,) * (axes - len(shape)), *shape[1:])


def without_space(boxes: Blocks) -> Blocks:
    """Return, per rank, the samples and channels of its box ``(N, *spatial, C)``, the box of sums over its positions.

    A rank without positions has no samples.

    >>> without_space(Blocks((((0, 2), (2, 4)), ((0, 3), (3, 3)), ((0, 8),))), ).axes[0]
    ((0, 2), (0, 0), (2, 4), (2, 2))
    """
    # One interval of samples for each spatial block, so that ranks keep their order in the grid.
    samples, *spatial, channels = boxes.axes
    full = [all(b > a for a, b in intervals) for intervals in itertools.product(*spatial)]
    return Blocks((tuple((a, b if whole else a) for a, b in samples for whole in full), channels), boxes.size)
