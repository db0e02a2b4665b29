"""Import of attention: scores, their softmax and the sum of values become one layer.

A rule merges these operations into one, whatever module or exporter wrote them. The importer of this operation finds
the factors of the axes of queries, keys and values that are heads, windows and positions (see
:mod:`halograd.interchange.axes`).

::

    q (N, h, L, d)   k (N, h, T, d)     MatMul, Mul, Add, Softmax, Dropout, MatMul      (N, h, L, e)
    v (N, h, T, e)                   ->       Attention(h) on (*S, h * d)           ->  (*S, h * e)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..layers import Attention, Concat, Conv, Dropout, Layer, Node, Reshape, Roll, Slice
from ..layers.reshape import ReshapedMap
from .axes import Axes, Factor
from .graph import Activation, Builder, Graph, OnnxConstant, OnnxNode, Shape
from .shaping import in_form

__all__ = ["ATTENTION", "attention", "number_of"]

#: Operators that keep the order of the elements.
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Identity")
#: A mask adds a number below this one to the scores of keys that are not read: in float64, 1 + exp(-80) is 1.
_MASKED = -80.0


# -- rules -------------------------------------------------------------------------------------------------


def attention(graph: Graph, op: OnnxNode) -> None:
    """Replace scores of queries and keys, their softmax `op`, and the sum of values that it weights by one operation.

    ONNX's own attention operator is converted to the same operation, ``WeightedValues``. Other operations stay.
    """
    if op.kind == "Attention" and op.attributes.get("qk_matmul_output_mode", 0) == 0:
        _of_opset_23(graph, op)
    rank = len(graph.shapes[op.inputs[0]])
    if op.kind != "Softmax" or op.attributes.get("axis", -1) % rank != rank - 1:
        return
    chain, dropout = [op], 0.0
    after = graph.only_reader(op.outputs[0])
    if after is not None and after.kind == "Dropout":
        name = after.inputs[1] if len(after.inputs) > 1 else ""
        ratio = graph.constants[name].scalar() if name else after.attributes.get("ratio")
        dropout = 0.5 if ratio is None else ratio
        chain.append(after)
        after = graph.only_reader(after.outputs[0])
    # Weights that are transposed before the product: their order is considered in `_product`.
    perm = tuple(range(rank))
    if after is not None and after.kind == "Transpose":
        perm = tuple(after.attributes["perm"])
        chain.append(after)
        after = graph.only_reader(after.outputs[0])
    sums = None if after is None else _product(graph, after, (chain[-1].outputs[0], perm))
    scores = _scores(graph, op, chain)
    if after is None or sums is None or scores is None:
        return
    product, scale, added = scores
    # torch multiplies queries and keys by the square root of the scale each.
    inputs, reader = [], chain[0]
    for name in product.inputs:
        before = graph.maker(name)
        if before is not None and number_of(before) is not None and graph.only_reader(name) is reader:
            scale *= number_of(before) or 0.0
            chain.insert(0, before)
            name = before.inputs[0]
        inputs.append(name)
    # Permutations of the axes of queries, keys, values and result.
    orders = (*product.orders, sums.orders[1], sums.result)
    attributes = {"scale": scale, "dropout": dropout, "orders": orders, "extents": tuple(shape for _, shape in added)}
    names = (*inputs, sums.inputs[1], *(name for name, _ in added))
    graph.replace([*chain, after], after.changed(kind="WeightedValues", inputs=names, attributes=attributes))


def number_of(op: OnnxNode) -> float | None:
    """Return the number by which an operation multiplies every element; None if it does anything else."""
    attributes = op.attributes
    if op.kind != "Affine" or attributes["axis"] is not None or attributes["shift"]:
        return None
    return float(attributes["factor"])


def _scores(
    graph: Graph, op: OnnxNode, chain: list[OnnxNode]
) -> tuple[_Product, float, list[tuple[str, Shape]]] | None:
    """Follow the scores back from their softmax to the product of queries and keys; None if there is none.

    Returns the product, the factor of the scores, and the name of each added constant with the extents of the scores to
    which it is added. Inserts the operations that it follows at the beginning of `chain`.
    """
    value, scale = op.inputs[0], 1.0
    added: list[tuple[str, Shape]] = []
    while True:
        before = graph.maker(value)
        if before is None or graph.only_reader(value) is not chain[0]:
            return None
        chain.insert(0, before)
        constants = [name for name in before.inputs if name in graph.constants]
        others = [name for name in before.inputs if name not in graph.constants]
        factor = number_of(before)
        if before.kind in _VIEWS:
            value = before.inputs[0]
        elif factor is not None:
            scale, value = scale * factor, before.inputs[0]
        elif before.kind == "Add" and len(constants) == len(others) == 1 and scale == 1:
            # No factor comes after this sum (scale 1): it would multiply the constant, too.
            added.append((constants[0], graph.shapes[value]))
            (value,) = others
        else:
            product = _product(graph, before)
            return None if product is None else (product, scale, added)


@dataclass(frozen=True)
class _Product:
    """Product of two values, summed over one axis.

    Attributes
    ----------
    inputs
        Names of the values. For scores the rows are queries, and the columns keys.
    orders
        Permutations of their axes to ``(*batch, rows, summed)`` and ``(*batch, columns, summed)``; for a weighted sum,
        the second permutes to ``(*batch, summed, columns)``.
    result
        Permutation of ``(*batch, rows, columns)`` to the axes of the result.
    """

    inputs: tuple[str, str]
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    result: tuple[int, ...]


def _product(graph: Graph, op: OnnxNode, weights: tuple[str, tuple[int, ...]] | None = None) -> _Product | None:
    """Describe `op` as the product of two values that depend on the data: scores, or a weighted sum of values. Return
    None if it is no such product.

    `weights`, for a weighted sum: name of the weights that `op` reads, and the permutation that transposed them before.
    """
    if len(op.inputs) != 2 or any(name in graph.constants for name in op.inputs):
        return None
    ranks = [len(graph.shapes[name]) for name in op.inputs]
    if op.kind == "MatMul" and len(set(ranks)) == 1:
        # The equation of a MatMul as an Einsum.
        batch = "".join(chr(ord("a") + i) for i in range(ranks[0] - 2))
        terms, result_term = [batch + "xy", batch + "yz"], batch + "xz"
    elif op.kind == "Einsum":
        equation = op.attributes["equation"]
        text = equation.decode() if isinstance(equation, bytes) else equation
        left, _, result_term = text.replace(" ", "").partition("->")
        terms = left.split(",")
    else:
        return None
    if "." in result_term or [len(term) for term in terms] != ranks:
        return None
    inputs = list(op.inputs)
    # An Einsum may have its factors in any order: queries, or the weights, become the first. The last axis of scores is
    # that of the keys (the softmax is over them), so the term of the keys has its letter.
    swapped = inputs[0] != weights[0] if weights else result_term[-1:] not in terms[1]
    if swapped:
        inputs.reverse()
        terms.reverse()
    if weights:
        name, perm = weights
        if inputs[0] != name or len(perm) != len(terms[0]):
            return None
        # Letters of the axes: those of the batch, of the rows, and the one that is summed.
        *shared, row, summed = (terms[0][perm.index(axis)] for axis in range(len(perm)))
        column = "".join(c for c in terms[1] if c not in terms[0])
        expected = [*shared, row, summed], [*shared, summed, column]
    else:
        *shared, row, column = list(result_term)
        summed = "".join(c for c in terms[0] if c not in result_term)
        expected = [*shared, row, summed], [*shared, column, summed]
    result = [*shared, row, column]
    if any(sorted(term) != sorted(letters) for term, letters in zip((*terms, result_term), (*expected, result))):
        return None
    first, second = (tuple(map(term.index, letters)) for term, letters in zip(terms, expected))
    return _Product((inputs[0], inputs[1]), (first, second), tuple(map(result.index, result_term)))


def _of_opset_23(graph: Graph, op: OnnxNode) -> None:
    """Convert ONNX's own operator for attention (opset 23), unless it has a feature that the layer lacks."""
    names, settings = list(op.inputs), op.attributes
    rank = len(graph.shapes[names[0]])
    # Inputs from the fifth on are a cache of earlier keys and values, and its lengths.
    plain = not any(settings.get(key, 0) for key in ("is_causal", "softcap")) and not any(names[4:])
    if not plain or any(op.outputs[1:]) or rank != 4:
        return
    mask = names[3:4] if len(names) > 3 and names[3] else []
    # A mask that depends on the data is not read.
    if mask and mask[0] not in graph.constants:
        return
    same = tuple(range(rank))
    scores = (*graph.shapes[names[0]][:-1], graph.shapes[names[1]][-2])
    attributes = {
        "scale": settings.get("scale"),
        "dropout": 0.0,
        "orders": (same,) * 4,
        "extents": (scores,) * len(mask),
    }
    new = op.changed(kind="WeightedValues", inputs=(*names[:3], *mask), outputs=op.outputs[:1], attributes=attributes)
    graph.replace([op], new)


