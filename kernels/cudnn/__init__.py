"""The GPU backend: cuDNN 9 through `nvidia-cudnn-frontend`, cuBLAS, and our own kernels, on CuPy arrays.

Attention is cuDNN's for arrays of 16 bits without dropout, if every query of a tile reads all keys of the tile
(whole samples and blocks of them, windows) and cuDNN has a plan; else our own. With autotune the faster one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..attention import AttentionArrays, AttentionGeometry
from ..backend import BackendOptions
from ..cuda import CudaKernels
from ..geometry import Geometry, tensor_core_channels
from ..kernel import BatchNormArrays, FusedActivation, Kernel, KernelError, Substitute, chain
from ..memory import Scratch
from ..summed import SummedConvolution, on_tensor_cores
from . import conv, dense, sums
from .attention import CudnnAttention
from .conv import ConvSettings
from .dense import Cublas, workspace_bytes
from .frontend import Handles, Workspaces
from .graphs import HALF, PRECISIONS, Arithmetic
from .plans import EventTimer, Plans
from .runtime import Runtime
from .store import PlanStore, store_path

__all__ = ["PRECISIONS", "CudnnBackend"]


# First compute capability with TF32 and bfloat16.
_AMPERE = (8, 0)


class CudnnBackend(CudaKernels):
    """Kernels on one GPU: convolutions and attention by cuDNN, dense layers by cuBLAS, all others by our own CUDA code.

    Kernels run on the stream that is current in CuPy when they are called, and return before they have finished.
    Arrays are CuPy arrays on `device`, whose compute stream becomes the current one when the backend is opened.

    Parameters
    ----------
    threads
        Number of host threads; kernels on the GPU do not use them.
    autotune
        Whether to choose the plan of each convolution and attention by measurement when the kernel is built: among
        cuDNN's first plans, one of each other engine, and more of the fastest engine. The results are stored on disk.
    precision
        Precision of float32 products, see :class:`Arithmetic`.
    deterministic
        Whether two runs must agree in every bit.
    device
        Number of the GPU among those visible.
    workspace_limit
        Largest workspace of one convolution [B]; None: no limit.
    store
        File that stores the plans; by default that of :func:`halograd.kernels.cudnn.store.store_path`.
    runtime
        Device and libraries; by default the installed ones.

    Attributes
    ----------
    device : Device
        The GPU, with its streams. A list of copies between its arrays is one launch.
    device_name : str
        Model of the GPU.
    arithmetic : Arithmetic

    Raises
    ------
    KernelError
        If a library is missing or has an untested version, there is no GPU, or the options exclude each other.
    DeviceError
        If there is no GPU of number `device`.
    """

    name: ClassVar[str] = "cudnn"
    on_device: ClassVar[bool] = True
    rounds_gradients: ClassVar[bool] = True

    def __init__(
        self,
        threads: int = 1,
        autotune: bool = False,
        precision: str = "strict",
        deterministic: bool = False,
        device: int = 0,
        workspace_limit: int | None = None,
        store: Path | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.arithmetic = Arithmetic(precision, deterministic)
        if deterministic and autotune:
            raise KernelError(
                "cudnn: expected autotune or deterministic mode, got both; the fastest plan, and with it the order of "
                "sums, differs from run to run: switch one of them off"
            )
        self.threads = threads
        self.runtime = Runtime.find(device) if runtime is None else runtime
        try:
            self._open(autotune, workspace_limit, store_path() if store is None else store)
        # The caller gets no backend that could be closed.
        except BaseException:
            self.runtime.device.close()
            raise

    @classmethod
    def open(cls, options: BackendOptions) -> CudnnBackend:
        return cls(options.threads, options.autotune, options.precision, options.deterministic, options.device)

    def _open(self, autotune: bool, workspace_limit: int | None, store: Path) -> None:
        runtime = self.runtime
        # One launcher for both: kernels and copies of boxes share their compiled programs.
        self.xp, self.launcher, self.device = runtime.cupy, runtime.boxes.launcher, runtime.device
        self.scratch = Scratch(self.launcher.empty)
        self.device_name = runtime.name
        # The measured times depend on all of this, so the store files them under it.
        mode = ", deterministic" if self.arithmetic.deterministic else ""
        libraries = f"{runtime.frontend.cudnn_version} (frontend {runtime.frontend.version})"
        self.version = f"{libraries}, float32 {self.arithmetic.precision}{mode}"
        self._check_capability()
        self.workspaces = Workspaces(runtime.bytes)
        # cuDNN and cuBLAS have handles of their own, but one workspace per stream, on which kernels run in sequence.
        handles = Handles(runtime.frontend.module, runtime.current_stream, runtime.check_device)
        kept = PlanStore(store, runtime.conditions)
        timer = EventTimer(runtime.cupy.cuda)
        plans = Plans(runtime.frontend, handles, kept, runtime.bytes, runtime.release, timer)
        self._engine = ConvSettings(
            plans, handles, self.workspaces, runtime.boxes, self.empty, self.arithmetic, workspace_limit, autotune
        )
        major, minor = runtime.capability
        self._attention = CudnnAttention(self._engine, self.launcher, self.xp, runtime.frontend, 10 * major + minor)
        cublas = Cublas(runtime.load_cublas)
        self._products = dense.Products(
            cublas,
            Handles(cublas, runtime.current_stream, runtime.check_device),
            self.workspaces,
            workspace_bytes(runtime.capability),
            self.arithmetic,
        )

    def _check_capability(self) -> None:
        """Set the dtypes, and check the precision: TF32 and bfloat16 need compute capability 8.0 or later."""
        major, minor = self.runtime.capability
        new = (major, minor) >= _AMPERE
        if not new and self.arithmetic.precision == "tf32":
            raise KernelError(
                f"cudnn: expected a GPU of compute capability 8.0 for precision tf32, got {major}.{minor} "
                f"({self.device_name}); use precision strict"
            )
        half = HALF if new else HALF[:1]
        # No convolutions in float64: they gave zeros and NaN (cuDNN 9.19 on an H100). The front end (to 1.23) passes
        # the factors of the result and of old contents, 1 and 0, as float32 numbers.
        self.dtypes, self.conv_dtypes = ("float32", "float64", *half), ("float32", *half)
        self.dtype_remedy = f"use {' or '.join(self.conv_dtypes)}, or a backend of the CPU"

    # ------------------------------------------------------------------ arrays and life time
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.xp.empty(tuple(shape), np.dtype(dtype))

    def synchronize(self) -> None:
        self.xp.cuda.Device(self.runtime.ordinal).synchronize()

    def before_capture(self) -> None:
        self.scratch.before_capture()
        self.workspaces.before_capture(self.runtime.current_stream())

    @property
    def held_bytes(self) -> int:
        kept = self._engine.kernel_bytes + self.own.nbytes + self.launcher.own.nbytes
        return self.workspaces.nbytes + kept + self._attention.memory.held_bytes + self.scratch.held_bytes

    def close(self) -> None:
        # Plans before the handles on which they were built, and memory last.
        self._engine.plans.close()
        self._engine.handles.close()
        self._products.handles.close()
        self.workspaces.close()
        self.scratch.release()
        self.device.close()

    def describe(self) -> str:
        return f"{self.name} {self.version}, {self.device_name}"

    def describe_arithmetic(self, dtype: str) -> str:
        return self.arithmetic.describe(dtype)

    def autotuned(self) -> dict[Any, dict[str, float]]:
        """Return, by operation and description, the times of the plans that were compared [s], the chosen one first."""
        return {(key.direction, key.describe()): times for key, times in self._engine.plans.times.items()}

    # ------------------------------------------------------------------ attention
    def _attention_forward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        tiles = super()._attention_forward
        return self._attention.forward(arrays, geometry, lambda: tiles(arrays, geometry))

    def _attention_backward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        tiles = super()._attention_backward
        return self._attention.backward(arrays, geometry, lambda: tiles(arrays, geometry))

    def take_substitutes(self) -> list[Substitute]:
        substitutes, self._attention.substitutes = self._attention.substitutes, []
        return substitutes

    # ------------------------------------------------------------------ convolution
    def padded_channels(self, channels: int, dtype: Any) -> int:
        return tensor_core_channels(channels, dtype)

    def _conv_forward(
        self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, activation: FusedActivation | None
    ) -> Kernel:
        """Return a convolution kernel. Its cuDNN plan contains a ReLU; any other activation is a second kernel."""
        # cuDNN has compiled engines for a fused ReLU only.
        relu = activation is not None and activation.kind == "relu"
        kernel = conv.forward(self._engine, x, w, b, y, geometry, relu)
        return kernel if relu else self.activated(kernel, y, activation)

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        return conv.backward_data(self._engine, dy, w, dx, geometry)

    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        kernel = conv.backward_filter(self._engine, x, dy, dw, geometry)
        return kernel if db is None else chain(kernel, self._bias_gradient(dy, db))

    # ------------------------------------------------------------------ convolution with the sums of a norm
    def fuses_sums(self, conv: SummedConvolution) -> bool:
        """Return whether autotune tries a plan with the sums. In TF32 it does so for gradients, not for statistics."""
        # A variance is a difference of sums in float32, which loses digits that the float32 images of TF32 have.
        wide = ("float32",) if conv.backward and self.arithmetic.precision == "tf32" else ()
        return self._engine.tuned and on_tensor_cores(conv, (*HALF, *wide), self.launcher.units)

    def _with_statistics(
        self, separate: Kernel, x: Any, w: Any, b: Any, y: Any, sums_: Any, geometry: Geometry
    ) -> Kernel:
        return sums.faster(self._engine, separate, *sums.forward(self._engine, x, w, b, y, sums_, geometry))

    def _with_gradient_sums(
        self, separate: Kernel, dy: Any, w: Any, geometry: Geometry, norm: BatchNormArrays
    ) -> Kernel:
        return sums.faster(self._engine, separate, *sums.backward_data(self._engine, dy, w, geometry, norm))

    # ------------------------------------------------------------------ dense
    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        product = dense.forward(self._products, x, w, y)
        return product if b is None else chain(product, self._bias(y, b))

    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        return dense.backward_data(self._products, dy, w, dx)

    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        product = dense.backward_filter(self._products, x, dy, dw)
        return product if db is None else chain(product, self._bias_gradient(dy, db))
