"""Activations and sums of packed arrays in one pass each, and pooling, by oneDNN.

These kernels preserve NaN. oneDNN itself does not: its maxima are comparisons, and a comparison with NaN is false.

oneDNN's ReLU is ``max(x, 0)``, which turns NaN into 0. Ours returns NaN for NaN, and ``max(x, 0)`` for all numbers and
infinities, in one of three ways:

alone           ``max(max(x, 0), x)``: the second maximum returns its second operand if one is NaN; x is in the cache
fused           ``x * min(max(LARGEST * x, 0), 1)`` (`abi.KEEPING_RELU`), as fast as ``max(x, 0)``. It makes NaN of
                -inf, too; the processor flags that as an invalid operation, and then the kernel runs again
                without ReLU, which is applied separately
otherwise       ELU with the factor 0, which blends x with ``0 * (exp(x) - 1)``: with several threads, whose flags
                cannot be read, and in sums that overwrite a term

The gradient of ReLU is a product with 0 or 1. If the processor flags it as invalid, NumPy selects elements instead.
With several threads, and for NaN, which is not flagged, it stays a product.

Max pooling and batch norm check their input, and NumPy computes them if an element is not finite. Other activations use
oneDNN where it is exact to a few roundings, also near saturation; else NumPy.

oneDNN's own GELU is inaccurate below -5: its ``1 + erf(x / sqrt(2))`` cancels. Ours consists of sums and products, by
the formula of :mod:`halograd.kernels.numpy.activation`: with ``a = |x|``, h the nearest multiple of 1/16, and
l = a - h,

    density = exp(-h^2 / 2) exp(-l (l + 2 h) / 2)        tail = density t (c[0] + c[1] u + c[2] u^2 + ...)

and ``Phi = tail`` below 0, else ``1 - tail``. Each formula takes a few primitives with fused operations, on pieces
whose intermediate results stay in the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...device import is_low
from ..checks import same_elements
from ..geometry import Geometry, read_part
from ..kernel import FusedActivation, Kernel, chain, deferred, either, fallback
from ..memory import aligned_empty, packed_strides
from ..numpy.activation import FAR, STRETCH, TAIL
from . import abi as c
from .abi import dims
from .conv import geometry_dims, image, image_desc, zero_rest
from .program import OnednnEngine, OnednnMemory, PrimitiveList, ReferenceOnly

__all__ = ["Finite", "activation", "add", "fuses", "gelu", "is_relu", "max_pool", "operations", "pool", "rectified"]


class Finite:
    """A check that all elements of a packed array ``(N, *spatial, C)`` are finite, by sums or maxima over the array.

    One thread computes the scalar product of the array with itself in BLAS, or the largest bit patterns of an array of
    16 bits; several threads compute sums in oneDNN if it has a fast reduction.

    Attributes
    ----------
    kernels
        Kernels that the check runs.
    """

    def __init__(self, engine: OnednnEngine, x: Any) -> None:
        self._first = self._second = x.reshape(-1)
        self._bits = _bits(x) if is_low(x.dtype) else None
        self.kernels: tuple[Kernel, ...] = ()
        self._failed = False
        if engine.threads > 1:
            with contextlib.suppress(ReferenceOnly):
                self._sum_by_threads(engine, x)

    def _sum_by_threads(self, engine: OnednnEngine, x: Any) -> None:
        p = PrimitiveList(engine)
        rows = math.prod(x.shape[:2])
        length = x.size // rows
        sums = aligned_empty((rows,), np.float32)
        source = p.array(x, p.desc((rows, length), x.dtype, (length, 1)))
        target = p.array(sums, p.desc((rows, 1), np.float32, (1, 1)))
        pd = p.descriptor("reduction", c.REDUCTION_SUM, source.desc, target.desc, 0.0, 0.0)
        p.step(pd, {c.SRC: source, c.DST: target})
        self.kernels, self._bits = (p.kernel(),), None
        self._first, self._second = sums, np.ones_like(sums)

    def fails(self) -> bool:
        """Run the check: return whether an element of the array is not finite, or the sum of large elements overflows.
        """
        for kernel in self.kernels:
            kernel()
        if self._bits is not None:
            positive, negative, infinity = self._bits
            self._failed = positive.max() >= infinity or negative.max() >= infinity + (1 << 15)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                self._failed = not math.isfinite(np.dot(self._first, self._second))
        return self._failed

    def failed(self) -> bool:
        """Return the last result of `fails`."""
        return self._failed


def _bits(x: Any) -> tuple[Any, Any, int]:
    """Return the elements of a 16-bit array as signed and as unsigned integers, and the integer of infinity.

    Positive elements are ordered as signed integers, and negative ones, by magnitude, as unsigned integers.
    """
    flat = x.reshape(-1)
    infinity = int(np.array(np.inf, x.dtype).view(np.uint16))
    return flat.view(np.int16), flat.view(np.uint16), infinity


Pair = tuple[Kernel, Kernel | None]


def max_pool(
    engine: OnednnEngine, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, plain: Callable[[], Pair]
) -> Pair:
    """Return the maximum over windows and its gradient, by oneDNN, or by `plain` if an element of `x` is not finite.

    oneDNN returns the largest number of a window: it drops NaN and treats -inf as -3e38.

    Raises
    ------
    ReferenceOnly
        As in :func:`pool`.
    """
    forward, backward = pool(engine, c.POOLING_MAX, x, y, dy, dx, geometry)
    finite = Finite(engine, x)
    # Forward and backward of `plain` belong together (positions of the maxima), so both come from one call.
    plain = functools.cache(plain)
    safe = either(forward, finite.fails, deferred(lambda: plain()[0]), *finite.kernels)
    if backward is None:
        return safe, None

    def gradient() -> Kernel:
        kernel = plain()[1]
        assert kernel is not None
        return kernel

    return safe, either(backward, finite.failed, deferred(gradient))


def pool(
    engine: OnednnEngine, algorithm: int, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry
) -> tuple[Kernel, Kernel | None]:
    """Return the forward kernel of a pooling, and the backward kernel, or None without `dx`. The forward kernel owns
    the memory with the positions of the maxima.

    Raises
    ------
    ReferenceOnly
        For dilated windows, or padding as wide as the window.
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
    arguments = {c.SRC: p.converted(image(p, x, spatial), pd, c.SRC)}
    positions = p.required(pd, c.WORKSPACE)
    workspace = p.kept(positions) if positions else None
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


