"""Import of operators that move or select elements (reshapes, transposes, padding, slices), and patterns in which
several of them are one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from halograd.errors import UserError

from ..dtensor import axis_names
from ..layers import (
    AveragePool,
    ChannelPad,
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
from .graph import Activation, Builder, Graph, OnnxConstant, OnnxNode

__all__ = ["SHAPING", "SPATIAL", "in_form"]


def _transpose(build: Builder, op: OnnxNode) -> Activation:
    """Import a permutation of axes. A move of the channels to the last axis, or back, needs no layer: here they are
    always last.
    """
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
    # Flattened features have no axes to permute.
    if value.spatial:
        raise refusal
    node, source = build.axes(op.inputs[0])
    return in_form(build, op, node, source.transposed(order), refusal, value.pool)


def in_form(build: Builder, op: OnnxNode, node: Node, axes: Axes, refusal: UserError, pool: str = "") -> Activation:
    """Return a value with the elements of `node` arranged by `axes`: `node` itself, or a Reshape or Flatten of it.

    If no node has this arrangement, the value carries `refusal`, which is raised if a layer reads the value before
    later reshapes or transposes restore the order. `pool` as in :class:`Activation`.
    """
    # A vector that has axes of extent 1 in ONNX: (N, C, 1, 1) or (N, 1, 1, C).
    if len(node.shape) == 1 and len(axes.dims) > 2:
        first, after = (Axes.whole(axes.shape, order) for order in _of_vectors(len(axes.dims)))
        if axes in (first, after):
            return Activation(node, last=axes == after, pooled=True, pool=pool)
    elif len(axes.dims) == 2 and axes.flattened is not None:
        if len(node.shape) == 1:
            return Activation(node)
        spatial = node.shape[:-1]
        # Without a kept shape the order is ours; with one position both orders are the same.
        kept = () if axes.flattened or math.prod(spatial) == 1 else spatial
        return Activation(build.add(op, Flatten(), node), spatial=kept, source=node, axes=axes)
    elif axes.sample is not None:
        shape, last = axes.sample
        if shape == node.shape:
            return Activation(node, last=last)
        return Activation(build.add(op, Reshape(shape), node), last=last, source=node, axes=axes)
    return Activation(node, source=node, axes=axes, refusal=refusal)


def _of_vectors(dims: int) -> tuple[list[int | None], list[int | None]]:
    """Return the axes of a vector as a value with `dims` axes: channels first, and channels last."""
    ones: list[int | None] = [None] * (dims - 2)
    return [0, 1, *ones], [0, *ones, 1]


def _reshape(build: Builder, op: OnnxNode) -> Activation:
    """Import a reshape within samples; also an axis of extent 1 that is inserted or removed."""
    value, before, after = build.arranged(op), build.shape(op.inputs[0]), build.shape(op.outputs[0])
    if before == after:
        return value
    refusal = build.refused(op, "one that flattens samples", f"{before} to {after}")
    if before[0] != after[0]:
        got, remedy = f"{after}", "keep the batch at axis 0"
        if op.kind == "Unsqueeze":
            got, remedy = f"a new axis there, {after}", "a stack can be added up, or joined by torch.cat(..., 1)"
        refusal = build.refused(op, f"the samples {before[0]} at axis 0", got, remedy)
    elif op.kind == "Unsqueeze":
        remedy = "a stack can be returned by forward(), where each value becomes an output, or be added up"
        refusal = build.refused(op, "a new axis that a later layer removes", f"{after}", remedy)
    # A layer after Flatten has changed the features, so they cannot be traced back to axes.
    if value.spatial and value.axes is None:
        raise refusal
    node, axes = build.axes(op.inputs[0])
    if len(before) == 2 and set(after[2:]) == {1} and node.shape[-1] != after[1]:
        # Features become the channels of one position, also if they were positions before.
        node, axes = build.axes(op.inputs[0], computed=True)
    reshaped = axes.reshaped(after)
    if reshaped is None:
        raise refusal
    return in_form(build, op, node, reshaped, refusal)


def _flatten(build: Builder, op: OnnxNode) -> Activation:
    axis = op.attributes.get("axis", 1)
    if axis % len(build.shape(op.inputs[0])) != 1:
        raise build.refused(op, "axis 1", f"axis {axis}")
    return _reshape(build, op)


_PADS = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad(build: Builder, op: OnnxNode) -> Activation:
    """Import padding of the spatial axes, or by channels of zeros, with channels first or last in ONNX."""
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
    # ONNX lists the amounts before each axis, then those after each axis.
    for i, axis in enumerate(chosen):
        amounts[axis] = numbers[i], numbers[i + len(chosen)]
    channels = amounts.pop(build.channels_at(op, value))
    number = float((build.numbers(op, 2) or [0.0])[0])
    zeros = mode == "constant" and number == 0 and min(channels) >= 0
    if any(amounts[0]) or (any(channels) and not zeros):
        expected = "rows around the spatial axes, or channels of zeros"
        raise build.refused(op, expected, f"{amounts[0]} samples and {channels} channels")
    if any(map(any, amounts)):
        value = value.of(build.add(op, Pad(tuple(amounts[1:]), _PADS[mode], number), value.node))
    if any(channels):
        value = value.of(build.add(op.part("channels"), ChannelPad(*channels), value.node))
    return value


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
        # Up to the last element that the steps reach, so that a pooling with this stride ends there.
        ranges[axis], strides[axis] = (low, low + (high - 1 - low) // step * step + 1), step
    if set(strides) == {1}:
        return _part(build, op, ranges)
    value = build.value(op)
    channels = build.channels_at(op, value)
    if strides[0] != 1 or strides[channels] != 1:
        remedy = "select channels by their numbers, x[:, [0, 2, 4]]"
        raise build.refused(op, "a step of 1 along samples and channels", f"{steps}", remedy)
    if not value.last:
        build.samples(op)  # raises an error for flattened values
    # A window of one element with a stride picks elements, as a slice with steps does.
    value = _part(build, op, ranges)
    along = [step for axis, step in enumerate(strides) if axis not in (0, channels)]
    return value.of(build.add(op.part("step"), AveragePool((1,) * len(along), along), value.node))


def _flip(build: Builder, op: OnnxNode, axes: list[int], slices: list[slice]) -> Activation:
    """Import a slice of whole axes in reversed order."""
    value, shape = build.value(op), build.shape(op.inputs[0])
    rows = [range(*interval.indices(shape[axis])) for axis, interval in zip(axes, slices)]
    if any(row[::-1] != range(shape[axis]) for axis, row in zip(axes, rows)) or 0 in axes:
        raise build.refused(op, "whole axes of a sample in reversed order (torch.flip)", f"steps along axes {axes}")
    if value.spatial or value.pooled:
        value = build.with_positions(op)
    names = axis_names(len(value.node.shape) + 1)
    ours = names[1:] if value.last else (names[-1], *names[1:-1])
    return value.of(build.add(op, Flip(*(ours[axis - 1] for axis in axes)), value.node))


def _part(build: Builder, op: OnnxNode, ranges: list[tuple[int, int]], without: int | None = None) -> Activation:
    """Return the part of a value in these ranges of its dimensions; the dimension `without`, if given, is removed."""
    value, shape = build.arranged(op), build.shape(op.inputs[0])
    if value.spatial or (value.pooled and any(n != (0, 1) for n in ranges[2:])):
        value = build.with_positions(op)
    if ranges[0] != (0, shape[0]) and value.refusal is None:
        raise build.refused(op, "all samples", f"those from {ranges[0][0]} to {ranges[0][1]}")
    node, axes = build.axes(op.inputs[0], computed=True)
    amounts, channels = [(0, 0)] * len(node.shape), (0, node.shape[-1])
    for dim, (first, last) in enumerate(ranges):
        if (first, last) == (0, shape[dim]):
            continue
        chosen = axes.chosen(dim, first, last)
        if chosen is None:
            raise value.refusal or build.refused(op, "a part of one axis", f"{first} to {last} of {shape[dim]}")
        axis, low, high, axes = chosen
        if axis == len(node.shape):
            channels = low, high
        else:
            # In space a part is a padding by negative amounts.
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
    parts, first = [], 0
    for output in op.outputs:
        last = first + build.shape(output)[axis]
        ranges = [(0, n) for n in shape]
        ranges[axis] = first, last
        parts.append(_part(build, op.changed(outputs=(output,)), ranges))
        first = last
    return parts


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
    """Import Gather: one position or channel, or several channels, by constant indices."""
    chosen, shape = build.constant(op, 1), build.shape(op.inputs[0])
    axis = op.attributes.get("axis", 0) % len(shape)
    numbers = [] if chosen is None else [int(n) for n in chosen.read().reshape(-1)]
    if any(not -shape[axis] <= n < shape[axis] for n in numbers):  # the modulo would choose another one silently
        raise build.refused(op, f"indices of {shape[axis]} elements", f"{numbers}")
    numbers = [n % shape[axis] for n in numbers]
    if chosen is not None and not chosen.shape:
        ranges = [(0, n) for n in shape]
        ranges[axis] = numbers[0], numbers[0] + 1
        return _part(build, op, ranges, without=axis)
    value = build.samples(op)
    if chosen is None or len(chosen.shape) != 1 or axis != 1:
        raise build.refused(op, "channels by their numbers, x[:, [2, 0, 1]]", f"indices along axis {axis}")
    # Each run of consecutive channels is one slice.
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
    """Import repeated channels. A repetition of a single position has become an Expand (`_repeated`)."""
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


Rows = tuple[int, int]


def _rows_of(graph: Graph, name: str, axis: int) -> tuple[str, Rows] | None:
    """Return the source of a value and its rows along an axis, if it is a slice with step 1 along this axis only; else
    None.
    """
    op = graph.maker(name)
    if op is None or op.kind != "Slice" or any(number not in graph.constants for number in op.inputs[1:]):
        return None
    starts, ends, axes, steps = (
        graph.constants[op.inputs[i]].read().reshape(-1).tolist() if len(op.inputs) > i else [] for i in range(1, 5)
    )
    shape = graph.shapes[op.inputs[0]]
    moved = [own % len(shape) for own in axes or range(len(starts))]
    if moved != [axis] or any(step != 1 for step in steps):
        return None
    low, high, _ = slice(int(starts[0]), int(ends[0])).indices(shape[axis])
    return op.inputs[0], (low, high)


def _joined_rows(graph: Graph, op: OnnxNode) -> None:
    """Recognize rows of one value that are joined: circular padding, repeated rows at the ends, circular shifts."""
    if op.kind != "Concat" or len(op.inputs) < 2:
        return
    shape = graph.shapes[op.outputs[0]]
    axis = op.attributes["axis"] % len(shape)
    parts = [_rows_of(graph, name, axis) for name in op.inputs]
    sources = {part[0] for part in parts if part is not None}
    if axis < 1 or len(sources) != 1:
        return
    (x,) = sources
    n = graph.shapes[x][axis]
    # The other parts, if any, must be the whole value.
    if any(part is None and name != x for part, name in zip(parts, op.inputs)):
        return
    rows: list[Rows] = []
    for low, high in ((0, n) if part is None else part[1] for part in parts):
        # Adjacent rows are joined, but not with the whole array, around which `_amounts` finds the padding.
        if rows and rows[-1][1] == low and rows[-1] != (0, n):
            rows[-1] = rows[-1][0], high
        else:
            rows.append((low, high))
    slices = [
        slice_op
        for name, slice_op in ((name, graph.maker(name)) for name in op.inputs)
        if slice_op is not None and name != x
    ]
    # A slice that is read elsewhere too stays in the graph.
    chain = [*(slice_op for slice_op in slices if graph.only_reader(slice_op.outputs[0]) is op), op]
    amounts = _amounts(rows, n)
    if len(rows) == 2 and rows[0][1] == n and rows[1][0] == 0 and rows[0][0] == rows[1][1]:
        # Rows [s, n), then [0, s): a circular shift by n - s.
        shifted = {"axis": axis, "shift": n - rows[0][0]}
        graph.replace(chain, op.changed(kind="Roll", inputs=(x,), attributes=shifted))
    elif amounts is not None and axis > 1:
        mode, low, high = amounts
        pads = [0] * (2 * len(shape))
        pads[axis], pads[axis + len(shape)] = low, high
        name = f"{op.outputs[0]}::pads"
        graph.constants[name] = OnnxConstant.of(np.array(pads, np.int64))
        graph.replace(chain, op.changed(kind="Pad", inputs=(x, name), attributes={"mode": mode}))


def _amounts(rows: Sequence[Rows], n: int) -> tuple[str, int, int] | None:
    """Return the mode of a padding and its amounts before and after, if padding `n` rows gives these rows; else None.

    >>> _amounts([(2, 4), (0, 4), (0, 1)], 4), _amounts([(0, 1), (0, 1), (0, 4)], 4)
    (('wrap', 2, 1), ('edge', 2, 0))
    """
    if rows.count((0, n)) != 1:
        return None
    middle = rows.index((0, n))
    before, after = rows[:middle], rows[middle + 1 :]
    if all(interval == (0, 1) for interval in before) and all(interval == (n - 1, n) for interval in after):
        return "edge", len(before), len(after)
    if len(before) <= 1 and len(after) <= 1 and all(b == n for _, b in before) and all(a == 0 for a, _ in after):
        return "wrap", sum(b - a for a, b in before), sum(b - a for a, b in after)
    return None


def _stacked_outputs(graph: Graph, op: OnnxNode) -> None:
    """Replace an output that stacks values along a new axis, as for deep supervision, by one output per value."""
    output = op.outputs[0]
    if op.kind != "Concat" or output not in graph.outputs or graph.readers(output):
        return
    parts = [part for part in map(graph.maker, op.inputs) if part is not None and part.kind == "Unsqueeze"]
    names = [f"{output}_{i}" for i in range(len(op.inputs))]
    if len(parts) < len(names) or graph.shapes.keys() & set(names):
        return
    axis = op.attributes["axis"] % len(graph.shapes[output])
    shapes = [graph.shapes[part.inputs[0]] for part in parts]
    # The inserted axis is the one along which the values are joined.
    if any(graph.shapes[name] != (*shape[:axis], 1, *shape[axis:]) for name, shape in zip(op.inputs, shapes)):
        return
    i = next(i for i, other in enumerate(graph.operations) if other is op)
    graph.operations[i : i + 1] = [
        part.changed(name=name, kind="Identity", inputs=part.inputs[:1], outputs=(name,))
        for name, part in zip(names, parts)
    ]
    i = graph.outputs.index(output)
    graph.outputs[i : i + 1] = names
    graph.shapes |= dict(zip(names, shapes))
    graph.leave_out_unread()
    for name in names:
        copied = graph.maker(name)
        assert copied is not None
        graph.leave_out(copied, copied.inputs[0])


def _repeated(graph: Graph, op: OnnxNode) -> None:
    """Recognize a value of one position that is repeated over space: an expansion."""
    if op.kind != "Tile" or op.inputs[1] not in graph.constants:
        return
    times = graph.constants[op.inputs[1]].read().reshape(-1).tolist()
    shape = graph.shapes[op.inputs[0]]
    if len(times) == len(shape) > 2 and times[:2] == [1, 1] and all(n == 1 for n in shape[2:]):
        graph.replace([op], op.changed(kind="Expand", inputs=op.inputs[:1], attributes={}))


def _picked(graph: Graph, op: OnnxNode) -> None:
    """Recognize one channel that becomes an axis of extent 1 again, ``x[:, i].unsqueeze(1)``."""
    if op.kind != "Gather" or op.inputs[1] not in graph.constants or graph.constants[op.inputs[1]].shape:
        return
    after, shape = graph.only_reader(op.outputs[0]), list(graph.shapes[op.inputs[0]])
    axis = op.attributes.get("axis", 0) % len(shape)
    shape[axis] = 1
    if after is None or after.kind not in ("Unsqueeze", "Reshape") or graph.shapes[after.outputs[0]] != tuple(shape):
        return
    name = f"{op.outputs[0]}::index"
    graph.constants[name] = OnnxConstant.of(graph.constants[op.inputs[1]].read().reshape(1))
    graph.replace([op, after], after.changed(kind="Gather", inputs=(op.inputs[0], name), attributes={"axis": axis}))


def _index_of_rows(graph: Graph, op: OnnxNode) -> None:
    """Recognize the selection of rows or channels by index vectors, one per axis: a Transpose, a GatherND of the
    leading axes, and the Transpose back. It becomes a Gather of channels, a Resize to the nearest rows, or an operation
    ``Indexed``, for later rules.
    """
    picked = graph.only_reader(op.outputs[0]) if op.kind == "Transpose" else None
    back = graph.only_reader(picked.outputs[0]) if picked is not None and picked.kind == "GatherND" else None
    if picked is None or back is None or back.kind != "Transpose" or picked.inputs[1] not in graph.constants:
        return
    indices, perm = graph.constants[picked.inputs[1]].read(), list(op.attributes["perm"])
    count, x = indices.shape[-1], op.inputs[0]
    # A grid of index tuples, one axis of the grid per leading axis.
    if indices.ndim != count + 1 or picked.attributes.get("batch_dims") or len(graph.shapes[x]) != len(perm):
        return
    # The second Transpose must undo the first.
    if list(back.attributes["perm"]) != np.argsort(perm).tolist():
        return
    chosen = {}
    for i, axis in enumerate(perm[:count]):
        # Index i may vary only along axis i of the grid of index tuples.
        along = np.moveaxis(indices[..., i], i, 0).reshape(indices.shape[i], -1)
        if (along != along[:, :1]).any():
            return
        chosen[axis] = along[:, 0].tolist()
    name = f"{back.outputs[0]}::index"
    if list(chosen) == [1]:
        graph.constants[name] = OnnxConstant.of(np.array(chosen[1], np.int64))
        new = back.changed(kind="Gather", inputs=(x, name), attributes={"axis": 1})
    elif rounding := _nearest(graph.shapes[x], chosen):
        graph.constants[name] = OnnxConstant.of(np.array(graph.shapes[back.outputs[0]], np.int64))
        attributes = {"coordinate_transformation_mode": rounding[0], "nearest_mode": rounding[1], "mode": "nearest"}
        new = back.changed(kind="Resize", inputs=(x, "", "", name), attributes=attributes)
    else:
        new = back.changed(kind="Indexed", inputs=(x,), attributes={"chosen": chosen})
    graph.replace([op, picked, back], new)


def _nearest(shape: Sequence[int], chosen: dict[int, list[int]]) -> tuple[str, str] | None:
    """Return ONNX's coordinate transformation and rounding of the nearest interpolation to these rows; else None."""
    if min(chosen) < 2:
        return None
    # Of torch's modes "nearest" and "nearest-exact".
    for shift, names in ((0.0, ("asymmetric", "floor")), (0.5, ("half_pixel", "round_prefer_ceil"))):
        rows = {
            a: np.floor((np.arange(len(indices)) + shift) * shape[a] / len(indices)) for a, indices in chosen.items()
        }
        if all(np.array_equal(rows[axis], indices) for axis, indices in chosen.items()):
            return names
    return None


