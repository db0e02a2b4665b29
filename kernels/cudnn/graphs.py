"""Convolutions as graphs of cuDNN's, and the execution plans it proposes for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halograd.kernels.cudnn.frontend import Frontend, Launch, one_line
from halograd.kernels.cudnn.precision import Arithmetic
from halograd.kernels.cudnn.shapes import Shapes, Tensor
from halograd.kernels.errors import KernelError

__all__ = ["BACKWARD_DATA", "BACKWARD_FILTER", "BIAS", "FORWARD", "Built", "Candidates", "PlanKey", "W", "X", "Y"]

#: Numbers of the tensors in every graph.
X, W, Y, BIAS = 1, 2, 3, 4
FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "forward", "backward data", "backward filter"
_OUTPUT = {FORWARD: Y, BACKWARD_DATA: X, BACKWARD_FILTER: W}


@dataclass(frozen=True)
class PlanKey:
    """All that a plan depends on, besides the device and the versions of the libraries.

    The addresses need not be part of it: all are divisible by 16, or aligned copies are taken.

    Parameters
    ----------
    direction
        One of the three directions of a convolution.
    dtype
        Of all arrays.
    bias, relu
        What is fused behind a forward convolution. A ReLU comes with a bias: only together they have compiled engines.
    workspace_limit
        Largest workspace that is acceptable [B], None for any.
    tuned
        Whether the plan was, or is to be, chosen by measurement.
    """

    direction: str
    dtype: str
    shapes: Shapes
    arithmetic: Arithmetic
    bias: bool = False
    relu: bool = False
    workspace_limit: int | None = None
    tuned: bool = False

    def __post_init__(self) -> None:
        if self.relu and not self.bias:
            raise AssertionError("a fused ReLU needs a bias, of zeros if need be")

    @property
    def uids(self) -> tuple[int, ...]:
        """The tensors of the graph, in order."""
        return (X, W, Y, BIAS) if self.bias else (X, W, Y)

    @property
    def text(self) -> str:
        """One line of JSON, the same in every process."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def describe(self) -> str:
        """For messages: dtype, extents (N, C, spatial...), and the window."""
        s = self.shapes
        padding = tuple(zip(s.before, s.behind))
        fused = " + bias" * self.bias + " + relu" * self.relu
        return (
            f"{self.dtype} x {s.x.dims}, w {s.w.dims}, y {s.y.dims}{fused}, stride {s.stride}, padding {padding}, "
            f"dilation {s.dilation}"
        )

    def remedy(self) -> str:
        """What may be allowed to have more plans to choose from."""
        allowed = []
        if self.workspace_limit is not None:
            allowed.append(f"a workspace above {self.workspace_limit} B")
        if self.arithmetic.deterministic:
            allowed.append("nondeterministic sums")
        if self.dtype == "float32" and self.arithmetic.precision == "strict":
            allowed.append("precision tf32")
        return f"allow {' or '.join(allowed)}, or use another dtype" if allowed else "use another dtype"


def convolution(frontend: Frontend, key: PlanKey, where: Mapping[str, Any]) -> Any:
    """The graph of a convolution, without plans yet. `where` is ``{"handle": ...}`` or ``{"device_property": ...}``."""
    io = frontend.data_type(key.dtype)
    sums = frontend.data_type("float64" if key.dtype == "float64" else "float32")
    graph = frontend.module.pygraph(io_data_type=io, intermediate_data_type=sums, compute_data_type=sums, **where)

    def tensor(uid: int, t: Tensor, name: str) -> Any:
        return graph.tensor(name=name, dim=list(t.dims), stride=list(t.strides), data_type=io, uid=uid)

    s = key.shapes
    window = {
        "pre_padding": list(s.before),
        "post_padding": list(s.behind),
        "stride": list(s.stride),
        "dilation": list(s.dilation),
    }
    if key.direction == FORWARD:
        out, made = graph.conv_fprop(tensor(X, s.x, "x"), tensor(W, s.w, "w"), **window), s.y
        if key.bias:
            out = graph.bias(input=out, bias=tensor(BIAS, _vector(s.y), "b"))
        if key.relu:
            out = graph.relu(out)
    elif key.direction == BACKWARD_DATA:
        out, made = graph.conv_dgrad(tensor(Y, s.y, "dy"), tensor(W, s.w, "w"), **window), s.x
    else:
        out, made = graph.conv_wgrad(tensor(X, s.x, "x"), tensor(Y, s.y, "dy"), **window), s.w
    out.set_output(True).set_data_type(io).set_dim(list(made.dims)).set_stride(list(made.strides))
    out.set_uid(_OUTPUT[key.direction])
    return graph


