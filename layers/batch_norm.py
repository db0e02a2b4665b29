"""Batch normalization, with statistics of one block, of the ranks that share samples, or of all ranks.

If the output is wide, it has a margin: elements that other ranks own, normalized by the same mean and variance. The
kernels of the norm read the owned box only, so that each element enters the sums once, in the same order as without a
margin. Further kernels normalize the margin, which is a few thin boxes, and compute its gradients. ::

    +---------------+
    |     margin    |      owned: statistics, forward, sums of the gradients, backward
    +---+-------+---+      margin: forward by the mean and variance of the group; backward by the sums of the group
    |   | owned |   |
    +---+-------+---+
    |               |
    +---------------+
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..device import is_low
from ..dtensor import Blocks, Box, Groups, sample_groups
from ..kernels.access import Access, again, makes, reads, writes
from ..kernels.kernel import BatchNormArrays, BatchNormKernels, BatchNormTraining, FusedActivation
from ..kernels.memory import Workspace
from ..kernels.norm_parts import cancellation_limit, cancels, centered_squares
from ..lowering.context import Context, Gathered, Lowered
from ..lowering.operations import KernelSpec, NormSums, SumsOver, Timing
from ..lowering.views import Region, View
from .activation import activated, fused, inside
from .layer import Layer, Node, Passes, Shape
from .parameter import Parameter

__all__ = ["BatchNorm", "affine_parameters", "lower_affine"]

STATISTICS = ("global", "sample", "local")


class BatchNorm(Layer):
    """Batch normalization (Ioffe and Szegedy 2015) over samples and space, per channel.

    ``y = gamma * (x - mean) / sqrt(var + eps) + beta``, with the mean and the biased variance of the batch in training,
    and the running statistics in evaluation. Inputs may also be ``(N, C)``. A second input, of the shape of the first,
    is added before the activation: the shortcut of a residual block (He et al. 2016, Figure 2), in the same kernels.

    Parameters
    ----------
    statistics
        Elements over which training computes mean and variance: ``"global"`` (the whole batch: the result is that of
        one process), ``"sample"`` (this rank's samples, on all ranks that share them: the spatial aggregate of Dryden
        et al. 2019, Section III-B) or ``"local"`` (this rank's block). The strategy's option ``statistics`` overrides
        it.
    momentum
        Weight of the batch in the running statistics, ``running = (1 - momentum) * running + momentum * batch``
        (torch's convention).
    eps
        Number added to the variance.
    affine
        Whether to scale by `gamma` and shift by `beta`.
    activation
        None; or a name (``"relu"``, ``"silu"``, ...) or a layer, which the kernels of the norm compute. Activations
        that these kernels lack (``"softmax"``, :class:`PReLU`, a layer with a name; with a second input all but ReLU)
        become a layer after the norm.

    Notes
    -----
    Parameters `gamma`, `beta` and state `mean`, `var`, all ``(C,)``; a rank holds the values of its channels. The
    running variance averages the unbiased variance, as torch does. If statistics are not global, the running
    statistics average those of all groups of ranks, weighted by their number of elements. So they are the same on all
    ranks, and complete once `backward` (or the next `forward`) has run.

    Communication per process: with more than one rank in the group, one sum of ``2 C`` float64 forward (``sum x``,
    ``sum x^2``) and one backward (``sum dy``, ``sum dy * xhat``); evaluation none. If the group is smaller than
    that of global statistics, one more sum of that size, over the latter, for the running statistics; no layer waits
    for it before `backward`. If ``E[x^2] - E[x]^2`` would cancel more digits than the dtype allows (``mean^2 / var``
    above 4096 in float64, above 5e8 in float32), one more sum forward, of squares about the mean; on a device in
    float64 always, in float32 never.

    In training a batch must be full (`mode.valid`): a shorter batch is rejected.
    """

    recomputation = "pointwise"
    # Forward reads x for the statistics and again to normalize; backward reads x, dy for two sums, again for dx. A
    # residual is read once, and its gradient written.
    passes = Passes((2, 1), (3, 2), (1, 1))
    cuts_channels = "channelwise"
    exact_parameters = True
    widens = True

    def __init__(
        self,
        statistics: str = "global",
        momentum: float = 0.1,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | Layer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if statistics not in STATISTICS:
            raise ValueError(f"statistics: expected one of {STATISTICS}, got {statistics!r}")
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum: expected a number from 0 to 1, got {momentum!r}")
        if not eps > 0:
            raise ValueError(f"eps: expected a number > 0, got {eps!r}")
        self.statistics, self.momentum, self.eps = statistics, momentum, eps
        self.affine, self.activation = affine, activated(self, activation, by_input=True)

    def __call__(self, *inputs: Node) -> Node:
        node, after = super().__call__(*inputs), inside(self)
        if after is None or self.fused(len(inputs)) is not None:
            return node
        after.name = self.name and f"{self.name}_{self.activation}"
        return after(node)

    def fused(self, inputs: int) -> FusedActivation | None:
        """Return the activation in the kernels of a layer with this number of inputs.

        With a second input this can only be ReLU. Any other activation is a layer after the norm: then the gradient of
        the second input is that of the norm's output, which needs no further array.
        """
        return None if inputs > 1 and self.activation != "relu" else fused(self)

    @property
    def of_batch(self) -> str:
        return "its statistics"

    def output_shape(self, *shapes: Shape) -> Shape:
        if len(shapes) not in (1, 2) or len(set(shapes)) > 1:
            texts = ", ".join(map(str, shapes)) or "none"
            raise ValueError(f"BatchNorm: expected one input, or a second of the same shape to add, got {texts}")
        return shapes[0]

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return affine_parameters(shapes[0][-1]) if self.affine else {}

    def state(self, *shapes: Shape) -> Mapping[str, Parameter]:
        shape = (shapes[0][-1],)
        return {
            "mean": Parameter(shape, "zeros", decay=False, channel_axis=0),
            "var": Parameter(shape, "ones", decay=False, channel_axis=0),
        }

    def flops(self, *shapes: Shape) -> int:
        return (6 + len(shapes)) * math.prod(shapes[0])

    def of_statistics(self, ranks: int, options: Mapping[str, Any]) -> tuple[Layer, bool]:
        sums = ranks > 1 and options.get("statistics", self.statistics) != "local"
        statistics = "global" if sums else "local"
        return self if self.statistics == statistics else self.changed(statistics=statistics), sums

    def may_widen(self, inputs: int, parts: Mapping[str, int], options: Mapping[str, Any]) -> bool:
        # In a margin, the statistics of another rank's block would be needed.
        own = options.get("statistics", self.statistics) == "local"
        return not own and super().may_widen(inputs, parts, options)

    def depends_on_cut(self, options: Mapping[str, Any]) -> bool:
        return bool(options.get("statistics", self.statistics) != "global")

    def lower(self, context: Context) -> Lowered:
        """Lower to kernels around sums over the ranks that share statistics, or to kernels alone if no ranks share
        them.

        This layer computes mean and variance itself if arrays are float64, or if there are sums over ranks and the host
        can check whether ``E[x^2] - E[x]^2`` cancels; otherwise the kernels compute them.
        """
        boxes, statistics = context.output.layout.boxes, context.options.get("statistics", self.statistics)
        inputs = [context.gather(i, context.clipped(i)) for i in range(len(context.inputs))]
        channels = context.state["mean"].size  # of this rank's block
        groups, whole = statistics_groups(statistics, boxes), statistics_groups("global", boxes)
        # Elements per channel: of this rank, and of all ranks.
        own, everyone = math.prod(context.own.shape[:-1]), math.prod(context.output.layout.shape[:-1])
        count = {"global": everyone, "sample": _of_samples(context), "local": own}[statistics]
        views = {name: context.keep((channels,), context.wide, "statistics") for name in ("mean", "var")}
        # Rows: sum x and sum x^2 (`sums`), mean and variance (`moments`); float64, because E[x^2] - E[x]^2 cancels.
        views |= {name: context.keep((2, channels), "float64", "statistics") for name in ("sums", "means", "moments")}
        views |= lower_affine(context, channels)
        views |= {f"running_{key}": view for key, view in context.state.items()}
        margin = _NormMargin(context, inputs, views)
        # Two float64 per channel: 16 B.
        sizes = (16 * boxes.extents[-1]).tolist()
        # Each part of the channels has a sum of its own; channels are the fastest axis in the numbering of groups.
        group_sizes = [sizes[color % len(sizes)] for color in range(groups.count)]
        total = context.sum(groups, views["sums"], "statistics", group_sizes)
        running = None
        if groups != whole:
            running = context.sum(whole, views["moments"], "running statistics", sizes, f"{context.name} (running)")
        # In float64, which serves as a reference, the variance of the kernels is not accurate enough.
        exact = context.dtype == np.float64
        alone = total is None and not exact
        looks = not alone and (exact or context.looks)
        batch, f = context.output.layout.shape[0], self.fused(len(inputs))
        share, again = own / max(1, everyone), context.options.get("recompute", "none") != "none"
        # A rank without elements has a count of 0, by which nothing may be divided.
        numbers = _Numbers(self, max(1, count), share, alone, looks, running is not None, batch, f, again, len(inputs))
        kind = _BatchNormKernel if len(inputs) == 1 or f is None else _SumNormKernel
        kernel = context.kernel(partial(kind, numbers), **views, x=margin.inputs[0], y=margin.y, residual=None)
        if len(inputs) > 1:
            kernel.add(residual=margin.inputs[1])
        # With 16 bits, a convolution next to the norm may write its sums; without a conversion they are float32.
        narrow = {}
        if alone and is_low(context.dtype):
            narrow = {name: context.keep((2, channels), "float32", "statistics") for name in ("sums", "means")}
        # The pass `sums` of a program may let convolutions compute these sums.
        kernel.norm = self._sums(partial(partial, kind), numbers, narrow)

        def update_running() -> None:
            if running is not None:
                context.finish(running)
                context.run(kernel, "update_running")

        margin.read()
        # If the last step had no backward pass, its sum may still travel, and must end before the next one begins.
        update_running()
        # The owned boxes: kernels of the margin are timed separately.
        forward = context.timing("forward", inputs=tuple(v.layout.boxes.longest for v in context.inputs))
        context.run(kernel, "evaluate", when="evaluation", timing=forward)
        context.run(kernel, "begin", when="training")
        if not alone:
            context.run(kernel, "statistics", when="training")
            both = context.add_up(total, when="training")
        if looks:
            centered, variance = (context.operation(kernel, part) for part in ("centered", "variance"))
            # The guarded operations (squares about the mean, and their sum) run only if `cancels` returns True.
            context.run(kernel, "cancels", when="training", guarded=[centered, *both, variance])
            context.run(kernel, "take", when="training")
        context.run(kernel, "train", when="training", timing=forward)
        # After `train`, whose kernels may compute the mean and variance that this reads.
        margin.normalize(self, f)
        if running is not None:
            context.run(kernel, "average", when="training")
            context.start(running, when="training")

        def backward() -> None:
            gradients = margin.gradients(self, f, numbers.count)
            kernel.add(**gradients, **{f"d{key}": view for key, view in context.grads.items()})
            update_running()
            # Before `backward_sums`, which overwrites the sums of the margin: other ranks own these elements.
            margin.differentiate()
            backward = context.timing("backward_data", inputs=forward.inputs, outputs=forward.outputs)
            context.run(kernel, "backward_sums", timing=backward)
            if not alone:
                context.add_up(total)
                context.run(kernel, "backward_data")
            margin.correct()

        return Lowered(backward)

    def _sums(
        self, make: Callable[[_Numbers], Callable[..., Any]], numbers: _Numbers, narrow: Mapping[str, View]
    ) -> NormSums:
        """Return the sums that kernels before and after the norm may compute: each saves a pass over its array."""
        passes, f, more = self.passes, numbers.activation, numbers.inputs - 1
        others = passes.others or (0, 0)
        # The time of a norm is that of its passes over arrays, and the sums need one of them.
        forward, backward = (1 - 1 / (sum(a) + more * b) for a, b in zip((passes.forward, passes.data), others))
        gradients = ("x", "gamma", "beta", "mean", "var", "sums", "dgamma", "dbeta")
        refused = f"its {f.kind} is applied to a sum of two inputs" if f is not None and more else ""
        over = {
            "x": SumsOver("statistics", "train", "train", ("sums",), forward),
            "dy": SumsOver("backward_sums", "backward_data", "backward_rest", gradients, backward, f, refused),
        }
        return NormSums(over, lambda names: make(replace(numbers, alone=False, summed=names)), self.eps, narrow)


@dataclass(frozen=True)
class _Numbers:
    """Settings and sizes of the batch norm of one rank's block.

    Attributes
    ----------
    count, share
        Elements per channel in the group of ranks, and the fraction of all ranks' elements that this rank has.
    alone
        Whether training needs no sums over ranks.
    looks
        Whether this layer computes mean and variance itself, and checks that the variance does not suffer from
        cancellation; otherwise the kernels compute them.
    averaged
        Whether running statistics average those of several groups.
    batch
        Number of samples in a full batch.
    activation
        Activation that the kernels compute.
    again
        Whether the output may be computed again in the backward pass.
    inputs
        Number of inputs.
    summed
        Names of the arrays whose sums other kernels compute.
    """

    layer: BatchNorm
    count: int
    share: float
    alone: bool
    looks: bool
    averaged: bool
    batch: int
    activation: FusedActivation | None
    again: bool
    inputs: int = 1
    summed: frozenset[str] = frozenset()


class _BatchNormKernel:
    """The backend's kernels before and after sums over ranks, and the running statistics if these average groups."""

    def __init__(self, numbers: _Numbers, environment: Any, **arrays: Any) -> None:
        self.n, self.layer, self.mode, self.name = numbers, numbers.layer, environment.mode, environment.name
        self.arrays, self.mean, self.var = arrays, arrays["mean"], arrays["var"]
        self.sums, self.moments = arrays["sums"], arrays["moments"]
        self.running = arrays["running_mean"], arrays["running_var"]
        self.limit = cancellation_limit(self.mean.dtype)
        x, channels = arrays["x"], len(self.mean)
        # For an empty array, -1 would be ambiguous.
        self.rows = x.reshape(-1, channels) if x.size else x.reshape(0, channels)
        self._work = Workspace(environment.kernels.device)
        self._pending = self._trained = False
        self.apply = self._kernels(environment, self.running, None)
        # Forward and backward of training share a workspace, so they are created together.
        self.trained = self._kernels(environment, (self.mean, self.var), self._training())
        # For outputs that are computed again: it reads mean and variance, and updates nothing.
        self.normalized = self._kernels(environment, (self.mean, self.var), None) if numbers.again else None

    def _training(self) -> BatchNormTraining:
        fields: dict[str, Any] = {name: self.arrays.get(name) for name in ("dgamma", "dbeta") if "dx" in self.arrays}
        if not self.n.averaged:
            fields |= {"running_mean": self.running[0], "running_var": self.running[1]}
        return BatchNormTraining(self.n.count, not self.n.looks, self.layer.momentum, **fields)

    def _kernels(self, environment: Any, moments: Any, training: BatchNormTraining | None) -> BatchNormKernels:
        names = ("x", "y", "dy", "dx", "residual", "dresidual")
        blocks: dict[str, Any] = {name: self.arrays.get(name) for name in names}
        for name, array in blocks.items():
            if array is not None and not array.size:  # an empty block has its channels
                blocks[name] = array.reshape(*[0] * (array.ndim - 1), len(self.mean))
        # Evaluation, and outputs that are computed again, have no backward pass.
        if training is None:
            blocks |= {"dy": None, "dx": None, "dresidual": None}
        blocks |= {name: self.arrays[name] for name in ("gamma", "beta", "sums", "means")}
        mean, var = moments
        numbers: dict[str, Any] = {"eps": self.layer.eps, "activation": self.n.activation}
        numbers |= {"training": training, "local": training is not None and self.n.alone, "of_x": mean is self.mean}
        numbers["summed"] = "dy" in self.n.summed
        arrays = BatchNormArrays(**blocks, **numbers, mean=mean, var=var)
        kernels: BatchNormKernels = environment.kernels.batch_norm(arrays)
        return kernels

    @reads("moments", "running_*")
    @writes("moments", "running_*")
    def update_running(self) -> None:
        """Update the running statistics with the averaged moments of the last batch, once."""
        if not self._pending:
            return
        self._pending = False
        momentum = self.layer.momentum
        self.moments *= momentum
        for array, batch in zip(self.running, self.moments):
            array *= 1 - momentum
            np.add(array, batch, out=array, casting="same_kind")

    @reads("x", "residual", "gamma", "beta", "running_*")
    @writes("y")
    def evaluate(self) -> None:
        # A backward pass would use mean and variance of an older batch.
        self._trained = False
        self.apply.forward()

    @reads()
    def begin(self) -> None:
        self._trained = True
        # Samples beyond the valid ones hold old numbers, which would enter the statistics.
        if self.mode.valid < self.n.batch:
            raise ValueError(
                f"{self.name}: batch statistics need a full batch of {self.n.batch} samples, got {self.mode.valid}; "
                "drop the short last batch of an epoch, or choose a batch size that divides the number of samples"
            )

    @reads("x")
    @writes("sums", work=("y",))
    def statistics(self) -> None:
        self.trained.statistics()

    @reads("sums")
    @writes("moments", "sums")
    def cancels(self) -> bool:
        """Compute mean and biased variance of the group from the sums of its ranks; return whether the variance is
        inaccurate.

        All ranks of the group have the same sums, so all of them take the same branch.
        """
        mean, var = np.divide(self.sums, self.n.count, out=self.moments)
        # The sums are work space from here on: with `looks`, `train` reads mean and variance instead.
        var -= np.multiply(mean, mean, out=self.sums[0])
        # The difference may round to less than 0.
        np.maximum(var, 0, out=var)
        return cancels(mean, var, self.layer.eps, self.limit, self.sums)

    @reads("x", "moments")
    @writes("sums")
    def centered(self) -> None:
        """Compute the sum over this block of the squares about the mean, which is then summed over the ranks."""
        self.sums[0].fill(0)
        centered_squares(self.rows, self.moments[0], self.sums[1], self._work)

    @reads("sums", "moments")
    @writes("moments")
    def variance(self) -> None:
        np.divide(self.sums[1], self.n.count, out=self.moments[1])

    @reads("moments")
    @writes("mean", "var")
    def take(self) -> None:
        """Copy mean and variance to the arrays of the kernels."""
        np.copyto(self.mean, self.moments[0], casting="same_kind")
        np.copyto(self.var, self.moments[1], casting="same_kind")

    @reads("x", "residual", "gamma", "beta", "mean", "var", "sums", "running_*")
    @writes("y", "mean", "var", "sums", "running_*")
    @again("normalize")
    def train(self) -> None:
        self.trained.forward()

    @reads("x", "residual", "gamma", "beta", "mean", "var")
    @writes("y")
    def normalize(self) -> None:
        """Compute the output again, by the statistics of this batch."""
        assert self.normalized is not None
        self.normalized.forward()

    @reads("mean", "var")
    @writes("moments")
    def average(self) -> None:
        """Scale this batch's moments, with the unbiased variance, so that their sum over all ranks is the mean that
        updates the running statistics.
        """
        mean, var = self.moments
        # In float64, so that the sum over ranks is not rounded to the dtype of the kernels.
        np.copyto(mean, self.mean)
        np.copyto(var, self.var)
        # `max`: of a single element the variance is 0, and there is no unbiased one.
        var *= self.n.count / max(self.n.count - 1, 1)
        self.moments *= self.n.share  # the sum over ranks is then the mean over elements
        self._pending = True

    @reads("x", "dy", "gamma", "beta", "mean", "var")
    @writes("dx", "dresidual", "dgamma", "dbeta", "sums")
    def backward_sums(self) -> None:
        if not self._trained:
            raise RuntimeError(f"{self.name}: backward() needs a forward() in training mode before")
        assert self.trained.backward_sums is not None
        self.trained.backward_sums()

    @reads("x", "dy", "dx", "dresidual", "gamma", "beta", "mean", "var", "sums")
    @writes("dx", "sums", "means")
    def backward_data(self) -> None:
        assert self.trained.backward_data is not None
        self.trained.backward_data()

    @reads("x", "dy", "gamma", "beta", "mean", "var", "sums")
    @writes("dx", "sums", "means")
    def backward_rest(self) -> None:
        """Compute the gradient of the input from the sums that another kernel has computed."""
        _BatchNormKernel.backward_data(self)

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernel in (self.apply, self.trained, self.normalized):
            if kernel is not None:
                kernel.close()
        self._work.clear()


class _SumNormKernel(_BatchNormKernel):
    """Kernel with a second input and an activation. The activation's input does not follow from `x` alone, so backward
    reads `y`.
    """

    @reads("y", "x", "dy", "gamma", "beta", "mean", "var")
    @writes("dx", "dresidual", "dgamma", "dbeta", "sums")
    def backward_sums(self) -> None:
        super().backward_sums()

    @reads("y", "x", "dy", "dx", "dresidual", "gamma", "beta", "mean", "var", "sums")
    @writes("dx", "sums", "means")
    def backward_data(self) -> None:
        super().backward_data()


def statistics_groups(statistics: str, boxes: Blocks) -> Groups:
    """Return the groups of ranks that share the statistics of a channel. Pure arithmetic."""
    if statistics == "sample":
        return sample_groups(boxes)
    last = len(boxes.grid) - 1
    # Ranks of a group agree in these coordinates: in that of the channels, or, with local statistics, in all.
    return Groups.agreeing(boxes.grid, (last,) if statistics == "global" else range(last + 1), boxes.size)


def _of_samples(context: Context) -> int:
    """Return the number of elements per channel in the samples of this rank."""
    return context.own.shape[0] * math.prod(context.output.layout.shape[1:-1])


def affine_parameters(channels: int) -> dict[str, Parameter]:
    """Return scale and shift per channel, initially ones and zeros, without weight decay."""
    shape = (channels,)
    return {
        "gamma": Parameter(shape, "ones", decay=False, channel_axis=0),
        "beta": Parameter(shape, decay=False, channel_axis=0),
    }


def lower_affine(context: Context, channels: int) -> dict[str, View]:
    """Return the parameters `gamma` and `beta`; arrays of ones and zeros if there are none."""
    # A rank that the layer does not use holds no parameters, but its kernels read as many as there are channels.
    if "gamma" in context.params and context.params["gamma"].size == channels:
        return {name: context.params[name] for name in ("gamma", "beta")}
    return {
        name: context.keep((channels,), context.wide, "statistics", fill=fill)
        for name, fill in (("gamma", 1.0), ("beta", 0.0))
    }


class _NormMargin:
    """Margin of one batch norm. Without a margin, the kernels of the whole block compute everything.

    Parameters
    ----------
    inputs
        Gathered inputs. The second is added before the activation.
    vectors
        Arrays per channel by name: ``gamma``, ``mean``, ``running_mean``, ``sums``, ...

    Attributes
    ----------
    inputs, y
        Arrays of the owned box; packed.
    """

    def __init__(self, context: Context, inputs: Sequence[Gathered], vectors: Mapping[str, View]) -> None:
        self.context, self._wide = context, context.output.wide
        self._gathered, self._vectors = dict(zip(("x", "residual"), inputs)), vectors
        self._boxes = _around(context.box, context.own) if self._wide else []
        self.inputs, self.y = [x.view for x in inputs], context.y
        self._out: list[tuple[View, View]] = []
        self._kernel: KernelSpec | None = None
        if self._wide:
            # The view of a box is strided if more than the first cut axis has a margin.
            self._views = [value.region.part(context.own) for value in context.inputs]
            self.inputs = [view if view.packed else context.scratch(view.shape, view.dtype) for view in self._views]
            self.y = self._packed(Region(context.y, context.box), context.own)

    def _packed(self, region: Region, box: Box) -> View:
        """Return a packed array for `box`: a view of the region, or scratch whose part in the region :meth:`_write`
        copies there.
        """
        part = box & region.box
        view = region.part(part)
        if part == box and view.packed:
            return view
        array = self.context.scratch(box.shape)
        if part.size:
            self._out.append((Region(array, box).part(part), view))
        return array

    def _write(self) -> None:
        timing = Timing("copy", (), copied=sum(source.nbytes for source, _ in self._out))
        self.context.copy(*self._out, timing=timing)
        self._out = []

    def read(self) -> None:
        """Start the exchanges of the margins, which travel during the sum of the statistics, and pack the owned boxes;
        without a margin, only pack the inputs.
        """
        for x in self._gathered.values():
            x.start()
        if not self._wide:
            self._arrive()
            return
        strided = [(view, array) for view, array in zip(self._views, self.inputs) if view is not array]
        self.context.copy(*strided, timing=Timing("copy", (), copied=sum(view.nbytes for view, _ in strided)))

    def _arrive(self) -> None:
        for x in self._gathered.values():
            x.finish()

    def _parts(self, boxes: Sequence[Box]) -> dict[str, View]:
        """Return views of the inputs in the boxes, by name of the input and number of the box."""
        regions = {name: Region(x.view, x.box) for name, x in self._gathered.items()}
        packed = self.context.packed
        return {f"{name}{i}": packed(r.part(box)) for name, r in regions.items() for i, box in enumerate(boxes)}

    def normalize(self, layer: Any, f: FusedActivation | None) -> None:
        """Add the forward pass of the margin, and the copy of the owned box into the output."""
        if not self._wide:
            return
        context = self.context
        self._arrive()
        if self._boxes:
            views, y = self._parts(self._boxes), Region(context.y, context.box)
            views |= {f"y{i}": self._packed(y, box) for i, box in enumerate(self._boxes)}
            vectors = {k: v for k, v in self._vectors.items() if k != "moments"}
            kernel = context.kernel(partial(_normalizing, layer.eps, f), **views, **vectors)
            timing = _timing(context, self._boxes)
            context.run(kernel, "evaluate", when="evaluation", timing=timing)
            context.run(kernel, "train", when="training", timing=timing)
        self._write()

    def gradients(self, layer: Any, f: FusedActivation | None, count: int) -> dict[str, View]:
        """Return the arrays of the gradients in the owned box: of the output, ``dy``, and of the inputs, ``dx`` and, if
        the activation separates it from ``dy``, ``dresidual``.
        """
        context = self.context
        names = ["dx", "dresidual"][: len(context.inputs) if f is not None else 1]
        values = [context.inputs[i] for i in range(len(names)) if context.needs_gradient(i)]
        # The gradient of the output is needed wherever the gradient of an input is held.
        boxes = context.output.layout.boxes.joined([value.held_gradient for value in values])
        targets = {
            name: Region(context.gradient(i), context.inputs[i].held_gradient[context.rank])
            for i, name in enumerate(names)
            if context.needs_gradient(i)
        }
        grads = Region(context.gradient_in(boxes), boxes[context.rank])
        # Without an activation, the gradient of the second input is that of the output: no kernel writes it.
        if len(context.inputs) > len(names) and context.needs_gradient(1):
            context.pass_gradient(1, context.gradient_for(1))
        margin = _around(grads.box, context.own)
        if margin:
            views = self._parts(margin)
            views |= {f"dy{i}": context.packed(grads.part(box)) for i, box in enumerate(margin)}
            views |= {f"y{i}": context.scratch(box.shape) for i, box in enumerate(margin)}
            for name in names:
                views |= {f"{name}{i}": self._gradient(targets, name, box) for i, box in enumerate(margin)}
            vectors = {k: self._vectors[k] for k in ("gamma", "beta", "mean", "var", "sums", "means")}
            self._kernel = context.kernel(partial(_differentiating, layer.eps, f, count), **views, **vectors)
            self._timing = _timing(context, margin)
        own = {name: self._gradient(targets, name, context.own) for name in names}
        return {"dy": context.packed(grads.part(context.own)), **own}

    def _gradient(self, targets: Mapping[str, Region], name: str, box: Box) -> View:
        return self._packed(targets[name], box) if name in targets else self.context.scratch(box.shape)

    def differentiate(self) -> None:
        """Add the first part of the backward pass of the margin; it overwrites the sums."""
        if self._kernel is not None:
            self.context.run(self._kernel, "begin", timing=self._timing)

    def correct(self) -> None:
        """Add the second part of the backward pass of the margin, which reads the sums of the group."""
        if self._kernel is not None:
            self.context.run(self._kernel, "correct", timing=self._timing)
        self._write()


def _around(box: Box, own: Box) -> list[Box]:
    """Return disjoint boxes that cover what `box` has outside of `own`.

    >>> _around(Box((0, 2), (9, 6)), Box((3, 2), (9, 5)))
    [Box((0, 2), (3, 6)), Box((3, 5), (9, 6))]
    """
    if box == own:
        return []
    if not own.size:
        return [box] if box.size else []
    boxes, rest = [], box
    for axis, ((a, b), (c, d)) in enumerate(zip(box.ranges, own.ranges)):
        # What lies before and after `own` along this axis; the later axes divide only the rest between.
        boxes += [rest.replace(axis, a, c), rest.replace(axis, d, b)]
        rest = rest.replace(axis, c, d)
    return [part for part in boxes if part.size]


def _timing(context: Context, boxes: Sequence[Box]) -> Timing:
    """Return the timing of a kernel on all boxes, as if they were one box of their total size."""
    samples, *spatial, channels = boxes[0].shape
    elements = sum(math.prod(box.shape[1:-1]) for box in boxes)
    shape = (samples, elements, *(1 for _ in spatial[1:]), channels)
    return context.timing("boundary", inputs=(shape,) * len(context.inputs), outputs=shape[1:-1])


class _MarginKernels:
    """Kernels of the boxes of a margin."""

    def __init__(self, parts: Sequence[BatchNormKernels]) -> None:
        self.parts = parts

    def close(self) -> None:
        """Free the backend's kernels."""
        for part in self.parts:
            part.close()


class _Normalizing:
    """Kernels that normalize a margin: in training by batch statistics, in evaluation by the running ones."""

    def __init__(self, trained: _MarginKernels, evaluated: _MarginKernels) -> None:
        self._trained, self._evaluated = trained, evaluated

    def train(self) -> None:
        for part in self._trained.parts:
            part.forward()

    def evaluate(self) -> None:
        for part in self._evaluated.parts:
            part.forward()

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernels in (self._trained, self._evaluated):
            kernels.close()


_READ = ("x*", "residual*", "gamma", "beta")


@makes(
    train=Access((*_READ, "mean", "var"), ("y*",)),
    evaluate=Access((*_READ, "running_*"), ("y*",)),
)
def _normalizing(eps: float, f: FusedActivation | None, environment: Any, **arrays: Any) -> _Normalizing:
    def kernels(mean: Any, var: Any, of_x: bool) -> _MarginKernels:
        moments = {"mean": mean, "var": var, "of_x": of_x}
        return _MarginKernels(
            [_kernels_of(environment, arrays, i, eps=eps, activation=f, **moments) for i in _numbers(arrays)]
        )

    batch = kernels(arrays["mean"], arrays["var"], True)
    return _Normalizing(batch, kernels(arrays["running_mean"], arrays["running_var"], False))


class _Differentiating(_MarginKernels):
    """Backward kernels of a margin. They normalize it again: backward may use what forward stores."""

    def begin(self) -> None:
        for part in self.parts:
            assert part.backward_sums is not None
            part.forward()
            part.backward_sums()

    def correct(self) -> None:
        for part in self.parts:
            assert part.backward_data is not None
            part.backward_data()


@makes(
    begin=Access((*_READ, "dy*", "mean", "var"), ("y*", "dx*", "dresidual*", "sums")),
    correct=Access((*_READ, "y*", "dy*", "dx*", "dresidual*", "mean", "var", "sums"), ("dx*", "means")),
)
def _differentiating(
    eps: float, f: FusedActivation | None, count: int, environment: Any, **arrays: Any
) -> _Differentiating:
    # Without running statistics and gradients of parameters: the kernels of the owned box compute them.
    training = BatchNormTraining(count, from_sums=False)
    moments = {"mean": arrays["mean"], "var": arrays["var"], "of_x": True}
    create: Callable[..., BatchNormKernels] = partial(
        _kernels_of, environment, arrays, eps=eps, activation=f, **moments
    )
    return _Differentiating([create(i, training=training) for i in _numbers(arrays)])


def _numbers(arrays: Mapping[str, Any]) -> range:
    return range(sum(name[0] == "x" for name in arrays))


_BOXES = ("x", "y", "dy", "dx", "residual", "dresidual")


def _kernels_of(environment: Any, arrays: Mapping[str, Any], i: int, **more: Any) -> BatchNormKernels:
    """Return the backend's kernels of one box."""
    fields: dict[str, Any] = {name: arrays.get(f"{name}{i}") for name in _BOXES}
    fields |= {name: arrays[name] for name in ("gamma", "beta", "sums", "means")}
    kernels: BatchNormKernels = environment.kernels.batch_norm(BatchNormArrays(**fields, **more))
    return kernels