# Algorithm of the forward kernels, by kind. oneDNN's other activations drop NaN or lose digits near saturation.
_FORWARD = {"leaky_relu": c.RELU, "sigmoid": c.LOGISTIC, "tanh": c.TANH, "silu": c.SWISH}
# Algorithm of the gradients that read the input.
_BY_INPUT = {"leaky_relu": c.RELU, "silu": c.SWISH, "softplus": c.SOFT_RELU}
# Rate and factor of kinds whose derivative is ``factor * sigmoid'(rate * x)``.
_BELLS = {"sigmoid": (1.0, 1.0), "tanh": (2.0, 4.0)}
# oneDNN's parameter alpha: x * sigmoid(alpha * x), and log(1 + exp(alpha * x)) / alpha.
_SLOPES = {"silu": 1.0, "softplus": 1.0}


class Invalid:
    """The calling thread's sticky processor flag for invalid operations: a comparison with NaN, an infinity times 0."""

    _FLAG = 1  # FE_INVALID of x86 and of 64-bit ARM

    def __init__(self) -> None:
        # None: functions that the process has loaded. PyDLL keeps the interpreter lock, because these calls are short.
        library = ctypes.PyDLL(None)
        self._clear, self._test = library.feclearexcept, library.fetestexcept

    def clear(self) -> None:
        """Clear the flag."""
        self._clear(self._FLAG)

    def raised(self) -> bool:
        """Return whether the flag has been set since it was cleared."""
        return bool(self._test(self._FLAG))


def is_relu(activation: FusedActivation | None) -> bool:
    """Return whether this activation is ReLU."""
    return activation is not None and activation.kind == "relu"


def fuses(activation: FusedActivation | None) -> bool:
    """Return whether another primitive can fuse this activation; True for None."""
    return activation is None or activation.kind == "relu" or activation.kind in _FORWARD


