"""What a transport for arrays of a device is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.reduction import REDUCIBLE, Reduction
from halograd.comm.sums import Method
from halograd.comm.transports.base import Pattern

__all__ = ["DeviceTransport"]


class DeviceTransport(ABC):
    """Makes channels and reductions whose buffers are on a device, on one communicator.

    Attributes
    ----------
    summable
        Types of arrays that it sums.
    """

    summable: tuple[str, ...] = REDUCIBLE

    @abstractmethod
    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        """A channel of this (valid and matching) pattern. Collective over the communicator."""

    @abstractmethod
    def reduction(self, buffer: Any, meter: Meter, method: Method) -> Reduction:
        """A sum of several ranks, not empty, of a method that devices make. Collective over the communicator."""

    def close(self) -> None:
        """Free what the transport holds, after its channels. Collective over the communicator."""
        return None
