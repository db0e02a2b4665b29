"""cuDNN graphs by key, those of convolutions among them, and the execution plans that cuDNN proposes for them.

:class:`Arithmetic` sets the permitted precision of products; :class:`Shapes` translates our packed arrays to cuDNN,
whose logical axes are (N, C, *spatial) and (K, C, *kernel). The graphs of attention are in
:mod:`halograd.kernels.cudnn.sdpa`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halograd.documents import one_line

from ..geometry import Geometry, channels_first, read_part
from ..kernel import KernelError
from .frontend import Frontend, Launch

__all__ = [
    "BACKWARD_DATA",
    "BACKWARD_FILTER",
    "BIAS",
    "FORWARD",
    "HALF",
    "PRECISIONS",
    "Arithmetic",
    "Built",
    "Candidates",
    "GraphKey",
    "PlanKey",
    "Shapes",
    "Tensor",
    "W",
    "X",
    "Y",
    "vector_of",
    "window_of",
]  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Description of an array for cuDNN: logical extents (N, C, *spatial), and strides in elements."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def packed(cls, shape: Sequence[int]) -> Tensor:
        """Return the description of a packed array ``(N, *spatial, C)`` or ``(K, *kernel, C)``."""
        return cls.leading(shape, shape[1:-1])

    @classmethod
    def leading(cls, shape: Sequence[int], spatial: Sequence[int]) -> Tensor:
        """Return the description of the leading part, of extents `spatial`, of a packed array."""
        return cls(*channels_first(shape, spatial))

    @property
    def is_packed(self) -> bool:
        """Whether the elements are contiguous."""
        n, channels, *spatial = self.dims
        return self.strides == channels_first((n, *spatial, channels))[1]


@dataclass(frozen=True)
class Shapes:
    """Description of a convolution for cuDNN.

    Attributes
    ----------
    x, w, y
        Image, weights and output, or their gradients. A 1-D convolution is a 2-D convolution with one row.
    before, after, stride, dilation
        One number per spatial axis; `before` and `after` are the paddings, at least 0.
    part
        The leading spatial extents of `x` that are read (in our array: 1-D stays 1-D).
    """

    x: Tensor
    w: Tensor
    y: Tensor
    before: tuple[int, ...]
    after: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    part: tuple[int, ...]

    @classmethod
    def of(cls, x: Sequence[int], w: Sequence[int], y: Sequence[int], geometry: Geometry) -> Shapes:
        """Return the description for arrays ``(N, *spatial, C)``, ``(K, *kernel, C / groups)`` and ``(N, *outputs,
        K)``.
        """
        # cuDNN has no negative padding: rows that no output reads are left out of the description.
        part, read = read_part(x[1:-1], geometry)
        before, after = zip(*read.padding)
        # cuDNN has no 1-D convolution: one row is added, without padding.
        rows = (1,) if geometry.ndim == 1 else ()
        none = (0,) if geometry.ndim == 1 else ()

        def lifted(shape: Sequence[int]) -> tuple[int, ...]:
            return (shape[0], *rows, *shape[1:])

        return cls(
            Tensor.leading(lifted(x), (*rows, *part)),
            Tensor.packed(lifted(w)),
            Tensor.packed(lifted(y)),
            (*none, *before),
            (*none, *after),
            (*rows, *geometry.stride),
            (*rows, *geometry.dilation),
            part,
        )


PRECISIONS = ("strict", "tf32")
HALF = ("float16", "bfloat16")

# Notes of engines that round their inputs, or that transform the sums.
_ROUNDED = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
_TRANSFORMED = ("FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")

# cublasComputeType_t; the values are part of cuBLAS's binary interface.
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77


@dataclass(frozen=True)
class Arithmetic:
    """Permitted arithmetic of an algorithm.

    Parameters
    ----------
    precision
        Precision of float32: ``"strict"`` computes plain float32 sums of float32 products; ``"tf32"`` may round the
        factors to 11 significant bits, as tensor cores need. float16 and bfloat16 are always summed in float32, float64
        in float64.
    deterministic
        Whether two runs must agree in every bit. This excludes sums by atomic addition.

    Raises
    ------
    KernelError
        If there is no such precision.
    """

    precision: str = "strict"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise KernelError(
                f"expected a precision out of {', '.join(PRECISIONS)}, got {self.precision!r}; choose one "
                "(float16 and bfloat16 are dtypes of the arrays)"
            )

    def refused(self, dtype: str) -> tuple[str, ...]:
        """Return the names of cuDNN's numerical notes that are not permitted for arrays of `dtype`."""
        notes: tuple[str, ...] = ()
        if dtype == "float32" and self.precision == "strict":
            notes = _ROUNDED + _TRANSFORMED
        elif dtype in HALF:
            # Of engines that sum 16-bit products in less than float32.
            notes = ("REDUCED_PRECISION_REDUCTION",)
        return (*notes, "NONDETERMINISTIC") if self.deterministic else notes

    def describe(self, dtype: str) -> str:
        """Describe the arithmetic of float32 products, and how to change it; empty for other dtypes."""
        if dtype != "float32":
            return ""
        if self.precision == "tf32":
            return 'float32 on tensor cores (TF32: factors of 11 bits; backend.precision = "strict" for plain float32)'
        return 'float32 without tensor cores (backend.precision = "tf32" to use them: factors of 11 bits)'

    def compute_type(self, dtype: str) -> int:
        """Return the compute type of cuBLAS (``cublasComputeType_t``) for arrays of `dtype`."""
        if dtype == "float64":
            return _COMPUTE_64F
        return _COMPUTE_TF32 if dtype == "float32" and self.precision == "tf32" else _COMPUTE_32F