def _linear_resize(graph: Graph, op: OnnxNode) -> None:
    """Recognize linear interpolation along one axis, ``a + (b - a) * t`` with rows a and b of one value."""
    if op.kind != "Add":
        return
    for first, product in (op.inputs, op.inputs[::-1]):
        low, scaled = graph.maker(first), graph.maker(product)
        difference = None if scaled is None or scaled.kind != "Mul" else graph.maker(scaled.inputs[0])
        high = None if difference is None or difference.kind != "Sub" else graph.maker(difference.inputs[0])
        if low is None or low.kind != "Indexed" or high is None or high.kind != "Indexed":
            continue
        assert scaled is not None and difference is not None
        share = graph.constants.get(scaled.inputs[1])
        if difference.inputs[1] != first or low.inputs != high.inputs or share is None or not share.is_fixed:
            continue
        chain, names = [low, high, difference, scaled, op], {n for bound in (low, high) for n in bound.outputs}
        # No other operation may read the values between.
        if any(all(one is not other for other in chain) for n in names for one in graph.readers(n)):
            continue
        x, before, after = low.inputs[0], low.attributes["chosen"], high.attributes["chosen"]
        aligned = _linear(graph.shapes[x], before, after, share.read().reshape(-1))
        if aligned is None:
            continue
        name = f"{op.outputs[0]}::sizes"
        graph.constants[name] = OnnxConstant.of(np.array(graph.shapes[op.outputs[0]], np.int64))
        attributes = {"mode": "linear", "coordinate_transformation_mode": "align_corners" if aligned else "half_pixel"}
        graph.replace(chain, op.changed(kind="Resize", inputs=(x, "", "", name), attributes=attributes))
        return


