"""Processors and the libraries that compute on them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from halograd.cli.doctor.finding import Finding

if TYPE_CHECKING:
    from halograd.kernels import Backend

__all__ = ["convolve", "probe_numpy", "probe_onednn", "probe_python", "probe_threads"]


def probe_python() -> Iterator[Finding]:
    """Interpreter and machine. Local."""
    from halograd import __version__

    yield Finding("halograd", "ok", __version__)
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def probe_threads(ranks_on_node: int) -> Iterator[Finding]:
    """Cores of this process against the threads of all ranks of its node. Local."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() and int(given) > 0 else 1
    source = f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS is not set"
    value = f"{threads} per rank ({source}), {ranks_on_node} ranks on this node, {cores} cores"
    if threads * ranks_on_node > cores:
        remedy = f"more threads than cores: start at most {max(1, cores // threads)} ranks per node to be fast"
        yield Finding("threads", "warn", value, remedy)
    else:
        yield Finding("threads", "ok", value)


def probe_numpy() -> Iterator[Finding]:
    """NumPy and its matrix products. Local."""
    import numpy as np
    import threadpoolctl

    pools = [pool for pool in threadpoolctl.threadpool_info() if pool.get("user_api") == "blas"]
    described = [f"{p['internal_api']} {p.get('version') or ''} ({p.get('architecture', '?')})" for p in pools]
    yield Finding("NumPy", "ok", f"{np.__version__}, BLAS: {', '.join(described) or 'unknown'}")


def probe_onednn() -> Iterator[Finding]:
    """oneDNN, and one convolution with it checked against NumPy's. Local."""
    from halograd.kernels import KernelError, get_backend

    try:
        backend = get_backend("onednn", threads=1)
    except KernelError as error:
        remedy = "training runs with NumPy kernels, several times slower; pip install onednn-cpu-gomp (x86-64 Linux)"
        yield Finding("oneDNN", "warn", " ".join(str(error).split()), remedy)
        return
    with backend, get_backend("numpy", threads=1) as reference:
        yield Finding("oneDNN", "ok", backend.describe())
        implementation, difference = convolve(backend, reference)
        # The same sums of 144 products in another order, in float32.
        right = difference < 1e-4 and "ref" not in implementation
        value = f"{implementation}, differs from NumPy by {difference:.0e}"
        remedy = "" if right else "use another oneDNN 3, or train with backend numpy"
        yield Finding("convolution", "ok" if right else "fail", value, remedy)


def convolve(backend: Backend, reference: Backend) -> tuple[str, float]:
    """Implementation of one 3 x 3 convolution, and the largest difference from that of `reference`. Local."""
    import numpy as np

    from halograd.kernels import Geometry

    geometry = Geometry(kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=((0, 0), (0, 0)))
    draw = np.random.default_rng(0)
    data, weights = draw.standard_normal((1, 18, 18, 16)), draw.standard_normal((32, 3, 3, 16))
    results, implementation = [], ""
    for library in (reference, backend):
        x, w = (library.xp.asarray(host.astype(np.float32)) for host in (data, weights))
        y = library.zeros((1, 16, 16, 32), np.float32)
        kernel = library.conv_forward(x, w, None, y, geometry)
        kernel()
        implementation = kernel.impl
        results.append(y.get() if hasattr(y, "get") else np.array(y))  # from the device, which waits for it
        kernel.close()
    return implementation, float(np.abs(results[0] - results[1]).max())
