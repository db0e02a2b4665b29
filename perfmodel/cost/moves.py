"""The exchanges of one step of a layer: which boxes travel, forward and backward, under the runtime's rules.

=================  ==========================================  ================================================
layer              forward                                     backward
=================  ==========================================  ================================================
convolution        halo of `x`                                 halo of `dy`, if `dx` is wanted
convolution,       `x` of the block of input channels, halo    `dy` of the block of filters (`channel`); sums of
dense, with cut    included; partial sums of `y` to their      `dx` at its owners (the adjoint of what was read)
channels           owners (`channel`)
transposed         `x` that reaches the block                  halo of `dy`
pooling, resize,   halo of `x`                                 what was received, back (the adjoint)
  custom layers
Flatten            blocks to whole samples                     the adjoint
global average     sums of float64 to the owners of samples    the adjoint, in the dtype of the computation
redistribution     owned to owned                              the adjoint
others             nothing                                     nothing
=================  ==========================================  ================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from halograd.dtensor import Blocks, Layout, Window
from halograd.layers import Conv, Flatten, GlobalAveragePool, Layer, Redistribute, Resize
from halograd.layers.contraction import partial_boxes, read_boxes
from halograd.layers.needs import ended
from halograd.perfmodel.cost.blocks import PARTS
from halograd.perfmodel.cost.stages import Stage
from halograd.perfmodel.cost.traffic import Move

__all__ = ["Moves", "Read", "contraction_blocks", "contracts", "moves_of", "reads_of"]


@dataclass(frozen=True)
class Read:
    """A box of an input on every rank, halo included.

    Attributes
    ----------
    needed
        What is brought together, clipped to the array.
    key
        Equal for boxes that need not be brought together twice.
    gathered
        The same as the array has it that it is gathered into: layers of one's own get padding too.
    move
        The exchange; None where nothing travels.
    """

    needed: Blocks
    key: object
    gathered: Blocks
    move: Move | None


@dataclass(frozen=True)
class Moves:
    """Exchanges of one layer in one step, in order.

    Attributes
    ----------
    forward, backward
        All of them.
    """

    forward: tuple[Move, ...] = ()
    backward: tuple[Move, ...] = ()


@lru_cache(maxsize=16384)
def needed_blocks(layer: Layer, i: int, inputs: tuple[Layout, ...], output: Layout) -> Blocks:
    """`Layer.needed_blocks`, remembered."""
    return layer.needed_blocks(i, inputs, output)


@lru_cache(maxsize=16384)
def gradient_blocks(layer: Layer, x: Layout, output: Layout) -> Blocks | None:
    """`Layer.gradient_blocks`, remembered."""
    return layer.gradient_blocks(x, output)


@lru_cache(maxsize=16384)
def windows_of(layer: Layer, shape: tuple[int, ...]) -> tuple[Window, ...]:
    """`Layer.windows`, remembered."""
    return layer.windows(shape)


def reads_of(stage: Stage) -> list[Read]:
    """What a stage gathers of each of its inputs."""
    if "reads" not in stage.memo:
        stage.memo["reads"] = _reads(stage)
    return stage.memo["reads"]


def _reads(stage: Stage) -> list[Read]:
    own = type(stage.layer).bind is Layer.bind
    found = []
    for i, value in enumerate(stage.inputs):
        raw = needed_blocks(stage.layer, i, tuple(value.layout for value in stage.inputs), stage.output.layout)
        needed = raw.clipped(value.shape)
        slack = None if own else slack_of(stage.layer, stage.shapes[i])
        if slack is not None:
            needed = ended(needed, value.blocks, slack)
        key = (raw, stage.layer.pad_value) if own else (needed, None)
        move = None if value.read or needed == value.blocks else Move(value.blocks, needed, value.itemsize)
        found.append(Read(needed, key, raw if own else needed, move))
    return found


def slack_of(layer: Layer, shape: tuple[int, ...]) -> list[int] | None:
    """Per axis, how much later than needed the owned block may end to be used without a copy."""
    if isinstance(layer, Resize):
        return [0, *(math.ceil(r.ratio) for r in layer.resamplings(shape)), 0]
    if layer.stencil is not None:
        return [0, *(w.stride - 1 for w in windows_of(layer, shape)), 0]
    return None


def moves_of(stage: Stage, gathered: set | None = None) -> Moves:
    """The exchanges of one step of a stage.

    Parameters
    ----------
    gathered
        What was gathered of the inputs by stages before, ``(id of the value, key)``; is added to.
    """
    layer = stage.layer
    if isinstance(layer, Redistribute):
        return _both(stage, Move(stage.inputs[0].blocks, stage.output.blocks, stage.inputs[0].itemsize, "redistribute"))
    if isinstance(layer, Flatten):
        return _both(stage, _flatten(stage))
    if isinstance(layer, GlobalAveragePool):
        return _global_average(stage)
    if contracts(stage):
        return _contraction(stage, gathered)
    reads = reads_of(stage)
    forward = []
    for value, read in zip(stage.inputs, reads):
        entry = (id(value), read.key)
        if read.move is not None and (gathered is None or entry not in gathered):
            forward.append(read.move)
        if gathered is not None:
            gathered.add(entry)
    return Moves(tuple(forward), _backward(stage, reads) if stage.backward else ())


def contracts(stage: Stage) -> bool:
    """Whether a stage sums over channels that are cut, or has its filters cut."""
    return stage.layer.cuts_channels == "contracts" and stage.parts[4] * stage.parts[5] > 1


def contraction_blocks(stage: Stage) -> tuple[Blocks, Blocks]:
    """What every rank reads of the input, and the part of the output of which it computes a summand."""
    if "contraction" not in stage.memo:
        stage.memo["contraction"] = _contraction_blocks(stage)
    return stage.memo["contraction"]


def _contraction_blocks(stage: Stage) -> tuple[Blocks, Blocks]:
    x, y, parts = stage.inputs[0], stage.output, dict(zip(PARTS, stage.parts))
    needed = needed_blocks(stage.layer, 0, (x.layout,), y.layout).clipped(x.shape)
    return read_boxes(needed, x.shape[-1], parts), partial_boxes(y.layout, parts)


def _contraction(stage: Stage, gathered: set | None) -> Moves:
    x, y = stage.inputs[0], stage.output
    read, partial = contraction_blocks(stage)
    forward, backward = [], []
    entry = (id(x), (read, None))
    if not x.read and read != x.blocks and (gathered is None or entry not in gathered):
        forward.append(Move(x.blocks, read, x.itemsize))
    if gathered is not None:
        gathered.add(entry)
    if partial != y.blocks:
        forward.append(Move(partial, y.blocks, y.itemsize, "channel"))
        backward.append(Move(y.blocks, partial, y.itemsize, "channel"))
    if x.trainable and read != x.blocks:
        backward.append(Move(read, x.blocks, x.itemsize))
    return Moves(tuple(forward), tuple(backward) if stage.backward else ())


def _both(stage: Stage, move: Move) -> Moves:
    back = stage.backward and (stage.inputs[0].trainable or not isinstance(stage.layer, Redistribute))
    return Moves((move,), (move.adjoint,) if back else ())


def _backward(stage: Stage, reads: list[Read]) -> tuple[Move, ...]:
    x, y = stage.inputs[0], stage.output
    needed = gradient_blocks(stage.layer, x.layout, y.layout)
    if needed is not None:
        if isinstance(stage.layer, Conv) and not x.trainable:
            return ()
        return (Move(y.blocks, needed.clipped(y.shape), y.itemsize),)
    return tuple(
        Move(read.needed, value.blocks, value.itemsize)
        for value, read in zip(stage.inputs, reads)
        if value.trainable and read.needed != value.blocks
    )


def _flatten(stage: Stage) -> Move:
    """Blocks of space to whole samples."""
    x, y = stage.inputs[0], stage.output
    whole = tuple(((0, n),) for n in x.shape[1:])
    return Move(x.blocks, Blocks((y.blocks.axes[0], *whole)), x.itemsize, "redistribute")


def _global_average(stage: Stage) -> Moves:
    """One number per sample and channel that a rank has a part of: to the owner, and back."""
    x, y = stage.inputs[0], stage.output
    point = [tuple((0, int(b > a)) for a, b in axis) for axis in x.blocks.axes[1:-1]]
    partial = Blocks((x.blocks.axes[0], *point, x.blocks.axes[-1]))
    total = Blocks((y.blocks.axes[0], *(((0, 1),) for _ in point), y.blocks.axes[-1]))
    back = (Move(total, partial, x.itemsize, "redistribute"),) if stage.backward else ()
    return Moves((Move(partial, total, 8, "redistribute"),), back)
