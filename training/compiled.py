"""What is asked of a compiled network by what wraps its calls, or gathers its arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ..comm import Communicator
from ..device import Device
from ..kernels import Backend
from ..layers import Network
from ..lowering.views import Value
from ..program.program import Program
from ..program.runner import Runner
from .pass_loss import PassLoss
from .reduction import Reducer
from .watch import Pulse

__all__ = ["Compiled"]


class Compiled(Protocol):
    """See :class:`halograd.training.executor.Executor`."""

    @property
    def network(self) -> Network: ...

    @property
    def comm(self) -> Communicator: ...

    @property
    def kernels(self) -> Backend: ...

    @property
    def device(self) -> Device: ...

    @property
    def program(self) -> Program: ...

    @property
    def runner(self) -> Runner: ...

    @property
    def reducer(self) -> Reducer | None: ...

    @property
    def loss(self) -> Any: ...

    @property
    def pass_loss(self) -> PassLoss: ...

    @property
    def pulse(self) -> Pulse: ...

    @property
    def values(self) -> Mapping[str, Value]: ...

    @property
    def probed(self) -> Collection[str]: ...
