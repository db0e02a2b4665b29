"""Convolutions by oneDNN's convolution primitives, and matrix products of dense layers.

Weights are packed and change at every step, so each call reorders them to the format of the primitive, unless they have
it already. Images are used in place, or (``blocked``) reordered to oneDNN's own format and back.

oneDNN's logical axes are (N, C, *spatial) and (K, C, *kernel). oneDNN chooses the algorithm, or a measurement does
(:class:`ConvChoice`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...device import is_low
from ..geometry import Geometry, channels_first, read_part
from ..kernel import Kernel, run_all
from ..numpy.convolution import edges
from ..numpy.norms import column_sums
from . import abi as c
from .abi import dims
from .faults import Candidate, margin_of, reason
from .program import OnednnEngine, OnednnMemory, PrimitiveList, ReferenceOnly

__all__ = [
    "ConvChoice",
    "backward_data",
    "backward_filter",
    "bias",
    "bias_gradient",
    "dense_backward_data",
    "dense_backward_filter",
    "dense_forward",
    "flat_shape",
    "forward",
    "geometry_dims",
    "image",
    "image_desc",
    "measure",
    "vector",
    "weight_shape",
    "weights",
    "zero_rest",
]


def image_desc(program: PrimitiveList, array: Any, spatial: Sequence[int] | None = None, free: bool = False) -> int:
    """Return the descriptor of a packed image with the samples, channels and dtype of `array`.

    Its extents are those of `array`, or `spatial`. With `free`, the primitive chooses the format: usually blocks of 8
    or 16 channels, ``(N, C / 16, *spatial, 16)``.
    """
    n, *inner, channels = array.shape
    shape, strides = channels_first((n, *(inner if spatial is None else spatial), channels))
    return program.desc(shape, array.dtype, None if free else strides)


def image(program: PrimitiveList, array: Any, spatial: Sequence[int] | None = None) -> OnednnMemory:
    """Return the memory of a packed array ``(N, *spatial, C)``, or of its leading part of extents `spatial`."""
    shape, strides = channels_first(array.shape, spatial)
    return program.array(array, program.desc(shape, array.dtype, strides))


def zero_rest(program: PrimitiveList, array: Any, spatial: Sequence[int]) -> None:
    """Add a step that zeroes the elements outside the leading part, corners included.

    The rows that a negative padding drops are not inputs of the primitive, so its gradient does not write them.
    """
    rest = edges(array, [slice(0, n) for n in spatial])
    if rest:
        program.call(run_all([partial(block.fill, 0) for block in rest]))


def flat_shape(array: Any) -> tuple[int, int, int, int]:
    """Return the shape (N, 1, rows, C) with all spatial axes merged, for primitives that do not read neighbors.

    Samples of one row each become the rows of one sample, because oneDNN has no fast implementation for them.
    """
    n, *spatial, channels = array.shape
    rows = math.prod(spatial)
    return (1, 1, n, channels) if rows == 1 else (n, 1, rows, channels)


def weight_shape(w: Any, groups: int) -> tuple[int, ...]:
    """Return the logical shape of weights ``(K, *kernel, C / groups)``: with a leading axis if there are several
    groups.
    """
    filters, *kernel, channels = w.shape
    if groups == 1:
        return (filters, channels, *kernel)
    return (groups, filters // groups, channels, *kernel)


def weights(program: PrimitiveList, w: Any, groups: int) -> OnednnMemory:
    """Return the memory of packed weights."""
    _, strides = channels_first(w.shape)
    if groups > 1:
        # The first axis of packed weights is (groups, filters of a group).
        strides = (strides[0] * (w.shape[0] // groups), *strides)
    return program.array(w, program.desc(weight_shape(w, groups), w.dtype, strides))


def vector(program: PrimitiveList, array: Any) -> OnednnMemory:
    """Return the memory of a packed vector ``(C,)``."""
    return program.array(array, program.desc(array.shape, array.dtype, (1,)))


def geometry_dims(geometry: Geometry) -> tuple[Any, Any, Any, Any]:
    """Return strides, dilations (oneDNN counts the gaps), and paddings before and after."""
    return (
        dims(geometry.stride),
        dims(d - 1 for d in geometry.dilation),
        dims(lo for lo, _ in geometry.padding),
        dims(hi for _, hi in geometry.padding),
    )


Candidates = Mapping[str, Callable[[], PrimitiveList]]

# Timed calls per candidate, unless they take this long together.
REPEATS = 7
ENOUGH = 0.1  # [s] per candidate


def measure(kernel: Kernel, clock: Callable[[], float]) -> float:
    """Return the shortest time of a few calls [s], after one warm-up call: disturbances only add to a time."""
    kernel()
    best, spent = float("inf"), 0.0
    for _ in range(REPEATS):
        start = clock()
        kernel()
        elapsed = clock() - start
        best, spent = min(best, elapsed), spent + elapsed
        if spent > ENOUGH:
            break
    return best


class ConvChoice:
    """Choice among named candidates: the first one, or (``tune``) the fastest.

    The result is stored under a key for the life of this object, so that layers of one shape are measured once.
    Candidates run on the arrays as they are when the kernel is built: outputs are overwritten, inputs are not.

    With one thread per kernel, the processor time is measured, which other processes hardly disturb.

    Attributes
    ----------
    times
        For each key, the times of the candidates [s], the chosen one first.
    """

    def __init__(self, tune: bool, threads: int) -> None:
        self.tune = tune
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self.times: dict[Any, dict[str, float]] = {}

    def kernel(self, key: Any, candidates: Candidates) -> Kernel:
        """Return the kernel of the chosen candidate.

        Raises
        ------
        ReferenceOnly
            If no candidate has a fast implementation.
        """
        if not self.tune:
            return self._first(candidates)
        if key not in self.times:
            self.times[key] = self._compare(candidates)
        # Built again: candidates are measured on the arrays of the first layer of this shape.
        return candidates[next(iter(self.times[key]))]().kernel()

    @staticmethod
    def _first(candidates: Candidates) -> Kernel:
        reasons = []
        for build in candidates.values():
            try:
                return build().kernel()
            except ReferenceOnly as error:
                reasons.append(error)
        raise reasons[0]  # that of the preferred candidate, for the message

    def _compare(self, candidates: Candidates) -> dict[str, float]:
        times: dict[str, float] = {}
        reasons = []
        for name, build in candidates.items():
            try:
                kernel = build().kernel()
            except ReferenceOnly as error:
                reasons.append(error)
                continue
            times[name] = measure(kernel, self._clock)
            kernel.close()
        if not times:
            raise reasons[0]
        return dict(sorted(times.items(), key=lambda item: item[1]))


class _Convolution:
    """Descriptors of one convolution for the primitive; `x`, `w`, `y` may be gradients."""

    def __init__(self, p: PrimitiveList, x: Any, w: Any, y: Any, bias: OnednnMemory | None, geometry: Geometry) -> None:
        self.p, self.x, self.w, self.y = p, x, w, y
        self.bias = None if bias is None else bias.desc
        self.spatial, self.geometry = read_part(x.shape[1:-1], geometry)
        # Without strides the primitive chooses the format of the weights. Their dtype is that of the images: the
        # reorder to that format also converts float32 master weights.
        self.filters = p.desc(weight_shape(w, geometry.groups), x.dtype)

    def images(self, blocked: bool) -> tuple[int, int]:
        """Return the descriptors of input and output: packed, or (`blocked`) in the format that the primitive chooses.
        """
        return (
            image_desc(self.p, self.x, self.spatial, free=blocked),
            image_desc(self.p, self.y, free=blocked),
        )

    def forward(self, source: int, target: int) -> tuple[Any, ...]:
        """Return the arguments of a forward primitive descriptor."""
        return (
            c.FORWARD_TRAINING, c.CONVOLUTION_DIRECT, source, self.filters, self.bias, target,
            *geometry_dims(self.geometry),
        )  # fmt: skip

    def hint(self) -> int:
        """Return the descriptor of a forward primitive, which oneDNN requires to create a backward one."""
        # In a free format, whatever that of the primitive: the hint never runs.
        return self.p.hint("convolution_forward", *self.forward(*self.images(blocked=True)))

    def candidate(self, kind: str, descriptor: int, impl: str) -> Candidate:
        """Return the description of a convolution and of the implementation that would compute it."""
        # What oneDNN chose: with a free format, the input may still be channels last.
        packed = image_desc(self.p, self.x, self.spatial)
        channels_last = self.p.abi.desc_equal(self.p.required(descriptor, c.SRC), packed)
        outputs = self.y.shape[1:-1]
        return Candidate(kind, impl, self.w.shape[-1], self.spatial, outputs, self.geometry, channels_last)

    def refusal(self, kind: str) -> Callable[[int, str], str]:
        """Return a function that returns the reason to refuse an implementation, for :meth:`PrimitiveList.descriptor`.
        """
        return lambda descriptor, impl: reason(self.candidate(kind, descriptor, impl))

    def input(self) -> OnednnMemory:
        return image(self.p, self.x, self.spatial)

    def weights(self) -> OnednnMemory:
        return weights(self.p, self.w, self.geometry.groups)


def forward(
    engine: OnednnEngine, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, after: Sequence, blocked: bool = False
) -> PrimitiveList:
    """Return the primitives that compute ``y = f(conv(x, w) + b)``: one convolution, and reorders that it needs.

    `after` are the operations fused after the convolution, in the form that :meth:`PrimitiveList.attributes` takes.
    """
    p = PrimitiveList(engine)
    bias = None if b is None else vector(p, b)
    conv = _Convolution(p, x, w, y, bias, geometry)
    description = conv.forward(*conv.images(blocked))
    kind = "convolution_forward"
    pd = p.descriptor(kind, *description, attributes=p.attributes(*after), refused=conv.refusal(kind))
    arguments = {
        c.SRC: p.converted(conv.input(), pd, c.SRC),
        c.WEIGHTS: p.converted(conv.weights(), pd, c.WEIGHTS),
    }
    if bias is not None:
        arguments[c.BIAS] = bias
    p.step_into(pd, arguments, c.DST, image(p, y))
    return p


def backward_data(
    engine: OnednnEngine, dy: Any, w: Any, dx: Any, geometry: Geometry, blocked: bool = False
) -> PrimitiveList:
    """Return the primitives that compute ``dx``: one convolution of the backward pass, and reorders that it needs."""
    p = PrimitiveList(engine)
    conv = _Convolution(p, dx, w, dy, None, geometry)
    source, target = conv.images(blocked)
    shape = geometry_dims(conv.geometry)
    kind = "convolution_backward_data"
    # Nothing is refused: the known faults are of outputs and of gradients of weights.
    pd = p.descriptor(kind, c.CONVOLUTION_DIRECT, source, conv.filters, target, *shape, conv.hint())
    arguments = {
        c.DIFF_DST: p.converted(image(p, dy), pd, c.DIFF_DST),
        c.WEIGHTS: p.converted(conv.weights(), pd, c.WEIGHTS),
    }
    zero_rest(p, dx, conv.spatial)
    p.step_into(pd, arguments, c.DIFF_SRC, conv.input())
    return p


def backward_filter(
    engine: OnednnEngine, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry, blocked: bool = False
) -> PrimitiveList:
    """Return the primitives that compute ``dw`` and, if not None, ``db``: one convolution of the backward pass, in an
    implementation without a known fault (`faults.py`), and reorders that it needs.
    """
    p = PrimitiveList(engine)
    # The hint, a forward primitive, must have a bias if this one writes its gradient.
    bias = None if db is None else vector(p, db)
    conv = _Convolution(p, x, dw, dy, bias, geometry)
    source, target = conv.images(blocked)
    # In the dtype of `dw`: with images of 16 bits the gradient stays a sum in float32.
    filters = p.desc(weight_shape(dw, geometry.groups), dw.dtype)
    shape = geometry_dims(conv.geometry)
    kind = "convolution_backward_weights"
    pd = p.descriptor(
        kind, c.CONVOLUTION_DIRECT, source, filters, conv.bias, target, *shape, conv.hint(),
        refused=conv.refusal(kind),
    )  # fmt: skip
    arguments = {
        c.SRC: p.converted(conv.input(), pd, c.SRC),
        c.DIFF_DST: p.converted(image(p, dy), pd, c.DIFF_DST),
    }
    if bias is not None:
        arguments[c.DIFF_BIAS] = bias
    margin = margin_of(conv.candidate(kind, pd, p.abi.implementation(pd)))
    p.step_into(pd, arguments, c.DIFF_WEIGHTS, conv.weights(), margin)
    return p


def _matrix(p: PrimitiveList, array: Any, transposed: bool = False) -> OnednnMemory:
    # A transposed matrix is described by its strides and not copied.
    rows, columns = array.shape
    shape, strides = ((columns, rows), (1, columns)) if transposed else ((rows, columns), (columns, 1))
    return p.array(array, p.desc(shape, array.dtype, strides))


def _product(
    p: PrimitiveList, a: OnednnMemory, b: OnednnMemory, out: OnednnMemory, bias: OnednnMemory | None = None
) -> None:
    pd = p.descriptor("matmul", a.desc, b.desc, None if bias is None else bias.desc, out.desc)
    arguments = {c.SRC: a, c.WEIGHTS: b, c.DST: out}
    if bias is not None:
        arguments[c.BIAS] = bias
    p.step(pd, arguments)


def dense_forward(engine: OnednnEngine, x: Any, w: Any, b: Any, y: Any) -> PrimitiveList:
    """Return the list of primitives that computes ``y = x w^T + b``."""
    p = PrimitiveList(engine)
    # matmul takes a bias with as many axes as the output, broadcast over the samples.
    bias = None if b is None else p.array(b, p.desc((1, b.shape[0]), b.dtype, (b.shape[0], 1)))
    _product(p, _matrix(p, x), _matrix(p, w, transposed=True), _matrix(p, y), bias)
    return p


def dense_backward_data(engine: OnednnEngine, dy: Any, w: Any, dx: Any) -> PrimitiveList:
    """Return the list of primitives that computes ``dx = dy w``."""
    p = PrimitiveList(engine)
    _product(p, _matrix(p, dy), _matrix(p, w), _matrix(p, dx))
    return p


def bias(engine: OnednnEngine, y: Any, b: Any) -> PrimitiveList:
    """Return the list of primitives that computes ``y = y + b`` in place; y ``(..., C)``."""
    p = PrimitiveList(engine)
    rows = _matrix(p, y.reshape(-1, y.shape[-1]))
    p.binary(c.BINARY_ADD, rows, _matrix(p, b.reshape(1, -1)), rows)
    return p


def bias_gradient(engine: OnednnEngine, dy: Any, db: Any) -> PrimitiveList:
    """Return the list of primitives that computes ``db = sum of dy`` over all rows, dy ``(..., C)`` in 16 bits, as a
    matrix product.
    """
    p = PrimitiveList(engine)
    _add_column_sums(p, dy.reshape(-1, dy.shape[-1]), db)
    return p


def _add_column_sums(p: PrimitiveList, dy: Any, db: Any) -> None:
    """Add a step that writes to `db` the product of a row of ones with `dy`, which oneDNN sums in float32."""
    ones = np.ones((1, dy.shape[0]), dy.dtype)
    _product(p, _matrix(p, ones), _matrix(p, dy), _matrix(p, db.reshape(1, -1)))


def dense_backward_filter(engine: OnednnEngine, x: Any, dy: Any, dw: Any, db: Any) -> PrimitiveList:
    """Return the list of steps that computes ``dw = dy^T x`` and, if `db` is not None, ``db = sum of dy``."""
    p = PrimitiveList(engine)
    _product(p, _matrix(p, dy, transposed=True), _matrix(p, x), _matrix(p, dw))
    # NumPy has no fast sums of 16 bits. In float32 its sums of blocks keep the digits that a product would lose.
    if db is not None and is_low(dy.dtype):
        _add_column_sums(p, dy, db)
    elif db is not None:
        p.call(column_sums(dy, db))
    return p
