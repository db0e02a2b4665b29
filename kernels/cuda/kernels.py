"""All CUDA kernels of one device, by the names under which the rest of the library asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from halograd.kernels.checks import check_packed
from halograd.kernels.cuda import (
    boxes,
    columns,
    dropout,
    elementwise,
    groups,
    losses,
    norm,
    optimizers,
    pooling,
    reductions,
    resize,
)
from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.losses import LossKernel
from halograd.kernels.cuda.sources import PROGRAMS, Program, kernels_of
from halograd.kernels.errors import KernelError
from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, Kernel
from halograd.kernels.scratch import Scratch

__all__ = ["CudaKernels"]


class CudaKernels:
    """Factories of kernels on a device. All are local; what they return runs on the current stream, without a host
    synchronization and without allocating.

    Arrays are float32, float64, float16 or bfloat16. Arithmetic on the last two is done in float32; sums over many
    elements are finished in float64, always in the same order. Kernels that sum share `scratch`: those of one
    :class:`CudaKernels` must not run at the same time on two streams.

    Parameters
    ----------
    device
        Where the kernels run.
    scratch
        Shared memory for partial sums; by default one of its own.
    """

    def __init__(self, device: Device, scratch: Scratch | None = None) -> None:
        self.device = device
        self.scratch = Scratch(device.empty) if scratch is None else scratch

    def prepare(self, dtypes: Iterable[str] = ("float32",)) -> None:
        """Compile every kernel for these dtypes now, not when it is first bound."""
        for dtype in dtypes:
            for source, count in PROGRAMS.items():
                low = source == "optimizer" and dtype in ("float16", "bfloat16")
                kinds = ("float32", dtype, dtype) if low else (dtype,) * count
                for name in kernels_of(source):
                    self.device.function(Program(source, kinds), name)

    # ------------------------------------------------------------------ as Backend._...
    def max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        """See :meth:`Backend.max_pool`."""
        return pooling.max_pool(self.device, x, y, dy, dx, geometry)

    def average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        """See :meth:`Backend.average_pool`."""
        return pooling.average_pool(self.device, x, y, dy, dx, geometry, count_include_pad)

    def batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        """See :meth:`Backend.batch_norm`."""
        return norm.Norm(self.device, self.scratch, arrays).kernels()

    def activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> tuple[Kernel, Kernel | None]:
        """See :meth:`Backend.activation`."""
        return elementwise.activation(self.device, kind, x, y, dy, dx, alpha)

    def add(self, xs: Sequence[Any], y: Any, relu: bool) -> Kernel:
        """See :meth:`Backend.add`."""
        return elementwise.add(self.device, xs, y, relu)

    # ------------------------------------------------------------------ around convolution
    def bias(self, y: Any, b: Any, relu: bool = False) -> Kernel:
        """``y = relu?(y + b)`` in place."""
        return elementwise.bias(self.device, y, b, relu)

    def bias_gradient(self, dy: Any, db: Any) -> Kernel:
        """``db`` ``(C,)`` = sum of dy ``(..., C)`` over everything else; of its dtype, float32 or float64."""
        return columns.bias_gradient(self.device, self.scratch, dy, db)

    # ------------------------------------------------------------------ boxes
    def fill(self, value: float, *arrays: Any) -> Kernel:
        """Write `value` into arrays and views of any strides and dtypes, in one launch."""
        return boxes.fill(self.device, value, arrays)

    def copy(self, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        """Copy ``(source, target)`` views of any strides, in one launch: pack, unpack, local copies.

        Where source and target have two of the dtypes they are converted: one more launch per such pair of dtypes.
        """
        return boxes.copy(self.device, pairs)

    def add_into(self, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        """``target += source`` for views of any strides, in one launch; the targets must not overlap."""
        return boxes.add_into(self.device, pairs)

    # ------------------------------------------------------------------ norms of samples
    def sample_norm(self, *args: Any, premultiplied: bool) -> BatchNormKernels:
        """:meth:`batch_norm` around sums, of each sample: mean, var ``(N, C)``; sums, means float64 ``(N, 2, C)``.

        `args` are those of :meth:`Backend.batch_norm` up to `relu`. With `premultiplied` the means are of
        ``gamma * dy'`` and ``gamma * dy' * xhat`` (over a group of channels).
        """
        a = BatchNormArrays(*args)
        vectors = {name: getattr(a, name) for name in ("gamma", "beta", "mean", "var", "sums", "means")}
        check_packed("sample_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx, **vectors)
        samples, channels = a.x.shape[0], a.x.shape[-1]
        shapes = {"gamma": (channels,), "beta": (channels,), "mean": (samples, channels), "var": (samples, channels)}
        shapes.update(sums=(samples, 2, channels), means=(samples, 2, channels))
        for name, shape in shapes.items():
            if tuple(vectors[name].shape) != shape:
                raise KernelError(
                    f"sample_norm: expected {name} of shape {shape}, got {tuple(vectors[name].shape)}; "
                    "statistics are of every sample"
                )
        return norm.Norm(self.device, self.scratch, a, samples, premultiplied).kernels()

    def group_totals(self, sums: Any, totals: Any, gamma: Any = None, scale: float = 1.0) -> Kernel:
        """``totals`` (N, 2, G) = scale * sum over each group's channels of ``sums`` (N, 2, C) times gamma?."""
        return groups.group_totals(self.device, sums, totals, gamma, scale)

    def group_moments(self, totals: Any, mean: Any, var: Any, scale: float = 1.0) -> Kernel:
        """mean, var (N, C) of ``scale * totals = [E x, E x^2]``."""
        return groups.group_moments(self.device, totals, mean, var, scale)

    def group_spread(self, totals: Any, means: Any) -> Kernel:
        """``means`` (N, 2, C) are those of the groups."""
        return groups.group_spread(self.device, totals, means)

    def sum_samples(self, sums: Any, first: Any, second: Any) -> Kernel:
        """The two quantities of ``sums`` (N, 2, C), summed over samples."""
        return groups.sum_samples(self.device, sums, first, second)

    def channel_norm(self, *args: Any) -> tuple[Kernel, Kernel | None]:
        """Normalization over the channels of each position; see :func:`norm.channel_norm`."""
        return norm.channel_norm(self.device, self.scratch, *args)

    # ------------------------------------------------------------------ resize, dropout
    def resize(
        self, x: Any, y: Any, dy: Any, dx: Any, tables: Sequence[tuple[Any, Any]]
    ) -> tuple[Kernel, Kernel | None]:
        """Interpolation by ``(first, weights)`` per axis; see :func:`resize.resize`."""
        return resize.resize(self.device, x, y, dy, dx, tables)

    def dropout(
        self, x: Any, y: Any, rate: float, salt: int, shape: Sequence[int], start: Sequence[int], state: Any
    ) -> Kernel:
        """Dropout by global index; see :func:`dropout.dropout`."""
        return dropout.dropout(self.device, x, y, rate, salt, shape, start, state)

    # ------------------------------------------------------------------ losses
    def softmax_cross_entropy(
        self,
        x: Any,
        target: Any,
        dx: Any,
        loss: Any,
        class_weights: Any = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        wrong: Any = None,
        factor: Any = None,
    ) -> LossKernel:
        """Loss float64 (1,) and gradient; `wrong` int64 (1,) counts targets that are no class, `factor` scales dx."""
        options = (class_weights, label_smoothing, ignore_index, wrong, factor)
        return losses.softmax_cross_entropy(self.device, self.scratch, x, target, dx, loss, *options)

    def target_weight(
        self, target: Any, total: Any, classes: int, class_weights: Any = None, ignore_index: int | None = None
    ) -> LossKernel:
        """float64 (1,): the sum of the weights of all targets."""
        return losses.target_weight(self.device, self.scratch, target, total, classes, class_weights, ignore_index)

    def binary_cross_entropy(
        self, x: Any, target: Any, dx: Any, loss: Any, pos_weight: Any = None, factor: Any = None
    ) -> LossKernel:
        """Of logits; `pos_weight` one number or one per channel (host)."""
        name = "binary_cross_entropy"
        return losses.elementwise_loss(self.device, self.scratch, name, x, target, dx, loss, pos_weight, factor)

    def mean_squared_error(self, x: Any, target: Any, dx: Any, loss: Any, factor: Any = None) -> LossKernel:
        """Mean over elements of ``(x - target)^2``."""
        name = "mean_squared_error"
        return losses.elementwise_loss(self.device, self.scratch, name, x, target, dx, loss, None, factor)

    # ------------------------------------------------------------------ optimizers
    def sgd(
        self,
        p: Any,
        g: Any,
        v: Any,
        scalars: Any,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        decays: int | Sequence[tuple[int, int, bool]],
        copy: Any = None,
        skip: Any = None,
    ) -> Kernel:
        """One step of :class:`halograd.training.SGD`; `v` is None without momentum.

        `decays`: how many leading elements have weight decay, or ``(start, stop, decayed)`` of ranges.
        """
        members = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        members.update(optimizers.decay_members(self.device, p.size, decays))
        return optimizers.update(self.device, "sgd", p, g, v, None, scalars, copy, skip, **members)

    def adam(
        self,
        p: Any,
        g: Any,
        m: Any,
        v: Any,
        scalars: Any,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        decays: int | Sequence[tuple[int, int, bool]],
        decoupled: bool,
        copy: Any = None,
        skip: Any = None,
    ) -> Kernel:
        """One step of Adam or (`decoupled`) AdamW; m and v are the first and the second moment."""
        members = {"momentum": betas[0], "beta2": betas[1], "epsilon": epsilon, "decoupled": decoupled}
        members.update(weight_decay=weight_decay, **optimizers.decay_members(self.device, p.size, decays))
        return optimizers.update(self.device, "adam", p, g, m, v, scalars, copy, skip, **members)

    def lars(
        self,
        p: Any,
        g: Any,
        v: Any,
        scalars: Any,
        segments: Sequence[tuple[int, int, bool]],
        momentum: float,
        trust: float,
        weight_decay: float,
        copy: Any = None,
        skip: Any = None,
    ) -> Kernel:
        """One step of LARS; `segments` are (start, stop, decayed) of the parameters."""
        members = {"momentum": momentum, "trust": trust, "weight_decay": weight_decay}
        return optimizers.lars(self.device, self.scratch, p, g, v, scalars, segments, copy, skip, **members)

    # ------------------------------------------------------------------ reductions, loss scaling
    def sum_of_squares(self, terms: Sequence[tuple[Any, float]], out: Any) -> Kernel:
        """See :meth:`Backend.sum_of_squares`."""
        return reductions.sum_of_squares(self.device, self.scratch, terms, out)

    def clip(self, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
        """See :meth:`Backend.clip`."""
        return reductions.clip(self.device, squares, inverse, max_norm, norm, factor)

    def find_nonfinite(self, arrays: Sequence[Any], flag: Any) -> Kernel:
        """Set int32 (1,) to 1 if anything is infinite or NaN."""
        return reductions.find_nonfinite(self.device, arrays, flag)

    def update_loss_scale(
        self, state: Any, flag: Any, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> Kernel:
        """Dynamic loss scaling; see :func:`reductions.update_loss_scale`."""
        return reductions.update_loss_scale(self.device, state, flag, growth, backoff, interval)
