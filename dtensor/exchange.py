"""Exchanges: move data from owned boxes to needed boxes.

Halo exchange, redistribution, scatter, gather and their adjoints are instances of one class. Sums over ranks and
gathered parameters are reductions (`halograd.comm`). An exchange is built once, over fixed arrays, and run many times::

    exchange.start()     # pack one message per neighbor and send it; copy what stays local
    ...                  # compute what does not need the data
    exchange.finish()    # wait and unpack
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.channel import Channel, ChannelSpec
from ..comm.rounds import side_by_side
from ..device import device_of
from .box import Box
from .layout import Blocks
from .plan import Piece, plan_exchange

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["End", "Exchange"]


@dataclass(frozen=True)
class End:
    """Source or target of an exchange.

    Attributes
    ----------
    blocks
        Box per rank, in global indices.
    array
        Array of this rank, on the host or on a device. It may be None at one end of an exchange if its box is empty.
    origin
        Global index of the array's element ``[0, ...]``; by default the start of this rank's box. An array may be
        larger than its box, for example by margins.
    """

    blocks: Blocks
    array: Any
    origin: Sequence[int] | None = None

    def origin_on(self, rank: int) -> tuple[int, ...]:
        """Return the global index at which the array of a rank begins."""
        return self.blocks[rank].start if self.origin is None else tuple(self.origin)


class Exchange:
    """Transfer that fills the target's array with boxes of all ranks. Building and running it is collective.

    Parameters
    ----------
    comm
        Communicator; all its ranks build the exchange, in the same order, and raise the same error.
    source, target
        Both arrays are on the host or on one device, and have the dtype of the messages.
    combine
        ``"assign"``: each element of the target is set once; elements that no rank owns (outside the global array) are
        not modified. ``"sum"``: sources are summands, and the target box is overwritten with their sum; elements in no
        source become 0. Several targets that hold an element get the same bits.
    kind, name
        Kind in `comm.counters` of the messages and bytes, and name for the recorder.

    Notes
    -----
    Adjoint: the exchange with sources and targets swapped and ``combine="sum"``.
    Communication per process: one message per rank with a common box, ``itemsize`` bytes per element. The exchange
    modifies only the target's array. `start` packs the source's array, which may be overwritten after `start` has
    returned (on a device: by work that is enqueued later).
    """

    def __init__(
        self,
        comm: Communicator,
        source: End,
        target: End,
        *,
        combine: str = "assign",
        kind: str = "halo",
        name: str | None = None,
    ) -> None:
        # A rank whose arrays do not fit would raise alone, and the others would wait for it in `channels`.
        with comm.agreement():
            side_by_side([self._set_up(comm.rank, source, target, combine, kind, name)], comm.channels)

    @classmethod
    def together(cls, comm: Communicator, many: Sequence[Mapping[str, Any]]) -> list[Exchange]:
        """Build several exchanges with as many collectives as one exchange needs. Collective.

        `many` holds the keyword arguments of each exchange. All arrays are on the host, or all on one device.
        """
        if not many:
            return []
        exchanges: list[Exchange] = [cls.__new__(cls) for _ in many]
        steps = [exchange._set_up(comm.rank, **arguments) for exchange, arguments in zip(exchanges, many)]
        with comm.agreement():
            side_by_side(steps, comm.channels)
        return exchanges

    def _set_up(
        self,
        rank: int,
        source: End,
        target: End,
        combine: str = "assign",
        kind: str = "halo",
        name: str | None = None,
    ) -> Generator[ChannelSpec, Channel, None]:
        """Set up the exchange: yield the specification of its channel, and receive the channel."""
        if combine not in ("assign", "sum"):
            raise ValueError(f"combine: expected 'assign' or 'sum', got {combine!r}")
        self._sum = combine == "sum"
        self.pieces = plan_exchange(source.blocks, target.blocks, rank, summed=self._sum)
        sends = [p for p in self.pieces if p.source == rank and p.target != rank]
        recvs = [p for p in self.pieces if p.target == rank and p.source != rank]
        local = [p for p in self.pieces if p.source == p.target == rank]
        device = device_of(source.array, target.array)
        counts = _counts(sends, "target"), _counts(recvs, "source")
        channel = self._channel = yield ChannelSpec(*counts, _dtype(source.array, target.array), kind, name, device)
        at_source, at_target = source.origin_on(rank), target.origin_on(rank)
        pack = self._bind(sends, "target", channel.send_buffer, source.array, at_source)
        unpack = self._bind(recvs, "source", channel.recv_buffer, target.array, at_target)
        # `copies` and `sums` take pairs (target, source): message first to pack, array first to unpack.
        if self._sum and target.blocks.overlapping:
            # Replicas add up in the order of the ranks, so this rank's own summand waits in an array.
            dtype = _dtype(source.array, target.array)
            own = [(device.empty(piece.box.shape, dtype), piece.box) for piece in local]
            for slot in (0, 1):
                pack[slot].extend((kept, _view(source.array, box, at_source)) for kept, box in own)
                # Pieces are sorted by source: this is where the summand of this rank comes in their order.
                before = sum(piece.source < rank for piece in recvs)
                unpack[slot][before:before] = [(kept, _view(target.array, box, at_target)) for kept, box in own]
            local = []
        # A sum adds to its target: zero it before, unless a local piece assigns all of it.
        box = target.blocks[rank]
        covered = not box.size or any(piece.box == box for piece in local)
        self._clear = None
        if self._sum and target.array is not None and not covered:
            self._clear = _view(target.array, box, at_target)
        here = [(_view(target.array, p.box, at_target), _view(source.array, p.box, at_source)) for p in local]
        # A target that is the source's own memory (a halo in place) needs no copy.
        here = [(t, s) for t, s in here if device.address(t) != device.address(s) or t.strides != s.strides]
        #: Per slot of the channel.
        self._pack = [device.copies(pairs) for pairs in pack]
        self._unpack = [(device.sums if self._sum else device.copies)([(v, m) for m, v in pairs]) for pairs in unpack]
        # In a target that is zeroed first, local pieces are summands like the received ones.
        self._copy = (device.copies if self._clear is None else device.sums)(here)

    def _bind(self, pieces: Sequence[Piece], peer_of: str, buffer, array, origin) -> tuple[list, list]:
        """Return pairs of (message view, array view) for both slots of the channel."""
        slots: tuple[list, list] = ([], [])
        filled: dict[int, int] = {}
        for piece in pieces:
            peer = getattr(piece, peer_of)
            # The pieces of a peer follow each other in one message, in the order that both ranks share.
            first = filled.get(peer, 0)
            filled[peer] = first + piece.box.size
            view = _view(array, piece.box, origin)
            for slot in (0, 1):
                message = buffer(peer, slot)[first : filled[peer]].reshape(piece.box.shape)
                slots[slot].append((message, view))
        return slots

    def start(self) -> None:
        """Pack and send, then copy the local pieces. Does not wait."""
        channel = self._channel
        self._pack[channel.slot]()
        channel.start()
        # The messages travel meanwhile; they are unpacked only in `finish`.
        if self._clear is not None:
            self._clear[...] = 0
        self._copy()

    def finish(self) -> None:
        """Wait for the messages and unpack them into the target."""
        channel = self._channel
        channel.finish()
        self._unpack[channel.slot]()
        channel.release()

    def run(self) -> None:
        """Run `start` and `finish`."""
        self.start()
        self.finish()

    def close(self) -> None:
        """Free the channel. Local."""
        self._channel.close()


def _dtype(source, target) -> np.dtype:
    known = [a.dtype for a in (source, target) if a is not None]
    if not known:
        raise ValueError("an exchange needs an array on every rank; pass an empty one where a rank owns nothing")
    if len(set(known)) > 1:
        raise ValueError(f"source and target must have one dtype, got {known[0]} and {known[1]}")
    return known[0]


def _counts(pieces: Sequence[Piece], peer_of: str) -> dict[int, int]:
    counts: dict[int, int] = {}
    for piece in pieces:
        peer = getattr(piece, peer_of)
        counts[peer] = counts.get(peer, 0) + piece.box.size
    return counts


def _view(array: Any, box: Box, origin: Sequence[int]) -> Any:
    if array is None:
        raise ValueError(f"expected an array that holds {box}, got None; only a rank with an empty box needs none")
    view = array[box.slices(origin)]
    if view.shape != box.shape:
        raise ValueError(f"an array of shape {array.shape} that begins at {tuple(origin)} does not hold {box}")
    return view
