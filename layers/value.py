"""Values: the blocks of one node's array (and of its gradient) on this rank, and how others see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.device import device_of
from halograd.dtensor import Box, Exchange, Layout
from halograd.kernels.padded import channels_in_memory
from halograd.layers.memory import Memory

__all__ = ["Gathered", "Region", "Value", "gather"]


@dataclass
class Region:
    """An array and the global box it holds."""

    array: Any
    box: Box

    def view(self, box: Box) -> Any:
        """View of a box within; of the shape of the box also where that is empty, wherever it lies then."""
        if not box.size:
            return self.array.reshape(-1)[:0].reshape(box.shape)
        return self.array[box.slices(self.box.start)]


@dataclass
class Value:
    """One node's array, cut by a layout.

    Attributes
    ----------
    layout
        Global shape ``(N, *spatial, C)`` and the boxes that the ranks own.
    stored
        Box per rank that is valid in memory without any exchange: what is owned, and for inputs the
        halo of the first layer too (every rank reads it from disk).
    trainable
        Whether anything before it has a gradient: parameters, or an input that is probed.
    region_box, region
        This rank's storage and the box it holds: the owned one, with margins where that keeps the owned
        view packed (for inputs: with all margins).
    gradient_box
        Box of this rank for which the gradient's storage has room: the owned one, with margins for the
        halo that its maker needs where that keeps the owned view packed.
    gradient
        Storage of the gradient, once all contributions are known.
    contributions
        Arrays that the layers which read this value write their gradients into.
    room
        Channels that the storage has, zeros behind those of the value; 0: as many as the value.
    """

    name: str
    layout: Layout
    dtype: np.dtype
    stored: tuple[Box, ...]
    rank: int
    trainable: bool = True
    region_box: Box | None = None
    region: Region | None = None
    gradient_box: Box | None = None
    gradient: Region | None = None
    contributions: list[Any] = field(default_factory=list)
    _home: Region | None = None
    _at_home: Any = None
    gathered: dict[Any, Gathered] = field(default_factory=dict)
    room: int = 0

    @property
    def box(self) -> Box:
        """Global box that this rank owns."""
        return self.layout.boxes[self.rank]

    @property
    def array(self) -> Any:
        """View of the owned box; packed unless the value is an input (whose channels may be padded, too)."""
        assert self.region is not None, f"{self.name} has no storage yet"
        return self.region.view(self.box)

    @property
    def dy(self) -> Any:
        """View of the owned box of the gradient; packed."""
        assert self.gradient is not None, f"{self.name} has no gradient yet"
        return self.gradient.view(self.box)

    def allocate(self, memory: Memory, use: str) -> None:
        """Make the storage."""
        box = self.region_box or self.box
        *outer, channels = box.shape
        array = memory.keep((*outer, max(self.room, channels)), self.dtype, use)
        self.region = Region(array[..., :channels] if self.room > channels else array, box)

    def new_contribution(self, memory: Memory) -> Any:
        """A packed array of the owned shape for one more reader's gradient."""
        if self._home is None:
            box = self.gradient_box or self.box
            self._home = Region(memory.acquire(box.shape, self.dtype), box)
            array = self._at_home = self._home.view(self.box)
        else:
            array = memory.acquire(self.box.shape, self.dtype)
        self.contributions.append(array)
        return array

    def close_gradient(self, memory: Memory, kernels: Any) -> Any | None:
        """All readers are bound: settle where the gradient is. Returns the kernel that adds them up, if any."""
        if not self.contributions:
            return None
        if len(self.contributions) == 1:
            self.gradient = self._home or Region(self.contributions[0], self.box)
            return None
        summands = list(self.contributions)
        if self._home is None:
            self.new_contribution(memory)
        self.gradient = self._home
        for array in summands:
            if array is not self._at_home:
                memory.release(array)
        return kernels.add(summands, self._at_home)

    def end_gradient(self, memory: Memory) -> None:
        """Its maker is bound: the gradient's memory may serve others."""
        if self.gradient is not None:
            memory.release(self.gradient.array)


class Gathered:
    """A box of a value on this rank, filled by `start` and `finish`; `array` is packed and holds `box`."""

    def __init__(self, array: Any, box: Box, exchange: Exchange | None) -> None:
        self.array = array
        self.box = box
        self.exchange = exchange
        self._borrowed = False

    def borrowed(self) -> Gathered:
        """The same box for a later layer, which need not exchange it again."""
        again = Gathered(self.array, self.box, None)
        again._borrowed = True
        return again

    @property
    def communicates(self) -> bool:
        """Whether this rank sends or receives."""
        return self.exchange is not None and self.exchange.communicates

    def start(self) -> None:
        if self.exchange is not None:
            self.exchange.start()

    def finish(self) -> None:
        if self.exchange is not None:
            self.exchange.finish()

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()


def gather(
    comm: Communicator,
    region: Region,
    stored: Sequence[Box],
    needed: Sequence[Box],
    allocate: Any,
    fill: float | None = None,
    name: str | None = None,
    kind: str = "halo",
    padded: bool = False,
) -> Gathered:
    """Bring the boxes `needed` together. Collective over `comm`.

    Uses the storage itself where the needed box is a packed view of it; copies otherwise.

    Parameters
    ----------
    region
        This rank's storage; the exchange may write into its margins.
    stored
        Box per rank that is valid there.
    needed
        Box per rank that is wanted; parts outside the array are padding.
    allocate
        ``allocate(shape)`` gives the array where a copy is needed.
    fill
        Value of the padding.
    name, kind
        What the exchange is called in a timeline, and booked under.
    padded
        Whether the storage may be used itself though its channels lie padded.
    """
    rank = comm.rank
    box = needed[rank]
    array = region.view(box) if region.box.contains(box) else None
    fits = array is not None and (array.flags.c_contiguous or (padded and channels_in_memory(array) is not None))
    own = array is None or not fits
    if own:
        array = allocate(box.shape)
        if fill is not None:
            array.fill(fill)
    everyone_has = all(have.contains(want) for have, want in zip(stored, needed))
    if everyone_has and not own:
        return Gathered(array, box, None)
    if everyone_has:
        # Only this rank copies; nobody communicates, so others need not take part.
        return Gathered(array, box, _Copy(region.view(box), array))  # type: ignore[arg-type]
    exchange = Exchange(
        comm,
        stored,
        needed,
        region.array,
        array,
        source_origin=region.box.start,
        target_origin=box.start,
        kind=kind,
        name=name,
    )
    return Gathered(array, box, exchange)


class _Copy:
    """The local part of an exchange, where no rank communicates."""

    communicates = False

    def __init__(self, source: Any, target: Any) -> None:
        self._copy = device_of(source, target).copies([(target, source)])

    def start(self) -> None:
        self._copy()

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
