"""Import from ONNX: a model exported by torch becomes a network whose layers start with its weights.

An operator becomes layers by one function in a table. The function takes the builder and an operation, and returns the
:class:`Activation` of its first output, or a list with all outputs. It raises `Builder.refused` for an operation that
it cannot express. Window layers, norms, and changes of shape are in separate files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from halograd.errors import UserError

from ..dtensor import axis_names
from ..layers import (
    ELU,
    Abs,
    Add,
    Affine,
    BroadcastAdd,
    ChannelDropout,
    ChannelPad,
    Clamp,
    Concat,
    Conv,
    Dense,
    Dropout,
    Exp,
    Input,
    Layer,
    LocalResponseNorm,
    Log,
    LogSoftmax,
    Multiply,
    Network,
    Node,
    Pad,
    Power,
    PReLU,
    Reshape,
    Resize,
    Softmax,
    StochasticDepth,
)
from ..layers.parameter import ForeignArray, GivenValues
from .attention import ATTENTION
from .constants import joined, numbers_along, with_tokens
from .files import Buffer
from .graph import Activation, Builder, Graph, NeedsPositions, OnnxNode, following
from .norms import NORMS
from .onnx_file import read_onnx
from .own_operators import OWN_OPERATORS
from .patterns import ACTIVATIONS, activation_of, has_numbers_of_torch, permuted, recognize
from .shaping import SHAPING
from .sliding import SLIDING

__all__ = ["OPERATORS", "imported", "load"]

Operator = Callable[[Builder, OnnxNode], "Activation | Sequence[Activation]"]


def load(
    path: str | Path,
    shapes: Mapping[str, Sequence[int]] | None = None,
    buffers: Collection[str] | None = None,
) -> Network:
    """Build a network from an ONNX file that torch has exported. Local; every rank calls it.

    Parameters
    ----------
    path
        The file. Weights outside of it (``external_data``) lie in its folder.
    shapes
        Shapes of samples, ``(*spatial, C)``, by name of the input. They are required if the file leaves extents open;
        else they replace the file's extents.
    buffers
        Names of the module's buffers, ``[name for name, _ in module.named_buffers()]``: they are not trained. Files of
        torch's new exporter contain them. For the old exporter they are required if the module multiplies by an array
        of its own.

    Returns
    -------
    Network
        Inputs and outputs have their names in the file, and samples ``(*spatial, C)``: channels last. Layers have the
        names of torch's modules, if the file has them. There is no loss: add one to an output, and build a network of
        both. Parameters and running statistics start with those of the file, in any network with these nodes
        (`Network.initial_values` returns them as arrays). Each is read from the file when a rank needs it.

    Raises
    ------
    UserError
        The file cannot be read, extents are unknown, or a node has no equivalent here; the message names the node.
    """
    return imported(Path(path), shapes, buffers)


def imported(
    path: Path,
    shapes: Mapping[str, Sequence[int]] | None = None,
    buffers: Collection[str] | None = None,
    contents: Mapping[str, Buffer] | None = None,
) -> Network:
    """Build a network as :func:`load` does, from files in memory if `contents` has them by name. Local."""
    graph = read_onnx(path, shapes or {}, buffers, contents)
    # First, because patterns look for values that are read once.
    graph.leave_out_unread()
    recognize(graph, path)
    keeping: frozenset[str] = frozenset()
    # Whether the axes of a pooling are needed shows only at a later layer; then the network is built again.
    while True:
        try:
            return _built(path, graph, keeping)
        except NeedsPositions as error:
            keeping |= {error.pool}


def _built(path: Path, graph: Graph, keeping: frozenset[str]) -> Network:
    build = Builder(path, graph, keeping)
    for name in graph.inputs:
        _, channels, *spatial = graph.shapes[name]
        build.values[name] = Activation(Input((*spatial, channels), name))
    for op in graph.operations:
        # Attention has been recognized. Checked before the build, so that the error names the cause.
        if op.kind in ("MatMul", "Einsum") and sum(name not in graph.constants for name in op.inputs) > 1:
            remedy = "write it as scaled_dot_product_attention, or put convolutions or gates in its place"
            raise build.refused(op, "attention with a softmax over the keys", "another product of two values", remedy)
    for op in graph.operations:
        if op.kind not in OPERATORS:
            # The cause may be an input in an order of axes that no node has: its error is more exact.
            for name in op.inputs:
                if name in build.values:
                    build.value(op.changed(inputs=(name,)))
            raise build.refused(op, "an operator that has a layer", op.kind)
        with following(path, op):
            nodes = OPERATORS[op.kind](build, op)
            build.values |= dict(zip(op.outputs, [nodes] if isinstance(nodes, Activation) else nodes))
    for name in graph.outputs:
        refusal = build.values[name].refusal
        if refusal is not None:
            raise refusal
        if build.values[name].spatial:
            raise UserError(
                f"{path}: expected outputs with spatial axes or of dense layers, got {name!r}, which is flattened; "
                "export the model without the Flatten at its end"
            )
    try:
        network = Network({name: _output(build.values[name]) for name in graph.outputs}, name=path.stem)
    except ValueError as error:
        raise UserError(f"{path}: cannot build a network from it: {error}") from error
    _check_parts(path, network)
    return network


def _check_parts(path: Path, network: Network) -> None:
    """Raise UserError if several layers would train copies of the same elements of an array.

    It is permitted if each layer has the whole array: exporters merge equal arrays of several norms.
    """
    arrays: dict[str, list[tuple[str, ForeignArray, int]]] = {}
    for name, spec in network.parameters().items():
        if isinstance(spec.init, GivenValues) and spec.init.foreign is not None:
            arrays.setdefault(spec.init.foreign.name, []).append((name, spec.init.foreign, spec.size))
    for title, parts in arrays.items():
        if len(parts) == 1 or all(size == math.prod(array.shape) for _, array, size in parts):
            continue
        used = np.zeros(math.prod(parts[0][1].shape), bool)
        for name, array, _ in parts:
            positions = array.positions()
            if used[positions].any():
                raise UserError(
                    f"{path}: expected weights of its own for {name.rpartition('/')[0]!r}, got elements of {title!r} "
                    "that another layer trains too; use a second parameter in the place of one of them"
                )
            used[positions] = True


def _output(value: Activation) -> Node:
    """Return the node of an output. If an image may have its channels first or last, they are taken as first."""
    # With three dimensions it is a sequence ``(N, L, C)``, which keeps its channels last.
    if value.last and value.source is not None and value.axes is not None and len(value.axes.dims) > 3:
        shape = value.axes.with_channels_at(False)
        if shape is not None:
            return value.source if shape == value.source.shape else Reshape(shape)(value.source)
    return value.node


def _pointwise(make: Callable[[OnnxNode], Layer]) -> Callable[[Builder, OnnxNode], Activation]:
    """Return the importer of an elementwise function, for any order of axes."""

    def operator(build: Builder, op: OnnxNode) -> Activation:
        value = build.arranged(op)
        return value.of(build.add(op, make(op), value.node))

    return operator


def _activation(kind: str) -> Callable[[Builder, OnnxNode], Activation]:
    return _pointwise(lambda op: ACTIVATIONS[kind](op.attributes))


def _celu(build: Builder, op: OnnxNode) -> Activation:
    """Import Celu, ``alpha * elu(x / alpha)`` with an ELU of alpha 1."""
    value, alpha = build.value(op), op.attributes.get("alpha", 1.0)
    node = value.node
    if alpha != 1:
        node = build.add(op.part("argument"), Affine(1 / alpha), node)
    node = build.add(op, ELU(), node)
    if alpha != 1:
        node = build.add(op.part("value"), Affine(alpha), node)
    return value.of(node)


def _selu(build: Builder, op: OnnxNode) -> Activation:
    """Import Selu, a multiple of an ELU. Without attributes, torch's numbers are taken."""
    value = build.value(op)
    alpha, gamma = (op.attributes.get(key, number) for key, number in zip(("alpha", "gamma"), _SELU))
    node = build.add(op.part("elu"), ELU(alpha), value.node)
    return value.of(build.add(op, Affine(gamma), node))


