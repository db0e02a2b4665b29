"""NaN stays NaN where oneDNN drops it: its maxima compare, and a comparison with NaN is false.

ReLU, which oneDNN computes as ``max(x, 0)``, is therefore asked for as ``x * min(max(LARGEST * x, 0), 1)``, a product,
which keeps NaN and takes as long (`abi.KEEPING_RELU`). It differs from ``max(x, 0)`` in that -inf gives NaN, negative
numbers give -0, and positive ones below 3e-39 become smaller. Pooling and batch norm have no such way: there the input
is looked at, and where it holds more than numbers NumPy computes.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from halograd.kernels.kernel import Kernel
from halograd.kernels.onednn import abi as c
from halograd.kernels.onednn.program import Engine, Program, ReferenceOnly

__all__ = ["Finite"]


class Finite:
    """Looks whether all elements of a packed array ``(N, *spatial, C)`` are finite, by a sum: reads it once.

    One thread takes the scalar product of the array with itself by BLAS, several take sums by oneDNN.

    Attributes
    ----------
    kernels
        Those that it runs.
    """

    def __init__(self, engine: Engine, x: Any) -> None:
        self._first = self._second = x.reshape(-1)
        self.kernels: tuple[Kernel, ...] = ()
        self._failed = False
        if engine.threads > 1:
            with contextlib.suppress(ReferenceOnly):
                self._sum_by_threads(engine, x)

    def _sum_by_threads(self, engine: Engine, x: Any) -> None:
        p = Program(engine)
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
        """Whether an element of the array, as it is now, is not finite (or the sum of large ones is not)."""
        for kernel in self.kernels:
            kernel()
        self._failed = not math.isfinite(np.dot(self._first, self._second))
        return self._failed

    def failed(self) -> bool:
        """What `fails` said last."""
        return self._failed
