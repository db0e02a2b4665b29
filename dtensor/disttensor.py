"""Distributed tensors: a layout, the block of this rank, and the exchanges between layouts.

The package needs only `halograd.comm` and `halograd.device`, so other programs can use it, such as a stencil code
(``examples/heat_equation.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .box import Box
from .exchange import End, Exchange
from .layout import Layout

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["DistTensor", "Halo"]


class DistTensor:
    """A global array cut into boxes, one per rank, each with optional margins for halos.

    ::

        +---------------+
        | margin        |   local        the whole local array, margins included
        |  +---------+  |   owned        view of the box this rank owns
        |  | owned   |  |
        |  +---------+  |
        +---------------+

    Parameters
    ----------
    comm
        Communicator of the ranks of `layout`.
    layout
        Boxes that the ranks own. In a `partial` layout, every rank holds a summand.
    dtype
        NumPy dtype of the elements.
    margin
        Per axis, the ``(lo, hi)`` numbers of elements stored next to the owned box, clipped at the ends of the array.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        dtype: np.dtype | str = "float32",
        margin: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if layout.size != comm.size:
            raise ValueError(f"the layout is for {layout.size} ranks, the communicator has {comm.size}")
        self.comm = comm
        self.layout = layout
        self.margin = tuple(margin) if margin is not None else ((0, 0),) * len(layout.shape)
        if len(self.margin) != len(layout.shape) or any(min(m) < 0 for m in self.margin):
            raise ValueError(f"margin: expected one pair of widths >= 0 per axis of {layout.shape}, got {self.margin}")
        # `map` keeps empty intervals empty: a rank without elements has no margins.
        grow = [_Grow(*widths) for widths in self.margin]
        self.held = layout.boxes.map(*grow).clipped(layout.shape)
        self.local = np.zeros(self.held[comm.rank].shape, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def box(self) -> Box:
        """Global box that this rank owns."""
        return self.layout.boxes[self.comm.rank]

    @property
    def owned(self) -> np.ndarray:
        """View of the owned box in `local`."""
        return self.local[self.box.slices(self.held[self.comm.rank].start)]

    def exchange_to(self, other: DistTensor, kind: str = "redistribute") -> Exchange:
        """Return the exchange that fills `other`'s owned boxes with the values of this tensor. Collective.

        The exchange of a partial tensor sums its summands. Build the exchange once and `run` it as often as needed.
        Adjoint: ``other.exchange_to(self)`` for layouts that own each element once.
        """
        if other.shape != self.shape:
            raise ValueError(f"expected a tensor of shape {self.shape}, got {other.shape}")
        if other.layout.partial:
            raise ValueError("the target layout has a pending sum: redistribute to one that does not")
        return Exchange(
            self.comm,
            End(self.layout.boxes, self.owned),
            End(other.layout.boxes, other.owned),
            combine="sum" if self.layout.partial else "assign",
            kind=kind,
        )

    def redistribute(self, layout: Layout) -> DistTensor:
        """Return a new tensor with the same values in another layout. Collective."""
        result = DistTensor(self.comm, layout, self.local.dtype)
        exchange = self.exchange_to(result)
        exchange.run()
        exchange.close()
        return result

    def gather(self, root: int = 0) -> np.ndarray | None:
        """Return the whole array on rank `root`, None on others. Collective. Adjoint: scatter."""
        whole = self.redistribute(Layout.on_rank(self.shape, root, self.comm.size))
        return whole.local if self.comm.rank == root else None

    @classmethod
    def scatter(
        cls,
        comm: Communicator,
        array: np.ndarray | None,
        layout: Layout,
        root: int = 0,
        dtype: np.dtype | str = "float32",
        margin: Sequence[tuple[int, int]] | None = None,
    ) -> DistTensor:
        """Return a tensor with the values of the array of rank `root`, and margins of zeros; other ranks may pass None.

        Collective. Adjoint: gather.
        """
        whole = DistTensor(comm, Layout.on_rank(layout.shape, root, comm.size), dtype)
        with comm.agreement():  # the root alone has an array
            if comm.rank == root:
                if array is None or np.shape(array) != layout.shape:
                    got = None if array is None else np.shape(array)
                    raise ValueError(f"scatter: expected an array of shape {layout.shape} on rank {root}, got {got}")
                whole.owned[...] = array
        result = cls(comm, layout, dtype, margin)
        exchange = whole.exchange_to(result)
        exchange.run()
        exchange.close()
        return result


class _Grow:
    """Function that extends an interval by margins."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def __call__(self, start: int, stop: int) -> tuple[int, int]:
        return start - self._low, stop + self._high


class Halo:
    """Halo exchange of a tensor with margins: it fills the margins with the values of their owners.

    Corners are filled too. A margin wider than the neighbor's block gets values from the ranks beyond it. A rank sends
    at most one message to each other rank. The constructor is collective. `add_back` is the adjoint: it adds the
    contents of the margins to the owned boxes of their owners, and does not change the margins.
    """

    def __init__(self, tensor: DistTensor) -> None:
        if tensor.layout.partial or tensor.layout.overlapping:
            raise ValueError("a halo exchange needs a layout that owns every element once")
        held, owned = tensor.held, tensor.layout.boxes
        start = held[tensor.comm.rank].start
        # Both ends are the whole local array, which begins at the start of the held box.
        self._ends = End(owned, tensor.local, start), End(held, tensor.local, start)
        # Source and target are one array: what a rank owns stays where it is, and only the margins are written.
        self._fill = Exchange(tensor.comm, *self._ends)
        self._back: Exchange | None = None
        self._comm = tensor.comm

    def start(self) -> None:
        """Pack and send the faces. The owned box may be modified as soon as `start` has returned."""
        self._fill.start()

    def finish(self) -> None:
        """Wait until the margins are filled."""
        self._fill.finish()

    def run(self) -> None:
        self.start()
        self.finish()

    def add_back(self) -> None:
        """Run the adjoint of the fill. Collective; the first call builds it."""
        if self._back is None:
            # In place: the target already holds the values of the owned box, to which the margins of others are added.
            owned, held = self._ends
            self._back = Exchange(self._comm, held, owned, combine="sum")
        self._back.run()

    def close(self) -> None:
        """Free the channels."""
        self._fill.close()
        if self._back is not None:
            self._back.close()
