"""What every scheme of gradient reduction does for the executor and the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from halograd.comm import Communicator
from halograd.layers.reduction_scheme import Scheme
from halograd.training.store import Bucket, ParameterStore

__all__ = ["Reducer"]


class Reducer(ABC):
    """Sums the gradients of a store over the ranks that hold the same blocks, and updates them. Collective.

    ::

        begin()                      # backward begins
        ready(layer)                 # for every layer, as backward has passed it
        flush()                      # backward is over
        ...
        require(layer)               # for every layer of the next forward pass, before it computes

    and `finish` whenever somebody wants to read parameters. All ranks make the same calls in the same order. A step
    allocates nothing.

    Parameters
    ----------
    store
        Its buckets are those of the scheme.
    comm
        Whose ranks share the parameters.
    layers
        Names of the steps that call `ready` and `require`, in order of computation.
    scheme
        What is asked for.

    Attributes
    ----------
    store, comm, layers, scheme
        As given.
    buckets
        Those whose gradients are to be summed: all of the store but the replicated ones.
    update
        Called with a bucket once its gradients are summed, when its parameters are next needed or
        :meth:`finish` is called, whichever comes first. None: nothing is updated.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, layers: Sequence[str], scheme: Scheme) -> None:
        self.store, self.comm, self.layers, self.scheme = store, comm, tuple(layers), scheme
        self.buckets = [bucket for bucket in store.buckets if not bucket.replicated]
        self.update: Callable[[Bucket], None] | None = None

    @abstractmethod
    def begin(self) -> None:
        """A backward pass begins."""

    @abstractmethod
    def ready(self, layer: str) -> None:
        """The gradients of `layer` are complete on this rank."""

    @abstractmethod
    def flush(self) -> None:
        """Backward is over: start what is incomplete (layers that no gradient reaches)."""

    @abstractmethod
    def require(self, layer: str) -> None:
        """`layer` is about to use its parameters."""

    @abstractmethod
    def wait(self) -> None:
        """Finish all sums without updating yet (to clip by the global norm, say); `finish` updates."""

    @abstractmethod
    def finish(self) -> None:
        """All sums are done and all parameters updated when this returns."""

    def settle(self) -> None:
        """`finish`, and leave nothing behind that a checkpoint would not hold. Collective; no part of a step."""
        self.finish()

    @abstractmethod
    def discard(self) -> None:
        """Finish all sums and forget the updates (of a step that went wrong)."""

    @abstractmethod
    def close(self) -> None:
        """Free the sums; idempotent."""
