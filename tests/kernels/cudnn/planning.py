"""Planning of convolutions and attention by the real cuDNN for an absent GPU, in a separate process; see
`test_planning.py`.

cuDNN plans for a described device if it finds the symbols of a driver. Nothing runs. Each output line is JSON: the
kernel, and its plan or the reason why there is none.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import cudnn
import ml_dtypes  # noqa: F401  # registers bfloat16
import numpy as np

from benchmarks.gpu import fusions
from halograd.kernels import Everywhere, Geometry, Kernel, KernelError, Windows
from halograd.kernels.attention import AttentionArrays
from halograd.kernels.cuda import Boxes
from halograd.kernels.cudnn.attention import CudnnAttention
from halograd.kernels.cudnn.frontend import Frontend
from halograd.kernels.cudnn.graphs import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    Arithmetic,
    Candidates,
    GraphKey,
    PlanKey,
    Shapes,
)
from halograd.kernels.cudnn.sums import BACKWARD_SUMS, FORWARD_SUMS, SumsKey
from halograd.kernels.geometry import tensor_core_channels
from tests.kernels.cuda.host import HostLauncher
from tests.kernels.geometries import CASES, Case
from tests.kernels.test_attention import Case as AttentionCase

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
WHERE = {"device_property": cudnn.create_device_properties(json.dumps(HOPPER))}
LARGE = [
    Case("mesh-2K", Geometry.of((3, 3), 1, 1), (1024, 1024), 1, 128, 128),
    Case("mesh-2K rows with halos", Geometry.of((3, 3), 1, ((0, 0), (1, 1))), (514, 1024), 1, 128, 128),
    Case("mesh-2K stem, padded", Geometry.of((5, 5), 2, 2), (2048, 2048), 1, tensor_core_channels(18, "float16"), 128),
    Case("U-Net 3-D", Geometry.of((3, 3, 3), 1, 1), (128, 128, 128), 1, 32, 32),
    Case("ResNet stem", Geometry.of((7, 7), 2, 3), (224, 224), 64, 3, 64),
]
_WINDOW = (Windows(28, 7), Windows(28, 7))
#: Attention by name; "rows" has the queries of some rows.
ATTENTION = {
    "U-Net, 32 x 32": AttentionCase((Everywhere(32, 32), Everywhere(32, 32)), heads=8, d=64, e=64),
    "U-Net, one head of 256": AttentionCase((Everywhere(16, 16), Everywhere(16, 16)), heads=1, d=256, e=256),
    "ViT-B/16": AttentionCase((Everywhere(197, 197),), heads=12, d=64, e=64),
    "16,384 positions": AttentionCase((Everywhere(128, 128), Everywhere(128, 128)), heads=1, d=64, e=64, samples=1),
    "rows of 16,384 positions": AttentionCase((Everywhere(128, 128), Everywhere(128, 128)), heads=4, d=32, e=32),
    "grouped": AttentionCase((Everywhere(100, 77),), heads=8, groups=4, d=64, e=128),
    "relative bias": AttentionCase((Everywhere(16, 16), Everywhere(16, 16)), heads=4, d=32, e=32, bias=True),
    "Swin-T": AttentionCase(_WINDOW, heads=6, d=32, e=32, bias=True),
    "Swin-T, shifted": AttentionCase((Windows(28, 7, 3), Windows(28, 7, 3)), heads=6, d=32, e=32, bias=True),
    "windows along one axis": AttentionCase((Windows(96, 16),), heads=4, d=24, e=24),
    "windows in 3-D": AttentionCase((Windows(14, 7), Windows(14, 7), Windows(14, 7)), heads=3, d=16, e=16, bias=True),
}


def main() -> None:
    """Plan every case in every direction, and print the results."""
    frontend = Frontend(cudnn)
    attention(frontend)
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
                    json.dumps([str(case), direction, key.dtype, key.arithmetic.precision, *plan(frontend, key, WHERE)])
                )
                sys.stdout.flush()
    for i, case in enumerate(fusions.CASES):
        for dtype in ("bfloat16", *(("float16",) if i == 2 else ())):
            for direction in (FORWARD_SUMS, BACKWARD_SUMS):
                fused = {"bias": i % 2 == 0} if direction == FORWARD_SUMS else {"relu": i != 2}
                key = SumsKey(direction, dtype, case.shapes, Arithmetic(), **fused)
                print(json.dumps([case.title, direction, dtype, "", *plan(frontend, key, WHERE)]), flush=True)


def attention(frontend: Frontend) -> None:
    """Plan every attention in both directions: plain, merged as in a ring, and deterministic."""
    for name, case in ATTENTION.items():
        whole = case.geometry()
        if name.startswith("rows"):
            whole = replace(whole, queries=((32, 64), (0, 128)))
        variants = {"plain": whole}
        if name.startswith(("rows", "grouped")):
            variants["merge"] = replace(whole, merge=True)
        for what, geometry in variants.items():
            for dtype in ("bfloat16", *(("float16",) if name in ("grouped", "Swin-T") else ())):
                for direction in ("forward", "backward"):
                    found = attend(frontend, case, geometry, np.dtype(dtype), direction)
                    print(json.dumps([name, f"attention {direction}", dtype, what, *found]))
                    sys.stdout.flush()


class _Planning:
    """Plans that are only made."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend, self.made = frontend, []

    def get(self, key, table) -> SimpleNamespace:
        found = plan(self.frontend, key, WHERE)
        self.made.append(found)
        if found[0].startswith("none"):
            raise KernelError(found[0])
        return SimpleNamespace(name=found[0], workspace_bytes=found[1])


