"""Memory of one rank: the runtime's allocations, repeated with sizes instead of arrays.

The order in which layers are bound decides which arrays share memory (`layers/memory.py`), so it is gone through in
the same order: storage of values with margins, packed copies with halos, then gradients and scratch arrays, which are
handed out of one arena and given back. What the kernels of a backend need beside their arrays is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from halograd.dtensor import Box, hull
from halograd.layers import (
    Add,
    BatchNorm,
    Conv,
    ConvTranspose,
    Dropout,
    Flatten,
    GlobalAveragePool,
    GroupNorm,
    Layer,
    Loss,
    Redistribute,
    Resize,
)
from halograd.layers.reduction_scheme import Scheme
from halograd.perfmodel.cost.blocks import Blocks
from halograd.perfmodel.cost.moves import Read, contraction_blocks, contracts, moves_of, reads_of
from halograd.perfmodel.cost.needs import clipped, gradient_blocks
from halograd.perfmodel.cost.parameters import Bucket, held, untrained_bytes
from halograd.perfmodel.cost.reductions import kept
from halograd.perfmodel.cost.replicated import rows_of
from halograd.perfmodel.cost.stages import Array, Stage
from halograd.perfmodel.cost.sums import LOSS_BYTES, sums_of

__all__ = ["Arena", "memory_of"]

_ALIGN = 64


class Arena:
    """Hands out blocks by best fit and takes them back, as `layers.memory.Memory` does; counts what it had to make."""

    def __init__(self) -> None:
        self.made = 0
        self._free: list[int] = []
        self._held: dict[int, list[int]] = {}
        self._count = 0

    def acquire(self, nbytes: int) -> int:
        """A block of at least so many bytes; its number."""
        size = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        fitting = [b for b in self._free if b >= size]
        if fitting:
            size = min(fitting)
            self._free.remove(size)
        else:
            self.made += size
        self._count += 1
        self._held[self._count] = [size, 1]
        return self._count

    def share(self, block: int) -> None:
        """One more user."""
        self._held[block][1] += 1

    def release(self, block: int) -> None:
        """One user less; the last gives the block back."""
        self._held[block][1] -= 1
        if not self._held[block][1]:
            self._free.append(self._held.pop(block)[0])


@dataclass(eq=False)
class _Value:
    """Storage of one value on the rank."""

    array: Array
    owned: Box
    region: Box
    gradient_box: Box
    contributions: list[int] = field(default_factory=list)
    home: int | None = None
    gradient: int | None = None
    gradient_region: Box | None = None


def is_packed(storage: Box, box: Box) -> bool:
    """Whether `box` as a view of an array that holds `storage` is contiguous."""
    if not box.size:
        return True
    if not storage.contains(box):
        return False
    full = True
    for have, want in zip(reversed(storage.shape), reversed(box.shape)):
        if not full and want > 1:
            return False
        full = full and have == want
    return True


def memory_of(
    steps: Sequence[Stage],
    buckets: Sequence[Bucket],
    rank: int,
    ranks: int,
    itemsize: int,
    train: bool = True,
    slots: int = 0,
    scheme: Scheme | None = None,
    per_node: int | None = None,
) -> dict[str, int]:
    """Bytes of one rank by use, under the names of `Executor.predicted_bytes`, less the workspaces of kernels [B].

    Parameters
    ----------
    steps, buckets
        Of the network, from `stages` and `buckets_of`.
    rank, ranks
        Which rank, of how many.
    train
        Whether there is a backward pass.
    slots
        Arrays of the parameters' size that the optimizer keeps.
    scheme
        How gradients are summed, of which `buckets` are; ``bucketed`` if None.
    per_node
        So many consecutive ranks share memory; all of them if None.
    """
    whole = _Rank(steps, rank, ranks, itemsize, train)
    return whole.bytes_with(buckets, slots, scheme or Scheme(), per_node or ranks)


class _Rank:
    def __init__(self, steps: Sequence[Stage], rank: int, ranks: int, itemsize: int, train: bool) -> None:
        self.steps, self.rank, self.ranks, self.itemsize = steps, rank, ranks, itemsize
        self.arena = Arena()
        self.bytes: dict[str, int] = {}
        self.reads = [_reads(s) for s in steps]
        self.values: dict[int, _Value] = {}
        self.scratch: list[int] = []
        self._place()
        seen: set = set()
        for stage, reads in zip(steps, self.reads):
            self._forward(stage, reads, seen)
        if train:
            for stage, reads in zip(reversed(steps), reversed(self.reads)):
                if stage.backward:
                    self._backward(stage, reads)

    # -- storage of values ---------------------------------------------------------------------

    def _place(self) -> None:
        needs: dict[int, list[Box]] = {}
        for stage, reads in zip(self.steps, self.reads):
            for value, read in zip(stage.inputs, reads):
                needs.setdefault(id(value), []).append(self._box(read.needed))
        arrays = {id(v): v for s in self.steps for v in s.inputs if v.read}
        arrays |= {id(s.output): s.output for s in self.steps}
        for key, array in arrays.items():
            owned = self._box(array.blocks)
            grown = hull([owned, *needs.get(key, [])])
            packed = all(is_packed(grown, box) for box in [owned, *needs.get(key, [])])
            region = grown if array.read or packed else owned
            self.values[key] = _Value(array, owned, region, owned)
            self._keep("input" if array.read else "activation", region.size * array.itemsize)
        for stage in self.steps:
            self._place_gradient(stage)

    def _place_gradient(self, stage: Stage) -> None:
        needed = self._gradient_box(stage)
        value = self.values[id(stage.output)]
        if needed is not None:
            grown = hull([value.owned, needed])
            if is_packed(grown, value.owned) and is_packed(grown, needed):
                value.gradient_box = grown

    def _gradient_box(self, stage: Stage) -> Box | None:
        x, y = stage.inputs[0], stage.output
        found = gradient_blocks(stage.layer, x.blocks, x.shape, y.shape)
        return None if found is None else self._box(clipped(found, y.shape))

    def _box(self, blocks: Blocks) -> Box:
        return blocks.box(self.rank)

    def _keep(self, use: str, nbytes: int) -> None:
        self.bytes[use] = self.bytes.get(use, 0) + int(nbytes)

    # -- forward -------------------------------------------------------------------------------

    def _forward(self, stage: Stage, reads: list[Read], seen: set) -> None:
        for value, read in zip(stage.inputs, reads):
            entry = (id(value), read.key)
            if isinstance(stage.layer, Loss | Add) or entry in seen:
                continue
            seen.add(entry)
            needed = self._box(read.gathered)
            if not is_packed(self.values[id(value)].region, needed):
                self._keep("halo copy", needed.size * value.itemsize)
        self._kept(stage)
        for nbytes in self._forward_scratch(stage):
            self.scratch.append(self.arena.acquire(nbytes))
        self._end_scratch()

    def _kept(self, stage: Stage) -> None:
        """Arrays that a layer keeps for itself."""
        layer, box = stage.layer, self._box(stage.output.blocks)
        channels = int(stage.output.blocks.extents[-1].max())
        if isinstance(layer, BatchNorm):
            self._keep("statistics", channels * (2 * self.itemsize + 3 * 16))
        elif isinstance(layer, GroupNorm):
            samples = box.shape[0] if box.size else 0
            self._keep("statistics", samples * channels * (2 * self.itemsize + 32))
        elif isinstance(layer, Dropout):
            self._keep("activation", box.size)

    def _forward_scratch(self, stage: Stage) -> list[int]:
        layer, out = stage.layer, self._box(stage.output.blocks)
        if contracts(stage):
            _, partial = contraction_blocks(stage)
            return [self._box(partial).size * self.itemsize] if stage.parts[5] > 1 else []
        if isinstance(layer, GlobalAveragePool):
            x = self._box(stage.inputs[0].blocks)
            return [8 * (x.shape[0] * x.shape[-1] if x.size else 0), 8 * out.size]
        if isinstance(layer, Resize):
            return self._resize_scratch(stage)
        return []

    def _resize_scratch(self, stage: Stage) -> list[int]:
        """Arrays between the axes of a resampling."""
        x, out = self._box(reads_of(stage)[0].needed), self._box(stage.output.blocks)
        if not out.size:
            return []
        assert isinstance(stage.layer, Resize)
        found, shape = [], list(x.shape)
        for axis, r in enumerate(stage.layer.resamplings(stage.shapes[0]), start=1):
            rest = math.prod(shape) // shape[axis]
            shape[axis] = out.shape[axis]
            if axis < len(shape) - 2:
                found.append(math.prod(shape) * self.itemsize)
            # One run of outputs with two taps; with one there is nothing to add.
            run = -(-out.shape[axis] // r.ratio.denominator) if r.mode == "linear" else 0
            found.append(run * rest * self.itemsize)
        return found

    def _end_scratch(self) -> None:
        for block in self.scratch:
            self.arena.release(block)
        self.scratch.clear()

    # -- backward ------------------------------------------------------------------------------

    def _backward(self, stage: Stage, reads: list[Read]) -> None:
        value = self.values[id(stage.output)]
        self._close_gradient(value)
        wanted = [self.values[id(v)] for v in stage.inputs if v.trainable]
        layer = stage.layer
        if isinstance(layer, Add):
            self._backward_add(layer, value, wanted)
        elif contracts(stage):
            self._backward_contraction(stage, layer, value, wanted)
        elif isinstance(layer, Conv):
            self._backward_conv(stage, layer, value, wanted)
        elif isinstance(layer, BatchNorm):
            self._backward_norm(stage, layer, value)
        elif isinstance(layer, ConvTranspose):
            self._gather_gradient(stage, value.gradient_region or value.owned)
            for x in wanted:
                self._contribute(x)
        else:
            self._backward_other(stage, reads, wanted)
        self._end_scratch()
        if value.gradient is not None:
            self.arena.release(value.gradient)

    def _backward_add(self, layer: Add, value: _Value, wanted: list[_Value]) -> None:
        block = value.gradient
        if layer.activation == "relu":
            block = self.arena.acquire(value.owned.size * self.itemsize)
        for count, x in enumerate(wanted):
            assert block is not None
            if count or layer.activation != "relu":
                self.arena.share(block)
            x.contributions.append(block)

    def _backward_norm(self, stage: Stage, layer: BatchNorm, value: _Value) -> None:
        """A gradient of each input, wanted or not; without an activation a residual has that of the output."""
        for i, v in enumerate(stage.inputs):
            if not i or layer.activation == "relu":
                self._contribute_or_scratch(v)
            elif v.trainable:
                assert value.gradient is not None
                self.arena.share(value.gradient)
                self.values[id(v)].contributions.append(value.gradient)

    def _contribute_or_scratch(self, array: Array) -> None:
        value = self.values[id(array)]
        if array.trainable:
            self._contribute(value)
        else:
            self.scratch.append(self.arena.acquire(value.owned.size * self.itemsize))

    def _backward_conv(self, stage: Stage, layer: Conv, value: _Value, wanted: list[_Value]) -> None:
        region = value.gradient_region or value.owned
        if layer.activation == "relu":
            self.scratch.append(self.arena.acquire(value.owned.size * self.itemsize))
            region = value.owned
        for x in wanted:
            self._contribute(x)
            self._gather_gradient(stage, region)

    def _backward_contraction(self, stage: Stage, layer: Layer, value: _Value, wanted: list[_Value]) -> None:
        read, partial = (self._box(blocks) for blocks in contraction_blocks(stage))
        region = value.gradient_region or value.owned
        sizes = []
        if getattr(layer, "activation", None) == "relu":
            sizes.append(value.owned.size)
            region = value.owned
        if not is_packed(region, partial):
            sizes.append(partial.size)
        for x in wanted:
            self._contribute(x)
            sizes += [read.size] if read != x.owned else []
        self.scratch += [self.arena.acquire(size * self.itemsize) for size in sizes]

    def _gather_gradient(self, stage: Stage, region: Box) -> None:
        needed = self._gradient_box(stage)
        if needed is not None and not is_packed(region, needed):
            self.scratch.append(self.arena.acquire(needed.size * self.itemsize))

    def _backward_other(self, stage: Stage, reads: list[Read], wanted: list[_Value]) -> None:
        layer = stage.layer
        if isinstance(layer, GroupNorm) and not wanted:
            self.scratch.append(self.arena.acquire(self.values[id(stage.output)].owned.size * self.itemsize))
        for i, v in enumerate(stage.inputs):
            if not v.trainable or (isinstance(layer, Loss) and i):
                continue
            self._contribute(self.values[id(v)])
            if reads and not isinstance(layer, Loss) and reads[i].gathered != v.blocks:
                self.scratch.append(self.arena.acquire(self._box(reads[i].gathered).size * v.itemsize))
        if isinstance(layer, Resize):
            self.scratch += [self.arena.acquire(nbytes) for nbytes in self._resize_scratch(stage)]

    def _contribute(self, value: _Value) -> None:
        """One more reader's gradient."""
        if value.home is None:
            block = value.home = self.arena.acquire(value.gradient_box.size * self.itemsize)
        else:
            block = self.arena.acquire(value.owned.size * self.itemsize)
        value.contributions.append(block)

    def _close_gradient(self, value: _Value) -> None:
        if not value.contributions:
            return
        if len(value.contributions) == 1:
            value.gradient = value.contributions[0]
            value.gradient_region = value.gradient_box if value.home is not None else value.owned
            return
        others = [block for block in value.contributions if block != value.home]
        if value.home is None:
            self._contribute(value)
        value.gradient, value.gradient_region = value.home, value.gradient_box
        for block in others:
            self.arena.release(block)

    # -- the rest ------------------------------------------------------------------------------

    def bytes_with(self, buckets: Sequence[Bucket], slots: int, scheme: Scheme, per_node: int) -> dict[str, int]:
        """All uses together."""
        found = dict(self.bytes)
        own = [b.bytes_of(self.rank) for b in buckets]
        state = 0
        for stage in self.steps:
            for part in held(stage.layer.state(*stage.shapes), stage.parts):
                block = part.sharing.block(self.rank)
                state += 0 if block is None else part.sizes[block] * self.itemsize
        arrays = sum(own) + untrained_bytes(self.steps, self.itemsize, self.rank)
        found |= {"parameter": arrays + state, "parameter gradient": arrays, "transient": self.arena.made}
        found["messages"] = self._messages()
        for bucket in buckets:
            for use, nbytes in kept(bucket, scheme, self.rank, per_node, slots).items():
                found[use] = found.get(use, 0) + nbytes
        for rows in rows_of(self.steps, buckets, self.itemsize).values():
            if self.rank < rows.group:
                found["replicated gradient"] = found.get("replicated gradient", 0) + rows.memory
                found["messages"] += rows.memory if rows.group > 1 else 0
        return found

    def _messages(self) -> int:
        """Message buffers of all exchanges, of the sums of statistics and of the loss."""
        total, gathered = LOSS_BYTES if self.ranks > 1 else 0, set[object]()
        for stage in self.steps:
            moves = moves_of(stage, gathered)
            for move in (*moves.forward, *moves.backward):
                for way in (move, move.adjoint):
                    total += int(way.peers(self.rank)[1].sum())
            total += sum(s.largest[0] for s in sums_of(stage, self.ranks).forward)
        return total


def _reads(stage: Stage) -> list[Read]:
    """What a stage gathers; nothing where it sends what it owns straight into its output."""
    if isinstance(stage.layer, Redistribute | Flatten | GlobalAveragePool):
        return []
    if contracts(stage):
        read, _ = contraction_blocks(stage)
        return [Read(read, (read, None), read, None)]
    return reads_of(stage)