def operations(activation: FusedActivation | None, relu: tuple[int, float, float] = c.EXACT_RELU) -> list[Any]:
    """Return the activation as operations for :meth:`PrimitiveList.attributes`; NaN stays NaN."""
    if activation is None:
        return []
    if activation.kind == "relu":
        return [("eltwise", *relu)]
    if activation.kind == "leaky_relu" and activation.alpha == 0:
        # oneDNN would use ReLU for it. This one returns NaN for -inf, as 0 * -inf does.
        return [("eltwise", *c.KEEPING_RELU)]
    return [("eltwise", _FORWARD[activation.kind], _slope(activation), 0.0)]


def _slope(activation: FusedActivation) -> float:
    return activation.alpha if activation.kind == "leaky_relu" else _SLOPES.get(activation.kind, 0.0)


def rectified(engine: OnednnEngine, y: Any, build: Callable[[Any], Kernel], unfused: Callable[[], Kernel]) -> Kernel:
    """Return a kernel with a fused ReLU.

    `build` builds it from the fused operations. `unfused` builds a kernel that computes `y` again from the same inputs
    and applies ReLU afterwards.
    """
    relu = FusedActivation("relu")
    if engine.threads > 1:
        return build(operations(relu))
    fast, invalid, finite = build(operations(relu, c.KEEPING_RELU)), Invalid(), Finite(engine, y)

    def failed() -> bool:
        if not invalid.raised():
            return False
        # Elements that no output depends on may have set the flag, so check the output.
        with np.errstate(over="ignore", invalid="ignore"):
            return finite.fails()

    return _watched(fast, invalid, failed, unfused)


def _watched(fast: Kernel, invalid: Invalid, failed: Callable[[], bool], exact: Callable[[], Any]) -> Kernel:
    """Return a kernel that clears the flag, runs `fast` and then, if `failed` returns True, the kernel that `exact`
    builds.
    """
    return chain(Kernel(invalid.clear, fast.impl), fallback(fast, failed, deferred(exact)))


def _flat(p: PrimitiveList, array: Any) -> OnednnMemory:
    return p.array(array, p.desc((array.size,), array.dtype, (1,)))


def _read(p: PrimitiveList, array: Any) -> OnednnMemory:
    """Return the elements of an array as contiguous memory: the array's own, or a copy made at every call."""
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
    """Return an elementwise function and its gradient.

    `plain` provides kernels that oneDNN lacks, and the forward kernel for strided `x` or `y`.

    Raises
    ------
    ReferenceOnly
        If `dy` or `dx` is strided; without them, if `x` or `y` is strided.
    """
    if not _packed(dy, dx) or (dx is None and not _packed(x, y)):
        raise ReferenceOnly("oneDNN's activations are slow on strided arrays; use packed ones")
    f = FusedActivation(kind, alpha)
    forward = _forward(engine, f, x, y) if _packed(x, y) else None
    backward = None if dx is None else _backward(engine, f, x, y, dy, dx)
    if backward is not None and f.kind == "relu" and engine.threads == 1 and not same_elements(dy, dx):
        # A product with the slope: infinity times 0 sets the flag.
        invalid = Invalid()
        backward = _watched(backward, invalid, invalid.raised, lambda: plain()[1])  # selects, from the same `dy`
    if forward is not None and (dx is None or backward is not None):
        return forward, backward
    kernels = plain()
    return forward or kernels[0], backward or kernels[1]


def _forward(engine: OnednnEngine, f: FusedActivation, x: Any, y: Any) -> Kernel | None:
    """Return the forward kernel, or None if oneDNN has no accurate one."""
    if f.kind == "gelu":
        return None if is_low(x.dtype) else gelu(engine, x, y)
    if not fuses(f):
        return None
    p = PrimitiveList(engine)
    source, target = _flat(p, x), _flat(p, y)
    if f.kind == "relu":
        p.binary(c.BINARY_MAXIMUM, source, p.number(0), target, ("binary", c.BINARY_MAXIMUM, source))
        return p.kernel()
    ((_, algorithm, *parameters),) = operations(f)
    pd = p.descriptor("eltwise_forward", c.FORWARD_TRAINING, algorithm, source.desc, target.desc, *parameters)
    p.step(pd, {c.SRC: source, c.DST: target})
    return p.kernel()


