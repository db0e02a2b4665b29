"""Activations and sums of packed arrays, one pass each, and pooling, by oneDNN.

NaN stays NaN where oneDNN drops it: its maxima compare, and a comparison with NaN is false.

ReLU, which oneDNN computes as ``max(x, 0)``, is therefore asked for as ``x * min(max(LARGEST * x, 0), 1)``, a product,
which keeps NaN and takes as long (`abi.KEEPING_RELU`). It differs from ``max(x, 0)`` in that -inf gives NaN, negative
numbers give -0, and positive ones below 3e-39 become smaller. Pooling and batch norm have no such way: there the input
is looked at, and where it holds more than numbers NumPy computes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..checks import same_elements
from ..geometry import Geometry, read_part
from ..kernel import Kernel, deferred, either
from ..pointwise import FusedActivation
from . import abi as c
from .abi import dims
from .conv import geometry_dims, image, image_desc, zero_rest
from .program import OnednnEngine, OnednnMemory, PrimitiveList, ReferenceOnly, packed_strides

__all__ = ["MAX", "Finite", "activation", "add", "average", "max_pool", "pool"]


class Finite:
    """Looks whether all elements of a packed array ``(N, *spatial, C)`` are finite, by a sum: reads it once.

    One thread takes the scalar product of the array with itself by BLAS, several take sums by oneDNN.

    Attributes
    ----------
    kernels
        Those that it runs.
    """

    def __init__(self, engine: OnednnEngine, x: Any) -> None:
        self._first = self._second = x.reshape(-1)
        self.kernels: tuple[Kernel, ...] = ()
        self._failed = False
        if engine.threads > 1:
            with contextlib.suppress(ReferenceOnly):
                self._sum_by_threads(engine, x)

    def _sum_by_threads(self, engine: OnednnEngine, x: Any) -> None:
        p = PrimitiveList(engine)
        rows = math.prod(x.shape[:2])
        length = x.size // rows
        sums = np.zeros(rows, np.float32)
        source = p.array(x, p.desc((rows, length), x.dtype, (length, 1)))
        target = p.array(sums, p.desc((rows, 1), np.float32, (1, 1)))
        pd = p.descriptor("reduction", c.REDUCTION_SUM, source.desc, target.desc, 0.0, 0.0)
        p.step(pd, {c.SRC: source, c.DST: target})
        self.kernels = (p.kernel(),)
        self._first, self._second = sums, np.ones_like(sums)

    def fails(self) -> bool:
        """Return whether an element of the array, as it is now, is not finite (or the sum of large ones is not)."""
        for kernel in self.kernels:
            kernel()
        self._failed = not math.isfinite(np.dot(self._first, self._second))
        return self._failed

    def failed(self) -> bool:
        """Return what `fails` said last."""
        return self._failed


MAX = c.POOLING_MAX

Pair = tuple[Kernel, Kernel | None]


def average(count_include_pad: bool) -> int:
    """Return the algorithm of an average pooling."""
    return c.POOLING_AVERAGE_INCLUDE if count_include_pad else c.POOLING_AVERAGE_EXCLUDE


def max_pool(
    engine: OnednnEngine, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, plain: Callable[[], Pair]
) -> Pair:
    """Return the maxima and their gradient: by oneDNN, or by what `plain` makes where an element of `x` is not finite.

    Of a window oneDNN takes the largest number and drops NaN, and -inf is -3e38 to it.

    Raises
    ------
    ReferenceOnly
        As :func:`pool`.
    """
    forward, backward = pool(engine, MAX, x, y, dy, dx, geometry)
    finite = Finite(engine, x)
    plain = functools.cache(plain)
    safe = either(forward, finite.fails, deferred(lambda: plain()[0]), *finite.kernels)
    if backward is None:
        return safe, None

    def gradient() -> Kernel:
        made = plain()[1]
        assert made is not None
        return made

    return safe, either(backward, finite.failed, deferred(gradient))


def pool(
    engine: OnednnEngine, algorithm: int, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry
) -> tuple[Kernel, Kernel | None]:
    """Return the forward and backward; the positions of the maxima lie in memory that the forward kernel owns.

    Raises
    ------
    ReferenceOnly
        For windows that are dilated or reach further into the padding than they are long.
    """
    spatial, g = read_part(x.shape[1:-1], geometry)
    if any(max(lo, hi) >= k for k, (lo, hi) in zip(g.kernel, g.padding)) or set(g.dilation) != {1}:
        raise ReferenceOnly(f"oneDNN's pooling: expected padding below the kernel and no dilation, got {geometry}")
    stride, dilation, lo, hi = geometry_dims(g)
    shape = (stride, dims(g.kernel), dilation, lo, hi)
    p = PrimitiveList(engine)
    kind = c.FORWARD_INFERENCE if dx is None else c.FORWARD_TRAINING
    source, target = image_desc(p, x, spatial), image_desc(p, y)
    pd = p.descriptor("pooling_forward", kind, algorithm, source, target, *shape)
    arguments = {c.SRC: p.brought_to(image(p, x, spatial), source)}
    positions = p.wanted(pd, c.WORKSPACE)
    workspace = p.kept(positions) if positions and p.size(positions) else None
    if workspace is not None:
        arguments[c.WORKSPACE] = workspace
    p.step(pd, {**arguments, c.DST: image(p, y)})
    if dx is None:
        return p.kernel(), None
    q = PrimitiveList(engine)
    source, target = image_desc(q, dx, spatial), image_desc(q, dy)
    back = q.descriptor("pooling_backward", algorithm, source, target, *shape, pd)
    arguments = {c.DIFF_DST: image(q, dy)}
    if workspace is not None:
        arguments[c.WORKSPACE] = q.array(workspace.array, q.borrowed(positions))
    zero_rest(q, dx, spatial)
    q.step_into(back, arguments, c.DIFF_SRC, image(q, dx, spatial))
    return p.kernel(), q.kernel()


# Name: algorithm, and the one whose gradient is formed from the output. Those of other kinds would drop NaN.
_KINDS = {
    "relu": (c.RELU, c.RELU_BY_OUTPUT),
    "leaky_relu": (c.RELU, c.RELU_BY_OUTPUT),
    "sigmoid": (c.LOGISTIC, c.LOGISTIC_BY_OUTPUT),
    "tanh": (c.TANH, c.TANH_BY_OUTPUT),
    "gelu": (c.GELU_ERF, None),
    "silu": (c.SWISH, None),
    "softplus": (c.SOFT_RELU, None),
    "mish": (c.MISH, None),
    "gelu_tanh": (c.GELU_TANH, None),
}


def has(activation: FusedActivation | None) -> bool:
    """Return whether the primitives compute this activation themselves."""
    return activation is None or activation.kind in _KINDS


def operations(activation: FusedActivation | None) -> list[tuple[Any, ...]]:
    """Return the activation as what :meth:`PrimitiveList.attributes` takes; NaN stays NaN."""
    if activation is None:
        return []
    algorithm, slope = _KINDS[activation.kind][0], _slope(activation)
    return [("eltwise", *(c.KEEPING_RELU if algorithm == c.RELU and slope == 0 else (algorithm, slope, 0.0)))]


def _slope(activation: FusedActivation) -> float:
    return {"leaky_relu": activation.alpha, "silu": 1.0, "softplus": 1.0}.get(activation.kind, 0.0)


def _flat(p: PrimitiveList, array: Any) -> OnednnMemory:
    return p.array(array, p.desc((array.size,), array.dtype, (1,)))


def _read(p: PrimitiveList, array: Any) -> OnednnMemory:
    """Return the elements of an array one behind the other: its own, or those of a copy made at every call."""
    if _packed(array):
        return _flat(p, array)
    strides = [step // array.itemsize for step in array.strides]
    copy = p.temporary(p.desc(array.shape, array.dtype, packed_strides(array.shape)))
    p.reorder(p.array(array, p.desc(array.shape, array.dtype, strides)), copy)
    return p.part(copy, p.desc((array.size,), array.dtype, (1,)), 0)


def _packed(*arrays: Any) -> bool:
    return all(a is None or a.flags.c_contiguous for a in arrays)


def activation(
    engine: OnednnEngine, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float, plain: Callable[[], Pair]
) -> Pair:
    """Elementwise function and its gradient; of strided `x` or `y` the forward kernel is that of `plain`.

    Raises
    ------
    ReferenceOnly
        For strided arrays that are written, and for kinds whose minima and maxima would drop NaN.
    """
    if not _packed(dy, dx) or (dx is None and not _packed(x, y)):
        raise ReferenceOnly("oneDNN's activations are slow on strided arrays; use packed ones")
    f = FusedActivation(kind, alpha)
    if not has(f):
        raise ReferenceOnly(f"oneDNN's {kind} drops NaN")
    (algorithm, by_output), slope = _KINDS[kind], _slope(f)
    # From the output where that is possible: the layer may reuse the memory of its input.
    from_output = not f.by_input
    forward = _forward(engine, f, x, y) if _packed(x, y) else plain()[0]
    if dx is None:
        return forward, None
    q = PrimitiveList(engine)
    data, gradient, result = _read(q, y if from_output else x), _flat(q, dy), _flat(q, dx)
    backward = by_output if from_output else algorithm
    hint = q.hint("eltwise_forward", c.FORWARD_TRAINING, backward, data.desc, data.desc, slope, 0.0)
    descs = (result.desc, gradient.desc, data.desc)
    pd = q.descriptor("eltwise_backward", backward, *descs, slope, 0.0, hint)
    index = c.DST if from_output else c.SRC
    q.step(pd, {index: data, c.DIFF_DST: gradient, c.DIFF_SRC: result})
    return forward, q.kernel()


def _forward(engine: OnednnEngine, activation: FusedActivation, x: Any, y: Any) -> Kernel:
    p = PrimitiveList(engine)
    source, target = _flat(p, x), _flat(p, y)
    ((_, algorithm, *parameters),) = operations(activation)
    pd = p.descriptor("eltwise_forward", c.FORWARD_TRAINING, algorithm, source.desc, target.desc, *parameters)
    p.step(pd, {c.SRC: source, c.DST: target})
    return p.kernel()


#: Two terms, and one in each of the 32 operations that oneDNN takes behind a primitive, less one for an activation.
_MOST_TERMS = 33


def add(engine: OnednnEngine, xs: Sequence[Any], y: Any, activation: FusedActivation | None) -> Kernel:
    """Sum of two or more arrays; `y` may be one of them.

    Raises
    ------
    ReferenceOnly
        For strided arrays, a single term, `y` as a term twice, or more terms than oneDNN fuses.
    """
    same = [x for x in xs if same_elements(x, y)]
    if not 2 <= len(xs) <= _MOST_TERMS or len(same) > 1 or not _packed(*xs, y):
        raise ReferenceOnly(f"oneDNN's sums: expected 2 to {_MOST_TERMS} packed arrays, y at most once among them")
    # In place works on the first operand only.
    first, second, *rest = same + [x for x in xs if not any(x is s for s in same)]
    p = PrimitiveList(engine)
    left, right, out = _flat(p, first), _flat(p, second), _flat(p, y)
    more = [_flat(p, x) for x in rest]
    attributes = p.attributes(*(("binary", c.BINARY_ADD, m.desc) for m in more), *operations(activation))
    pd = p.descriptor("binary", c.BINARY_ADD, left.desc, right.desc, out.desc, attributes=attributes)
    arguments = {c.SRC: left, c.SRC_1: right, c.DST: out}
    for i, m in enumerate(more):
        arguments[c.POST_OPERATION * (i + 1) | c.SRC_1] = m
    p.step(pd, arguments)
    return p.kernel()
