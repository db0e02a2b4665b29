"""Convolutions by oneDNN's convolution primitives.

Weights come packed and change at every step, so each call brings them to the format the primitive likes
(a reorder, unless they have it already). Images are taken as they lie, or (``blocked``) brought to
oneDNN's own format and back.
"""

from __future__ import annotations

from typing import Any

from halograd.kernels.geometry import Geometry
from halograd.kernels.onednn import abi as c
from halograd.kernels.onednn.formats import (
    geometry_dims,
    image,
    image_desc,
    read_part,
    vector,
    weight_shape,
    weights,
    zero_rest,
)
from halograd.kernels.onednn.program import Engine, Memory, Program

__all__ = ["backward_data", "backward_filter", "forward"]


class _Convolution:
    """Descriptors of one convolution for the primitive; `x`, `w`, `y` may be gradients."""

    def __init__(self, p: Program, x: Any, w: Any, y: Any, bias: Memory | None, geometry: Geometry) -> None:
        self.p, self.x, self.w, self.y = p, x, w, y
        self.bias = None if bias is None else bias.desc
        self.spatial, self.geometry = read_part(x.shape[1:-1], geometry)
        # Weights of the type of the images: masters in float32 are converted on the way.
        self.filters = p.desc(weight_shape(w, geometry.groups), x.dtype)

    def images(self, blocked: bool) -> tuple[int, int]:
        """Descriptors of input and output: as they lie, or left to the primitive."""
        return (
            image_desc(self.p, self.x, self.spatial, free=blocked),
            image_desc(self.p, self.y, free=blocked),
        )

    def forward(self, source: int, target: int) -> tuple[Any, ...]:
        """Arguments of a forward primitive descriptor."""
        return (
            c.FORWARD_TRAINING, c.CONVOLUTION_DIRECT, source, self.filters, self.bias, target,
            *geometry_dims(self.geometry),
        )  # fmt: skip

    def hint(self) -> int:
        """Descriptor of a forward primitive, which oneDNN wants to see when it makes a backward one."""
        return self.p.hint("convolution_forward", *self.forward(*self.images(blocked=True)))

    def input(self) -> Memory:
        return image(self.p, self.x, self.spatial)

    def weights(self) -> Memory:
        return weights(self.p, self.w, self.geometry.groups)


def forward(
    engine: Engine, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool, blocked: bool = False
) -> Program:
    """``y = relu?(conv(x, w) + b)`` by one primitive."""
    p = Program(engine)
    bias = None if b is None else vector(p, b)
    conv = _Convolution(p, x, w, y, bias, geometry)
    attributes = p.attributes(("relu",)) if relu else None
    pd = p.descriptor("convolution_forward", *conv.forward(*conv.images(blocked)), attributes=attributes)
    arguments = {
        c.SRC: p.brought_to(conv.input(), p.wanted(pd, c.SRC)),
        c.WEIGHTS: p.brought_to(conv.weights(), p.wanted(pd, c.WEIGHTS)),
    }
    if bias is not None:
        arguments[c.BIAS] = bias
    p.step_into(pd, arguments, c.DST, image(p, y))
    return p


def backward_data(engine: Engine, dy: Any, w: Any, dx: Any, geometry: Geometry, blocked: bool = False) -> Program:
    """``dx`` by one primitive."""
    p = Program(engine)
    conv = _Convolution(p, dx, w, dy, None, geometry)
    source, target = conv.images(blocked)
    shape = geometry_dims(conv.geometry)
    kind = "convolution_backward_data"
    pd = p.descriptor(kind, c.CONVOLUTION_DIRECT, source, conv.filters, target, *shape, conv.hint())
    arguments = {
        c.DIFF_DST: p.brought_to(image(p, dy), p.wanted(pd, c.DIFF_DST)),
        c.WEIGHTS: p.brought_to(conv.weights(), p.wanted(pd, c.WEIGHTS)),
    }
    zero_rest(p, dx, conv.spatial)
    p.step_into(pd, arguments, c.DIFF_SRC, conv.input())
    return p


def backward_filter(
    engine: Engine, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry, blocked: bool = False
) -> Program:
    """``dw`` and ``db`` by one primitive."""
    p = Program(engine)
    bias = None if db is None else vector(p, db)
    conv = _Convolution(p, x, dw, dy, bias, geometry)
    source, target = conv.images(blocked)
    filters = p.desc(weight_shape(dw, geometry.groups), dw.dtype)
    shape = geometry_dims(conv.geometry)
    kind = "convolution_backward_weights"
    pd = p.descriptor(kind, c.CONVOLUTION_DIRECT, source, filters, conv.bias, target, *shape, conv.hint())
    arguments = {
        c.SRC: p.brought_to(conv.input(), p.wanted(pd, c.SRC)),
        c.DIFF_DST: p.brought_to(image(p, dy), p.wanted(pd, c.DIFF_DST)),
    }
    if bias is not None:
        arguments[c.DIFF_BIAS] = bias
    p.step_into(pd, arguments, c.DIFF_WEIGHTS, conv.weights())
    return p
