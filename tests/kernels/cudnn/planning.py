"""Planning of convolutions by the real cuDNN for an absent GPU, in a separate process; see `test_planning.py`.

cuDNN plans for a described device if it finds the symbols of a driver. Nothing runs. Each output line is JSON: the
convolution, and its plan or the reason why there is none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cudnn

from benchmarks.gpu import fusions
from halograd.kernels import Geometry, KernelError
from halograd.kernels.cudnn.frontend import Frontend
from halograd.kernels.cudnn.graphs import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    Arithmetic,
    Candidates,
    PlanKey,
    Shapes,
)
from halograd.kernels.geometry import tensor_core_channels
from tests.kernels.geometries import CASES, Case

#: Result of `cudnn.create_device_properties(0).serialize()` for such a device, as far as is known without one.
HOPPER = {
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "multiProcessorCount": 132,
    "smCountOrigin": 0,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "oversizedSharedMemoryPerBlock": 0,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 150_000_000_000,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "l2CacheSize": 62914560,
    "cudaDeviceId": 0,
    "deviceVer": 900,
    "driverVer": 13000,
    "deviceName": "NVIDIA H200",
}
LARGE = [
    Case("mesh-2K", Geometry.of((3, 3), 1, 1), (1024, 1024), 1, 128, 128),
    Case("mesh-2K rows with halos", Geometry.of((3, 3), 1, ((0, 0), (1, 1))), (514, 1024), 1, 128, 128),
    Case("mesh-2K stem, padded", Geometry.of((5, 5), 2, 2), (2048, 2048), 1, tensor_core_channels(18, "float16"), 128),
    Case("U-Net 3-D", Geometry.of((3, 3, 3), 1, 1), (128, 128, 128), 1, 32, 32),
    Case("ResNet stem", Geometry.of((7, 7), 2, 3), (224, 224), 64, 3, 64),
]


def main() -> None:
    """Plan every case in every direction, and print the results."""
    frontend = Frontend(cudnn)
    where = {"device_property": cudnn.create_device_properties(json.dumps(HOPPER))}
    for case in [*CASES, *LARGE]:
        x, w, _, y = case.shapes
        shapes = Shapes.of(x, w, y, case.geometry)
        for direction in (FORWARD, BACKWARD_DATA, BACKWARD_FILTER):
            fused = direction == FORWARD
            keys = [PlanKey(direction, "float32", shapes, Arithmetic(), fused, fused)]
            keys.append(PlanKey(direction, "float32", shapes, Arithmetic("tf32", True)))
            # Filter gradients of few channels in 16 bits need a compiler, which takes seconds.
            if fused or direction == BACKWARD_DATA or case in LARGE:
                keys.append(PlanKey(direction, "bfloat16", shapes, Arithmetic(), fused, fused))
            for key in keys:
                print(
                    json.dumps([str(case), direction, key.dtype, key.arithmetic.precision, *plan(frontend, key, where)])
                )
                sys.stdout.flush()
    for case in fusions.CASES:
        for build in (fusions.forward_graph, fusions.backward_graph):
            name, nbytes, table = with_sums(frontend, build(frontend, case.shapes, where))
            print(json.dumps([case.title, build.__name__, "bfloat16", "", name, nbytes, table]), flush=True)


def with_sums(frontend: Frontend, graph: Any) -> tuple[str, int, bool]:
    """Return the same as `plan`, for a convolution with sums in its epilogue."""
    for name, nbytes, _ in fusions.plans(frontend, graph, ()):
        return name, nbytes, hasattr(graph, "_execute_with_raw_ptrs")
    return "none: no engine", 0, False


def plan(frontend: Frontend, key: PlanKey, where: dict) -> tuple[str, int, bool]:
    """Return name and workspace of the first plan, and whether it would be launched by a table of addresses."""
    try:
        candidates = Candidates(frontend, key, where)
        built = next(candidates.all(), None)
    except KernelError as error:
        return f"none: {error}", 0, False
    if built is None:
        return f"none: {candidates.none()}", 0, False
    return built.name, built.workspace_bytes, frontend._takes_table(built.graph, key.uids)


if __name__ == "__main__":
    main()