#: Numbers of the tensors in every graph.
X, W, Y, BIAS = 1, 2, 3, 4
FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "forward", "backward data", "backward filter"
_OUTPUT = {FORWARD: Y, BACKWARD_DATA: X, BACKWARD_FILTER: W}


class GraphKey(ABC):
    """Everything that a plan depends on, except the device and the versions of the libraries.

    Subclasses are frozen dataclasses.

    Attributes
    ----------
    direction
        Operation, for messages and tables.
    dtype
        Dtype of the arrays.
    workspace_limit
        Largest acceptable workspace [B], None: no limit.
    tuned
        Whether the plan is chosen by measurement.
    compared
        Numbers of plans that are measured: first in cuDNN's order, then of the fastest engine. cuDNN lists an engine
        with many settings in sequence, whose times differ by 5-30 %; engines for older devices come late.
    what
        Kernel, and what it computes, for messages.
    """

    direction: str
    dtype: str
    arithmetic: Arithmetic
    workspace_limit: int | None
    tuned: bool
    compared = (16, 8)
    what: tuple[str, str]

    @property
    @abstractmethod
    def uids(self) -> tuple[int, ...]:
        """Numbers of the tensors of the graph."""

    @abstractmethod
    def graph(self, frontend: Frontend, where: Mapping[str, Any]) -> Any:
        """Return the graph, without plans. `where` is ``{"handle": ...}`` or ``{"device_property": ...}``."""

    @abstractmethod
    def describe(self) -> str:
        """Return a string for messages: dtype, extents, options."""

    @property
    def text(self) -> str:
        """The key as one line of JSON, the same in every process."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))  # type: ignore[call-overload]

    def remedy(self) -> str:
        """Return which options the user can relax to get more plans."""
        allowed = []
        if self.workspace_limit is not None:
            allowed.append(f"a workspace above {self.workspace_limit} B")
        if self.arithmetic.deterministic:
            allowed.append("nondeterministic sums")
        if self.dtype == "float32" and self.arithmetic.precision == "strict":
            allowed.append("precision tf32")
        return f"allow {' or '.join(allowed)}, or use another dtype" if allowed else "use another dtype"


@dataclass(frozen=True)
class PlanKey(GraphKey):
    """Key of the plan of a convolution.

    Addresses are not part of the key: all are divisible by 16, or aligned copies are used.

    Parameters
    ----------
    direction
        `FORWARD`, `BACKWARD_DATA` or `BACKWARD_FILTER`.
    dtype
        Dtype of all arrays.
    bias, relu
        Operations fused after a forward convolution. A ReLU comes with a bias: only both together have compiled
        engines.
    workspace_limit
        Largest acceptable workspace [B], None: no limit.
    tuned
        Whether the plan is chosen by measurement.
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
        """Numbers of the tensors of the graph."""
        return (X, W, Y, BIAS) if self.bias else (X, W, Y)

    @property
    def what(self) -> tuple[str, str]:  # type: ignore[override]
        return f"conv {self.direction}", "a convolution"

    def graph(self, frontend: Frontend, where: Mapping[str, Any]) -> Any:
        return convolution(frontend, self, where)

    def describe(self) -> str:
        """Return a string for messages: dtype, extents (N, C, spatial...), and the window."""
        s = self.shapes
        padding = tuple(zip(s.before, s.after))
        fused = " + bias" * self.bias + " + relu" * self.relu
        return (
            f"{self.dtype} x {s.x.dims}, w {s.w.dims}, y {s.y.dims}{fused}, stride {s.stride}, padding {padding}, "
            f"dilation {s.dilation}"
        )


