"""Dense layers, for samples without spatial axes.

Instead of summing ``units * F`` gradients, the ranks can gather ``(F + units) * N`` activations and errors, and each of
them then computes the weight gradient of all `N` samples (:func:`lower_replicated`)::

    forward    x    all-gather, started; y of this rank's samples
    backward   dx   of this rank's samples; dy is kept
               dy   all-gather, started when backward is over
    later      dw   = dy^T x of all samples, when the layer is needed next (`program/gradients.py`)

References: Lee et al. 2017, Section III-C2 and Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..dtensor import Box, Groups
from ..kernels.access import reads, writes
from ..kernels.kernel import FusedActivation
from ..lowering.context import Context, Lowered
from ..lowering.operations import Sum
from .activation import activated
from .layer import Layer, Passes, Shape
from .lowering import cuts_channels, lower_contraction
from .parameter import Parameter, lower_weight_norm, with_lengths

__all__ = ["Dense", "RowGather", "padded_rows"]


class Dense(Layer):
    """Dense layer ``y = x w^T + b`` on samples without spatial axes: ``(N, F)`` -> ``(N, units)``.

    Parameters
    ----------
    units
        Number of outputs.
    bias
        Whether to add a bias.
    activation
        None; a name (``"relu"``, ``"silu"``, ...) or a layer: the activation is a layer after this one.
    weight_norm
        As in :class:`Conv`, with one length per unit. Such a layer cannot have replicated gradients.

    Notes
    -----
    Weights ``(units, F)``, whole on every rank; the samples are spread over all ranks.
    Communication per process: only the sum of the weights' gradients over all ranks, or the all-gathers that replace
    it (:mod:`halograd.layers.dense`). If units or features are cut (:mod:`halograd.layers.lowering`), a
    rank holds a block of the weights, and the samples are spread over the other axes of the process grid.
    """

    recomputation = "block"
    passes = Passes()
    cuts_channels = "contracts"
    weight_norm = False
    inputs_taken = 1

    def __init__(
        self,
        units: int,
        bias: bool = True,
        activation: str | Layer | None = None,
        weight_norm: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if units < 1:
            raise ValueError(f"Dense: units must be at least 1, got {units}")
        self.units, self.bias = units, bias
        activated(self, activation, by_input=None)
        if weight_norm:
            self.weight_norm, self.cuts_channels = True, "no"

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if len(shape) != 1:
            raise ValueError(
                f"Dense: expected samples of shape (F,), got {shape}; put Flatten or GlobalAveragePool before it, "
                "or use Conv(units, 1) to apply it at every position"
            )
        return (self.units,)

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        (features,) = shapes[0]
        w = Parameter((self.units, features), "he", features, channel_axis=0, input_axis=1)
        parameters = {"w": w, "b": Parameter((self.units,), decay=False, channel_axis=0)} if self.bias else {"w": w}
        return with_lengths(parameters) if self.weight_norm else parameters

    def flops(self, *shapes: Shape) -> int:
        return 2 * self.units * shapes[0][0]

    def of_filters(self, filters: int) -> Layer:
        return self.changed(units=filters)

    def lower(self, context: Context) -> Lowered:
        return lower_weight_norm(context, self._lower) if self.weight_norm else self._lower(context)

    def _lower(self, context: Context) -> Lowered:
        if cuts_channels(context.parts):
            return lower_contraction(context, _DenseKernels())
        if context.options.get("weight_gradient") == "replicated":
            return lower_replicated(context)
        # No communication: input and output have their samples on the same ranks. Inputs are copied if not packed.
        x = context.gather(0, context.needed(0))
        x.start()
        x.finish()
        w = context.params["w"]
        kernel = context.kernel(_forward, x=x.view, w=w, b=context.params.get("b"), y=context.y)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            dy, grads = context.dy, {"dw": context.grads["w"], "db": context.grads.get("b")}
            context.run(context.kernel(_filter, x=x.view, dy=dy, **grads), timing=context.timing("backward_filter"))
            if context.needs_gradient(0):
                data = context.kernel(_data, dy=dy, w=w, dx=context.gradient(0))
                context.run(data, timing=context.timing("backward_data"))

        return Lowered(backward)


class _DenseKernels:
    """Kernels on blocks of units and of input features (model parallelism)."""

    # The arrays define these products, so boxes are not needed; activations are layers, so `f` is None.

    def forward(self, x: Box, y: Box, f: FusedActivation | None) -> Callable[..., Any]:
        return _forward

    def filter(self, x: Box, y: Box) -> Callable[..., Any]:
        return _filter

    def data(self, x: Box, y: Box) -> Callable[..., Any]:
        return _data


@reads("x", "w", "b")
@writes("y")
def _forward(environment: Any, x: Any, w: Any, b: Any, y: Any) -> Any:
    return environment.kernels.dense_forward(x, w, b, y)


@reads("x", "dy")
@writes("dw", "db")
def _filter(environment: Any, x: Any, dy: Any, dw: Any, db: Any) -> Any:
    return environment.kernels.dense_backward_filter(x, dy, dw, db)


@reads("dy", "w")
@writes("dx")
def _data(environment: Any, dy: Any, w: Any, dx: Any) -> Any:
    return environment.kernels.dense_backward_data(dy, w, dx)


def lower_replicated(context: Context) -> Lowered:
    """Lower a dense layer on this rank's samples, with the all-gathers for the weight gradient of the whole batch."""
    layout, (features,), units = context.output.layout, context.shapes[0], context.output.layout.shape[1]
    # Only the ranks that the layer's parts use hold the weights.
    ranks = math.prod(context.parts.values())
    holders = Groups.agreeing((ranks,), (), context.size)  # one group
    rows = padded_rows(int(layout.boxes.extents[0].max()), (features, units), context.dtype.itemsize)
    first = context.rank * rows
    # No communication: input and output have their samples on the same ranks. Inputs are copied if not packed.
    x = context.gather(0, context.needed(0))
    x.start()
    x.finish()

    def own(length: int) -> int:
        """Return the size of this rank's rows of `length` elements, with their padding [B]."""
        return rows * length * context.dtype.itemsize

    kernel = context.kernel(partial(ReplicatedDense, first), x=x.view, y=context.y, **context.params)
    for name, what, length in (("rows", "x", features), ("errors", "dy", units)):
        # Other ranks hold no weights, and take no part in the gather.
        count = ranks * rows if context.rank < ranks else 0
        # Kept, because a gather may still write it when the pass is over, and rows of padding stay 0.
        array = context.keep((count, length), context.dtype, "replicated gradient")
        kernel.add(**{name: array})
        sizes, label = [ranks * own(length)], f"{context.name} {what}"
        whole = array.reshape(array.size)
        kernel.sums[f"{name}_gather"] = Sum(holders, whole, sizes, "replicated_dense", label, "all_gather")
    # The time includes the copy of this rank's rows, which are sent; in backward that of its errors.
    context.run(kernel, "forward", timing=context.timing("forward", copied=own(features)))

    def backward() -> None:
        kernel.add(dy=context.dy, dw=context.grads["w"], db=context.grads.get("b"))
        kernel.add(dx=context.gradient(0) if context.needs_gradient(0) else None)
        context.run(kernel, "backward", timing=context.timing("backward_data", copied=own(units)))

    return Lowered(backward, exposed=kernel)


