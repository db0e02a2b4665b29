"""Predictions: what a step of a network takes on a machine, layer by layer, with units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from halograd.schema import STRICT, Bytes, Count, NotNegative, Whole

__all__ = ["LayerRecord", "Prediction", "Ranks"]

#: A plan looks at every pair of ranks: of more it would take hours, and all memory.
Ranks = Annotated[Count, Field(le=8192)]


@dataclass(frozen=True)
class LayerRecord:
    """One layer of a predicted step. Times in [s] on the slowest rank, bytes in [B] on the fullest.

    Attributes
    ----------
    name, kind
        Of the layer.
    parts
        Parts per axis; axes that are not cut are left out.
    ranks
        Ranks that take part.
    forward, backward
        Kernels, boundary strips included.
    halo, halo_exposed
        Halo exchanges of both passes: how long they take, and what nothing hides.
    channel
        Partial sums of cut channels, and their adjoint.
    statistics
        Sums of norms and losses that are waited for.
    redistribution
        Changes of layout before the layer (or by it), both passes.
    packing
        Into and out of messages.
    allreduce, allreduce_exposed
        The layer's share, by bytes, of the sums of its bucket, and of what computation waited for them.
    halo_algorithm
        ``"pad"``, ``"overlap"``, or "" where no halo travels.
    messages, sent
        What the rank that sends most sends, gradients not included: messages, and [B].
    memory
        Parameters, gradients, optimizer state, activations and halo copies of the layer [B].
    """

    __pydantic_config__ = STRICT

    name: str
    kind: str
    parts: Mapping[str, Count]
    ranks: Whole
    forward: NotNegative = 0.0
    backward: NotNegative = 0.0
    halo: NotNegative = 0.0
    halo_exposed: NotNegative = 0.0
    channel: NotNegative = 0.0
    statistics: NotNegative = 0.0
    redistribution: NotNegative = 0.0
    packing: NotNegative = 0.0
    allreduce: NotNegative = 0.0
    allreduce_exposed: NotNegative = 0.0
    halo_algorithm: Literal["", "pad", "overlap"] = ""
    messages: Bytes = 0
    sent: Bytes = 0
    memory: Bytes = 0

    @property
    def seconds(self) -> float:
        """What the layer adds to the step [s]."""
        exposed = self.halo_exposed + self.channel + self.allreduce_exposed
        return self.forward + self.backward + self.statistics + self.redistribution + self.packing + exposed


@dataclass(frozen=True)
class Prediction:
    """What one training step takes.

    Attributes
    ----------
    network, machine
        Names.
    batch, ranks, dtype
        What was asked for.
    layers
        One record per layer, in order of computation.
    step_seconds
        From the beginning of one step to that of the next [s].
    forward_seconds, backward_seconds
        The passes, without waiting for gradients and without updates [s].
    allreduce_seconds, allreduce_exposed
        All sums of gradients one after the other; what computation waited for them [s].
    update_seconds
        The optimizer [s].
    memory
        Bytes of the fullest rank by use, as `Executor.predicted_bytes` [B].
    traffic
        Per kind of communication, messages and bytes [B] of the rank that sends most.
    """

    __pydantic_config__ = STRICT

    network: str
    machine: str
    batch: Count
    ranks: Ranks
    dtype: str
    layers: tuple[LayerRecord, ...]
    step_seconds: NotNegative
    forward_seconds: NotNegative
    backward_seconds: NotNegative
    allreduce_seconds: NotNegative
    allreduce_exposed: NotNegative
    update_seconds: NotNegative
    memory: Mapping[str, Bytes] = field(default_factory=dict)
    traffic: Mapping[str, tuple[Bytes, Bytes]] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """All of the fullest rank [B]."""
        return sum(self.memory.values())

    @property
    def samples_per_second(self) -> float:
        """[1/s]"""
        return self.batch / self.step_seconds if self.step_seconds else float("inf")

    def total(self, term: str) -> float:
        """Sum of one term of the records, ``total("halo_exposed")`` [s]."""
        return float(sum(getattr(record, term) for record in self.layers))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        data = asdict(self)
        data["units"] = {"seconds": "s", "memory": "B", "sent": "B", "traffic": "[messages, B]"}
        data["memory_bytes"] = self.memory_bytes
        return data
