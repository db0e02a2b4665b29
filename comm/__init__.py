"""Communication: communicators over mpi4py, transports, progress and reductions.

Importing this package does not initialize MPI. Names that need MPI are loaded at first use, so that pure arithmetic
(planners, :func:`shards`) runs without MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .boot import boot, launched_size, leave
from .counters import Counters, Recorder, Traffic
from .errors import CommError
from .sums import shards

if TYPE_CHECKING:
    from .channel import Channel
    from .communicator import Communicator
    from .reduction import Reduction

__all__ = [
    "Channel",
    "CommError",
    "Communicator",
    "Counters",
    "Recorder",
    "Reduction",
    "Traffic",
    "boot",
    "launched_size",
    "leave",
    "shards",
]

_NEED_MPI = {"Channel": "channel", "Communicator": "communicator", "Reduction": "reduction"}


def __getattr__(name: str) -> Any:
    if name in _NEED_MPI:
        return getattr(importlib.import_module(f"halograd.comm.{_NEED_MPI[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
