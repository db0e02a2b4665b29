"""Import of norms: those of ONNX, and those that `patterns` recognizes in several operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..layers import BatchNorm, GroupNorm, InstanceNorm, Layer, LayerNorm
from .graph import Activation, Builder, OnnxConstant, OnnxNode
from .patterns import activation_of, permuted

__all__ = ["NORMS"]


def _affine(build: Builder, op: OnnxNode, first: int, channels: int) -> tuple[OnnxConstant, OnnxConstant] | None:
    """Return factor and summand per channel, inputs `first` and the next; None if the module has none."""
    scale, shift = build.constant(op, first), build.constant(op, first + 1)
    if (scale is None or scale.is_all(1)) and (shift is None or shift.is_all(0)):
        return None
    scale = scale or OnnxConstant.of(np.ones(channels, np.float32))
    shift = shift or OnnxConstant.of(np.zeros(channels, np.float32))
    for one in (scale, shift):
        if math.prod(one.shape) != channels:
            raise build.refused(
                op,
                f"a factor and a summand for each of {channels} channels",
                f"{one.shape}",
                "take torch.nn.GroupNorm(1, channels) in place of a LayerNorm over space",
            )
    return scale, shift


def _made(build: Builder, op: OnnxNode, make: Callable[[bool], Layer], value: Activation, first: int) -> Activation:
    """Build the norm that `make(affine)` makes, with the parameters of the operation."""
    channels = value.node.shape[-1]
    affine = _affine(build, op, first, channels)
    layer = make(affine is not None)
    if affine is not None:
        scale, shift = (build.given(one, np.ravel, (channels,)) for one in affine)
        layer = layer.initialized(gamma=scale, beta=shift)
    return value.of(build.add(op, layer, value.node, weights=affine or ()))


def _eps(op: OnnxNode) -> float:
    return op.attributes.get("epsilon", 1e-5)


def _batch_norm(build: Builder, op: OnnxNode) -> Activation:
    """Import a batch norm. A further input is a shortcut to be added.

    In ONNX momentum is the share of the running statistics that is kept.
    """
    value, channels = build.value(op), build.value(op).node.shape[-1]
    if value.last:
        raise build.refused(op, "channels at axis 1", "channels at the last axis")
    statistics = [build.constant(op, i) for i in (3, 4)]
    affine = _affine(build, op, 1, channels)
    momentum = round(1 - op.attributes.get("momentum", 0.9), 6)
    layer: Layer = BatchNorm("global", momentum, _eps(op), affine is not None, activation_of(op))

    def order(array: np.ndarray) -> np.ndarray:
        return permuted(array.reshape(-1), value.spatial) if value.spatial else array.reshape(-1)

    constants = dict(zip(("mean", "var"), statistics)) | dict(zip(("gamma", "beta"), affine or ()))
    given = {key: build.given(one, order, (channels,)) for key, one in constants.items() if one is not None}
    nodes = [value.node] + ([build.value(op, 5).node] if len(op.inputs) > 5 else [])
    return value.of(build.add(op, layer.initialized(**given), *nodes, weights=tuple(constants.values())))


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
    return _made(build, op, lambda affine: GroupNorm(groups, _eps(op), affine, activation_of(op)), value, 1)


def _instance_norm(build: Builder, op: OnnxNode) -> Activation:
    value = build.with_positions(op)
    return _made(build, op, lambda affine: InstanceNorm(_eps(op), affine, activation_of(op)), value, 1)


def _layer_norm(build: Builder, op: OnnxNode) -> Activation:
    """Import a norm over the channels (the last axis), or over whole samples, without parameters per position."""
    value = build.value(op)
    axes = len(build.shape(op.inputs[0]))
    axis = op.attributes.get("axis", -1) % axes
    if value.spatial:
        raise build.refused(op, "samples with spatial axes", "a flattened value")
    if axis == axes - 1 and (value.last or axes == 2):
        kind = "channels"
    elif axis == 1 and not value.pooled:
        kind = "sample"
    else:
        raise build.refused(op, "a norm over the channels or over whole samples", f"axis {axis} of {axes}")
    return _made(build, op, lambda affine: LayerNorm(kind, _eps(op), affine, activation_of(op)), value, 1)


NORMS: dict[str, Callable[[Builder, OnnxNode], Activation]] = {
    "BatchNormalization": _batch_norm,
    "GroupNormalization": _group_norm,
    "GroupNorm": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
}
