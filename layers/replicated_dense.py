"""Dense layers whose weight gradient every rank computes of the whole batch, so that it need not be summed.

Instead of summing ``units * F`` gradients, the ranks gather ``(F + units) * N`` activations and errors, and each of
them computes the gradient of all `N` samples. ::

    forward    x    all-gather, started; y of the own samples
    backward   dx   of the own samples; dy is kept
               dy   all-gather, started when backward is over
    later      dw   = dy^T x of all samples, when the layer is needed next (`training/reduction/replicated_dense.py`)

References: Lee et al. 2017, Section III-C2 and Algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any

from halograd.dtensor import Groups
from halograd.layers.binding import Binding
from halograd.layers.groups import in_group
from halograd.layers.operator import Operator
from halograd.layers.row_gather import RowGather, padded_rows

__all__ = ["ReplicatedDenseOperator"]


class ReplicatedDenseOperator(Operator):
    """A dense layer on its own samples, with the means to gather those of the other ranks.

    Which gradient `backward` makes is chosen with `replicates`: False, and it is that of the own samples, to be summed
    over the ranks as any other; True, and :meth:`gather_errors` and :meth:`whole_gradient` have to follow.

    Attributes
    ----------
    name
        Of the layer.
    replicates
        Whether the gradient of the whole batch is computed here; may change between steps, on all ranks alike.

    Notes
    -----
    Gradients of parameters are added up in the order of the samples by one matrix product, on every rank the same one
    on the same data: with the same kernels and number of threads all ranks get the same bits.
    Memory per process beside the layer's own: about ``(F + units) * N`` elements, ``"replicated gradient"``.
    """

    def __init__(self, b: Binding) -> None:
        self.b, self.name, self.replicates = b, b.name, True
        # No communication: input and output have their samples on the same ranks. Inputs are copied if not packed.
        self.x = b.gather(0, b.needed(0))
        self.kernel = b.kernels.dense_forward(self.x.array, b.params["w"], b.params.get("b"), b.output.array)
        self.rows: RowGather | None = None
        self.errors: RowGather | None = None

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        if self.rows is not None:
            self._gather_activations()
        self.kernel()

    def _gather_activations(self) -> None:
        """Send the activations of a training step; those of a step that was given up arrive first."""
        assert self.rows is not None
        self.rows.finish()
        if self.replicates and self.b.mode.training:
            self.rows.put()
            self.rows.start()

    def bind_backward(self) -> None:
        b = self.b
        dy, dw, db = b.output.dy, b.grads["w"], b.grads.get("b")
        self.filter = b.kernels.dense_backward_filter(self.x.array, dy, dw, db)
        self.whole: Any = None
        self.rows, self.errors = self._gather(self.x.array, f"{b.name} x"), self._gather(dy, f"{b.name} dy")
        if self.rows is not None and self.errors is not None:
            self.whole = b.kernels.dense_backward_filter(self.rows.array, self.errors.array, dw, db)
        self.data = b.kernels.dense_backward_data(dy, b.params["w"], b.gradient(0)) if b.needs_gradient(0) else None

    def _gather(self, own: Any, name: str) -> RowGather | None:
        """Of these rows of all ranks that hold the weights; None on the others."""
        b = self.b
        (features,), units = b.shapes[0], b.output.layout.shape[1]
        rows = padded_rows(int(b.output.layout.boxes.extents[0].max()), (features, units), b.dtype.itemsize)
        # The ranks that the layer's parts need hold the weights.
        holders = Groups.agreeing((math.prod(b.parts.values()),), (), b.comm.size)
        return in_group(b.comm, holders, lambda group: RowGather(group, b.memory, rows, own, name))

    def backward(self) -> None:
        if self.replicates:
            self._keep_errors()
        else:
            self.filter()
        if self.data is not None:
            self.data()

    def _keep_errors(self) -> None:
        """Copy `dy`, whose memory serves other layers soon."""
        if self.rows is None or self.errors is None:
            return
        if not self.rows.under_way:  # the forward pass was one of evaluation
            self.rows.put()
            self.rows.start()
        self.errors.put()

    def gather_errors(self) -> None:
        """Send the errors that :meth:`backward` kept. Collective; does not wait."""
        if self.errors is not None:
            self.errors.start()

    def whole_gradient(self) -> None:
        """Wait for activations and errors, and compute the gradient of the whole batch. Collective."""
        self.abandon()
        if self.whole is not None:
            self.whole()

    def abandon(self) -> None:
        """Wait for what is under way, and leave it at that. Collective."""
        for gather in (self.rows, self.errors):
            if gather is not None:
                gather.finish()
