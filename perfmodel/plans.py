"""Predictions and plans as data, with units: the time of a step, the choice, and the request.

A plan file contains its request, so that the plan can be explained and run later, on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from halograd.documents import read_json, shown, shown_path, write_whole, writing
from halograd.errors import UserError
from halograd.schema import STRICT, Bytes, Count, NotNegative, Positive, Text, Whole, build

from ..comm.boot import start_text
from ..layers import Network, Strategy
from .machine import Machine

__all__ = ["Alternative", "LayerRecord", "Plan", "Prediction", "Ranks", "Request", "is_plan"]

_MARK = "halograd_plan"
_VERSION = 2
#: Derived values that `Prediction.as_dict` and `halograd plan --json` add to the stored ones.
_DERIVED = ("units", "memory_bytes")
_PRINTED = ("step_seconds", "baselines")

#: Limit of ranks: a plan examines every pair of ranks, which would take hours and all memory for more.
Ranks = Annotated[Count, Field(le=8192)]


@dataclass(frozen=True)
class LayerRecord:
    """One layer of a predicted step. Times are those of the slowest rank [s].

    Attributes
    ----------
    name, kind
        Name and kind of the layer.
    parts
        Parts per axis; axes that are not cut are left out.
    ranks
        Number of ranks that take part.
    forward, backward
        Times of the kernels, boundary strips included, and of the executor's overhead.
    again
        Time of operations of the forward pass that the backward pass repeats, with their messages.
    halo, halo_exposed
        Time of the halo exchanges of both passes, and the part that computation does not hide.
    channel
        Time of the partial sums of cut channels, and of their adjoint.
    statistics
        Time of the blocking sums of norms and losses.
    redistribution
        Time of changes of layout before the layer (or by it), both passes.
    packing
        Time of packing and unpacking messages.
    allreduce, allreduce_exposed
        The layer's share, by bytes, of the time of its bucket's sums, and of the time that computation waits for them.
    halo_algorithm
        ``"pad"``, ``"overlap"``, or "" without a halo.
    messages, sent
        Number of messages and bytes [B] that the rank :attr:`Prediction.sender` sends for the layer in a step, and for
        changes of layout before it, without sums of gradients and of the loss.
    output
        Size of the layer's output on the fullest rank [B].
    """

    __pydantic_config__ = STRICT

    name: str
    kind: str
    parts: Mapping[str, Count]
    ranks: Whole
    forward: NotNegative = 0.0
    backward: NotNegative = 0.0
    again: NotNegative = 0.0
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
        """Time that the layer adds to the step [s]."""
        # Only waits count: `halo` and `allreduce` include what computation hides.
        exposed = self.halo_exposed + self.channel + self.allreduce_exposed
        kernels = self.forward + self.backward + self.again
        return kernels + self.statistics + self.redistribution + self.packing + exposed


@dataclass(frozen=True)
class Prediction:
    """Prediction of one training step.

    Attributes
    ----------
    network, machine
        Names of network and machine.
    batch, ranks, dtype
        Global number of samples, number of ranks, and dtype of the request.
    layers
        One record per layer, in order of computation.
    step_seconds
        Time from the beginning of one step to the beginning of the next [s].
    forward_seconds, backward_seconds
        Times of the passes, without waits for gradients and without updates [s].
    allreduce_seconds, allreduce_exposed
        Total time of all sums of gradients, and the part that computation waits for [s].
    update_seconds
        Time of the optimizer [s].
    memory
        Memory of the fullest rank by use, as in `Executor.predicted_bytes` [B].
    traffic
        Kind of communication -> largest number of messages that a rank sends, and largest number of bytes [B].
    sender
        The rank that sends most bytes for all layers together; the records hold its messages. Predictions of the time
        alone have no traffic and no messages.
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
        """Total memory of the fullest rank [B]."""
        return sum(self.memory.values())

    @property
    def samples_per_second(self) -> float:
        """Samples per second [1/s]."""
        return self.batch / self.step_seconds if self.step_seconds else float("inf")

    def total(self, term: str) -> float:
        """Return the sum of one term of the records, for example ``total("halo_exposed")`` [s]."""
        return float(sum(getattr(record, term) for record in self.layers))

    def as_dict(self) -> dict[str, Any]:
        """Return all values as plain data, for JSON."""
        data = asdict(self)
        for layer in data["layers"]:
            if not layer["again"]:  # only plans with recomputation have this key
                del layer["again"]
        data["units"] = {"seconds": "s", "memory": "B", "output": "B", "sent": "B", "traffic": "[messages, B]"}
        data["memory_bytes"] = self.memory_bytes
        return data