# Alpha and scale of Klambauer et al. 2017 in float64, as in torch; ONNX's defaults are rounded to float32.
_SELU = 1.6732632423543772, 1.0507009873554805


def _with_numbers(build: Builder, op: OnnxNode) -> Activation:
    if not has_numbers_of_torch(op):
        known = {"HardSigmoid": "torch's slope 1 / 6 and offset 1 / 2", "Swish": "x * sigmoid(x), alpha = 1"}
        raise build.refused(op, known[op.kind], f"{op.attributes}")
    return _activation(op.kind)(build, op)


def _prelu(build: Builder, op: OnnxNode) -> Activation:
    value, slope = build.value(op), build.constant(op, 1)
    axes = len(build.shape(op.inputs[0]))
    shape = () if slope is None else (1,) * (axes - len(slope.shape)) + slope.shape
    channels, count = axes - 1 if value.last else 1, math.prod(shape)
    fits = count == 1 or (len(shape) == axes and shape[channels] == count == value.node.shape[-1])
    if slope is None or not fits:
        raise build.refused(op, f"one slope, or one per channel along axis {channels}", f"slopes {shape}")

    def order(array: np.ndarray) -> np.ndarray:
        return permuted(np.ravel(array), value.spatial) if value.spatial and count > 1 else np.ravel(array)

    layer = PReLU("one" if count == 1 else "channel").initialized(slope=build.initial(slope, order, (count,)))
    return value.of(build.add(_flattened_as(op, value), layer, value.node, weights=(slope,)))


