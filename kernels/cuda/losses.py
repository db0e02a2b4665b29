"""CUDA losses: scalar and gradient in one pass; the scalar stays on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..kernel import ScratchKernel
from ..losses import ClassTargets, LossArrays, Losses, LossKernel
from ..memory import Scratch
from .launch import THREADS, Launch, Launcher, is_large, power_of_two, scalar_program
from .sources import CODES, CudaProgram, dtype_name

__all__ = ["CudaLosses"]


class CudaLoss(ScratchKernel, LossKernel):
    """A loss kernel that can leave out samples.

    Parameters
    ----------
    rows
        Positions per sample.
    divisor
        Number by which every scale is divided (elements per position).
    """

    def __init__(self, launch: Launch, scratch: Scratch, impl: str, samples: int, rows: int, divisor: int) -> None:
        self._launch, self._rows, self._divisor, self._samples = launch, rows, divisor, samples

        def bind() -> Callable[[], Any]:
            # The address changes when the scratch memory grows.
            launch.set(partial=scratch.view((launch.blocks,), np.float64))
            return launch

        super().__init__(bind, scratch, 8 * launch.blocks, f"cuda:{impl}")
        self.set(samples, 1.0)

    def set(self, samples: int, scale: float) -> None:
        # The samples that a short batch lacks are the last ones: their rows get no loss and a gradient of 0.
        counted = max(0, min(samples, self._samples)) * self._rows
        self._launch.set(counted=counted, scale=scale / self._divisor)


class CudaLosses(Losses):
    """Loss kernels in CUDA."""

    launcher: Launcher
    scratch: Scratch

    def _softmax_cross_entropy(self, arrays: LossArrays, targets: ClassTargets, label_smoothing: float) -> LossKernel:
        a, classes = arrays, arrays.x.shape[-1]
        # A class out of range makes the loss NaN: raising an error would take a wait for the device.
        wrong = self.launcher.upload(np.zeros(1, np.int64))
        members = {**_members(a), "wrong": wrong, "smoothing": label_smoothing, **self._classes(a.target, targets)}
        # Few classes: one thread walks through a position. Many: neighboring threads read neighboring classes.
        lanes = 1 if classes <= 8 else power_of_two(classes // 2, 128)
        program, block = scalar_program("loss", a.x, a.dx), (lanes, THREADS // lanes)
        return self._loss("softmax_cross_entropy", program, members, a.x.shape[0], block, a.target.size)

    def _target_weight(self, arrays: LossArrays, targets: ClassTargets) -> LossKernel:
        target = arrays.target
        members = {"loss": arrays.loss, **_factors(arrays), **self._classes(target, targets)}
        program = CudaProgram("loss", large=is_large(target))
        return self._loss("target_weight", program, members, target.shape[0], (THREADS, 1), target.size)

    def _binary_cross_entropy(self, arrays: LossArrays, pos_weight: Any) -> LossKernel:
        return self._elementwise("binary_cross_entropy", arrays, pos_weight)

    def _mean_squared_error(self, arrays: LossArrays) -> LossKernel:
        return self._elementwise("mean_squared_error", arrays, None)

    def _elementwise(self, name: str, arrays: LossArrays, weights: Any) -> LossKernel:
        """Return the kernel of an elementwise loss, averaged over channels; `weights` belong to the positive class."""
        a, channels = arrays, arrays.x.shape[-1]
        members = {**_members(a), "channels": channels, "rows": a.x.size // channels}
        members.update(target_code=CODES[dtype_name(a.target)], weights=self._weights(weights, channels))
        program = scalar_program("loss", a.x, a.dx)
        return self._loss(name, program, members, a.x.shape[0], (THREADS, 1), a.x.size, channels)

    def _classes(self, target: Any, targets: ClassTargets) -> dict[str, Any]:
        return {
            "target": target,
            "target_code": CODES[dtype_name(target)],
            "weights": self._weights(targets.weights, targets.classes),
            # A member is a number and cannot be None, so `ignores` records whether there is an ignored class.
            "ignores": targets.ignored is not None,
            "ignored": targets.ignored or 0,
            "rows": target.size,
            "channels": targets.classes,
        }

    def _weights(self, weights: Any, channels: int) -> Any:
        """Return one float64 weight per channel on the device, or None."""
        if weights is None:
            return None
        return self.launcher.upload(np.ascontiguousarray(np.broadcast_to(np.asarray(weights, np.float64), (channels,))))

    def _loss(
        self,
        name: str,
        program: CudaProgram,
        members: dict[str, Any],
        samples: int,
        block: tuple[int, int],
        items: int,
        divisor: int = 1,
    ) -> LossKernel:
        """Return a loss kernel. A block processes `block[1]` of the `items` at a time; if that is 1, each thread
        processes one.
        """
        per_block = block[1] if block[1] > 1 else THREADS
        blocks = max(1, min(math.ceil(items / per_block), self.launcher.blocks(8)))
        # Not in scratch memory: the count must stay 0 between two launches.
        arrived = self.launcher.upload(np.zeros(1, np.uint64))
        launch = Launch(self.launcher, program, name, (blocks,), block, arrived=arrived, **members)
        return CudaLoss(launch, self.scratch, name, samples, members["rows"] // samples, divisor)


def _members(arrays: LossArrays) -> dict[str, Any]:
    named = {name: getattr(arrays, name) for name in ("x", "target", "dx", "loss", "factor", "divisor")}
    return named | _factors(arrays)


def _factors(arrays: LossArrays) -> dict[str, Any]:
    """Return the weights of positions or elements as members of the kernel's struct."""
    weights = arrays.weights
    if weights is None:
        return {}
    return {"factors": weights, "factor_code": CODES[dtype_name(weights)], "factor_channels": weights.shape[-1]}
