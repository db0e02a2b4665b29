"""Losses: scalar and gradient in one pass, the scalar left on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels.checks import check_packed
from halograd.kernels.cuda.device import THREADS, Device
from halograd.kernels.cuda.launch import Launch, power_of_two, scalar_program
from halograd.kernels.cuda.sources import CODES, Program, dtype_name
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import ScratchKernel
from halograd.kernels.scratch import Scratch

__all__ = ["LossKernel", "elementwise_loss", "softmax_cross_entropy", "target_weight"]


class LossKernel(ScratchKernel):
    """A kernel that writes a loss of which not all samples count.

    Parameters
    ----------
    rows_per_sample
        Positions of one sample.
    divisor
        By which every scale is divided (elements per position).
    """

    def __init__(
        self, launches: tuple[Launch, Launch], scratch: Scratch, impl: str, samples: int, rows: int, divisor: int
    ) -> None:
        self._launches, self._rows, self._divisor, self._samples = launches, rows, divisor, samples
        blocks = launches[0].blocks
        launches[1].set(partials=blocks)

        def bind() -> Callable[[], Any]:
            partial = scratch.view((blocks,), np.float64)
            for launch in launches:
                launch.set(partial=partial)
            return self._both

        super().__init__(bind, scratch, 8 * blocks, f"cuda:{impl}")
        self.set(samples, 1.0)

    def _both(self) -> None:
        first, second = self._launches
        first()
        second()

    def set(self, samples: int, scale: float) -> None:
        """`samples` leading samples count, the others get a gradient of 0; the sum is multiplied by `scale`."""
        counted = max(0, min(samples, self._samples)) * self._rows
        for launch in self._launches:
            launch.set(counted=counted, scale=scale / self._divisor)


def _make(
    device: Device,
    scratch: Scratch,
    name: str,
    program: Program,
    members: dict[str, Any],
    samples: int,
    block: tuple[int, int],
    items: int,
    divisor: int = 1,
) -> LossKernel:
    """`items`: what the threads of a block are spread over, `block[1]` (or all threads of it) at a time."""
    per_block = block[1] if block[1] > 1 else THREADS
    blocks = max(1, min(math.ceil(items / per_block), device.blocks(8)))
    first = Launch(device, program, name, (blocks,), block, **members)
    last = Launch(device, program, "finish_loss", (1,), **members)
    rows = members["rows"] // samples if samples else 0
    return LossKernel((first, last), scratch, name, samples, rows, divisor)


def _code(what: str, target: Any) -> int:
    name = dtype_name(target)
    if name not in CODES:
        raise KernelError(f"{what}: expected targets out of {', '.join(CODES)}, got {name}; convert them")
    return CODES[name]


def _weights(device: Device, weights: Any, channels: int) -> Any:
    """One float64 number per channel on the device, or None."""
    if weights is None:
        return None
    return device.upload(np.ascontiguousarray(np.broadcast_to(np.asarray(weights, np.float64), (channels,))))


def _classes(device: Device, target: Any, classes: int, class_weights: Any, ignore_index: int | None) -> dict[str, Any]:
    check_packed("softmax_cross_entropy", target=target)
    return {
        "target": target,
        "target_code": _code("softmax_cross_entropy", target),
        "weights": _weights(device, class_weights, classes),
        "ignores": ignore_index is not None,
        "ignored": ignore_index or 0,
        "rows": target.size,
        "channels": classes,
    }


def softmax_cross_entropy(
    device: Device,
    scratch: Scratch,
    x: Any,
    target: Any,
    dx: Any,
    loss: Any,
    class_weights: Any,
    label_smoothing: float,
    ignore_index: int | None,
    wrong: Any,
    factor: Any,
) -> LossKernel:
    """See :class:`halograd.layers.SoftmaxCrossEntropy`; x ``(N, *spatial, K)``, target ``(N, *spatial, 1)``."""
    check_packed("softmax_cross_entropy", x=x, dx=dx)
    classes = x.shape[-1]
    if tuple(target.shape) != (*x.shape[:-1], 1):
        raise KernelError(
            f"softmax_cross_entropy: expected a target of shape {(*x.shape[:-1], 1)}, got {tuple(target.shape)}"
        )
    members = {"x": x, "dx": dx, "loss": loss, "wrong": wrong, "factor": factor, "smoothing": label_smoothing}
    members.update(_classes(device, target, classes, class_weights, ignore_index))
    # Few classes: one thread walks through a position. Many: neighboring threads read neighboring classes.
    lanes = 1 if classes <= 8 else power_of_two(classes // 2, 128)
    program = scalar_program("loss", x, dx)
    block = (lanes, THREADS // lanes)
    return _make(device, scratch, "softmax_cross_entropy", program, members, x.shape[0], block, target.size)


def target_weight(
    device: Device,
    scratch: Scratch,
    target: Any,
    total: Any,
    classes: int,
    class_weights: Any,
    ignore_index: int | None,
) -> LossKernel:
    """``total`` float64 (1,) = the sum of the weights of all targets of the samples that count."""
    members = {"loss": total, **_classes(device, target, classes, class_weights, ignore_index)}
    program = Program("loss", ("float32",))
    return _make(device, scratch, "target_weight", program, members, target.shape[0], (THREADS, 1), target.size)


def elementwise_loss(
    device: Device, scratch: Scratch, name: str, x: Any, target: Any, dx: Any, loss: Any, weights: Any, factor: Any
) -> LossKernel:
    """``binary_cross_entropy`` (`weights`: of the positive class) or ``mean_squared_error``, means over channels."""
    check_packed(name, x=x, target=target, dx=dx)
    if tuple(target.shape) != tuple(x.shape):
        raise KernelError(f"{name}: expected a target of shape {tuple(x.shape)}, got {tuple(target.shape)}")
    channels = x.shape[-1]
    members = {"x": x, "target": target, "dx": dx, "loss": loss, "factor": factor, "channels": channels}
    members.update(target_code=_code(name, target), weights=_weights(device, weights, channels))
    members["rows"] = x.size // max(1, channels)
    program = scalar_program("loss", x, dx)
    return _make(device, scratch, name, program, members, x.shape[0], (THREADS, 1), x.size, max(1, channels))
