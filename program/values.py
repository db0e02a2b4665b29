"""Values: one node's array and its gradient, cut by a layout, as buffers of one rank. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dtensor import Blocks, Box, Layout, hull
from .views import Buffer, Region, View

__all__ = ["Value", "is_packed"]


@dataclass(eq=False)
class Value:
    """One node's array, cut by a layout.

    Attributes
    ----------
    layout
        Global shape ``(N, *spatial, C)`` and the boxes that the ranks own.
    rank
        Whose buffers these are.
    trainable
        Whether anything before it has a gradient: parameters, or an input that is probed.
    read
        An input of the network: every rank reads all it needs from disk, halos included.
    stored
        Per rank, the box that is valid in memory without any exchange: what is owned, of inputs with halos.
    region
        This rank's storage: the owned box, with margins where that keeps the owned view packed (of inputs: with all).
    gradient_box
        Box for which the gradient's storage has room: the owned one, with margins for the halo that its maker needs
        where that keeps the owned view packed.
    gradient
        Storage of the gradient, once all contributions are known.
    contributions
        Arrays that the layers which read this value write their gradients into.
    gathered
        What layers have brought together of it, by boxes and fill.
    room
        Channels that the storage has, zeros behind those of the value; 0: as many as the value.
    """

    name: str
    layout: Layout
    dtype: np.dtype
    rank: int
    trainable: bool = True
    read: bool = False
    use: str = "activation"
    kept: bool = False
    stored: Blocks = field(init=False)
    region: Region = field(init=False)
    gradient_box: Box = field(init=False)
    gradient: Region | None = None
    contributions: list[View] = field(default_factory=list)
    gathered: dict[Any, View] = field(default_factory=dict)
    room: int = 0
    _home: Region | None = None

    def __post_init__(self) -> None:
        self.stored, self.gradient_box = self.layout.boxes, self.box

    @property
    def box(self) -> Box:
        """Global box that this rank owns."""
        return self.layout.boxes[self.rank]

    @property
    def view(self) -> View:
        """The owned box; packed unless the value is an input (whose channels may be padded, too)."""
        return self.region.part(self.box)

    @property
    def dy(self) -> View:
        """The owned box of the gradient; packed."""
        assert self.gradient is not None, f"{self.name} has no gradient yet"
        return self.gradient.part(self.box)

    def brought(self, boxes: Blocks) -> View:
        """This rank's box of these, which a layer has gathered."""
        return self.gathered[boxes, None, False]

    def place(self, needs: Sequence[Blocks]) -> None:
        """Choose the storage for readers that need these boxes, clipped to the array."""
        if self.read:
            self.stored = self.stored.joined([blocks for blocks in needs if blocks.grid == self.stored.grid])
            box = self.stored[self.rank]
        else:
            own = {blocks[self.rank] for blocks in needs} | {self.box}
            box = hull(list(own)) if len(own) > 1 else self.box
            if not all(is_packed(box, part) for part in own):
                box = self.box
        shape = (*box.shape[:-1], max(self.room, box.shape[-1]))
        buffer = Buffer(shape, self.dtype, "input" if self.read else self.use, kept=self.kept or self.read)
        self.region = Region(buffer.view.part((0,) * box.ndim, box.shape), box)

    def place_gradient(self, needed: Box) -> None:
        """Leave room for the halo of the gradient, where its maker needs this box."""
        grown = hull([self.box, needed])
        if is_packed(grown, self.box) and is_packed(grown, needed):
            self.gradient_box = grown

    def new_contribution(self) -> View:
        """A packed array of the owned shape for one more reader's gradient."""
        if self._home is None:
            self._home = Region(Buffer(self.gradient_box.shape, self.dtype, "transient").view, self.gradient_box)
            view = self._home.part(self.box)
        else:
            view = Buffer(self.box.shape, self.dtype, "transient").view
        self.contributions.append(view)
        return view

    def close_gradient(self, add: Callable[[list[View], View], None]) -> None:
        """All readers are known: settle where the gradient is; `add` emits the sum of several contributions."""
        if not self.contributions:
            return
        if len(self.contributions) == 1:
            self.gradient = self._home or Region(self.contributions[0], self.box)
            return
        summands = list(self.contributions)
        if self._home is None:
            self.new_contribution()
        assert self._home is not None
        self.gradient = self._home
        add(summands, self._home.part(self.box))


def is_packed(storage: Box, box: Box) -> bool:
    """Whether `box`, as a view of an array that holds `storage`, is contiguous."""
    if not box.size:
        return True
    if not storage.contains(box):
        return False
    cut = [axis for axis, (have, want) in enumerate(zip(storage.shape, box.shape)) if have != want]
    return not cut or all(n == 1 for n in box.shape[: cut[-1]])
