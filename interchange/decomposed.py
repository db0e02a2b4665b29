"""Patterns of operators that exporters write for one torch function, and that are one layer here.

See :mod:`halograd.interchange.patterns`: a rule replaces the operations that it recognizes by one operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .graph import Graph, OnnxConstant, OnnxNode

__all__ = ["DECOMPOSED", "per_channel"]

#: Operators that only change the number of axes.
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Identity")


def _number(graph: Graph, name: str) -> float | None:
    """Return the value of a scalar constant that is not trained, else None."""
    constant = graph.constants.get(name)
    return None if constant is None or not constant.is_fixed else constant.scalar()


def _operands(graph: Graph, op: OnnxNode) -> tuple[str, float | None]:
    """Return the data input and the constant number of an operation with one of each; else ("", None)."""
    values = [name for name in op.inputs if name not in graph.constants]
    numbers = [_number(graph, name) for name in op.inputs if name in graph.constants]
    return (values[0], numbers[0]) if len(values) == len(numbers) == 1 else ("", None)


def _axes(graph: Graph, op: OnnxNode) -> list[int]:
    """Return the axes that an operation reduces or inserts, counted from the front."""
    given = op.attributes.get("axes", ())
    if len(op.inputs) > 1 and op.inputs[1] in graph.constants:
        given = graph.constants[op.inputs[1]].read().reshape(-1).tolist()
    rank = len(graph.shapes[op.inputs[0]]) + (len(given) if op.kind == "Unsqueeze" else 0)
    return [int(axis) % rank for axis in given]


def _local_response_norm(graph: Graph, op: OnnxNode) -> None:
    """Recognize x / (k + alpha * mean of x * x over channels) ** beta; the mean is a pooling with one additional axis.
    """
    power = graph.maker(op.inputs[1]) if op.kind == "Div" else None
    chain, numbers = [op], []
    for kind in ("Pow", "Add", "Mul"):
        if power is None or power.kind != kind or graph.only_reader(power.outputs[0]) is not chain[-1]:
            return
        value, number = _operands(graph, power)
        if not value or number is None:
            return
        chain.append(power)
        numbers.append(number)
        power = graph.maker(value)
    below = _pooled_squares(graph, power, chain)
    if below is None or below[0] != op.inputs[0]:
        return
    beta, k, alpha = numbers
    attributes = {"size": below[1], "alpha": alpha, "beta": beta, "k": k}
    graph.replace(chain[::-1], op.changed(kind="LocalResponseNorm", inputs=(op.inputs[0],), attributes=attributes))


def _pooled_squares(graph: Graph, op: OnnxNode | None, chain: list[OnnxNode]) -> tuple[str, int] | None:
    """Follow the mean over channels back to the squares. Return the squared value and the number of channels, or None.

    Appends the operations to `chain`.
    """
    kinds = iter(("AveragePool", "Pad", "Mul"))
    kind, size, pads = next(kinds), 0, []
    while op is not None:
        if op.kind != kind and op.kind not in _VIEWS:
            return None
        if graph.only_reader(op.outputs[0]) is not chain[-1]:
            return None
        chain.append(op)
        if op.kind == kind == "AveragePool":
            size, *others = op.attributes["kernel_shape"]
            if {*others, *op.attributes.get("strides", ())} != {1} or any(op.attributes.get("pads") or ()):
                return None
        elif op.kind == kind == "Pad":
            pads = graph.constants[op.inputs[1]].read().reshape(-1).tolist() if op.inputs[1] in graph.constants else []
            rank = len(graph.shapes[op.inputs[0]])
            wanted = [0] * (2 * rank)
            wanted[2], wanted[2 + rank] = size // 2, (size - 1) // 2
            if pads != wanted or op.attributes.get("mode", "constant") != "constant":
                return None
        elif op.kind == kind == "Mul":
            return (op.inputs[0], size) if op.inputs[0] == op.inputs[1] else None
        if op.kind == kind:
            kind = next(kinds)
        op = graph.maker(op.inputs[0])
    return None


def _softplus(graph: Graph, op: OnnxNode) -> None:
    """Recognize softplus with a branch for large values, which returns its input."""
    compared = graph.maker(op.inputs[0]) if op.kind == "Where" else None
    if compared is None or compared.kind != "Greater" or graph.only_reader(compared.outputs[0]) is not op:
        return
    limit = _number(graph, compared.inputs[1])
    soft = graph.maker(op.inputs[2])
    divided = soft if soft is not None and soft.kind == "Div" else None
    soft = graph.maker(divided.inputs[0]) if divided is not None else soft
    if limit is None or limit < 20 or soft is None or soft.kind != "Softplus" or soft.inputs[0] != compared.inputs[0]:
        return
    scaled = graph.maker(soft.inputs[0]) if divided is not None else None
    fits = op.inputs[1] == soft.inputs[0]
    if divided is not None:
        factor = op.inputs[1], _number(graph, divided.inputs[1])
        fits = scaled is not None and scaled.kind == "Mul" and _operands(graph, scaled) == factor
    if fits:
        graph.operations = [other for other in graph.operations if other is not compared]
        graph.leave_out(op, op.inputs[2])


def _limits(graph: Graph, op: OnnxNode) -> None:
    """Recognize Max or Min of a value and a number, or both in sequence, as Clip."""
    if op.kind not in ("Max", "Min"):
        return
    value, number = _operands(graph, op)
    if not value or number is None or graph.shapes[op.outputs[0]] != graph.shapes[value]:
        return
    key, other = ("min", "max") if op.kind == "Max" else ("max", "min")
    before, attributes, chain = graph.maker(value), {key: number}, [op]
    if before is not None and before.kind == "Clip" and len(before.inputs) == 1 and graph.only_reader(value) is op:
        both = attributes | before.attributes
        if set(before.attributes) == {other} and both["min"] < both["max"]:
            value, chain, attributes = before.inputs[0], [before, op], both
    graph.replace(chain, op.changed(kind="Clip", inputs=(value,), attributes=attributes))


def _stacked(graph: Graph, op: OnnxNode) -> None:
    """Recognize the sum or mean of values stacked along a new axis, as an addition."""
    joined = graph.maker(op.inputs[0]) if op.kind in ("ReduceSum", "ReduceMean") else None
    if joined is None or joined.kind != "Concat" or graph.only_reader(joined.outputs[0]) is not op:
        return
    axis = joined.attributes["axis"] % len(graph.shapes[joined.outputs[0]])
    parts = [graph.maker(name) for name in joined.inputs]
    single = [one for one in parts if one is not None and one.kind == "Unsqueeze" and _axes(graph, one) == [axis]]
    if _axes(graph, op) != [axis] or op.attributes.get("keepdims", 1) or len(single) != len(parts) or len(parts) < 2:
        return
    if any(graph.only_reader(one.outputs[0]) is not joined for one in single):
        return
    values = tuple(one.inputs[0] for one in single)
    total = op.changed(kind="Add", inputs=values, attributes={})
    if op.kind == "ReduceMean":
        name = f"{op.outputs[0]}::sum"
        graph.shapes[name] = graph.shapes[op.outputs[0]]
        graph.constants[f"{name}::count"] = OnnxConstant.of(np.array(float(len(values))))
        mean = op.changed(kind="Div", inputs=(name, f"{name}::count"), attributes={})
        place = next(i for i, one in enumerate(graph.operations) if one is op)
        graph.operations.insert(place + 1, mean)
        total = total.part("sum").changed(outputs=(name,))
    graph.replace([*single, joined, op], total)


def _kept_axis(graph: Graph, op: OnnxNode) -> None:
    """Recognize a reduction along one axis that becomes an axis of extent 1 again, ``x.mean(1).unsqueeze(1)``."""
    if not op.kind.startswith("Reduce") or op.attributes.get("keepdims", 1) or len(_axes(graph, op)) != 1:
        return
    after, shape = graph.only_reader(op.outputs[0]), list(graph.shapes[op.inputs[0]])
    shape[_axes(graph, op)[0]] = 1
    if after is None or after.kind not in ("Unsqueeze", "Reshape") or graph.shapes[after.outputs[0]] != tuple(shape):
        return
    kept = op.changed(outputs=after.outputs, attributes={**op.attributes, "keepdims": 1})
    graph.replace([op, after], kept)


def _expanded(graph: Graph, op: OnnxNode) -> None:
    """Remove an Expand whose reader (a product or a sum with a value of the full extents) broadcasts itself."""
    if op.kind != "Expand" or op.outputs[0] in graph.outputs:
        return
    made, value = op.outputs[0], op.inputs[0]
    if len(graph.shapes[value]) != len(graph.shapes[made]):
        return
    readers = graph.readers(made)
    others = [[name for name in one.inputs if name != made] for one in readers]
    fits = all(
        one.kind in ("Mul", "Add", "Sub", "Div") and len(rest) == 1 and graph.shapes[rest[0]] == graph.shapes[made]
        for one, rest in zip(readers, others)
    )
    if fits and readers:
        graph.leave_out(op, value)


def per_channel(graph: Graph, name: str, axes: int, channels: int) -> bool:
    """Return whether a constant has one number per channel of a value (N, C, *spatial)."""
    constant = graph.constants.get(name)
    if constant is None:
        return False
    shape = (1,) * (axes - len(constant.shape)) + constant.shape
    return len(shape) == axes and shape[1] == channels and math.prod(shape) == channels


def _softplus_by_parts(graph: Graph, op: OnnxNode) -> None:
    """Recognize log(1 + exp(x))."""
    added = graph.maker(op.inputs[0]) if op.kind == "Log" else None
    if added is None or added.kind != "Add":
        return
    value, number = _operands(graph, added)
    power = graph.maker(value) if number == 1 else None
    if power is not None and power.kind == "Exp" and _only_read_within(graph, [power, added, op]):
        graph.replace([power, added, op], op.changed(kind="Softplus", inputs=power.inputs, attributes={}))


def _only_read_within(graph: Graph, chain: Sequence[OnnxNode]) -> bool:
    """Return whether no other operation, and no output, reads the values before the last of these operations."""
    made = {name for op in chain[:-1] for name in op.outputs}
    readers = [op for op in graph.operations if made & set(op.inputs)]
    return not made & set(graph.outputs) and all(any(op is one for one in chain) for op in readers)


class _NormByParts:
    """Search for the operators of a norm, backwards from its last one.

    Attributes
    ----------
    chain
        Operators found so far.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.chain: list[OnnxNode] = []

    def maker(self, name: str, *kinds: str) -> OnnxNode | None:
        """Return the operation of one of these kinds that computes a value, and append it to the chain."""
        op = self.graph.maker(name)
        if op is None or op.kind not in kinds:
            return None
        if not any(op is one for one in self.chain):
            self.chain.append(op)
        return op

    def divided(self, op: OnnxNode) -> tuple[str, str] | None:
        """Return numerator and denominator of a quotient, or of a product with a reciprocal."""
        if op.kind == "Div":
            return op.inputs[0], op.inputs[1]
        for value, factor in (op.inputs, op.inputs[::-1]) if op.kind == "Mul" else ():
            inverse = self.graph.maker(factor)
            if inverse is not None and inverse.kind == "Reciprocal":
                self.chain.append(inverse)
                return value, inverse.inputs[0]
            if inverse is not None and inverse.kind == "Div" and _number(self.graph, inverse.inputs[0]) == 1:
                self.chain.append(inverse)
                return value, inverse.inputs[1]
        return None

    def viewed(self, name: str) -> str:
        """Return the value that axes of extent 1 and broadcasts to the same extents make of another."""
        op, count = self.graph.maker(name), math.prod(self.graph.shapes[name])
        while op is not None and op.kind in (*_VIEWS, "Expand") and math.prod(self.graph.shapes[op.inputs[0]]) == count:
            self.chain.append(op)
            name, op = op.inputs[0], self.graph.maker(op.inputs[0])
        return name

    def deviation(self, name: str) -> tuple[str, float, list[int]] | None:
        """Return x, eps and axes for the value ``sqrt(mean(x ** 2, axes) + eps)``."""
        root = self.maker(name, "Sqrt")
        added = root and self.maker(root.inputs[0], "Add")
        value, eps = _operands(self.graph, added) if added else ("", None)
        mean = None if eps is None else self.maker(self.viewed(value), "ReduceMean")
        square = mean and self.maker(mean.inputs[0], "Mul", "Pow")
        if eps is None or not mean or not square:
            return None
        x, other = square.inputs
        kept = [1 if axis in _axes(self.graph, mean) else n for axis, n in enumerate(self.graph.shapes[x])]
        if self.graph.shapes[value] != tuple(kept):
            return None
        squares = _number(self.graph, other) == 2 if square.kind == "Pow" else other == x
        return (x, eps, _axes(self.graph, mean)) if squares else None

    def centered(self, name: str, axes: list[int]) -> str:
        """Return x for the value ``x - mean(x, axes)``, else an empty name."""
        difference = self.maker(name, "Sub")
        mean = difference and self.maker(difference.inputs[1], "ReduceMean")
        if not difference or not mean or not mean.attributes.get("keepdims", 1):
            return ""
        return mean.inputs[0] if mean.inputs[0] == difference.inputs[0] and _axes(self.graph, mean) == axes else ""


