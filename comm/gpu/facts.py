"""What a rank finds out about its device, NCCL and MPI."""

from __future__ import annotations

import os
from typing import Any

from mpi4py import MPI

from halograd.comm.errors import CommError
from halograd.comm.gpu.choice import RankFacts
from halograd.comm.gpu.mpi_aware import claim_fault
from halograd.comm.gpu.nccl import load_nccl
from halograd.device import Device

__all__ = ["gpu_address", "rank_facts", "reachable_gpus"]


def rank_facts(device: Device, node: int, on_node: list[str]) -> RankFacts:
    """What this rank knows of itself. Local.

    Parameters
    ----------
    on_node
        Addresses of the GPUs of all ranks of this node.
    """
    gpu = gpu_address(device)
    if not gpu:
        return RankFacts(node, "")
    version, fault = 0, ""
    try:
        version = int(load_nccl().get_version())
    except CommError as error:
        fault = str(error)
    except Exception as error:  # a library that does not answer
        fault = f"it does not tell its version: {error}"
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return RankFacts(node, gpu, reachable_gpus(device, on_node), version, fault, shares, claim_fault(MPI))


def gpu_address(device: Any) -> str:
    """PCI address of a CUDA device, the same in all processes of a node; empty for any other device. Local."""
    cupy = getattr(device, "cupy", None)
    if cupy is None:
        return ""
    found = cupy.cuda.runtime.deviceGetPCIBusId(device.ordinal)
    return found.decode() if isinstance(found, bytes) else str(found)


def reachable_gpus(device: Any, addresses: list[str]) -> tuple[str, ...]:
    """Those of the GPUs whose memory this device can read: itself, and its peers. Local."""
    runtime, own = device.cupy.cuda.runtime, gpu_address(device)
    found = []
    for address in sorted(set(addresses)):
        try:
            if address == own or runtime.deviceCanAccessPeer(device.ordinal, runtime.deviceGetByPCIBusId(address)):
                found.append(address)
        except Exception:  # hidden from this process
            continue
    return tuple(found)
