"""Predictions: what a step of a network takes on a machine, layer by layer, with units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["LayerRecord", "Prediction"]


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

    name: str
    kind: str
    parts: Mapping[str, int]
    ranks: int
    forward: float = 0.0
    backward: float = 0.0
    halo: float = 0.0
    halo_exposed: float = 0.0
    channel: float = 0.0
    statistics: float = 0.0
    redistribution: float = 0.0
    packing: float = 0.0
    allreduce: float = 0.0
    allreduce_exposed: float = 0.0
    halo_algorithm: str = ""
    messages: int = 0
    sent: int = 0
    memory: int = 0

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

    network: str
    machine: str
    batch: int
    ranks: int
    dtype: str
    layers: tuple[LayerRecord, ...]
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    allreduce_seconds: float
    allreduce_exposed: float
    update_seconds: float
    memory: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, tuple[int, int]] = field(default_factory=dict)

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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """What `as_dict` gave."""
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        known["layers"] = tuple(LayerRecord(**record) for record in data["layers"])
        known["traffic"] = {kind: tuple(pair) for kind, pair in data["traffic"].items()}
        return cls(**known)
