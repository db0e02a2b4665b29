"""The CPU backend: oneDNN 3 through its C interface, in float32, and in the 16-bit dtypes that the processor supports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from ...device import LOW, as_dtype, is_low
from .. import checks
from ..backend import BackendOptions
from ..geometry import Geometry
from ..kernel import BatchNormArrays, BatchNormKernels, FusedActivation, Kernel, KernelError, Substitute, chain
from ..memory import aligned_empty
from ..numpy import BlasLimit, NumpyBackend
from ..numpy.attention import TileOperations
from ..numpy.staging import StandInBuffers
from ..summed import SummedConvolution
from . import conv, pointwise, taps
from .abi import NATIVE, POOLING_AVERAGE_EXCLUDE, POOLING_AVERAGE_INCLUDE, Abi, open_library
from .attention import OnednnTileOperations
from .conv import ConvChoice
from .faults import FAULTS
from .norm import OnednnBatchNorm
from .program import OnednnEngine, OnlyEmulated, PrimitiveList, ReferenceOnly

__all__ = ["DELEGATED", "OnednnBackend"]


# Cases that NumPy computes, because oneDNN has only its reference implementation, which is hundreds of times slower.
# The `impl` of such kernels names NumPy. For convolutions and dense layers there is a warning as well: whether oneDNN
# has a fast kernel depends on the block of a rank, but whether a layer can be computed must not depend on it.
DELEGATED = {
    "convolution": "few channels and padding that is wide compared with the block; others without a fast kernel",
    "dense": "cases without a fast kernel; none is known",
    "max_pool": "windows that are dilated, or padding as wide as the window",
    "average_pool": "windows that are dilated, or padding as wide as the window",
    "batch_norm": "one element per channel, or channels and rows that cannot be joined to multiples of 16",
    "activation": "strided arrays; elu, gelu_tanh, hard_sigmoid, hard_swish, mish, and softplus forward",
    "add": "strided arrays, a single term, more than 33, or the output twice among the terms",
}

T = TypeVar("T")


class OnednnBackend(NumpyBackend):
    """Kernels by oneDNN on the CPU, or by NumPy where oneDNN has no fast kernel.

    Parameters
    ----------
    threads
        Threads per kernel. They are fixed when a kernel is built, by the thread that builds it.
    autotune
        Whether convolutions are chosen among several algorithms by measurement when they are built.

    Raises
    ------
    KernelError
        If oneDNN cannot be loaded or is an unsupported build.

    Attributes
    ----------
    path : str
        Path of the library.
    instruction_set : str
        Largest instruction set that oneDNN uses here; the environment variable ``ONEDNN_MAX_CPU_ISA`` limits it.
    refused : tuple of str
        oneDNN implementations that are not used, with the cases and reasons.
    """

    name: ClassVar[str] = "onednn"
    refused: ClassVar[tuple[str, ...]] = tuple(map(str, FAULTS))

    def __init__(self, threads: int = 1, autotune: bool = False) -> None:
        loaded, self.path = open_library()
        abi = Abi(loaded, self.path)
        self.xp = np
        self.version = abi.version
        self.instruction_set = abi.instruction_set()
        self.threads = threads
        self.dtypes = self.conv_dtypes = ("float32", *LOW)
        self.dtype_remedy = "use float32, or the backend numpy for float64"
        self._substitutes: list[Substitute] = []
        self._engine = OnednnEngine(abi, threads)
        # NumPy's kernels of this backend share the scratch memory of oneDNN's.
        self.scratch, self.stage = self._engine.scratch, StandInBuffers(aligned_empty)
        self._reasons = {dtype: self._reason(dtype) for dtype in LOW}
        # After the trial kernels of `_reason`: an emulated dtype gets no descriptors from here on.
        self._engine.emulated.update(dtype for dtype, reason in self._reasons.items() if reason)
        self._choice = ConvChoice(autotune, threads)
        # One thread pool per process: NumPy's own pool would compete with oneDNN's for the same cores.
        self._blas = BlasLimit(1)
        # Attention runs on threads of Python, so that NumPy's parts of it run on several threads, too.
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def open(cls, options: BackendOptions) -> OnednnBackend:
        options.refuse_precision(cls.name)
        if options.deterministic and options.autotune:
            raise KernelError(
                "onednn: expected autotune or deterministic mode, got both; the fastest algorithm, and with it the "
                "order of sums, differs from run to run: switch one of them off"
            )
        return cls(options.threads, options.autotune)

    @property
    def held_bytes(self) -> int:
        return self._engine.workspace_bytes + super().held_bytes

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self.stage.release()
        self._engine.close()
        self._blas.close()

    def describe(self) -> str:
        return f"{super().describe()}, {self.path}"

    def emulates(self, dtype: str) -> str:
        return self._reasons.get(dtype, "")

    def fuses_sums(self, conv: SummedConvolution) -> bool:
        return False  # oneDNN has no kernel for both

    def _reason(self, dtype: str) -> str:
        """Return the reason why oneDNN cannot train in a dtype of 16 bits without emulation, or ""."""
        if self.instruction_set not in NATIVE[dtype]:
            return f"the instruction set {self.instruction_set} has no products in {dtype}"
        image, weights = np.zeros((1, 8, 8, 16), as_dtype(dtype)), np.zeros((16, 3, 3, 16), np.float32)
        geometry = Geometry((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
        # oneDNN may have kernels of 16 bits for this instruction set in some directions only: build one of each.
        try:
            conv.forward(self._engine, image, weights, None, image, geometry, []).close()
            conv.backward_data(self._engine, image, weights, image, geometry).close()
            conv.backward_filter(self._engine, image, image, weights, None, geometry).close()
        except ReferenceOnly as error:
            return str(error)
        return ""

    def take_substitutes(self) -> list[Substitute]:
        substitutes, self._substitutes = self._substitutes, []
        return substitutes

    def autotuned(self) -> dict[Any, dict[str, float]]:
        """Return, for each convolution, the times of the compared algorithms [s], the chosen one first."""
        return self._choice.times

    # ------------------------------------------------------------------ convolution
    def _conv_forward(
        self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, activation: FusedActivation | None
    ) -> Kernel:
        if not pointwise.fuses(activation):
            return self.activated(self._conv_forward(x, w, b, y, geometry, None), y, activation)
        if pointwise.is_relu(activation):
            return pointwise.rectified(
                self._engine,
                y,
                lambda fused: self._conv_fused(x, w, b, y, geometry, activation, fused),
                lambda: self.activated(self._conv_forward(x, w, b, y, geometry, None), y, activation),
            )
        return self._conv_fused(x, w, b, y, geometry, activation, pointwise.operations(activation))

    def _conv_fused(
        self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, activation: FusedActivation | None, fused: list[Any]
    ) -> Kernel:
        """Build a convolution with the activation fused into the primitive, as the operations `fused`."""
        # Under autotune, layers of one key are measured once.
        key = ("forward", x.shape, w.shape, b is None, activation, x.dtype.name, w.dtype.name, geometry)
        build = partial(conv.forward, self._engine, x, w, b, y, geometry, fused)
        plain = partial(super()._conv_forward, x, w, b, y, geometry, activation)
        return self._or_plain(lambda: self._choice.kernel(key, _formats(build)), plain, "conv_forward", is_low(x.dtype))

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        key = ("backward data", dx.shape, w.shape, dx.dtype.name, w.dtype.name, geometry)
        formats = _formats(partial(conv.backward_data, self._engine, dy, w, dx, geometry))
        plain = partial(super()._conv_backward_data, dy, w, dx, geometry)
        return self._or_plain(lambda: self._choice.kernel(key, formats), plain, "conv_backward_data", is_low(dx.dtype))

    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        args, low = (self._engine, x, dy, dw, db, geometry), is_low(x.dtype)
        key = ("backward filter", x.shape, dw.shape, db is None, x.dtype.name, dw.dtype.name, geometry)
        candidates = _formats(partial(conv.backward_filter, *args))
        if not low:
            by_taps = {"taps": partial(taps.backward_filter_by_taps, *args)}
            first = taps.preferred(x, dy, geometry, self.instruction_set)
            # Without autotune, the first candidate that oneDNN has is taken.
            candidates = by_taps | candidates if first else candidates | by_taps
        plain = partial(super()._conv_backward_filter, x, dy, dw, db, geometry)
        return self._or_plain(lambda: self._choice.kernel(key, candidates), plain, "conv_backward_filter", low)

    # ------------------------------------------------------------------ attention
    def _tile_operations(self) -> Sequence[TileOperations]:
        return [OnednnTileOperations(self._engine) for _ in range(self.threads)]

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        if len(calls) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, "halograd-attention")
        # One share runs on this thread, so the pool has a thread less. A pass that is not cut uses no other thread.
        others = [] if self._pool is None else [self._pool.submit(call) for call in calls[1:]]
        try:
            for call in calls[:1]:
                call()
        finally:
            # Also after an error: other threads still write arrays that the caller may free.
            wait(others)
        for other in others:
            other.result()

    # ------------------------------------------------------------------ all other kernels
    def _or_plain(
        self, fast: Callable[[], T], plain: Callable[[], T], what: str | None = None, low: bool = False
    ) -> T:
        """Return what `fast` builds, oneDNN's kernel, or where oneDNN has no fast one (see DELEGATED) what `plain`
        builds.

        `plain` builds NumPy's kernel, or for 16 bits the kernel of float32. With `what`, its use is recorded as a
        substitute, unless oneDNN only emulates the dtype; `low`: the kernel has 16 bits.
        """
        try:
            return fast()
        except OnlyEmulated:
            return plain()
        except ReferenceOnly as error:
            if what is not None:
                self._substitutes.append(Substitute(what, "float32" if low else "numpy", str(error)))
            return plain()

    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        args = (x, y, dy, dx, geometry)
        by_numpy = partial(super()._max_pool, *args)
        return self._or_plain(lambda: pointwise.max_pool(self._engine, *args, by_numpy), by_numpy)

    def _average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        args = (x, y, dy, dx, geometry)
        algorithm = POOLING_AVERAGE_INCLUDE if count_include_pad else POOLING_AVERAGE_EXCLUDE
        plain = partial(super()._average_pool, *args, count_include_pad)
        return self._or_plain(lambda: pointwise.pool(self._engine, algorithm, *args), plain)

    def _with_activation(self, arrays: BatchNormArrays) -> BatchNormKernels:
        """Build a batch norm with activation. The norm's kernels include a ReLU without residual; other cases use more
        kernels.
        """
        unfused = partial(super()._with_activation, arrays)
        if not pointwise.is_relu(arrays.activation) or arrays.residual is not None:
            return unfused()
        plain = super()._batch_norm
        return self._or_plain(lambda: OnednnBatchNorm(self._engine, arrays, plain).kernels(), unfused)

    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        plain = super()._batch_norm
        return self._or_plain(lambda: OnednnBatchNorm(self._engine, arrays, plain).kernels(), partial(plain, arrays))

    def _activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> tuple[Kernel, Kernel | None]:
        args = (kind, x, y, dy, dx, alpha)
        plain = partial(super()._activation, *args)
        return self._or_plain(lambda: pointwise.activation(self._engine, *args, plain), plain)

    def _add(self, xs: list[Any], y: Any, activation: FusedActivation | None) -> Kernel:
        if not pointwise.fuses(activation):
            return self.activated(self._add(xs, y, None), y, activation)
        plain = partial(super()._add, xs, y, activation)
        # The fast fused ReLU may have to compute the sum again, which must not have overwritten one of its terms.
        if pointwise.is_relu(activation) and not any(checks.same_elements(x, y) for x in xs):
            return self._or_plain(lambda: self._rectified_sum(None, xs, y, activation), plain)
        return self._or_plain(lambda: pointwise.add(self._engine, xs, y, pointwise.operations(activation)), plain)

    def added(self, kernel: Kernel, y: Any, residual: Any, activation: FusedActivation | None) -> Kernel:
        if not pointwise.is_relu(activation):
            return super().added(kernel, y, residual, activation)
        return self._or_plain(
            lambda: self._rectified_sum(kernel, [y, residual], y, activation),
            partial(super().added, kernel, y, residual, activation),
        )

    def _rectified_sum(
        self, before: Kernel | None, xs: list[Any], y: Any, activation: FusedActivation | None
    ) -> Kernel:
        """Return a kernel for the sum with a fused ReLU; it runs after `before`, the kernel that writes `y`, if given.
        """

        def after(kernel: Kernel) -> Kernel:
            return kernel if before is None else chain(before, kernel)

        return pointwise.rectified(
            self._engine,
            y,
            lambda fused: after(pointwise.add(self._engine, xs, y, fused)),
            lambda: self.activated(after(self._add(xs, y, None)), y, activation),
        )

    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        plain = partial(super()._dense_forward, x, w, b, y)
        build = partial(conv.dense_forward, self._engine, x, w, b, y)
        return self._or_plain(lambda: build().kernel(), plain, "dense_forward", is_low(x.dtype))

    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        plain = partial(super()._dense_backward_data, dy, w, dx)
        build = partial(conv.dense_backward_data, self._engine, dy, w, dx)
        return self._or_plain(lambda: build().kernel(), plain, "dense_backward_data", is_low(dx.dtype))

    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        plain = partial(super()._dense_backward_filter, x, dy, dw, db)
        build = partial(conv.dense_backward_filter, self._engine, x, dy, dw, db)
        return self._or_plain(lambda: build().kernel(), plain, "dense_backward_filter", is_low(x.dtype))

    def _bias(self, y: Any, b: Any) -> Kernel:
        plain = partial(super()._bias, y, b)
        return self._or_plain(lambda: conv.bias(self._engine, y, b).kernel(), plain)

    def _bias_gradient(self, dy: Any, db: Any) -> Kernel:
        plain = partial(super()._bias_gradient, dy, db)
        if not is_low(dy.dtype):
            return plain()  # in float32 a product would lose digits of long sums
        return self._or_plain(lambda: conv.bias_gradient(self._engine, dy, db).kernel(), plain)


def _formats(build: Callable[..., PrimitiveList]) -> dict[str, Callable[[], PrimitiveList]]:
    """Return the candidates of a convolution by the format of its images: used in place, or reordered to oneDNN's own
    format.
    """
    return {"packed": build, "blocked": partial(build, blocked=True)}
