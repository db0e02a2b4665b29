"""The GPU and the libraries that a backend uses, with one-line errors if one is missing."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from halograd.documents import one_line

from ...device import Device
from ..cuda import Boxes, CupyLauncher
from ..kernel import Kernel, KernelError, chain
from .frontend import INSTALL, Frontend, load

__all__ = ["Runtime"]

_log = logging.getLogger("halograd.kernels")

_ELSE = "or choose the backend onednn or numpy"


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise KernelError(f"cudnn: expected CuPy, got none ({one_line(error)}); {INSTALL}, {_ELSE}") from error
    return cupy


def _load_libraries() -> None:
    """Load the libraries that cuDNN and its front end open by name: those of wheels would not be found.

    Compiled plans need NVRTC, the backward pass of attention the CUDA runtime; without cuBLASLt cuDNN ends the process.
    Those that are missing may be on the loader's path.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return
    for name in ("cublasLt", "nvrtc", "cudart"):
        try:
            load_nvidia_dynamic_lib(name)
        except Exception as error:
            _log.debug("kernels: %s is not loaded: %s", name, one_line(error))


def _check_count(cupy: Any) -> None:
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CUDARuntimeError: no driver, or the driver is too old
        raise KernelError(
            f"cudnn: expected a CUDA device, got an error ({one_line(error)}); run where there is a GPU and its "
            f"driver, {_ELSE}"
        ) from error
    if count == 0:
        raise KernelError(f"cudnn: expected a CUDA device, got none; see CUDA_VISIBLE_DEVICES, {_ELSE}")


@dataclass(frozen=True)
class Runtime:
    """One device and the libraries for it.

    Attributes
    ----------
    cupy
        The module ``cupy``.
    frontend
        The cuDNN adapter.
    boxes
        Our own kernels that copy, add and fill views, with their launcher.
    device
        Device that owns the arrays.
    ordinal
        Number of the device among those visible.
    """

    cupy: Any
    frontend: Frontend
    boxes: Boxes
    device: Device
    ordinal: int

    @classmethod
    def find(
        cls,
        ordinal: int = 0,
        open_device: Callable[[int], Device] | None = None,
        open_boxes: Callable[[], Boxes] = lambda: Boxes(CupyLauncher()),
    ) -> Runtime:
        """Open a device and its libraries. The device's compute stream becomes the current stream of this thread.

        Parameters
        ----------
        open_device, open_boxes
            Functions that open the device (None: :func:`halograd.device.cupy.cupy_device`), and our own kernels on it.

        Raises
        ------
        KernelError
            If a library is missing or untested.
        DeviceError
            If there is no device of this number.
        """
        cupy = _cupy()
        # Before the frontend opens cuDNN, which finds these libraries only if they are loaded.
        _load_libraries()
        frontend = Frontend(load())
        _check_count(cupy)
        # After the versions are checked: an error before this point leaves no stream open.
        device = (open_device or _open_device)(ordinal)
        try:
            # The launcher takes the device that is current, which opening the device has made this one.
            boxes = open_boxes()
            _connect(device, boxes)
            return cls(cupy, frontend, boxes, device, ordinal)
        except BaseException:
            device.close()
            raise

    @property
    def name(self) -> str:
        """Model of the device."""
        name = self.cupy.cuda.runtime.getDeviceProperties(self.ordinal)["name"]
        return name.decode() if isinstance(name, bytes) else str(name)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, e.g. ``(9, 0)``."""
        # CuPy returns "90" for 9.0, and "120" for 12.0: the last digit is the minor number.
        digits = str(self.cupy.cuda.Device(self.ordinal).compute_capability)
        return int(digits[:-1]), int(digits[-1])

    @property
    def conditions(self) -> str:
        """Device, driver and library versions, on which a stored plan depends in addition to its key."""
        driver = self.cupy.cuda.runtime.driverGetVersion()
        major, minor = self.capability
        return (
            f"cuDNN {self.frontend.cudnn_version}, frontend {self.frontend.version}, driver {driver}, "
            f"{self.name} sm_{major}{minor}"
        )

    def current_stream(self) -> int:
        """Return the address of the current stream."""
        return int(self.cupy.cuda.get_current_stream().ptr)

    def check_device(self) -> None:
        """Raise KernelError unless the backend's device is current in this thread."""
        current = int(self.cupy.cuda.runtime.getDevice())
        if current != self.ordinal:
            raise KernelError(
                f"cudnn: expected device {self.ordinal}, the backend's, to be current in this thread, got {current}; "
                f"call cupy.cuda.Device({self.ordinal}).use() first"
            )

    def load_cublas(self) -> Any:
        """Return the C functions of the cuBLAS library that CuPy has loaded."""
        # The lookup of a symbol includes the libraries that the module is linked with.
        return ctypes.CDLL(self.cupy.cuda.cublas.__file__)

    def bytes(self, nbytes: int) -> Any:
        """Return an array of `nbytes` bytes of device memory, allocated on the current stream."""
        return self.cupy.empty(nbytes, "uint8")

    def release(self) -> None:
        """Return the free blocks of CuPy's memory pool to the device."""
        self.cupy.get_default_memory_pool().free_all_blocks()


def _open_device(ordinal: int) -> Device:
    from ...device.cupy import cupy_device

    return cupy_device(ordinal)


def _connect(device: Any, boxes: Boxes) -> None:
    """Let the device copy and add boxes by our own kernels. The device passes (target, source), the kernels (source,
    target).
    """

    def copies(pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        return boxes.copy([(source, target) for target, source in pairs])

    def sums(pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        # One launch per pair: targets of one launch must not overlap, but those of one halo exchange may, at corners.
        return chain(*(boxes.add_into([(source, target)]) for target, source in pairs))

    device.fused_copies, device.fused_sums = copies, sums
