"""What it costs to bring a value from every cut of its maker to every cut of its reader, all pairs at once.

Both cuts are balanced blocks, so a rank's overlaps with all others follow from the parts per axis by arithmetic on
arrays ``[candidates of u, candidates of v, axes]``. A few ranks stand for all (see :class:`Wires`): what they send
and receive in all, how many messages that is, and what stays within the node. Exact for the bytes and messages of
those ranks; that all devices of a node send as much through its link is an assumption, which `simulate` does not make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halograd.perfmodel.cost.blocks import Parts, grid_of
from halograd.perfmodel.cost.wires import Wires

__all__ = ["Grids", "edge_seconds", "redistributed_bytes"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Grids:
    """The cuts of an array under a list of candidates.

    Attributes
    ----------
    shape
        Global, one number per axis.
    parts
        ``[candidates, axes]``.
    """

    shape: tuple[int, ...]
    parts: Ints

    @classmethod
    def of(cls, shape: tuple[int, ...], candidates: Sequence[Parts]) -> Grids:
        return cls(shape, np.array([grid_of(shape, parts) for parts in candidates], np.int64))

    def boxes(self, rank: int) -> tuple[Ints, Ints]:
        """Starts and stops of a rank's box, ``[candidates, axes]``; empty where it takes no part."""
        left = np.full(len(self.parts), rank, np.int64)
        at = np.empty_like(self.parts)
        for axis in range(self.parts.shape[1] - 1, -1, -1):
            left, at[:, axis] = np.divmod(left, self.parts[:, axis])
        sizes = np.array(self.shape, np.int64)
        base, more = np.divmod(sizes, self.parts)
        start = at * base + np.minimum(at, more)
        stop = start + base + (at < more)
        stop[left > 0] = start[left > 0]
        return start, stop

    def count(self, start: Ints, stop: Ints) -> Ints:
        """How many ranks of each of these cuts boxes ``[u, axes]`` meet: ``[u, candidates]``."""
        sizes = np.array(self.shape, np.int64)
        base, more = np.divmod(sizes, self.parts)
        first, last = (_block(position[:, None, :], base, more) for position in (start, stop - 1))
        full: NDArray[np.bool_] = np.all(stop > start, axis=1, keepdims=True)
        return np.where(full, (last - first + 1).prod(axis=2), 0)

    @property
    def fullest(self) -> Ints:
        """Elements of the largest box, ``[candidates]``."""
        return (-(-np.array(self.shape, np.int64) // self.parts)).prod(axis=1)


def _block(position: Ints, base: Ints, more: Ints) -> Ints:
    """Number of the block of a balanced cut that holds a position."""
    large = more * (base + 1)
    behind = more + (position - large) // np.maximum(base, 1)
    return np.where(position < large, position // (base + 1), behind)


def _overlap(a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> Ints:
    """Elements in common, ``[u, v]``."""
    total = np.ones((len(a[0]), len(b[0])), np.int64)
    for axis in range(a[0].shape[1]):
        low = np.maximum.outer(a[0][:, axis], b[0][:, axis])
        total *= np.maximum(0, np.minimum.outer(a[1][:, axis], b[1][:, axis]) - low)
    return total


def edge_seconds(
    shape: tuple[int, ...], makers: Sequence[Parts], readers: Sequence[Parts], wires: Wires, itemsize: int, ranks: int
) -> NDArray[np.float64]:
    """One redistribution of an array ``(N, *spatial, C)``, ``[makers, readers]`` [s]; 0 between equal layouts.

    Its adjoint takes as long.
    """
    u, v = Grids.of(shape, makers), Grids.of(shape, readers)
    seconds = np.zeros((len(makers), len(readers)))
    for rank in _looked_at(ranks):
        for source, target, turned in ((u, v, False), (v, u, True)):
            found = _one_way(source, target, rank, wires, itemsize, ranks)
            seconds = np.maximum(seconds, found.T if turned else found)
    same = (u.parts[:, None, :] == v.parts[None, :, :]).all(axis=2)
    seconds[same] = 0.0
    return seconds


def _looked_at(ranks: int) -> list[int]:
    """All of a few; else the first, whose blocks are largest, and one that is at no corner and keeps little."""
    return sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1}) if ranks <= 8 else [0, 3 * ranks // 8]


def _one_way(source: Grids, target: Grids, rank: int, wires: Wires, itemsize: int, ranks: int) -> NDArray[np.float64]:
    """What `rank` takes to send all it has, ``[source, target]`` [s]; receiving is the same the other way round."""
    own = source.boxes(rank)
    kept = _overlap(own, target.boxes(rank))
    messages = target.count(*own) - (kept > 0)
    nbytes = ((own[1] - own[0]).prod(axis=1)[:, None] - kept) * itemsize
    packing = np.zeros(nbytes.shape)
    if not wires.packed:
        packing += wires.copy(1.0) * 2 * nbytes + wires.machine.launch * messages
    width = wires.per_node
    near_messages, near_bytes = messages, nbytes
    if ranks > width:
        near_messages, near_bytes = np.zeros_like(messages), np.zeros_like(nbytes)
        first = rank // width * width
        for peer in range(first, min(first + width, ranks)):
            if peer != rank:
                common = _overlap(own, target.boxes(peer))
                near_messages, near_bytes = near_messages + (common > 0), near_bytes + common * itemsize
    if wires.emulated:
        largest = _largest(source, target) * itemsize
        link = wires.machine.links["across"]
        far_messages, far_bytes = messages - near_messages, nbytes - near_bytes
        return packing + (far_messages > 0) * link.alpha + link.beta * np.minimum(far_bytes, largest)
    near = wires.machine.links["node"]
    far = wires.machine.links["switch" if ranks <= width * wires.machine.nodes_per_switch else "across"]
    sharing = np.minimum(width, source.parts.prod(axis=1))[:, None]
    seconds = near.alpha * near_messages + near.beta * near_bytes
    return packing + seconds + far.alpha * (messages - near_messages) + far.beta * sharing * (nbytes - near_bytes)


def _largest(source: Grids, target: Grids) -> Ints:
    """Elements of the largest message at most, ``[source, target]``."""
    sizes = np.array(source.shape, np.int64)
    a, b = -(-sizes // source.parts), -(-sizes // target.parts)
    return np.minimum(a[:, None, :], b[None, :, :]).prod(axis=2)


def redistributed_bytes(
    shape: tuple[int, ...], makers: Sequence[Parts], readers: Sequence[Parts], itemsize: int
) -> NDArray[np.float64]:
    """Memory of the copy under the reader's cut, ``[makers, readers]`` [B]; 0 between equal layouts."""
    u, v = Grids.of(shape, makers), Grids.of(shape, readers)
    differ = (u.parts[:, None, :] != v.parts[None, :, :]).any(axis=2)
    return differ * (v.fullest * itemsize)[None, :].astype(np.float64)