def _backward(engine: OnednnEngine, f: FusedActivation, x: Any, y: Any, dy: Any, dx: Any) -> Kernel | None:
    """Return the gradient kernel, or None if oneDNN has no accurate one."""
    if f.kind == "gelu":
        return gelu(engine, x, dx, dy) if _packed(x) and not is_low(x.dtype) else None
    if f.by_input and f.kind not in (*_BY_INPUT, *_BELLS):
        return None
    q = PrimitiveList(engine)
    data, gradient, result = _read(q, x if f.by_input else y), _flat(q, dy), _flat(q, dx)
    if f.kind in _BELLS:
        return _bell(q, *_BELLS[f.kind], data, gradient, result)
    # Use the output if possible: the layer may reuse the memory of its input.
    algorithm, slope = _BY_INPUT[f.kind] if f.by_input else c.RELU_BY_OUTPUT, _slope(f)
    hint = q.hint("eltwise_forward", c.FORWARD_TRAINING, algorithm, data.desc, data.desc, slope, 0.0)
    descs = (result.desc, gradient.desc, data.desc)
    pd = q.descriptor("eltwise_backward", algorithm, *descs, slope, 0.0, hint)
    q.step(pd, {c.SRC if f.by_input else c.DST: data, c.DIFF_DST: gradient, c.DIFF_SRC: result})
    return q.kernel()


def _bell(
    q: PrimitiveList, rate: float, factor: float, x: OnednnMemory, dy: OnednnMemory, dx: OnednnMemory
) -> Kernel:
    """Return a kernel for ``dx = factor * s * (1 - s) * dy`` with ``s = sigmoid(-|rate * x|)``, without cancellation.
    """
    operations = (
        ("eltwise", c.ABS, 0.0, 0.0),
        ("eltwise", c.LINEAR, -1.0, 0.0),
        ("eltwise", c.LOGISTIC, 0.0, 0.0),
        ("eltwise", c.HARDSWISH, -1.0, 1.0),  # s * min(max(1 - s, 0), 1)
        ("eltwise", c.LINEAR, factor, 0.0),
        ("binary", c.BINARY_MULTIPLY, dy),
    )
    q.binary(c.BINARY_MULTIPLY, x, q.number(rate), dx, *operations)
    return q.kernel()


#: Two terms, plus one per fused operation (oneDNN takes 32), minus one for an activation.
_MOST_TERMS = 33


def add(engine: OnednnEngine, xs: Sequence[Any], y: Any, fused: Sequence[Any]) -> Kernel:
    """Return a kernel for the sum of two or more arrays with the operations `fused`; `y` may be one of the arrays.

    Raises
    ------
    ReferenceOnly
        For strided arrays, a single term, `y` as a term twice, or more terms than oneDNN fuses.
    """
    same = [x for x in xs if same_elements(x, y)]
    if not 2 <= len(xs) <= _MOST_TERMS or len(same) > 1 or not _packed(*xs, y):
        raise ReferenceOnly(f"oneDNN's sums: expected 2 to {_MOST_TERMS} packed arrays, y at most once among them")
    # oneDNN can overwrite the first operand in place, and no other, so `y` goes first.
    first, second, *rest = same + [x for x in xs if not any(x is s for s in same)]
    p = PrimitiveList(engine)
    more = [("binary", c.BINARY_ADD, _flat(p, x)) for x in rest]
    p.binary(c.BINARY_ADD, _flat(p, first), _flat(p, second), _flat(p, y), *more, *fused)
    return p.kernel()


#: Elements of a piece per thread, and the largest number of pieces (each piece has its own primitives).
_PIECE, _PIECES = 1 << 15, 64
_BUFFERS = 4