def _vector(y: Tensor) -> Tensor:
    """One value per channel of `y`."""
    return Tensor.packed((1, *(1 for _ in y.dims[2:]), y.dims[1]))


@dataclass(frozen=True)
class Built:
    """An execution plan that is ready to be launched.

    Attributes
    ----------
    index
        Its place among the candidates; -1 for one restored from disk.
    name
        Engine and its settings, e.g. ``eng62_k2=..``.
    workspace_bytes
        What it needs while it runs [B].
    launch
        Runs it on a table of addresses, workspace and handle; belongs to its graph's latest built plan only.
    graph
        What is saved on disk.
    compiled
        Whether a compiler ran when it was built.
    """

    index: int
    name: str
    workspace_bytes: int
    launch: Launch
    graph: Any
    compiled: bool


class Candidates:
    """The plans that cuDNN proposes for a convolution, in its order, built when asked for. Local.

    Raises
    ------
    KernelError
        If it proposes none.
    """

    def __init__(self, frontend: Frontend, key: PlanKey, where: Mapping[str, Any]) -> None:
        self.frontend, self.key = frontend, key
        self._last = ""
        try:
            self._graph = convolution(frontend, key, where)
            frontend.plan(self._graph, key.arithmetic.refused(key.dtype), key.workspace_limit)
            self._count = int(self._graph.get_execution_plan_count())
        except KernelError:
            raise
        except Exception as error:  # cudnnGraphNotSupportedError, RuntimeError, ValueError
            raise self.none(one_line(error)) from error

    def none(self, reason: str = "") -> KernelError:
        """The error that says that there is no plan, and why."""
        reason = reason or self._last or "no engine is left"
        return KernelError(
            f"conv {self.key.direction}: expected a convolution that cuDNN {self.frontend.cudnn_version} has a plan "
            f"for, got {self.key.describe()}: {reason}; {self.key.remedy()}"
        )

    def all(self, start: int = 0) -> Iterator[Built]:
        """Those that can be built, from the candidate of number `start` on."""
        for index in range(start, self._count):
            built = self.build(index)
            if built is not None:
                yield built

    def each_engine(self) -> Iterator[Built]:
        """Those that can be built: the first of every engine in cuDNN's order, then the second of every engine, ...

        cuDNN lists an engine with many settings of its knobs one after the other, which differ little.
        """
        turns: dict[str, int] = {}
        order = []
        for index in range(self._count):
            engine = self._name(index).split("_", 1)[0]
            turns[engine] = turns.get(engine, -1) + 1
            order.append((turns[engine], index))
        for _, index in sorted(order):
            built = self.build(index)
            if built is not None:
                yield built

    def named(self, name: str) -> Built | None:
        """The candidate of this name, built, or None."""
        for index in range(self._count):
            if self._name(index) == name:
                return self.build(index)
        return None

    def build(self, index: int) -> Built | None:
        """Build a candidate, or build one again, so that its graph launches it; None if it cannot be."""
        graph = self._graph
        try:
            graph.build_plan_at_index(index)
            nbytes = int(graph.get_workspace_size_plan_at_index(index))
            launch = self.frontend.launcher(graph, self.key.uids)
            compiled = self.frontend.compiled_at_run_time(graph, index)
        except Exception as error:  # refused by a filter, or not supported after all
            self._last = one_line(error)
            return None
        return Built(index, self._name(index), nbytes, launch, graph, compiled)

    def _name(self, index: int) -> str:
        try:
            return str(self._graph.get_plan_name_at_index(index))
        except Exception:  # only needed to find it again
            return f"plan {index}"
