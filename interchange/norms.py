"""Import of norms: ONNX's norms, and those that :mod:`.patterns` recognizes in several operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..layers import BatchNorm, GroupNorm, InstanceNorm, Layer, LayerNorm, RMSNorm, Scale
from .graph import Activation, Builder, OnnxConstant, OnnxNode
from .patterns import activation_of, permuted

__all__ = ["NORMS"]


def _affine(build: Builder, op: OnnxNode, first: int, channels: int) -> list[OnnxConstant]:
    """Return factor and summand per channel (inputs `first` and the next), the factor alone, or none.

    Exporters write ones and zeros for parameters that the module does not have.
    """
    scale, shift = build.constant(op, first), build.constant(op, first + 1)
    shift = None if shift is None or shift.is_all(0) else shift
    if scale is None or scale.is_all(1):
        if shift is not None:
            raise build.refused(op, "a factor, or a factor and a summand per channel", "a summand alone")
        return []
    affine = [scale] if shift is None else [scale, shift]
    for constant in affine:
        if math.prod(constant.shape) != channels:
            raise build.refused(
                op,
                f"a factor and a summand for each of {channels} channels",
                f"{constant.shape}",
                "take torch.nn.GroupNorm(1, channels) in place of a LayerNorm over space",
            )
    return affine


def _with_affine(
    build: Builder, op: OnnxNode, make: Callable[[bool, Layer | None], Layer], value: Activation, first: int
) -> Activation:
    """Build the norm that `make(affine, activation)` returns, with the parameters of the operation.

    A norm with a factor alone becomes a norm without parameters, then a learned factor.
    """
    channels, activation = value.node.shape[-1], activation_of(op)
    affine = _affine(build, op, first, channels)
    initial = [build.initial(constant, np.ravel, (channels,)) for constant in affine]
    # Our norms have a factor and a summand, or neither.
    if len(affine) != 1:
        layer = make(bool(affine), activation)
        layer = layer.initialized(gamma=initial[0], beta=initial[1]) if affine else layer
        return value.of(build.add(op, layer, value.node, weights=affine))
    node = build.add(op.part("normed"), make(False, None), value.node)
    node = build.add(op, Scale().initialized(gamma=initial[0]), node, weights=affine)
    if activation is not None:
        node = build.add(op.part("activation"), activation, node)
    return value.of(node)


def _eps(op: OnnxNode) -> float:
    return op.attributes.get("epsilon", 1e-5)


def _batch_norm(build: Builder, op: OnnxNode) -> Activation:
    """Import a batch norm. A further input is a shortcut to add.

    In ONNX, momentum is the share of the running statistics that is kept.
    """
    value, channels = build.value(op), build.value(op).node.shape[-1]
    # ONNX normalizes axis 1, which then is a spatial axis.
    if value.last:
        raise build.refused(op, "channels at axis 1", "channels at the last axis")
    statistics = [build.constant(op, i) for i in (3, 4)]
    affine = _affine(build, op, 1, channels)
    if len(affine) == 1:
        raise build.refused(op, "a factor and a summand per channel", "a factor alone")
    # Rounded, because files have float32: 1 - 0.9 would be 0.10000002.
    momentum = round(1 - op.attributes.get("momentum", 0.9), 6)
    layer: Layer = BatchNorm("global", momentum, _eps(op), bool(affine), activation_of(op))

    def order(array: np.ndarray) -> np.ndarray:
        return permuted(array.reshape(-1), value.spatial) if value.spatial else array.reshape(-1)

    constants = dict(zip(("mean", "var"), statistics)) | dict(zip(("gamma", "beta"), affine))
    initial = {
        key: build.initial(constant, order, (channels,)) for key, constant in constants.items() if constant is not None
    }
    nodes = [value.node] + ([build.value(op, 5).node] if len(op.inputs) > 5 else [])
    return value.of(build.add(op, layer.initialized(**initial), *nodes, weights=affine, states=statistics))


def _group_norm(build: Builder, op: OnnxNode) -> Activation:
    value = build.samples(op)
    if value.pooled:
        value = build.with_positions(op)
    groups = op.attributes["num_groups"]
    channels = value.node.shape[-1]
    scale = build.constant(op, 1)
    if scale is not None and math.prod(scale.shape) == groups != channels:
        raise build.refused(
            op, "a factor per channel", "one per group, as before version 21", "export with opset_version=21 or later"
        )
    return _with_affine(build, op, lambda *more: GroupNorm(groups, _eps(op), *more), value, 1)


def _instance_norm(build: Builder, op: OnnxNode) -> Activation:
    value = build.with_positions(op)
    return _with_affine(build, op, lambda *more: InstanceNorm(_eps(op), *more), value, 1)


def _layer_norm(build: Builder, op: OnnxNode) -> Activation:
    """Import a norm over the channels (the last axis), or over whole samples, without parameters per position."""
    value = build.arranged(op)
    axes = len(build.shape(op.inputs[0]))
    axis = op.attributes.get("axis", -1) % axes
    if value.refusal is not None and value.axes is not None:
        # Positions may be in any order, as long as the last axis is that of the channels.
        if axis != axes - 1 or value.axes.with_channels(value.node.shape[-1]) is None:
            raise value.refusal
        return _with_affine(build, op, lambda *more: LayerNorm("channels", _eps(op), *more), value, 1)
    if value.spatial:
        raise build.refused(op, "samples with spatial axes", "a flattened value")
    if axis == axes - 1 and (value.last or axes == 2):
        kind = "channels"
    elif axis == 1 and not value.pooled:
        kind = "sample"
    else:
        raise build.refused(op, "a norm over the channels or over whole samples", f"axis {axis} of {axes}")
    return _with_affine(build, op, lambda *more: LayerNorm(kind, _eps(op), *more), value, 1)


def _norm_over_channels(build: Builder, op: OnnxNode) -> Activation:
    """Import a norm over the channels of each position, which `patterns` has recognized in several operators."""
    value = build.value(op)
    if op.attributes["axis"] != (len(build.shape(op.inputs[0])) - 1 if value.last else 1) or value.spatial:
        raise build.refused(op, "a norm over the channels", f"axis {op.attributes['axis']}")
    if value.pooled:
        value = build.with_positions(op)
    # A factor after it is a layer of its own (`patterns`).
    if not op.attributes["centered"]:
        return value.of(build.add(op, RMSNorm(_eps(op), affine=False), value.node))
    return _with_affine(build, op, lambda *more: LayerNorm("channels", _eps(op), *more), value, 1)


NORMS: dict[str, Callable[[Builder, OnnxNode], Activation]] = {
    "BatchNormalization": _batch_norm,
    "GroupNormalization": _group_norm,
    "GroupNorm": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "NormOverChannels": _norm_over_channels,
}
