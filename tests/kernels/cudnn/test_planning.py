"""Test that the real cuDNN, if its wheels are installed, plans every convolution and attention for an absent GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

#: Symbols that cuDNN looks up in a driver before it plans. The first functions fail, because they need a device; the
#: others must not. Those that load a compiled kernel return a handle, which must not be null.
FAILING = """
    cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet cuDeviceGetCount cuDriverGetVersion
    cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx cuStreamGetCtx
"""
PASSING = """
    cuGetErrorName cuGetErrorString cuKernelGetAttribute cuKernelSetAttribute cuLibraryUnload cuLinkAddData
    cuLinkComplete cuLinkDestroy cuModuleUnload cuOccupancyMaxPotentialClusterSize cuTensorMapEncodeIm2col
    cuTensorMapEncodeTiled
"""
LOADING = """
    cuKernelGetFunction cuLibraryGetKernel cuLibraryLoadData cuLibraryLoadFromFile cuLinkCreate cuModuleGetFunction
    cuModuleLoadData
"""


def driver_double(folder: Path) -> None:
    """Build a libcuda that has the symbols of a driver, but no device."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    lines = [f"int {name}(void) {{ return 100; }}" for name in FAILING.split()]
    lines += [f"int {name}(void) {{ return 0; }}" for name in PASSING.split()]
    lines += ["static long handle;"]
    lines += [f"int {name}(void** made) {{ *made = &handle; return 0; }}" for name in LOADING.split()]
    (folder / "driver.c").write_text("\n".join(lines))
    target = str(folder / "libcuda.so.1")
    command = [compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", target, str(folder / "driver.c")]
    subprocess.run(command, check=True)


def test_cudnn_has_a_plan_for_every_geometry(tmp_path):
    for module in ("cudnn", "nvidia.cudnn"):
        if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
            pytest.skip("needs cuDNN: pip install nvidia-cudnn-frontend nvidia-cudnn-cu13 (half a gigabyte)")
    driver_double(tmp_path)
    # cuDNN's compiler, which attention needs.
    packages = importlib.util.find_spec("nvidia").submodule_search_locations
    folders = [str(folder) for package in packages for folder in Path(package).glob("*/lib")]
    paths = os.pathsep.join([str(tmp_path), *folders, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cudnn.planning"],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > 280
    assert [line for line in found if line[4].startswith("none")] == []
    assert all(line[6] for line in found), "every plan is launched by a table of addresses"
    attention = [line for line in found if line[1].startswith("attention")]
    assert len(attention) == 32 and len(found) > 310
    # A packed block with margins needs no hidden copy; its convolutions in bfloat16 are those of tensor cores.
    haloed = [line for line in found if line[0] == "mesh-2K rows with halos" and line[2] == "bfloat16"]
    assert len(haloed) == 3 and all(line[5] < 4 << 20 for line in haloed), haloed
    # The stem does not either; cuDNN itself would pad its 18 channels in 192 MiB.
    stem = [line for line in found if line[0] == "mesh-2K stem, padded" and line[2] == "bfloat16"]
    assert len(stem) == 3 and all(line[5] < 4 << 20 for line in stem if line[1] != "backward data"), stem
    # Sums in the epilogue, forward and backward, need no workspace.
    fused = [line for line in found if line[1].endswith("with sums")]
    assert len(fused) == 12 and all(line[5] == 0 for line in fused), fused