def gelu(engine: OnednnEngine, x: Any, out: Any, dy: Any = None) -> Kernel:
    """Return a kernel for ``out = x Phi(x)``, or with `dy` for ``out = (Phi(x) + x phi(x)) dy``; arrays are packed, and
    `out` may be `x`.
    """
    p = PrimitiveList(engine)
    length = min(x.size, max(_PIECE * engine.threads, -(-x.size // _PIECES)))
    scratch = [p.temporary(p.desc((length,), np.float32, (1,))) for _ in range(_BUFFERS)]
    # 0.25 is 1 / STRETCH. All pieces share these.
    numbers = {value: p.number(value) for value in (0.0, 0.25, 16.0, TAIL[np.dtype(np.float32)][-1])}
    for start in range(0, x.size, length):
        # The last piece may be shorter: it uses the beginnings of the same scratch arrays.
        count = min(length, x.size - start)
        desc = p.desc((count,), np.float32, (1,))
        source, target, gradient = (
            None if a is None else p.array(a.reshape(-1)[start : start + count], desc) for a in (x, out, dy)
        )
        assert source is not None and target is not None
        _piece(p, source, target, gradient, [p.part(s, desc, 0) for s in scratch], numbers)
    return p.kernel()


def _piece(
    p: PrimitiveList,
    x: OnednnMemory,
    out: OnednnMemory,
    dy: OnednnMemory | None,
    scratch: list[OnednnMemory],
    numbers: dict[float, OnednnMemory],
) -> None:
    nearest, rest, density, t = scratch
    size, multiply = (("eltwise", c.ABS, 0.0, 0.0), ("eltwise", c.CLIP, 0.0, 16 * FAR)), c.BINARY_MULTIPLY
    # 16 h, 16 l, exp(-h^2 / 2), density.
    p.binary(multiply, x, numbers[16.0], nearest, *size, ("eltwise", c.ROUND, 0.0, 0.0))
    p.binary(multiply, x, numbers[16.0], rest, *size, ("binary", c.BINARY_SUBTRACT, nearest))
    # (16 h)^2 / 512 = h^2 / 2, and 16 l (16 l + 32 h) / 512 = l (l + 2 h) / 2.
    exponential = (("eltwise", c.LINEAR, -1 / 512, 0.0), ("eltwise", c.EXP, 0.0, 0.0))
    p.binary(multiply, nearest, nearest, density, *exponential)
    twice = ("binary", c.BINARY_ADD, nearest)
    end = (("binary", multiply, rest), *exponential, ("binary", multiply, density))
    p.binary(c.BINARY_ADD, rest, nearest, density, twice, *end)
    # t = 1 / (1 + a / 4), u = 2 t - 1, whether x >= 0.
    inverse = (("eltwise", c.LINEAR, 1.0, 1.0), ("eltwise", c.POWER, 1.0, -1.0))
    far = ("eltwise", c.CLIP, 0.0, FAR / STRETCH)
    p.binary(multiply, x, numbers[1 / STRETCH], t, size[0], far, *inverse)
    u, positive = rest, nearest
    p.binary(multiply, t, numbers[16.0], u, ("eltwise", c.LINEAR, 2 / 16, -1.0))
    p.binary(c.BINARY_GREATER_EQUAL, x, numbers[0.0], positive)
    *lower, highest = TAIL[np.dtype(np.float32)]
    steps: list[tuple[Any, ...]] = []
    for coefficient in reversed(lower):
        steps += [("eltwise", c.LINEAR, 1.0, coefficient), ("binary", multiply, u)]
    # Phi = |(x >= 0) - tail|.
    # After the constant term there is no further factor u: the polynomial times t and density is the tail.
    steps[-1:] = [("binary", multiply, t), ("binary", multiply, density), ("eltwise", c.LINEAR, -1.0, 0.0)]
    steps += [("binary", c.BINARY_ADD, positive), ("eltwise", c.ABS, 0.0, 0.0)]
    if dy is None:
        p.binary(multiply, u, numbers[highest], out, *steps, ("binary", multiply, x))
        return
    p.binary(multiply, u, numbers[highest], t, *steps)
    # phi = density / sqrt(2 pi).
    density_of = ("eltwise", c.LINEAR, 1 / math.sqrt(2 * math.pi), 0.0)
    p.binary(multiply, density, x, out, density_of, ("binary", c.BINARY_ADD, t), ("binary", multiply, dy))
