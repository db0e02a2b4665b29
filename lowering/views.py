"""Description of the memory of a step: buffers, views of buffers, and the values that they hold. Pure data.

A :class:`Buffer` is one packed array. A :class:`View` is a box of a buffer, and a :class:`Region` a view with its
global box. A :class:`Value` is the array of one node, and its gradient, cut by a layout, on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..dtensor import Blocks, Box, Layout, hull

__all__ = ["Buffer", "Region", "Value", "View", "is_packed"]


@dataclass(eq=False)  # compared by identity: buffers of the same shape are different memory
class Buffer:
    """Memory of one packed array on one rank.

    Attributes
    ----------
    shape, dtype
        Shape and dtype of the array.
    use
        Category of the memory: ``"activation"``, ``"transient"``, ``"statistics"``, ...
    kept
        Whether it keeps its contents from step to step. Otherwise it exists only between the first and the last
        operation of a step that use it, and other buffers may use its memory before and after.
    fill
        Initial value of a kept buffer.
    location
        ``(kind, name)`` of an array outside the arena, such as ``("params", "conv/w")``; None: in the arena.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    use: str
    kept: bool = False
    fill: float = 0.0
    location: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def view(self) -> View:
        """View of the whole buffer."""
        return View(self, (0,) * len(self.shape), self.shape)


class View(NamedTuple):
    """Box of a buffer; a packed view may have another shape.

    Attributes
    ----------
    buffer
        Buffer of the view.
    start, extent
        First index and extent per axis of the buffer.
    form
        Other shape of the same elements; None: `extent`.
    """

    buffer: Buffer
    start: tuple[int, ...]
    extent: tuple[int, ...]
    form: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extent if self.form is None else self.form

    @property
    def dtype(self) -> np.dtype:
        return self.buffer.dtype

    @property
    def size(self) -> int:
        return math.prod(self.extent)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def packed(self) -> bool:
        """Whether the elements of the view are contiguous in memory."""
        if not self.size:
            return True
        full = True
        # From the last axis: one axis may be a part of the buffer's; the axes before it must then have extent 1.
        for have, want in zip(reversed(self.buffer.shape), reversed(self.extent)):
            if not full and want > 1:
                return False
            full = full and have == want
        return True

    @property
    def packed_but_for_channels(self) -> bool:
        """Whether the view would be packed if it had all channels of the buffer, which may have more channels."""
        channels = self.buffer.shape[-1]
        return self.form is None and View(self.buffer, self.start, (*self.extent[:-1], channels)).packed

    def reshape(self, *shape: int) -> View:
        """Return the same elements in another shape. The view must be packed."""
        if math.prod(shape) != self.size or not self.packed:
            raise ValueError(f"expected a packed view of {shape}, got {self.extent} in {self.buffer}")
        return View(self.buffer, self.start, self.extent, tuple(shape))

    def part(self, start: Sequence[int], extent: Sequence[int]) -> View:
        """Return a box within the view."""
        if self.form is not None:
            raise ValueError(f"expected a view in the shape of its buffer, got one in shape {self.form}")
        first = [a + b for a, b in zip(self.start, start, strict=True)]
        return View(self.buffer, tuple(first), tuple(extent))

    def resolve(self, array: np.ndarray) -> np.ndarray:
        """Return this view of the buffer's array."""
        if not self.size:  # an empty view may begin outside of the buffer
            return array.reshape(-1)[:0].reshape(self.shape)
        array_of_view = array[tuple(slice(a, a + n) for a, n in zip(self.start, self.extent))]
        return array_of_view if self.form is None else array_of_view.reshape(self.form)


class Region(NamedTuple):
    """View with the global box that it holds."""

    view: View
    box: Box

    def part(self, box: Box) -> View:
        """Return the view of a box within the region; an empty box may be anywhere."""
        if box == self.box:
            return self.view
        if not box.size:
            # An index relative to the region may be negative here.
            return View(self.view.buffer, (0,) * box.ndim, box.shape)
        return self.view.part([a - o for a, o in zip(box.start, self.box.start)], box.shape)


