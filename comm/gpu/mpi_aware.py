"""Detection of CUDA-aware MPI: what the library reports, and a proof in a process that may crash.

An MPI library without CUDA support takes a device address for a host address, and the process dies. A library that was
built with CUDA support may lack a driver, a switch or a network plugin. So only a successful transfer counts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["PROOF_SECONDS", "claim_fault", "clean_environment", "prove"]

SIZES = (8, 1 << 20)  # [B]: an eager message and a rendezvous message
PROOF_SECONDS = 120.0  # [s]: CuPy and CUDA start slowly on a busy node
SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "HALOGRAD_MPI_CUDA")
# Launchers set variables with these prefixes for their ranks; the proof must be a program of its own.
_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "SLURM_", "PALS_")


def claim_fault(mpi: Any, environment: Mapping[str, str] | None = None) -> str:
    """Return the reason why MPI does not report CUDA support; empty if it does. Local.

    The function reads ``MPIX_Query_cuda_support`` (MPICH, Open MPI), the memory kinds of MPI 4.1, and the switches of
    vendors whose MPI provides neither: ``MPICH_GPU_SUPPORT_ENABLED``, ``MV2_USE_CUDA``, or our own
    ``HALOGRAD_MPI_CUDA=1``.

    Parameters
    ----------
    mpi
        The module ``mpi4py.MPI``.
    """
    environment = os.environ if environment is None else environment
    if any(environment.get(name) == "1" for name in SWITCHES):
        return ""
    if _reports_support(mpi) or "cuda" in _memory_kinds(mpi):
        return ""
    name, version = mpi.get_vendor()
    return (
        f"{name} {'.'.join(map(str, version))} does not report that it is CUDA-aware (if it is, set "
        "HALOGRAD_MPI_CUDA=1: then it is tested)"
    )


def _reports_support(mpi: Any) -> bool:
    try:
        # The symbols of the MPI library that mpi4py is linked to.
        query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    except OSError:
        return False
    return bool(query is not None and query() == 1)


def _memory_kinds(mpi: Any) -> str:
    try:
        return mpi.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
    except mpi.Exception:
        return ""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the launcher's variables, for a process that is not a rank of this job. Local.

    >>> clean_environment({"PMI_RANK": "1", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2"})
    {'PATH': '/bin', 'CUDA_VISIBLE_DEVICES': '2'}
    """
    return {key: value for key, value in environment.items() if not key.startswith(_LAUNCHERS)}


def prove(ordinal: int, seconds: float = PROOF_SECONDS) -> str:
    """Return the reason why MPI cannot send device memory to itself; empty if it can. Local; takes some seconds.

    It runs this module (``python -m halograd.comm.gpu.mpi_aware``) on the device `ordinal`, as a program of one rank,
    for at most `seconds`.
    """
    command = [sys.executable, "-m", "halograd.comm.gpu.mpi_aware", str(ordinal)]
    try:
        done = subprocess.run(
            command, env=clean_environment(os.environ), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"MPI did not send device memory to itself within {seconds:g} s"
    except OSError as error:
        return f"the test whether MPI reaches device memory could not be run ({error})"
    return proof_fault(done.returncode, done.stdout, done.stderr)


def proof_fault(code: int, out: str, err: str) -> str:
    """Return the fault that the proof has shown, from its exit code and output; empty if there is none. Local."""
    if code == 0 and "proven" in out:
        return ""
    if code < 0:
        return f"MPI ended by {signal.Signals(-code).name} when it sent device memory to itself"
    lines = [line for line in (err or out).splitlines() if line.strip()]
    return f"MPI could not send device memory to itself ({lines[-1].strip() if lines else f'exit code {code}'})"


def main(ordinal: int) -> int:
    """Run the proof, a program of its own: MPI sends device memory to itself. Prints ``proven`` on success; may crash.

    Returns 0 if the data came back unchanged, 2 if not.
    """
    from mpi4py import MPI

    from ...device.cupy import CupyDevice
    from .mpi_cuda import raw

    device = CupyDevice(ordinal)
    for nbytes in SIZES:
        source, target = device.zeros((nbytes,), "uint8"), device.zeros((nbytes,), "uint8")
        source.fill(nbytes % 251 + 1)  # never 0, the value that the target has before
        # MPI does not wait for the stream that fills the source.
        device.synchronize()
        message, received = raw(device.address(source), nbytes), raw(device.address(target), nbytes)
        MPI.COMM_SELF.Sendrecv(message, 0, 0, received, 0, 0)
        if not (device.to_host(target) == nbytes % 251 + 1).all():
            print(f"{nbytes} bytes came back changed", file=sys.stderr)
            return 2
    print("proven")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except Exception as error:
        print(error, file=sys.stderr)
        sys.exit(3)
