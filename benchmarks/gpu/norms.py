"""Bandwidth of the kernels of batch norm, in several launches and in one per direction. Local."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.gpu.timings import fastest, recorded
from halograd.device import as_dtype
from halograd.kernels import BatchNormArrays, FusedActivation
from halograd.kernels.cuda import norms

__all__ = ["NORMS", "Shape", "time_norm"]

Outcome = tuple[str, Mapping[str, float]]
#: Launches in one graph: the graph's own start takes some microseconds.
REPEATS = 10


@dataclass(frozen=True)
class Shape:
    """Shape of one norm with ReLU, in bfloat16."""

    title: str
    batch: int
    spatial: tuple[int, ...]
    channels: int
    residual: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, *self.spatial, self.channels)


NORMS = (
    Shape("mesh-2K, 1024^2 x 128", 1, (1024, 1024), 128),
    Shape("U-Net 3-D, 128^3 x 32", 1, (128, 128, 128), 32),
    Shape("ResNet-50, 64 x 112^2 x 64", 64, (112, 112), 64),
    Shape("ResNet-50, 64 x 56^2 x 256", 64, (56, 56), 256, residual=True),
    Shape("ResNet-50, 64 x 28^2 x 128", 64, (28, 28), 128),
    Shape("ResNet-50, 64 x 14^2 x 256", 64, (14, 14), 256),
    Shape("ResNet-50, 64 x 14^2 x 1024", 64, (14, 14), 1024),
    Shape("ResNet-50, 64 x 7^2 x 2048", 64, (7, 7), 2048, residual=True),
    Shape("ResNet-50, 1 x 56^2 x 64", 1, (56, 56), 64),
    Shape("ResNet-50, 1 x 14^2 x 1024", 1, (14, 14), 1024),
    Shape("ResNet-50, 1 x 7^2 x 2048", 1, (7, 7), 2048),
)


def time_norm(kernels: Any, case: Shape, repeats: int = REPEATS) -> Outcome:
    """Time the four steps of a norm over several ranks, and both ways of a norm of one rank.

    The text has microseconds, and the bandwidth of the bytes that each kernel must read and write at least.
    """
    drawn, low = np.random.default_rng(1).standard_normal(1 << 20, np.float32), as_dtype("bfloat16")
    arrays: dict[str, Any] = {name: kernels.zeros(case.shape, low) for name in ("x", "y", "dy", "dx")}
    for name, some in (("x", drawn.astype(low)), ("dy", drawn[::-1].astype(low))):
        kernels.device.assign(arrays[name], np.resize(some, case.shape))
    arrays |= {name: kernels.zeros((case.channels,), "float32") for name in ("gamma", "beta", "mean", "var")}
    arrays["gamma"].fill(1)
    arrays["var"].fill(1)
    arrays |= {name: kernels.zeros((2, case.channels), "float64") for name in ("sums", "means")}
    if case.residual:
        arrays |= {name: kernels.zeros(case.shape, low) for name in ("residual", "dresidual")}
    given = BatchNormArrays(**arrays, eps=1e-5, activation=FusedActivation("relu"))
    nbytes, more = given.x.nbytes, int(case.residual)
    numbers: dict[str, float] = {}

    def timed(name: str, kernel: Callable[[], Any]) -> float:
        graph = recorded(kernels, lambda: [kernel() for _ in range(repeats)])
        numbers[name] = fastest(kernels, graph) / repeats
        return numbers[name]

    texts = []
    made = kernels.batch_norm(given)
    steps = {"statistics": 1, "forward": 2 + more, "backward_sums": 2 + 2 * more, "backward_data": 3}
    for name, passes in steps.items():
        seconds = timed(name, getattr(made, name))
        texts.append(f"{name} {1e6 * seconds:.1f} ({passes * nbytes / seconds / 1e9:.0f} GB/s)")
        getattr(made, name).close()
    usual = norms.is_one_launch
    texts.append("one rank, in one launch" if usual(given.rows, nbytes, 1, 1) else "one rank")
    try:
        for launches in (1, 2):
            norms.is_one_launch = lambda *_, one=launches == 1: one
            if launches == 1 and given.rows > 16384:
                continue  # a block reads so many rows that it takes milliseconds
            local = kernels.batch_norm(replace(given, local=True))
            pair = [timed(f"{name}, {launches}", getattr(local, name)) for name in ("forward", "backward_sums")]
            texts.append(f"{launches}: {1e6 * pair[0]:.1f} + {1e6 * pair[1]:.1f}")
            local.forward.close()
            local.backward_sums.close()
    finally:
        norms.is_one_launch = usual
    return f"us: {', '.join(texts)}", numbers
