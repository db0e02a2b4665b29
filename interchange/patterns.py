"""Patterns of several operators that are one layer (norms, GELU, SiLU, dense layers), and fusion of activations.

A rule examines one operation and its readers, and replaces all operations that it recognizes by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..layers import ELU, GELU, HardSigmoid, HardSwish, Layer, LeakyReLU, Mish, ReLU, Sigmoid, SiLU, Softplus, Tanh
from .attention import attention
from .decomposed import DECOMPOSED, per_channel
from .graph import Graph, OnnxNode, following
from .spatial import SPATIAL

__all__ = ["ACTIVATIONS", "RULES", "activation_of", "is_hard_sigmoid", "permuted", "recognize"]

#: Activations that other layers can fuse, by operator; built from the operator's attributes.
ACTIVATIONS: dict[str, Callable[[dict[str, Any]], Layer]] = {
    "Relu": lambda given: ReLU(),
    "LeakyRelu": lambda given: LeakyReLU(given.get("alpha", 0.01)),
    "Sigmoid": lambda given: Sigmoid(),
    "Tanh": lambda given: Tanh(),
    "Elu": lambda given: ELU(given.get("alpha", 1.0)),
    "Silu": lambda given: SiLU(),
    "Swish": lambda given: SiLU(),
    "HardSwish": lambda given: HardSwish(),
    "HardSigmoid": lambda given: HardSigmoid(),
    "Gelu": lambda given: GELU(given.get("approximate", "none")),
    "Softplus": lambda given: Softplus(),
    "Mish": lambda given: Mish(),
}
#: Operators whose layers can fuse an activation.
_FUSE = {"Conv", "BatchNormalization", "InstanceNormalization", "GroupNorm", "LayerNormalization", "Add"}


def activation_of(op: OnnxNode) -> Layer | None:
    """Return a new layer of the activation that is fused into an operation, or None."""
    kind, given = op.attributes.get("activation", (None, {}))
    return None if kind is None else ACTIVATIONS[kind](given)


def recognize(graph: Graph, path: Path) -> None:
    """Apply all rules in order, each until it changes nothing. Modifies the graph of `path`."""
    for rule in RULES:
        before: list[OnnxNode] = []
        while before != graph.operations:
            before = list(graph.operations)
            for op in before:
                # A rule creates new objects for changed operations; the next round visits these.
                if any(op is other for other in graph.operations):
                    with following(path, op):
                        rule(graph, op)


def _nothing(graph: Graph, op: OnnxNode) -> None:
    """Remove a factor of 1, or a summand of 0."""
    neutral = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}.get(op.kind)
    if neutral is None or (op.kind in ("Div", "Sub") and op.inputs[0] in graph.constants):
        return
    values = [name for name in op.inputs if name not in graph.constants]
    numbers = [graph.constants[name].scalar() for name in op.inputs if name in graph.constants]
    if len(values) == 1 and numbers == [neutral]:
        graph.leave_out(op, values[0])


def _same_by_strides(graph: Graph, op: OnnxNode) -> None:
    """Remove an as_strided that keeps the shape: a flattening, then a gather of all elements in order into the same
    shape.
    """
    picked = graph.only_reader(op.outputs[0]) if op.kind == "Reshape" else None
    if picked is None or picked.kind != "Gather" or picked.inputs[1] not in graph.constants:
        return
    if len(graph.shapes[op.outputs[0]]) != 1 or graph.shapes[picked.outputs[0]] != graph.shapes[op.inputs[0]]:
        return
    places = graph.constants[picked.inputs[1]].read().reshape(-1)
    if np.array_equal(places, np.arange(len(places))):
        graph.replace([op, picked], picked.changed(kind="Identity", inputs=op.inputs[:1], attributes={}))


def _pixels(graph: Graph, op: OnnxNode) -> None:
    """Recognize a pixel shuffle: the positions in a cell are axes that move to the channels, or from them."""
    moved = graph.only_reader(op.outputs[0]) if op.kind == "Reshape" else None
    whole = None if moved is None or moved.kind != "Transpose" else graph.only_reader(moved.outputs[0])
    if moved is None or whole is None or whole.kind != "Reshape":
        return
    x, apart, y = (graph.shapes[name] for name in (op.inputs[0], op.outputs[0], whole.outputs[0]))
    axes, order = len(x) - 2, tuple(moved.attributes.get("perm", ()))
    if axes < 1 or len(y) != len(x) or x[0] != y[0]:
        return
    kind, coarse, fine = ("PixelUnshuffle", y, x) if y[2] < x[2] else ("PixelShuffle", x, y)
    factor = fine[2] // coarse[2]
    cells = tuple(n for extent in coarse[2:] for n in (extent, factor))
    if kind == "PixelUnshuffle":
        wanted = (*fine[:2], *cells), (0, 1, *range(3, 2 + 2 * axes, 2), *range(2, 2 + 2 * axes, 2))
    else:
        places = (i for a in range(2, 2 + axes) for i in (axes + a, a))
        wanted = (*fine[:2], *(factor,) * axes, *coarse[2:]), (0, 1, *places)
    fits = coarse[1] == fine[1] * factor**axes and fine[2:] == tuple(n * factor for n in coarse[2:])
    if fits and (apart, order) == wanted:
        graph.replace([op, moved, whole], whole.changed(kind=kind, inputs=op.inputs[:1], attributes={"factor": factor}))


def _channel_shuffle(graph: Graph, op: OnnxNode) -> None:
    """Recognize a channel shuffle: the groups are an axis that moves after the channels of a group."""
    moved = graph.only_reader(op.outputs[0]) if op.kind == "Reshape" else None
    whole = None if moved is None or moved.kind != "Transpose" else graph.only_reader(moved.outputs[0])
    if moved is None or whole is None or whole.kind != "Reshape":
        return
    x, apart, y = (graph.shapes[name] for name in (op.inputs[0], op.outputs[0], whole.outputs[0]))
    if x != y or len(x) < 3 or len(apart) != len(x) + 1 or (apart[0], *apart[3:]) != (x[0], *x[2:]):
        return
    if tuple(moved.attributes.get("perm", ())) == (0, 2, 1, *range(3, len(apart))):
        attributes = {"groups": apart[1]}
        new = whole.changed(kind="ChannelShuffle", inputs=op.inputs[:1], attributes=attributes)
        graph.replace([op, moved, whole], new)


def _group_norm(graph: Graph, op: OnnxNode) -> None:
    """Recognize a group norm: reshape to (N, G, -1), instance norm without scale, reshape back, factor, summand."""
    if op.kind != "Reshape" or len(graph.shapes[op.outputs[0]]) != 3:
        return
    norm = graph.only_reader(op.outputs[0])
    if norm is None or norm.kind != "InstanceNormalization" or not _is_plain(graph, norm):
        return
    back = graph.only_reader(norm.outputs[0])
    x = op.inputs[0]
    if back is None or back.kind != "Reshape" or graph.shapes[back.outputs[0]] != graph.shapes[x]:
        return
    groups, channels = graph.shapes[op.outputs[0]][1], graph.shapes[x][1]
    if channels % groups:
        return
    chain, affine = [op, norm, back], ["", ""]
    for i, kind in enumerate(("Mul", "Add")):
        found = graph.only_reader(chain[-1].outputs[0])
        if found is None or found.kind != kind:
            break
        (other,) = [name for name in found.inputs if name != chain[-1].outputs[0]] or [""]
        if not per_channel(graph, other, len(graph.shapes[x]), channels) or graph.constants[other].origin == "buffer":
            break
        chain.append(found)
        affine[i] = other
    attributes = {"num_groups": groups, "epsilon": norm.attributes.get("epsilon", 1e-5)}
    last = chain[-1]
    graph.replace(chain, last.changed(kind="GroupNorm", inputs=(x, *affine), attributes=attributes))


def _is_plain(graph: Graph, norm: OnnxNode) -> bool:
    """Return whether the parameters of a norm are ones and zeros."""
    scale, shift = (graph.constants.get(name) for name in norm.inputs[1:3])
    return scale is not None and shift is not None and scale.is_all(1) and shift.is_all(0)


def _gated_by_itself(graph: Graph, op: OnnxNode) -> None:
    """Recognize x * sigmoid(x) and x * hard_sigmoid(x)."""
    kinds = {"Sigmoid": "Silu", "HardSigmoid": "HardSwish"}
    product = graph.only_reader(op.outputs[0]) if op.kind in kinds else None
    if product is None or product.kind != "Mul" or op.inputs[0] not in product.inputs:
        return
    if op.kind == "HardSigmoid" and not is_hard_sigmoid(op):
        return
    graph.replace([op, product], product.changed(kind=kinds[op.kind], inputs=op.inputs[:1], attributes={}))


def is_hard_sigmoid(op: OnnxNode) -> bool:
    """Return whether a slope and offset are those of torch: 1 / 6 and 1 / 2."""
    slope, offset = op.attributes.get("alpha", 0.2), op.attributes.get("beta", 0.5)
    return math.isclose(slope, 1 / 6, rel_tol=1e-6) and offset == 0.5


def _gelu(graph: Graph, op: OnnxNode) -> None:
    """Recognize x * (1 + erf(x / sqrt(2))) / 2, in any order of factors."""
    before = graph.maker(op.inputs[0]) if op.kind == "Erf" else None
    if before is None or before.kind not in ("Div", "Mul") or graph.only_reader(before.outputs[0]) is not op:
        return
    divisor = graph.constants.get(before.inputs[1])
    number = None if divisor is None else divisor.scalar()
    wanted = math.sqrt(2) if before.kind == "Div" else math.sqrt(0.5)
    one_more = graph.only_reader(op.outputs[0])
    if number is None or not math.isclose(number, wanted, rel_tol=1e-6) or one_more is None or one_more.kind != "Add":
        return
    if not _has_number(graph, one_more, 1.0):
        return
    _end_gelu(graph, before.inputs[0], [before, op, one_more])


def _end_gelu(graph: Graph, x: str, chain: list[OnnxNode]) -> None:
    """Recognize the products with x and one half that end a GELU, and replace the whole chain."""
    left = {"x", "half"}
    while left:
        product = graph.only_reader(chain[-1].outputs[0])
        if product is None or product.kind != "Mul":
            return
        (other,) = [name for name in product.inputs if name != chain[-1].outputs[0]] or [""]
        inner = graph.maker(other)
        if other == x and "x" in left:
            left.remove("x")
        elif _has_number(graph, product, 0.5) and "half" in left:
            left.remove("half")
        elif inner is not None and inner.kind == "Mul" and x in inner.inputs and _has_number(graph, inner, 0.5):
            left -= {"x", "half"}
            chain.insert(0, inner)
        else:
            return
        chain.append(product)
    graph.replace(chain, chain[-1].changed(kind="Gelu", inputs=(x,), attributes={}))


def _has_number(graph: Graph, op: OnnxNode, number: float) -> bool:
    """Return whether one input of an operation is this number."""
    constants = [graph.constants[name] for name in op.inputs if name in graph.constants]
    return any(one.scalar() == number for one in constants)


def _linear(graph: Graph, op: OnnxNode) -> None:
    """Recognize a product with a matrix, with or without an added vector, as a dense layer at every position."""
    if op.kind != "MatMul" or op.inputs[1] not in graph.constants or op.inputs[0] in graph.constants:
        return
    summed = graph.only_reader(op.outputs[0])
    others = [] if summed is None or summed.kind != "Add" else [n for n in summed.inputs if n != op.outputs[0]]
    units = graph.constants[op.inputs[1]].shape[-1]
    fits = bool(others) and others[0] in graph.constants and graph.constants[others[0]].shape in ((units,), (1, units))
    fits = fits and graph.constants[others[0]].origin != "buffer"
    if summed is None or not fits:
        graph.replace([op], op.changed(kind="Linear", inputs=(*op.inputs, "")))
        return
    graph.replace([op, summed], summed.changed(kind="Linear", inputs=(*op.inputs, others[0]), attributes={}))


def _affine(graph: Graph, op: OnnxNode) -> None:
    """Merge products and sums with constants that are not trained, several in sequence, into one.

    A constant is one number, or has one element per element of one axis.
    """
    if op.kind == "Neg":
        graph.replace([op], op.changed(kind="Affine", attributes=_AFFINE | {"factor": -1.0}))
        return
    value, name = _with_constant(graph, op)
    if op.kind not in ("Add", "Sub", "Mul", "Div") or not name or not graph.constants[name].is_fixed:
        return
    axis = _axis_of(graph, name, value)
    if axis == 0 or graph.shapes[op.outputs[0]] != graph.shapes[value]:
        return
    number: Any = graph.constants[name].scalar()
    if axis is not None:
        number = graph.constants[name].read().astype(np.float64).reshape(-1)
    number, first = np.asarray(number), op.inputs[0] == name
    if op.kind == "Div" and (first or not number.all()):
        return
    factor, shift = {
        "Add": lambda: (1.0, number),
        "Sub": lambda: (-1.0, number) if first else (1.0, -number),
        "Mul": lambda: (number, 0.0),
        "Div": lambda: (1 / number, 0.0),
    }[op.kind]()
    before, chain = graph.maker(value), [op]
    if before is not None and before.kind == "Affine" and graph.only_reader(value) is op:
        earlier = before.attributes["axis"]
        if earlier is None or axis is None or earlier == axis:
            value, chain, axis = before.inputs[0], [before, op], earlier if axis is None else axis
            inner = (np.asarray(before.attributes[key]) for key in ("factor", "shift"))
            factor, shift = (factor * n + more for n, more in zip(inner, (0.0, shift)))
    attributes = {"factor": _numbers(factor), "shift": _numbers(shift), "axis": axis, "kind": op.kind}
    graph.replace(chain, op.changed(kind="Affine", inputs=(value,), attributes=attributes))


#: Attributes of products and sums: numbers, the axis along which they vary, and the operator's name for messages.
_AFFINE: dict[str, Any] = {"factor": 1.0, "shift": 0.0, "axis": None, "kind": "Mul"}


def _with_constant(graph: Graph, op: OnnxNode) -> tuple[str, str]:
    """Return the names of the value and of the constant of an operation with one of each; else empty names."""
    constants = [name for name in op.inputs if name in graph.constants]
    values = [name for name in op.inputs if name not in graph.constants]
    return (values[0], constants[0]) if len(constants) == len(values) == 1 else ("", "")


def _axis_of(graph: Graph, name: str, value: str) -> int | None:
    """Return the axis of a value along which a constant varies; None for a single number, 0 if there is no such axis.
    """
    constant, extents = graph.constants[name], graph.shapes[value]
    if math.prod(constant.shape) == 1:
        return None
    shape = (1,) * (len(extents) - len(constant.shape)) + constant.shape
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    return axes[0] if len(axes) == 1 and len(shape) == len(extents) and shape[axes[0]] == extents[axes[0]] else 0


def _numbers(given: float | np.ndarray) -> float | tuple[float, ...]:
    """Return an array as a number if it has one element, else as a tuple."""
    array = np.ravel(given)
    return float(array[0]) if array.size == 1 else tuple(array.tolist())


def _channel_scale(graph: Graph, op: OnnxNode) -> None:
    """Recognize a learned factor per element of an axis, with or without a learned summand after it."""
    value, name = _with_constant(graph, op)
    if op.kind != "Mul" or not name or graph.constants[name].is_fixed:
        return
    axis = _learned_axis(graph, name, value)
    if not axis:
        return
    attributes = {"axis": axis, "kind": op.kind}
    summed = graph.only_reader(op.outputs[0])
    _, other = ("", "") if summed is None or summed.kind != "Add" else _with_constant(graph, summed)
    learned = summed is not None and bool(other) and not graph.constants[other].is_fixed
    if summed is not None and learned and _learned_axis(graph, other, value) == axis:
        new = summed.changed(kind="ChannelScale", inputs=(value, name, other), attributes=attributes)
        graph.replace([op, summed], new)
    else:
        graph.replace([op], op.changed(kind="ChannelScale", inputs=(value, name, ""), attributes=attributes))


def _learned_axis(graph: Graph, name: str, value: str) -> int:
    """Return the axis of a value with a learned number per element, preferably that of the channels; else 0."""
    axis, extents = _axis_of(graph, name, value), graph.shapes[value]
    if axis is None:
        return next((axis for axis in (1, len(extents) - 1) if extents[axis] == 1), 0)
    return axis


def _residual(graph: Graph, op: OnnxNode) -> None:
    """Fuse a shortcut that is added to the output of a batch norm and followed by a ReLU: one kernel computes all of
    it.
    """
    if op.kind != "Add" or any(name in graph.constants for name in op.inputs):
        return
    after = graph.only_reader(op.outputs[0])
    if after is None or after.kind != "Relu" or len({graph.shapes[name] for name in op.inputs}) > 1:
        return
    for i, name in enumerate(op.inputs):
        norm = graph.maker(name)
        if norm is None or norm.kind != "BatchNormalization" or graph.only_reader(name) is not op:
            continue
        if "activation" in norm.attributes:  # the norm already has a shortcut
            continue
        attributes = {**norm.attributes, "activation": ("Relu", {})}
        joined = norm.changed(inputs=(*norm.inputs, op.inputs[1 - i]), outputs=after.outputs, attributes=attributes)
        graph.replace([norm, op, after], joined)
        return


def _activation(graph: Graph, op: OnnxNode) -> None:
    """Fuse an activation into the layer before it."""
    if op.kind not in _FUSE or "activation" in op.attributes or (op.kind == "Add" and not _are_alike(graph, op)):
        return
    found = _activation_behind(graph, op)
    if found is None or any(_activation_behind(graph, one) != found for one in _calls(graph, op)):
        return
    after = graph.only_reader(op.outputs[0])
    assert after is not None
    outputs = (after.outputs[0], *op.outputs[1:])
    graph.replace([op, after], op.changed(outputs=outputs, attributes={**op.attributes, "activation": found}))


def _are_alike(graph: Graph, op: OnnxNode) -> bool:
    """Return whether all inputs depend on the data and have one shape."""
    return not graph.constants.keys() & set(op.inputs) and len({graph.shapes[name] for name in op.inputs}) == 1


def _calls(graph: Graph, op: OnnxNode) -> list[OnnxNode]:
    """Return the other nodes of the same module (with weights of the same names), which become calls of one layer."""

    def weights(one: OnnxNode) -> set[str]:
        return {graph.constants[name].name for name in one.inputs if name in graph.constants} - {""}

    own = weights(op)
    alike = (one for one in graph.operations if one is not op and (one.kind, one.module) == (op.kind, op.module))
    return [one for one in alike if own & weights(one)]


def _activation_behind(graph: Graph, op: OnnxNode) -> tuple[str, dict[str, Any]] | None:
    """Return kind and attributes of the activation that is fused into an operation or is its only reader."""
    if "activation" in op.attributes:
        fused: tuple[str, dict[str, Any]] = op.attributes["activation"]
        return fused
    after = graph.only_reader(op.outputs[0])
    if after is None or after.kind not in ACTIVATIONS or (after.kind == "HardSigmoid" and not is_hard_sigmoid(after)):
        return None
    # An activation of a network output stays a separate layer, because losses take its input.
    return None if after.outputs[0] in graph.outputs else (after.kind, after.attributes)


#: The order matters: a factor after a norm belongs to the norm.
RULES: Sequence[Callable[[Graph, OnnxNode], None]] = (
    *SPATIAL,
    *DECOMPOSED,
    _nothing,
    _same_by_strides,
    _pixels,
    _channel_shuffle,
    _group_norm,
    _gated_by_itself,
    _gelu,
    _linear,
    _affine,
    _channel_scale,
    attention,
    _residual,
    _activation,
)


def permuted(array: np.ndarray, spatial: Sequence[int]) -> np.ndarray:
    """Return `array` with its last axis, which is in torch's flattened order, in our order.

    torch flattens ``(C, *spatial)``, halograd ``(*spatial, C)``.

    >>> permuted(np.arange(6), (3,)).tolist()  # 2 channels, 3 positions
    [0, 3, 1, 4, 2, 5]
    """
    *before, size = array.shape
    channels = size // math.prod(spatial)
    apart = array.reshape(*before, channels, *spatial)
    return np.moveaxis(apart, len(before), -1).reshape(*before, size)