def _norm_by_parts(graph: Graph, op: OnnxNode) -> None:
    """Recognize (x - mean) / sqrt(mean((x - mean) ** 2) + eps), and x / sqrt(mean(x ** 2) + eps), over channels or
    over space, with the factor and the summand per channel after it.
    """
    search = _NormByParts(graph)
    sides = search.divided(op)
    below = sides and search.deviation(sides[1])
    if not sides or not below:
        return
    value, (inner, eps, axes) = sides[0], below
    outer = search.centered(inner, axes)
    x, rank = outer or inner, len(graph.shapes[inner])
    fits = value == inner or (outer and search.centered(value, axes) == x)
    chain = [*search.chain, op]
    if not fits or not _only_read_within(graph, chain) or axes not in ([1], list(range(2, rank)) if outer else [1]):
        return
    affine = ["", ""]
    for i, kind in enumerate(("Mul", "Add") if outer else ()):
        after = graph.only_reader(chain[-1].outputs[0])
        other = next((n for n in after.inputs if n != chain[-1].outputs[0]), "") if after is not None else ""
        if after is None or after.kind != kind or not per_channel(graph, other, rank, graph.shapes[x][1]):
            break
        if graph.constants[other].origin != "parameter":
            break
        chain.append(after)
        affine[i] = other
    attributes = {"epsilon": eps, "axis": 1, "centered": bool(outer)}
    kind = "NormOverChannels" if axes == [1] else "InstanceNormalization"
    new = chain[-1].changed(kind=kind, inputs=(x, *affine) if outer else (x,), attributes=attributes)
    graph.replace(chain, new)


#: These rules run before scalars are joined and factors of 1 are removed.
DECOMPOSED = (
    _local_response_norm,
    _limits,
    _stacked,
    _kept_axis,
    _expanded,
    _softplus,
    _softplus_by_parts,
    _norm_by_parts,
)
