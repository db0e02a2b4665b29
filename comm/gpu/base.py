"""What a transport for arrays of a device is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.reduction import REDUCIBLE, Reduction
from halograd.comm.transports.base import Pattern

__all__ = ["DEVICE_METHODS", "DeviceTransport", "check_dtype"]

#: Sums that transports of devices make. Those by nodes and those rounded are made by the host, by way of pinned memory.
DEVICE_METHODS = ("allreduce", "ordered", "reduce_scatter", "all_gather")


class DeviceTransport(ABC):
    """Makes channels and reductions whose buffers are on a device, on one communicator."""

    @abstractmethod
    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        """A channel of this (valid and matching) pattern. Collective over the communicator."""

    @abstractmethod
    def reduction(self, buffer: Any, meter: Meter, method: str, tags: tuple[int, int]) -> Reduction:
        """A reduction by one of `DEVICE_METHODS`, of several ranks and not empty. Collective over the communicator."""

    @abstractmethod
    def check(self, dtype: np.dtype) -> None:
        """Raise CommError unless arrays of this type can be summed. Local."""

    def close(self) -> None:
        """Free what the transport holds, after its channels. Collective over the communicator."""
        return None


def check_dtype(dtype: np.dtype, legal: tuple[str, ...] = REDUCIBLE) -> None:
    """Raise CommError unless arrays of this type can be summed. Local."""
    if dtype.name not in legal:
        raise CommError(f"buffer: expected one of {', '.join(legal)}, got {dtype.name}; convert it to float32")
