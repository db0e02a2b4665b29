"""What a checkpoint holds: where a run stands, and its parameters with all that belongs to them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..comm import Communicator
from ..device import device_of
from ..layers import Network
from ..layers.settings import settings_of
from .optimizers import Optimizer
from .store import ParameterStore

__all__ = ["Snapshot", "TrainingProgress", "difference", "fingerprint"]

_READS, _SETTINGS = ": reads ", ": settings "
#: Of an activation, behind its layer and kind.
_SHAPE = re.compile(r"(?<=: )(?!parameter |state )(\w+) [\dx]+$")


@dataclass
class TrainingProgress:
    """Where a run stands.

    Attributes
    ----------
    step
        Updates done; the schedule and all random numbers are functions of it and of `seed`.
    seed
        Of the run.
    sampler
        Position in the data, as :meth:`Sampler.state_dict` gives it.
    normalization
        Statistics by input, as :meth:`ChannelStatistics.state_dict` gives them; None: they were never computed.
    unvalidated
        The run was stopped when an epoch was over and its validation was not.
    reduction
        Which schemes of gradient reduction were tried, as :meth:`AutoReduction.state_dict` gives it; None where none
        are.
    loss_scale
        With float16, as :meth:`LossScale.state_dict` gives it; None otherwise.
    drawn
        Which samples are trained on, as `Session.drawn` says; None in checkpoints of earlier versions.
    source
        Of a network of the user's own, its function and a checksum of the file that has it; else None.
    """

    step: int = 0
    seed: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    normalization: dict[str, Any] | None = None
    unvalidated: bool = False
    reduction: dict[str, Any] | None = None
    loss_scale: dict[str, float] | None = None
    drawn: str | None = None
    source: str | None = None


def fingerprint(network: Network) -> list[str]:
    """What makes two networks the same: layers in order with kind and shape, what they read, settings, and arrays."""
    lines = [f"{name}: {kind} {_by(shape)}" for name, kind, shape, *_ in network.rows()]
    for name, node in network.layers.items():
        settings = json.dumps(settings_of(node.layer, node.inputs[0].shape), sort_keys=True)
        lines += [f"{name}: reads {', '.join(network.names[n] for n in node.inputs)}", f"{name}: settings {settings}"]
    lines += [f"{name}: parameter {_by(p.shape)}" for name, p in network.parameters().items()]
    return lines + [f"{name}: state {_by(p.shape)}" for name, p in network.state().items()]


def difference(there: Sequence[str], here: Sequence[str], extents: bool = True) -> tuple[str, str] | None:
    """The first line in which the fingerprint of a network here, and of one there, differ: both; None if none does.

    Of settings only those count that both know: later versions of a layer have more. Without `extents` the shapes of
    activations, and the padding that follows from them, do not count: samples may be larger or smaller.
    """
    if not extents:
        there, here = ([_SHAPE.sub(r"\1", line) for line in lines] for lines in (there, here))
    known = [line for line in here if _SETTINGS not in line and (_READS not in line or any(_READS in a for a in there))]
    found = [line for line in there if _SETTINGS not in line]
    for own, other in itertools.zip_longest(known, found, fillvalue="nothing"):
        if own != other:
            return own, other
    before = dict(line.split(_SETTINGS, 1) for line in there if _SETTINGS in line)
    for name, text in (line.split(_SETTINGS, 1) for line in here if _SETTINGS in line):
        settings = {key: value for key, value in json.loads(text).items() if extents or key != "stencil"}
        differs = _differs(settings, json.loads(before.get(name, "{}")), "")
        if differs is not None:
            return f"{name}: {differs[0]}", f"{name}: {differs[1]}"
    return None


def _differs(own: Any, other: Any, at: str) -> tuple[str, str] | None:
    """The innermost settings in which two differ, with their place."""
    if isinstance(own, dict) and isinstance(other, dict):
        pairs = [(f"{at}.{key}".lstrip("."), own[key], other[key]) for key in sorted(set(own) & set(other))]
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        pairs = [(f"{at}[{i}]", *both) for i, both in enumerate(zip(own, other))]
    elif json.dumps(own) == json.dumps(other):  # NaN is as it was
        return None
    else:
        return f"{at} {own}", f"{at} {other}"
    return next((found for key, a, b in pairs if (found := _differs(a, b, key)) is not None), None)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds of the parameters, whole, on the host: views of arrays that are so on this rank.

    Attributes
    ----------
    network, dtype
        Fingerprint and dtype.
    params, state, optimizer
        Arrays by ``layer/parameter``; those of the optimizer by the name of its state before.
    settings
        Scalars of the optimizer; None without one.
    errors
        What rounding of gradients took away, by ``layer/parameter``; empty if they are not rounded.
    """

    network: list[str]
    dtype: str
    params: Mapping[str, Any]
    state: Mapping[str, Any]
    optimizer: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any] | None
    errors: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, store: ParameterStore, optimizer: Optimizer | None = None, comm: Communicator | None = None
    ) -> Snapshot | None:
        """The present state, on rank 0; None elsewhere. Collective over `comm` where parameters are cut, else local."""
        states = optimizer.named_state(comm) if optimizer is not None else {}
        parts: list[Any] = [store.params, store.state, store.errors, *states.values()]
        if comm is not None:
            parts = [store.gather(comm, arrays) for arrays in parts]
            if comm.rank:
                return None
        elif not store.whole:
            raise ValueError("Snapshot.of(): expected the communicator of the ranks that share the parameters")
        params, state, errors, *rest = [_on_host(arrays) for arrays in parts]
        settings = None if optimizer is None else optimizer.settings()
        named = dict(zip(states, rest))
        return cls(fingerprint(store.network), store.dtype.name, params, state, named, settings, errors)

    @property
    def nbytes(self) -> int:
        """Size of the parameters, of the optimizer's state, and of what was rounded away [B]."""
        groups = (self.params, self.errors, *self.optimizer.values())
        return sum(array.nbytes for arrays in groups for array in arrays.values())


def _on_host(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, those of a device copied."""
    return {name: device_of(array).to_host(array) for name, array in arrays.items()}
