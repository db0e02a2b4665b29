"""The current CUDA device by CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.kernels.cuda.device import Device, Extents, Function, address
from halograd.kernels.cuda.sources import Program
from halograd.kernels.errors import KernelError

__all__ = ["CupyDevice"]


class CupyDevice(Device):
    """The CUDA device that is current when this is made; kernels go to CuPy's current stream.

    Programs are compiled by NVRTC when a kernel of theirs is first bound; CuPy keeps the result on disk, so that
    the next process loads it.

    Raises
    ------
    KernelError
        If CuPy cannot be imported or sees no device.
    """

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise KernelError(f"CUDA kernels: expected CuPy, got {error}; pip install 'halograd[gpu]'") from error
        try:
            self.number = int(cupy.cuda.runtime.getDevice())
            found = cupy.cuda.runtime.getDeviceProperties(self.number)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise KernelError(f"CUDA kernels: expected a CUDA device, got {reason}; check nvidia-smi") from error
        self._cupy = cupy
        self._modules: dict[Program, Any] = {}
        self.units = int(found["multiProcessorCount"])
        self.name = found["name"].decode()

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._cupy.empty(tuple(shape), dtype)

    def upload(self, array: np.ndarray) -> Any:
        return self._cupy.asarray(array)

    def function(self, program: Program, name: str) -> Function:
        if program not in self._modules:
            self._modules[program] = self._cupy.RawModule(code=program.text, options=program.options)
        kernel = self._modules[program].get_function(name)
        try:
            kernel.compile()
        except Exception as error:
            raise KernelError(f"{program}: NVRTC does not compile {name}: {error}; report this") from error
        return kernel.kernel  # on this device; a RawKernel looks it up at every call

    def bind(self, function: Function, grid: Extents, block: Extents, record: np.ndarray) -> Callable[[], None]:
        launch, stream = self._cupy.cuda.driver.launchKernel, self._cupy.cuda.get_current_stream
        # What cuLaunchKernel calls `kernelParams`: the address of each parameter. CuPy's own way to it asks NumPy to
        # describe the fields of the record at every launch, 12-15 us.
        parameters = np.array([address(record)], np.uint64)
        pointer, place, extents = int(function.ptr), address(parameters), (*grid, *block)

        def run(keep: Any = (function, parameters)) -> None:
            launch(pointer, *extents, 0, stream().ptr, place, 0)

        return run

    def describe(self) -> str:
        return f"{self.name}, {self.units} multiprocessors, CuPy {self._cupy.__version__}"
