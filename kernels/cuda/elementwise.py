"""Activations, sums of arrays and bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halograd.kernels.checks import check_packed, same_elements
from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.launch import (
    Launch,
    is_float,
    items_grid,
    scalar_program,
    sequence,
    vector_lanes,
)
from halograd.kernels.cuda.sources import Program
from halograd.kernels.cuda.strided import Joined, joined_elements
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import Kernel, idle

__all__ = ["activation", "add", "bias"]

KINDS = ("relu", "leaky_relu", "sigmoid", "tanh", "gelu")
#: Arrays that one launch adds up.
TERMS = 12


def _suffix(lanes: int) -> str:
    return "1" if lanes == 1 else "v"


def _axes(joined: Joined, **strides: Sequence[int]) -> dict[str, Any]:
    """Members that describe the joined axes."""
    found: dict[str, Any] = {f"{name}_strides": joined.padded(s, 0) for name, s in strides.items()}
    return {**found, "shape": joined.padded(joined.shape, 1), "axes": joined.axes, "items": joined.items}


def activation(
    device: Device, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float
) -> tuple[Kernel, Kernel | None]:
    """Elementwise function and its gradient; see :meth:`Backend.activation`."""
    common: dict[str, Any] = {"kind": KINDS.index(kind), "alpha": alpha}
    program = scalar_program("elementwise", x, y, dy, dx)
    joined = joined_elements(kind, x, y)
    axes = _axes(joined, x=joined.strides[0], y=joined.strides[1])
    name, grid = f"activation_forward_{_suffix(joined.lanes)}", items_grid(device, joined.items)
    forward = sequence(kind, Launch(device, program, name, grid, x=x, y=y, **common, **axes))
    if dx is None:
        return forward, None
    return forward, _gradient(device, program, kind, (x, y, dy, dx), {**common, "from_output": same_elements(x, y)})


def _gradient(device: Device, program: Program, kind: str, arrays: Sequence[Any], common: dict[str, Any]) -> Kernel:
    joined = joined_elements(kind, *arrays)
    names = ("x", "y", "dy", "dx")
    axes = _axes(joined, **dict(zip(names, joined.strides)))
    name, grid = f"activation_backward_{_suffix(joined.lanes)}", items_grid(device, joined.items)
    return sequence(
        f"{kind} gradient", Launch(device, program, name, grid, **dict(zip(names, arrays)), **common, **axes)
    )


def add(device: Device, xs: Sequence[Any], y: Any, relu: bool) -> Kernel:
    """Sum of arrays; `y` may be one of them, or several."""
    # What is stored in y goes first: later launches find a partial sum there.
    terms = sorted(xs, key=lambda x: not same_elements(x, y))
    if sum(same_elements(x, y) for x in terms) > TERMS:
        raise KernelError(f"add: expected the output at most {TERMS} times among the terms, got more; scale it")
    program = scalar_program("elementwise", y, *terms)
    launches = []
    while True:
        part, terms = terms[:TERMS], terms[TERMS:]
        joined = joined_elements("add", y, *part)
        launches.append(_add(device, program, part, y, joined, relu and not terms))
        if not terms:
            return sequence("add", *launches)
        terms.insert(0, y)


def _add(device: Device, program: Program, xs: list[Any], y: Any, joined: Joined, relu: bool) -> Launch:
    own, *others = joined.strides
    rest = TERMS - len(xs)
    return Launch(
        device,
        program,
        f"add_{_suffix(joined.lanes)}",
        items_grid(device, joined.items),
        xs=[*xs, *(None,) * rest],
        y=y,
        terms=len(xs),
        relu=relu,
        strides=[*(joined.padded(s, 0) for s in others), *(joined.padded((), 0),) * rest],
        **_axes(joined, y=own),
    )


def bias(device: Device, y: Any, b: Any, relu: bool) -> Kernel:
    """``y = relu?(y + b)`` in place; y packed (..., C), b (C,) of its dtype or float32."""
    check_packed("bias", y=y, b=b)
    channels = y.shape[-1]
    if tuple(b.shape) != (channels,):
        raise KernelError(f"bias: expected b of shape {(channels,)}, got {tuple(b.shape)}; one value per channel")
    if not y.size:
        return idle()
    lanes = vector_lanes(channels, y)
    items = y.size // lanes
    members = {"y": y, "b": b, "b_float": is_float(b), "relu": relu, "items": items, "channels": channels}
    program = scalar_program("elementwise", y)
    return sequence("bias", Launch(device, program, f"bias_{_suffix(lanes)}", items_grid(device, items), **members))