class ReplicatedDense:
    """Kernels of a dense layer that can compute the weight gradient of the whole batch on every rank.

    `replicates` chooses the weight gradient. False: `backward` computes that of this rank's samples, which is summed
    over the ranks as usual. True: `backward` only copies the errors; their gather and :meth:`whole_gradient`, which
    computes the gradient of the whole batch, must follow (`halograd.program.gradients`).

    Attributes
    ----------
    name
        Name of the layer.
    replicates
        Whether this rank computes the gradient of the whole batch. It may change between steps, on all ranks together.

    Notes
    -----
    One matrix product adds up the gradients of parameters in the order of the samples. Every rank computes the same
    product of the same data: with the same kernels and number of threads all ranks get the same bits.

    Memory per process in addition to the layer's own: about ``(F + units) * N`` elements, ``"replicated gradient"``.
    """

    def __init__(self, first: int, environment: Any, **arrays: Any) -> None:
        self.name, self.mode, self.replicates = environment.name, environment.mode, True
        kernels, get = environment.kernels, arrays.get
        x, w, dy = arrays["x"], arrays["w"], get("dy")
        self.kernel = kernels.dense_forward(x, w, get("b"), arrays["y"])
        self.rows: RowGather | None = None
        self.errors: RowGather | None = None
        self.whole: Any = None
        self.filter: Any = None
        self.data: Any = None
        # There is no backward pass, as in evaluation.
        if dy is None:
            return
        dw, db = arrays["dw"], get("db")
        self.filter = kernels.dense_backward_filter(x, dy, dw, db)
        if get("dx") is not None:
            self.data = kernels.dense_backward_data(dy, w, arrays["dx"])
        # None on a rank that holds no weights, and takes no part in the gathers.
        if arrays["rows_gather"] is not None:
            self.rows = RowGather(arrays["rows"], arrays["rows_gather"], x, first)
            self.errors = RowGather(arrays["errors"], arrays["errors_gather"], dy, first)
            self.whole = kernels.dense_backward_filter(arrays["rows"], arrays["errors"], dw, db)

    @reads("x", "w", "b")
    @writes("y", "rows")
    def forward(self) -> None:
        if self.rows is not None:
            # The gather of an abandoned step may still read the array.
            self.rows.finish()
            if self.replicates and self.mode.training:
                self.rows.put()
                self.rows.start()
        # Rows that were sent travel during this kernel, and during the layers after it.
        self.kernel()

    @reads("x", "w", "dy", "rows", "dw", "db")
    @writes("dx", "dw", "db", "rows", "errors")
    def backward(self) -> None:
        if not self.replicates:
            self.filter()
        elif self.rows is not None and self.errors is not None:
            if not self.rows.under_way:  # the forward pass was not in training mode
                self.rows.put()
                self.rows.start()
            self.errors.put()  # a copy, because other layers overwrite the memory of `dy`
        if self.data is not None:
            self.data()

    @reads("rows", "errors")
    @writes("dw", "db")
    def whole_gradient(self) -> None:
        """Compute the gradient of the whole batch, after the gathers of activations and errors. Local."""
        if self.whole is not None:
            self.whole()

    def abandon(self) -> None:
        """Wait for active gathers, and discard their results. Collective."""
        for gather in (self.rows, self.errors):
            if gather is not None:
                gather.finish()

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernel in (self.kernel, self.filter, self.data, self.whole):
            if kernel is not None:
                kernel.close()


