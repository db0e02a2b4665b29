"""Transports: how host arrays travel between ranks. Plain data, without MPI.

A transport is one class with its settings. Communicators, reducers, planners and the cost model of a machine read its
properties. No other file compares names of transports. A class in a file of the user is named by its location:
``backend.transport = "slow.py:Slow"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import STRICT, Count, NotNegative

from .errors import CommError

if TYPE_CHECKING:
    import numpy as np

    from .channel import Channel
    from .counters import Meter
    from .reduction import ReductionPlan
    from .sums import Method
    from .transports.base import Pattern

__all__ = [
    "TRANSPORTS",
    "Auto",
    "Emulated",
    "Links",
    "Mpi",
    "Shared",
    "Transport",
    "doubling_seconds",
    "ring_seconds",
    "transport_of",
]


class Links(Protocol):
    """A transport on one communicator: factory of channels and sums."""

    @property
    def buffer_bytes(self) -> int:
        """Memory of the buffers that all channels and reductions of this rank use in common [B]."""
        ...

    def nodes(self) -> tuple[int, ...]:
        """Return the node number of every rank, counted from 0 in order of appearance. Collective."""
        ...

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[Channel]:
        """Return one channel per pattern; patterns are valid and match between ranks. Collective over the communicator.
        """
        ...

    def plans(self, sums: Sequence[tuple[np.ndarray, Method, str]]) -> list[ReductionPlan]:
        """Return the plans of the sums of several named buffers. Collective over the communicator."""
        ...

    def close(self) -> None:
        """Free the resources of the transport, after its channels were closed. Collective over the communicator."""


@dataclass(frozen=True)
class Transport:
    """How arrays in host memory travel between the ranks of a communicator. Local.

    A subclass is a frozen dataclass, whose fields are its settings, as in ``"slow.py:Slow:seconds=0.1"``, or a class
    without settings. `shares`, `messages` and `network` select the library's links; :meth:`connect` may wrap them.

    Attributes
    ----------
    name
        Name in the registry; a class in a file of a user needs none.
    shares
        Whether ranks of one node read each other's memory. Without it hierarchical sums are rejected.
    messages
        Whether ranks that share no memory exchange MPI messages. Without it they cannot exchange halos.
    """

    __pydantic_config__ = STRICT

    name: ClassVar[str] = ""
    shares: ClassVar[bool] = True
    messages: ClassVar[bool] = True

    @property
    def network(self) -> Emulated | None:
        """Emulated network that delays messages; None if the network is real."""
        return None

    def connect(self, links: Links) -> Links:
        """Return the factory of channels and sums on one communicator. Local.

        `links` are the library's, as the properties select them. A subclass may return an object that wraps them, for
        example to count or to delay messages.
        """
        return links

    def __str__(self) -> str:
        """Return the name of the transport (of a class without a name, the name of the class) and its settings."""
        settings = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        own = vars(type(self)).get("name") or type(self).__name__  # not the name of the class that it is derived from
        return ":".join(filter(None, (own, settings)))


#: Transports by name, for `Communicator`.
TRANSPORTS: Registry[Transport] = Registry("transport", Transport, key="backend.transport")


@TRANSPORTS.register
@dataclass(frozen=True)
class Auto(Transport):
    """Transport by shared memory between ranks of the same node, and by MPI messages between nodes."""

    name: ClassVar[str] = "auto"


@TRANSPORTS.register
@dataclass(frozen=True)
class Mpi(Transport):
    """Transport by MPI alone: one persistent message per peer, and collectives."""

    name: ClassVar[str] = "mpi"
    shares: ClassVar[bool] = False


@TRANSPORTS.register
@dataclass(frozen=True)
class Shared(Transport):
    """Transport by which ranks of the same node read each other's send buffers in a shared window; other peers are
    rejected.
    """

    name: ClassVar[str] = "shared"
    messages: ClassVar[bool] = False


@TRANSPORTS.register
@dataclass(frozen=True)
class Emulated(Transport):
    """Shared memory of one machine, in which a message of n bytes takes ``alpha + beta * n`` seconds and no CPU time.

    Attributes
    ----------
    alpha
        Latency of a message [s].
    beta
        Inverse bandwidth [s/B].
    node
        Number of consecutive ranks of the root communicator on one emulated node: ranks 0 to node - 1 are on the first
        node, and so on. Ranks of one node use shared memory without delay. A collective among ranks of several nodes
        takes the time of messages that all cross the network.
    """

    name: ClassVar[str] = "emulated"
    alpha: NotNegative
    beta: NotNegative
    node: Count = 1

    @property
    def network(self) -> Emulated:
        """The transport itself."""
        return self

    def message(self, nbytes: int) -> float:
        """Return the time of a message [s]."""
        return self.alpha + self.beta * nbytes

    def collective(self, method: Method, ranks: int, nbytes: int) -> float:
        """Return the time of a collective of `nbytes` among `ranks` ranks on several nodes [s].

        An all-reduce takes the time of a ring or of recursive doubling, whichever is faster; a reduce-scatter or an
        all-gather takes half that of a ring.
        """
        payload = method.codec.payload(nbytes)
        ring = ring_seconds(ranks, payload, self.alpha, self.beta)
        if not (method.adds and method.gathers):
            return ring / 2
        return min(ring, doubling_seconds(ranks, payload, self.alpha, self.beta))


def ring_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    """Return the time of a ring all-reduce (reduce-scatter, then all-gather) of `nbytes` over `size` ranks [s].

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH (2005),
    Section 4.5, without the time of the additions, which the ranks really compute.
    """
    # 2 (size - 1) steps, in each of which a rank sends 1 / size of the buffer.
    return 2 * (size - 1) * alpha + 2 * (size - 1) / size * beta * nbytes


def doubling_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    """Return the time of an all-reduce by recursive doubling, the algorithm of MPI libraries for few bytes [s].

    All ranks exchange their whole vectors, ``floor(lg size)`` times. If `size` is not a power of two, the surplus ranks
    send theirs before, and receive the sum afterwards.

    References
    ----------
    Thakur et al. (2005) as above, Section 4.5.
    """
    # `size & (size - 1)` is 0 for a power of two; in Python, unlike C, `&` binds more tightly than `!=`.
    messages = size.bit_length() - 1 + 2 * (size & (size - 1) != 0)
    return messages * (alpha + beta * nbytes)


def transport_of(transport: str | Transport) -> Transport:
    """Return the transport that a string names, with its settings; a transport is returned as it is. Local.

    >>> transport_of("emulated:alpha=1e-3,beta=1e-9,node=2")
    Emulated(alpha=0.001, beta=1e-09, node=2)

    Raises
    ------
    CommError
        If the string names no transport, or settings that the transport does not have.
    """
    try:
        return transport if isinstance(transport, Transport) else TRANSPORTS.make(transport, "transport")
    except UserError as error:
        raise CommError(str(error)) from error
