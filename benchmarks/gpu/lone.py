"""Communicator of one rank without its peers: kernels, packing and unpacking are real; messages return to the sender.

For timings only: a rank receives its own messages, so results are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from halograd.comm.channel import ChannelSpec
from halograd.comm.counters import Instruments
from halograd.comm.gpu.choice import Choice, Nccl
from halograd.comm.reduction import ReductionSpec
from halograd.device import Device

__all__ = ["LoneCommunicator"]


class LoneCommunicator:
    """Communicator interface for an executor, as rank `rank` of `size`, without other ranks. Local.

    Messages are copied from the send to the receive buffers within the device, as many bytes as both have; sums do not
    change their buffer. All ranks must share all samples, because subgroups are not supported.
    """

    transport = "lone"
    recorder = None
    waits_for_network = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))
        self.nodes = (0,) * size
        self.instruments = Instruments()
        # Copies within the device can be captured into a graph, as NCCL messages can.
        copies = Choice(Nccl(), "copies within the device")
        self.devices = SimpleNamespace(choice=copies, launched=lambda label: lambda: None)
        self.counters = self.instruments.counters
        self._channels: list[_Mirror] = []

    def channels(self, specs: Sequence[ChannelSpec]) -> list[_Mirror]:
        """See `Communicator.channels`."""
        channels = [_Mirror(spec.sends, spec.recvs, np.dtype(spec.dtype), spec.device) for spec in specs]
        self._channels += channels
        return channels

    def reduction(self, buffer: Any, **options: Any) -> _Unchanged:
        """Return a reduction without contributions of other ranks."""
        return _Unchanged()

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[_Unchanged]:
        """See `Communicator.reductions`."""
        return [_Unchanged() for _ in specs]

    def split(self, color: int | None) -> LoneCommunicator:
        """Raise ValueError, because one rank alone does not know the members of a group."""
        raise ValueError("LoneCommunicator: expected a cut in which all ranks share all samples, got one of groups")

    @property
    def buffer_bytes(self) -> int:
        return 0

    @property
    def device_bytes(self) -> int:
        return sum(channel.nbytes for channel in self._channels)

    @contextmanager
    def agreement(self) -> Iterator[None]:
        yield

    def agree(self, fault: BaseException | None = None) -> None:
        if fault is not None:
            raise fault

    def bcast(self, value: Any) -> Any:
        return value

    def allgather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def allreduce_scalar(self, value: float, operation: str = "sum") -> float:
        return value


class _Mirror:
    """Channel that receives the messages that it sends."""

    def __init__(self, sends: Mapping[int, int], recvs: Mapping[int, int], dtype: np.dtype, device: Device) -> None:
        self.send_counts = {p: n for p, n in sorted(sends.items()) if n}
        self.recv_counts = {p: n for p, n in sorted(recvs.items()) if n}
        self.slot = 0
        out, back = (device.zeros((sum(c.values()),), dtype) for c in (self.send_counts, self.recv_counts))
        self._send, self._recv = _parts(out, self.send_counts), _parts(back, self.recv_counts)
        both = min(out.size, back.size)
        self._pair = (back[:both], out[:both])
        self.nbytes = out.nbytes + back.nbytes

    def send_buffer(self, peer: int, slot: int) -> Any:
        return self._send[peer]

    def recv_buffer(self, peer: int, slot: int) -> Any:
        return self._recv[peer]

    def start(self) -> None:
        target, source = self._pair
        if target.size:
            np.copyto(target, source)

    def finish(self) -> None:
        """Do nothing, because the copy is enqueued."""

    def release(self) -> None:
        self.slot = 1 - self.slot

    def close(self) -> None:
        """Do nothing, because the channel holds only memory."""


class _Unchanged:
    """Reduction that does not change its buffer."""

    closed = False
    encoding = None  # elements travel as they are
    under_way = False

    def start(self) -> None:
        """Start the reduction; nothing is sent."""
        self.under_way = True

    def finish(self) -> None:
        """Finish the reduction."""
        self.under_way = False

    def run(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _parts(array: Any, counts: Mapping[int, int]) -> dict[int, Any]:
    """Return the part of each peer; the parts are consecutive."""
    parts, start = {}, 0
    for peer, count in counts.items():
        parts[peer] = array[start : start + count]
        start += count
    return parts