def _flattened_as(op: OnnxNode, value: Activation) -> OnnxNode:
    """Return the operation with the order of features as an attribute.

    So it differs from an operation with the same weights whose features were flattened in another order.
    """
    return op.changed(attributes={**op.attributes, "spatial": value.spatial})


def _clip(build: Builder, op: OnnxNode) -> Activation:
    """Import Clip. The largest numbers of float32 do not count as limits."""
    most = float(np.finfo(np.float32).max)
    limits = (op.attributes.get(key, n) for key, n in (("min", -most), ("max", most)))
    low, high = (n if limit is None else limit for n, limit in zip(limits, (_number(build, op, i) for i in (1, 2))))
    if low == 0 and high >= most:
        return _activation("Relu")(build, op)
    return _pointwise(lambda _: Clamp(low if low > -most else -math.inf, high if high < most else math.inf))(build, op)


def _affine(build: Builder, op: OnnxNode) -> Activation:
    """Import products and sums with constants that are not trained."""
    numbers = [op.attributes[key] for key in ("factor", "shift")]
    value = build.arranged(op) if all(isinstance(n, float) for n in numbers) else build.value(op)
    axis = op.attributes["axis"]
    if axis not in (None, build.channels_at(op, value)):
        # An Affine has numbers per channel; along other axes they become arrays that are not trained.
        for key, neutral in (("factor", 1.0), ("shift", 0.0)):
            value = value if op.attributes[key] == neutral else numbers_along(build, op, value, key, axis)
        return value
    if value.spatial:
        numbers = [n if isinstance(n, float) else permuted(np.asarray(n), value.spatial).tolist() for n in numbers]
    return value.of(build.add(op, Affine(*numbers), value.node))


def _number(build: Builder, op: OnnxNode, i: int) -> float | None:
    """Return input `i`, which must be one constant number; None if it is omitted."""
    constant = build.constant(op, i)
    if constant is None:
        return None
    number = constant.scalar()
    if number is None or not constant.is_fixed:
        raise build.refused(op, "a number that is not trained", f"an array {constant.name} {constant.shape}")
    return number


def _dropout(build: Builder, op: OnnxNode) -> Activation:
    """Import Dropout. torch exports it in training mode only; in evaluation mode it exports an Identity."""
    rate = (build.numbers(op, 1) or [op.attributes.get("ratio", 0.5)])[0]
    # The file has the rate in float32; use the shortest decimal number with that value.
    return _pointwise(lambda _: Dropout(float(str(np.float32(rate)))))(build, op)


def _random_factors(build: Builder, op: OnnxNode) -> Activation:
    """Import a dropout that the file has as random factors; their mean must be 1, as the factor in evaluation is."""
    over, scale, kept = (op.attributes[key] for key in ("over", "scale", "kept"))
    if abs(scale * kept - 1) > 1e-3:
        raise build.refused(op, f"values divided by the part that is kept, {kept:.4g}", f"a factor of {scale}")
    value = build.samples(op) if over == "channels" else build.value(op)
    layer = {"elements": Dropout, "channels": ChannelDropout, "samples": StochasticDepth}[over]
    # The file has the scale in float32, and the rate is the difference of two numbers near 1.
    return value.of(build.add(op, layer(round(1 - 1 / scale, 7)), value.node))


