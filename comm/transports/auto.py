"""The `auto` transport: shared memory between ranks of a node, messages between nodes."""

from __future__ import annotations

import numpy as np

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.ordered import Tags
from halograd.comm.reduction import Reduction
from halograd.comm.transports.base import Context, Pattern, Transport
from halograd.comm.transports.mpi import MpiTransport
from halograd.comm.transports.shared import SharedTransport

__all__ = ["AutoTransport"]


class AutoTransport(Transport):
    """`shared` for peers on the same node, `mpi` for the others, in one channel."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._mpi = MpiTransport(context)
        self._shared = SharedTransport(context)

    def neighbors(self) -> set[int]:
        """Ranks that are reached by shared memory. Collective at the first call."""
        return self._shared.neighbors()

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        near = self.neighbors()
        far = set(pattern.peers) - near
        # Collective over the node, so made also where no peer is near.
        shared = self._shared.channel(pattern.among(near), meter)
        if not far:
            return shared
        return AutoChannel(pattern, meter, shared, self._mpi.channel(pattern.among(far), meter))

    def reduction(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """Through shared memory if all ranks are on this node."""
        return self._shared.reduction(buffer, meter)

    def ordered(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        """As `reduction`."""
        return self._shared.ordered(buffer, meter, tags)

    def rounded(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        """As `reduction`."""
        return self._shared.rounded(buffer, meter, tags)

    def scatter(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """As `reduction`."""
        return self._shared.scatter(buffer, meter)

    def gather(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """As `reduction`."""
        return self._shared.gather(buffer, meter)

    def sum_by_nodes(self, buffer: np.ndarray, across: Meter, within: Meter, in_background: bool) -> Reduction:
        return self._shared.sum_by_nodes(buffer, across, within, in_background)

    @property
    def buffer_bytes(self) -> int:
        return self._shared.buffer_bytes

    def close(self) -> None:
        self._shared.close()


class AutoChannel(Channel):
    """Two channels that start and finish together, each for its own peers."""

    def __init__(self, pattern: Pattern, meter: Meter, near: Channel, far: Channel) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._parts = (far, near)  # far first: these messages take longer
        self._part_of = {peer: part for part in self._parts for peer in part.peers}

    def _send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._part_of[peer]._send_buffer(peer, slot)

    def _recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._part_of[peer]._recv_buffer(peer, slot)

    # The parts' own hooks, not their public calls: the meter and the state are kept here, once.
    def _start(self) -> None:
        for part in self._parts:
            part._start()

    def _finish(self) -> float:
        for part in self._parts:
            part._finish()
        return 0.0

    def _close(self) -> None:
        for part in self._parts:
            part._close()
