"""CUDA kernels of activations, sums of arrays, pooling, resizing by tables per axis, and dropout by global indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..checks import same_elements
from ..geometry import Geometry, Resampled
from ..kernel import ACTIVATIONS, FusedActivation, Kernel, KernelError, reads_input
from ..pointwise import DropoutMask, Pointwise
from .boxes import AXES, Joined, joined_elements
from .launch import Launch, Launcher, alpha_of, items_grid, scalar_program, sequence, suffix, vector_lanes
from .sources import CudaProgram

__all__ = ["CudaPointwise", "readers"]

#: Largest number of arrays that one launch adds.
TERMS = 12
# Python's integers have no limit: products with GOLDEN (counters.cuh) are taken modulo 2^64, as on the device.
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class CudaPointwise(Pointwise):
    """Pointwise, pooling and resize kernels in CUDA."""

    launcher: Launcher

    def _activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> tuple[Kernel, Kernel | None]:
        common: dict[str, Any] = {"kind": ACTIVATIONS.index(kind), "alpha": alpha}
        program = scalar_program("elementwise", x, y, dy, dx)
        joined = joined_elements(kind, x, y)
        axes = _axes(joined, x=joined.strides[0], y=joined.strides[1])
        name, grid = f"activation_forward_{suffix(joined.lanes)}", items_grid(self.launcher, joined.items)
        forward = sequence(kind, Launch(self.launcher, program, name, grid, x=x, y=y, **common, **axes))
        if dx is None:
            return forward, None
        return forward, _gradient(
            self.launcher, program, kind, (x, y, dy, dx), {**common, "from_output": not reads_input(kind, alpha)}
        )

    def _add(self, xs: list[Any], y: Any, activation: FusedActivation | None) -> Kernel:
        # Terms that share memory with y come first: later launches find a partial sum there.
        terms = sorted(xs, key=lambda x: not same_elements(x, y))
        if sum(same_elements(x, y) for x in terms) > TERMS:
            raise KernelError(f"add: expected the output at most {TERMS} times among the terms, got more; scale it")
        inputs, launches = terms, []
        while True:
            part, terms = terms[:TERMS], terms[TERMS:]
            joined = joined_elements("add", y, *part)
            # Only the last launch has the whole sum.
            after = None if terms else activation
            program = scalar_program("elementwise", y, *inputs, activation=after)
            launches.append(_one_sum(self.launcher, program, part, y, joined, after))
            if not terms:
                return sequence("add", *launches)
            # The next launch goes on from the sum so far, which is rounded to y's dtype here.
            terms.insert(0, y)

    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        """Build max pooling. Backward gathers by the stored positions, one or four bytes per output."""
        members = _members(x, y, dy, dx, geometry)
        kept = 0
        if dx is not None:
            # A position is the number of a tap in its window.
            wide = geometry.taps > np.iinfo(np.uint8).max + 1
            position = self.launcher.empty(y.shape, np.int32 if wide else np.uint8)
            members.update(position=position, wide=wide)
            kept = self.launcher.own.add(position)
        return _pair(self.launcher, "max", (x, y, dy, dx), members, kept)

    def _average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        members = {**_members(x, y, dy, dx, geometry), "include": count_include_pad}
        return _pair(self.launcher, "average", (x, y, dy, dx), members, 0)

    def _resize(self, x: Any, y: Any, dy: Any, dx: Any, axes: Sequence[Resampled]) -> tuple[Kernel, Kernel | None]:
        """Build a resize by tables per axis, all axes in one launch. Missing axes (of three) have one position."""
        trivial = (np.zeros(1, np.int32), np.ones((1, 1)))
        tables = [*(trivial,) * (3 - len(axes)), *(axis.table() for axis in axes)]
        inputs, outputs = three(x.shape[1:-1], 1), three(y.shape[1:-1], 1)
        parts = {
            "first": [first for first, _ in tables],
            "weights": [weights for _, weights in tables],
            # Backward gathers: one thread adds up the whole gradient of an input, in an order that never changes.
            "readers": [readers(first, weights, n) for (first, weights), n in zip(tables, inputs)],
        }
        members = {"x": x, "y": y, "dy": dy, "dx": dx, "samples": x.shape[0], "channels": x.shape[-1]}
        members.update({"in": inputs, "out": outputs, "taps": [weights.shape[1] for _, weights in tables]})
        members.update({name: [self.launcher.upload(a) for a in arrays] for name, arrays in parts.items()})
        kept = self.launcher.own.add(*(a for name in parts for a in members[name]))
        return _pair(self.launcher, "resize", (x, y, dy, dx), members, kept)

    def _dropout(self, x: Any, y: Any, dy: Any, dx: Any, mask: DropoutMask) -> tuple[Kernel, Kernel | None]:
        """Build dropout. Backward draws the mask again."""
        if len(x.shape) > AXES:
            raise KernelError(f"dropout: expected at most {AXES} axes, got {len(x.shape)}; join some")
        return self._dropped(x, y, mask), None if dx is None else self._dropped(dy, dx, mask)

    def _dropped(self, x: Any, y: Any, mask: DropoutMask) -> Kernel:
        strides = [math.prod(mask.shape[axis + 1 :]) for axis in range(len(mask.shape))]
        lanes = vector_lanes(x.shape[-1], x, y)
        # The index of an element times GOLDEN is a sum over axes: the kernel multiplies no global index.
        steps = [s * _GOLDEN & _MASK for s in strides]
        # The last axis is counted in vectors.
        steps[-1] = steps[-1] * lanes & _MASK
        extents = [*x.shape[:-1], x.shape[-1] // lanes]
        rest = AXES - len(extents)
        members = {"x": x, "y": y, "state": mask.state, "salt": mask.salt, "threshold": int(mask.rate * 2**64)}
        members["base"] = sum(a * s for a, s in zip(mask.start, strides)) * _GOLDEN & _MASK
        members["sample"] = strides[0] * _GOLDEN & _MASK
        members["steps"] = (*steps, *(0,) * rest)
        members["shape"] = (*extents, *(1,) * rest)
        members.update(items=x.size // lanes, scale=1.0 / (1.0 - mask.rate), axes=len(extents))
        name, grid = f"dropout_{suffix(lanes)}", items_grid(self.launcher, x.size // lanes)
        return sequence("dropout", Launch(self.launcher, scalar_program("dropout", x, y), name, grid, **members))


def _axes(joined: Joined, **strides: Sequence[int]) -> dict[str, Any]:
    """Return the struct members that describe the joined axes."""
    members: dict[str, Any] = {f"{name}_strides": joined.padded(s, 0) for name, s in strides.items()}
    return {**members, "shape": joined.padded(joined.shape, 1), "axes": joined.axes, "items": joined.items}


def _gradient(
    launcher: Launcher, program: CudaProgram, kind: str, arrays: Sequence[Any], common: dict[str, Any]
) -> Kernel:
    joined = joined_elements(kind, *arrays)
    names = ("x", "y", "dy", "dx")
    axes = _axes(joined, **dict(zip(names, joined.strides)))
    name, grid = f"activation_backward_{suffix(joined.lanes)}", items_grid(launcher, joined.items)
    return sequence(
        f"{kind} gradient", Launch(launcher, program, name, grid, **dict(zip(names, arrays)), **common, **axes)
    )


def _one_sum(
    launcher: Launcher, program: CudaProgram, xs: list[Any], y: Any, joined: Joined, activation: FusedActivation | None
) -> Launch:
    own, *others = joined.strides
    rest = TERMS - len(xs)
    return Launch(
        launcher,
        program,
        f"add_{suffix(joined.lanes)}",
        items_grid(launcher, joined.items),
        xs=[*xs, *(None,) * rest],
        y=y,
        terms=len(xs),
        alpha=alpha_of(activation),
        strides=[*(joined.padded(s, 0) for s in others), *(joined.padded((), 0),) * rest],
        **_axes(joined, y=own),
    )


def three(values: Any, fill: int) -> tuple[int, ...]:
    """Return up to three numbers, one per axis, as three; missing leading axes get `fill`."""
    return (*(fill,) * (3 - len(values)), *(int(v) for v in values))


def _members(x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> dict[str, Any]:
    # Pooling in one or two dimensions is pooling in three with leading axes of extent 1.
    return {
        "x": x,
        "y": y,
        "dy": dy,
        "dx": dx,
        "samples": x.shape[0],
        "channels": x.shape[-1],
        "in": three(x.shape[1:-1], 1),
        "out": three(y.shape[1:-1], 1),
        "kernel": three(geometry.kernel, 1),
        "stride": three(geometry.stride, 1),
        "dilation": three(geometry.dilation, 1),
        "lo": three([lo for lo, _ in geometry.padding], 0),
    }


def _pair(
    launcher: Launcher, kind: str, arrays: tuple[Any, Any, Any, Any], members: dict[str, Any], kept: int
) -> tuple[Kernel, Kernel | None]:
    x, y, _, dx = arrays
    source, label = ("resize", "resize") if kind == "resize" else ("pool", f"{kind}_pool")
    program = scalar_program(source, *arrays)
    lanes = vector_lanes(x.shape[-1], *arrays)
    grid = items_grid(launcher, y.size // lanes)
    launch = Launch(launcher, program, f"{kind}_forward_{suffix(lanes)}", grid, **members)
    forward = sequence(label, launch, workspace_bytes=kept)
    if dx is None:
        return forward, None
    grid = items_grid(launcher, x.size // lanes)
    return forward, sequence(
        f"{label} gradient", Launch(launcher, program, f"{kind}_backward_{suffix(lanes)}", grid, **members)
    )


def readers(first: Any, weights: Any, inputs: int) -> Any:
    """Return, for each input, the range of outputs ``[start, stop)`` that contains all its readers, int32 ``(inputs,
    2)``.

    >>> readers(np.array([0, 0, 1]), np.array([[1, 0], [0.5, 0.5], [1, 0]]), 3).tolist()
    [[0, 2], [1, 3], [0, 0]]
    """
    ranges = np.zeros((inputs, 2), np.int32)
    for output, (input_, pair) in enumerate(zip(first, weights)):
        # Outputs are visited in rising order: the first that reads an input sets the start, each later one the stop.
        for read in input_ + np.flatnonzero(pair):
            start, stop = ranges[read]
            ranges[read] = (output if stop == 0 else start, output + 1)
    return ranges
