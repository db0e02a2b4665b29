"""Predictions and plans as data, with units: what a step takes, what was chosen, and what was asked for.

A plan file keeps its request, so that it can be explained, and run, later and elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from halograd.documents import read_json, shown, shown_path, write_whole
from halograd.errors import UserError
from halograd.schema import STRICT, Bytes, Count, NotNegative, Positive, Text, Whole, build

from ..comm.boot import start_text
from ..layers import Network, Strategy
from .machine import Machine

__all__ = ["Alternative", "LayerRecord", "Plan", "Prediction", "Ranks", "Request", "is_plan"]

_MARK = "halograd_plan"
_VERSION = 2
#: What `Prediction.as_dict`, and `halograd plan --json`, say beside what they know.
_DERIVED = ("units", "memory_bytes")
_PRINTED = ("step_seconds", "baselines")

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
        What the rank :attr:`Prediction.sender` sends for the layer in a step, and for changes of layout before it:
        messages, and [B]. Sums of gradients and of the loss are not among them.
    output
        Output of the layer [B].
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
    output: Bytes = 0

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
    sender
        The first rank that sends most for all layers together, whose messages are in the records. Traffic, and these
        messages, are left out of predictions of time alone.
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
    sender: Whole = 0

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
        """Return everything as plain data, for JSON."""
        data = asdict(self)
        data["units"] = {"seconds": "s", "memory": "B", "output": "B", "sent": "B", "traffic": "[messages, B]"}
        data["memory_bytes"] = self.memory_bytes
        return data


@dataclass(frozen=True)
class Alternative:
    """A strategy that was not chosen: what a step would take [s], and memory of the fullest rank [B]."""

    __pydantic_config__ = STRICT

    name: str
    step_seconds: NotNegative
    memory_bytes: Bytes
    fits: bool


@dataclass(frozen=True)
class Request:
    """What a plan was asked for.

    Attributes
    ----------
    model, options
        Name of the model, and the options it was made with.
    machine
        The machine file's text: the plan can be explained where the file is not.
    machine_file
        Name or path under which the machine was asked for.
    kernel_times
        Where the kernels' times come from, in words.
    full
        Whether every legal cut was looked at.
    slots
        Arrays of the parameters' size that the optimizer keeps.
    """

    __pydantic_config__ = STRICT

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""
    machine_file: str = ""
    kernel_times: str = ""
    full: bool = False
    slots: Annotated[int, Field(ge=0, le=8)] = 1

    def load_machine(self) -> Machine:
        """Return the machine that was planned for, as it was then."""
        from .machine_file import parse_machine

        return parse_machine(self.machine, f"machine {self.machine_file} in the plan")


@dataclass(frozen=True)
class Plan:
    """A strategy for one network, batch and number of ranks, with what was predicted of it; one file of JSON.

    Attributes
    ----------
    network, layers
        Name of the network, and of its layers.
    batch, ranks, dtype, machine
        What it was made for.
    planner
        Who made it.
    strategy
        How every layer is cut.
    prediction
        Of a step.
    alternatives
        Baselines, the best grid, and plans that others were preferred to; some may have the plan's own cuts.
    limit
        Memory of one rank that it was made for [B].
    optimal
        Whether the planner proved that no other choice of candidates is faster, by the additive costs it minimizes.
    planning_seconds
        Wall time of the search: pricing, planners, simulation of what they and the baselines chose [s].
    request
        What it was asked for, so that it can be explained; None for a plan that was made in Python.
    """

    __pydantic_config__ = STRICT

    network: str
    layers: tuple[str, ...]
    batch: Count
    ranks: Ranks
    dtype: Text
    machine: str
    planner: Text
    strategy: Strategy
    prediction: Prediction
    alternatives: tuple[Alternative, ...] = ()
    limit: Positive | None = None
    optimal: bool = False
    planning_seconds: NotNegative = 0.0
    request: Request | None = None

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step [s]."""
        return self.prediction.step_seconds

    def check(self, network: Network, ranks: int, batch: int | None = None) -> None:
        """Refuse to be used for anything else than it was made for.

        Raises
        ------
        UserError
            Another network, number of ranks or batch; a strategy that the network cannot have.
        """
        if tuple(network.layers) != self.layers:
            raise UserError(
                f"plan: expected network {self.network!r} ({len(self.layers)} layers), which it was made for, got "
                f"{network.name!r} ({len(network.layers)} layers); run `halograd plan` for that one"
            )
        if ranks != self.ranks:
            raise UserError(
                f"plan: expected {self.ranks} ranks, which it was made for, got {ranks}; {start_text(self.ranks)} or "
                "run `halograd plan` again"
            )
        if batch is not None and batch != self.batch:
            raise UserError(
                f"plan: expected a batch of {self.batch} samples, which it was made for, got {batch} (training.batch / "
                f"training.accumulate); set that or run `halograd plan --batch {batch}`"
            )
        self.strategy.validate(network, ranks)

    @property
    def kernel_times(self) -> str:
        """Where the kernels' times come from, in words; empty where it is not known."""
        return "" if self.request is None else self.request.kernel_times

    def as_dict(self) -> dict[str, Any]:
        """Return the plain data, for JSON; times in [s], memory in [B]."""
        data = {key: value for key, value in vars(self).items() if key != "request"}
        data["strategy"], data["prediction"] = asdict(self.strategy), self.prediction.as_dict()
        data["alternatives"] = [asdict(a) for a in self.alternatives]
        if self.request is not None:
            data["request"] = asdict(self.request)
        return {_MARK: _VERSION, **data}

    def save(self, path: str | Path) -> None:
        """Write as JSON.

        Raises
        ------
        UserError
            If it cannot be written.
        """
        try:
            write_whole(path, json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"plan {path}: expected a path that can be written, got an error ({error.strerror}); choose another"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save`, or ``halograd plan -o``, wrote.

        Raises
        ------
        UserError
            The file cannot be read, or is no plan.
        """
        return cls.from_dict(read_json(path, "plan"), f"plan {shown_path(path)}")

    @classmethod
    def from_dict(cls, data: object, source: str = "plan") -> Plan:
        """Return what `as_dict` gave, and `halograd plan --json` printed; `source` is named in errors, as of `load`."""
        if not isinstance(data, dict) or not is_plan(data):
            raise UserError(f"{source}: expected what `halograd plan -o` writes, got {_what(data)}; run that first")
        version = data[_MARK]
        if version is True or version != _VERSION:
            raise UserError(f"{source}: expected version {_VERSION}, got {shown(version)}; run `halograd plan` again")
        own = {k: v for k, v in data.items() if k not in (_MARK, *_PRINTED)}
        if isinstance(own.get("prediction"), dict):
            own["prediction"] = {k: v for k, v in own["prediction"].items() if k not in _DERIVED}
        return build(cls, own, source)


def is_plan(data: object) -> bool:
    """Return whether these JSON data are a plan, and not a strategy alone."""
    return isinstance(data, Mapping) and _MARK in data


def _what(data: object) -> str:
    if isinstance(data, Mapping) and set(data) & {"parts", "layers"}:
        return "a strategy without a plan"
    return f"JSON with {', '.join(map(shown, list(data)[:4])) or 'nothing'}" if isinstance(data, dict) else "other JSON"
