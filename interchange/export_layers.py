"""Export of layers as nodes of ONNX: one function per layer, in a table.

A function takes the writer and a node of the network, writes ONNX nodes, and returns the name of their result. Arrays
are ``(N, *spatial, C)`` here and ``(N, C, *spatial)`` in ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..dtensor import Window
from ..kernels.attention import Windows
from ..layers import (
    ELU,
    GELU,
    Abs,
    AdaptiveAveragePool,
    AdaptiveMaxPool,
    Add,
    Affine,
    Attention,
    AveragePool,
    BatchNorm,
    BroadcastAdd,
    ChannelDropout,
    ChannelMax,
    ChannelMean,
    ChannelPad,
    ChannelShuffle,
    Clamp,
    Concat,
    Conv,
    ConvTranspose,
    Dense,
    Dropout,
    Embedding,
    Exp,
    Flatten,
    Flip,
    GlobalAveragePool,
    GlobalMaxPool,
    GroupNorm,
    HardSigmoid,
    HardSwish,
    InstanceNorm,
    Layer,
    LayerNorm,
    LeakyReLU,
    LocalResponseNorm,
    Log,
    LogSoftmax,
    MaxPool,
    Mish,
    Multiply,
    Node,
    Pad,
    PixelShuffle,
    PixelUnshuffle,
    Power,
    PReLU,
    Redistribute,
    ReLU,
    Reshape,
    Resize,
    RMSNorm,
    Roll,
    Scale,
    Sigmoid,
    SiLU,
    Slice,
    Softmax,
    Softplus,
    StochasticDepth,
    Tanh,
    Token,
)
from ..layers.activation import inside
from ..layers.padding import PadAxis, PadPole
from ..layers.reshape import ReshapedMap
from .onnx_writer import OnnxWriter

__all__ = ["LAYERS", "first_axes"]


def first_axes(axes: int) -> list[int]:
    """Return the permutation of `axes` axes that moves channels from last to second, after samples."""
    return [0, axes - 1, *range(1, axes - 1)]


def _weights(w: OnnxWriter, node: Node, order: Callable[[np.ndarray], np.ndarray] = np.asarray) -> list[str]:
    """Write the effective weights and, if there is one, the bias; return their names."""
    bias, lengths = w.parameter(node, "b"), w.parameter(node, "g")
    weights = np.asarray(w.parameter(node, "w"))
    if lengths is not None:
        # The files hold w * g / |w| (weight normalization), computed in float64 because the norm is a long sum.
        rows = np.asarray(weights, np.float64).reshape(len(weights), -1)
        scale = np.asarray(lengths, np.float64) / np.sqrt(np.square(rows).sum(axis=1))
        weights = (rows * scale[:, None]).reshape(weights.shape)
    names = [w.weight(node, "weight", order(weights))]
    return names if bias is None else [*names, w.weight(node, "bias", bias)]


def _channels_second(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(array, -1, 1)


def _activated(w: OnnxWriter, layer: Any, value: str) -> str:
    """Write the fused activation of a layer, if it has one; return the name of the result."""
    activation = inside(layer)
    if activation is None:
        return value
    return _FUNCTIONS[type(activation)](w, activation, value, f"{value} {layer.activation}")


def _window(windows: tuple[Window, ...]) -> dict[str, list[int]]:
    return {
        "kernel_shape": [window.kernel for window in windows],
        "strides": [window.stride for window in windows],
        "dilations": [window.dilation for window in windows],
        "pads": [*(window.pad_lo for window in windows), *(window.pad_hi for window in windows)],
    }


# -- layers on windows -----------------------------------------------------------------------------


def _conv(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    attributes = _window(layer.windows(node.inputs[0].shape))
    inputs = [*w.inputs(node), *_weights(w, node, _channels_second)]
    return _activated(w, layer, w.add("Conv", inputs, f"{w.name(node)}::y", group=layer.groups, **attributes))


def _conv_transpose(w: OnnxWriter, node: Node) -> str:
    """Export a transposed convolution; negative padding at the end becomes output padding in ONNX."""
    layer: Any = node.layer
    windows = layer.windows(node.inputs[0].shape)
    attributes = _window(windows)
    attributes["pads"] = [*(window.pad_lo for window in windows), *(max(window.pad_hi, 0) for window in windows)]
    more = [max(-window.pad_hi, 0) for window in windows]
    inputs = [*w.inputs(node), *_weights(w, node, _channels_second)]
    output = f"{w.name(node)}::y"
    return w.add("ConvTranspose", inputs, output, group=layer.groups, output_padding=more, **attributes)


def _max_pool(w: OnnxWriter, node: Node) -> str:
    return w.add("MaxPool", w.inputs(node), f"{w.name(node)}::y", **_window(node.layer.windows(node.inputs[0].shape)))


def _average_pool(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    attributes: dict[str, Any] = _window(layer.windows(node.inputs[0].shape))
    attributes["count_include_pad"] = int(layer.counts_all)
    return w.add("AveragePool", w.inputs(node), f"{w.name(node)}::y", **attributes)


def _global_pool(kind: str) -> Callable[[OnnxWriter, Node], str]:
    def write(w: OnnxWriter, node: Node) -> str:
        pooled = w.add(kind, w.inputs(node), f"{w.name(node)}::pooled")
        return w.add("Flatten", [pooled], f"{w.name(node)}::y")

    return write


def _means(w: OnnxWriter, node: Node) -> str:
    """Export means over windows of unequal size (adaptive, area), which ONNX lacks, as one matrix product per axis."""
    layer: Any = node.layer
    (value,), shape, name = w.inputs(node), node.inputs[0].shape, w.name(node)
    axes = "dhw"[4 - len(shape) :]
    for axis, resampling in zip(axes, layer.resamplings(shape)):
        ranges = [resampling.input_range(o, o + 1) for o in range(resampling.outputs)]
        matrix = [[(a <= i < b) / (b - a) for i in range(resampling.size)] for a, b in ranges]
        weights = w.numbers(f"{name}::{axis}", matrix)
        equation = f"nc{axes},o{axis}->nc{axes.replace(axis, 'o')}"
        value = w.add("Einsum", [value, weights], f"{name}::by {axis}", equation=equation)
    return value


def _over_channels(kind: str) -> Callable[[OnnxWriter, Node], str]:
    def write(w: OnnxWriter, node: Node) -> str:
        name, (value,) = w.name(node), w.inputs(node)
        inputs = [value, w.numbers(f"{name}::axes", [1], np.int64)]
        return w.add(kind, inputs, f"{name}::y", keepdims=1)

    return write


def _power(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    name, (value,) = w.name(node), w.inputs(node)
    if layer.exponent in (0.5, -1):
        return w.add("Sqrt" if layer.exponent > 0 else "Reciprocal", [value], f"{name}::y")
    return w.add("Pow", [value, w.numbers(f"{name}::exponent", layer.exponent)], f"{name}::y")


def _flip(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    name, (value,), channel = w.name(node), w.inputs(node), len(node.shape) - 1
    axes = [1 if axis == channel else axis + 2 for axis in layer.flipped_axes(node.shape)]
    # An end before the first element: -1 would mean the last one.
    rows = {"starts": [-1] * len(axes), "ends": [-(2**31)] * len(axes), "axes": axes, "steps": [-1] * len(axes)}
    inputs = [w.numbers(f"{name}::{key}", numbers, np.int64) for key, numbers in rows.items()]
    return w.add("Slice", [value, *inputs], f"{name}::y")


def _adaptive_max(w: OnnxWriter, node: Node) -> str:
    whole, outputs = node.inputs[0].shape[:-1], node.shape[:-1]
    # The windows of MaxPool have one size.
    if any(n % m for n, m in zip(whole, outputs)):
        raise w.refused(node, f"a number of outputs that divides {whole}", f"{outputs}")
    kernel = [n // m for n, m in zip(whole, outputs)]
    return w.add("MaxPool", w.inputs(node), f"{w.name(node)}::y", kernel_shape=kernel, strides=kernel)


#: ONNX's attributes for our modes, by default with half-pixel centers; -0.75 is the coefficient of torch.
_MODES: dict[str, dict[str, Any]] = {
    "nearest": {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    "nearest-exact": {"mode": "nearest", "nearest_mode": "round_prefer_ceil"},
    "linear": {"mode": "linear"},
    "cubic": {"mode": "cubic", "cubic_coeff_a": -0.75},
}


def _resize(w: OnnxWriter, node: Node) -> str:
    """Export a resize by sizes with aligned corners, or if sizes give the scale exactly; else by scales.

    The mode ``"area"`` is exported as means.
    """
    layer: Any = node.layer
    shape, name = node.inputs[0].shape, w.name(node)
    resamplings = layer.resamplings(shape)
    mode = next((known for known in ("linear", "cubic") if layer.mode.endswith(known)), layer.mode)
    if mode == "area":
        return _means(w, node)
    attributes: dict[str, Any] = {"axes": list(range(2, len(shape) + 1)), **_MODES[mode]}
    if layer.align_corners:
        attributes["coordinate_transformation_mode"] = "align_corners"
    # From sizes, ONNX takes outputs / size as the scale, which differs from the layer's if the outputs were rounded.
    exact = all(resampling.ratio * resampling.outputs == resampling.size for resampling in resamplings)
    if layer.align_corners or exact:
        sizes = w.numbers(f"{name}::sizes", [resampling.outputs for resampling in resamplings], np.int64)
        return w.add("Resize", [*w.inputs(node), "", "", sizes], f"{name}::y", **attributes)
    scales = w.numbers(f"{name}::scales", [float(1 / resampling.ratio) for resampling in resamplings], np.float32)
    return w.add("Resize", [*w.inputs(node), "", scales], f"{name}::y", **attributes)


# -- dense layers, norms ---------------------------------------------------------------------------


def _dense(w: OnnxWriter, node: Node) -> str:
    # Our weights are (units, features), as torch's.
    return w.add("Gemm", [*w.inputs(node), *_weights(w, node)], f"{w.name(node)}::y", transB=1)


def _affine(w: OnnxWriter, node: Node, shape: tuple[int, ...]) -> list[str]:
    """Write the factor and summand of each channel, ones and zeros for a layer without them; return their names."""
    name, names = w.name(node), []
    for key, label, number in (("gamma", "weight", 1), ("beta", "bias", 0)):
        array = w.parameter(node, key)
        if array is None:
            names.append(w.numbers(f"{name}::{label}", np.full(shape, number)))
        else:
            names.append(w.weight(node, label, np.reshape(array, shape)))
    return names


def _batch_norm(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    name = w.name(node)
    inputs = [w.inputs(node)[0], *_affine(w, node, node.shape[-1:])]
    for key in ("mean", "var"):
        inputs.append(w.weight(node, f"running_{key}", w.parameter(node, key)))
    # ONNX's momentum is the share of the old statistics, ours that of the new ones.
    y = w.add("BatchNormalization", inputs, f"{name}::y", epsilon=layer.eps, momentum=1 - layer.momentum)
    if len(node.inputs) > 1:
        y = w.add("Add", [y, w.inputs(node)[1]], f"{name}::sum")
    return y if layer.fused(len(node.inputs)) is None else _activated(w, layer, y)


def _group_norm(w: OnnxWriter, node: Node) -> str:
    """Export a group norm as torch does: an instance norm over groups as channels, then a factor and a summand."""
    layer: Any = node.layer
    name, (*spatial, channels) = w.name(node), node.shape
    groups = layer.group_count(channels)
    # In shapes of ONNX, 0 keeps an extent (here any number of samples), and -1 stands for the rest.
    grouped = w.add(
        "Reshape", [*w.inputs(node), w.numbers(f"{name}::groups", [0, groups, -1], np.int64)], f"{name}::separate"
    )
    plain = [w.numbers(f"{name}::{what}", np.full(groups, n)) for what, n in (("ones", 1), ("zeros", 0))]
    normed = w.add("InstanceNormalization", [grouped, *plain], f"{name}::normed", epsilon=layer.eps)
    whole = w.numbers(f"{name}::shape", [0, channels, *spatial], np.int64)
    y = w.add("Reshape", [normed, whole], f"{name}::whole")
    if layer.affine:
        scale, shift = _affine(w, node, (channels, *(1 for _ in spatial)))
        y = w.add("Mul", [y, scale], f"{name}::scaled")
        y = w.add("Add", [y, shift], f"{name}::y")
    return _activated(w, layer, y)


def _layer_norm(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    if layer.axes == "sample":
        return _group_norm(w, node)
    name, axes, (value,) = w.name(node), len(node.shape) + 1, w.inputs(node)
    # The operator normalizes the last axis, so the channels move there and back.
    if axes > 2:
        value = w.add("Transpose", [value], f"{name}::last", perm=[0, *range(2, axes), 1])
    inputs = [value, *_affine(w, node, node.shape[-1:])]
    value = w.add("LayerNormalization", inputs, f"{name}::normed", axis=-1, epsilon=layer.eps)
    if axes > 2:
        value = w.add("Transpose", [value], f"{name}::y", perm=first_axes(axes))
    return _activated(w, layer, value)


def _rms_norm(w: OnnxWriter, node: Node) -> str:
    """Export an RMS norm as elementary operators; the operator for it is newer than the opset of our files."""
    layer: Any = node.layer
    name, (value,) = w.name(node), w.inputs(node)
    square = w.add("Mul", [value, value], f"{name}::square")
    mean = w.add("ReduceMean", [square, w.numbers(f"{name}::axes", [1], np.int64)], f"{name}::mean", keepdims=1)
    shifted = w.add("Add", [mean, w.numbers(f"{name}::eps", layer.eps_of(w.dtype))], f"{name}::shifted")
    y = w.add("Div", [value, w.add("Sqrt", [shifted], f"{name}::root")], f"{name}::normed")
    if layer.affine:
        gamma = w.weight(node, "weight", np.reshape(_of(w, node, "gamma"), (-1, *(1 for _ in node.shape[:-1]))))
        y = w.add("Mul", [y, gamma], f"{name}::y")
    return _activated(w, layer, y)


def _local_response_norm(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    # For an even size, ONNX's windows and torch's (ours) begin one channel from each other.
    if layer.size % 2 == 0:
        raise w.refused(node, "windows of an odd number of channels", f"{layer.size}")
    attributes = {"size": layer.size, "alpha": layer.alpha, "beta": layer.beta, "bias": layer.k}
    return w.add("LRN", w.inputs(node), f"{w.name(node)}::y", **attributes)


# -- pointwise layers ------------------------------------------------------------------------------


#: Exporter of an elementwise function: writes it for a layer and an input value, with a name for the result.
_Function = Callable[["OnnxWriter", Any, str, str], str]


def _pointwise(kind: str, **attributes: str | float) -> _Function:
    """Return the exporter of an operator. A string in `attributes` is the name of the layer's attribute that has the
    value.
    """

    def write(w: OnnxWriter, layer: Any, value: str, name: str) -> str:
        numbers = {k: getattr(layer, v) if isinstance(v, str) else v for k, v in attributes.items()}
        return w.add(kind, [value], f"{name}::y", **numbers)

    return write


def _silu(w: OnnxWriter, layer: Any, value: str, name: str) -> str:
    return w.add("Mul", [value, w.add("Sigmoid", [value], f"{name}::gate")], f"{name}::y")


def _mish(w: OnnxWriter, layer: Any, value: str, name: str) -> str:
    gate = w.add("Tanh", [w.add("Softplus", [value], f"{name}::softplus")], f"{name}::gate")
    return w.add("Mul", [value, gate], f"{name}::y")


def _numbers(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    (value,), name, ones = w.inputs(node), w.name(node), [1 for _ in node.shape[:-1]]
    # One number per channel is broadcast over the spatial axes, which come after the channels in ONNX.
    factor, shift = (np.reshape(n, (-1, *ones) if isinstance(n, tuple) else ()) for n in (layer.factor, layer.shift))
    if layer.factor != 1:
        value = w.add("Mul", [value, w.numbers(f"{name}::factor", factor)], f"{name}::multiplied")
    return w.add("Add", [value, w.numbers(f"{name}::shift", shift)], f"{name}::y")


def _scale(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    label = "weight" if layer.bias or layer.axes == ("channel",) else ""
    y = w.add("Mul", [*w.inputs(node), _along(w, node, "gamma", label)], f"{w.name(node)}::y")
    return w.add("Add", [y, _along(w, node, "beta", "bias")], f"{w.name(node)}::shifted") if layer.bias else y


def _embedding(w: OnnxWriter, node: Node) -> str:
    return w.add("Add", [*w.inputs(node), _along(w, node, "w", "")], f"{w.name(node)}::y")


def _along(w: OnnxWriter, node: Node, key: str, label: str) -> str:
    """Write an array per channel ``(C,)`` or with the axes of a sample so that it broadcasts to ``(N, C, *spatial)``.

    Returns its name in the file.
    """
    array, axes = _of(w, node, key), len(node.shape)
    array = np.moveaxis(array.reshape((1,) * (axes - array.ndim) + array.shape), -1, 0)
    # Not trained: a constant in the file, which is no weight.
    if key in node.layer.state(node.inputs[0].shape):
        return w.numbers(f"{w.name(node)}::{key}", array)
    return w.weight(node, label, array)


def _token(w: OnnxWriter, node: Node) -> str:
    """Export Token as torch does: its tokens, expanded over samples, are concatenated before the sequence."""
    name, (value,) = w.name(node), w.inputs(node)
    rows = w.weight(node, "", np.moveaxis(_of(w, node, "w"), -1, 0)[None])
    batch = w.add("Shape", [value], f"{name}::batch", start=0, end=1)
    shape = w.add("Concat", [batch, w.numbers(f"{name}::ones", [1, 1], np.int64)], f"{name}::shape", axis=0)
    every = w.add("Expand", [rows, shape], f"{name}::rows")
    return w.add("Concat", [every, value], f"{name}::y", axis=2)


def _prelu(w: OnnxWriter, node: Node) -> str:
    slope = _of(w, node, "slope")
    weight = w.weight(node, "weight", slope.reshape(len(slope), *(1 for _ in node.shape[:-1])))
    return w.add("PRelu", [*w.inputs(node), weight], f"{w.name(node)}::y")


def _of(w: OnnxWriter, node: Node, key: str) -> np.ndarray:
    return np.asarray(w.parameter(node, key))


def _clip(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    name, most = w.name(node), float(np.finfo(np.float32).max)
    # Infinite limits are written as the largest numbers, which the import takes for no limits.
    limits = (("low", max(layer.low, -most)), ("high", min(layer.high, most)))
    return w.add("Clip", [*w.inputs(node), *(w.numbers(f"{name}::{k}", n) for k, n in limits)], f"{name}::y")


def _same(w: OnnxWriter, node: Node) -> str:
    """Export a layer that is the identity in evaluation or on one process: return the name of its input."""
    return w.inputs(node)[0]


# -- several inputs, changes of shape --------------------------------------------------------------


def _add(w: OnnxWriter, node: Node) -> str:
    total, *others = w.inputs(node)
    for i, other in enumerate(others):
        total = w.add("Add", [total, other], f"{w.name(node)}::{i}")
    return _activated(w, node.layer, total)


def _of_two(kind: str, w: OnnxWriter, node: Node) -> str:
    """Export a layer of two inputs; a vector per sample is broadcast over all positions."""
    (x, g), name = w.inputs(node), w.name(node)
    if len(node.inputs[1].shape) < len(node.shape):
        shape = w.numbers(f"{name}::shape", [0, -1, *(1 for _ in node.shape[:-1])], np.int64)
        g = w.add("Reshape", [g, shape], f"{name}::gate")
    return w.add(kind, [x, g], f"{name}::y")


def _concat(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    axis, channels = layer.along(node.shape), len(node.shape) - 1
    return w.add("Concat", w.inputs(node), f"{w.name(node)}::y", axis=1 if axis == channels else axis + 2)


def _flatten(w: OnnxWriter, node: Node) -> str:
    """Export Flatten in our order: channels vary fastest."""
    axes, name, (value,) = len(node.inputs[0].shape) + 1, w.name(node), w.inputs(node)
    if axes > 2:
        value = w.add("Transpose", [value], f"{name}::last", perm=[0, *range(2, axes), 1])
    return w.add("Flatten", [value], f"{name}::y")


def _reshape(w: OnnxWriter, node: Node) -> str:
    """Export Reshape in our order: channels vary fastest."""
    (value,), name, axes, before = w.inputs(node), w.name(node), len(node.shape) + 1, len(node.inputs[0].shape) + 1
    if before > 2:
        value = w.add("Transpose", [value], f"{name}::separate", perm=[0, *range(2, before), 1])
    shape = w.numbers(f"{name}::shape", [0, *node.shape], np.int64)
    value = w.add("Reshape", [value, shape], f"{name}::last")
    return w.add("Transpose", [value], f"{name}::y", perm=first_axes(axes))


def _pixels(w: OnnxWriter, node: Node) -> str:
    """Export a pixel shuffle: positions in a cell become separate axes, which are transposed."""
    layer: Any = node.layer
    (value,), name, d = w.inputs(node), w.name(node), len(node.shape) - 1
    fine, coarse = sorted((node.inputs[0].shape, node.shape), key=lambda shape: shape[-1])
    parts, channels, outside = [layer.factor] * d, fine[-1], list(coarse[:-1])
    # (N, C, r, r, H, W) -> (N, C, H, r, W, r)
    if node.shape == fine:
        split, order = [0, channels, *parts, *outside], [0, 1, *(i for a in range(d) for i in (2 + d + a, 2 + a))]
    else:
        # (N, C, H, r, W, r) -> (N, C, r, r, H, W), or with the cell before the channels, (N, r, r, C, H, W).
        split = [0, channels, *(n for extent in outside for n in (extent, layer.factor))]
        cells, outer = list(range(3, 2 + 2 * d, 2)), list(range(2, 2 + 2 * d, 2))
        order = [0, 1, *cells, *outer] if layer.order == "channel" else [0, *cells[::-1], 1, *outer]
    value = w.add("Reshape", [value, w.numbers(f"{name}::split", split, np.int64)], f"{name}::separate")
    value = w.add("Transpose", [value], f"{name}::moved", perm=order)
    whole = w.numbers(f"{name}::shape", [0, node.shape[-1], *node.shape[:-1]], np.int64)
    return w.add("Reshape", [value, whole], f"{name}::y")


def _shuffle(w: OnnxWriter, node: Node) -> str:
    """Export a channel shuffle: groups become a separate axis, which is transposed."""
    layer: Any = node.layer
    (value,), name, (*spatial, channels) = w.inputs(node), w.name(node), node.shape
    split = [0, layer.groups, channels // layer.groups, *spatial]
    value = w.add("Reshape", [value, w.numbers(f"{name}::split", split, np.int64)], f"{name}::separate")
    # (N, groups, C / groups, *spatial) -> (N, C / groups, groups, *spatial)
    value = w.add("Transpose", [value], f"{name}::moved", perm=[0, 2, 1, *range(3, 3 + len(spatial))])
    whole = w.numbers(f"{name}::shape", [0, channels, *spatial], np.int64)
    return w.add("Reshape", [value, whole], f"{name}::y")


def _padded(w: OnnxWriter, node: Node, amounts: list[tuple[int, int]], mode: str, value: float = 0.0) -> str:
    """Export padding by `amounts` (elements before and after, per axis of a sample), with constant `value`."""
    every = [(0, 0), amounts[-1], *amounts[:-1]]
    name = w.name(node)
    pads = w.numbers(f"{name}::pads", [low for low, _ in every] + [high for _, high in every], np.int64)
    inputs = [*w.inputs(node), pads, *([w.numbers(f"{name}::value", value)] if mode == "constant" else [])]
    return w.add("Pad", inputs, f"{name}::y", mode=mode)


def _pad(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    before = node.inputs[0].shape
    amounts = [(low, after - n - low) for low, n, after in zip(layer.shifts(before), before, node.shape)]
    return _padded(w, node, amounts, "constant", layer.value)


def _pad_axis(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    amounts = [(layer.low, layer.high) if axis == layer.axis else (0, 0) for axis in range(len(node.shape))]
    mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[layer.mode]
    return _padded(w, node, amounts, mode)


def _pad_pole(w: OnnxWriter, node: Node) -> str:
    """Export rows across the poles as mirrored slices that are shifted by half a circle, and a concatenation."""
    layer: Any = node.layer
    name, shape, axis, (value,) = w.name(node), node.inputs[0].shape, layer.axis + 2, w.inputs(node)
    parts = []
    north, _, south = layer.spans(shape[layer.axis])
    for label, span in (("north", north), ("south", south)):
        if span.rows[0] == span.rows[1]:
            continue
        (first, last), output = span.source(*span.rows), f"{name}::{label}"
        # An end before row 0 cannot be -1, which means the last row.
        rows = _rows(w, value, output, axis, last - 1, first - 1 if first else -(2**31), -1)
        rows = _rolled(
            w, rows, f"{output} turned", layer.longitude + 2, shape[layer.longitude], shape[layer.longitude] // 2
        )
        # Components of vectors change their sign across a pole.
        if np.any(np.asarray(layer.sign) != 1):
            sign = np.reshape(layer.sign, (-1, *(1 for _ in shape[:-1])))
            rows = w.add("Mul", [rows, w.numbers(f"{output} sign", sign)], f"{output} signed")
        parts.append((label, rows))
    values = {"within": value, **dict(parts)}
    return w.add("Concat", [values[k] for k in ("north", "within", "south") if k in values], f"{name}::y", axis=axis)


def _roll(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    (value,), name, shape = w.inputs(node), w.name(node), node.shape
    # Shifts are those of the spatial axes only: `zip` leaves the channels out.
    for axis, (n, shift) in enumerate(zip(shape, layer.shifts(shape))):
        value = _rolled(w, value, f"{name}::{axis}", axis + 2, n, shift)
    return value


def _rolled(w: OnnxWriter, value: str, name: str, axis: int, extent: int, shift: int) -> str:
    """Export a circular shift by ``0 <= shift < extent`` as two slices and a concatenation."""
    if not shift:
        return value
    ends = _rows(w, value, f"{name} end", axis, extent - shift, extent)
    return w.add("Concat", [ends, _rows(w, value, f"{name} begin", axis, 0, extent - shift)], f"{name} y", axis=axis)


def _rows(w: OnnxWriter, value: str, name: str, axis: int, first: int, last: int, step: int = 1) -> str:
    """Export a slice along one axis."""
    numbers = (("first", first), ("last", last), ("axis", axis), ("step", step))
    inputs = [w.numbers(f"{name} {key}", [n], np.int64) for key, n in numbers if key != "step" or n != 1]
    return w.add("Slice", [value, *inputs], name)


def _slice(w: OnnxWriter, node: Node) -> str:
    layer: Any = node.layer
    name, along = w.name(node), layer.along(node.inputs[0].shape)
    axis = 1 if along == len(node.shape) - 1 else along + 2
    pairs = (("first", layer.first), ("last", layer.last), ("axis", axis))
    inputs = [*w.inputs(node), *(w.numbers(f"{name}::{k}", [n], np.int64) for k, n in pairs)]
    return w.add("Slice", inputs, f"{name}::y")


# -- attention -------------------------------------------------------------------------------------

#: Most pairs of a query and a key that constants of a file describe: biases of relative positions, neighborhoods.
_MOST_PAIRS = 1 << 24


def _attention(w: OnnxWriter, node: Node) -> str:
    """Export Attention as products with the whole matrix of scores of each window; without windows, a sample is one.

    Rows are padded to whole windows, and the weights of padded keys are zero.
    """
    layer: Any = node.layer
    name, queries, keys = w.name(node), node.inputs[0].shape, node.inputs[1].shape
    reaches, groups = layer.reaches(queries, keys), layer.heads * keys[-1] // queries[-1]
    # Keys and values have `groups` heads, each of which `layer.heads // groups` heads of queries read.
    heads = (groups, layer.heads // groups)
    cells = [_Cells.of(reach) for reach in reaches]
    q, k, v = (
        _in_cells(w, value, f"{name}::{key}", cells, heads if key == "q" else (groups, 1), source.shape[-1], key)
        for value, source, key in zip(w.inputs(node), node.inputs, "qkv")
    )
    # Of queries and of keys in a window: (axes, positions).
    positions = [np.indices([extents[side] for extents in (c.extents for c in cells)]).reshape(len(cells), -1)
                 for side in (0, 1)]  # fmt: skip
    scores = w.add("MatMul", [q, k], f"{name}::products")
    scale = 1 / math.sqrt(queries[-1] // layer.heads) if layer.scale is None else layer.scale
    scores = w.add("Mul", [scores, w.numbers(f"{name}::factor", scale)], f"{name}::scores")
    bias = w.parameter(node, "bias")
    everywhere = all(
        reach.allowed(*p).all() for reach, *p in zip(reaches, *positions) if not isinstance(reach, Windows)
    )
    if (bias is not None or not everywhere) and positions[0].shape[1] * positions[1].shape[1] > _MOST_PAIRS:
        raise w.refused(node, f"at most {_MOST_PAIRS} pairs of a query and a key", f"{queries} and {keys}")
    if bias is not None:
        flat = np.zeros((positions[0].shape[1], positions[1].shape[1]), np.int64)
        for reach, p, t in zip(reaches, *positions):
            # Pairs beyond the table are masked below, so they may read any entry of it.
            index = (p[:, None] - t) // reach.dilation + reach.extent - 1
            flat = flat * reach.bias_extent + np.clip(index, 0, reach.bias_extent - 1)
        table = w.weight(node, "bias", np.reshape(bias, (layer.heads, -1)))
        rows = w.add("Gather", [table, w.numbers(f"{name}::index", flat, np.int64)], f"{name}::rows", axis=1)
        whole = w.numbers(f"{name}::heads", [*heads, *flat.shape], np.int64)
        scores = w.add("Add", [scores, w.add("Reshape", [rows, whole], f"{name}::bias")], f"{name}::biased")
    mask = _closed(reaches, cells, positions)
    if mask.any():
        closed = w.numbers(f"{name}::closed", np.where(mask, np.finfo(w.dtype).min, 0.0))
        scores = w.add("Add", [scores, closed], f"{name}::masked")
    y = w.add("MatMul", [w.add("Softmax", [scores], f"{name}::weights", axis=-1), v], f"{name}::means")
    return _from_cells(w, y, name, cells, layer.heads, node.shape)


class _Cells(NamedTuple):
    """Windows along one axis: their number, extents for queries and keys, and the rows of padding at both ends."""

    number: int
    extents: tuple[int, int]
    pads: tuple[int, int]

    @classmethod
    def of(cls, reach: Any) -> _Cells:
        if not isinstance(reach, Windows):
            return cls(1, (reach.queries, reach.keys), (0, 0))
        # Windows begin at shift + k * extent: padding completes the first and the last one.
        low = -reach.shift % reach.extent
        high = -(reach.size + low) % reach.extent
        return cls((low + reach.size + high) // reach.extent, (reach.extent, reach.extent), (low, high))


def _closed(reaches: Sequence[Any], cells: Sequence[_Cells], positions: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mask of the keys that a query does not read.

    It can be broadcast to ``(windows, heads, heads per group, queries, keys)``.
    """
    if not all(isinstance(reach, Windows) for reach in reaches):
        # No windows: one mask ``(queries, keys)`` for all samples and heads.
        allowed = np.ones((positions[0].shape[1], positions[1].shape[1]), bool)
        for reach, p, t in zip(reaches, *positions):
            allowed &= reach.allowed(p, t)
        return ~allowed
    rows = []
    for reach, cell in zip(reaches, cells):
        # In windows, only the keys of the padding are closed: ``(number, extent)`` along this axis.
        at = np.arange(cell.number * cell.extents[1]) - cell.pads[0]
        rows.append(((at < 0) | (at >= reach.size)).reshape(cell.number, -1))
    closed = np.zeros((1,) * (2 * len(cells)), bool)
    for axis, own in enumerate(rows):
        shape = [1] * (2 * len(cells))
        shape[axis], shape[len(cells) + axis] = own.shape
        closed = closed | own.reshape(shape)
    return closed.reshape(math.prod(cell.number for cell in cells), 1, 1, 1, -1)


