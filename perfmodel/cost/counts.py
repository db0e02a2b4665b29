"""Messages and bytes that every rank sends in one training step, by kind: what `comm.counters` will show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from halograd.layers import Loss, Network
from halograd.layers.strategy import Strategy
from halograd.perfmodel.cost.moves import moves_of
from halograd.perfmodel.cost.parameters import buckets_of
from halograd.perfmodel.cost.reductions import Booked, booked
from halograd.perfmodel.cost.replicated import Rows, rows_of
from halograd.perfmodel.cost.stages import Stage, itemsize_of, stages
from halograd.perfmodel.cost.sums import LOSS_BYTES, Sum, sums_of
from halograd.perfmodel.cost.traffic import Move, Traffic

__all__ = ["count_step", "count_steps"]


@dataclass
class _Ledger:
    """Adds up by kind."""

    ranks: int
    kinds: dict[str, Traffic]

    def book(self, items: Iterable[Move | Sum | Booked | Rows]) -> None:
        for item in items:
            sent = item.sent(self.ranks)
            if item.kind not in self.kinds:
                zero = np.zeros(self.ranks, np.int64)
                self.kinds[item.kind] = Traffic(zero, zero.copy())
            total = self.kinds[item.kind]
            total.messages[:] += sent.messages
            total.bytes[:] += sent.bytes


def count_step(
    network: Network,
    strategy: Strategy,
    batch: int,
    ranks: int | None = None,
    dtype: str = "float32",
    per_node: int | None = None,
) -> dict[str, Traffic]:
    """What every rank sends in one training step, by kind (``"halo"``, ``"redistribute"``, ``"allreduce"``, ...).

    Parameters
    ----------
    batch
        Global number of samples.
    ranks
        How many there are; those of the strategy if None.
    per_node
        So many consecutive ranks share memory; all of them if None.

    Notes
    -----
    As `comm.counters` books it: an exchange is one message per peer, a reduction one message of its buffer, an
    all-gather one of the rank's part. Shards are gathered where there is an optimizer.
    Not known beforehand is the second sum of statistics whose variance would cancel (see `layers/batch_norm.py`).
    """
    steps = stages(network, strategy, batch, dtype)
    size = ranks or strategy.ranks
    return count_steps(network, steps, size, itemsize_of(dtype), strategy, per_node or size)


def count_steps(
    network: Network, steps: Sequence[Stage], ranks: int, itemsize: int, strategy: Strategy, per_node: int
) -> dict[str, Traffic]:
    """The same of steps that are compiled already."""
    ledger = _Ledger(ranks, {})
    gathered: set = set()
    for stage in steps:
        moves, sums = moves_of(stage, gathered), sums_of(stage, ranks)
        ledger.book((*moves.forward, *moves.backward))
        ledger.book((*sums.forward, *sums.backward, *sums.aside))
    scheme = strategy.reduction
    buckets = buckets_of(steps, itemsize, strategy.bucket_bytes, scheme)
    for bucket in buckets:
        ledger.book(booked(bucket, scheme, per_node, itemsize))
    ledger.book(rows_of(steps, buckets, itemsize).values())
    if isinstance(getattr(network.outputs.get("loss"), "layer", None), Loss):
        ledger.book([Sum("loss", ((range(ranks), LOSS_BYTES),))])
    return {kind: total for kind, total in ledger.kinds.items() if total.messages.any()}
