"""`halograd doctor`: a check of this machine, and whether training can run."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ..comm.boot import launched_size, warn_of_shared_memory
from ..comm.sweep import SHARED_MEMORY
from ..findings import Finding, probe_mpi
from ..limits import Cores, usable_cores

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..kernels import Backend

__all__ = ["careful", "examine", "merge", "probe_gpu", "show"]


def careful(name: str, probe: Callable[[], Iterator[Finding]], status: str = "fail") -> list[Finding]:
    """Return the findings of a probe; if the probe raises an error, add a finding of this status."""
    findings: list[Finding] = []
    try:
        findings.extend(probe())
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        findings.append(
            Finding(name, status, text, f"its installation is broken: pip install --force-reinstall {name}")
        )
    return findings


def probe_python() -> Iterator[Finding]:
    """Report interpreter and machine. Local."""
    from ..version import __version__

    yield Finding("halograd", "ok", __version__)
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def probe_threads(on_node: Sequence[Cores]) -> Iterator[Finding]:
    """Compare the cores of all ranks of a node with the threads that they have without a configuration. Local."""
    from ..training.config import BackendConfig

    ranks_on_node, cores, threads = len(on_node), Cores.together(on_node), BackendConfig().threads
    setting = os.environ.get("OMP_NUM_THREADS", "")
    # As in a training run, which warns of it (`halograd.training.backend`).
    ignored = "" if setting in ("", f"{threads}") else f"; OMP_NUM_THREADS={setting} is ignored"
    value = f"{threads} per rank (backend.threads), {ranks_on_node} ranks on this node, {cores} cores{ignored}"
    if threads * ranks_on_node > cores:
        remedy = f"more threads than cores: start at most {max(1, cores // threads)} ranks per node to be fast"
        yield Finding("threads", "warn", value, remedy)
    else:
        yield Finding("threads", "ok", value)


def probe_numpy() -> Iterator[Finding]:
    """Report NumPy and the library of its matrix products (BLAS). Local."""
    import threadpoolctl

    pools = [pool for pool in threadpoolctl.threadpool_info() if pool.get("user_api") == "blas"]
    described = [f"{p['internal_api']} {p.get('version') or ''} ({p.get('architecture', '?')})" for p in pools]
    yield Finding("NumPy", "ok", f"{np.__version__}, BLAS: {', '.join(described) or 'unknown'}")


def probe_onednn() -> Iterator[Finding]:
    """Report oneDNN, and compare one of its convolutions with NumPy's. Local."""
    from ..device import LOW
    from ..kernels import KernelError, get_backend
    from ..kernels.onednn import OnednnBackend

    try:
        backend = OnednnBackend(threads=1)
    except KernelError as error:
        remedy = "training runs with NumPy kernels, several times slower; pip install onednn-cpu-gomp (x86-64 Linux)"
        yield Finding("oneDNN", "warn", " ".join(str(error).split()), remedy)
        return
    with backend, get_backend("numpy", threads=1) as reference:
        low = [dtype for dtype in LOW if not backend.emulates(dtype)]
        computes = f"computes in float32{''.join(f', {dtype}' for dtype in low)}"
        yield Finding("oneDNN", "ok", f"{backend.describe()}, instruction set {backend.instruction_set}, {computes}")
        for number, fault in enumerate(backend.refused, 1):
            yield Finding(f"oneDNN refused {number}", "note", fault)
        implementation, difference = convolve(backend, reference)
        # The same sums of 144 products in another order, in float32.
        # `ref` is oneDNN's slow reference implementation.
        right = difference < 1e-4 and "ref" not in implementation
        value = f"{implementation}, differs from NumPy by {difference:.0e}"
        remedy = "" if right else "use another oneDNN 3, or train with backend numpy"
        yield Finding("convolution", "ok" if right else "fail", value, remedy)


def convolve(backend: Backend, reference: Backend) -> tuple[str, float]:
    """Run one 3 x 3 convolution; return its implementation and the largest difference from `reference`. Local."""
    from ..kernels import Geometry

    geometry = Geometry(kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=((0, 0), (0, 0)))
    draw = np.random.default_rng(0)
    data, weights = draw.standard_normal((1, 18, 18, 16)), draw.standard_normal((32, 3, 3, 16))
    # Shapes: data (N, H, W, C), weights (F, 3, 3, C), y (N, H - 2, W - 2, F) without padding.
    results, implementation = [], ""
    for library in (reference, backend):
        x, w = (library.xp.asarray(host.astype(np.float32)) for host in (data, weights))
        y = library.zeros((1, 16, 16, 32), np.float32)
        kernel = library.conv_forward(x, w, None, y, geometry)
        kernel()
        implementation = kernel.impl
        results.append(y.get() if hasattr(y, "get") else np.array(y))  # a copy from the device waits for the kernel
        kernel.close()
    return implementation, float(np.abs(results[0] - results[1]).max())


def probe_hdf5() -> Iterator[Finding]:
    """Report h5py, HDF5, and whether HDF5 can write from several ranks at once. Local."""
    import h5py

    parallel = "parallel" if h5py.get_config().mpi else "serial (each rank reads its own blocks)"
    yield Finding("h5py", "ok", f"{h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {parallel}")


