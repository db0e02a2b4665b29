"""Import of operators that move elements or select parts: reshapes, transposes, padding, slices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from halograd.errors import UserError

from ..dtensor import axis_names
from ..layers import (
    AveragePool,
    ChannelShuffle,
    Concat,
    Flatten,
    Flip,
    Node,
    Pad,
    PixelShuffle,
    PixelUnshuffle,
    Reshape,
    Slice,
)
from .axes import Axes
from .graph import Activation, Builder, OnnxNode

__all__ = ["SHAPING", "in_form"]


def _transpose(build: Builder, op: OnnxNode) -> Activation:
    """Import a move of the channels from first to last, or back. Here the channels are always last."""
    value = build.arranged(op)
    axes = len(build.shape(op.inputs[0]))
    order = tuple(op.attributes.get("perm", range(axes - 1, -1, -1)))
    to_last = (0, *range(2, axes), 1)
    if order == tuple(range(axes)):
        return value
    reader, remedy = build.graph.only_reader(op.outputs[0]), ""
    if reader is not None and reader.kind in ("Gather", "GatherND"):
        remedy = (
            "an interpolation that the exporter has decomposed: put hg.Resize in its place, or import the module by "
            "hg.from_torch, or export with dynamo=False"
        )
    refusal = build.refused(op, f"channels moved to the last axis {to_last}, or back", f"{order}", remedy)
    if value.spatial:
        raise refusal
    node, found = build.axes(op.inputs[0])
    return in_form(build, op, node, found.transposed(order), refusal, value.pool)


def in_form(build: Builder, op: OnnxNode, node: Node, axes: Axes, refusal: UserError, pool: str = "") -> Activation:
    """Return the value that has the elements of a node with these axes: of the node itself, or of a reshape of it.

    Layers refuse a value with axes in another order; further reshapes and transposes may bring them into order.
    """
    if len(node.shape) == 1 and len(axes.dims) > 2:
        first, behind = (Axes.whole(axes.shape, order) for order in _of_vectors(len(axes.dims)))
        if axes in (first, behind):
            return Activation(node, last=axes == behind, pooled=True, pool=pool)
    elif len(axes.dims) == 2 and axes.flattened is not None:
        if len(node.shape) == 1:
            return Activation(node)
        spatial = node.shape[:-1]
        kept = () if axes.flattened or math.prod(spatial) == 1 else spatial
        return Activation(build.add(op, Flatten(), node), spatial=kept, source=node, axes=axes)
    elif axes.sample is not None:
        shape, last = axes.sample
        if shape == node.shape:
            return Activation(node, last=last)
        return Activation(build.add(op, Reshape(shape), node), last=last, source=node, axes=axes)
    return Activation(node, source=node, axes=axes, refusal=refusal)


def _of_vectors(dims: int) -> tuple[list[int | None], list[int | None]]:
    """Return the orders of axes of vectors with positions: channels first, channels last."""
    ones: list[int | None] = [None] * (dims - 2)
    return [0, 1, *ones], [0, *ones, 1]


def _reshape(build: Builder, op: OnnxNode) -> Activation:
    """Import a reshape that keeps the order of elements of a sample: flattening, and axes of extent 1."""
    value, before, after = build.arranged(op), build.shape(op.inputs[0]), build.shape(op.outputs[0])
    if before == after:
        return value
    refusal = build.refused(op, "one that flattens samples", f"{before} to {after}")
    if before[0] != after[0]:
        got, remedy = f"{after}", "keep the batch at axis 0"
        if op.kind == "Unsqueeze":
            got, remedy = f"a new axis there, {after}", "a stack can be added up, or joined by torch.cat(..., 1)"
        refusal = build.refused(op, f"the samples {before[0]} at axis 0", got, remedy)
    if value.spatial and value.axes is None:
        raise refusal
    node, axes = build.axes(op.inputs[0])
    if len(before) == 2 and set(after[2:]) == {1} and node.shape[-1] != after[1]:
        # Features become the channels of one position, also if they were positions before.
        node, axes = build.axes(op.inputs[0], made=True)
    found = axes.reshaped(after)
    if found is None:
        raise refusal
    return in_form(build, op, node, found, refusal)


def _flatten(build: Builder, op: OnnxNode) -> Activation:
    axis = op.attributes.get("axis", 1)
    if axis % len(build.shape(op.inputs[0])) != 1:
        raise build.refused(op, "axis 1", f"axis {axis}")
    return _reshape(build, op)


_PADS = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad(build: Builder, op: OnnxNode) -> Activation:
    """Import rows around the spatial axes, for any place of the channels."""
    value = build.value(op)
    if not value.last:
        value = build.with_positions(op)
    axes = len(build.shape(op.inputs[0]))
    mode = op.attributes.get("mode", "constant")
    if mode not in _PADS:
        raise build.refused(op, f"one of the modes {', '.join(_PADS)}", mode)
    numbers = [int(n) for n in build.numbers(op, 1, "pads") or ()]
    chosen = [int(axis) % axes for axis in build.numbers(op, 3) or range(axes)]
    amounts = [(0, 0)] * axes
    for i, axis in enumerate(chosen):
        amounts[axis] = numbers[i], numbers[i + len(chosen)]
    channels = amounts.pop(build.channels_at(op, value))
    if any(map(any, (amounts[0], channels))):
        raise build.refused(op, "rows around the spatial axes", f"{amounts[0]} samples and {channels} channels")
    if not any(map(any, amounts)):
        return value
    number = (build.numbers(op, 2) or [0.0])[0]
    layer = Pad(tuple(amounts[1:]), _PADS[mode], float(number))
    return value.of(build.add(op, layer, value.node))


def _slice(build: Builder, op: OnnxNode) -> Activation:
    """Import a slice; steps in space are poolings."""
    shape = build.shape(op.inputs[0])
    starts, ends = build.numbers(op, 1) or [], build.numbers(op, 2) or []
    axes = [int(axis) % len(shape) for axis in build.numbers(op, 3) or range(len(starts))]
    steps = [int(step) for step in build.numbers(op, 4) or [1] * len(axes)]
    if any(step < 0 for step in steps):
        return _flip(build, op, axes, [slice(int(a), int(b), c) for a, b, c in zip(starts, ends, steps)])
    ranges, strides = [(0, n) for n in shape], [1] * len(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps):
        low, high, _ = slice(int(start), int(end)).indices(shape[axis])
        ranges[axis], strides[axis] = (low, low + (high - 1 - low) // step * step + 1), step
    if set(strides) == {1}:
        return _part(build, op, ranges)
    value = build.value(op)
    channels = build.channels_at(op, value)
    if strides[0] != 1 or strides[channels] != 1:
        remedy = "select channels by their numbers, x[:, [0, 2, 4]]"
        raise build.refused(op, "a step of 1 along samples and channels", f"{steps}", remedy)
    if not value.last:
        build.samples(op)
    value = _part(build, op, ranges)
    along = [step for axis, step in enumerate(strides) if axis not in (0, channels)]
    return value.of(build.add(op.part("step"), AveragePool((1,) * len(along), along), value.node))


def _flip(build: Builder, op: OnnxNode, axes: list[int], slices: list[slice]) -> Activation:
    """Import a slice of whole axes in reversed order."""
    value, shape = build.value(op), build.shape(op.inputs[0])
    rows = [range(*one.indices(shape[axis])) for axis, one in zip(axes, slices)]
    if any(row[::-1] != range(shape[axis]) for axis, row in zip(axes, rows)) or 0 in axes:
        raise build.refused(op, "whole axes of a sample in reversed order (torch.flip)", f"steps along axes {axes}")
    if value.spatial or value.pooled:
        value = build.with_positions(op)
    names = axis_names(len(value.node.shape) + 1)
    ours = names[1:] if value.last else (names[-1], *names[1:-1])
    return value.of(build.add(op, Flip(*(ours[axis - 1] for axis in axes)), value.node))


def _part(build: Builder, op: OnnxNode, ranges: list[tuple[int, int]], without: int | None = None) -> Activation:
    """Return the part of a value in these ranges of its dimensions; `without`: a dimension that it then lacks."""
    value, shape = build.arranged(op), build.shape(op.inputs[0])
    if value.spatial or (value.pooled and any(n != (0, 1) for n in ranges[2:])):
        value = build.with_positions(op)
    if ranges[0] != (0, shape[0]) and value.refusal is None:
        raise build.refused(op, "all samples", f"those from {ranges[0][0]} to {ranges[0][1]}")
    node, axes = build.axes(op.inputs[0], made=True)
    amounts, channels = [(0, 0)] * len(node.shape), (0, node.shape[-1])
    for dim, (first, last) in enumerate(ranges):
        if (first, last) == (0, shape[dim]):
            continue
        found = axes.chosen(dim, first, last)
        if found is None:
            raise value.refusal or build.refused(op, "a part of one axis", f"{first} to {last} of {shape[dim]}")
        axis, low, high, axes = found
        if axis == len(node.shape):
            channels = low, high
        else:
            amounts[axis - 1] = -low, high - node.shape[axis - 1]
    if channels != (0, node.shape[-1]):
        node = build.add(op, Slice(*channels), node)
    if any(map(any, amounts)):
        node = build.add(op, Pad(tuple(amounts[:-1])), node)
    axes = axes if without is None else axes.without(without)
    refusal = value.refusal or build.refused(op, "an image, tokens or vectors", f"{build.shape(op.outputs[0])}")
    return in_form(build, op, node, axes, refusal, value.pool)


def _split(build: Builder, op: OnnxNode) -> list[Activation]:
    """Import a split into ranges of one axis."""
    shape = build.shape(op.inputs[0])
    axis = op.attributes.get("axis", 0) % len(shape)
    found, first = [], 0
    for output in op.outputs:
        last = first + build.shape(output)[axis]
        ranges = [(0, n) for n in shape]
        ranges[axis] = first, last
        found.append(_part(build, op.changed(outputs=(output,)), ranges))
        first = last
    return found


def _depth_to_space(build: Builder, op: OnnxNode) -> Activation:
    """Import torch's PixelShuffle, which moves blocks of channels to space."""
    mode, factor = op.attributes.get("mode", "DCR"), int(op.attributes["blocksize"])
    mode = mode.decode() if isinstance(mode, bytes) else mode
    if mode != "CRD":
        raise build.refused(op, "channels in the order of torch's PixelShuffle, mode CRD", mode)
    return _pixels(build, op.changed(attributes={"factor": factor}), PixelShuffle)


