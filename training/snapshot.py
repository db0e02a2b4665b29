"""Contents of a checkpoint: the progress of a run, and its parameters with all their state."""

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
    """Progress of a run.

    Attributes
    ----------
    step
        Number of updates. The schedule and all random numbers are functions of it and of `seed`.
    seed
        Seed of the run.
    sampler
        Position in the data, from :meth:`Sampler.state_dict`.
    normalization
        Statistics by input, from :meth:`ChannelStatistics.state_dict`; None if they were never computed.
    unvalidated
        Whether the run stopped between the end of an epoch and the end of its validation.
    reduction
        Tried schemes of gradient reduction, from :meth:`AutoReduction.state_dict`; None without such a search.
    loss_scale
        State of the loss scale, from :meth:`LossScale.state_dict`; None without float16.
    drawn
        Text that identifies the training samples (`Samples.drawn`); None in checkpoints of earlier versions.
    source
        Function of the user that builds the network, and a checksum of its file; else None.
    best
        The best validation, from :meth:`BestScore.state_dict`; None without validations.
    class_counts
        Count of each class, by target, if a loss is balanced by it; None if classes were never counted.
    described
        Attributes of the targets in their files (units, ...), by target.
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
    """Whole parameters and their state on the host, for a checkpoint: views of arrays that are whole on this rank.

    Attributes
    ----------
    network, dtype
        Fingerprint of the network, and dtype of the parameters.
    params, state, optimizer
        Arrays by ``layer/parameter``; for the optimizer by the name of its state first.
    settings
        Scalars of the optimizer; None without one.
    errors
        Residuals of the rounding of gradients, by ``layer/parameter``; empty if they are not rounded.
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
        """Take a snapshot of the current state on rank 0; None elsewhere. Collective over `comm` if parameters are cut.
        """
        states = optimizer.named_state(comm) if optimizer is not None else {}
        parts: list[Any] = [store.params, store.state, store.errors, *states.values()]
        if comm is not None:
            parts = [store.gather(comm, arrays) for arrays in parts]
            if comm.rank:
                return None
        elif not store.whole:
            raise ValueError("Snapshot.of(): expected the communicator of the ranks that share the parameters")
        params, state, errors, *rest = [_on_host(arrays) for arrays in parts]
        settings = None if optimizer is None else optimizer.state_dict()
        named = dict(zip(states, rest))
        return cls(store.fingerprint, store.dtype.name, params, state, named, settings, errors)

    @property
    def nbytes(self) -> int:
        """Size of the parameters, of the optimizer's state, and of the rounding residuals [B]."""
        groups = (self.params, self.errors, *self.optimizer.values())
        return sum(array.nbytes for arrays in groups for array in arrays.values())


def _on_host(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays on the host; device arrays are copied."""
    return {name: device_of(array).to_host(array) for name, array in arrays.items()}