_LINE = 64  # [B]: cache line; parts of an all-gather are whole cache lines


class RowGather:
    """All-gather of the rows ``(n, features)`` of all ranks of a group. Collective over the group.

    ::

        gather.put()       # copy this rank's rows; their source may be overwritten afterwards
        gather.start()     # send them; does not wait
        ...                # compute
        gather.finish()    # `array` holds the rows of all ranks

    Parameters
    ----------
    array
        Array ``(ranks * rows, features)``: the rows of rank r begin at ``r * rows``, followed by zeros. `put` writes
        the rows of this rank, the gather those of the others.
    gather
        All-gather of the flat array.
    own
        This rank's rows, ``(n, features)`` with ``n <= rows``, packed; only :meth:`put` reads them.
    first
        Index of this rank's first row in the array.

    Notes
    -----
    Communication per process: it contributes ``rows * features * itemsize`` bytes, counted under
    ``"replicated_dense"``, and receives ``ranks - 1`` times as much.
    """

    def __init__(self, array: Any, gather: Any, own: Any, first: int) -> None:
        self.array, self._gather, self._own = array, gather, own
        self._own_rows = array[first : first + own.shape[0]]

    def put(self) -> None:
        """Copy this rank's rows into the array. Local."""
        self._own_rows[...] = self._own

    def start(self) -> None:
        """Send this rank's rows. Does not wait."""
        self._gather.start()

    @property
    def under_way(self) -> bool:
        """Whether rows have been sent and :meth:`finish` has not run yet."""
        return self._gather.under_way

    def finish(self) -> None:
        """Wait until all rows have arrived; return at once if no gather is active."""
        self._gather.finish()


def padded_rows(most: int, features: Sequence[int], itemsize: int) -> int:
    """Return the least number of rows per rank, at least `most`, that fill whole cache lines. Pure arithmetic.

    Parameters
    ----------
    most
        Largest number of rows of any rank.
    features
        Lengths of the rows of all arrays that are gathered with this number of rows.
    itemsize
        Size of one element [B].

    Examples
    --------
    >>> padded_rows(3, [25088, 1000], 4)
    4
    """
    line = max(1, _LINE // itemsize)
    # Multiples of `step` rows fill whole lines for every length n.
    step = math.lcm(*(line // math.gcd(line, n) for n in features))
    return -(-most // step) * step
