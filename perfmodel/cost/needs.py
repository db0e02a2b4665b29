"""What every rank needs of a layer's inputs and of its output's gradient, as products of intervals.

The arithmetic is the layers' own (`Window`, `Layer.input_boxes`, `Layer.gradient_boxes`). A layer that overrides
those is asked box by box, varying one axis at a time, and the product that follows is checked against whole boxes of
some ranks; a layer that mixes axes is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from halograd.dtensor import Box, Window
from halograd.errors import UserError
from halograd.layers import Concat, Conv, Layer
from halograd.perfmodel.cost.blocks import Blocks, Intervals

__all__ = ["clipped", "extended", "gradient_blocks", "needed_blocks", "overrides", "windows_of"]

#: Ranks whose boxes are compared with the product.
CHECKS = 6


def overrides(layer: Layer, method: str) -> bool:
    """Whether the layer has a method of its own in place of the one of `Layer`.

    >>> from halograd.layers import Flatten, ReLU
    >>> overrides(Flatten(), "input_boxes"), overrides(ReLU(), "input_boxes")
    (True, False)
    """
    return getattr(type(layer), method) is not getattr(Layer, method)


def needed_blocks(layer: Layer, i: int, inputs: Sequence[Blocks], shapes: Sequence[tuple], output: Blocks) -> Blocks:
    """What every rank needs of input `i` for its box of the output; may reach outside the array.

    Parameters
    ----------
    inputs, output
        What the ranks own.
    shapes
        Global shapes ``(N, *spatial, C)`` of the inputs.
    """
    if overrides(layer, "needed_boxes"):
        return inputs[i]
    samples = tuple(tuple(shape[1:]) for shape in shapes)
    if type(layer).input_boxes is Concat.input_boxes:
        first = sum(shape[-1] for shape in samples[:i])
        return Blocks((*output.axes[:-1], _shifted(output.axes[-1], first, samples[i][-1])))
    if overrides(layer, "input_boxes") or len(output.axes) != len(shapes[i]):
        return _inputs(layer, i, samples, output)
    spatial = [_range(w, axis) for w, axis in zip(windows_of(layer, samples[i]), output.axes[1:-1])]
    return Blocks((output.axes[0], *spatial, _channels(layer, inputs[i].axes[-1], output.axes[-1], shapes[i][-1])))


@lru_cache(maxsize=16384)
def _inputs(layer: Layer, i: int, samples: tuple[tuple[int, ...], ...], output: Blocks) -> Blocks:
    return _probe(lambda box: layer.input_boxes(box, *samples)[i], output, len(samples[i]) + 1, layer)


@lru_cache(maxsize=4096)
def _shifted(axis: Intervals, first: int, size: int) -> Intervals:
    """Of each interval, the part that lies in ``[first, first + size)``, counted from `first`."""
    return tuple((min(max(a - first, 0), size), min(max(b - first, 0), size)) for a, b in axis)


def _channels(layer: Layer, owned: Intervals, output: Intervals, channels: int) -> Intervals:
    """All of them; of a layer that treats channels alike, those of the output."""
    if layer.cuts_channels == "channelwise":
        return owned
    return tuple((0, channels) if b > a else (0, 0) for a, b in output)


@lru_cache(maxsize=16384)
def _range(window: Window, axis: Intervals) -> Intervals:
    return tuple(window.input_range(a, b) if b > a else (0, 0) for a, b in axis)


def clipped(blocks: Blocks, shape: Sequence[int]) -> Blocks:
    """Without what lies outside an array of this shape."""
    return Blocks(tuple(_clip(axis, n) for axis, n in zip(blocks.axes, shape)))


@lru_cache(maxsize=16384)
def _clip(axis: Intervals, size: int) -> Intervals:
    if all(a >= 0 and b <= size for a, b in axis):
        return axis
    return tuple((max(0, a), min(size, b)) for a, b in axis)


def extended(blocks: Blocks, owned: Blocks, slack: Sequence[int]) -> Blocks:
    """Each interval to the end of what is owned, where that ends at most `slack` later (as `Binding.clipped_boxes`)."""
    axes = []
    for axis, own, more in zip(blocks.axes, owned.axes, slack):
        axes.append(tuple((a, d if a < b <= d <= b + more else b) for (a, b), (_, d) in zip(axis, own)))
    return Blocks(tuple(axes))


def gradient_blocks(layer: Layer, x: Blocks, shape: Sequence[int], out: Sequence[int]) -> Blocks | None:
    """What every rank needs of the output's gradient for that of its box of the first input; None: not gathered.

    Parameters
    ----------
    x
        What the ranks own of the first input.
    shape, out
        Global shapes of input and output.
    """
    if not overrides(layer, "gradient_boxes"):
        return None

    return _gradient(layer, x, tuple(shape[1:]), tuple(out[1:]))


@lru_cache(maxsize=16384)
def windows_of(layer: Layer, shape: tuple[int, ...]) -> tuple[Window, ...]:
    """`Layer.windows`, remembered."""
    return layer.windows(shape)


@lru_cache(maxsize=16384)
def _reach(window: Window, axis: Intervals, outputs: int) -> Intervals:
    return tuple(window.output_range(a, b, outputs) for a, b in axis)


@lru_cache(maxsize=16384)
def _gradient(layer: Layer, x: Blocks, shape: tuple[int, ...], out: tuple[int, ...]) -> Blocks:
    if type(layer).gradient_boxes is Conv.gradient_boxes:
        spatial = [_reach(w, axis, n) for w, axis, n in zip(windows_of(layer, shape), x.axes[1:-1], out)]
        channels = tuple((0, out[-1]) if b > a else (0, 0) for a, b in x.axes[-1])
        return Blocks((x.axes[0], *spatial, channels))

    def of(box: Box) -> Box:
        boxes = layer.gradient_boxes([box], shape, out)
        assert boxes is not None
        return boxes[0]

    return _probe(of, x, len(out) + 1, layer)


def _probe(of: Callable[[Box], Box], blocks: Blocks, ndim: int, layer: Layer) -> Blocks:
    """The blocks that `of` makes of each of `blocks`, asked for one axis at a time."""
    first = [next(((a, b) for a, b in axis if b > a), (0, 0)) for axis in blocks.axes]
    same = ndim == len(blocks.axes)
    axes: list[Intervals] = []
    for axis in range(ndim):
        at = axis if same else {0: 0, ndim - 1: len(blocks.axes) - 1}.get(axis)
        if at is None:
            axes.append((of(Box.of_ranges(first)).ranges[axis],))
            continue
        probe = partial(_at, of, first, at, axis)
        axes.append(_along(probe, blocks.axes[at], axis in (0, ndim - 1)))
    found = Blocks(tuple(axes))
    if not type(layer).__module__.startswith("halograd."):
        _check(of, blocks, found, layer.kind)
    return found


def _along(of: Callable[[tuple[int, int]], tuple[int, int]], pieces: Intervals, outer: bool) -> Intervals:
    """What every piece of one axis becomes; samples and channels mostly stay as they are, or become all of them."""
    full = [piece for piece in pieces if piece[1] > piece[0]]
    if outer and len(full) > 2:
        ends = [(piece, of(piece)) for piece in (full[0], full[len(full) // 2], full[-1])]
        if all(piece == made for piece, made in ends):
            return tuple(piece if piece[1] > piece[0] else (0, 0) for piece in pieces)
        if all(made == ends[0][1] for _, made in ends):
            return tuple(ends[0][1] if piece[1] > piece[0] else (0, 0) for piece in pieces)
    return tuple(of(piece) for piece in pieces)


def _at(
    of: Callable[[Box], Box], first: Sequence[tuple[int, int]], at: int, axis: int, piece: tuple[int, int]
) -> tuple[int, int]:
    """The range on `axis` of what `of` makes of a box with `piece` on axis `at`."""
    if piece[1] <= piece[0]:
        return 0, 0
    return of(Box.of_ranges([*first[:at], piece, *first[at + 1 :]])).ranges[axis]


def _check(of: Callable[[Box], Box], blocks: Blocks, found: Blocks, kind: str) -> None:
    for rank in {n * (blocks.ranks - 1) // (CHECKS - 1) for n in range(CHECKS)}:
        box = blocks.box(rank)
        if not box.size:
            continue
        want, have = of(box), found.box(rank)
        if want != have and (want.size or have.size):
            raise UserError(
                f"{kind}: what it needs of its inputs is expected to be a product of what single axes need; for {box} "
                f"it asks for {want} instead of {have}: cut this layer along samples only, or do not plan it"
            )