def convolution(frontend: Frontend, key: PlanKey, where: Mapping[str, Any]) -> Any:
    """Return the graph of a convolution, without plans. `where` is ``{"handle": ...}`` or ``{"device_property": ...}``.
    """
    io = frontend.data_type(key.dtype)
    # Sums, and what one operation passes to the next, are float32 for every dtype of the arrays.
    sums = frontend.data_type("float32")
    graph = frontend.module.pygraph(io_data_type=io, intermediate_data_type=sums, compute_data_type=sums, **where)

    def tensor(uid: int, t: Tensor, name: str) -> Any:
        return graph.tensor(name=name, dim=list(t.dims), stride=list(t.strides), data_type=io, uid=uid)

    s = key.shapes
    window = window_of(s)
    if key.direction == FORWARD:
        out, result = graph.conv_fprop(tensor(X, s.x, "x"), tensor(W, s.w, "w"), **window), s.y
        if key.bias:
            out = graph.bias(input=out, bias=tensor(BIAS, vector_of(s.y), "b"))
        if key.relu:
            out = graph.relu(out)
    elif key.direction == BACKWARD_DATA:
        out, result = graph.conv_dgrad(tensor(Y, s.y, "dy"), tensor(W, s.w, "w"), **window), s.x
    else:
        out, result = graph.conv_wgrad(tensor(X, s.x, "x"), tensor(Y, s.y, "dy"), **window), s.w
    # Extents are needed for gradients, from which the frontend cannot infer them.
    out.set_output(True).set_data_type(io).set_dim(list(result.dims)).set_stride(list(result.strides))
    out.set_uid(_OUTPUT[key.direction])
    return graph


def window_of(s: Shapes) -> dict[str, list[int]]:
    """Return padding, stride and dilation as arguments of the frontend."""
    padding = {"pre_padding": list(s.before), "post_padding": list(s.after)}
    return {**padding, "stride": list(s.stride), "dilation": list(s.dilation)}


def vector_of(y: Tensor) -> Tensor:
    """Return the description of one value per channel of `y`."""
    # (N, spatial..., C) of 1, ..., 1, C: cuDNN broadcasts it over samples and positions.
    return Tensor.packed((1, *(1 for _ in y.dims[2:]), y.dims[1]))


@dataclass(frozen=True)
class Built:
    """An execution plan that is ready to launch.

    Attributes
    ----------
    index
        Index among the candidates; -1 for a plan restored from disk.
    name
        Engine and its settings, e.g. ``eng62_k2=..``.
    workspace_bytes
        Workspace of a run [B].
    launch
        Function that runs the plan last built on the graph, on a table of addresses, a workspace and a handle.
    graph
        The graph, which is saved on disk.
    compiled
        Whether the build ran a compiler.
    """

    index: int
    name: str
    workspace_bytes: int
    launch: Launch
    graph: Any
    compiled: bool


class Candidates:
    """The plans that cuDNN proposes for a graph, in its order; each is built on request. Local.

    Raises
    ------
    KernelError
        If cuDNN proposes no plan.
    """

    def __init__(self, frontend: Frontend, key: GraphKey, where: Mapping[str, Any]) -> None:
        self.frontend, self.key = frontend, key
        self._last = ""
        try:
            self._graph = key.graph(frontend, where)
            frontend.plan(self._graph, key.arithmetic.refused(key.dtype), key.workspace_limit)
            self._count = int(self._graph.get_execution_plan_count())
        # It has the remedy already.
        except KernelError:
            raise
        except Exception as error:  # cudnnGraphNotSupportedError, RuntimeError, ValueError
            raise self.none(one_line(error)) from error

    def __len__(self) -> int:
        return self._count

    def none(self, reason: str = "") -> KernelError:
        """Return the error for a graph without a plan; without `reason` it gives the last fault of a build."""
        reason = reason or self._last or "no engine is left"
        kernel, computed = self.key.what
        return KernelError(
            f"{kernel}: expected {computed} with a plan in cuDNN {self.frontend.cudnn_version}, "
            f"got {self.key.describe()}: {reason}; {self.key.remedy()}"
        )

    def all(self, start: int = 0) -> Iterator[Built]:
        """Yield the candidates that can be built, from number `start` on."""
        for index in range(start, self._count):
            built = self.build(index)
            if built is not None:
                yield built

    def named(self, name: str) -> Built | None:
        """Return the candidate of this name, built, or None."""
        for index in range(self._count):
            if self.name(index) == name:
                return self.build(index)
        return None

    def build(self, index: int) -> Built | None:
        """Build a candidate so that its graph launches it, even if it was built before. Return None if the build fails.
        """
        graph = self._graph
        try:
            # This also makes the plan the one that the graph executes.
            graph.build_plan_at_index(index)
            nbytes = int(graph.get_workspace_size_plan_at_index(index))
            launch = self.frontend.launcher(graph, self.key.uids)
            compiled = self.frontend.compiled_at_run_time(graph, index)
        except Exception as error:  # refused by a filter, or not supported
            self._last = one_line(error)
            return None
        return Built(index, self.name(index), nbytes, launch, graph, compiled)

    def name(self, index: int) -> str:
        """Return the name of a candidate: its engine and settings."""
        try:
            return str(self._graph.get_plan_name_at_index(index))
        except Exception:  # needed only to find the plan again
            return f"plan {index}"