# Enough for MPI's own segments and the halo windows of small networks; containers often have 64 MiB in total.
ENOUGH_PER_RANK = 64 << 20  # [B]


def probe_formats() -> Iterator[Finding]:
    """Report the packages that read other formats than HDF5. Local."""
    available, missing = list[str](), list[str]()
    for name, reads in (("zarr", "Zarr, TIFF"), ("nibabel", "NIfTI"), ("tifffile", "TIFF")):
        try:
            available.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(f"{name} ({reads})")
    value = "; ".join([", ".join(available)] * bool(available) + [f"without {', '.join(missing)}"] * bool(missing))
    yield Finding("formats", "note" if missing else "ok", value, "pip install 'halograd[formats]'" if missing else "")


def probe_ranks(world: MPI.Intracomm) -> Iterator[Finding]:
    """Report ranks and nodes; test a sum over all ranks, and shared memory within nodes. Collective over `world`."""
    from mpi4py import MPI

    launched = launched_size()
    # With the launcher of another MPI, each process is a job of one rank.
    if launched not in (None, world.size):
        remedy = "start with the mpiexec of the same MPI, or srun --mpi=pmi2 (MPICH) or pmix (Open MPI)"
        yield Finding("ranks", "fail", f"the launcher started {launched}, MPI sees {world.size}", remedy)
        return
    nodes = Counter(world.allgather(MPI.Get_processor_name()))
    yield Finding("ranks", "ok", f"{world.size} on " + ", ".join(f"{host} ({n})" for host, n in nodes.items()))
    total = np.array([world.rank + 1.0])
    world.Allreduce(MPI.IN_PLACE, total)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert isinstance(node, MPI.Intracomm)
    window = MPI.Win.Allocate_shared(1 << 20, 1, comm=node)
    # The memory of the next rank, which must be visible here.
    neighbour, _ = window.Shared_query((node.rank + 1) % node.size)
    shared = neighbour is not None and len(neighbour) == 1 << 20
    window.Free()
    node.Free()
    expected = world.size * (world.size + 1) / 2
    right = total[0] == expected and shared
    value = f"sum over ranks {total[0]:g} of {expected:g}, shared window {'mapped' if shared else 'not mapped'}"
    yield Finding("communication", "ok" if right else "fail", value, "" if right else "try another MPI")


def probe_shared_memory(ranks_on_node: int) -> Iterator[Finding]:
    """Report the space for windows that the ranks of a node share. Local."""
    if not SHARED_MEMORY.is_dir():
        yield Finding("shared memory", "note", "no /dev/shm here; MPI puts its windows elsewhere")
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    value = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} in {SHARED_MEMORY}"
    if not os.access(SHARED_MEMORY, os.W_OK):
        yield Finding("shared memory", "fail", "no write access to /dev/shm", "request it, or set TMPDIR for MPI")
    elif usage.free < ranks_on_node * ENOUGH_PER_RANK:
        remedy = "give the container more (docker run --shm-size=2g), or train with the transport mpi, "
        remedy += "and set UCX_TLS=^posix if MPICH crashes when it starts"
        yield Finding("shared memory", "warn", value, remedy)
    else:
        yield Finding("shared memory", "ok", value)


NOT_NEEDED = "not needed on a CPU"
#: The last NumPy that CuPy 14.2 lists as tested; its metadata allows later ones.
NUMPY = (2, 4)
INSTALL = "pip install 'halograd[gpu]'; training on the processor needs none of it"


def probe_gpu() -> Iterator[Finding]:
    """Report driver, CuPy, cuDNN and NCCL, or why they are missing, and the backend cudnn. Local.

    A missing part is a warning on a machine with a GPU, else a note, because a CPU needs none of these parts.
    """
    driver, devices = _driver()
    yield Finding("CUDA driver", "ok" if devices else "note", driver)
    cupy = _load("cupy")
    yield _module_finding("CuPy", cupy, devices, lambda: str(cupy.__version__))
    if devices and not isinstance(cupy, str):
        yield from _numpy(np.__version__)
    cudnn = _load("cudnn")
    yield _module_finding("cuDNN", cudnn, devices, lambda: f"{cudnn.backend_version()} (frontend {cudnn.__version__})")
    nccl: Any = cupy if isinstance(cupy, str) else _load("cupy.cuda.nccl")
    yield _module_finding("NCCL", nccl, devices, lambda: str(nccl.get_version()))
    yield from _backend(devices)


def _numpy(version: str) -> Iterator[Finding]:
    """Warn if this version of NumPy is later than those with which CuPy was tested."""
    if tuple(int(part) for part in version.split(".")[:2]) > NUMPY:
        last = ".".join(map(str, NUMPY))
        value = f"{version}: CuPy is tested with NumPy up to {last}"
        yield Finding("NumPy for CuPy", "warn", value, f"pip install 'numpy<{NUMPY[0]}.{NUMPY[1] + 1}'")


