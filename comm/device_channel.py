"""Channels whose messages lie one behind the other in two buffers of a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.device import Device

__all__ = ["DeviceChannel"]

_ALIGNMENT = 64  # [B]: copies and kernels of a device want messages to begin so


class DeviceChannel(Channel):
    """A channel with one buffer of a device per direction, which serves both slots. How they travel is left open."""

    def __init__(
        self,
        send_counts: Mapping[int, int],
        recv_counts: Mapping[int, int],
        dtype: np.dtype,
        meter: Meter,
        device: Device,
    ) -> None:
        super().__init__(send_counts, recv_counts, dtype, meter)
        self._sends, self._recvs = places(self.send_counts, self.dtype), places(self.recv_counts, self.dtype)
        self._out = device.zeros((end_of(self._sends),), self.dtype)
        self._in = device.zeros((end_of(self._recvs),), self.dtype)

    @property
    def buffer_bytes(self) -> int:
        """Memory of the host: none [B]."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Memory of the device [B]; what a library keeps for itself is not counted."""
        return int(self._out.nbytes + self._in.nbytes)

    def _send_buffer(self, peer: int, slot: int) -> Any:
        return self._out[self._sends[peer]]

    def _recv_buffer(self, peer: int, slot: int) -> Any:
        return self._in[self._recvs[peer]]


def places(counts: Mapping[int, int], dtype: np.dtype) -> dict[int, slice]:
    """Where the message of each peer lies in one buffer for all. Local.

    >>> places({1: 3, 4: 20}, np.dtype("float64"))
    {1: slice(0, 3, None), 4: slice(8, 28, None)}
    """
    step = max(1, _ALIGNMENT // dtype.itemsize)
    found, first = {}, 0
    for peer, count in sorted(counts.items()):
        found[peer] = slice(first, first + count)
        first += -(-count // step) * step
    return found


def end_of(where: Mapping[int, slice]) -> int:
    """Elements of a buffer that holds these. Local."""
    return max((part.stop for part in where.values()), default=0)
