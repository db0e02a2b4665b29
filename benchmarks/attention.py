"""Time of attention, forward and backward, divided by that of torch's `scaled_dot_product_attention`.

    python benchmarks/attention.py
    python benchmarks/attention.py --threads 1 --rounds 30 --backend numpy

Both sides take queries, keys and values ``(N, *spatial, heads * channels)`` in float32 and return the output and the
three gradients in that layout; torch includes the partition into windows, as torchvision's Swin does it. Rounds
alternate. ``wall`` is the ratio of the least times, and of the medians; ``cpu`` the ratio of the least processor times
of all threads, which other processes of the machine disturb less.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.kernels import AttentionGeometry, Everywhere, Windows, get_backend

#: Name, samples, spatial extents, window, heads, channels per head.
CASES = (
    ("global 4,096", 1, (4096,), None, 8, 64),
    ("windows of 56 x 56", 8, (56, 56), 7, 3, 32),
    ("windows of 14 x 14", 16, (14, 14), 7, 12, 32),
)


def ours(
    backend: Any, arrays: list[np.ndarray], window: int | None, heads: int
) -> tuple[Callable[[], None], list[Any]]:
    """Return a function that computes forward and backward, and its results."""
    q, k, v, dy = (backend.empty(a.shape, a.dtype) for a in arrays)
    for target, source in zip((q, k, v, dy), arrays):
        np.copyto(target, source)
    extents, width = q.shape[1:-1], q.shape[-1] // heads
    reaches = tuple(Everywhere(n, n) if window is None else Windows(n, window) for n in extents)
    whole = tuple((0, n) for n in extents)
    geometry = AttentionGeometry(reaches, whole, whole, (0, heads), 1, width**-0.5)
    y, dq, dk, dv = (backend.empty(q.shape, q.dtype) for _ in range(4))
    lse = backend.empty((*q.shape[:-1], heads), np.float32)
    forward = backend.attention_forward(q, k, v, None, y, lse, geometry)
    backward = backend.attention_backward(dy, q, k, v, None, y, lse, dq, dk, dv, None, geometry)

    def run() -> None:
        forward()
        backward()

    return run, [y, dq, dk, dv]


def theirs(arrays: list[np.ndarray], window: int | None, heads: int) -> tuple[Callable[[], None], list[Any]]:
    """Return the same in torch."""
    q, k, v, dy = (torch.tensor(a, requires_grad=i < 3) for i, a in enumerate(arrays))
    results: list[Any] = [None] * 4

    def windows(x: Any) -> Any:
        n, c = x.shape[0], x.shape[-1] // heads
        if window is None:
            return x.reshape(n, -1, heads, c).transpose(1, 2)
        a, b = (m // window for m in x.shape[1:-1])
        split = x.reshape(n, a, window, b, window, heads, c).permute(0, 1, 3, 5, 2, 4, 6)
        return split.reshape(n * a * b, heads, window**2, c)

    def image(x: Any) -> Any:
        if window is None:
            return x.transpose(1, 2).reshape(q.shape)
        n, a, b = q.shape[0], *(m // window for m in q.shape[1:-1])
        split = x.reshape(n, a, b, heads, window, window, -1).permute(0, 1, 4, 2, 5, 3, 6)
        return split.reshape(q.shape)

    def run() -> None:
        for x in (q, k, v):
            x.grad = None
        y = image(torch.nn.functional.scaled_dot_product_attention(windows(q), windows(k), windows(v)))
        y.backward(dy)
        results[:] = [y.detach(), q.grad, k.grad, v.grad]

    return run, results


def main(
    threads: Annotated[int, typer.Option(help="threads of both sides")] = 2,
    rounds: Annotated[int, typer.Option(help="rounds of each case")] = 15,
    backend: Annotated[str, typer.Option(help="our backend")] = "onednn",
) -> None:
    torch.set_num_threads(threads)
    draw = np.random.default_rng(0)
    for name, samples, extents, window, heads, width in CASES:
        shape = (samples, *extents, heads * width)
        arrays = [draw.standard_normal(shape).astype(np.float32) for _ in range(4)]
        with get_backend(backend, threads=threads) as kernels:
            (mine, got), (other, want) = ours(kernels, arrays, window, heads), theirs(arrays, window, heads)
            times: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
            for number in range(rounds + 1):
                for side, run in (("ours", mine), ("torch", other)):
                    begin = time.perf_counter(), time.process_time()
                    run()
                    if number:  # the first round prepares
                        times[side].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            error = max(float(np.abs(a - b.numpy()).max()) for a, b in zip(got, want))
        wall, cpu = ({side: [pair[i] for pair in pairs] for side, pairs in times.items()} for i in (0, 1))
        print(
            f"{name:20s} ours {min(wall['ours']) * 1e3:7.1f} ms, torch {min(wall['torch']) * 1e3:7.1f} ms: wall "
            f"{min(wall['ours']) / min(wall['torch']):.2f} (median "
            f"{statistics.median(wall['ours']) / statistics.median(wall['torch']):.2f}), cpu "
            f"{min(cpu['ours']) / min(cpu['torch']):.2f}; largest difference {error:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
