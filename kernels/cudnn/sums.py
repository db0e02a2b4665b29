"""Convolutions with the sums of a batch norm in their epilogue, as one plan of cuDNN or as two kernels.

Forward: ``y = conv(x, w) + b`` with ``sum y`` and ``sum y^2`` per channel. Backward, for a convolution that reads the
output of a batch norm with or without ReLU: ``dy' = relu'(gamma xhat + beta) conv'(dy, w)`` with ``sum dy'`` and
``sum dy' xhat``, where ``xhat = (x - mean) / sqrt(var + eps)``. This saves a pass over the array that is written.

cuDNN compiles these plans when they are built, which takes 0.5 to 5 s, so they are stored. They are taken only where
they are faster than the two kernels, by measurement. Sums are in float32, and converted for sums over ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..geometry import Geometry
from ..kernel import BatchNormArrays, Kernel, KernelError, chain
from .conv import ConvSettings, Operands, data_gradient, of_group, planned, shapes_of
from .frontend import Frontend, one_line
from .graphs import BIAS, Arithmetic, GraphKey, Shapes, Tensor, W, X, Y, vector_of, window_of

__all__ = ["BACKWARD_SUMS", "FORWARD_SUMS", "SumsKey", "backward_data", "faster", "forward"]

_log = logging.getLogger("halograd.kernels")

FORWARD_SUMS, BACKWARD_SUMS = "forward with sums", "backward data with sums"
#: Numbers of the other tensors in the graphs: both sums, and the arrays of the norm.
# After those of a convolution (X, W, Y, BIAS), which these graphs use as well.
FIRST, SECOND, NORMED, MEAN, VAR, EPS, GAMMA, BETA = range(5, 13)


@dataclass(frozen=True)
class SumsKey(GraphKey):
    """Key of the plan of a convolution with sums.

    Parameters
    ----------
    direction
        `FORWARD_SUMS` or `BACKWARD_SUMS`.
    dtype
        Dtype of the images; sums and vectors of the norm are float32.
    bias
        Whether a bias is added (forward).
    relu
        Whether the norm has a ReLU (backward).
    """

    direction: str
    dtype: str
    shapes: Shapes
    arithmetic: Arithmetic
    bias: bool = False
    relu: bool = False
    workspace_limit: int | None = None
    tuned: bool = False
    #: A compilation takes seconds.
    compared = (3, 0)

    @property
    def uids(self) -> tuple[int, ...]:
        """Numbers of the tensors of the graph."""
        if self.direction == FORWARD_SUMS:
            return (X, W, Y, BIAS, FIRST, SECOND) if self.bias else (X, W, Y, FIRST, SECOND)
        norm = (NORMED, MEAN, VAR, EPS, GAMMA, BETA) if self.relu else (NORMED, MEAN, VAR, EPS)
        return (X, W, Y, FIRST, SECOND, *norm)

    @property
    def what(self) -> tuple[str, str]:  # type: ignore[override]
        return f"conv {self.direction}", "a convolution and sums"

    def graph(self, frontend: Frontend, where: Mapping[str, Any]) -> Any:
        graph = _Graph(frontend, self.dtype, where)
        (graph.forward if self.direction == FORWARD_SUMS else graph.backward)(self)
        return graph.graph

    def describe(self) -> str:
        """Return a string for messages: dtype and extents (N, C, spatial...)."""
        s = self.shapes
        more = " + bias" * self.bias + " + relu" * self.relu
        return f"{self.dtype} x {s.x.dims}, w {s.w.dims}, y {s.y.dims}{more}, stride {s.stride}, dilation {s.dilation}"


class _Graph:
    """A graph in construction: images (and a bias) in the dtype of the key, other vectors of channels in float32."""

    def __init__(self, frontend: Frontend, dtype: str, where: Mapping[str, Any]) -> None:
        self.low, self.full = frontend.data_type(dtype), frontend.data_type("float32")
        self.add = frontend.module.reduction_mode.ADD
        self.graph = frontend.module.pygraph(
            io_data_type=self.low, intermediate_data_type=self.full, compute_data_type=self.full, **where
        )

    def forward(self, key: SumsKey) -> None:
        s, graph = key.shapes, self.graph
        y = graph.conv_fprop(self._image(X, s.x), self._image(W, s.w), **window_of(s))
        if key.bias:
            y = graph.bias(input=y, bias=self._tensor(BIAS, vector_of(s.y), self.low))
        # The sums may read y in float32, before it is rounded; see `conv_forward_sums`.
        self._write(Y, y, s.y, self.low)
        self._write_sum(FIRST, y, s.y)
        self._write_sum(SECOND, graph.mul(a=y, b=y), s.y)

    def backward(self, key: SumsKey) -> None:
        s, graph = key.shapes, self.graph
        dx = graph.conv_dgrad(self._image(Y, s.y), self._image(W, s.w), **window_of(s))
        # The frontend infers no extents of a data gradient: with a stride they are ambiguous.
        dx.set_dim(list(s.x.dims)).set_stride(list(s.x.strides))
        number = Tensor.packed((1,) * len(s.x.dims))
        # xhat is computed again from the input of the norm, as in our own kernels: it is kept nowhere.
        scale = graph.rsqrt(input=graph.add(a=self._vector(VAR, s.x), b=self._tensor(EPS, number, self.full)))
        normed = graph.mul(a=graph.sub(a=self._image(NORMED, s.x), b=self._vector(MEAN, s.x)), b=scale)
        if key.relu:
            scaled = graph.mul(a=normed, b=self._vector(GAMMA, s.x))
            dx = graph.relu_backward(loss=dx, input=graph.add(a=scaled, b=self._vector(BETA, s.x)))
        self._write(X, dx, s.x, self.low)
        self._write_sum(FIRST, dx, s.x)
        self._write_sum(SECOND, graph.mul(a=dx, b=normed), s.x)

    def _image(self, uid: int, tensor: Tensor) -> Any:
        return self._tensor(uid, tensor, self.low)

    def _vector(self, uid: int, of: Tensor) -> Any:
        return self._tensor(uid, vector_of(of), self.full)

    def _tensor(self, uid: int, t: Tensor, dtype: Any) -> Any:
        return self.graph.tensor(name=f"t{uid}", dim=list(t.dims), stride=list(t.strides), data_type=dtype, uid=uid)

    def _write(self, uid: int, tensor: Any, t: Tensor, dtype: Any) -> None:
        tensor.set_output(True).set_data_type(dtype).set_dim(list(t.dims)).set_stride(list(t.strides))
        tensor.set_uid(uid)

    def _write_sum(self, uid: int, tensor: Any, of: Tensor) -> None:
        self._write(uid, self.graph.reduction(input=tensor, mode=self.add), vector_of(of), self.full)


def forward(
    engine: ConvSettings, x: Any, w: Any, b: Any, y: Any, sums: Any, geometry: Geometry
) -> tuple[SumsKey, Callable[[], Kernel]]:
    """Return the key of ``y = conv(x, w) + b`` and ``sums`` in one plan, and a function that returns the kernel."""
    operands = Operands(engine, x.dtype)
    channels = operands.image(X, x)
    operands.input(W, w, of_group(channels, geometry))
    operands.output(Y, y)
    if b is not None:
        operands.input(BIAS, b)
    shapes = shapes_of(x, w, y, channels, geometry)
    return _kernel(engine, operands, FORWARD_SUMS, shapes, None, sums, bias=b is not None)


def backward_data(
    engine: ConvSettings, dy: Any, w: Any, geometry: Geometry, norm: BatchNormArrays
) -> tuple[SumsKey, Callable[[], Kernel]]:
    """Return the key of the plan that computes the data gradient into ``norm.dy`` with the sums of the norm, and a
    function that returns its kernel.

    Rows that no output reads become zero, and add nothing to the sums.
    """
    # Of all activations only a ReLU arrives here, see `on_tensor_cores`.
    t, relu = norm.training, norm.activation is not None
    operands, shapes = data_gradient(engine, dy, w, norm.dy, geometry)
    operands.input(NORMED, norm.x)
    eps = engine.empty((1,), np.float32)  # an array, as the plan is compiled once for norms of any eps
    eps.fill(norm.eps)
    vectors = {MEAN: norm.mean, VAR: norm.var, EPS: eps}
    for uid, array in (vectors | ({GAMMA: norm.gamma, BETA: norm.beta} if relu else {})).items():
        operands.input(uid, array, dtype=np.float32)
    # The sums are the gradients of beta and gamma: the plan writes them there, and `sums` gets a copy.
    rows = None if t is None or t.dgamma is None else (t.dbeta, t.dgamma)
    return _kernel(engine, operands, BACKWARD_SUMS, shapes, rows, norm.sums, relu=relu)


def _kernel(
    engine: ConvSettings, operands: Operands, direction: str, shapes: Shapes, rows: Any, sums: Any, **fused: bool
) -> tuple[SumsKey, Callable[[], Kernel]]:
    """Return the key of a plan, and a function that returns the kernel of the plan with the copies around it.

    The plan writes the sums in float32 to `rows`; None: to `sums`, or to a temporary if `sums` is float64. Sums that
    are not written to `sums` are then copied there.
    """
    dtype = operands.arrays[0].dtype.name
    # The plan writes float32 straight into the caller's sums where these are float32 and no gradients are wanted.
    if rows is None and sums.dtype == np.float32:
        rows = sums
    elif rows is None:
        rows = engine.empty(sums.shape, np.float32)
        operands.nbytes += rows.nbytes
    for uid, row in zip((FIRST, SECOND), rows):
        operands.output(uid, row, dtype=np.float32)
    key = SumsKey(
        direction, dtype, shapes, engine.arithmetic, **fused, workspace_limit=engine.workspace_limit, tuned=engine.tuned
    )
    return key, partial(_around, engine, operands, key, sums)


def _around(engine: ConvSettings, operands: Operands, key: SumsKey, sums: Any) -> Kernel:
    """Return the kernel of a plan with the copies of its inputs and outputs; the last two operands are the sums.

    Runs the plan once. Raises KernelError if the device refuses it.
    """
    kernel = planned(engine, key, operands.addresses, operands.arrays, operands.nbytes)
    # Whether a plan overwrites its sums, or adds to them, is not documented: NaN stays NaN if it adds.
    written = operands.arrays[-2:]
    for row in written:
        row.fill(np.nan)
    try:
        # The first run decides, too, whether the device takes the plan: here an error still leaves the two kernels.
        for step in (*operands.before, kernel):
            step()
    except KernelError:  # the device refuses all plans
        kernel.close()
        raise
    # If NaN comes from arrays without values yet, the sums are only cleared in vain.
    before = [engine.boxes.fill(0, *written)] if any(np.isnan(float(row.sum())) for row in written) else []
    pairs = [(row, total) for row, total in zip(written, sums) if row.data.ptr != total.data.ptr]
    copies = [engine.boxes.copy(pairs)] if pairs else []
    return chain(*before, *operands.before, kernel, *operands.after, *copies)


def faster(engine: ConvSettings, separate: Kernel, key: SumsKey, fused: Callable[[], Kernel]) -> Kernel:
    """Return the faster kernel by measurement, the result of `fused` or `separate`; the other one is closed."""
    separate.impl = "two kernels"  # the same name in the file of plans, whichever engines they have
    if engine.plans.known_slower([key], separate.impl):
        return separate  # without the plan, which takes seconds to compile
    try:
        kernel = fused()
    except KernelError as error:
        _log.debug("kernels: sums in kernels of their own: %s", one_line(error))
        return separate
    try:
        slower = engine.plans.faster([key], kernel, separate)
    except KernelError as error:
        _log.debug("kernels: sums in kernels of their own: %s", one_line(error))
        kernel.close()
        return separate
    other = kernel if slower else separate
    other.close()
    return separate if slower else kernel
