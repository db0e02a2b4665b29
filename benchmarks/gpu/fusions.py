"""Sums of batch norm in the epilogue of a convolution by cuDNN, compared with a separate pass over its output. Local.

Forward: ``y = conv(x, w)`` with sum and sum of squares of ``y`` per channel. Backward, for a convolution behind a batch
norm with ReLU: ``dx = conv'(dy, w)``, masked by the ReLU, with the two sums that the norm's gradient needs. Engines
that fuse them are compiled at run time (0.3 to 8 s) and list no plan for strided data gradients. Sums are in float32;
ours are in float64. These times decide whether the step program may fuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.timings import fastest, recorded
from halograd.device import as_dtype
from halograd.kernels import BatchNormArrays, FusedActivation, Geometry
from halograd.kernels.cudnn.frontend import AddressTable, Frontend
from halograd.kernels.cudnn.graphs import Shapes, Tensor

__all__ = ["CASES", "Case", "backward_graph", "forward_graph", "time_fusions"]

Outcome = tuple[str, Mapping[str, float]]
EPS = 1e-5
#: Candidates of cuDNN that are built and timed.
TRIED = 3
X, W, Y, SUM, SECOND, NORMED, MEAN, SCALE, GAMMA, BETA = range(1, 11)


@dataclass(frozen=True)
class Case:
    """A convolution of stride 1 with padding that keeps the extents."""

    title: str
    batch: int
    spatial: tuple[int, ...]
    channels: int
    outputs: int
    kernel: int

    @property
    def geometry(self) -> Geometry:
        return Geometry.of((self.kernel,) * len(self.spatial), 1, self.kernel // 2)

    @property
    def shapes(self) -> Shapes:
        return Shapes.of(*self.extents, self.geometry)

    @property
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of image, weights and output."""
        weights = (self.outputs, *(self.kernel,) * len(self.spatial), self.channels)
        return (self.batch, *self.spatial, self.channels), weights, (self.batch, *self.spatial, self.outputs)


CASES = (
    Case("mesh-2K, 1024^2, 128 to 128, 3 x 3", 1, (1024, 1024), 128, 128, 3),
    Case("ResNet-50, 56^2, 64 to 64, 3 x 3", 64, (56, 56), 64, 64, 3),
    Case("ResNet-50, 14^2, 1024 to 256, 1 x 1", 64, (14, 14), 1024, 256, 1),
    Case("ResNet-50, 7^2, 512 to 2048, 1 x 1", 64, (7, 7), 512, 2048, 1),
    Case("U-Net 3-D, 128^3, 32 to 32, 3 x 3 x 3", 1, (128, 128, 128), 32, 32, 3),
)


class _Graph:
    """A graph in construction: tensors by uid, bfloat16 for images and float32 for vectors of channels."""

    def __init__(self, frontend: Frontend, where: Mapping[str, Any]) -> None:
        self.low, self.full = frontend.data_type("bfloat16"), frontend.data_type("float32")
        self.modes = frontend.module.reduction_mode
        self.graph = frontend.module.pygraph(
            io_data_type=self.low, intermediate_data_type=self.full, compute_data_type=self.full, **where
        )

    def image(self, uid: int, tensor: Tensor) -> Any:
        return self._tensor(uid, tensor, self.low)

    def vector(self, uid: int, of: Tensor) -> Any:
        return self._tensor(uid, _per_channel(of), self.full)

    def _tensor(self, uid: int, t: Tensor, dtype: Any) -> Any:
        return self.graph.tensor(name=f"t{uid}", dim=list(t.dims), stride=list(t.strides), data_type=dtype, uid=uid)

    def write(self, uid: int, tensor: Any, t: Tensor, dtype: Any) -> None:
        tensor.set_output(True).set_data_type(dtype).set_dim(list(t.dims)).set_stride(list(t.strides))
        tensor.set_uid(uid)

    def write_sum(self, uid: int, tensor: Any, of: Tensor) -> None:
        self.write(uid, self.graph.reduction(input=tensor, mode=self.modes.ADD), _per_channel(of), self.full)


def _per_channel(t: Tensor) -> Tensor:
    return Tensor.packed((1, *(1 for _ in t.dims[2:]), t.dims[1]))


def _window(s: Shapes) -> dict[str, list[int]]:
    padding = {"pre_padding": list(s.before), "post_padding": list(s.behind)}
    return {**padding, "stride": list(s.stride), "dilation": list(s.dilation)}


def forward_graph(frontend: Frontend, s: Shapes, where: Mapping[str, Any]) -> Any:
    """Return the graph of ``y``, ``sum y`` and ``sum y^2``."""
    g = _Graph(frontend, where)
    y = g.graph.conv_fprop(g.image(X, s.x), g.image(W, s.w), **_window(s))
    g.write(Y, y, s.y, g.low)
    g.write_sum(SUM, y, s.y)
    g.write_sum(SECOND, g.graph.mul(a=y, b=y), s.y)
    return g.graph


def backward_graph(frontend: Frontend, s: Shapes, where: Mapping[str, Any]) -> Any:
    """Return the graph of ``dx'``, ``sum dx'`` and ``sum dx' xhat``.

    ``dx' = conv'(dy, w)`` where ``gamma xhat + beta > 0``, else 0, with ``xhat = (z - mean) * scale``; ``z`` is the
    input of the norm, whose output the convolution reads.
    """
    g = _Graph(frontend, where)
    graph = g.graph
    dx = graph.conv_dgrad(g.image(Y, s.y), g.image(W, s.w), **_window(s))
    dx.set_dim(list(s.x.dims)).set_stride(list(s.x.strides))
    centered = graph.sub(a=g.image(NORMED, s.x), b=g.vector(MEAN, s.x))
    normed = graph.mul(a=centered, b=g.vector(SCALE, s.x))
    affine = graph.add(a=graph.mul(a=normed, b=g.vector(GAMMA, s.x)), b=g.vector(BETA, s.x))
    masked = graph.relu_backward(loss=dx, input=affine)
    g.write(X, masked, s.x, g.low)
    g.write_sum(SUM, masked, s.x)
    g.write_sum(SECOND, graph.mul(a=masked, b=normed), s.x)
    return graph