@dataclass(frozen=True)
class Alternative:
    """Strategy that was not chosen, with the time of a step [s] and the memory of the fullest rank [B]."""

    __pydantic_config__ = STRICT

    name: str
    step_seconds: NotNegative
    memory_bytes: Bytes
    fits: bool


@dataclass(frozen=True)
class Request:
    """Request for a plan.

    Attributes
    ----------
    model, options
        Name and options of the model.
    machine
        Text of the machine file, so that the plan can be explained without the file.
    machine_file
        Requested name or path of the machine.
    kernel_times
        Description of the source of the kernel times.
    full
        Whether every legal cut was examined.
    slots
        Number of arrays of the parameters' size that the optimizer stores.
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
        """Return the machine of the plan, as its file was when the plan was made."""
        return Machine.parse(self.machine, f"machine {self.machine_file} in the plan")


@dataclass(frozen=True)
class Plan:
    """A strategy for one network, batch and number of ranks, with its prediction; one JSON file.

    Attributes
    ----------
    network, layers
        Name of the network, and of its layers.
    batch, ranks, dtype, machine
        Conditions for which the plan was made.
    planner
        Name of the planner.
    strategy
        Cuts of every layer.
    prediction
        Prediction of a step.
    alternatives
        Baselines, the best grid, and plans that were not chosen; some may have the plan's own cuts.
    limit
        Memory limit of one rank [B]; None: the memory of the machine's device.
    optimal
        Whether the planner proved that no other choice of candidates is faster, by the additive costs it minimizes.
    planning_seconds
        Wall time of the search: costs, planners, simulation of their choices and of the baselines [s].
    request
        Request for the plan, needed to explain it; None for a plan that was made in Python.
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
        """Check that the plan is used for its own network, ranks and batch.

        Raises
        ------
        UserError
            For another network, number of ranks or batch, or for a strategy that the network does not support.
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
        """Description of the source of the kernel times; empty if unknown."""
        return "" if self.request is None else self.request.kernel_times

    def as_dict(self) -> dict[str, Any]:
        """Return the plain data, for JSON; times in [s], memory in [B]."""
        # Not `asdict`: the prediction has a form of its own, and without a request there is no key.
        data = {key: value for key, value in vars(self).items() if key != "request"}
        data["strategy"], data["prediction"] = asdict(self.strategy), self.prediction.as_dict()
        data["alternatives"] = [asdict(a) for a in self.alternatives]
        if self.request is not None:
            data["request"] = asdict(self.request)
        return {_MARK: _VERSION, **data}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises
        ------
        UserError
            If the file cannot be written.
        """
        with writing(f"plan {path}"):
            write_whole(path, json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` or ``halograd plan -o`` wrote.

        Raises
        ------
        UserError
            If the file cannot be read, or is not a valid plan of this version.
        """
        return cls.from_dict(read_json(path, "plan"), f"plan {shown_path(path)}")

    @classmethod
    def from_dict(cls, data: object, source: str = "plan") -> Plan:
        """Create a plan from the data of `as_dict` or `halograd plan --json`.

        Errors name `source`, as those of `load`.
        """
        # A strategy is JSON too, and easily confused with a plan: the message states the difference.
        if not isinstance(data, dict) or _MARK not in data:
            got = "other JSON"
            if isinstance(data, dict):
                got = f"JSON with {', '.join(map(shown, list(data)[:4])) or 'nothing'}"
                got = "a strategy without a plan" if data.keys() & {"parts", "layers"} else got
            raise UserError(f"{source}: expected a file of `halograd plan -o`, got {got}; run that first")
        version = data[_MARK]
        if version is True or version != _VERSION:
            raise UserError(f"{source}: expected version {_VERSION}, got {shown(version)}; run `halograd plan` again")
        # `halograd plan --json` and `Prediction.as_dict` add derived values, which are not fields.
        own = {k: v for k, v in data.items() if k not in (_MARK, *_PRINTED)}
        if isinstance(own.get("prediction"), dict):
            own["prediction"] = {k: v for k, v in own["prediction"].items() if k not in _DERIVED}
        return build(cls, own, source)


def is_plan(data: object) -> bool:
    """Return whether JSON data are a plan, not only a strategy."""
    return isinstance(data, Mapping) and _MARK in data