@dataclass(eq=False)
class Value:
    """Array of one node, cut by a layout.

    Attributes
    ----------
    layout
        Global shape ``(N, *spatial, C)`` and the boxes that the ranks own.
    rank
        Rank that holds the buffers.
    trainable
        Whether its gradient is computed, because earlier parameters or probed inputs require it.
    read
        Whether it is an input of the network: every rank reads its whole box from disk, including halos.
    held
        Per rank, the box that the rank computes: the owned box, with a margin that other ranks own if the value is
        wide. For inputs, the owned box.
    held_gradient
        Per rank, the box in which the rank computes the gradient: the owned box, or, for wide values, more.
    stored
        Per rank, the box that is valid in memory without an exchange: `held`; for inputs, the owned box and halos.
    region
        Storage of this rank: the held box, with margins if its view then stays packed (inputs: with all margins).
    gradient_box
        Box of the gradient's storage: that of `held_gradient`, with margins for the halo that the previous layer needs,
        if its view then stays packed.
    gradient
        Storage of the gradient, once all contributions are known.
    contributions
        Gradients from the layers that read this value, one array each.
    gathered
        Views of gathered boxes (copies, or parts of the storage), by boxes, fill, and whether channels are padded.
    stored_channels
        Number of channels of the storage, in which those beyond the value's own are zeros; 0: the value's own only.
    """

    name: str
    layout: Layout
    dtype: np.dtype
    rank: int
    trainable: bool = True
    read: bool = False
    use: str = "activation"
    kept: bool = False
    held: Blocks = field(init=False)
    held_gradient: Blocks = field(init=False)
    stored: Blocks = field(init=False)
    region: Region = field(init=False)
    gradient_box: Box = field(init=False)
    gradient: Region | None = None
    contributions: list[View] = field(default_factory=list)
    gathered: dict[Any, View] = field(default_factory=dict)
    stored_channels: int = 0
    _home: Region | None = None

    def __post_init__(self) -> None:
        self.held = self.stored = self.layout.boxes
        self.hold_gradient(self.layout.boxes)

    def hold(self, boxes: Blocks) -> None:
        """Set the boxes that the ranks compute; they contain the owned ones."""
        self.held = self.stored = boxes

    def hold_gradient(self, boxes: Blocks) -> None:
        """Set the boxes in which the ranks compute the gradient; they contain the owned ones."""
        self.held_gradient, self.gradient_box = boxes, boxes[self.rank]

    def layout_of(self, boxes: Blocks) -> Layout:
        """Return the layout of the value in which the ranks hold these boxes; they may overlap."""
        return self.layout if boxes == self.layout.boxes else Layout(self.layout.shape, boxes)

    @property
    def wide(self) -> bool:
        """Whether ranks compute elements that others own too; the same on all ranks."""
        return self.held != self.layout.boxes

    @property
    def box(self) -> Box:
        """Global box that this rank owns."""
        return self.layout.boxes[self.rank]

    @property
    def view(self) -> View:
        """View of the held box; packed unless the value is an input (whose channels may also be padded)."""
        return self.region.part(self.held[self.rank])

    @property
    def dy(self) -> View:
        """View of the gradient in the box of `held_gradient`; packed."""
        assert self.gradient is not None, f"{self.name} has no gradient yet"
        return self.gradient.part(self.held_gradient[self.rank])

    def brought(self, boxes: Blocks) -> View:
        """Return this rank's view of the boxes that a layer has gathered."""
        return self.gathered[boxes, None, False]

    def choose_storage(self, needs: Sequence[Blocks]) -> None:
        """Choose the storage for readers that need these boxes, clipped to the array."""
        if self.read:
            # Blocks of another grid cannot be joined: the layer that needs them gathers them by an exchange.
            self.stored = self.stored.joined([blocks for blocks in needs if blocks.grid == self.stored.grid])
            box = self.stored[self.rank]
        else:
            box, own = self.held[self.rank], [blocks[self.rank] for blocks in needs if blocks != self.held]
            if own:
                own.append(box)
                # Margins must leave the held box, and all boxes that readers need, packed: kernels take packed arrays.
                grown = hull(own)
                box = grown if all(is_packed(grown, part) for part in own) else box
        shape = (*box.shape[:-1], max(self.stored_channels, box.shape[-1])) if self.stored_channels else box.shape
        # Inputs are written outside of the program, so no other buffer may use their memory.
        view = Buffer(shape, self.dtype, "input" if self.read else self.use, kept=self.kept or self.read).view
        self.region = Region(view if shape == box.shape else view.part((0,) * box.ndim, box.shape), box)

    def choose_gradient_storage(self, needed: Box) -> None:
        """Extend the gradient's storage by the halo `needed` of the previous layer, if the views stay packed."""
        held = self.held_gradient[self.rank]
        grown = hull([held, needed])
        # Kernels read both as packed arrays: `dy` is the held box, the gathered gradient the needed one.
        if is_packed(grown, held) and is_packed(grown, needed):
            self.gradient_box = grown

    def new_contribution(self) -> View:
        """Return a packed array for another reader's contribution, of the shape of the held gradient."""
        held = self.held_gradient[self.rank]
        if self._home is None:
            # Only the first contribution has margins: the sum of all contributions is written into it.
            self._home = Region(Buffer(self.gradient_box.shape, self.dtype, "transient").view, self.gradient_box)
            view = self._home.part(held)
        else:
            view = Buffer(held.shape, self.dtype, "transient").view
        self.contributions.append(view)
        return view

    def close_gradient(self, add: Callable[[list[View], View], None]) -> None:
        """Fix the storage of the gradient once all readers are known; `add` emits the sum of several contributions."""
        if not self.contributions:
            return
        if len(self.contributions) == 1:
            # The only contribution is the gradient itself, also if it is a shared array.
            self.gradient = self._home or Region(self.contributions[0], self.held_gradient[self.rank])
            return
        summands = list(self.contributions)
        if self._home is None:  # all contributions are shared arrays (`Context.pass_gradient`), which must not change
            self.new_contribution()
        assert self._home is not None
        self.gradient = self._home
        add(summands, self._home.part(self.held_gradient[self.rank]))


def is_packed(storage: Box, box: Box) -> bool:
    """Return whether `box`, as a view of an array that holds `storage`, is contiguous."""
    if not box.size:
        return True
    if not storage.contains(box):
        return False
    cut = [axis for axis, (have, want) in enumerate(zip(storage.shape, box.shape)) if have != want]
    # As in `View.packed`: the last axis that is cut may have any extent, but all axes before it must have extent 1.
    return not cut or all(n == 1 for n in box.shape[: cut[-1]])
