"""Checks of the arrays that a kernel is built on; common to all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device import is_low
from .geometry import Geometry, channels_in_memory
from .kernel import BatchNormArrays, KernelError

__all__ = [
    "check_backward",
    "check_batch_norm",
    "check_bias",
    "check_conv",
    "check_dense",
    "check_dtypes",
    "check_packed",
    "check_parameter_dtypes",
    "check_pool",
    "check_residual",
    "check_same_shape",
    "check_scalars",
    "same_elements",
]


def same_elements(a: Any, b: Any) -> bool:
    """Return whether two arrays of one shape share the same memory in the same order, on any device."""
    return _address(a) == _address(b) and a.strides == b.strides


def _address(array: Any) -> int:
    # CuPy's arrays have only the first attribute, NumPy's only the second.
    name = "__cuda_array_interface__" if hasattr(array, "__cuda_array_interface__") else "__array_interface__"
    return int(getattr(array, name)["data"][0])


def check_packed(what: str, **arrays: Any) -> None:
    """Check that every given array is C-contiguous. None stands for an absent array."""
    for name, a in arrays.items():
        if a is not None and not a.flags.c_contiguous:
            raise KernelError(
                f"{what}: expected {name} packed (C-contiguous), got shape {a.shape} with strides {a.strides}; "
                "copy it into a buffer of Backend.empty() first"
            )


def check_dtypes(what: str, allowed: Sequence[str], remedy: str, **arrays: Any) -> None:
    """Check that all given arrays have the same dtype, one of `allowed`."""
    dtypes = {name: np.dtype(a.dtype).name for name, a in arrays.items() if a is not None}
    if len(set(dtypes.values())) > 1:
        text = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise KernelError(f"{what}: expected arrays of one dtype, got {text}; convert them to one")
    dtype = next(iter(dtypes.values()))  # every kernel has at least one array
    if dtype not in allowed:
        raise KernelError(f"{what}: expected dtype {' or '.join(allowed)}, got {dtype}; {remedy}")


def check_parameter_dtypes(what: str, x: Any, **arrays: Any) -> None:
    """Check that all given arrays have the dtype of `x`, or float32 if `x` has 16 bits."""
    dtype = np.dtype(x.dtype).name
    allowed = (dtype, "float32") if is_low(x.dtype) else (dtype,)
    for name, a in arrays.items():
        if a is not None and np.dtype(a.dtype).name not in allowed:
            raise KernelError(
                f"{what}: expected {name} of dtype {' or '.join(allowed)} with arrays of {dtype}, got "
                f"{np.dtype(a.dtype).name}; convert them"
            )


def check_same_shape(what: str, **arrays: Any) -> None:
    """Check that all given arrays have the same shape."""
    shapes = {name: tuple(a.shape) for name, a in arrays.items() if a is not None}
    if len(set(shapes.values())) > 1:
        text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise KernelError(f"{what}: expected arrays of one shape, got {text}; pass arrays of equal shape")


def _expect_shape(what: str, name: str, a: Any, shape: tuple[int, ...], why: str) -> None:
    if tuple(a.shape) != shape:
        raise KernelError(f"{what}: expected {name} of shape {shape}, got {tuple(a.shape)}; {why}")


def _expect_rank(what: str, name: str, a: Any, ndim: int) -> None:
    if len(a.shape) != ndim:
        raise KernelError(
            f"{what}: expected {name} with {ndim} axes, got shape {tuple(a.shape)}; "
            "arrays are (N, *spatial, C), weights (K, *kernel, C / groups)"
        )


def _expect_output(what: str, x: Any, y: Any, geometry: Geometry) -> None:
    """Check that samples and spatial shape of `y` follow from `x`."""
    spatial = geometry.output_shape(x.shape[1:-1])
    if tuple(y.shape[:-1]) != (x.shape[0], *spatial):
        raise KernelError(
            f"{what}: expected an output of shape {(x.shape[0], *spatial, y.shape[-1])} from an input of shape "
            f"{tuple(x.shape)}, got {tuple(y.shape)}; adapt the arrays or the padding of {geometry}"
        )


def check_backward(what: str, dy: Any, dx: Any) -> None:
    """Check that both gradients are given, or neither."""
    if (dy is None) != (dx is None):
        raise KernelError(f"{what}: expected both dy and dx or neither, got one; pass both for a backward kernel")


def check_conv(what: str, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, stored: int = 0) -> None:
    """Check shapes and strides of a convolution or of its gradients. In memory, `x` may be padded to `stored` channels.
    """
    for name, a in (("input", x), ("weights", w), ("output", y)):
        _expect_rank(what, name, a, geometry.ndim + 2)
    check_packed(what, weights=w, bias=b, output=y)
    # Padded as `padded_channels` requests, or not at all.
    if channels_in_memory(x) != stored:
        check_packed(what, input=x)
    channels, filters, groups = x.shape[-1], y.shape[-1], geometry.groups
    if channels % groups or filters % groups:
        raise KernelError(
            f"{what}: expected channels that {groups} groups divide, got {channels} in and {filters} out; "
            "choose another number of groups"
        )
    shape = (filters, *geometry.kernel, channels // groups)
    _expect_shape(what, "weights", w, shape, "weights are (K, *kernel, C / groups)")
    if b is not None:
        _expect_shape(what, "bias", b, (filters,), "a bias has one value per output channel")
    _expect_output(what, x, y, geometry)


def check_pool(what: str, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> None:
    """Check shapes and strides of a pooling and of its gradient."""
    for name, a in (("x", x), ("y", y)):
        _expect_rank(what, name, a, geometry.ndim + 2)
    check_backward(what, dy, dx)
    check_packed(what, x=x, y=y, dy=dy, dx=dx)
    check_same_shape(what, x=x, dx=dx)
    check_same_shape(what, y=y, dy=dy)
    if x.shape[-1] != y.shape[-1]:
        raise KernelError(
            f"{what}: expected as many channels in x as in y, got {x.shape[-1]} and {y.shape[-1]}; pooling keeps them"
        )
    _expect_output(what, x, y, geometry)


def check_batch_norm(x: Any, y: Any, dy: Any, dx: Any, vectors: dict[str, Any], sums: dict[str, Any]) -> None:
    """Check shapes, strides and dtypes of a batch norm: `vectors` are (C,), `sums` (2, C)."""
    what = "batch_norm"
    check_backward(what, dy, dx)
    check_packed(what, x=x, y=y, dy=dy, dx=dx, **vectors, **sums)
    check_same_shape(what, x=x, y=y, dy=dy, dx=dx)
    if len(x.shape) < 2:
        raise KernelError(f"{what}: expected x of shape (N, *spatial, C), got {tuple(x.shape)}; add the sample axis")
    for name, a in vectors.items():
        _expect_shape(what, name, a, (x.shape[-1],), "it has one value per channel")
        if np.dtype(a.dtype) not in (np.dtype(x.dtype), np.dtype(np.float32)):
            raise KernelError(
                f"{what}: expected {name} of dtype {np.dtype(x.dtype).name} or float32, got "
                f"{np.dtype(a.dtype).name}; convert it"
            )
    for name, a in sums.items():
        _expect_shape(what, name, a, (2, x.shape[-1]), "it has two values per channel")
        # With 16 bits, the kernel of a convolution may have written the sums.
        if np.dtype(a.dtype) != np.float64 and not (is_low(x.dtype) and np.dtype(a.dtype) == np.float32):
            raise KernelError(
                f"{what}: expected {name} of dtype float64, got {np.dtype(a.dtype).name}; sums of many terms need it"
            )
    if len({np.dtype(a.dtype) for a in sums.values()}) > 1:
        raise KernelError(f"{what}: expected sums and means of one dtype, got two; make both float64")


def check_residual(a: BatchNormArrays) -> None:
    """Check shapes and strides of the residual of a batch norm, that the activation permits a residual, and that
    `dresidual` is given exactly where it is needed.
    """
    check_packed("batch_norm", residual=a.residual, dresidual=a.dresidual)
    check_same_shape("batch_norm", x=a.x, residual=a.residual, dresidual=a.dresidual)
    # No array holds the sum of norm and residual, which such a derivative would read.
    if a.residual is not None and a.dx is not None and a.activation is not None and a.activation.by_input:
        raise KernelError(
            f"batch_norm: expected an activation whose derivative follows from its output with a residual, got "
            f"{a.activation.kind}; apply it after the batch norm"
        )
    # The residual's gradient is f' * dy: without an activation `dy` itself, without a backward pass nothing.
    needed = a.residual is not None and a.activation is not None and a.dx is not None
    if needed != (a.dresidual is not None):
        raise KernelError(
            f"batch_norm: expected dresidual {'with' if needed else 'only with'} a residual, an activation and dx, "
            f"got {'none' if needed else 'one'}; without activation the residual's gradient is dy"
        )


def check_bias(what: str, y: Any, b: Any) -> None:
    """Check that `b` has one value per channel of the packed array `y` ``(..., C)``."""
    check_packed(what, y=y, b=b)
    _expect_shape(what, "b", b, (y.shape[-1],), "it has one value per channel")


def check_scalars(what: str, **arrays: Any) -> None:
    """Check that scalars in device memory are float64 (1,), or None."""
    for name, a in arrays.items():
        if a is not None and (tuple(a.shape) != (1,) or np.dtype(a.dtype) != np.float64):
            described = f"{np.dtype(a.dtype).name} {tuple(a.shape)}"
            raise KernelError(f"{what}: expected {name} float64 (1,), got {described}; sums of many terms need it")


def check_dense(what: str, x: Any, w: Any, b: Any, y: Any) -> None:
    """Check shapes and strides of a dense layer, x (N, F), w (K, F), b (K,), y (N, K), or of their gradients."""
    for name, a in (("input", x), ("weights", w), ("output", y)):
        if len(a.shape) != 2:
            raise KernelError(
                f"{what}: expected {name} with 2 axes, got shape {tuple(a.shape)}; x is (N, F), w (K, F), y (N, K)"
            )
    check_packed(what, input=x, weights=w, bias=b, output=y)
    _expect_shape(what, "weights", w, (y.shape[1], x.shape[1]), "weights are (K, F)")
    _expect_shape(what, "output", y, (x.shape[0], w.shape[0]), "the output is (N, K)")
    if b is not None:
        _expect_shape(what, "bias", b, (w.shape[0],), "a bias has one value per output")
