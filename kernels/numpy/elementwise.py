"""Activations and sums of arrays; any strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.kernels.checks import same_elements
from halograd.kernels.kernel import Kernel, ScratchKernel
from halograd.kernels.numpy.erf import BUFFERS, erf
from halograd.kernels.scratch import Scratch, nbytes_of, round_up

__all__ = ["activation", "add", "bias"]

Step = Callable[[Any, Any, list[Any], float], None]


def _relu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.maximum(x, 0, out=y)


def _relu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.greater(y, 0, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _leaky(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.multiply(x, alpha, out=work[0])
    np.greater(x, 0, out=work[1])
    # Blended by a mask and not by np.maximum: the slope may exceed 1 or be negative.
    np.subtract(x, work[0], out=work[2])
    np.multiply(work[2], work[1], out=work[2])
    np.add(work[0], work[2], out=y)


def _leaky_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.greater(x, 0, out=work[0])
    np.multiply(work[0], 1 - alpha, out=work[0])
    np.add(work[0], alpha, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _sigmoid(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    # By tanh, which does not overflow: sigmoid(x) = (1 + tanh(x / 2)) / 2.
    np.multiply(x, 0.5, out=work[0])
    np.tanh(work[0], out=work[0])
    np.multiply(work[0], 0.5, out=work[0])
    np.add(work[0], 0.5, out=y)


def _sigmoid_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.subtract(1, y, out=work[0])
    np.multiply(work[0], y, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _tanh(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.tanh(x, out=y)


def _tanh_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.multiply(y, y, out=work[0])
    np.subtract(1, work[0], out=work[0])
    np.multiply(dy, work[0], out=dx)


def _normal_distribution(x: Any, out: Any, work: list[Any]) -> None:
    """``out = (1 + erf(x / sqrt(2))) / 2``; overwrites four more buffers."""
    np.multiply(x, math.sqrt(0.5), out=work[0])
    erf(work[0], out, work[1 : 1 + BUFFERS])
    np.add(out, 1, out=out)
    np.multiply(out, 0.5, out=out)


def _gelu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _normal_distribution(x, work[0 + 4], work)
    np.multiply(x, work[4], out=y)


def _gelu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """``f'(x) = Phi(x) + x * phi(x)``."""
    _normal_distribution(x, work[4], work)
    np.multiply(x, x, out=work[0])
    np.multiply(work[0], -0.5, out=work[0])
    np.exp(work[0], out=work[0])
    np.multiply(work[0], x, out=work[0])
    np.multiply(work[0], 1 / math.sqrt(2 * math.pi), out=work[0])
    np.add(work[4], work[0], out=work[4])
    np.multiply(dy, work[4], out=dx)


# Name: forward, gradient, and the number of buffers of the array's shape that they overwrite.
_KINDS: dict[str, tuple[Step, Callable[..., None], int]] = {
    "relu": (_relu, _relu_gradient, 1),
    "leaky_relu": (_leaky, _leaky_gradient, 3),
    "sigmoid": (_sigmoid, _sigmoid_gradient, 1),
    "tanh": (_tanh, _tanh_gradient, 1),
    "gelu": (_gelu, _gelu_gradient, 5),
}


def activation(
    kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float, scratch: Scratch
) -> tuple[Kernel, Kernel | None]:
    """Elementwise function and its gradient; see :meth:`Backend.activation`."""
    forward, gradient, buffers = _KINDS[kind]
    size = round_up(nbytes_of(x.shape, x.dtype))

    def work() -> list[Any]:
        return [scratch.view(x.shape, x.dtype, i * size) for i in range(buffers)]

    def bind_forward() -> Callable[[], None]:
        views = work()
        return lambda: forward(x, y, views, alpha)

    def bind_backward() -> Callable[[], None]:
        views = work()
        return lambda: gradient(x, y, dy, dx, views, alpha)

    impl = f"numpy:{kind}"
    run = ScratchKernel(bind_forward, scratch, buffers * size, impl)
    return run, None if dx is None else ScratchKernel(bind_backward, scratch, buffers * size, impl)


def add(xs: Sequence[Any], y: Any, relu: bool) -> Kernel:
    """Sum of arrays; `y` may be one of them, or several."""
    into = [x for x in xs if same_elements(x, y)]
    terms = [x for x in xs if not same_elements(x, y)]

    def run() -> None:
        _start(into, terms, y)
        for term in terms[0 if into else 2 :]:
            np.add(y, term, out=y)
        if relu:
            np.maximum(y, 0, out=y)

    return Kernel(run, "numpy:add")


def _start(into: list[Any], terms: list[Any], y: Any) -> None:
    """Make `y` the sum of what it stands for already, or of the first one or two terms."""
    if into:
        if len(into) > 1:
            np.multiply(y, len(into), out=y)
    elif len(terms) > 1:
        np.add(terms[0], terms[1], out=y)
    else:
        np.copyto(y, terms[0])


def bias(y: Any, b: Any) -> Kernel:
    """``y = y + b`` in place."""
    return Kernel(lambda: np.add(y, b, out=y), "numpy:bias")
