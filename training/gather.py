"""Whole arrays of a run on rank 0, to be written or compared: for small networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtensor import End, Exchange, Layout
from ..program.views import Value

if TYPE_CHECKING:
    from .executor import Executor

__all__ = ["Gather"]


class Gather:
    """The way of some outputs, and of gradients of probed inputs, to rank 0. Collective to make, run and close.

    Made once, it gathers after every step: to set it up takes longer than to run it.

    Parameters
    ----------
    executor
        Whose arrays they are.
    names
        Of layers whose output is kept.
    gradients
        Of probed inputs (only theirs: other gradients share memory, and are gone when `backward` returns).

    Raises
    ------
    ValueError
        If an output or a gradient is not kept. Local, the same on all ranks.
    """

    def __init__(self, executor: Executor, names: Sequence[str] = (), gradients: Sequence[str] = ()) -> None:
        values = [(_output(executor, name), False) for name in names]
        values += [(_gradient(executor, name), True) for name in gradients]
        self._device, self._is_root = executor.device, executor.comm.rank == 0
        self._targets: list[Any] = []
        wanted: list[dict[str, Any]] = []
        for value, is_gradient in values:
            layout = Layout.on_rank(value.layout.shape, 0, executor.comm.size)
            self._targets.append(self._device.empty(layout.boxes[executor.comm.rank].shape, value.dtype))
            source = executor.runner.view(value.dy if is_gradient else value.view)
            ends = {"source": End(value.layout.boxes, source), "target": End(layout.boxes, self._targets[-1])}
            wanted.append({**ends, "kind": "gather"})
        self._exchanges = Exchange.together(executor.comm, wanted)

    def run(self) -> list[np.ndarray | None]:
        """The whole arrays on rank 0, None elsewhere: first outputs, then gradients; overwritten by the next run."""
        for exchange in self._exchanges:
            exchange.run()
        return [self._device.to_host(target) if self._is_root else None for target in self._targets]

    def close(self) -> None:
        """Free the channels."""
        for exchange in self._exchanges:
            exchange.close()


def _output(executor: Executor, name: str) -> Value:
    value = executor.values[name]
    if value.kept or value.read:
        return value
    raise ValueError(
        f"gather(): the output of {name!r} is not kept; build the executor with kept=[{name!r}], it has "
        f"{sorted(n for n, v in executor.values.items() if v.kept or v.read)}"
    )


def _gradient(executor: Executor, name: str) -> Value:
    value = executor.values[name]
    if name in executor.probed and value.gradient is not None:
        return value
    raise ValueError(
        f"gather(): the gradient of {name!r} is not kept; build the executor with probed=[...] of inputs "
        f"that the loss depends on, it has {sorted(executor.probed)}"
    )
