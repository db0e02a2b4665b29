"""Interface of pooling, elementwise functions, resizing and dropout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import checks
from .base import Base
from .geometry import Geometry, Resampled
from .kernel import (
    ACTIVATIONS,
    FusedActivation,
    Kernel,
    KernelError,
    any_empty,
    filled,
    pool_without_input,
    reads_input,
)

__all__ = ["DropoutMask", "Pointwise"]


@dataclass(frozen=True)
class DropoutMask:
    """Mask of dropped elements of a block. It depends only on their positions in the global array.

    An element is dropped if ``hash(key + GOLDEN * index) < rate * 2**64``, with the finalizer of SplitMix64 as hash,
    `index` the element's position in the global array in row-major order, and `key` a hash of seed, step and `salt`.

    Attributes
    ----------
    rate
        Probability of each element to be dropped, in ``[0, 1)``.
    salt
        Number that distinguishes layers.
    shape, start
        Shape of the global array, and start of the block in it.
    state
        uint64 ``(3,)`` on the kernels' device, read when a kernel runs: seed, step, and the number of samples by which
        the block begins after `start`, for parts of a batch that are computed one after the other.
    """

    rate: float
    salt: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    state: Any


class Pointwise(Base):
    """Factories of pooling, elementwise functions, resizing and dropout, which have no weights."""

    def max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        """Build the maximum over windows, forward and backward. The first of equal elements gets the gradient.

        Padding counts as -inf. The backward kernel uses the positions that the forward kernel stored, and reads neither
        `x` nor `y`. Without `dy` and `dx` (None) the backward kernel is None.
        """
        self._check_dtypes("max_pool", x=x, y=y, dy=dy, dx=dx)
        if any_empty(x, y):
            # Outputs without input read padding only.
            return pool_without_input(float("-inf"), y, dx)
        checks.check_pool("max_pool", x, y, dy, dx, geometry)
        return self._max_pool(x, y, dy, dx, geometry)

    def average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        """Build the mean over windows, forward and backward: over all taps (`count_include_pad`) or those inside `x`.

        Backward reads neither `x` nor `y`. Without `dy` and `dx` (None) the backward kernel is None.
        """
        self._check_dtypes("average_pool", x=x, y=y, dy=dy, dx=dx)
        if any_empty(x, y):
            return pool_without_input(0.0, y, dx)
        checks.check_pool("average_pool", x, y, dy, dx, geometry)
        return self._average_pool(x, y, dy, dx, geometry, count_include_pad)

    def activation(
        self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float = 0.0
    ) -> tuple[Kernel, Kernel | None]:
        """Build ``y = f(x)`` and ``dx = f'(x) * dy``, elementwise. The arrays may be strided, and `x` may be `y`.

        `kind` is relu, leaky_relu (slope `alpha` below 0), sigmoid, tanh, gelu (by erf), silu (``x * sigmoid(x)``), elu
        (``alpha * (exp(x) - 1)`` below 0, `alpha` >= 0), hard_sigmoid (``min(max(x / 6 + 1/2, 0), 1)``), hard_swish (x
        times hard_sigmoid), softplus (``log(1 + exp(x))``), mish (``x * tanh(softplus(x))``) or gelu_tanh (gelu
        approximated by tanh). The gradient reads either `x` or `y`, see :func:`halograd.kernels.kernel.reads_input`.
        Without `dy` and `dx` (None) the backward kernel is None.
        """
        if kind not in ACTIVATIONS:
            raise KernelError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {kind!r}; choose one")
        checks.check_backward("activation", dy, dx)
        checks.check_same_shape("activation", x=x, y=y, dy=dy, dx=dx)
        self._check_dtypes("activation", x=x, y=y, dy=dy, dx=dx)
        if any_empty(x):
            return filled(0), None if dx is None else filled(0)
        if kind == "elu" and not alpha >= 0:
            raise KernelError(f"activation: expected alpha >= 0 of elu, got {alpha}; it would not be monotonous")
        # In place, the forward kernel overwrites what the gradient reads.
        if dy is not None and checks.same_elements(x, y) and reads_input(kind, alpha):
            raise KernelError(f"activation: expected separate x and y for the gradient of {kind}, got one; use two")
        return self._activation(kind, x, y, dy, dx, alpha)

    def add(self, xs: Sequence[Any], y: Any, activation: FusedActivation | None = None) -> Kernel:
        """Build ``y = f(sum of xs)``. The arrays may be strided, and `y` may be one of `xs`."""
        if not xs:
            raise KernelError("add: expected at least one array to add, got none; pass the terms of the sum")
        named = {f"xs[{i}]": x for i, x in enumerate(xs)}
        checks.check_same_shape("add", **named, y=y)
        self._check_dtypes("add", **named, y=y)
        if any_empty(y):
            return filled(0)
        return self._add(list(xs), y, activation)

    def resize(self, x: Any, y: Any, dy: Any, dx: Any, axes: Sequence[Resampled]) -> tuple[Kernel, Kernel | None]:
        """Build an interpolation, axis after axis, forward and backward; arrays are packed ``(N, *spatial, C)``.

        `axes` has one entry per spatial axis, for the outputs in `y` and the inputs in `x`. Without `dy` and `dx`
        (None) the backward kernel is None.
        """
        self._check_dtypes("resize", x=x, y=y, dy=dy, dx=dx)
        if any_empty(x, y):
            return filled(0, y), None if dx is None else filled(0, dx)
        checks.check_packed("resize", x=x, y=y, dy=dy, dx=dx)
        checks.check_same_shape("resize", x=x, dx=dx)
        checks.check_same_shape("resize", y=y, dy=dy)
        # The CUDA kernel has three axes; all backends refuse more.
        if len(axes) != len(x.shape) - 2 or len(axes) > 3:
            raise KernelError(f"resize: expected one of at most 3 spatial axes each, got {len(axes)} of {x.shape}")
        for axis, inputs, outputs in zip(axes, x.shape[1:-1], y.shape[1:-1]):
            # Kernels compute positions in the arrays from `axis` alone and check none of them.
            first, last = axis.input_range()
            if axis.stop - axis.start != outputs or first < 0 or last > inputs:
                raise KernelError(
                    f"resize: expected {axis.stop - axis.start} outputs of the inputs [{first}, {last}), got {outputs} "
                    f"of {inputs}; pass the arrays of the block"
                )
        return self._resize(x, y, dy, dx, axes)

    def dropout(self, x: Any, y: Any, dy: Any, dx: Any, mask: DropoutMask) -> tuple[Kernel, Kernel | None]:
        """Build ``y = x / (1 - rate)`` for kept elements, else 0, and the same from `dy` to `dx`; packed.

        Without `dy` and `dx` (None) the backward kernel is None. The backward kernel draws the mask again, so
        `mask.state` must not change between forward and backward.
        """
        self._check_dtypes("dropout", x=x, y=y, dy=dy, dx=dx)
        checks.check_packed("dropout", x=x, y=y, dy=dy, dx=dx)
        checks.check_same_shape("dropout", x=x, y=y, dy=dy, dx=dx)
        # Before the return for empty blocks, so that all ranks raise the same error.
        if not 0 <= mask.rate < 1:
            raise KernelError(f"dropout: expected a rate in [0, 1), got {mask.rate}; pass the share to drop")
        if not len(mask.shape) == len(mask.start) == len(x.shape):
            raise KernelError(
                f"dropout: expected shape and start for {len(x.shape)} axes, got {mask.shape} and {mask.start}"
            )
        if any_empty(x):
            return filled(0), None if dx is None else filled(0)
        return self._dropout(x, y, dy, dx, mask)

    @abstractmethod
    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]: ...

    @abstractmethod
    def _average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]: ...

    @abstractmethod
    def _activation(
        self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float
    ) -> tuple[Kernel, Kernel | None]: ...

    @abstractmethod
    def _add(self, xs: list[Any], y: Any, activation: FusedActivation | None) -> Kernel: ...

    @abstractmethod
    def _resize(self, x: Any, y: Any, dy: Any, dx: Any, axes: Sequence[Resampled]) -> tuple[Kernel, Kernel | None]: ...

    @abstractmethod
    def _dropout(self, x: Any, y: Any, dy: Any, dx: Any, mask: DropoutMask) -> tuple[Kernel, Kernel | None]: ...
