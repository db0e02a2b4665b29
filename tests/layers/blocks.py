"""Simulation of all ranks for one layer, one after another in one process; received data are written directly."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halograd.comm.channel import ChannelSpec
from halograd.comm.reduction import ReductionSpec
from halograd.dtensor import Box
from halograd.kernels import Backend
from halograd.layers import Layer
from halograd.layers.strategy import AXES, layout_of
from halograd.lowering.operations import Transfer
from halograd.lowering.views import Value
from halograd.program.compiler import Alone
from halograd.program.program import Program, Segment, Step, Target
from halograd.program.runner import Mode, Runner

__all__ = ["computed_in_blocks"]


class _Silent:
    """Stand-in for the communicator of one rank, whose channels transfer nothing."""

    waits_for_network = False
    recorder = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def agreement(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def channels(self, specs: Sequence[ChannelSpec]) -> list[_Buffers]:
        return [_Buffers(spec.sends, spec.recvs, spec.dtype) for spec in specs]

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[Any]:
        assert not specs, "a rank alone has no other to sum with"
        return []


class _Buffers:
    def __init__(self, sends: Mapping[int, int], recvs: Mapping[int, int], dtype: Any) -> None:
        self._sends, self._recvs = ({p: np.empty(n, dtype) for p, n in some.items()} for some in (sends, recvs))

    def send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._sends[peer]

    def recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._recvs[peer]

    def close(self) -> None:
        return


def computed_in_blocks(
    layer: Layer,
    kernels: Backend,
    arrays: Mapping[str, np.ndarray],
    parts: Mapping[str, int],
    size: int,
    halo: str = "pad",
    dtype: str = "float32",
    substitutes: list | None = None,
) -> dict[str, np.ndarray]:
    """Return ``y``, ``dx``, ``dw``, ``db`` of a (transposed) convolution, assembled from the blocks of all ranks.

    Parameters
    ----------
    arrays
        ``x``, ``dy``, ``w``, ``b``, each whole.
    halo
        ``"overlap"``: the kernel runs before the halo arrives, over NaN, and then the boundary strips.
    substitutes
        List to which replaced kernels are added.
    """
    found = {f"d{name}": np.zeros(arrays[name].shape) for name in ("w", "b")}
    found |= {"y": np.full(arrays["dy"].shape, np.nan), "dx": np.full(arrays["x"].shape, np.nan)}
    for rank in range(size):
        runner = _compute_block(layer, kernels, arrays, parts, _Silent(rank, size), halo, np.dtype(dtype), found)
        if substitutes is not None:
            substitutes += runner.substitutes
    return found


def _compute_block(layer, kernels, arrays, parts, comm, halo, dtype, found) -> Runner:
    rank, size = comm.rank, comm.size
    parts = {**dict.fromkeys(AXES, 1), **parts}
    x, y = (Value(n, layout_of(arrays[n].shape, parts, size), dtype, rank, kept=True) for n in ("x", "dy"))
    lowered = Alone(Step("layer", layer, [x], y, {"halo": halo}, parts), trainable=True)
    backward = lowered.backward()
    target = Target(x.layout.shape[0], size, rank, dtype, probed=frozenset(["dy"]))
    program = Program("blocks", target, [lowered.step], {"x": x, "dy": y})
    program.forward, program.backward = [Segment("layer", lowered.forward)], [Segment("layer", backward)]
    y.gradient.view.buffer.kept = x.contributions[0].buffer.kept = True
    params = {f"layer/{k}": arrays[k].astype(dtype) for k in ("w", "b")}
    grads = {k: np.full(a.shape, np.nan, dtype) for k, a in params.items()}
    runner = Runner(program, comm, kernels, {"params": params, "grads": grads, "copies": {}, "state": {}}, Mode())
    # Margins hold NaN until they are filled.
    runner.region(x.region).fill(np.nan)
    runner.view(x.view)[...] = arrays["x"][x.box.slices()]
    _run(program.forward, runner.forward, runner, arrays["x"])
    found["y"][y.box.slices()] = runner.view(y.view)
    runner.region(y.gradient).fill(np.nan)
    runner.view(y.dy)[...] = arrays["dy"][y.box.slices()]
    _run(program.backward, runner.backward, runner, arrays["dy"])
    found["dx"][x.box.slices()] = runner.view(x.contributions[0])
    for name, gradient in grads.items():
        found[f"d{name.removeprefix('layer/')}"] += gradient
    runner.close()
    return runner


def _run(segments, passes, runner: Runner, whole: np.ndarray) -> None:
    """Run all operations of one rank; instead of an exchange, write the data that it would receive."""
    for segment, calls in zip(segments, passes, strict=True):
        for operation, call in zip(segment.operations, calls, strict=True):
            if not isinstance(operation, Transfer):
                call()
                continue
            made, rank = operation.exchange, runner.comm.rank
            box, target = made.targets[rank] & Box.of_shape(whole.shape), runner.view(made.target)
            if operation.end == "start":
                box &= made.sources[rank]  # what stays on this rank
            if box.size:
                target[box.slices(made.target_origin)] = whole[box.slices()]