def _in_cells(
    w: OnnxWriter, value: str, name: str, cells: Sequence[_Cells], heads: tuple[int, int], channels: int, key: str
) -> str:
    """Convert ``(N, C, *spatial)`` to ``(N, windows, heads, heads per group, positions, channels of a head)``.

    The last two axes of the keys (`key` is ``"k"``) are exchanged.
    """
    if any(cell.pads != (0, 0) for cell in cells):
        pads = [0, 0, *(cell.pads[0] for cell in cells), 0, 0, *(cell.pads[1] for cell in cells)]
        value = w.add("Pad", [value, w.numbers(f"{name} pads", pads, np.int64)], f"{name} padded")
    extents = [cell.extents[key != "q"] for cell in cells]
    parts = [n for cell, extent in zip(cells, extents) for n in (cell.number, extent)]
    split = w.numbers(f"{name} split", [0, *heads, channels // math.prod(heads), *parts], np.int64)
    value = w.add("Reshape", [value, split], f"{name} separate")
    # (N, *heads, channels, window, position, ...) -> (N, *windows, *heads, *positions, channels)
    outer, inner = range(4, 4 + len(parts), 2), range(5, 4 + len(parts), 2)
    last = [3, *inner] if key == "k" else [*inner, 3]
    value = w.add("Transpose", [value], f"{name} moved", perm=[0, *outer, 1, 2, *last])
    ends = [channels // math.prod(heads), math.prod(extents)]
    shape = [0, math.prod(cell.number for cell in cells), *heads, *(ends if key == "k" else ends[::-1])]
    return w.add("Reshape", [value, w.numbers(f"{name} shape", shape, np.int64)], f"{name} cells")


def _from_cells(w: OnnxWriter, value: str, name: str, cells: Sequence[_Cells], heads: int, shape: Sequence[int]) -> str:
    """Convert the result of attention back to ``(N, C, *spatial)``."""
    axes, width = len(cells), shape[-1] // heads
    counts, extents = [cell.number for cell in cells], [cell.extents[0] for cell in cells]
    split = w.numbers(f"{name}::split", [0, *counts, heads, *extents, width], np.int64)
    value = w.add("Reshape", [value, split], f"{name}::separate")
    # (N, *windows, heads, *positions, channels) -> (N, heads, channels, window, position, ...)
    order = [i for axis in range(axes) for i in (1 + axis, 2 + axes + axis)]
    value = w.add("Transpose", [value], f"{name}::moved", perm=[0, 1 + axes, 2 + 2 * axes, *order])
    whole = [0, shape[-1], *(n * extent for n, extent in zip(counts, extents))]
    value = w.add("Reshape", [value, w.numbers(f"{name}::shape", whole, np.int64)], f"{name}::y")
    # Drop the rows of the padding.
    for axis, (cell, n) in enumerate(zip(cells, shape)):
        if cell.pads != (0, 0):
            value = _rows(w, value, f"{name}::y {axis}", axis + 2, cell.pads[0], cell.pads[0] + n)
    return value


_FUNCTIONS: dict[type[Layer], _Function] = {
    ReLU: _pointwise("Relu"),
    LeakyReLU: _pointwise("LeakyRelu", alpha="alpha"),
    Sigmoid: _pointwise("Sigmoid"),
    Tanh: _pointwise("Tanh"),
    Abs: _pointwise("Abs"),
    Exp: _pointwise("Exp"),
    Log: _pointwise("Log"),
    GELU: _pointwise("Gelu", approximate="approximate"),
    SiLU: _silu,
    ELU: _pointwise("Elu", alpha="alpha"),
    HardSigmoid: _pointwise("HardSigmoid", alpha=1 / 6, beta=0.5),
    HardSwish: _pointwise("HardSwish"),
    Softplus: _pointwise("Softplus"),
    Mish: _mish,
    Softmax: _pointwise("Softmax", axis=1),
    LogSoftmax: _pointwise("LogSoftmax", axis=1),
}


def _function(write: _Function, w: OnnxWriter, node: Node) -> str:
    return write(w, node.layer, w.inputs(node)[0], w.name(node))


#: Exporters by the exact class of a layer; a subclass may compute something else, so it does not match.
LAYERS: dict[type[Layer], Callable[[OnnxWriter, Node], str]] = {
    Conv: _conv,
    ConvTranspose: _conv_transpose,
    MaxPool: _max_pool,
    AveragePool: _average_pool,
    AdaptiveAveragePool: _means,
    AdaptiveMaxPool: _adaptive_max,
    GlobalAveragePool: _global_pool("GlobalAveragePool"),
    GlobalMaxPool: _global_pool("GlobalMaxPool"),
    ChannelMean: _over_channels("ReduceMean"),
    ChannelMax: _over_channels("ReduceMax"),
    Power: _power,
    Flip: _flip,
    Resize: _resize,
    Dense: _dense,
    BatchNorm: _batch_norm,
    GroupNorm: _group_norm,
    InstanceNorm: _group_norm,
    LayerNorm: _layer_norm,
    RMSNorm: _rms_norm,
    LocalResponseNorm: _local_response_norm,
    Attention: _attention,
    Clamp: _clip,
    Affine: _numbers,
    Scale: _scale,
    Embedding: _embedding,
    Token: _token,
    PReLU: _prelu,
    Dropout: _same,
    ChannelDropout: _same,
    StochasticDepth: _same,
    Redistribute: _same,
    Add: _add,
    Multiply: partial(_of_two, "Mul"),
    BroadcastAdd: partial(_of_two, "Add"),
    Concat: _concat,
    Flatten: _flatten,
    Reshape: _reshape,
    ReshapedMap: _reshape,
    PixelShuffle: _pixels,
    PixelUnshuffle: _pixels,
    ChannelShuffle: _shuffle,
    Pad: _pad,
    ChannelPad: _pad,
    PadAxis: _pad_axis,
    PadPole: _pad_pole,
    Roll: _roll,
    Slice: _slice,
    **{kind: partial(_function, write) for kind, write in _FUNCTIONS.items()},
}
