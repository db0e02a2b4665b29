"""The device and the libraries a backend reaches it through, found or refused with one line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...device import Device
from ..cuda import Boxes, CupyLauncher
from ..kernel import Kernel, KernelError, chain
from .frontend import INSTALL, Frontend, load, one_line

__all__ = ["Runtime"]

_ELSE = "or choose the backend onednn or numpy"


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise KernelError(f"cudnn: expected CuPy, got none ({one_line(error)}); {INSTALL}, {_ELSE}") from error
    return cupy


def _check_count(cupy: Any) -> None:
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CUDARuntimeError: no driver, or one too old
        raise KernelError(
            f"cudnn: expected a CUDA device, got an error ({one_line(error)}); run where there is a GPU and its "
            f"driver, {_ELSE}"
        ) from error
    if count == 0:
        raise KernelError(f"cudnn: expected a CUDA device, got none; see CUDA_VISIBLE_DEVICES, {_ELSE}")


@dataclass(frozen=True)
class Runtime:
    """One device, and the libraries on it.

    Attributes
    ----------
    cupy
        The module ``cupy``.
    frontend
        cuDNN.
    boxes
        Our own kernels that copy, add and fill views, with their launcher.
    device
        Where the arrays live.
    ordinal
        Its number among those visible.
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
        """Return a device with everything on it; its compute stream becomes the current one of this thread.

        Parameters
        ----------
        open_device, open_boxes
            Make the device, None for that of ``device``, and our own kernels on it.

        Raises
        ------
        KernelError
            If something is missing, or of a version that was not examined.
        DeviceError
            If there is no device of this number.
        """
        cupy = _cupy()
        frontend = Frontend(load())
        _check_count(cupy)
        device = (open_device or _open_device)(ordinal)
        try:
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
        found = str(self.cupy.cuda.Device(self.ordinal).compute_capability)
        return int(found[:-1]), int(found[-1])

    @property
    def conditions(self) -> str:
        """What a kept plan depends on besides its key."""
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
        """Raise unless our device is current in this thread."""
        current = int(self.cupy.cuda.runtime.getDevice())
        if current != self.ordinal:
            raise KernelError(
                f"cudnn: expected device {self.ordinal}, the backend's, to be current in this thread, got {current}; "
                f"call cupy.cuda.Device({self.ordinal}).use() first"
            )

    def load_cublas(self) -> Any:
        """Return the C functions of the library that CuPy has loaded."""
        # The symbols of a module are looked for in what it is linked with, too.
        return ctypes.CDLL(self.cupy.cuda.cublas.__file__)

    def bytes(self, nbytes: int) -> Any:
        """Return so many bytes of device memory, allocated on the current stream."""
        return self.cupy.empty(nbytes, "uint8")

    def release(self) -> None:
        """Give the device back what CuPy's pool holds for arrays to come."""
        self.cupy.get_default_memory_pool().free_all_blocks()


def _open_device(ordinal: int) -> Device:
    from ...device.cupy import cupy_device

    return cupy_device(ordinal)


def _connect(device: Any, boxes: Boxes) -> None:
    """Let the device copy and add boxes by our own kernels; it says (target, source), they (source, target)."""

    def copies(pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        return boxes.copy([(source, target) for target, source in pairs])

    def sums(pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        # One launch each: the targets of one launch must not overlap, and those of one exchange may, at corners.
        return chain(*(boxes.add_into([(source, target)]) for target, source in pairs))

    device.fused_copies, device.fused_sums = copies, sums
