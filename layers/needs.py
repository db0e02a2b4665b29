"""What every rank needs of a layer's inputs and of its output's gradient, as products of intervals. Pure arithmetic.

A layer says what one box needs (`Layer.input_boxes`, `Layer.gradient_box`), or has windows, which say it per axis. Here
it is asked one axis at a time, and the product that follows is checked against whole boxes of some ranks where the
layer is the user's; a layer that mixes axes is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from halograd.errors import UserError

from ..dtensor import Blocks, Box, Interval, Intervals, Window

__all__ = ["ended", "probe", "reaching", "sliding"]

#: Ranks whose boxes are compared with the product.
CHECKS = 6


def sliding(windows: Sequence[Window], output: Blocks, channels: Intervals) -> Blocks:
    """Inputs that outputs read through windows, with these channels; may reach outside the array."""
    spatial = [_read(w, axis) for w, axis in zip(windows, output.axes[1:-1])]
    return Blocks((output.axes[0], *spatial, channels), output.size)


def reaching(windows: Sequence[Window], inputs: Blocks, outputs: Sequence[int], channels: Intervals) -> Blocks:
    """Outputs, of so many along the axes in space, from which the gradient of inputs follows."""
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
    """The whole of an axis of this size for every part that has anything."""
    return tuple((0, size) if b > a else (0, 0) for a, b in axis)


def ended(blocks: Blocks, owned: Blocks, slack: Sequence[int]) -> Blocks:
    """Each interval to the end of what is owned, where that ends at most `slack` later."""
    axes = [_ended(axis, own, more) for axis, own, more in zip(blocks.axes, owned.axes, slack, strict=True)]
    return Blocks(axes, blocks.size)


@lru_cache(maxsize=16384)
def _ended(axis: Intervals, owned: Intervals, slack: int) -> Intervals:
    return tuple((a, d if a < b <= d <= b + slack else b) for (a, b), (_, d) in zip(axis, owned))


def probe(of: Callable[[Box], Box], blocks: Blocks, ndim: int, what: str, check: bool) -> Blocks:
    """The boxes of `ndim` axes that `of` makes of those of `blocks`, asked for one axis at a time.

    Beside the piece of one axis, all of the others is asked for. Samples and channels are the outer axes of both; where
    the numbers of axes differ, axes in space follow from the whole array alone.

    Raises
    ------
    UserError
        With `check`, if `of` is found to mix axes; names `what`.
    """
    whole = [_all(axis) for axis in blocks.axes]
    same = ndim == len(blocks.axes)
    axes: list[Intervals] = []
    for axis in range(ndim):
        at = axis if same else {0: 0, ndim - 1: len(blocks.axes) - 1}.get(axis)
        if at is None:
            axes.append((of(Box.of_ranges(whole)).ranges[axis],))
            continue
        axes.append(_along(partial(_at, of, whole, at, axis), blocks.axes[at], axis in (0, ndim - 1)))
    found = Blocks(axes, blocks.size)
    if check:
        _check(of, blocks, found, what)
    return found


def _along(of: Callable[[Interval], Interval], pieces: Intervals, outer: bool) -> Intervals:
    """What every piece of one axis becomes; samples and channels mostly stay as they are, or become all of them."""
    full = [piece for piece in pieces if piece[1] > piece[0]]
    if outer and len(full) > 2:
        ends = [(piece, of(piece)) for piece in (full[0], full[len(full) // 2], full[-1])]
        if all(piece == made for piece, made in ends):
            return tuple(piece if piece[1] > piece[0] else (0, 0) for piece in pieces)
        if all(made == ends[0][1] for _, made in ends):
            return tuple(ends[0][1] if piece[1] > piece[0] else (0, 0) for piece in pieces)
    return tuple(of(piece) for piece in pieces)


def _all(axis: Intervals) -> Interval:
    full = [(a, b) for a, b in axis if b > a] or [(0, 0)]
    return min(a for a, _ in full), max(b for _, b in full)


def _at(of: Callable[[Box], Box], whole: Sequence[Interval], at: int, axis: int, piece: Interval) -> Interval:
    """The range on `axis` of what `of` makes of a box with `piece` on axis `at`."""
    if piece[1] <= piece[0]:
        return 0, 0
    return of(Box.of_ranges([*whole[:at], piece, *whole[at + 1 :]])).ranges[axis]


def _check(of: Callable[[Box], Box], blocks: Blocks, found: Blocks, what: str) -> None:
    for rank in {n * (blocks.placed - 1) // (CHECKS - 1) for n in range(CHECKS)}:
        box = blocks[rank]
        if not box.size:
            continue
        want, have = of(box), found[rank]
        if want != have and (want.size or have.size):
            raise UserError(
                f"{what}: what it needs of its inputs is expected to be a product of what single axes need; for {box} "
                f"it asks for {want} instead of {have}: cut this layer along samples only"
            )