# -- importers ---------------------------------------------------------------------------------------------


def _weighted(build: Builder, op: OnnxNode) -> Activation:
    """Import attention whose queries, keys and values have heads and windows as separate axes."""
    attributes = op.attributes
    values = [_Operand.of(build, op, i) for i in range(3)]
    if any(not build.graph.constants[name].is_fixed for name in op.inputs[3:]):
        # A table of relative positions needs the axes of the map, which torch flattens if one window is the whole map.
        values = [
            operand if (space := _map_of(operand.node)) is None else operand.on(build, op, space) for operand in values
        ]
    q, k, v = values
    if k.heads != v.heads or q.heads % k.heads or any(operand.roles != q.roles for operand in (k, v)):
        raise build.refused(op, "queries, keys and values with the same heads and windows", "others")
    windows = [operand.windows() for operand in values]
    if None in windows or windows[1] != windows[2]:
        got = f"axes {[operand.axes.dims for operand in values]}"
        raise build.refused(op, "attention within whole samples or windows of the spatial axes", got)
    window = windows[0]
    assert window is not None
    local = window != q.axes.shape[1:-1]
    if (local or op.inputs[3:]) and any(extents != window for extents in windows):
        raise build.refused(op, "queries and keys of the same extents", f"{windows[0]} and {windows[1]}")
    scale = attributes["scale"]
    # The product of two float32 square roots differs from the layer's default scale by rounding.
    usual = scale is None or math.isclose(scale, 1 / math.sqrt(q.width), rel_tol=1e-6)
    tables = [_added(build, op, i, q, window) for i in range(3, len(op.inputs))]
    trained = [(constant, table) for constant, table in tables if not constant.is_fixed]
    fixed = [table for constant, table in tables if constant.is_fixed]
    if len(trained) > 1:
        raise build.refused(op, "one table of relative positions", f"{len(trained)} parameters")
    # torch shifts the map by a Roll, masks pairs from opposite ends, and shifts back after attention.
    shift = _shift(build, op, q, window, [table(table.constant.read()) for table in fixed])
    # The layer shifts its windows itself, so the Roll before it is cancelled. Nodes may be common to q, k and v.
    again: dict[Node, Node | None] = {}
    nodes = [operand.node if not any(shift) else _moved(operand.node, shift, again) for operand in values]
    if any(node is None for node in nodes):
        raise build.refused(op, "queries, keys and values that torch.roll shifts before a mask", "others")
    layer: Layer = Attention(
        q.heads,
        window=window if local or any(shift) else None,
        shift=shift if any(shift) else 0,
        bias="relative" if trained else None,
        scale=None if usual else scale,
        dropout=attributes["dropout"],
    )
    weights = []
    if trained:
        constant, table = trained[0]
        # Pairs repeat elements, which `relative` gives once each, so that the table can be trained.
        weights = [replace(constant, repeats=False)]
        layer = layer.initialized(bias=build.initial(weights[0], table.relative, table.relative_shape))
    node = build.add(op, layer, *(node for node in nodes if node is not None), weights=weights)
    if any(shift):
        # The model shifts back after this, which cancels this Roll.
        node = Roll(tuple(-by for by in shift), build.name(op.part("roll")))(node)
    order = attributes["orders"][3]
    return in_form(build, op, node, q.summed(v.width).transposed(order), build.refused(op, "axes in order", "others"))


