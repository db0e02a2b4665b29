"""Dense layers whose gradients every rank computes of the whole batch: what that costs instead of a sum.

The rules are those of `layers/replicated_dense.py`: the rows of activations and errors of all ranks are gathered, each
rank's padded to whole cache lines, and every rank multiplies them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from halograd.layers.row_gather import padded_rows
from halograd.perfmodel.cost.layer_cost import LayerCost, Pricing
from halograd.perfmodel.cost.parameters import Bucket
from halograd.perfmodel.cost.stages import Stage
from halograd.perfmodel.cost.timeline import Replication
from halograd.perfmodel.cost.traffic import Traffic

__all__ = ["Rows", "lighter", "replication", "rows_of"]


@dataclass(frozen=True)
class Rows:
    """What the ranks gather of one replicated layer. An item of a ledger of traffic.

    Attributes
    ----------
    group
        Ranks that hold the layer: the first so many.
    rows
        Rows that every one of them sends, padding included.
    features, units
        Lengths of the rows of activations and of errors.
    itemsize
        Of one element [B].
    """

    group: int
    rows: int
    features: int
    units: int
    itemsize: int
    kind = "replicated_dense"

    def nbytes(self, length: int) -> int:
        """The gathered array with rows of this length [B]."""
        return self.group * self.rows * length * self.itemsize

    @property
    def memory(self) -> int:
        """Both gathered arrays, on every rank of the group [B]."""
        return self.nbytes(self.features + self.units)

    def sent(self, ranks: int) -> Traffic:
        """What every rank sends: its rows of activations and of errors, a message each."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        if self.group > 1:
            messages[: self.group] = 2
            nbytes[: self.group] = self.memory // self.group
        return Traffic(messages, nbytes)


def rows_of(steps: Sequence[Stage], buckets: Sequence[Bucket], itemsize: int) -> dict[str, Rows]:
    """By layer, of the replicated layers that backward reaches."""
    replicated = {name for bucket in buckets if bucket.replicated for name in bucket.layers}
    return {s.name: _rows(s, itemsize) for s in steps if s.name in replicated and s.backward}


def _rows(stage: Stage, itemsize: int) -> Rows:
    (features,), units = stage.shapes[0], stage.output.shape[-1]
    most = int(stage.output.blocks.extents[0].max())
    rows = padded_rows(most, (features, units), itemsize)
    return Rows(math.prod(stage.parts), rows, features, units, itemsize)


def lighter(cost: LayerCost, rows: Rows, pricing: Pricing) -> LayerCost:
    """The cost of a layer that leaves its weight gradient for later: its rows are copied instead."""
    copy, own = pricing.wires.copy, rows.rows * rows.itemsize
    return replace(
        cost,
        backward_filter=0.0,
        packing_forward=cost.packing_forward + copy(own * rows.features),
        packing_backward=cost.packing_backward + copy(own * rows.units),
    )


def replication(stage: Stage, rows: Rows, nbytes: int, slots: int, pricing: Pricing) -> Replication:
    """What gathering, multiplying and updating take; `nbytes` [B] of parameters."""
    group, wires = range(rows.group), pricing.wires
    whole = (rows.group * rows.rows, rows.features)
    time = pricing.times.time(stage.layer, [whole], pricing.dtype, True)
    return Replication(
        stage.name,
        wires.gather(rows.nbytes(rows.features), group),
        wires.gather(rows.nbytes(rows.units), group),
        time.backward_filter,
        wires.update(nbytes, slots),
    )