def _softmax(build: Builder, op: OnnxNode, kind: type[Layer] = Softmax) -> Activation:
    value = build.value(op)
    axes = len(build.shape(op.inputs[0]))
    channels = axes - 1 if value.last else 1
    if op.attributes.get("axis", -1) % axes != channels:
        raise build.refused(op, "a softmax over the channels", f"axis {op.attributes.get('axis', -1)}")
    return value.of(build.add(op, kind(), value.node))


def _local_response_norm(build: Builder, op: OnnxNode) -> Activation:
    value = build.samples(op)
    size = op.attributes["size"]
    # For an even size, ONNX's windows and torch's (ours) begin one channel from each other.
    if size % 2 == 0:
        raise build.refused(op, "windows of an odd number of channels", f"{size}")
    settings = {name: op.attributes.get(key, default) for name, key, default in _LRN}
    return value.of(build.add(op, LocalResponseNorm(size, **settings), value.node))


def _torch_response_norm(build: Builder, op: OnnxNode) -> Activation:
    """Import torch's local response norm, whose windows are ours, also for an even number of channels."""
    value = build.samples(op)
    return value.of(build.add(op, LocalResponseNorm(**op.attributes), value.node))


#: Our setting, ONNX's attribute, and its default.
_LRN = (("alpha", "alpha", 1e-4), ("beta", "beta", 0.75), ("k", "bias", 1.0))

# -- several inputs --------------------------------------------------------------------------------


def _in_one_order(build: Builder, op: OnnxNode) -> list[Activation]:
    """Return all inputs, which must have one order of axes. If only some of them are pooled, the pooling keeps its
    positions.
    """
    values = [build.arranged(op, i) for i in range(len(op.inputs))]
    # In different orders, each value must be in one that a node has.
    if len({value.axes if value.refusal is not None else None for value in values}) > 1:
        values = [build.value(op, i) for i in range(len(op.inputs))]
    if len({value.pooled for value in values}) > 1:
        pools = [value.pool for value in values if value.pooled]
        if pools[0]:
            raise NeedsPositions(pools[0])
    if len({(value.last, value.pooled, value.spatial) for value in values}) > 1:
        raise build.refused(op, "inputs in one order of axes", "channels first and last, or flattened, side by side")
    return values


def _add(build: Builder, op: OnnxNode) -> Activation:
    if any(name in build.graph.constants for name in op.inputs):
        return joined(build, op)
    if len({build.shape(name) for name in op.inputs}) > 1:
        return _of_two(build, op, BroadcastAdd)
    values = _in_one_order(build, op)
    layer = Add(activation=activation_of(op))
    return values[0].of(build.add(op, layer, *(value.node for value in values)))


def _subtract(build: Builder, op: OnnxNode) -> Activation:
    """Import Sub as a sum with the second value times -1."""
    if any(name in build.graph.constants for name in op.inputs):
        return joined(build, op)
    second, name = build.value(op, 1), f"{op.outputs[0]}::negative"
    build.values[name] = second.of(build.add(op, Affine(-1.0), second.node))
    build.graph.shapes[name] = build.shape(op.inputs[1])
    return _add(build, op.changed(inputs=(op.inputs[0], name)))


def _multiply(build: Builder, op: OnnxNode) -> Activation:
    if any(name in build.graph.constants for name in op.inputs):
        return joined(build, op)
    if op.inputs[0] == op.inputs[1]:
        return _pointwise(lambda _: Power(2))(build, op)
    return _of_two(build, op, Multiply)


def _divide(build: Builder, op: OnnxNode) -> Activation:
    """Import Div. A quotient by a value becomes a product with its reciprocal; that by a constant, a product."""
    if op.inputs[1] in build.graph.constants:
        return joined(build, op)
    second, name = build.value(op, 1), f"{op.outputs[0]}::reciprocal"
    inverse = second.of(build.add(op.part("reciprocal"), Power(-1), second.node))
    if op.inputs[0] in build.graph.constants:
        number = build.graph.constants[op.inputs[0]]
        factor = number.scalar() if number.is_fixed else None
        if factor is None:
            raise build.refused(op, "a number divided by a value", f"an array {number.name or number.shape}")
        return inverse if factor == 1 else inverse.of(build.add(op, Affine(factor), inverse.node))
    build.values[name], build.graph.shapes[name] = inverse, build.shape(op.inputs[1])
    return _of_two(build, op.changed(inputs=(op.inputs[0], name)), Multiply)