def plans(frontend: Frontend, graph: Any, uids: tuple[int, ...]) -> Iterator[tuple[str, int, Any]]:
    """Yield name, workspace [B] and launch of the plans of a graph that can be built; a plan must run before the next
    one is built.
    """
    frontend.plan(graph, (), None)
    for index in range(int(graph.get_execution_plan_count())):
        try:
            graph.build_plan_at_index(index)
        except Exception:  # an engine that does not support it, or does not compile
            continue
        name, nbytes = graph.get_plan_name_at_index(index), graph.get_workspace_size_plan_at_index(index)
        yield str(name), int(nbytes), frontend.launcher(graph, uids)


class _Arrays:
    """Arrays of a case on the device, with the kernels of halograd that compute the same as the graphs."""

    def __init__(self, kernels: Any, case: Case, backward: bool) -> None:
        self.kernels, self.case, self.backward = kernels, case, backward
        draw, low = np.random.default_rng(1), as_dtype("bfloat16")

        def made(shape: tuple[int, ...], size: float = 1.0) -> Any:
            array = kernels.zeros(shape, low)
            kernels.device.assign(array, (size * draw.standard_normal(shape, np.float32)).astype(low))
            return array

        x, w, y = case.extents
        self.x, self.w, self.y = made(x), made(w, float(np.prod(w[1:])) ** -0.5), made(y)
        of = self.x if backward else self.y
        channels = of.shape[-1]
        self.vectors = {
            name: kernels.zeros((channels,), "float32") for name in ("gamma", "beta", "mean", "var", "scale")
        }
        for name, value in (("gamma", 1.0), ("var", 1.0), ("scale", (1 + EPS) ** -0.5), ("beta", 0.1), ("mean", 0.2)):
            self.vectors[name].fill(value)
        self.normed, self.other = (made(x) if backward else self.y), kernels.zeros(of.shape, low)
        sums, means = (kernels.zeros((2, channels), "float64") for _ in range(2))
        self.sums, self.fused = sums, [kernels.zeros((channels,), "float32") for _ in range(2)]
        v, relu = self.vectors, FusedActivation("relu")
        gradients = (self.x, kernels.zeros(x, low)) if backward else (None, None)
        self.norm = kernels.batch_norm(
            BatchNormArrays(
                *(self.normed, self.other, *gradients, v["gamma"], v["beta"], v["mean"], v["var"], sums, means, EPS),
                relu if backward else None,
            )
        )
        self.convolution = (
            kernels.conv_backward_data(self.y, self.w, self.x, case.geometry)
            if backward
            else kernels.conv_forward(self.x, self.w, None, self.y, case.geometry)
        )

    def sum_up(self) -> None:
        """Compute the sums by a pass over the output."""
        (self.norm.backward_sums if self.backward else self.norm.statistics)()

    def separate(self) -> None:
        self.convolution()
        self.sum_up()

    @property
    def addresses(self) -> dict[int, int]:
        v = self.vectors
        arrays = {X: self.x, W: self.w, Y: self.y, SUM: self.fused[0], SECOND: self.fused[1]}
        if self.backward:
            arrays |= {NORMED: self.normed, MEAN: v["mean"], SCALE: v["scale"], GAMMA: v["gamma"], BETA: v["beta"]}
        return {uid: int(array.data.ptr) for uid, array in arrays.items()}

    def close(self) -> None:
        self.norm.close()
        self.convolution.close()


def time_fusions(kernels: Any, case: Case, backward: bool) -> Outcome:
    """Time a convolution and a pass for its sums, and both as one plan of cuDNN; compare the sums."""
    arrays = _Arrays(kernels, case, backward)
    numbers: dict[str, float] = {}
    arrays.separate()
    for name, run in (("convolution", arrays.convolution), ("sums", arrays.sum_up), ("separate", arrays.separate)):
        numbers[name] = fastest(kernels, recorded(kernels, run))
    expected = kernels.device.to_host(arrays.sums)
    engine, frontend = kernels._engine, kernels.runtime.frontend
    handle, stream = engine.handles.current()
    table = AddressTable(arrays.addresses)
    build = backward_graph if backward else forward_graph
    graph, names = build(frontend, case.shapes, {"handle": handle}), []
    for name, nbytes, launch in plans(frontend, graph, tuple(table.addresses)):
        engine.workspaces.reserve(nbytes)

        def fused(launch: Callable[..., None] = launch, nbytes: int = nbytes) -> None:
            launch(table, engine.workspaces.address(stream, nbytes), handle)

        seconds = numbers[f"fused {name}"] = fastest(kernels, fused)
        found = np.stack([kernels.device.to_host(array) for array in arrays.fused])
        apart = float(np.abs(found - expected).max() / np.abs(expected).max())
        numbers[f"apart {name}"] = apart
        names.append(f"{name} {1e6 * seconds:.1f} ({seconds / numbers['separate']:.2f} x, sums {apart:.1e} apart)")
        if len(names) == TRIED:
            break
    arrays.close()
    text = f"us: convolution {1e6 * numbers['convolution']:.1f}, sums {1e6 * numbers['sums']:.1f}, both "
    return f"{text}{1e6 * numbers['separate']:.1f}; fused: {', '.join(names) or 'no plan'}", numbers
