"""Kernels of 16-bit arrays by kernels of float32: inputs are widened before a kernel, and outputs rounded after it.

A backend tries its own kernel of 16 bits first. Where it has none, the call of ``super()`` arrives here::

    OnednnBackend._resize (none)  ->  StagedKernels._resize   x, dy  widened  -> float32 stand-ins
                                      self._resize in float32 ...
                                      y, dx  rounded  <- float32 stand-ins

The stand-ins are shared by all staged kernels of a backend. Sums, statistics, parameters of norms, and gradients of
parameters are usually float32 or float64 already; then they pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from ...device import is_low
from ..attention import AttentionArrays, AttentionGeometry
from ..backend import Backend
from ..checks import same_elements
from ..kernel import BatchNormArrays, BatchNormKernels, FusedActivation, Kernel, reads_input
from ..losses import LossArrays, LossKernel
from ..memory import nbytes_of
from ..norms import ChannelNormArrays
from .attention import NumpyAttention
from .convolution import NumpyConvolutions
from .losses import NumpyLosses
from .norms import NumpyNorms
from .pointwise import NumpyPointwise
from .updates import NumpyUpdates

__all__ = ["StagedKernels", "StandInBuffers"]

Record = TypeVar("Record", BatchNormArrays, ChannelNormArrays, LossArrays, AttentionArrays)
Pair = tuple[Kernel, Kernel | None]


class StandInBuffers:
    """Buffers for the float32 stand-ins of all staged kernels of a backend. Contents are undefined between kernels.

    Attributes
    ----------
    nbytes
        Size of all buffers [B].
    """

    def __init__(self, empty: Callable[[Sequence[int], Any], Any]) -> None:
        self._empty, self._buffers = empty, list[Any]()

    @property
    def nbytes(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._buffers)

    def take(self, nbytes: int, used: list[Any]) -> Any:
        """Return the smallest buffer of at least `nbytes` [B] that is not in `used`, or else a new one, and add it to
        `used`.
        """
        free = [b for b in self._buffers if b.nbytes >= nbytes and not any(b is other for other in used)]
        buffer = min(free, key=lambda b: b.nbytes, default=None)
        if buffer is None:
            buffer = self._empty((nbytes,), np.uint8)
            self._buffers.append(buffer)
        used.append(buffer)
        return buffer

    def release(self) -> None:
        """Drop all buffers; staged kernels can no longer run."""
        self._buffers.clear()


class _StandIns:
    """Float32 stand-ins of the 16-bit arrays of one call of a factory, each in a separate buffer."""

    def __init__(self, stage: StandInBuffers) -> None:
        self._stage, self._taken = stage, list[Any]()
        self._pairs: list[tuple[Any, Any]] = []  # (16-bit array, stand-in)

    def __call__(self, array: Any) -> Any:
        """Return the stand-in of a 16-bit array, the same for all views of the same elements; another array, or None,
        is returned itself.
        """
        if array is None or not is_low(array.dtype):
            return array
        # In-place kernels have an array twice, and must find one memory in both.
        for low, wide in self._pairs:
            if low.shape == array.shape and same_elements(low, array):
                return wide
        nbytes = nbytes_of(array.shape, np.float32)
        wide = self._stage.take(nbytes, self._taken)[:nbytes].view(np.float32).reshape(array.shape)
        self._pairs.append((array, wide))
        return wide

    def fields(self, arrays: Record) -> Record:
        """Return a copy of a dataclass with its 16-bit arrays replaced by stand-ins."""
        named = {f.name: getattr(arrays, f.name) for f in fields(arrays)}
        return replace(arrays, **{name: self(a) for name, a in named.items() if isinstance(a, np.ndarray)})

    def around(self, kernel: Kernel, reads: Sequence[Any], writes: Sequence[Any]) -> Kernel:
        """Return `kernel` on stand-ins as a kernel on the arrays that it `reads` and `writes`."""
        return staged(Kernel, kernel, *self.copies(reads, writes))

    def copies(self, reads: Sequence[Any], writes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the pairs (target, source) of the copies before and after a kernel."""
        before = [(self(a), a) for a in reads if self(a) is not a]
        return before, [(a, self(a)) for a in writes if self(a) is not a]