def _power(build: Builder, op: OnnxNode) -> Activation:
    """Import a power with a number as exponent."""
    constant = build.graph.constants.get(op.inputs[1])
    exponent = constant.scalar() if constant is not None and constant.is_fixed else None
    if not exponent:
        raise build.refused(op, "a number other than 0 as exponent", "a parameter, or a value that depends on the data")
    return _pointwise(lambda _: Power(exponent))(build, op)


def _where(build: Builder, op: OnnxNode) -> Activation:
    remedy = "write it as clamp() or relu(), or with a mask of zeros and ones: x * mask + number * (1 - mask)"
    raise build.refused(op, "a function without cases", "a comparison, or a choice between two values", remedy)


def _of_two(build: Builder, op: OnnxNode, kind: type[Layer]) -> Activation:
    """Import an operation of two values, one of which may be broadcast."""
    # The larger value first: the other one is broadcast to it.
    large, small = sorted((build.value(op, i) for i in (0, 1)), key=lambda v: -int(np.prod(v.node.shape)))
    if large.last != small.last or large.spatial != small.spatial:
        raise build.refused(op, "values in one order of axes", "channels first and last, or flattened, side by side")
    if len(small.node.shape) == 1 and len(large.node.shape) > 1 and not small.pooled:
        raise build.refused(op, "a value (N, C, 1, 1)", "one of two axes")
    whole = tuple(max(pair) for pair in zip(large.node.shape, small.node.shape))
    if len(small.node.shape) == len(large.node.shape) > 1 and whole[:-1] != large.node.shape[:-1]:
        # Both are broadcast, (H, 1) and (1, W).
        repeated = Resize(size=whole[:-1], mode="nearest")
        large = large.of(build.add(op.part("positions"), repeated, large.node))
    return large.of(build.add(op, kind(), large.node, small.node))


def _concat(build: Builder, op: OnnxNode) -> Activation:
    if len(op.inputs) == 1:
        return build.value(op)
    shape, axis = build.shape(op.outputs[0]), op.attributes["axis"]
    if not -len(shape) <= axis < len(shape):
        raise build.refused(op, f"one of {len(shape)} axes", f"axis {axis}")
    axis %= len(shape)
    # Zeros at the ends become padding; other constants can only be tokens.
    zeros = [name in build.graph.constants and build.graph.constants[name].is_all(0) for name in op.inputs]
    if any(name in build.graph.constants and not zero for name, zero in zip(op.inputs, zeros)):
        return with_tokens(build, op)
    values = _in_one_order(build, op.changed(inputs=tuple(name for name, zero in zip(op.inputs, zeros) if not zero)))
    if values[0].refusal is not None:
        raise values[0].refusal
    if values[0].spatial:
        raise build.refused(op, "samples with spatial axes", "flattened values")
    if axis == 0:
        raise build.refused(op, "values that are joined along the channels or in space", "the axis of samples")
    if any(zeros) or axis != (len(shape) - 1 if values[0].last else 1):
        return _joined_with_positions(build, op, axis)
    return values[0].of(build.add(op, Concat(), *(value.node for value in values)))


def _joined_with_positions(build: Builder, op: OnnxNode, axis: int) -> Activation:
    """Import a concatenation along an axis of samples with spatial axes; zeros at its ends become padding."""
    values = {i: build.value(op, i) for i, name in enumerate(op.inputs) if name not in build.graph.constants}
    values = {i: build.with_positions(op, i) if value.pooled else value for i, value in values.items()}
    first, last, value = min(values), max(values), next(iter(values.values()))
    if list(values) != list(range(first, last + 1)):
        raise build.refused(op, "zeros at the ends", "zeros between values", "pad one of the values")
    # The axis in our order, in which the channels are the last one.
    ours = axis - 1 if value.last else (axis - 2) % len(value.node.shape)
    node, rows = value.node, [build.shape(name)[axis] for name in op.inputs]
    if len(values) > 1:
        layer = Concat(axis=axis_names(len(node.shape) + 1)[1 + ours])
        node = build.add(op, layer, *(part.node for part in values.values()))
    if len(values) < len(rows):
        amounts = [(0, 0)] * len(node.shape)
        amounts[ours] = sum(rows[:first]), sum(rows[last + 1 :])
        *spatial, channels = amounts
        node = build.add(op.part("zeros"), ChannelPad(*channels) if any(channels) else Pad(tuple(spatial)), node)
    return value.of(node)


# -- dense layers ----------------------------------------------------------------------------------


