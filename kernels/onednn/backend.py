"""The kernels of oneDNN, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from halograd.kernels import checks
from halograd.kernels.aligned import aligned_empty
from halograd.kernels.backend import Backend
from halograd.kernels.errors import KernelError
from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, Kernel, Substitute
from halograd.kernels.numpy import conv as numpy_conv
from halograd.kernels.numpy import dense as numpy_dense
from halograd.kernels.numpy import elementwise as numpy_elementwise
from halograd.kernels.numpy import pooling as numpy_pooling
from halograd.kernels.numpy.backend import COLUMN_BYTES
from halograd.kernels.numpy.batch_norm import NumpyBatchNorm
from halograd.kernels.numpy.rows import column_sums
from halograd.kernels.onednn import conv, elementwise, library, matmul, pooling
from halograd.kernels.onednn.abi import Abi
from halograd.kernels.onednn.autotune import Choice
from halograd.kernels.onednn.norm import OnednnBatchNorm
from halograd.kernels.onednn.program import Engine, ReferenceOnly
from halograd.kernels.threads import BlasLimit

__all__ = ["DELEGATED", "OnednnBackend"]

# What NumPy does, because oneDNN has nothing but its reference implementation for it, hundreds of times slower than its
# other ones. Such kernels say so in their `impl`. Convolutions and dense layers are substitutes too, worth a warning:
# whether oneDNN has one depends on the block of a rank, and a layer that one process can compute must not depend on it.
DELEGATED = {
    "convolution": "few channels and padding that is wide against the block, in part; whatever else has no kernel",
    "dense": "whatever has no kernel; nothing is known",
    "max_pool": "windows that are dilated, or padding as wide as the window",
    "average_pool": "windows that are dilated, or padding as wide as the window",
    "batch_norm": "one element per channel, or channels and rows that do not join to multiples of 16",
    "activation": "strided arrays",
    "add": "strided arrays, a single term, or the output twice among the terms",
}

T = TypeVar("T")


class OnednnBackend(Backend):
    """Kernels by oneDNN on the CPU.

    Parameters
    ----------
    threads
        Threads per kernel. They are fixed when a kernel is built, by the thread of control that builds it.
    autotune
        Whether convolutions are chosen among several algorithms by measurement when they are built.

    Raises
    ------
    KernelError
        If oneDNN cannot be loaded, or is of another kind than ours.
    """

    name: ClassVar[str] = "onednn"

    def __init__(self, threads: int = 1, autotune: bool = False) -> None:
        loaded, self.path = library.open_library()
        abi = Abi(loaded, self.path)
        self.xp = np
        self.version = abi.version
        self.threads = threads
        self.dtypes = ("float32",)
        self.conv_dtypes = ("float32", "bfloat16")
        self.dtype_remedy = "use float32, or the backend numpy for float64"
        self._substitutes: list[Substitute] = []
        self._engine = Engine(abi, threads)
        self._choice = Choice(autotune, threads)
        # One pool of threads per process: NumPy's own would fight oneDNN's for the same cores.
        self._blas = BlasLimit(1)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return aligned_empty(shape, dtype)

    @property
    def held_bytes(self) -> int:
        return self._engine.workspace_bytes + self._engine.scratch.nbytes

    def close(self) -> None:
        self._engine.close()
        self._blas.close()

    def describe(self) -> str:
        return f"{super().describe()}, {self.path}"

    def take_substitutes(self) -> list[Substitute]:
        taken, self._substitutes = self._substitutes, []
        return taken

    def autotuned(self) -> dict[Any, dict[str, float]]:
        """Per convolution the times of the algorithms compared [s], the chosen one first."""
        return self._choice.found

    # ------------------------------------------------------------------ convolution
    def _check_conv_dtypes(self, what: str, x: Any, y: Any, w: Any, b: Any) -> None:
        """In bfloat16 the weights, the bias and their gradients may also be float32, to be summed and updated so."""
        checks.check_dtypes(what, self.conv_dtypes, self.dtype_remedy, input=x, output=y)
        for name, a in (("weights", w), ("bias", b)):
            allowed = {np.dtype(x.dtype).name, "float32"}
            if a is not None and np.dtype(a.dtype).name not in allowed:
                raise KernelError(
                    f"{what}: expected {name} of dtype {' or '.join(sorted(allowed))}, got {np.dtype(a.dtype).name}; "
                    f"{self.dtype_remedy}"
                )

    def _conv_forward(self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool) -> Kernel:
        args = (self._engine, x, w, b, y, geometry, relu)
        key = ("forward", x.shape, w.shape, b is None, relu, x.dtype.name, w.dtype.name, geometry)
        candidates = {
            "packed": lambda: conv.forward(*args),
            "blocked": lambda: conv.forward(*args, blocked=True),
        }
        return self._convolution(
            "conv_forward",
            key,
            candidates,
            lambda: numpy_conv.conv_forward(x, w, b, y, geometry, relu, self._engine.scratch, COLUMN_BYTES),
        )

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        args = (self._engine, dy, w, dx, geometry)
        key = ("backward data", dx.shape, w.shape, dx.dtype.name, w.dtype.name, geometry)
        candidates = {
            "packed": lambda: conv.backward_data(*args),
            "blocked": lambda: conv.backward_data(*args, blocked=True),
        }
        return self._convolution(
            "conv_backward_data",
            key,
            candidates,
            lambda: numpy_conv.conv_backward_data(dy, w, dx, geometry, self._engine.scratch, COLUMN_BYTES),
        )

    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        args = (self._engine, x, dy, dw, db, geometry)
        key = ("backward filter", x.shape, dw.shape, db is None, x.dtype.name, dw.dtype.name, geometry)
        candidates: dict[str, Callable[[], Any]] = {
            "packed": lambda: conv.backward_filter(*args),
            "blocked": lambda: conv.backward_filter(*args, blocked=True),
        }
        if x.dtype == np.float32:
            candidates["taps"] = lambda: matmul.backward_filter_by_taps(*args)
        return self._convolution(
            "conv_backward_filter",
            key,
            candidates,
            lambda: numpy_conv.conv_backward_filter(x, dy, dw, db, geometry, self._engine.scratch, COLUMN_BYTES),
        )

    def _convolution(self, what: str, key: Any, candidates: Any, plain: Callable[[], Kernel]) -> Kernel:
        """The chosen candidate; the kernel of NumPy, which knows no bfloat16, where oneDNN has no fast one."""
        if "bfloat16" not in key:
            return self._or_numpy(lambda: self._choice.kernel(key, candidates), plain, what)
        try:
            return self._choice.kernel(key, candidates)
        except ReferenceOnly as error:
            raise KernelError(
                f"{what}: expected a bfloat16 convolution that oneDNN has a fast implementation of, got {key[1:]}: "
                f"{error}; use float32"
            ) from None

    # ------------------------------------------------------------------ the rest
    def _or_numpy(self, fast: Callable[[], T], plain: Callable[[], T], what: str | None = None) -> T:
        """What oneDNN has, or by name (see DELEGATED) what NumPy has; noted as a substitute for `what`, if given."""
        try:
            return fast()
        except ReferenceOnly as error:
            if what is not None:
                self._substitutes.append(Substitute(what, "numpy", str(error)))
            return plain()

    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        return self._or_numpy(
            lambda: pooling.max_pool(self._engine, x, y, dy, dx, geometry),
            lambda: numpy_pooling.max_pool(x, y, dy, dx, geometry, self._engine.scratch),
        )

    def _average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        algorithm = pooling.average(count_include_pad)
        return self._or_numpy(
            lambda: pooling.pool(self._engine, algorithm, x, y, dy, dx, geometry),
            lambda: numpy_pooling.average_pool(x, y, dy, dx, geometry, count_include_pad, self._engine.scratch),
        )

    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        return self._or_numpy(
            lambda: OnednnBatchNorm(self._engine, arrays).kernels(),
            lambda: NumpyBatchNorm(arrays, self._engine.scratch).kernels(),
        )

    def _activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> tuple[Kernel, Kernel | None]:
        return self._or_numpy(
            lambda: elementwise.activation(self._engine, kind, x, y, dy, dx, alpha),
            lambda: numpy_elementwise.activation(kind, x, y, dy, dx, alpha, self._engine.scratch),
        )

    def _add(self, xs: list[Any], y: Any, relu: bool) -> Kernel:
        return self._or_numpy(
            lambda: elementwise.add(self._engine, xs, y, relu), lambda: numpy_elementwise.add(xs, y, relu)
        )

    def _bias(self, y: Any, b: Any) -> Kernel:
        return numpy_elementwise.bias(y, b)

    def _bias_gradient(self, dy: Any, db: Any) -> Kernel:
        return Kernel(column_sums(dy, db), "numpy:column sums")

    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        return self._or_numpy(
            lambda: matmul.dense_forward(self._engine, x, w, b, y).kernel(),
            lambda: numpy_dense.dense_forward(x, w, b, y),
            "dense_forward",
        )

    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        return self._or_numpy(
            lambda: matmul.dense_backward_data(self._engine, dy, w, dx).kernel(),
            lambda: numpy_dense.dense_backward_data(dy, w, dx),
            "dense_backward_data",
        )

    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        return self._or_numpy(
            lambda: matmul.dense_backward_filter(self._engine, x, dy, dw, db).kernel(),
            lambda: numpy_dense.dense_backward_filter(x, dy, dw, db),
            "dense_backward_filter",
        )