def staged(kind: Any, inner: Kernel, before: list[Any], after: list[Any]) -> Any:
    """Return a kernel of class `kind` that copies the pairs `before`, runs `inner`, and copies the pairs `after`."""

    def run() -> None:
        for target, source in before:
            np.copyto(target, source)
        inner()
        with np.errstate(over="ignore"):  # float16: training detects infinite gradients
            for target, source in after:
                np.copyto(target, source, casting="unsafe")

    kernel = kind(run, f"float32({inner.impl})", inner.workspace_bytes, inner.close)
    kernel.scratch_bytes = inner.scratch_bytes
    return kernel


class _StagedLoss(LossKernel):
    """A loss on stand-ins."""

    inner: LossKernel

    def set(self, samples: int, scale: float) -> None:
        self.inner.set(samples, scale)


class StagedKernels(
    NumpyConvolutions, NumpyAttention, NumpyPointwise, NumpyNorms, NumpyLosses, NumpyUpdates, Backend
):
    """Kernels of 16-bit arrays by the same backend's kernels of float32; those of other arrays are NumPy's.

    Every factory lists its arrays, and those that each of its kernels reads and writes.
    """

    stage: StandInBuffers

    def _kernel(self, name: str, arrays: Sequence[Any], more: Sequence[Any], reads: Any, writes: Any) -> Kernel:
        """Return the kernel of the factory `name`, staged if an array has 16 bits."""
        if not _any_low(arrays):
            return getattr(super(), name)(*arrays, *more)
        s = _StandIns(self.stage)
        # self, not super(): the backend's own kernel of float32 computes, if it has one.
        return s.around(getattr(self, name)(*map(s, arrays), *more), reads, writes)

    def _pair(self, name: str, arrays: Sequence[Any], more: Sequence[Any]) -> Pair:
        """Return both kernels of the factory `name` of (x, y, dy, dx); backward reads `dy` only."""
        if not _any_low(arrays):
            return getattr(super(), name)(*arrays, *more)
        s = _StandIns(self.stage)
        x, y, dy, dx = arrays
        forward, backward = getattr(self, name)(*map(s, arrays), *more)
        return s.around(forward, [x], [y]), None if backward is None else s.around(backward, [dy], [dx])

    # ------------------------------------------------------------------ convolutions and products
    def _conv_forward(self, x: Any, w: Any, b: Any, y: Any, *more: Any) -> Kernel:
        return self._kernel("_conv_forward", (x, w, b, y), more, (x, w, b), (y,))

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, *more: Any) -> Kernel:
        return self._kernel("_conv_backward_data", (dy, w, dx), more, (dy, w), (dx,))

    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, *more: Any) -> Kernel:
        return self._kernel("_conv_backward_filter", (x, dy, dw, db), more, (x, dy), (dw, db))

    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        return self._kernel("_dense_forward", (x, w, b, y), (), (x, w, b), (y,))

    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        return self._kernel("_dense_backward_data", (dy, w, dx), (), (dy, w), (dx,))

    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        return self._kernel("_dense_backward_filter", (x, dy, dw, db), (), (x, dy), (dw, db))

    def _bias(self, y: Any, b: Any) -> Kernel:
        return self._kernel("_bias", (y, b), (), (y, b), (y,))

    def _bias_gradient(self, dy: Any, db: Any) -> Kernel:
        return self._kernel("_bias_gradient", (dy, db), (), (dy,), (db,))

    # ------------------------------------------------------------------ functions of windows and elements
    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, *more: Any) -> Pair:
        return self._pair("_max_pool", (x, y, dy, dx), more)

    def _average_pool(self, x: Any, y: Any, dy: Any, dx: Any, *more: Any) -> Pair:
        return self._pair("_average_pool", (x, y, dy, dx), more)

    def _resize(self, x: Any, y: Any, dy: Any, dx: Any, *more: Any) -> Pair:
        return self._pair("_resize", (x, y, dy, dx), more)

    def _dropout(self, x: Any, y: Any, dy: Any, dx: Any, *more: Any) -> Pair:
        return self._pair("_dropout", (x, y, dy, dx), more)

    def _activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> Pair:
        if not is_low(x.dtype):
            return super()._activation(kind, x, y, dy, dx, alpha)
        # The derivative reads one of both; the other may have been overwritten.
        s, read = _StandIns(self.stage), x if reads_input(kind, alpha) else y
        forward, backward = self._activation(kind, s(x), s(y), s(dy), s(dx), alpha)
        return s.around(forward, [x], [y]), None if backward is None else s.around(backward, [read, dy], [dx])

    def _add(self, xs: list[Any], y: Any, activation: FusedActivation | None) -> Kernel:
        if not is_low(y.dtype):
            return super()._add(xs, y, activation)
        s = _StandIns(self.stage)
        # A term may be `y`: then its stand-in, which is also that of the output, is filled like those of other terms.
        return s.around(self._add([s(x) for x in xs], s(y), activation), xs, [y])

    # ------------------------------------------------------------------ norms
    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        a = arrays
        if not is_low(a.x.dtype):
            return super()._batch_norm(a)
        s = _StandIns(self.stage)
        kernels = self._batch_norm(s.fields(a))
        statistics, sums, data = kernels.statistics, kernels.backward_sums, kernels.backward_data
        read = [a.x, a.gamma, a.beta, a.mean, a.var]
        # Stand-ins are shared with other kernels, so each step copies what it reads again. An idle step copies nothing.
        return BatchNormKernels(
            statistics if a.local else s.around(statistics, [a.x], []),
            s.around(kernels.forward, read, [a.y, *([a.mean, a.var] if a.local else [])]),
            None if sums is None else s.around(sums, [*read, a.dy], [a.dx]),
            data if data is None or a.local else s.around(data, [*read, a.dy, a.dx], [a.dx]),
        )

    def _channel_norm(self, arrays: ChannelNormArrays) -> Pair:
        a = arrays
        if not is_low(a.x.dtype):
            return super()._channel_norm(a)
        s = _StandIns(self.stage)
        forward, backward = self._channel_norm(s.fields(a))
        back = None if backward is None else s.around(backward, [a.x, a.dy, a.gamma], [a.dx, a.dgamma, a.dbeta])
        return s.around(forward, [a.x, a.gamma, a.beta], [a.y]), back

    # ------------------------------------------------------------------ attention
    def _attention_forward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        a = arrays
        if not is_low(a.q.dtype):
            return super()._attention_forward(a, geometry)
        s = _StandIns(self.stage)
        # With merge, the results for other keys are inputs too; `lse` has float32 and passes through.
        read = [a.q, a.k, a.v, a.bias, *([a.y] if geometry.merge else [])]
        return s.around(self._attention_forward(s.fields(a), geometry), read, [a.y])

    def _attention_backward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        a = arrays
        if not is_low(a.q.dtype):
            return super()._attention_backward(a, geometry)
        s = _StandIns(self.stage)
        read = [a.dy, a.q, a.k, a.v, a.bias, a.y, *([a.dq, a.dbias] if geometry.merge else [])]
        return s.around(self._attention_backward(s.fields(a), geometry), read, [a.dq, a.dk, a.dv, a.dbias])

    # ------------------------------------------------------------------ losses
    def _loss(self, name: str, arrays: LossArrays, more: Sequence[Any]) -> LossKernel:
        a = arrays
        if not is_low(a.x.dtype):
            return getattr(super(), name)(a, *more)
        s = _StandIns(self.stage)
        inner = getattr(self, name)(s.fields(a), *more)
        kernel: _StagedLoss = staged(_StagedLoss, inner, *s.copies([a.x, a.target, a.weights], [a.dx]))
        kernel.inner = inner
        return kernel

    def _softmax_cross_entropy(self, arrays: LossArrays, *more: Any) -> LossKernel:
        return self._loss("_softmax_cross_entropy", arrays, more)

    def _target_weight(self, arrays: LossArrays, *more: Any) -> LossKernel:
        return self._loss("_target_weight", arrays, more)

    def _binary_cross_entropy(self, arrays: LossArrays, *more: Any) -> LossKernel:
        return self._loss("_binary_cross_entropy", arrays, more)

    def _mean_squared_error(self, arrays: LossArrays, *more: Any) -> LossKernel:
        return self._loss("_mean_squared_error", arrays, more)


def _any_low(arrays: Sequence[Any]) -> bool:
    return any(a is not None and is_low(a.dtype) for a in arrays)