@dataclass(frozen=True)
class _Operand:
    """Queries, keys or values.

    Attributes
    ----------
    node, axes
        Node, and its axes as ``(*batch, positions, channels of a head)``.
    width
        Channels of a head.
    """

    node: Node
    axes: Axes
    width: int

    @classmethod
    def of(cls, build: Builder, op: OnnxNode, i: int) -> _Operand:
        order = op.attributes["orders"][i]
        if op.inputs[i] not in build.values:
            raise build.refused(op, "queries, keys and values that depend on the data", "a constant")
        node, axes = build.axes(op.inputs[i])
        width = build.shape(op.inputs[i])[order[-1]]
        axes = axes.transposed(order)
        operand = cls(node, axes, width)
        channels = axes.shape[-1]
        # The head is the outer digit of the channels; the inner one, all of the last axis, is the channel of a head.
        heads = [f for f in operand.batch if f.axis == len(axes.shape) - 1]
        whole = [Factor(len(axes.shape) - 1, width, channels // width)] if channels > width else []
        if axes.dims[-1] != operand.digit(width) or heads != whole:
            raise build.refused(
                op,
                "channels (head, channel of a head) as queries, keys and values",
                f"others: {axes.dims} of {axes.shape[1:]}",
                "reshape projections to (..., 3, heads, channels)",
            )
        return operand

    def on(self, build: Builder, op: OnnxNode, space: Shape) -> _Operand:
        """Return the operand with its sequence reshaped to a grid of the extents `space`."""
        last, (samples, length, channels) = len(space) + 1, self.axes.shape
        node = build.add(op.part("map"), Reshape((*space, channels)), self.node)
        digits = {Factor(1, 1, length): tuple(Factor(a, 1, n) for a, n in enumerate(space, 1) if n > 1)}

        def parts(f: Factor) -> tuple[Factor, ...]:
            return digits.get(f, (f._replace(axis=last) if f.axis == 2 else f,))

        dims = tuple(tuple(itertools.chain(*map(parts, dim))) for dim in self.axes.dims)
        return replace(self, node=node, axes=Axes((samples, *space, channels), dims))

    def digit(self, width: int) -> tuple[Factor, ...]:
        return (Factor(len(self.axes.shape) - 1, 1, width),) if width > 1 else ()

    @property
    def heads(self) -> int:
        return self.axes.shape[-1] // self.width

    @property
    def batch(self) -> list[Factor]:
        """Factors of samples, windows and heads."""
        return list(itertools.chain(*self.axes.dims[:-2]))

    @property
    def roles(self) -> list[object]:
        """Role of each factor of `batch`, equal for operands that belong together: head, sample, or window."""
        last = len(self.axes.shape) - 1
        return ["head" if f.axis == last else ("sample", f.stride) if f.axis == 0 else f for f in self.batch]

    def windows(self) -> Shape | None:
        """Return the extents of the windows if the dimension of positions is that of one window; else None."""
        space, positions = self.axes.shape[1:-1], self.axes.dims[-2]
        extents = tuple(math.prod(f.extent for f in positions if f.axis == a) for a in range(1, len(space) + 1))
        # The position in a window is the inner digit of each spatial axis, the number of the window the outer one.
        inside = [Factor(a, 1, n) for a, n in enumerate(extents, 1) if n > 1]
        outside = [Factor(a, n, whole // n) for a, (n, whole) in enumerate(zip(extents, space), 1) if whole > n]
        factors = sorted(f for f in self.batch if 0 < f.axis < len(self.axes.shape) - 1)
        return extents if list(positions) == inside and factors == outside else None

    def summed(self, width: int) -> Axes:
        """Return the axes of the weighted sum of values, whose heads have `width` channels."""
        last = len(self.axes.shape) - 1
        dims = [
            tuple(Factor(last, f.stride // self.width * width, f.extent) if f.axis == last else f for f in dim)
            for dim in self.axes.dims[:-1]
        ]
        shape = (*self.axes.shape[:-1], self.heads * width)
        return Axes(shape, (*dims, self.digit(width)))


@dataclass(frozen=True)
class _Table:
    """Constant that is added to scores; a call arranges it as ``(*windows, heads, positions, positions)``.

    Attributes
    ----------
    constant
        The constant.
    extents
        Extents of the scores to which the constant is added.
    queries
        The queries; the factors of their batch are the first axes of the scores.
    window
        Extents of the windows.
    refused
        Function that returns the error for a table that is not one of relative positions.
    """

    constant: OnnxConstant
    extents: Shape
    queries: _Operand
    window: Shape
    refused: Callable[[str], Exception]

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """Return the part of `array` for the first sample as ``(*windows, heads, positions, positions)``.

        The array is broadcast to the scores; without an axis of heads in the scores, the extent of heads is 1.
        """
        batch, size = self.queries.batch, math.prod(self.window)
        whole = np.broadcast_to(array, self.extents).reshape([f.extent for f in batch] + [size, size])
        last = len(self.queries.axes.shape) - 1
        # In order of the node's axes: samples, windows, heads (which are a part of the channels, the last axis).
        order = sorted(range(len(batch)), key=lambda i: batch[i].axis)
        whole = whole.transpose(*order, len(batch), len(batch) + 1)
        kinds = [batch[i].axis for i in order]
        if kinds and kinds[0] == 0:
            whole, kinds = whole[0], kinds[1:]
        counts = [n // own for n, own in zip(self.queries.axes.shape[1:-1], self.window)]
        return whole.reshape(*counts, self.queries.heads if last in kinds else 1, size, size)

    @property
    def relative_shape(self) -> Shape:
        return (self.queries.heads, *(2 * n - 1 for n in self.window))

    def relative(self, array: np.ndarray) -> np.ndarray:
        """Return the elements by relative position, ``(heads, *(2 * extent - 1))``.

        Raises the error `refused` if pairs of one relative position have different elements.
        """
        (whole,) = self(array).reshape(-1, *self.queries_shape)[:1]
        positions = np.stack(np.unravel_index(np.arange(whole.shape[-1]), self.window))
        # Relative positions from 1 - extent to extent - 1, counted from 0.
        offsets = positions[:, :, None] - positions[:, None, :] + np.array(self.window)[:, None, None] - 1
        index = np.ravel_multi_index(tuple(offsets), self.relative_shape[1:])
        table = np.zeros((whole.shape[0], math.prod(self.relative_shape[1:])), array.dtype)
        table[:, index.reshape(-1)] = whole.reshape(whole.shape[0], -1)
        if not np.array_equal(table[:, index], whole):
            raise self.refused("another array")
        return table.reshape(self.relative_shape)

    @property
    def queries_shape(self) -> Shape:
        size = math.prod(self.window)
        return self.queries.heads, size, size


def _added(build: Builder, op: OnnxNode, i: int, q: _Operand, window: Shape) -> tuple[OnnxConstant, _Table]:
    """Return input `i`, a constant that is added to the scores, and the table that arranges it.

    Raises the error `refused` if the constant is trained and no table of relative positions.
    """
    constant = build.graph.constants[op.inputs[i]]

    def refused(got: str) -> Exception:
        expected = "a table of relative positions (one number per head and relative position) added to the scores"
        return build.refused(op, expected, f"{got}: {constant.name or constant.shape}")

    table = _Table(constant, op.attributes["extents"][i - 3], q, window, refused)
    if not constant.is_fixed:
        # Indices in place of values: pairs of one relative position must read the same element.
        numbers = np.arange(math.prod(constant.shape)).reshape(constant.shape)
        if constant.order is not None and constant.stored is not None:
            numbers = constant.order(np.arange(math.prod(constant.stored)).reshape(constant.stored))
        whole = table(numbers).reshape(-1, *table.queries_shape)
        if not (whole == whole[:1]).all():
            raise refused("one that differs between windows")
        table.relative(numbers)
    return constant, table


def _shift(build: Builder, op: OnnxNode, q: _Operand, window: Shape, masks: Sequence[np.ndarray]) -> Shape:
    """Return the shift of the windows that the sum of the `masks` describes; zeros if no scores are masked."""
    none, counts = (0,) * len(window), [n // own for n, own in zip(q.axes.shape[1:-1], window)]
    total = np.asarray(sum(masks))
    if not total.any():
        return none
    total = total.reshape(*counts, q.heads if total.shape[-3] == q.heads else 1, *total.shape[-2:])
    # The layer's mask is the same for all heads.
    same = total[..., :1, :, :]
    shift = _shift_of(q.node)
    fits = (total == same).all() and ((same == 0) | (same < _MASKED)).all()
    if shift is None or not fits or not np.array_equal(same[..., 0, :, :] == 0, _allowed(shift, window, counts)):
        remedy = "masks of shifted windows (torch.roll before them) are read, no others"
        raise build.refused(op, "scores without a mask, or the mask of shifted windows", "another mask", remedy)
    return shift


def _allowed(shift: Shape, window: Shape, counts: Sequence[int]) -> np.ndarray:
    """Return the mask of the keys that a query reads, for each window of a shifted map.

    Its shape is ``(*windows, positions, positions)``: queries, then keys.
    """
    positions = np.unravel_index(np.arange(math.prod(window)), window)
    allowed = np.ones((*counts, math.prod(window), math.prod(window)), bool)
    for a, (by, extent, count) in enumerate(zip(shift, window, counts)):
        # Whether a row of the shifted map comes from the other end of the map: it reads only rows from there.
        around = np.arange(count)[:, None] * extent + positions[a] + by >= count * extent
        pairs = around[:, :, None] == around[:, None, :]
        allowed &= pairs.reshape(*(count if b == a else 1 for b in range(len(counts))), *pairs.shape[1:])
    return allowed


# -- circular shifts ---------------------------------------------------------------------------------------


def _roll(build: Builder, op: OnnxNode) -> Activation:
    """Import a circular shift. Shifts in sequence become one, also with position-wise layers between them."""
    node, axes = build.axes(op.inputs[0])
    (axis, by), last = (op.attributes[key] for key in ("axis", "shift")), len(axes.shape) - 1
    # Along the channels: two slices in exchanged order.
    if axes.dims[axis] == (Factor(last, 1, axes.shape[last]),):
        ends = (axes.shape[last] - by, axes.shape[last]), (0, axes.shape[last] - by)
        parts = [build.add(op.part("channels"), Slice(*rows), node) for rows in ends]
        return build.arranged(op).of(build.add(op, Concat(), *parts))
    chosen = next((a for a in range(1, last) if axes.dims[axis] == (Factor(a, 1, axes.shape[a]),)), None)
    refusal = build.refused(op, "a shift along a spatial axis", f"axis {axis}")
    if chosen is None:
        raise refusal
    shift = tuple(by if a == chosen else 0 for a in range(1, last))
    rolled = _moved(node, shift, {})
    if rolled is None:
        rolled = build.add(op, Roll(shift), node)
    return in_form(build, op, rolled, axes, refusal)


def _is_of_positions(node: Node) -> bool:
    """Return whether a node is the output of a position-wise layer: a 1x1 convolution, a slice or dropout.

    Such a layer computes each position from the same position of its only input.
    """
    layer = node.layer
    if isinstance(layer, Conv):
        extents = node.inputs[0].shape
        # With padding, a stride may keep the extents.
        windows = layer.windows(extents)
        own = all((window.kernel, window.pad_lo, window.pad_hi) == (1, 0, 0) for window in windows)
        return own and extents[:-1] == node.shape[:-1]
    # The importer makes slices of channels only; parts in space become a Pad with negative amounts.
    return isinstance(layer, Slice | Dropout)


def _map_of(node: Node) -> Shape | None:
    """Return the spatial extents of the map whose positions form the sequence of a node; None without such a map."""
    while _is_of_positions(node):
        node = node.inputs[0]
    before = node.inputs[0].shape if isinstance(node.layer, ReshapedMap) else node.shape
    fits = len(node.shape) == 2 and len(before) > 2 and math.prod(before[:-1]) == node.shape[0]
    return before[:-1] if fits else None


def _moved(node: Node, shift: Shape, known: dict[Node, Node | None]) -> Node | None:
    """Return a node with the values of `node` shifted by `shift`, which is added to a Roll before it; None without one.

    Position-wise layers after that Roll are called again on the result. `known` holds results by node, so that each is
    called again only once.
    """
    if node in known:
        return known[node]
    moved: Node | None = None
    if isinstance(node.layer, Roll):
        source = node.inputs[0]
        total = tuple((a + b) % n for a, b, n in zip(node.layer.shifts(source.shape), shift, source.shape))
        # Shifts that cancel each other need no Roll.
        moved = Roll(total, node.layer.name)(source) if any(total) else source
    elif _is_of_positions(node):
        before = _moved(node.inputs[0], shift, known)
        moved = None if before is None else node.layer(before)
    known[node] = moved
    return moved


def _shift_of(node: Node) -> Shape | None:
    """Return by how much a Roll before this node has shifted positions to the front; None without one."""
    while _is_of_positions(node):
        node = node.inputs[0]
    if not isinstance(node.layer, Roll):
        return None
    shape = node.inputs[0].shape
    return tuple(-by % n for by, n in zip(node.layer.shifts(shape), shape))


ATTENTION: dict[str, Callable[[Builder, OnnxNode], Activation]] = {"WeightedValues": _weighted, "Roll": _roll}
