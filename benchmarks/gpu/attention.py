"""Times of attention, forward and backward, by halograd and by torch's `scaled_dot_product_attention`. Local."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.contest import rounds
from benchmarks.gpu.torch_process import TorchProcess
from halograd.device import as_dtype
from halograd.kernels import AttentionGeometry, Backend, Everywhere, Windows

__all__ = ["ATTENTION", "AttentionSubject", "time_attention"]

PATIENCE = 60.0  # [s]
ROUNDS = 3


@dataclass(frozen=True)
class AttentionSubject:
    """An attention in bfloat16: queries, keys and values ``(samples, *extents, heads * width)``.

    With a window there is a relative bias, as in Swin.
    """

    title: str
    samples: int
    extents: tuple[int, ...]
    heads: int
    width: int
    window: int | None = None


ATTENTION = (
    AttentionSubject("4,096 positions, 8 heads of 64", 1, (64, 64), 8, 64),
    AttentionSubject("16,384 positions, 1 head of 64", 1, (128, 128), 1, 64),
    AttentionSubject("7 x 7 windows of 56 x 56, 3 heads of 32", 64, (56, 56), 3, 32, 7),
)


class _Ours:
    """Forward and backward kernels of a subject."""

    def __init__(self, kernels: Backend, s: AttentionSubject) -> None:
        self._device, dtype = kernels.device, as_dtype("bfloat16")
        shape, channels = (s.samples, *s.extents), s.heads * s.width
        q, k, v, dy, y, dq, dk, dv = (kernels.zeros((*shape, channels), dtype) for _ in range(8))
        lse = kernels.zeros((*shape, s.heads), "float32")
        reaches = tuple(Everywhere(n, n) if s.window is None else Windows(n, s.window) for n in s.extents)
        bias = dbias = None
        if s.window is not None:
            table = (s.heads, *(r.bias_extent for r in reaches))
            bias, dbias = (kernels.zeros(table, "float32") for _ in range(2))
        whole = tuple((0, n) for n in s.extents)
        geometry = AttentionGeometry(reaches, whole, whole, (0, s.heads), 1, s.width**-0.5)
        forward = kernels.attention_forward(q, k, v, bias, y, lse, geometry)
        backward = kernels.attention_backward(dy, q, k, v, bias, y, lse, dq, dk, dv, dbias, geometry)
        self._kernels = forward, backward

    @property
    def impl(self) -> str:
        """Names of the implementations."""
        return ", ".join(kernel.impl for kernel in self._kernels)

    def seconds(self, count: int) -> float:
        """Return the mean time of both kernels on the device [s]."""
        first = self._device.timestamp()
        for _ in range(count):
            for kernel in self._kernels:
                kernel()
        second = self._device.timestamp()
        self._device.synchronize()
        return self._device.seconds(first, second) / count

    def close(self) -> None:
        """Free the kernels."""
        for kernel in self._kernels:
            kernel.close()


def time_attention(
    kernels: Backend, subject: AttentionSubject, torch: TorchProcess | None
) -> tuple[str, Mapping[str, float]]:
    """Return a text and the median times of both sides [s], with the times of the candidates of autotuning."""
    ours = _Ours(kernels, subject)
    contestants: dict[str, Any] = {"ours": ours.seconds}
    reasons = [s.reason for s in kernels.take_substitutes()]
    if torch is not None:
        title = subject.title
        torch.request(PATIENCE, do="attention", name=title, subject=asdict(subject))
        contestants["torch"] = lambda count: torch.request(PATIENCE, do="steps", name=title, count=count)["seconds"]
    numbers = {name: statistics.median(times) for name, times in rounds(contestants, ROUNDS).items()}
    impl = ours.impl
    ours.close()
    text = f"us: {', '.join(f'{name} {1e6 * seconds:.0f}' for name, seconds in numbers.items())} ({impl})"
    if torch is not None:
        text += f"; ours / torch {numbers['ours'] / numbers['torch']:.2f}"
    for (direction, _), times in getattr(kernels, "autotuned", dict)().items():
        if direction.startswith("attention"):
            numbers |= {f"{direction}, {name}": seconds for name, seconds in times.items()}
    return "; ".join([text, *dict.fromkeys(reasons)]), numbers
