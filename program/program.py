"""The program of a step: steps, values, and operations in order. Pure data; see `docs/program.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import wide
from ..layers.layer import Layer
from .arena import Placement, place
from .operations import KernelSpec, Operation
from .values import Value
from .views import View

if TYPE_CHECKING:
    from .compiler import Target

__all__ = ["Program", "Segment", "Step"]


@dataclass(eq=False)
class Step:
    """One layer in the order of computation, with the values it reads and makes.

    Attributes
    ----------
    owner
        Whose parameters it has (`Network.owners`); "": its own.
    frozen
        Whether its parameters stay as they are: nobody reads their gradients.
    """

    name: str
    layer: Layer
    inputs: list[Value]
    output: Value
    options: Mapping[str, Any]
    parts: Mapping[str, int]
    owner: str = ""
    frozen: bool = False

    @property
    def arrays_of(self) -> str:
        """Name of the layer under which its parameters are known."""
        return self.owner or self.name


@dataclass(eq=False)
class Segment:
    """Operations of one layer that follow one another."""

    name: str
    operations: list[Operation] = field(default_factory=list)


@dataclass(eq=False)
class Program:
    """What one rank does in a step.

    Attributes
    ----------
    network
        Its name.
    target
        For whom it was compiled.
    steps
        Layers in order of computation, redistributions among them.
    values
        Of inputs and layers, by name.
    inputs
        Of these, what comes from outside.
    forward, backward
        Operations of the two passes, layer by layer.
    loss
        Where the loss of this rank's block is written, float64 ``(1,)``; None if there is none.
    divided
        Terms of the loss that are divided by a sum of weights over all ranks: where this rank's part is written, and
        where the sum is, both float64 ``(1,)``. Terms of training alone are not among them.
    exposed
        Kernels that others run too, by layer.
    """

    network: str
    target: Target
    steps: list[Step] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    forward: list[Segment] = field(default_factory=list)
    backward: list[Segment] = field(default_factory=list)
    loss: View | None = None
    divided: list[tuple[View, View]] = field(default_factory=list)
    exposed: dict[str, KernelSpec] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Operation]:
        """All operations in order, the backward pass behind the forward pass."""
        for segment in (*self.forward, *self.backward):
            yield from segment.operations

    @property
    def wide(self) -> np.dtype:
        """Dtype of parameters, of their gradients and of states."""
        return wide(self.target.dtype)

    @cached_property
    def placement(self) -> Placement:
        """Where everything lies."""
        # Outputs are looked at when a step has ended, inputs are written before it begins.
        kept = [v.region.view.buffer for v in self.values.values() if v.read or v.kept]
        probed = [self.values[name].gradient for name in sorted(self.target.probed)]
        return place(list(self), [*kept, *(region.view.buffer for region in probed if region is not None)])
