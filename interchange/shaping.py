"""Import of operators that move elements or select parts: reshapes, transposes, padding, slices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..layers import AveragePool, ChannelShuffle, Concat, Flatten, Pad, PixelShuffle, PixelUnshuffle, Roll, Slice
from .graph import Activation, Builder, OnnxNode, Shape

__all__ = ["SHAPING"]


def _transpose(build: Builder, op: OnnxNode) -> Activation:
    """Import a move of the channels from first to last, or back. Here the channels are always last."""
    value = build.value(op)
    axes = len(build.shape(op.inputs[0]))
    order = tuple(op.attributes.get("perm", range(axes - 1, -1, -1)))
    to_last, to_first = (0, *range(2, axes), 1), (0, axes - 1, *range(1, axes - 1))
    if order == tuple(range(axes)) or (value.spatial == () and axes == 2 and order == (0, 1)):
        return value
    if order == to_last and not value.last:
        return replace(value, last=True)
    if order == to_first and value.last:
        return replace(value, last=False)
    reader, remedy = build.graph.only_reader(op.outputs[0]), ""
    if reader is not None and reader.kind in ("Gather", "GatherND"):
        remedy = (
            "an interpolation or an adaptive pooling that the exporter has decomposed: put hg.Resize or "
            "hg.AdaptiveAveragePool in its place, or export with dynamo=False"
        )
    raise build.refused(op, f"channels moved to the last axis {to_last}, or back", f"{order}", remedy)


def _reshape(build: Builder, op: OnnxNode) -> Activation:
    """Import a reshape that keeps the order of elements of a sample: flattening, and axes of extent 1."""
    value, before, after = build.value(op), build.shape(op.inputs[0]), build.shape(op.outputs[0])
    if before == after:
        return value
    if before[0] != after[0]:
        got, remedy = f"{after}", "keep the batch at axis 0"
        if op.kind == "Unsqueeze":
            got, remedy = f"a new axis there, {after}", "a stack can be added up, or joined by torch.cat(..., 1)"
        raise build.refused(op, f"the samples {before[0]} at axis 0", got, remedy)
    if len(after) == 2:
        return _flattened(build, op, value, before)
    vector = (len(before) == 2 and not value.spatial) or (value.pooled and math.prod(before[2:]) == 1)
    if vector and math.prod(after[2:]) == 1:
        return replace(value, pooled=True, last=False, pool="")
    raise build.refused(op, "one that flattens samples", f"{before} to {after}")


def _flattened(build: Builder, op: OnnxNode, value: Activation, before: Shape) -> Activation:
    if value.pooled or len(value.node.shape) == 1:
        return Activation(value.node)
    spatial = value.node.shape[:-1]
    kept = () if value.last or math.prod(spatial) == 1 else spatial
    return Activation(build.add(op, Flatten(), value.node), spatial=kept)


def _flatten(build: Builder, op: OnnxNode) -> Activation:
    axis = op.attributes.get("axis", 1)
    if axis % len(build.shape(op.inputs[0])) != 1:
        raise build.refused(op, "axis 1", f"axis {axis}")
    return _reshape(build, op)


_PADS = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad(build: Builder, op: OnnxNode) -> Activation:
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
    if any(map(any, amounts[:2])):
        raise build.refused(op, "rows around the spatial axes", f"{amounts[0]} samples and {amounts[1]} channels")
    number = (build.numbers(op, 2) or [0.0])[0]
    layer = Pad(tuple(amounts[2:]), _PADS[mode], float(number))
    return value.of(build.add(op, layer, value.node))


def _slice(build: Builder, op: OnnxNode) -> Activation:
    """Import a slice of the channels, or of rows at the ends of a spatial axis; steps in space are poolings."""
    value, shape = build.samples(op), build.shape(op.inputs[0])
    starts, ends = build.numbers(op, 1) or [], build.numbers(op, 2) or []
    axes = [int(axis) % len(shape) for axis in build.numbers(op, 3) or range(len(starts))]
    steps = [int(step) for step in build.numbers(op, 4) or [1] * len(axes)]
    if any(step < 0 for step in steps):
        raise build.refused(op, "a step of 1", f"{steps}, a flip", "flip the samples in the data: no layer does it")
    ranges, strides = [(0, n) for n in shape], [1] * len(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps):
        low, high, _ = slice(int(start), int(end)).indices(shape[axis])
        ranges[axis], strides[axis] = (low, low + (high - 1 - low) // step * step + 1), step
    if strides[:2] != [1, 1]:
        remedy = "select channels by their numbers, x[:, [0, 2, 4]]"
        raise build.refused(op, "a step of 1 along samples and channels", f"{steps}", remedy)
    value = _part(build, op, value, ranges)
    if set(strides) == {1}:
        return value
    return value.of(build.add(op.part("step"), AveragePool((1,) * (len(shape) - 2), strides[2:]), value.node))


def _part(build: Builder, op: OnnxNode, value: Activation, ranges: list[tuple[int, int]]) -> Activation:
    """Return the part of a value in these ranges of ``(N, C, *spatial)``."""
    samples, (first, last), *spatial = ranges
    if value.pooled and any(n != (0, 1) for n in spatial):
        value = build.with_positions(op)
    shape = (build.shape(op.inputs[0])[0], value.node.shape[-1], *value.node.shape[:-1])
    if samples != (0, shape[0]):
        raise build.refused(op, "all samples", f"those from {samples[0]} to {samples[1]}")
    node = value.node
    if (first, last) != (0, shape[1]):
        node = build.add(op, Slice(first, last), node)
    amounts = tuple((-low, high - n) for (low, high), n in zip(spatial, shape[2:]))
    if any(map(any, amounts)):
        node = build.add(op, Pad(amounts), node)
    return value.of(node)


def _split(build: Builder, op: OnnxNode) -> list[Activation]:
    """Import a split into ranges of the channels."""
    value, shape = build.samples(op), build.shape(op.inputs[0])
    axis = op.attributes.get("axis", 0) % len(shape)
    if axis != 1:
        raise build.refused(op, "parts of the channels, axis 1", f"axis {axis}")
    found, first = [], 0
    for output in op.outputs:
        last = first + build.shape(output)[1]
        ranges = [(0, n) for n in shape]
        ranges[1] = first, last
        found.append(_part(build, op, value, ranges))
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


def _roll(build: Builder, op: OnnxNode) -> Activation:
    """Import a circular shift, which `patterns` recognizes in slices that are joined in another order."""
    value, axis = build.value(op), op.attributes["axis"]
    first = 1 if value.last else 2
    if value.pooled or value.spatial or not first <= axis < first + len(value.node.shape) - 1:
        raise build.refused(op, "rows along a spatial axis", f"axis {axis}")
    shifts = [0] * (len(value.node.shape) - 1)
    shifts[axis - first] = op.attributes["shift"]
    return value.of(build.add(op, Roll(shifts), value.node))


def _gather(build: Builder, op: OnnxNode) -> Activation:
    """Import a selection of channels by constant numbers."""
    value, shape = build.samples(op), build.shape(op.inputs[0])
    chosen, axis = build.constant(op, 1), op.attributes.get("axis", 0) % len(shape)
    if chosen is None or len(chosen.shape) != 1 or axis != 1:
        raise build.refused(op, "channels by their numbers, x[:, [2, 0, 1]]", f"an index along axis {axis}")
    parts: list[tuple[int, int]] = []
    for i in (int(n) % shape[1] for n in chosen.read().reshape(-1)):
        joined = parts and parts[-1][1] == i
        parts = [*parts[:-1], (parts[-1][0], i + 1)] if joined else [*parts, (i, i + 1)]
    nodes = [build.add(op.part("channels"), Slice(a, b), value.node) for a, b in parts]
    return value.of(build.add(op, Concat(), *nodes) if len(nodes) > 1 else nodes[0])


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
    "Roll": _roll,
    "Gather": _gather,
    "Tile": _tile,
}
