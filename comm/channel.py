"""Channels: a fixed pattern of messages between ranks, built once and run many times."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import HOST, Device
from .counters import Meter
from .errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Channel", "ChannelSpec", "check_counts", "check_matching", "expectations"]

IDLE, STARTED, FINISHED = "idle", "started", "finished"


class Channel(ABC):
    """Fixed set of messages, at most one to and one from each peer, sent repeatedly; made by `Communicator.channel`.

    Every rank of the communicator that has a peer runs an exchange like this::

        s = channel.slot
        pack into channel.send_buffer(peer, s)      # for every peer of send_counts
        channel.start()                             # does not wait
        ...                                         # compute; leave the buffers alone
        channel.finish()                            # waits
        read channel.recv_buffer(peer, s)           # for every peer of recv_counts
        channel.release()                           # local, costs nothing: flips `slot`

    Rules:

    - `slot` is 0 or 1 and changes only in `release`, so it is the same from packing to unpacking.
      All buffers are allocated at the beginning and stay: prebuild your views for both slots. A transport may
      return the same buffer for both slots.
    - A send buffer may be written only from `release` (or creation) to `start`.
    - A receive buffer may be read only from `finish` to `release`. It is read-only: with the `shared`
      transport it *is* the send buffer of the peer.
    - All ranks start and finish their channels in the same order; several channels may be active at once.
      A rank that only sends may wait in `finish` too, until its peers have started.

    Attributes
    ----------
    send_counts, recv_counts : dict of int to int
        Number of elements per peer; peers without a message are left out.
    dtype : numpy.dtype
        Type of the elements.
    """

    def __init__(
        self, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], dtype: np.dtype, meter: Meter
    ) -> None:
        self.send_counts = dict(send_counts)
        self.recv_counts = dict(recv_counts)
        self.dtype = dtype
        self._meter = meter
        self._slot = 0
        self._state = IDLE
        self._started_at = 0.0
        self._closed = False

    @property
    def buffer_bytes(self) -> int:
        """Host memory of this rank's message buffers [B]."""
        elements = sum(self.send_counts.values()) + sum(self.recv_counts.values())
        return elements * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """Device memory of this rank's message buffers [B]."""
        return 0

    @property
    def slot(self) -> int:
        """Slot of the current exchange, 0 or 1."""
        return self._slot

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that this rank sends to or receives from, in ascending order."""
        return tuple(sorted(self.send_counts.keys() | self.recv_counts.keys()))

    def send_buffer(self, peer: int, slot: int) -> np.ndarray:
        """Return the buffer of the message to `peer`: ``(send_counts[peer],)``, `dtype`, 64-byte aligned. Local.

        It is on the host, or on the device of the channel.
        """
        self._check(peer, slot, self.send_counts, "send_counts")
        return self._send_buffer(peer, slot)

    def recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        """Return the buffer of the message from `peer`: ``(recv_counts[peer],)``, `dtype`, 64-byte aligned. Local.

        It is on the host, or on the device of the channel. Do not write to it.
        """
        self._check(peer, slot, self.recv_counts, "recv_counts")
        return self._recv_buffer(peer, slot)

    def start(self) -> None:
        """Start to send the contents of the send buffers of the current slot. Does not wait."""
        self._expect(IDLE, "start")
        self._state = STARTED
        self._started_at = time.perf_counter()
        self._meter.sent()
        self._start()

    def finish(self) -> None:
        """Wait until the receive buffers of the current slot hold the data of this exchange.

        On a device, work that is enqueued afterwards finds the data there.

        Raises
        ------
        CommError
            If the exchange was not started.
        """
        self._expect(STARTED, "finish")
        self._meter.waits()
        before = time.perf_counter()
        try:
            arrived = self._finish()
        finally:
            self._meter.waited()
        self._state = FINISHED
        after = time.perf_counter()
        # An arrival time of 0 is unknown: at the latest, the data arrived now.
        self._meter.took(self._started_at, before, arrived or after, after)

    def release(self) -> None:
        """Release the receive buffers and switch to the other slot. Local, costs nothing."""
        self._expect(FINISHED, "release")
        self._state = IDLE
        self._slot = 1 - self._slot

    def close(self) -> None:
        """Free the resources of the channel; idempotent. Local, but all ranks must call it.

        An active exchange is finished first. The buffers must not be used afterwards.
        """
        if self._closed:
            return
        # Requests and flags of an active exchange must not be freed.
        if self._state == STARTED:
            self._finish()
        self._closed = True
        self._close()

    def _expect(self, state: str, call: str) -> None:
        if self._closed:
            raise CommError(f"{call}(): expected an open channel, got a closed one ({self._meter.name})")
        if self._state != state:
            raise CommError(
                f"{call}(): expected the channel to be {state}, got {self._state} ({self._meter.name}); "
                f"the order is start(), finish(), release()"
            )

    def _check(self, peer: int, slot: int, counts: Mapping[int, int], name: str) -> None:
        if peer not in counts:
            raise CommError(f"peer: expected one of {sorted(counts)} ({name}), got {peer}")
        if slot not in (0, 1):
            raise CommError(f"slot: expected 0 or 1, got {slot}")

    # Hooks of the transports: the public methods above check the state and keep the meter.
    @abstractmethod
    def _send_buffer(self, peer: int, slot: int) -> np.ndarray: ...

    @abstractmethod
    def _recv_buffer(self, peer: int, slot: int) -> np.ndarray: ...

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _finish(self) -> float:
        """Wait for the messages; return the time when the last one arrived (`time.perf_counter` [s]), 0 if unknown."""

    @abstractmethod
    def _close(self) -> None: ...


def check_counts(counts: Mapping[int, int], name: str, rank: int, size: int) -> None:
    """Raise CommError unless `counts` holds valid numbers of elements for other ranks. Local."""
    for peer, count in counts.items():
        if peer == rank or not 0 <= peer < size:
            raise CommError(f"{name}: expected peers other than {rank} in 0 <= peer < {size}, got {peer}")
        if count < 0:
            raise CommError(f"{name}: expected a number of elements >= 0 for peer {peer}, got {count}")


@dataclass(frozen=True)
class ChannelSpec:
    """Specification of a channel.

    Attributes
    ----------
    sends, recvs
        Number of elements per peer (another rank of the communicator); zero means no message. Both sides must agree:
        ``sends[q]`` on rank p is ``recvs[p]`` on rank q. May be empty.
    dtype
        Type of the elements, the same on all ranks.
    kind, name
        Kind for the traffic counters, and name for the recorder (by default the kind).
    device
        Device of the buffers; the same kind of device on all ranks.
    """

    sends: Mapping[int, int]
    recvs: Mapping[int, int]
    dtype: Any
    kind: str = "halo"
    name: str | None = None
    device: Device = HOST


def expectations(size: int, specs: Sequence[ChannelSpec]) -> tuple[np.ndarray, np.ndarray]:
    """Return two checksums per rank: of what this rank sends to it, and of what this rank expects from it. Local.

    For one channel these are the numbers of bytes; for several, sums in which each channel has a different weight.
    """
    totals = [0] * size, [0] * size
    for number, spec in enumerate(specs):
        weight = np.dtype(spec.dtype).itemsize * _weight(number)
        for total, counts in zip(totals, (spec.sends, spec.recvs)):
            for peer, count in counts.items():
                total[peer] += count * weight & _MASK
    # Modulo 2**64, because Python's integers do not wrap and uint64 must hold them.
    announced, awaited = (np.array([checksum & _MASK for checksum in total], np.uint64) for total in totals)
    return announced, awaited


def check_matching(
    mpi_comm: MPI.Intracomm, announced: np.ndarray, awaited: np.ndarray, specs: Sequence[ChannelSpec]
) -> None:
    """Raise CommError if this rank does not expect what a peer sends. Collective; the caller agrees on the error.

    `announced` and `awaited` are the results of :func:`expectations`.
    """
    sent = np.empty_like(announced)
    mpi_comm.Alltoall(announced, sent)  # sent[p]: checksum of what rank p sends to this rank
    differing = np.flatnonzero(sent != awaited)
    if not differing.size:
        return
    peer = int(differing[0])
    # The checksums do not show in which of several channels the counts differ.
    if len(specs) > 1:
        raise CommError(
            f"recv_counts: expected in {len(specs)} channels the counts that rank {peer} sends, got other counts; give "
            "both ranks the same counts"
        )
    nbytes, itemsize = int(sent[peer]), np.dtype(specs[0].dtype).itemsize
    raise CommError(
        f"recv_counts: expected {nbytes // itemsize} elements from rank {peer} (it sends {nbytes} "
        f"bytes), got {specs[0].recvs.get(peer, 0)} of {itemsize} bytes; give both ranks the same counts"
    )


_MASK = (1 << 64) - 1


def _weight(number: int) -> int:
    """Return an odd 64-bit number, different for every channel `number`; 1 for channel 0."""
    # 2**64 over the golden ratio: its multiples are far from each other. An odd factor maps no two counts to one value.
    return number * 0x9E3779B97F4A7C15 * 2 + 1 & _MASK
