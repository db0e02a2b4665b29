"""Import of operators that slide a window over space (convolutions, poolings), and of resizing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..layers import (
    Abs,
    Affine,
    AveragePool,
    ChannelMax,
    ChannelMean,
    Conv,
    ConvTranspose,
    Dense,
    GivenValues,
    GlobalAveragePool,
    GlobalMaxPool,
    Layer,
    MaxPool,
    Power,
    Reshape,
    Resize,
    Scale,
)
from .constants import along
from .graph import Activation, Builder, OnnxConstant, OnnxNode
from .patterns import activation_of

__all__ = ["SLIDING", "ceil_padding", "global_pool"]

Pads = tuple[tuple[int, int], ...]


def _window(build: Builder, op: OnnxNode, axes: int) -> dict[str, Any]:
    """Return kernel, stride, dilation and padding of an operator, for `axes` spatial axes."""
    attributes = op.attributes
    kernel = tuple(attributes["kernel_shape"])
    window: dict[str, Any] = {"kernel": kernel, "stride": tuple(attributes.get("strides", (1,) * axes))}
    window["dilation"] = tuple(attributes.get("dilations", (1,) * axes))
    auto = attributes.get("auto_pad", "NOTSET")
    # "same" has an odd row of padding at the end, as SAME_UPPER does.
    if auto == "SAME_LOWER":
        raise build.refused(op, "auto_pad SAME_UPPER or numbers", auto, "give the padding in numbers")
    pads = attributes.get("pads") or (0,) * (2 * axes)
    # ONNX lists the amounts before each axis, then those after each axis.
    window["padding"] = "same" if auto == "SAME_UPPER" else tuple(zip(pads[:axes], pads[axes:]))
    return window


def _weights_first(array: np.ndarray) -> np.ndarray:
    """Return (K, C / groups, *kernel) as (K, *kernel, C / groups).

    Transposed convolutions have (C, K / groups, *kernel).
    """
    return np.moveaxis(array, 1, -1)


def _with_weights(build: Builder, weights: OnnxConstant, bias: OnnxConstant | None) -> dict[str, GivenValues]:
    first, inner, *kernel = weights.shape
    initial = {"w": build.initial(weights, _weights_first, (first, *kernel, inner))}
    if weights.lengths is not None:
        initial["g"] = build.initial(weights.lengths, np.ravel, (first,))
    if bias is not None:
        initial["b"] = build.initial(bias, np.ravel, (math.prod(bias.shape),))
    return initial


def _weights(build: Builder, op: OnnxNode) -> tuple[OnnxConstant, OnnxConstant | None]:
    """Return weights, and the bias unless it is zero, because exporters write zeros for a missing bias."""
    weights, bias = build.constant(op, 1), build.constant(op, 2)
    assert weights is not None
    kernel = tuple(op.attributes.get("kernel_shape", weights.shape[2:]))
    if kernel != weights.shape[2:]:
        raise build.refused(op, f"weights of the kernel {kernel}", f"{weights.shape}", "export the model again")
    return weights, None if bias is None or bias.is_all(0) else bias


def _conv(build: Builder, op: OnnxNode) -> Activation:
    value = build.samples(op)
    weights, bias = _weights(build, op)
    groups, axes = op.attributes.get("group", 1), len(weights.shape) - 2
    # A file may leave out the kernel, which the weights have.
    op = op.changed(attributes={"kernel_shape": weights.shape[2:], **op.attributes})
    if value.pooled:
        return _conv_of_vectors(build, op, value, weights, bias)
    layer: Layer = Conv(
        weights.shape[0],
        **_window(build, op, axes),
        bias=bias is not None,
        groups=groups,
        activation=activation_of(op),
        weight_norm=weights.lengths is not None,
    )
    layer = layer.initialized(**_with_weights(build, weights, bias))
    return value.of(build.add(op, layer, value.node, weights=(weights, weights.lengths, bias)))


def _conv_of_vectors(
    build: Builder, op: OnnxNode, value: Activation, weights: OnnxConstant, bias: OnnxConstant | None
) -> Activation:
    """Import a 1 x 1 convolution of pooled values as a dense layer. For others, the pooling keeps its spatial axes."""
    positions = math.prod(build.shape(op.outputs[0])[2:])  # padding adds some
    if math.prod(weights.shape[2:]) > 1 or positions > 1 or op.attributes.get("group", 1) > 1:
        build.with_positions(op)  # raises, because the value is pooled
    units, features = weights.shape[:2]
    initial = {"w": build.initial(weights, lambda array: array.reshape(units, features), (units, features))}
    if weights.lengths is not None:
        initial["g"] = build.initial(weights.lengths, np.ravel, (units,))
    if bias is not None:
        initial["b"] = build.initial(bias, np.ravel, (units,))
    layer = Dense(units, bias=bias is not None, weight_norm=weights.lengths is not None).initialized(**initial)
    node = build.add(op, layer, value.node, weights=(weights, weights.lengths, bias))
    activation = activation_of(op)
    if activation is not None:
        node = build.add(op.changed(name=f"{op.name}.activation", scope=""), activation, node)
    return value.of(node)


def _conv_transpose(build: Builder, op: OnnxNode) -> Activation:
    value = build.with_positions(op)
    weights, bias = _weights(build, op)
    if "output_shape" in op.attributes or op.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        raise build.refused(op, "padding in numbers", "an output_shape, or auto_pad")
    groups, axes = op.attributes.get("group", 1), len(weights.shape) - 2
    window = _window(build, op.changed(attributes={"kernel_shape": weights.shape[2:], **op.attributes}), axes)
    layer = ConvTranspose(
        weights.shape[1] * groups,
        **window,
        output_padding=tuple(op.attributes.get("output_padding", (0,) * axes)),
        bias=bias is not None,
        groups=groups,
    ).initialized(**_with_weights(build, weights, bias))
    return value.of(build.add(op, layer, value.node, weights=(weights, bias)))


def _channel_scale(build: Builder, op: OnnxNode) -> Activation:
    """Import a learned factor per element of an axis, and a summand; for channels of a map, it is a 1 x 1 convolution
    with as many groups as channels.
    """
    value, scale, shift = build.value(op), build.constant(op, 1), build.constant(op, 2)
    assert scale is not None
    for constant in (scale, shift):
        if constant is not None and constant.origin == "unknown":
            raise build.refused_array(op.changed(kind="Mul" if constant is scale else "Add"))
    if value.spatial or op.attributes["axis"] != build.channels_at(op, value):
        value = along(build, op.changed(kind="Mul"), value, op.inputs[0], scale)
        return value if shift is None else along(build, op.changed(kind="Add"), value, op.inputs[0], shift)
    if value.pooled:
        value = build.with_positions(op)
    channels = math.prod(scale.shape)
    arrays = [constant for constant in (scale, shift) if constant is not None]
    # An exporter merges equal initial values, such as those of the layer scales of two blocks, but torch trains both.
    merged = scale.name.rpartition(".")[0] not in (op.scope, op.module)
    if len(value.node.shape) == 1:
        vector = {"gamma": build.initial(scale, np.ravel, (channels,))}
        if shift is not None:
            vector["beta"] = build.initial(shift, np.ravel, (channels,))
        layer = Scale(bias=shift is not None).initialized(**vector)
        return value.of(build.array(op, layer, value.node, *arrays, merged=merged))
    shape = (channels, *(1 for _ in value.node.shape[:-1]), 1)
    initial = {"w": build.initial(scale, lambda array: array.reshape(shape), shape)}
    if shift is not None:
        initial["b"] = build.initial(shift, np.ravel, (channels,))
    conv = Conv(channels, 1, bias=shift is not None, groups=channels).initialized(**initial)
    return value.of(build.array(op, conv, value.node, *arrays, merged=merged))


# -- poolings --------------------------------------------------------------------------------------


def ceil_padding(size: int, kernel: int, stride: int, low: int, high: int) -> int:
    """Return the high padding with which rounding down gives as many outputs as rounding up.

    As in torch, no window begins after the array and its low padding.

    >>> ceil_padding(8, 3, 2, 1, 1), ceil_padding(7, 3, 2, 0, 0), ceil_padding(6, 3, 2, 0, 0)
    (2, 0, 1)
    """
    outputs = -(-(size + low + high - kernel) // stride) + 1
    if (outputs - 1) * stride >= size + low:
        outputs -= 1
    return max(high, (outputs - 1) * stride + kernel - size - low)


def _rounded_up(build: Builder, op: OnnxNode, window: dict[str, Any], shape: tuple[int, ...]) -> Pads:
    """Return the padding that gives as many outputs as ``ceil_mode``, which rounds up; unchanged without this mode."""
    padding = window["padding"]
    if not op.attributes.get("ceil_mode") or padding == "same":
        return padding
    extents = [d * (k - 1) + 1 for k, d in zip(window["kernel"], window["dilation"])]
    return tuple(
        (low, ceil_padding(n, extent, stride, low, high))
        for n, extent, stride, (low, high) in zip(shape, extents, window["stride"], padding)
    )


def _pool(build: Builder, op: OnnxNode, make: Callable[..., Layer], **options: Any) -> Activation:
    value = build.with_positions(op)
    window = _window(build, op, len(value.node.shape) - 1)
    single = math.prod(build.shape(op.outputs[0])[2:]) == 1  # auto_pad with a stride may give several windows
    if window["kernel"] == value.node.shape[:-1] and single and not any(op.attributes.get("pads") or ()):
        return global_pool(build, op, GlobalMaxPool if make is MaxPool else GlobalAveragePool, make)
    padding = window["padding"]
    window["padding"] = _rounded_up(build, op, window, value.node.shape[:-1])
    if options.get("count_include_pad") and window["padding"] != padding:
        raise build.refused(op, "sizes rounded down where padding counts", "ceil_mode", "export without ceil_mode")
    return value.of(build.add(op, make(**window, **options), value.node))


def _max_pool(build: Builder, op: OnnxNode) -> Activation:
    return _pool(build, op, MaxPool)


def _average_pool(build: Builder, op: OnnxNode) -> Activation:
    include = bool(op.attributes.get("count_include_pad", 0))
    if not any(op.attributes.get("pads") or ()) and op.attributes.get("auto_pad", "NOTSET") == "NOTSET":
        include = not op.attributes.get("ceil_mode")  # irrelevant without padding
    return _pool(build, op, AveragePool, count_include_pad=include)


def global_pool(build: Builder, op: OnnxNode, whole: type[Layer], windows: Callable[..., Layer]) -> Activation:
    """Import a global pooling; as one window over all positions if a layer with spatial axes follows."""
    value = build.with_positions(op)
    if op.outputs[0] in build.keeping:
        node = build.add(op, windows(value.node.shape[:-1], 1), value.node)
        return Activation(node)
    return Activation(build.add(op, whole(), value.node), pooled=True, pool=op.outputs[0])


def _global_average_pool(build: Builder, op: OnnxNode) -> Activation:
    return global_pool(build, op, GlobalAveragePool, AveragePool)


def _global_max_pool(build: Builder, op: OnnxNode) -> Activation:
    return global_pool(build, op, GlobalMaxPool, MaxPool)


def _reduce(build: Builder, op: OnnxNode, what: str, kind: type[Layer]) -> Activation:
    """Import the mean, or the maximum, over all spatial axes, over some of them, or over the channels."""
    value, windows = build.value(op), AveragePool if kind is GlobalAveragePool else MaxPool
    shape = build.shape(op.inputs[0])
    axes = sorted(axis % len(shape) for axis in build.numbers(op, 1, "axes") or range(len(shape)))
    channels, keeps = build.channels_at(op, value), op.attributes.get("keepdims", 1)
    spatial = [axis for axis in range(1, len(shape)) if axis != channels]
    if channels in axes and axes[0] > 0 and keeps:
        return _over_channels(build, op, [axis for axis in axes if axis != channels], what, kind)
    if axes and set(axes) < set(spatial) and keeps:
        return _along_axes(build, op, axes, windows)
    if axes != spatial or not axes:
        remedy = "keep the axis (keepdim=True)" if axes and axes[0] > 0 else ""
        raise build.refused(op, f"a {what} over space, axes {spatial}, or over channels", f"axes {axes}", remedy)
    # (N, C, 1, 1), then (N, C), then (N, 1, 1, C).
    if not value.last and keeps:
        return global_pool(build, op, kind, windows)
    if not keeps:
        return Activation(build.add(op, kind(), value.node))
    if op.outputs[0] in build.keeping:
        return value.of(build.add(op, windows(value.node.shape[:-1], 1), value.node))
    return Activation(build.add(op, kind(), value.node), last=True, pooled=True, pool=op.outputs[0])


def _over_channels(build: Builder, op: OnnxNode, others: list[int], what: str, kind: type[Layer]) -> Activation:
    """Import the mean, or the maximum, over the spatial axes `others`, if any, and then over the channels."""
    value = build.value(op)
    if others:
        value = _reduce(build, op.part("space").changed(inputs=op.inputs[:1], attributes={"axes": others}), what, kind)
    layer = ChannelMean() if kind is GlobalAveragePool else ChannelMax()
    # Over flattened features, one is left, which has no order.
    return replace(value.of(build.add(op, layer, value.node)), spatial=())


def _along_axes(build: Builder, op: OnnxNode, axes: list[int], make: Callable[..., Layer]) -> Activation:
    """Import the mean, or the maximum, along some of the spatial axes: a pooling with one window along these."""
    value = build.value(op)
    if value.pooled:
        value = build.with_positions(op)
    extents, first = value.node.shape[:-1], 1 if value.last else 2
    window = tuple(n if first + i in axes else 1 for i, n in enumerate(extents))
    return value.of(build.add(op, make(window, 1), value.node))


def _reduce_sum(build: Builder, op: OnnxNode) -> Activation:
    """Import a sum over space or channels: the mean times the number of elements."""
    shape = build.shape(op.inputs[0])
    axes = [axis % len(shape) for axis in build.numbers(op, 1, "axes") or range(len(shape))]
    mean = _reduce(build, op.part("mean"), "sum", GlobalAveragePool)
    count = float(math.prod(shape[axis] for axis in axes))
    return mean.of(build.add(op, Affine(count), mean.node))


def _reduced(
    before: Callable[[], Layer], reduce: Callable[[Builder, OnnxNode], Activation], after: Callable[[], Layer] | None
) -> Callable[[Builder, OnnxNode], Activation]:
    """Return the importer of ``after(reduce(before(x)))``; None as `after` is the identity."""

    def operator(build: Builder, op: OnnxNode) -> Activation:
        value, name = build.value(op), f"{op.outputs[0]}::parts"
        build.values[name] = value.of(build.add(op.part("parts"), before(), value.node))
        build.graph.shapes[name] = build.shape(op.inputs[0])
        reduced = reduce(build, op.part("reduced").changed(inputs=(name, *op.inputs[1:])))
        return reduced if after is None else reduced.of(build.add(op, after(), reduced.node))

    return operator


def _expand(build: Builder, op: OnnxNode) -> Activation:
    """Import a value of one position that is broadcast over space."""
    before, after = build.shape(op.inputs[0]), build.shape(op.outputs[0])
    if before == after:
        return build.value(op)
    # With another number of axes it is refused, as for samples.
    repeated = [axis for axis, n in enumerate(before) if n != after[axis]] if len(before) == len(after) else [0]
    if min(repeated) < 2:
        raise build.refused(op, "positions that are repeated over space", f"{before} to {after}")
    value = build.samples(op)
    # The pooling keeps its axes; only a vector that is no result of a pooling needs a Reshape.
    if value.pool:
        value = build.with_positions(op)
    node = value.node
    if value.pooled:
        ones = (1,) * (len(after) - 2)
        node = build.add(op.part("positions"), Reshape((*ones, node.shape[-1])), node)
    return Activation(build.add(op, Resize(size=after[2:], mode="nearest"), node))


# -- resize ----------------------------------------------------------------------------------------

#: Mode and coordinate transformation in ONNX -> mode here, as in torch's interpolate.
_RESIZES = {
    ("nearest", "asymmetric", "floor"): "nearest",
    ("nearest", "half_pixel", "round_prefer_ceil"): "nearest-exact",
    ("linear", "half_pixel", ""): "linear",
    ("linear", "pytorch_half_pixel", ""): "linear",
    ("linear", "align_corners", ""): "linear",
    ("cubic", "half_pixel", ""): "cubic",
    ("cubic", "pytorch_half_pixel", ""): "cubic",
    ("cubic", "align_corners", ""): "cubic",
}


def _resize(build: Builder, op: OnnxNode) -> Activation:
    value = build.with_positions(op)
    attributes = op.attributes
    mode, rounding = attributes.get("mode", "nearest"), attributes.get("nearest_mode", "round_prefer_floor")
    key = mode, attributes.get("coordinate_transformation_mode", "half_pixel"), rounding if mode == "nearest" else ""
    axes = [axis % (len(value.node.shape) + 1) for axis in attributes.get("axes") or ()]
    spatial = list(range(2, len(value.node.shape) + 1))
    others = [name for name in ("antialias", "exclude_outside") if attributes.get(name)]
    others += ["keep_aspect_ratio_policy"] if attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch" else []
    others += ["another cubic"] if mode == "cubic" and abs(attributes.get("cubic_coeff_a", -0.75) + 0.75) > 1e-6 else []
    if key not in _RESIZES or others or axes not in ([], spatial):
        raise build.refused(
            op,
            "nearest, linear or cubic interpolation over space, as of torch",
            ", ".join([*filter(None, key), *others]),
            "train with the mode 'nearest', 'bilinear' or 'bicubic', without antialias",
        )
    scales, sizes = build.numbers(op, 2), build.numbers(op, 3)
    before, after = build.shape(op.inputs[0])[:2], build.shape(op.outputs[0])[:2]
    if before != after:
        raise build.refused(op, f"the samples and channels of its input, {before}", f"{after}")
    # Samples and channels may be among them, before space.
    options: dict[str, Any] = {"mode": _RESIZES[key], "align_corners": key[1] == "align_corners"}
    if scales:
        layer = Resize(scale=tuple(scales[-len(spatial) :]), **options)
    else:
        layer = Resize(size=tuple(int(n) for n in (sizes or ())[-len(spatial) :]), **options)
    return replace(value, node=build.add(op, layer, value.node))


_MAXIMUM = partial(_reduce, what="maximum", kind=GlobalMaxPool)

SLIDING: dict[str, Callable[[Builder, OnnxNode], Activation]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "ChannelScale": _channel_scale,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "ReduceMean": partial(_reduce, what="mean", kind=GlobalAveragePool),
    "ReduceMax": _MAXIMUM,
    "ReduceMin": _reduced(lambda: Affine(-1.0), _MAXIMUM, lambda: Affine(-1.0)),
    "ReduceSum": _reduce_sum,
    "ReduceSumSquare": _reduced(lambda: Power(2), _reduce_sum, None),
    "ReduceL1": _reduced(Abs, _reduce_sum, None),
    "ReduceL2": _reduced(lambda: Power(2), _reduce_sum, lambda: Power(0.5)),
    "Expand": _expand,
    "Resize": _resize,
}