def attend(frontend: Frontend, case: AttentionCase, geometry, dtype, direction: str) -> tuple[str, int, bool]:
    """Return name and workspace of the last plan of an attention, and whether all are launched by tables."""
    launcher = HostLauncher()
    launcher.function = lambda program, name: (program, name, None)
    launcher.empty = lambda shape, dtype: np.empty(shape, dtype)
    workspaces = SimpleNamespace(reserve=lambda nbytes: None)
    plans = _Planning(frontend)
    engine = SimpleNamespace(plans=plans, handles=None, workspaces=workspaces, boxes=Boxes(launcher), tuned=False)
    engine.__dict__.update(empty=launcher.empty, arithmetic=Arithmetic(), workspace_limit=None, kernel_bytes=0)
    queries, keys = (tuple(b - a for a, b in some) for some in (geometry.queries, geometry.keys))
    n, groups = case.samples, case.heads // case.groups
    q, dq = (np.empty((n, *queries, case.heads * case.d), dtype) for _ in range(2))
    y, dy = (np.empty((n, *queries, case.heads * case.e), dtype) for _ in range(2))
    k, dk = (np.empty((n, *keys, groups * case.d), dtype) for _ in range(2))
    v, dv = (np.empty((n, *keys, groups * case.e), dtype) for _ in range(2))
    lse, bias, dbias = np.empty((*y.shape[:-1], case.heads), np.float32), None, None
    if case.bias:
        bias, dbias = (np.empty((case.heads, *(r.bias_extent for r in case.reaches)), np.float32) for _ in range(2))
    arrays = AttentionArrays(q, k, v, bias, y, lse, *((dy, dq, dk, dv, dbias) if direction == "backward" else ()))
    made = CudnnAttention(engine, launcher, np, frontend, 90)
    getattr(made, direction)(arrays, geometry, lambda: Kernel(lambda: None, "ours"))
    if made.substitutes:
        return f"none: {made.substitutes[0].reason}", 0, False
    return plans.made[-1][0], max(found[1] for found in plans.made), all(found[2] for found in plans.made)


def plan(frontend: Frontend, key: GraphKey, where: dict) -> tuple[str, int, bool]:
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
