"""Random geometries for oneDNN: every direction and algorithm, with guard bytes, compared with NumPy in float64.

``python -m tests.kernels.random_geometries 5000 2`` tries 5000 with 2 threads per kernel, and reports counts; the suite
tries a few with one thread. ``ONEDNN_MAX_CPU_ISA=AVX2`` limits the instruction set.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halograd.kernels import BatchNormArrays, Geometry, Kernel, get_backend
from halograd.kernels.guards import GUARDS, GuardError
from halograd.kernels.onednn import OnednnBackend, faults
from halograd.kernels.onednn import conv as convolutions
from halograd.kernels.onednn.program import ReferenceOnly

from .conftest import Arrays, assert_close

NUMBERS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64)


@dataclass
class Counts:
    """Counts of trials and of faults.

    Attributes
    ----------
    kinds
        Number of geometries by kind.
    implementations
        Number of kernels by name of the implementation.
    refused
        Number of rejected implementations, by name and reason.
    overruns, wrong
        Descriptions of faults.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    implementations: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    overruns: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Only:
    """Double of the choice among algorithms, which takes a given algorithm, or the first if that is missing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kernel(self, key: Any, candidates: Mapping[str, Callable[[], Any]]) -> Kernel:
        try:
            return candidates[self.name]().kernel()
        except (KeyError, ReferenceOnly):
            return candidates["packed"]().kernel()


class Trial:
    """Trial of one geometry on oneDNN and NumPy."""

    def __init__(self, onednn: OnednnBackend, numpy: Any, seed: int, counts: Counts) -> None:
        self.onednn, self.numpy, self.counts = onednn, numpy, counts
        self.random = np.random.default_rng(seed)
        self.mine = Arrays(onednn, np.float32)

    def one(self, *of: Any) -> Any:
        return of[self.random.integers(len(of))]

    def inputs(self, *shapes: tuple[int, ...]) -> list[tuple[Any, Any]]:
        """Return arrays with the same values in float32 for oneDNN, and in float64 for NumPy."""
        made = []
        for shape in shapes:
            values = self.random.standard_normal(shape).astype(np.float32)
            mine, other = self.mine.poisoned(*shape), self.numpy.zeros(shape, np.float64)
            mine[...], other[...] = values, values
            made.append((mine, other))
        return made

    def outputs(self, *shapes: tuple[int, ...]) -> list[tuple[Any, Any]]:
        return [(self.mine.poisoned(*shape), self.numpy.zeros(shape, np.float64)) for shape in shapes]

    def run(self, *kernels: Kernel | None) -> None:
        built = [kernel for kernel in kernels if kernel is not None]
        for kernel in built:
            self.counts.implementations[kernel.impl] += 1
            kernel()
        for kernel in built:  # after all have run: a backward kernel may read memory of the forward kernel
            kernel.close()

    def compare(self, label: str, build: Callable[[Any, int], Any], **outputs: tuple[tuple[Any, Any], int]) -> str:
        """Run the kernels that `build` returns for oneDNN (0) and NumPy (1), and compare pairs of outputs.

        Each output is a pair of arrays and the length of the sums behind them. Returns the label.
        """
        self.run(*build(self.onednn, 0))
        for kernel in build(self.numpy, 1):
            kernel()
        for name, (pair, terms) in outputs.items():
            infinite = np.isinf(pair[1])
            assert np.array_equal(np.isinf(pair[0]), infinite), label
            for array in pair:
                array[infinite] = 0
            assert_close(*pair, terms, f"{label}, {name}")
        return label

    # ------------------------------------------------------------------ kinds
    def window(self, thin: bool) -> tuple[Geometry, tuple[int, ...]]:
        """Return a random geometry and the extents of an input."""
        ndim = self.one(1, 2, 2, 2, 3)
        most = {1: 400, 2: 96, 3: 12}[ndim] if thin else {1: 200, 2: 40, 3: 10}[ndim]
        if thin:
            stride = tuple(int(self.one(1, 2, 2, 3)) for _ in range(ndim))
            spatial = tuple(s * int(self.random.integers(1, 1 + max(1, most // s))) for s in stride)
            padding = tuple((0, int(self.one(0, 1 - s))) for s in stride)
            return Geometry((1,) * ndim, stride, (1,) * ndim, padding), spatial
        while True:
            kernel = tuple(int(self.one(1, 2, 3, 3, 4, 5)) for _ in range(ndim))
            stride = tuple(int(self.one(1, 1, 2, 3)) for _ in range(ndim))
            dilation = tuple(int(self.one(1, 1, 1, 2)) for _ in range(ndim))
            padding = tuple((int(self.random.integers(0, k)), int(self.random.integers(-1, k))) for k in kernel)
            spatial = tuple(int(self.random.integers(1, most // 2)) for _ in range(ndim))
            g = Geometry(kernel, stride, dilation, padding)
            if all(n + min(hi, 0) > 0 and n + lo + hi >= e for n, (lo, hi), e in zip(spatial, padding, g.extent)):
                return g, spatial

    def convolution(self, thin: bool = False) -> str:
        g, spatial = self.window(thin)
        n, c, k = int(self.one(1, 1, 2, 3)), int(self.one(*NUMBERS)), int(self.one(*NUMBERS))
        common = [d for d in range(1, 9) if c % d == 0 and k % d == 0]
        groups = int(self.one(*common)) if self.random.random() < 0.2 else 1
        g = Geometry(g.kernel, g.stride, g.dilation, g.padding, groups)
        ws, ys = (k, *g.kernel, c // groups), (n, *g.output_shape(spatial), k)
        x, w, b, dy = self.inputs((n, *spatial, c), ws, (k,), ys)
        y, dx, dw, db = self.outputs(ys, x[0].shape, ws, (k,))
        other = self.numpy
        for kernel in (
            other.conv_forward(x[1], w[1], b[1], y[1], g),
            other.conv_backward_data(dy[1], w[1], dx[1], g),
            other.conv_backward_filter(x[1], dy[1], dw[1], db[1], g),
        ):
            kernel()
        label = f"convolution {g} of {x[0].shape} to {k} channels"
        for name in ("packed", "blocked", "taps"):
            for array in (y[0], dx[0], dw[0], db[0]):
                array.fill(np.nan)
            self.onednn._choice = Only(name)
            self.run(self.onednn.conv_backward_filter(x[0], dy[0], dw[0], db[0], g))
            if name != "taps":
                self.run(self.onednn.conv_forward(x[0], w[0], b[0], y[0], g))
                self.run(self.onednn.conv_backward_data(dy[0], w[0], dx[0], g))
                assert_close(*y, math.prod(ws[1:]) + 1, f"{label}, {name}, y")
                assert_close(*dx, math.prod(g.kernel) * k, f"{label}, {name}, dx")
            assert_close(*dw, math.prod(ys[:-1]), f"{label}, {name}, dw")
            assert_close(*db, math.prod(ys[:-1]), f"{label}, {name}, db")
        return label

    def pooling(self) -> str:
        g, spatial = self.window(False)
        n, c = int(self.one(1, 2, 3)), int(self.one(*NUMBERS))
        ys = (n, *g.output_shape(spatial), c)
        x, dy = self.inputs((n, *spatial, c), ys)
        average = bool(self.random.integers(2))
        y, dx = self.outputs(ys, x[0].shape)

        def build(backend: Any, i: int) -> Any:
            arrays = (x[i], y[i], dy[i], dx[i], g)
            return backend.average_pool(*arrays, True) if average else backend.max_pool(*arrays)

        label = f"{'average' if average else 'maximum'} {g} of {x[0].shape}"
        return self.compare(label, build, y=(y, g.taps), dx=(dx, g.taps))

    def norm(self) -> str:
        n, c = int(self.one(1, 2, 3)), int(self.one(*NUMBERS))
        shape = (n, *(int(self.random.integers(2, 24)) for _ in range(int(self.one(1, 2, 3)))), c)
        local = bool(self.random.integers(2))
        x, dy, gamma, beta = self.inputs(shape, shape, (c,), (c,))
        y, dx, mean, var = self.outputs(shape, shape, (c,), (c,))

        def build(backend: Any, i: int) -> list[Any]:
            mean[i][...], var[i][...] = x[1].mean((*range(len(shape) - 1),)), x[1].var((*range(len(shape) - 1),))
            sums, means = (backend.zeros((2, c), np.float64) for _ in range(2))
            arrays = (x[i], y[i], dy[i], dx[i], gamma[i], beta[i], mean[i], var[i], sums, means)
            k = backend.batch_norm(BatchNormArrays(*arrays, eps=1e-2, local=local))
            return [k.statistics, k.forward, k.backward_sums, k.backward_data]

        terms = 10 * math.prod(shape[:-1])
        return self.compare(f"batch norm of {shape}, local {local}", build, y=(y, terms), dx=(dx, terms))

    def dense(self) -> str:
        n, f, k = (int(self.one(*NUMBERS, 100, 257)) for _ in range(3))
        x, w, b, dy = self.inputs((n, f), (k, f), (k,), (n, k))
        y, dx, dw, db = self.outputs((n, k), (n, f), (k, f), (k,))

        def build(backend: Any, i: int) -> list[Any]:
            return [
                backend.dense_forward(x[i], w[i], b[i], y[i]),
                backend.dense_backward_data(dy[i], w[i], dx[i]),
                backend.dense_backward_filter(x[i], dy[i], dw[i], db[i]),
            ]

        return self.compare(f"dense {n} x {f} to {k}", build, y=(y, f + 1), dx=(dx, k), dw=(dw, n), db=(db, n))


def examine(count: int, seed: int = 0, threads: int = 1) -> Counts:
    """Try `count` random geometries with `threads` per kernel; return the counts."""
    counts = Counts()
    reason = faults.reason

    def counted(candidate: faults.Candidate) -> str:
        found = reason(candidate)
        if found:
            counts.refused[f"{candidate.impl}: {found}"] += 1
        return found

    convolutions.reason = counted
    try:
        with OnednnBackend(threads) as onednn, get_backend("numpy") as numpy:
            for number in range(count):
                with GUARDS:
                    trial = Trial(onednn, numpy, seed + number, counts)
                    kind = ("convolution", "thin", "convolution", "thin", "pooling", "norm", "dense")[number % 7]
                    counts.kinds[kind] += 1
                    try:
                        trial.convolution(thin=True) if kind == "thin" else getattr(trial, kind)()
                    except AssertionError as error:
                        counts.wrong.append(f"{kind} {number}: {str(error).splitlines()[0]}")
                    try:
                        GUARDS.check()
                    except GuardError as error:
                        counts.overruns.append(f"{kind} {number}: {error}")
    finally:
        convolutions.reason = reason
    return counts


def main() -> None:
    """Try the number of geometries in the command line, and print the counts."""
    count, threads = (*map(int, sys.argv[1:]), *(1000, 1)[len(sys.argv) - 1 :])
    counts = examine(count, threads=threads)
    with OnednnBackend(threads) as onednn:
        print(f"{onednn.describe()}, {onednn.instruction_set}")
    print("geometries:", dict(counts.kinds))
    for name, times in counts.implementations.most_common():
        print(f"  {times:6} {name}")
    for name, times in counts.refused.items():
        print(f"refused {times} times: {name}")
    for text in (*counts.overruns[:20], *counts.wrong[:20]):
        print(text)
    print(f"{len(counts.overruns)} overruns, {len(counts.wrong)} wrong")


if __name__ == "__main__":
    main()
