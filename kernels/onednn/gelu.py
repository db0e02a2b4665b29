"""GELU as sums and products in oneDNN. oneDNN's own GELU is inaccurate below -5: its ``1 + erf(x / sqrt(2))`` cancels.

The formula of :mod:`halograd.kernels.numpy.activation`: with ``a = |x|``, h the nearest multiple of 1/16, and l = a -
h,

    density = exp(-h^2 / 2) exp(-l (l + 2 h) / 2)        tail = density t (c[0] + c[1] u + c[2] u^2 + ...)

and ``Phi = tail`` below 0, else ``1 - tail``. Each line is one primitive with fused operations, on pieces whose
intermediate results stay in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..kernel import Kernel
from ..numpy.activation import FAR, STRETCH, TAIL
from . import abi as c
from .program import OnednnEngine, OnednnMemory, PrimitiveList

__all__ = ["gelu"]

#: Elements of a piece per thread, and the largest number of pieces (each piece has its own primitives).
_PIECE, _PIECES = 1 << 15, 64
_BUFFERS = 4


def gelu(engine: OnednnEngine, x: Any, out: Any, dy: Any = None) -> Kernel:
    """Return a kernel for ``out = x Phi(x)``, or ``out = (Phi(x) + x phi(x)) dy``; packed arrays, `out` may be `x`."""
    p = PrimitiveList(engine)
    length = min(x.size, max(_PIECE * engine.threads, -(-x.size // _PIECES)))
    scratch = [p.temporary(p.desc((length,), np.float32, (1,))) for _ in range(_BUFFERS)]
    numbers = {value: p.number(value) for value in (0.0, 0.25, 16.0, TAIL[np.dtype(np.float32)][-1])}
    for start in range(0, x.size, length):
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
    steps[-1:] = [("binary", multiply, t), ("binary", multiply, density), ("eltwise", c.LINEAR, -1.0, 0.0)]
    steps += [("binary", c.BINARY_ADD, positive), ("eltwise", c.ABS, 0.0, 0.0)]
    if dy is None:
        p.binary(multiply, u, numbers[highest], out, *steps, ("binary", multiply, x))
        return
    p.binary(multiply, u, numbers[highest], t, *steps)
    density_of = ("eltwise", c.LINEAR, 1 / math.sqrt(2 * math.pi), 0.0)
    p.binary(multiply, density, x, out, density_of, ("binary", c.BINARY_ADD, t), ("binary", multiply, dy))
