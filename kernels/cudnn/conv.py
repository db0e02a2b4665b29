"""Convolution kernels: a cuDNN plan, a table of addresses, and copies of arrays that cuDNN cannot take directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cuda import Boxes
from ..geometry import Geometry, channels_in_memory
from ..kernel import Kernel, chain
from .frontend import ALIGNMENT, AddressTable, Handles, Workspaces
from .graphs import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    BIAS,
    FORWARD,
    Arithmetic,
    GraphKey,
    PlanKey,
    Shapes,
    W,
    X,
    Y,
)
from .plans import Plans

__all__ = [
    "ConvSettings",
    "Operands",
    "backward_data",
    "backward_filter",
    "data_gradient",
    "forward",
    "of_group",
    "outside",
    "planned",
    "shapes_of",
]


@dataclass
class ConvSettings:
    """Settings shared by all cuDNN plans of a backend.

    Attributes
    ----------
    boxes
        Kernels that copy and fill views.
    empty
        Function that returns a packed device array of a shape and dtype, aligned to 256 B.
    kernel_bytes
        Memory that open kernels hold for themselves [B].
    """

    plans: Plans
    handles: Handles
    workspaces: Workspaces
    boxes: Boxes
    empty: Callable[[Sequence[int], Any], Any]
    arithmetic: Arithmetic
    workspace_limit: int | None = None
    tuned: bool = False
    kernel_bytes: int = field(default=0)


class Operands:
    """The arrays of one kernel in the form that cuDNN requires.

    All have the dtype of the images, unless another is requested, and an address divisible by 16. With 16-bit images,
    float32 weights are converted at every call, and their gradients are converted back. An array at another address
    (rows of a block whose size is not a multiple of 16 B) is copied. If the image is padded with zero channels in
    memory, weights and their gradients get the same number of channels, zero for the added ones.
    """

    def __init__(self, engine: ConvSettings, dtype: Any) -> None:
        self._engine, self._dtype = engine, np.dtype(dtype)
        self.before: list[Kernel] = []
        self.after: list[Kernel] = []
        self.arrays: list[Any] = []
        self.addresses: dict[int, int] = {}
        self.nbytes = 0

    def image(self, uid: int, array: Any) -> int:
        """Add an input that may have more channels in memory than in its shape; return the number that cuDNN reads."""
        stored = channels_in_memory(array)
        # A copy has no added channels: it is packed with those of the shape.
        if stored is None or array.data.ptr % ALIGNMENT:
            self.input(uid, array)
            return int(array.shape[-1])
        self._enter(uid, array)
        return stored

    def input(self, uid: int, array: Any, channels: int | None = None, dtype: Any = None) -> None:
        """Add an input, which the kernel reads with `channels` channels, in `dtype`; None: those of the array, and the
        dtype of the images.
        """
        suited, part = self._suited(array, channels, dtype)
        if suited is not array:
            self.before.append(self._moved(array, part))
        self._enter(uid, suited)

    def output(self, uid: int, array: Any, channels: int | None = None, dtype: Any = None) -> None:
        """Add an output; arguments as for `input`."""
        suited, part = self._suited(array, channels, dtype)
        if suited is not array:
            self.after.append(self._moved(part, array))
        self._enter(uid, suited)

    def zeros(self, uid: int, shape: Sequence[int]) -> None:
        """Add an input of zeros."""
        array = self._own(shape, self._dtype)
        # Once, at build time: no kernel writes it.
        array.fill(0)
        self._enter(uid, array)

    def _suited(self, array: Any, channels: int | None, dtype: Any) -> tuple[Any, Any]:
        """Return an array with `channels` channels that cuDNN can take, and the part of it that holds `array`.

        This is `array` itself if possible, else a new array.
        """
        *outer, count = array.shape
        aligned, needed = array.data.ptr % ALIGNMENT == 0, channels or count
        dtype = self._dtype if dtype is None else np.dtype(dtype)
        if aligned and np.dtype(array.dtype) == dtype and needed == count:
            return array, array
        own = self._own((*outer, needed), dtype)
        if needed == count:
            return own, own
        # The added channels stay 0 for good: copies write the others only.
        own.fill(0)
        return own, own[..., :count]

    def _own(self, shape: Sequence[int], dtype: Any) -> Any:
        array = self._engine.empty(tuple(shape), dtype)
        self.nbytes += array.nbytes
        return array

    def _moved(self, source: Any, target: Any) -> Kernel:
        return self._engine.boxes.copy([(source, target)])

    def _enter(self, uid: int, array: Any) -> None:
        self.arrays.append(array)
        self.addresses[uid] = array.data.ptr


def outside(array: Any, part: Sequence[int]) -> list[Any]:
    """Return views that cover all elements outside the leading part of spatial extents `part`, each element once."""
    rest = []
    at: list[slice] = [slice(None)]
    for n, inner in zip(array.shape[1:-1], part):
        if inner < n:
            rest.append(array[(*at, slice(inner, None))])
        # The views of later axes lie within the part of this one, so none covers an element again.
        at.append(slice(0, inner))
    return rest


def forward(engine: ConvSettings, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool) -> Kernel:
    """Return a kernel that computes ``y = conv(x, w) + b``, with or without ReLU, by one cuDNN plan."""
    operands = Operands(engine, x.dtype)
    channels = operands.image(X, x)
    # Weights for the added channels, too, which are 0.
    operands.input(W, w, of_group(channels, geometry))
    operands.output(Y, y)
    if b is not None:
        operands.input(BIAS, b)
    elif relu:
        # Without a bias a fused ReLU has only engines that are compiled at run time, see `PlanKey`.
        operands.zeros(BIAS, (y.shape[-1],))
    shapes = shapes_of(x, w, y, channels, geometry)
    return _kernel(engine, operands, FORWARD, shapes, bias=b is not None or relu, relu=relu)


def data_gradient(engine: ConvSettings, dy: Any, w: Any, dx: Any, geometry: Geometry) -> tuple[Operands, Shapes]:
    """Return the operands of a plan that computes ``dx``, and its shapes. Rows of dx that no output reads become zero.
    """
    operands = Operands(engine, dx.dtype)
    operands.input(Y, dy)
    operands.input(W, w)
    operands.output(X, dx)
    shapes = Shapes.of(dx.shape, w.shape, dy.shape, geometry)
    # The array that cuDNN writes, which may be a copy: its copy back includes these zeros.
    rest = outside(operands.arrays[-1], shapes.part)
    if rest:
        operands.before.append(engine.boxes.fill(0, *rest))
    return operands, shapes


def backward_data(engine: ConvSettings, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
    """Return a kernel that computes ``dx`` by one cuDNN plan."""
    operands, shapes = data_gradient(engine, dy, w, dx, geometry)
    return _kernel(engine, operands, BACKWARD_DATA, shapes)


def backward_filter(engine: ConvSettings, x: Any, dy: Any, dw: Any, geometry: Geometry) -> Kernel:
    """Return a kernel that computes ``dw`` by one cuDNN plan."""
    operands = Operands(engine, x.dtype)
    channels = operands.image(X, x)
    operands.input(Y, dy)
    operands.output(W, dw, of_group(channels, geometry))
    return _kernel(engine, operands, BACKWARD_FILTER, shapes_of(x, dw, dy, channels, geometry))


def of_group(channels: int, geometry: Geometry) -> int:
    return channels // geometry.groups


def shapes_of(x: Any, w: Any, y: Any, channels: int, geometry: Geometry) -> Shapes:
    """Return the shapes of a convolution whose image has `channels` channels in memory, with weights for all of them.
    """
    weights = (*w.shape[:-1], of_group(channels, geometry))
    return Shapes.of((*x.shape[:-1], channels), weights, y.shape, geometry)


def _kernel(
    engine: ConvSettings, operands: Operands, direction: str, shapes: Shapes, bias: bool = False, relu: bool = False
) -> Kernel:
    dtype = operands.arrays[0].dtype.name
    key = PlanKey(direction, dtype, shapes, engine.arithmetic, bias, relu, engine.workspace_limit, engine.tuned)
    kernel = planned(engine, key, operands.addresses, operands.arrays, operands.nbytes)
    steps = [*operands.before, kernel, *operands.after]
    return kernel if len(steps) == 1 else chain(*steps)


def planned(
    engine: ConvSettings, key: GraphKey, addresses: Mapping[int, int], arrays: Sequence[Any], nbytes: int = 0
) -> Kernel:
    """Return a kernel that runs the plan of a key.

    Parameters
    ----------
    addresses
        Device address of each tensor of the graph, by its number.
    arrays
        Arrays at these addresses, which are kept alive.
    nbytes
        Memory among them that belongs to this kernel alone [B].

    Raises
    ------
    KernelError
        If cuDNN has no plan.
    """
    table = AddressTable(addresses)
    plan = engine.plans.get(key, table)
    handles, workspaces = engine.handles, engine.workspaces

    def run(keep: Any = arrays) -> None:  # the table holds addresses only, so keep the arrays alive
        handle, stream = handles.current()
        plan.run(table, handle, stream, workspaces)

    def close() -> None:
        engine.kernel_bytes -= nbytes

    # Before the first run, so that the arena is allocated once, for the largest kernel.
    workspaces.reserve(plan.workspace_bytes)
    engine.kernel_bytes += nbytes
    kernel = Kernel(run, f"cudnn:{plan.name}", nbytes, close)
    kernel.scratch_bytes = plan.workspace_bytes
    return kernel
