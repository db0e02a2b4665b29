"""Transports by name: how messages travel between ranks.

``mpi``
    One persistent message per peer.
``shared``
    Peers on the same node read each other's send buffers in a shared window.
``auto``
    ``shared`` between ranks of the same node, ``mpi`` between nodes.
``emulated:alpha=A,beta=B``
    Shared memory, but a message of n bytes takes ``A + B * n`` seconds and no CPU time. All ranks must be on one
    machine.
``emulated:alpha=A,beta=B,node=K``
    The same, with emulated nodes: ranks 0 to K-1 are on the first node, the next K ranks on the second, and so on.
    Ranks of one emulated node use shared memory without delay.
"""

from __future__ import annotations

import math

from ..errors import CommError
from .base import TransportContext
from .emulated import EmulatedNetwork
from .transport import Transport

__all__ = ["Transport", "TransportContext", "make_transport", "parse_transport"]

#: Whether ranks of a node share memory, and whether other ranks exchange MPI messages.
_PLAIN = {"auto": (True, True), "mpi": (False, True), "shared": (True, False)}
_EXPECTED = "expected 'auto', 'mpi', 'shared' or 'emulated:alpha=SECONDS,beta=SECONDS_PER_BYTE'"
_NODE = f"{_EXPECTED}, for the last also ',node=RANKS'"


def parse_transport(text: str) -> tuple[str, dict[str, float]]:
    """Return the name and options of a transport. Local.

    >>> parse_transport("emulated:alpha=1e-3,beta=1e-9")
    ('emulated', {'alpha': 0.001, 'beta': 1e-09})
    >>> parse_transport("emulated:alpha=1e-3,beta=1e-9,node=2")
    ('emulated', {'alpha': 0.001, 'beta': 1e-09, 'node': 2})
    """
    name, _, rest = text.partition(":")
    if name in _PLAIN and not rest:
        return name, {}
    if name != "emulated":
        raise CommError(f"transport: {_EXPECTED}, got {text!r}")
    options: dict[str, float] = {}
    for item in rest.split(","):
        key, _, value = item.partition("=")
        key = key.strip()
        try:
            options[key] = int(value) if key == "node" else float(value)
        except ValueError:
            expected = f"{_NODE}, a whole number" if key == "node" else _EXPECTED
            raise CommError(f"transport: {expected}, got {text!r}") from None
    if sorted(options.keys() - {"node"}) != ["alpha", "beta"] or not all(0 <= v < math.inf for v in options.values()):
        raise CommError(f"transport: {_EXPECTED} with numbers >= 0, got {text!r}")
    if options.get("node", 1) < 1:
        raise CommError(f"transport: {_NODE} of at least 1, got {text!r}")
    return name, options


def make_transport(text: str, context: TransportContext) -> Transport:
    """Return the transport with this name for one communicator. Local; its methods may be collective."""
    name, options = parse_transport(text)
    if name == "emulated":
        return Transport(
            context, True, True, EmulatedNetwork(options["alpha"], options["beta"], int(options.get("node", 1)))
        )
    return Transport(context, *_PLAIN[name])
