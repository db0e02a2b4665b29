"""What a checkpoint holds: where a run stands, and its parameters with all that belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..comm import Communicator
from ..device import device_of
from .optimizers import Optimizer
from .store import ParameterStore

__all__ = ["Snapshot", "TrainingProgress"]


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
    best
        Which validation was the best, as :meth:`BestScore.state_dict` gives it; None where nothing was validated.
    class_counts
        By target, how often each class occurs, where a loss is balanced by that; None: they were never counted.
    described
        What the files say of the numbers of a target: its units, ..., by target.
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
    best: dict[str, Any] | None = None
    class_counts: dict[str, list[int]] | None = None
    described: dict[str, Any] = field(default_factory=dict)


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
        return cls(store.fingerprint, store.dtype.name, params, state, named, settings, errors)

    @property
    def nbytes(self) -> int:
        """Size of the parameters, of the optimizer's state, and of what was rounded away [B]."""
        groups = (self.params, self.errors, *self.optimizer.values())
        return sum(array.nbytes for arrays in groups for array in arrays.values())


def _on_host(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, those of a device copied."""
    return {name: device_of(array).to_host(array) for name, array in arrays.items()}