def _linear(
    shape: Sequence[int], low: dict[int, list[int]], high: dict[int, list[int]], share: np.ndarray
) -> bool | None:
    """Return whether a linear interpolation aligns the corners; None if its rows or weights are not those of torch."""
    axis = len(shape) - 1
    if list(low) != [axis] or list(high) != [axis] or len(share) != len(low[axis]):
        return None
    n, m = shape[axis], len(share)
    before, after = np.array(low[axis]), np.array(high[axis])
    if not np.array_equal(after, np.minimum(before + 1, n - 1)):
        return None
    for aligned in (False, True):
        rows = np.arange(m) * (n - 1) / max(m - 1, 1) if aligned else (np.arange(m) + 0.5) * n / m - 0.5
        # At the end both rows are the last one, and the weight has no effect.
        positions = before + np.where(after > before, share, 0)
        if np.allclose(positions, np.clip(rows, 0, n - 1), rtol=0, atol=1e-5):
            return aligned
    return None


def _adaptive_means(graph: Graph, op: OnnxNode) -> None:
    """Recognize means over windows that cover the input, as torch's new exporter decomposes them.

    The operations are linear and do not mix samples or channels, so their values for random numbers decide which
    function they are.
    """
    chain = _chain_to_quotient(graph, op) if op.kind == "Transpose" else []
    if not chain:
        return
    x, end = op.inputs[0], chain[-1]
    before, after = graph.shapes[x], graph.shapes[end.outputs[0]]
    if len(after) != len(before) or after[:2] != before[:2]:
        return
    draw = np.random.default_rng(0).uniform(size=(1, 1, *before[2:]))
    if not np.allclose(_computed(graph, chain, x, draw), _means(draw, after[2:]), rtol=1e-6, atol=0):
        return
    size, single, squeezed = after[2:], graph.maker(x), graph.only_reader(end.outputs[0])
    if single is not None and squeezed is not None and before[2:3] == (1,) == size[:1]:
        # One axis: the exporter adds an axis of extent 1 and removes it again.
        kinds, whole = (single.kind, squeezed.kind), graph.shapes[single.inputs[0]]
        fits = whole == (*before[:2], *before[3:]) and graph.shapes[squeezed.outputs[0]] == (*after[:2], *after[3:])
        if kinds == ("Unsqueeze", "Squeeze") and fits and graph.only_reader(x) is op:
            chain, x, size = [single, *chain, squeezed], single.inputs[0], size[1:]
    graph.replace(chain, chain[-1].changed(kind="AdaptiveAveragePool", inputs=(x,), attributes={"size": list(size)}))


