"""Kernels: computations bound to arrays and geometry at build time, with the kernels of empty blocks.

A rank without input or output elements has kernels of its own, the same on every device. Sums over an empty set are
zero. An output without input reads padding only: a convolution returns its bias, a maximum -inf. Shapes of empty blocks
are not checked, because their channel count has no meaning.

Activations have names, and are separate kernels or fused into other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .guards import GUARDS, guarded_bytes
from .memory import Scratch, on_host, round_up

__all__ = [
    "ACTIVATIONS",
    "BY_OUTPUT",
    "BatchNormArrays",
    "BatchNormKernels",
    "BatchNormTraining",
    "FusedActivation",
    "Kernel",
    "KernelError",
    "ScratchKernel",
    "Substitute",
    "any_empty",
    "batch_norm_without_elements",
    "bias_only",
    "chain",
    "deferred",
    "either",
    "fallback",
    "filled",
    "idle",
    "pool_without_input",
    "reads_input",
    "run_all",
]


class KernelError(ValueError):
    """Error: a kernel cannot be built as requested; the message contains the remedy."""


_EMPTY = "empty"


def any_empty(*arrays: Any) -> bool:
    """Return whether any of the arrays is empty."""
    return any(0 in a.shape for a in arrays)


def filled(value: float, *arrays: Any) -> Kernel:
    """Return a kernel that writes `value` into every array that is not None; a no-op without arrays."""
    targets = [a for a in arrays if a is not None and 0 not in a.shape]

    def run() -> None:
        for a in targets:
            a.fill(value)

    return Kernel(run, _EMPTY)


def bias_only(b: Any, y: Any) -> Kernel:
    """Return the forward kernel of a convolution or dense layer with empty input or output: it writes the bias to `y`,
    or 0 without bias.
    """
    if b is None or any_empty(y):
        return filled(0, y)

    def run() -> None:
        y[...] = b

    return Kernel(run, _EMPTY)


def pool_without_input(value: float, y: Any, dx: Any) -> tuple[Kernel, Kernel | None]:
    """Return the kernels of a pooling with empty input or output: they write `value` to `y`, and 0 to `dx`."""
    return filled(value, y), None if dx is None else filled(0, dx)


def batch_norm_without_elements(a: BatchNormArrays) -> BatchNormKernels:
    """Return the batch norm kernels of a rank without elements: its sums are zero."""
    # Statistics of no elements are 0; those of several ranks come from `sums`, or from the caller.
    forward = filled(0, a.mean, a.var) if a.local else idle()
    statistics = idle() if a.local else filled(0, a.sums)
    if a.dx is None:
        return BatchNormKernels(statistics, forward, None, None)
    return BatchNormKernels(statistics, forward, filled(0, a.sums), idle())


class Kernel:
    """A computation on arrays bound at build time. A call runs it and allocates nothing.

    Attributes
    ----------
    impl : str
        Name of the implementation, e.g. ``"numpy:im2col"`` or ``"onednn:brgconv:avx512_core"``.
    workspace_bytes : int
        Memory that this kernel alone holds in addition to its arguments [B].
    scratch_bytes : int
        Memory needed during a call, shared with all kernels of its backend [B].
    """

    impl: str = "nothing"
    workspace_bytes: int = 0
    scratch_bytes: int = 0

    def __init__(
        self, run: Callable[[], Any], impl: str, workspace_bytes: int = 0, close: Callable[[], Any] | None = None
    ) -> None:
        # Decided here, so that calls of kernels without guards do not test for them.
        self._guards = GUARDS if GUARDS.active else None
        self._run: Callable[[], Any] = run if self._guards is None else self._guards.watched(run, impl)
        self._free: Callable[[], Any] | None = close
        self.impl = impl
        self.workspace_bytes = workspace_bytes

    def __call__(self) -> None:
        self._run()

    def close(self) -> None:
        """Free the memory of the kernel, which can no longer run then. `close` may be called twice."""
        free, self._free = self._free, None
        self._run = self._closed  # freed memory must not be read or written
        if free is not None:
            free()

    def _closed(self) -> None:
        raise KernelError(f"kernel {self.impl}: expected an open kernel, got one after close(); build it again")

    def __repr__(self) -> str:
        return f"<Kernel {self.impl}>"


class ScratchKernel(Kernel):
    """A kernel that takes views of its backend's :class:`Scratch` before its first run.

    Parameters
    ----------
    bind
        Function that takes new views and returns the function to run. It is called at the first call, and again after
        the scratch memory has grown.
    guards
        Guard bytes in the scratch memory, ``(start, stop, where)``: offsets [B], and a string for their position.
    """

    def __init__(
        self,
        bind: Callable[[], Callable[[], Any]],
        scratch: Scratch,
        scratch_bytes: int,
        impl: str,
        workspace_bytes: int = 0,
        close: Callable[[], Any] | None = None,
        guards: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        # A stand-in for the function that the first call binds.
        super().__init__(self._closed, impl, workspace_bytes, close)
        self._within = guards
        if self._guards is not None and not guards:  # then one guard after all memory that the kernel uses
            end = round_up(scratch_bytes) + guarded_bytes(scratch_bytes)
            self._within = ((scratch_bytes, end, f"after its scratch memory of {scratch_bytes} B"),)
            scratch_bytes = end
        # At build time, so that no call within a step allocates.
        scratch.reserve(scratch_bytes)
        self._bind: Callable[[], Callable[[], Any]] | None = bind
        self._scratch = scratch
        self._generation = -1  # different from every generation, so that the first call binds
        self.scratch_bytes = scratch_bytes

    def __call__(self) -> None:
        if self._generation != self._scratch.generation and self._bind is not None:
            # A later kernel has reserved more scratch memory: the old views are of memory that may be freed.
            self._run = self._bind()
            if self._guards is not None:
                self._run = self._guards.watched(self._run, self.impl, self._guard_bytes)
            self._generation = self._scratch.generation
        self._run()

    def _guard_bytes(self) -> list[tuple[Any, str]]:
        """Return the guard bytes in the scratch memory with a string for their position; empty on a device."""
        parts = [(self._scratch.view((stop - start,), np.uint8, start), where) for start, stop, where in self._within]
        return [(part, where) for part, where in parts if on_host(part)]

    def close(self) -> None:
        # Else a call after `close` would bind again once the scratch memory has grown, and run.
        self._bind = None
        super().close()


def run_all(calls: Iterable[Callable[[], Any]]) -> Callable[[], Any]:
    """Return one function that makes several calls."""
    parts = tuple(calls)
    if len(parts) == 1:
        return parts[0]

    def run() -> None:
        for part in parts:
            part()

    return run


def idle() -> Kernel:
    """Return a no-op kernel, for a step that another kernel includes."""
    return Kernel(lambda: None, "idle")


def chain(*kernels: Kernel) -> Kernel:
    """Return one kernel that runs several kernels in this order; closing it closes all of them."""
    return _combined(run_all(kernels), " + ".join(k.impl for k in kernels), kernels)


def _combined(run: Callable[[], Any], impl: str, parts: Sequence[Kernel]) -> Kernel:
    """Return a kernel that calls `run`, with the memory of the kernels `parts`; closing it closes all of them."""
    whole = Kernel(run, impl, sum(k.workspace_bytes for k in parts), run_all([k.close for k in parts]))
    whole.scratch_bytes = max((k.scratch_bytes for k in parts), default=0)  # of memory that all kernels share
    return whole


def fallback(first: Kernel, failed: Callable[[], bool], second: Kernel) -> Kernel:
    """Return a kernel that runs `first`, and then `second` if `failed` returns True. Closing it closes both."""

    def run() -> None:
        first()
        if failed():
            second()

    # Named after the kernel that usually is the only one.
    return _combined(run, first.impl, (first, second))


def either(first: Kernel, otherwise: Callable[[], bool], second: Kernel, *conditions: Kernel) -> Kernel:
    """Return a kernel that runs `second` if `otherwise` returns True, else `first`. Closing it closes both, and the
    kernels `conditions`, which `otherwise` may run.
    """
    return _combined(lambda: second() if otherwise() else first(), first.impl, (first, second, *conditions))


def deferred(make: Callable[[], Kernel]) -> Kernel:
    """Return a kernel that is built at its first run. A kernel that rarely runs takes no memory until then."""
    kernels: list[Kernel] = []

    def run() -> None:
        if not kernels:
            kernels.append(make())
        kernels[0]()

    def close() -> None:
        for kernel in kernels:
            kernel.close()

    # Its memory is not counted: most runs never build it.
    return Kernel(run, "deferred", 0, close)


@dataclass(frozen=True)
class Substitute:
    """Description of a kernel that another library or dtype computes, because the backend's library has no fast one.

    Attributes
    ----------
    what
        Factory of the kernel, such as ``"conv_forward"``.
    by
        What computes instead: a library, an implementation, or ``"float32"`` for arrays of 16 bits.
    reason
        Why the backend's library does not compute it, in one line.
    """

    what: str
    by: str
    reason: str


@dataclass(frozen=True)
class BatchNormTraining:
    """Additional work of batch norm kernels in training.

    Attributes
    ----------
    count
        Number of elements per channel, over all processes, from which mean and variance come.
    from_sums
        Whether ``forward()`` derives mean and variance from `sums`, which then cover all processes; else it reads
        `mean` and `var`. Ignored if statistics are local.
    momentum
        Weight of this batch in the running statistics.
    running_mean, running_var
        ``(C,)``, updated by ``forward()`` with mean and unbiased variance; None: not updated.
    dgamma, dbeta
        ``(C,)``, written by ``backward_sums()``: the sums of this process; None: not written.
    """

    count: int
    from_sums: bool = True
    momentum: float = 0.0
    running_mean: Any = None
    running_var: Any = None
    dgamma: Any = None
    dbeta: Any = None

    @property
    def unbiased(self) -> float:
        """Factor that turns the biased variance into the unbiased one."""
        # The variance of one element is 0, with any factor.
        return self.count / max(self.count - 1, 1)

    @property
    def vectors(self) -> dict[str, Any]:
        """The arrays that are not None, by name."""
        names = ("running_mean", "running_var", "dgamma", "dbeta")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class BatchNormArrays:
    """The arguments of :meth:`Backend.batch_norm`; arrays are local.

    Attributes
    ----------
    x, y, dy, dx
        ``(N, *spatial, C)``; `dy` and `dx` are None without a backward pass. Backward reads `y` only with a residual
        and an activation; else it recomputes the input of the activation `f` from `x`.
    gamma, beta, mean, var
        ``(C,)``, of the dtype of `x` or float32; `var` is the biased variance.
    sums, means
        float64 ``(2, C)``: sums over this process, and means over all processes. With arrays of 16 bits both may be
        float32, so that the kernel of a convolution can write the sums.
    local
        False: ``statistics()`` writes ``sums = [sum x, sum x^2]`` (by two passes over blocks that are combined in
        float64, or as accurately as the local statistics) and may overwrite `y`; ``forward()`` takes `mean` and
        `var` as they are, and with `dx` these are statistics of `x`; ``backward_sums()`` writes ``sums = [sum dy', sum
        dy' * xhat]`` with ``dy' = f' * dy`` (``dy`` without activation), and may overwrite `dx`; ``backward_data()``,
        called after it with unchanged `dx`, writes ``dx = gamma / sqrt(var + eps) * (dy' - means[0] - xhat *
        means[1])``. True: ``forward()`` writes `mean` and `var` too, ``backward_sums()`` writes `dx` and `sums`, the
        other two do nothing.
    training
        Additional work: mean and variance from sums over all processes, running statistics, gradients of the
        parameters. Then ``backward_data()`` divides `sums` by ``training.count`` itself, and may overwrite `means`.
    of_x
        Whether `mean` and `var` are statistics of `x`, so that they are NaN if an element of `x` is NaN; with `dx` they
        always are statistics of `x`.
    residual, dresidual
        Shape of `x`, or None. With a residual and an activation, whose derivative must follow from its output,
        ``backward_sums()`` writes ``dresidual = dy'``, which ``backward_data()`` reads; without activation the
        residual's gradient is `dy`, and `dresidual` None.
    summed
        Whether another kernel has computed the sums of the gradient: ``backward_sums()`` is not called, and
        ``backward_data()`` takes `sums`, and a `dy` for which ``f' * dy = dy'``.
    """

    x: Any
    y: Any
    dy: Any
    dx: Any
    gamma: Any
    beta: Any
    mean: Any
    var: Any
    sums: Any
    means: Any
    eps: float
    activation: FusedActivation | None = None
    local: bool = False
    training: BatchNormTraining | None = None
    residual: Any = None
    dresidual: Any = None
    of_x: bool = False
    summed: bool = False

    @property
    def rows(self) -> int:
        """Elements per channel in the local `x`."""
        return int(self.x.size // self.x.shape[-1])


@dataclass(frozen=True)
class BatchNormKernels:
    """The four steps of a batch norm. The backward steps are None without a backward pass."""

    statistics: Kernel
    forward: Kernel
    backward_sums: Kernel | None
    backward_data: Kernel | None

    def close(self) -> None:
        """Close all four kernels."""
        kernels: Sequence[Kernel | None] = (self.statistics, self.forward, self.backward_sums, self.backward_data)
        for kernel in kernels:
            if kernel is not None:
                kernel.close()


#: The CUDA kernels identify activations by their index here.
ACTIVATIONS = (
    *("relu", "leaky_relu", "sigmoid", "tanh", "gelu", "silu", "elu", "hard_sigmoid", "hard_swish", "softplus", "mish"),
    "gelu_tanh",
)
#: Activations whose derivative is computed from the output. For the others, the output near saturation is rounded to
#: its limit, and the derivative, which is small there, would lose its digits.
BY_OUTPUT = ("relu", "leaky_relu")


def reads_input(kind: str, alpha: float = 0.0) -> bool:
    """Return whether the derivative of an activation is computed from its input (True) or its output (False).

    The other array may have been overwritten.
    """
    # With a negative slope the output does not have the sign of the input.
    return kind not in BY_OUTPUT or (kind == "leaky_relu" and alpha < 0)


@dataclass(frozen=True)
class FusedActivation:
    """An elementwise function that a kernel applies to its result before writing it.

    Attributes
    ----------
    kind, alpha
        Arguments of :meth:`halograd.kernels.Backend.activation`.
    """

    kind: str
    alpha: float = 0.0

    @property
    def by_input(self) -> bool:
        """Whether the derivative is computed from the input."""
        return reads_input(self.kind, self.alpha)