def _pixels(build: Builder, op: OnnxNode, kind: type[PixelShuffle | PixelUnshuffle]) -> Activation:
    value = build.with_positions(op)
    return value.of(build.add(op, kind(op.attributes["factor"]), value.node))


def _shuffle(build: Builder, op: OnnxNode) -> Activation:
    value = build.with_positions(op)
    return value.of(build.add(op, ChannelShuffle(op.attributes["groups"]), value.node))


def _gather(build: Builder, op: OnnxNode) -> Activation:
    """Import the choice of one position or channel, or of channels by constant numbers."""
    chosen, shape = build.constant(op, 1), build.shape(op.inputs[0])
    axis = op.attributes.get("axis", 0) % len(shape)
    numbers = [] if chosen is None else [int(n) % shape[axis] for n in chosen.read().reshape(-1)]
    if chosen is not None and not chosen.shape:
        ranges = [(0, n) for n in shape]
        ranges[axis] = numbers[0], numbers[0] + 1
        return _part(build, op, ranges, without=axis)
    value = build.samples(op)
    if chosen is None or len(chosen.shape) != 1 or axis != 1:
        raise build.refused(op, "channels by their numbers, x[:, [2, 0, 1]]", f"indices along axis {axis}")
    parts: list[tuple[int, int]] = []
    for i in numbers:
        joined = parts and parts[-1][1] == i
        parts = [*parts[:-1], (parts[-1][0], i + 1)] if joined else [*parts, (i, i + 1)]
    nodes = [build.add(op.part("channels"), Slice(a, b), value.node) for a, b in parts]
    return value.of(build.add(op, Concat(), *nodes) if len(nodes) > 1 else nodes[0])


def _indexed(build: Builder, op: OnnxNode) -> Activation:
    remedy = "put hg.Resize in its place, or load the model at the extents that it was exported with"
    raise build.refused(op, "rows of an interpolation", "a selection of rows", remedy)


def _tile(build: Builder, op: OnnxNode) -> Activation:
    """Import repeated channels; `patterns` makes an Expand of a value of one position that is repeated."""
    value, times = build.samples(op), [int(n) for n in build.numbers(op, 1) or ()]
    if [n for i, n in enumerate(times) if i != 1] != [1] * (len(times) - 1):
        raise build.refused(op, "repeated channels, or values of one position", f"{times}", "enlarge it by a Resize")
    return value.of(build.add(op, Concat(), *[value.node] * times[1]) if times[1] > 1 else value.node)


SHAPING: dict[str, Callable[[Builder, OnnxNode], Activation | list[Activation]]] = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Flatten": _flatten,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "ChannelShuffle": _shuffle,
    "PixelShuffle": partial(_pixels, kind=PixelShuffle),
    "PixelUnshuffle": partial(_pixels, kind=PixelUnshuffle),
    "Slice": _slice,
    "Split": _split,
    "Gather": _gather,
    "Indexed": _indexed,
    "Tile": _tile,
}
