"""Host time of a launch of one of halograd's CUDA kernels.

    python benchmarks/launches.py

Per kernel, with all of its arguments in one record [us per launch]:

``fields`` reading the record's address from NumPy's array interface, which builds a description of every field; CuPy
does this at each launch of a record. ``driver`` CuPy's `launchKernel` with prepared arguments. ``launch``     a whole
:class:`halograd.kernels.cuda.launch.Launch`. ``arguments`` the difference of the last two: halograd's share.

On a machine with a GPU the kernels run on empty arrays. Without one, a library with one function that does nothing
replaces the driver (it needs g++ and CuPy), and a Python object replaces CuPy's current stream.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.kernels import KernelError
from halograd.kernels.cuda.launch import CupyLauncher, Function, Launch
from halograd.kernels.cuda.sources import CudaProgram

#: Kernels with few and with many arguments.
KERNELS = {"find_nonfinite_v": "reduce", "forward_v": "norm", "add_v": "elementwise"}
COLUMNS = ("fields", "driver", "launch", "arguments")
#: ``cuLaunchKernel`` that only checks that there is a parameter.
DRIVER = """
extern "C" int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                              void** parameters, void**) {
    return parameters && *parameters ? 0 : 1;
}
"""


class DriverlessLauncher(CupyLauncher):
    """CuPy's launcher with a library that does nothing instead of the driver."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "driver.cpp", folder / "libcuda.so.1"
        source.write_text(DRIVER)
        command = ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # CuPy loads a library of this name, and finds this one
        import cupy

        stream = SimpleNamespace(ptr=0)
        self._cupy: Any = SimpleNamespace(
            cuda=SimpleNamespace(driver=cupy.cuda.driver, get_current_stream=lambda: stream)
        )
        self.units, self.name = 132, "no device"

    def function(self, program: CudaProgram, name: str) -> Function:
        return SimpleNamespace(ptr=1)


def open_device(folder: Path) -> CupyLauncher:
    """Return the launcher of the GPU, or its replacement."""
    try:
        return CupyLauncher()
    except KernelError:
        return DriverlessLauncher(folder)


def cost(device: CupyLauncher, name: str, calls: int) -> dict[str, float]:
    """Return the shortest mean time of a call over a few rounds, by column [s]."""
    launch = Launch(device, CudaProgram(KERNELS[name]), name, (1,))
    record, parameters = launch._record, np.array([launch._record.ctypes.data], np.uint64)
    address, pointer, enqueue = int(parameters.ctypes.data), int(launch._function.ptr), device._cupy.cuda.driver
    stream = device._cupy.cuda.get_current_stream().ptr
    timed: dict[str, Callable[[], Any]] = {
        "fields": lambda: record.__array_interface__["data"][0],
        "driver": lambda: enqueue.launchKernel(pointer, 1, 1, 1, 256, 1, 1, 0, stream, address, 0),
        "launch": launch,
    }
    seconds = {key: min(timeit.repeat(run, number=calls, repeat=5)) / calls for key, run in timed.items()}
    return {**seconds, "arguments": seconds["launch"] - seconds["driver"]}


def main(calls: Annotated[int, typer.Option(help="Launches per round.")] = 20_000) -> None:
    """Print the table of launch times."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            device = open_device(Path(folder))
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            raise typer.BadParameter(f"expected CuPy, and a GPU or g++, got {error}") from error
        typer.echo(f"{device.name} [us]")
        typer.echo(f"{'kernel':18}" + "".join(f"{column:>12}" for column in COLUMNS))
        for name in KERNELS:
            seconds = cost(device, name, calls)
            typer.echo(f"{name:18}" + "".join(f"{1e6 * seconds[column]:12.2f}" for column in COLUMNS))


if __name__ == "__main__":
    typer.run(main)