def _gemm(build: Builder, op: OnnxNode) -> Activation:
    numbers = op.attributes
    if numbers.get("alpha", 1.0) != 1 or numbers.get("beta", 1.0) != 1 or numbers.get("transA", 0):
        raise build.refused(op, "x w^T + b", f"{numbers}")
    return _dense(build, op, transposed=bool(numbers.get("transB", 0)))


def _linear(build: Builder, op: OnnxNode) -> Activation:
    """Import torch's Linear, which contracts the last axis; after a Transpose it is a 1 x 1 convolution."""
    return _dense(build, op, transposed=False)


def _dense(build: Builder, op: OnnxNode, transposed: bool) -> Activation:
    """Import a dense layer. With `transposed`, the weights are (units, features), as ours are."""
    value, weights, bias = build.arranged(op), build.constant(op, 1), build.constant(op, 2)
    if weights is None or len(weights.shape) != 2:
        raise build.refused(op, "a matrix of weights", "none")
    arranged = None
    if value.refusal is not None and value.axes is not None:
        # Positions may be in any order, as long as the last axis is that of the channels.
        arranged = value.axes.with_channels(weights.shape[0 if transposed else 1])
        if arranged is None:
            raise value.refusal
    # Exporters write zeros for a missing bias.
    bias = None if bias is None or bias.is_all(0) else bias
    units, features = weights.shape if transposed else weights.shape[::-1]
    if bias is not None and math.prod(bias.shape) != units:
        raise build.refused(op, f"a bias of {units} numbers", f"{bias.shape}")
    if len(value.node.shape) > 1 and not value.last and arranged is None:
        raise build.refused(op, "channels at the last axis", "a spatial axis there")

    def order(array: np.ndarray) -> np.ndarray:
        matrix = array if transposed else array.T
        return permuted(matrix, value.spatial) if value.spatial else matrix

    normed = weights.lengths is not None
    layer: Layer = Dense(units, bias=bias is not None, weight_norm=normed)
    # A dense layer at every position is a 1 x 1 convolution.
    if len(value.node.shape) > 1:
        ones = (1,) * (len(value.node.shape) - 1)
        layer = Conv(units, ones, bias=bias is not None, weight_norm=normed)
        initial = {
            "w": build.initial(weights, lambda a: order(a).reshape(units, *ones, features), (units, *ones, features))
        }
    else:
        initial = {"w": build.initial(weights, order, (units, features))}
    if weights.lengths is not None:
        initial["g"] = build.initial(weights.lengths, np.ravel, (units,))
    if bias is not None:
        initial["b"] = build.initial(bias, np.ravel, (units,))
    arrays = (weights, weights.lengths, bias)
    node = build.add(_flattened_as(op, value), layer.initialized(**initial), value.node, weights=arrays)
    if arranged is not None:
        return Activation(node, source=node, axes=arranged, refusal=value.refusal)
    # Units have no spatial order, unlike flattened features, so `spatial` is not kept.
    return Activation(node, value.last, value.pooled, value.pool)


#: Importers by name of the operator: ONNX's operators, and those that `patterns` creates.
OPERATORS: dict[str, Operator] = {
    "Identity": lambda build, op: build.value(op),
    **{kind: _activation(kind) for kind in ACTIVATIONS},
    "HardSigmoid": _with_numbers,
    "Swish": _with_numbers,
    "Abs": _pointwise(lambda _: Abs()),
    "Exp": _pointwise(lambda _: Exp()),
    "Log": _pointwise(lambda _: Log()),
    "Pow": _power,
    "Reciprocal": _pointwise(lambda _: Power(-1)),
    "Sqrt": _pointwise(lambda _: Power(0.5)),
    **dict.fromkeys(("Where", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"), _where),
    "Celu": _celu,
    "Selu": _selu,
    "Clip": _clip,
    "PRelu": _prelu,
    "Dropout": _dropout,
    "RandomFactors": _random_factors,
    "Softmax": _softmax,
    "LogSoftmax": partial(_softmax, kind=LogSoftmax),
    "Affine": _affine,
    "LRN": _local_response_norm,
    "LocalResponseNorm": _torch_response_norm,
    "Add": _add,
    "Sub": _subtract,
    "Mul": _multiply,
    "Div": _divide,
    "Concat": _concat,
    "Gemm": _gemm,
    "Linear": _linear,
    **OWN_OPERATORS,
    **ATTENTION,
    **SLIDING,
    **NORMS,
    **SHAPING,
}
