"""Sums of batch norm in the epilogue of a convolution by cuDNN, compared with a separate pass over its output. Local.

Forward: ``y = conv(x, w)`` with sum and sum of squares of ``y`` per channel. Backward, for a convolution after a batch
norm with ReLU: ``dx = conv'(dy, w)``, masked by the ReLU, with the two sums that the norm's gradient needs. These are
the kernels of the pass ``sums`` of a program. Their sums are in float32; ours are in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.timings import fastest, recorded
from halograd.device import as_dtype
from halograd.kernels import BatchNormArrays, FusedActivation, Geometry
from halograd.kernels.cudnn import sums
from halograd.kernels.cudnn.graphs import Shapes
from halograd.kernels.kernel import Kernel, KernelError

__all__ = ["CASES", "Case", "time_fusions"]

Outcome = tuple[str, Mapping[str, float]]
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A convolution of stride 1 with padding that keeps the extents."""

    title: str
    batch: int
    spatial: tuple[int, ...]
    channels: int
    outputs: int
    kernel: int

    @property
    def geometry(self) -> Geometry:
        return Geometry.of((self.kernel,) * len(self.spatial), 1, self.kernel // 2)

    @property
    def shapes(self) -> Shapes:
        return Shapes.of(*self.extents, self.geometry)

    @property
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of image, weights and output."""
        weights = (self.outputs, *(self.kernel,) * len(self.spatial), self.channels)
        return (self.batch, *self.spatial, self.channels), weights, (self.batch, *self.spatial, self.outputs)


CASES = (
    Case("mesh-2K, 1024^2, 128 to 128, 3 x 3", 1, (1024, 1024), 128, 128, 3),
    Case("ResNet-50, 56^2, 64 to 64, 3 x 3", 64, (56, 56), 64, 64, 3),
    Case("ResNet-50, 14^2, 1024 to 256, 1 x 1", 64, (14, 14), 1024, 256, 1),
    Case("ResNet-50, 7^2, 512 to 2048, 1 x 1", 64, (7, 7), 512, 2048, 1),
    Case("U-Net 3-D, 128^3, 32 to 32, 3 x 3 x 3", 1, (128, 128, 128), 32, 32, 3),
)


class _Arrays:
    """Arrays of a case on the device, with the kernels of halograd that compute the same as the graphs."""

    def __init__(self, kernels: Any, case: Case, backward: bool) -> None:
        self.kernels, self.case, self.backward = kernels, case, backward
        draw, low = np.random.default_rng(1), as_dtype("bfloat16")

        def drawn(shape: tuple[int, ...], size: float = 1.0) -> Any:
            array = kernels.zeros(shape, low)
            kernels.device.assign(array, (size * draw.standard_normal(shape, np.float32)).astype(low))
            return array

        x, w, y = case.extents
        self.x, self.w, self.y = drawn(x), drawn(w, float(np.prod(w[1:])) ** -0.5), drawn(y)
        of = self.x if backward else self.y
        channels = of.shape[-1]
        vectors = {name: kernels.zeros((channels,), "float32") for name in ("gamma", "beta", "mean", "var")}
        for name, value in (("gamma", 1.0), ("var", 1.0), ("beta", 0.1), ("mean", 0.2)):
            vectors[name].fill(value)
        self.sums = kernels.zeros((2, channels), "float64")
        normed, dx = (drawn(x), kernels.zeros(x, low)) if backward else (self.y, None)
        dy, relu = (self.x, FusedActivation("relu")) if backward else (None, None)
        numbers = {"sums": self.sums, "means": kernels.zeros((2, channels), "float64"), "eps": EPS}
        self.arrays = BatchNormArrays(normed, normed, dy, dx, **vectors, **numbers, activation=relu)
        self.norm = kernels.batch_norm(self.arrays)
        self.convolution = (
            kernels.conv_backward_data(self.y, self.w, self.x, case.geometry)
            if backward
            else kernels.conv_forward(self.x, self.w, None, self.y, case.geometry)
        )

    def sum_up(self) -> None:
        """Compute the sums by a pass over the output."""
        (self.norm.backward_sums if self.backward else self.norm.statistics)()

    def separate(self) -> None:
        self.convolution()
        self.sum_up()

    def fused(self) -> tuple[sums.SumsKey, Callable[[], Kernel]]:
        """Return the key of one plan for both, and a function that returns its kernel."""
        engine, geometry = self.kernels._engine, self.case.geometry
        if self.backward:
            return sums.backward_data(engine, self.y, self.w, geometry, self.arrays)
        return sums.forward(engine, self.x, self.w, None, self.y, self.sums, geometry)

    def close(self) -> None:
        self.norm.close()
        self.convolution.close()


def time_fusions(kernels: Any, case: Case, backward: bool) -> Outcome:
    """Time a convolution and a pass for its sums, and both in one kernel; compare the sums.

    With autotune, the times of the plans that were compared are in the result too.
    """
    arrays = _Arrays(kernels, case, backward)
    numbers: dict[str, float] = {}
    arrays.separate()
    for name, run in (("convolution", arrays.convolution), ("sums", arrays.sum_up), ("separate", arrays.separate)):
        numbers[name] = fastest(kernels, recorded(kernels, run))
    expected = kernels.device.to_host(arrays.sums).copy()
    times = ", ".join(f"{name} {1e6 * numbers[name]:.1f}" for name in ("convolution", "sums", "separate"))
    key, make = arrays.fused()
    try:
        fused = make()
    except KernelError as error:
        return f"us: {times}; no plan: {error}", numbers
    numbers["fused"] = seconds = fastest(kernels, recorded(kernels, fused))
    sums_of_plan = kernels.device.to_host(arrays.sums)
    numbers["difference"] = error = float(np.abs(sums_of_plan - expected).max() / np.abs(expected).max())
    plans = kernels._engine.plans.times.get(key, {})
    numbers |= {f"plan {name}": time for name, time in plans.items()}
    for kernel in (fused, arrays):
        kernel.close()
    ratio = seconds / numbers["separate"]
    listed = ", ".join(f"{name} {1e6 * time:.1f}" for name, time in plans.items()) or fused.impl
    return f"us: {times}, fused {1e6 * seconds:.1f} ({ratio:.2f} x, sums differ by {error:.1e}): {listed}", numbers
