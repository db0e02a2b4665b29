"""Opening of the backend of a run by its configuration, with checks of dtypes, device and transport on each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.errors import UserError

from ..comm import CommError
from ..device import DeviceError, as_dtype
from ..device.cupy import choose_ordinal, count_devices, import_cupy
from ..kernels import BACKENDS, Backend, BackendOptions, KernelError, Substitute
from .config import BackendConfig

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["check_dtype", "connect_device", "open_kernels", "report_substitutes"]

_log = logging.getLogger("halograd.kernels")


def open_kernels(config: BackendConfig, comm: Communicator) -> Backend:
    """Open the backend of ``[backend]`` for this rank. Collective over `comm`.

    Raises
    ------
    UserError
        On all ranks, if a rank does not have the backend, the device or the precision.
    """
    with comm.agreement():
        # A file of the user may be missing on one node.
        kind = BACKENDS[config.kernels]
    # Ranks of a node use its GPUs in turn, by their number on the node.
    local_rank = comm.nodes[: comm.rank].count(comm.nodes[comm.rank]) if kind.on_device else 0
    if comm.rank == 0:
        _warn_of_threads(config)
    with comm.agreement():
        for key in () if kind.on_device else ("device", "device_transport", "graph"):
            if key in config.model_fields_set and getattr(config, key) not in (False, "auto"):
                raise UserError(
                    f'backend.{key}: expected kernels = "cudnn" with it, got "{config.kernels}"; remove {key}'
                )
        try:
            ordinal = choose_ordinal(config.device, local_rank, count_devices(import_cupy())) if kind.on_device else 0
            opened = kind.open(
                BackendOptions(config.threads, config.autotune, config.precision, config.deterministic, ordinal)
            )
            opened.emulate = config.emulate
            return opened
        except DeviceError:
            raise
        except KernelError as error:
            raise UserError(f"backend.kernels: {error}") from error


def _warn_of_threads(config: BackendConfig) -> None:
    """Warn that OMP_NUM_THREADS is ignored, if kernels run on the host with the default number of threads, and the
    variable has another value.
    """
    if BACKENDS[config.kernels].on_device:
        return
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if "threads" not in config.model_fields_set and setting not in ("", f"{config.threads}"):
        _log.warning(
            "OMP_NUM_THREADS=%s is ignored: a rank computes with %d thread(s); set backend.threads (--threads N)",
            setting,
            config.threads,
        )


def connect_device(kernels: Backend, comm: Communicator, transport: str) -> None:
    """Choose the transport of arrays of the kernels' device; no-op on the host, or if one is chosen. Collective over
    `comm`.

    Raises
    ------
    UserError
        On all ranks, if the configured transport cannot work here.
    """
    device = kernels.device
    if device.is_host or comm.devices.choice is not None:
        return
    try:
        comm.use_device(device, transport)
    except CommError as error:
        # Some ranks failed, not all: this is no fault of the configuration.
        if not getattr(error, "agreed", False):
            raise
        refusal = UserError(f"backend.device_transport: {error}")
        refusal.__dict__.update(error.__dict__)  # whether ranks agreed, and where it arose
        raise refusal from error


def report_substitutes(comm: Communicator, substitutes: Sequence[tuple[str, Substitute]]) -> None:
    """Warn once, on rank 0, of kernels that kernels of another library replace. Collective over `comm`.

    Parameters
    ----------
    substitutes
        Names of layers of this rank, each with a substitute of one of its kernels.
    """
    ranks: dict[tuple[str, Substitute], list[int]] = {}
    # `dict.fromkeys`: each pair once, in the same order.
    for rank, reported in enumerate(comm.allgather_objects(list(dict.fromkeys(substitutes)))):
        for substitute in reported:
            ranks.setdefault(substitute, []).append(rank)
    if not ranks or comm.rank:
        return
    listed = "; ".join(
        f"{substitute.what} of layer {layer!r} by {substitute.by} on {_ranks(where, comm.size)} ({substitute.reason})"
        for (layer, substitute), where in ranks.items()
    )
    _log.warning("kernels: slower than others, because there is no fast kernel: %s", listed)


def _ranks(ranks: Sequence[int], size: int) -> str:
    """Return a string that names `ranks`, which are some or all of `size` ranks.

    >>> _ranks([0, 2], 4), _ranks([1], 4), _ranks([0, 1], 2), _ranks([0], 1)
    ('ranks 0, 2 of 4', 'rank 1 of 4', 'all 2 ranks', 'the only rank')
    """
    if len(ranks) == size:
        return f"all {size} ranks" if size > 1 else "the only rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {size}"


def check_dtype(dtype: Any, kernels: Any) -> np.dtype:
    """Return the dtype of activations, which the kernels must support. Local, the same on all ranks.

    Raises
    ------
    UserError
        If these kernels do not support the dtype, or only emulate it and this is not permitted.
    """
    checked = as_dtype(dtype)
    reason = kernels.emulates(checked.name)
    if reason and not kernels.emulate:
        raise UserError(
            f'training.dtype: expected a dtype in which kernels = "{kernels.name}" compute, got "{checked.name}": '
            f"{reason}, and emulated it is slower than float32; use float32, a processor that has it, or a GPU "
            '(backend.kernels = "cudnn"), or set backend.emulate = true'
        )
    if checked.name not in kernels.dtypes:
        raise UserError(
            f'training.dtype: expected {" or ".join(kernels.dtypes)} with kernels = "{kernels.name}", '
            f"got {checked.name}; {kernels.dtype_remedy}"
        )
    return checked