#: Operators of the decomposition.
_PARTS = ("Transpose", "GatherND", "Where", "Gather", "Add", "Div")


def _chain_to_quotient(graph: Graph, op: OnnxNode) -> list[OnnxNode]:
    """Return the operations from the Transpose `op` to a quotient; an empty list if others read the values between."""
    picked = graph.only_reader(op.outputs[0])
    if picked is None or picked.kind != "GatherND":
        return []
    chain, outputs = [op], set(op.outputs)
    # In order of computation, so one pass finds all that depend on the Transpose.
    for other in graph.operations:
        if other is op or not outputs & set(other.inputs):
            continue
        if other.kind not in _PARTS or any(n not in outputs and n not in graph.constants for n in other.inputs):
            return []
        chain.append(other)
        outputs |= set(other.outputs)
        if other.kind == "Div":
            inner = outputs - set(other.outputs)
            within = all(any(r is member for member in chain) for name in inner for r in graph.readers(name))
            fixed = all(graph.constants[n].is_fixed for member in chain for n in member.inputs if n in graph.constants)
            return chain if within and fixed and not inner & set(graph.outputs) else []
    return []


def _computed(graph: Graph, chain: Sequence[OnnxNode], x: str, array: np.ndarray) -> np.ndarray:
    """Return the result of the last operation of `chain` if the value `x` is `array`."""
    values = {x: array}
    for op in chain:
        inputs = [values[n] if n in values else graph.constants[n].read() for n in op.inputs]
        if op.kind == "Transpose":
            result = inputs[0].transpose(op.attributes["perm"])
        elif op.kind == "GatherND":
            # The last axis of the indices has one index per leading axis.
            result = inputs[0][tuple(np.moveaxis(inputs[1], -1, 0))]
        elif op.kind == "Gather":
            result = np.take(inputs[0], inputs[1], axis=op.attributes.get("axis", 0))
        elif op.kind == "Where":
            result = np.where(*inputs)
        else:
            result = inputs[0] + inputs[1] if op.kind == "Add" else inputs[0] / inputs[1]
        values[op.outputs[0]] = result
    return values[chain[-1].outputs[0]]


def _means(array: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return means over adaptive windows of ``(N, C, *spatial)``."""
    for axis, m in enumerate(size, start=2):
        n = array.shape[axis]
        # Window o is [floor(o n / m), ceil((o + 1) n / m)), as in torch.
        windows = [range(o * n // m, -(-(o + 1) * n // m)) for o in range(m)]
        array = np.stack([array.take(list(window), axis).mean(axis) for window in windows], axis)
    return array


#: These rules run before expansions are removed.
SPATIAL: tuple[Callable[[Graph, OnnxNode], None], ...] = (
    _joined_rows,
    _stacked_outputs,
    _repeated,
    _picked,
    _adaptive_means,
    _index_of_rows,
    _linear_resize,
)