def _load(name: str) -> Any:
    """Return the module, or a string with the reason why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a broken CUDA installation may raise anything
        return " ".join(f"{type(error).__name__}: {error}".split())


def _module_finding(name: str, module: Any, devices: int, version: Any) -> Finding:
    if isinstance(module, str):
        return _missing(name, module, devices)
    try:
        return Finding(name, "ok", version())
    except Exception as error:  # the module is installed, but not its library
        return _missing(name, " ".join(f"{type(error).__name__}: {error}".split()), devices)


def _missing(name: str, why: str, devices: int) -> Finding:
    if devices:
        return Finding(name, "warn", why, INSTALL)
    return Finding(name, "note", f"{why}; {NOT_NEEDED}")


def _backend(devices: int) -> Iterator[Finding]:
    """Report the backend cudnn, and compare one of its convolutions with NumPy's."""
    from ..kernels import KernelError, get_backend

    try:
        backend = get_backend("cudnn")
    except KernelError as error:
        yield _missing("GPU kernels", " ".join(str(error).split()), devices)
        return
    with backend, get_backend("numpy") as reference:
        yield Finding("GPU kernels", "ok", backend.describe())
        implementation, difference = convolve(backend, reference)
        # The same sums of 144 products in another order, in float32.
        right = difference < 1e-4
        value = f"{implementation}, differs from NumPy by {difference:.0e}"
        remedy = "" if right else "do not train on this GPU: its convolution is wrong; try another cuDNN 9"
        yield Finding("GPU convolution", "ok" if right else "warn", value, remedy)


def _driver() -> tuple[str, int]:
    """Return a description of the CUDA driver, and the number of devices."""
    path = ctypes.util.find_library("cuda")
    if path is None:
        return f"no libcuda; {NOT_NEEDED}", 0
    try:
        library = ctypes.CDLL(path)
        code = library.cuInit(0)
        count, version = ctypes.c_int(), ctypes.c_int()
        if code == 0:
            library.cuDeviceGetCount(ctypes.byref(count))
        # It needs no initialization, so the version is known even if cuInit failed.
        library.cuDriverGetVersion(ctypes.byref(version))
    except OSError as error:
        return str(error), 0
    name = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return f"CUDA {name}, {count.value} devices" + (f" (error {code})" if code else ""), count.value


STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}


def examine() -> int:
    """Examine this machine and print the report on rank 0; return 1 if training cannot run. Collective."""
    # Before the import of MPI, which initializes it and may crash without enough shared memory.
    warn_of_shared_memory()
    findings = [*careful("Python", probe_python), *careful("mpi4py", probe_mpi)]
    # None if MPI cannot be loaded: then everything that needs it is left out.
    world = _world(findings)
    on_node = [usable_cores()]
    if world is not None:
        findings += careful("ranks", lambda: probe_ranks(world))
        on_node = _cores_of_node(world)
    findings += careful("threads", lambda: probe_threads(on_node))
    findings += careful("shared memory", lambda: probe_shared_memory(len(on_node)))
    # Most of these are names of packages: after an error of a probe, the remedy installs its package again.
    findings += careful("numpy", probe_numpy)
    findings += careful("onednn-cpu-gomp", probe_onednn, "warn")
    findings += careful("h5py", probe_hdf5)
    findings += careful("formats", probe_formats, "note")
    findings += careful("cupy", probe_gpu, "note")
    # Nodes may differ, so the report has the worst of all ranks.
    everyone = [findings] if world is None else world.allgather(findings)
    merged = merge(everyone)
    if world is None or world.rank == 0:
        show(merged)
    return 1 if any(finding.status == "fail" for finding in merged) else 0


def _world(findings: Sequence[Finding]) -> MPI.Intracomm | None:
    if any(finding.status == "fail" for finding in findings):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _cores_of_node(world: MPI.Intracomm) -> list[Cores]:
    """Return the cores of every rank on this rank's node."""
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert isinstance(node, MPI.Intracomm)
    cores: list[Cores] = node.allgather(usable_cores())
    node.Free()
    return cores


def merge(everyone: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the worst finding of all ranks per name, in the order of rank 0; those of other ranks name the rank."""
    worst: dict[str, Finding] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            if finding.name not in worst or finding.severity > worst[finding.name].severity:
                where = f"rank {rank}: " if rank else ""
                worst[finding.name] = Finding(finding.name, finding.status, where + finding.value, finding.remedy)
    return list(worst.values())


def show(findings: Sequence[Finding]) -> None:
    """Print a table on a terminal, else plain lines for `grep`, and the result."""
    console = Console(highlight=False)
    if console.is_terminal:
        _show_table(console, findings)
    else:
        width = max(len(finding.name) for finding in findings)
        for f in findings:
            print(f"{f.status:<5} {f.name:<{width}}  {f.value}" + (f"  -> {f.remedy}" if f.remedy else ""))
    failed = [finding.name for finding in findings if finding.status == "fail"]
    print(f"training cannot run: {', '.join(failed)}" if failed else "training can run", flush=True)


def _show_table(console: Console, findings: Sequence[Finding]) -> None:
    table = Table(show_edge=False)
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        style = STYLES[finding.status]
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        table.add_row(f"[{style}]{finding.status}[/]", finding.name, _escape(finding.value + remedy))
    console.print(table)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
