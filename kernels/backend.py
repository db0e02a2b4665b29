"""The interface of local compute.

Factories take arrays bound at build time and return a :class:`Kernel`. They check here, once for all
backends, and then call the backend's own method of the same name with an underscore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, ClassVar

from halograd.device import HOST, Device
from halograd.kernels import checks, clipping, empty
from halograd.kernels.errors import KernelError
from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, BatchNormTraining, Kernel, Substitute
from halograd.kernels.norm_parts import with_residual, with_training, without_parts

__all__ = ["ACTIVATIONS", "Backend"]

ACTIVATIONS = ("relu", "leaky_relu", "sigmoid", "tanh", "gelu")


class Backend(ABC):
    """Local compute on plain arrays ``(N, *spatial, C)``, packed, on one device. All methods are local.

    Kernels overwrite their outputs entirely. Arrays may have no elements (a rank that owns nothing);
    sums over nothing are zero. Kernels of one backend share scratch memory and must not run at the same
    time in several threads. Build and run them in the same thread.

    Attributes
    ----------
    name, version : str
    threads : int
        Threads per kernel on a CPU.
    xp : module
        The array namespace of the device (``numpy``, ``cupy``).
    dtypes : tuple of str
        Element types that every kernel takes. ``conv_dtypes`` are those of the convolutions.
    device : Device
        Where the arrays live. On a device kernels are enqueued: a call returns before they have run.
    cuda : object or None
        Fused kernels for what is no part of this interface (losses, dropout, optimizers, ...), where there are some.
    """

    name: ClassVar[str]
    xp: ModuleType
    version: str
    threads: int
    dtypes: tuple[str, ...]
    conv_dtypes: tuple[str, ...]
    dtype_remedy: str
    device: Device = HOST
    cuda: Any = None
    #: Whether `_batch_norm` does itself what `training` and `residual` ask for.
    fuses_batch_norm: bool = False

    # ------------------------------------------------------------------ arrays and life time
    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Packed array aligned to 64 bytes, contents undefined."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        """Packed array of zeros aligned to 64 bytes."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def synchronize(self) -> None:
        """Return when all kernels called so far have finished; CPU kernels already have."""
        return

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """What the open kernels hold besides the arrays given to them: scratch and workspaces [B]."""

    @abstractmethod
    def close(self) -> None:
        """Free what the backend holds; its kernels must be closed before. May be called twice."""

    def take_substitutes(self) -> list[Substitute]:
        """Kernels that another library makes for want of a fast one, of those built since the last call."""
        return []

    def describe(self) -> str:
        """One line for the log: what runs, and where it came from."""
        return f"{self.name} {self.version}, {self.threads} thread(s) per rank"

    def describe_arithmetic(self, dtype: str) -> str:
        """For the log: how products of this dtype are made where one may choose, and how; else nothing."""
        return ""

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ convolution
    def padded_channels(self, channels: int, dtype: Any) -> int:
        """Channels that the input of a convolution should have in memory; those behind its own must be zero.

        `conv_forward` and `conv_backward_filter` take `x` so: a view of the leading channels of a packed array.
        """
        return channels

    def conv_forward(self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool = False) -> Kernel:
        """``y[n, o, k] = relu?(b[k] + sum_{t, c} w[k, t, c] * x[n, o * stride - lo + dilation * t, c])``.

        Parameters
        ----------
        x, w, b, y
            ``(N, *spatial, C)``, ``(K, *kernel, C / groups)``, ``(K,)`` or None, ``(N, *outputs, K)``; local. `x` may
            lie as :meth:`padded_channels` says if there is one group.
        """
        self._check_conv_dtypes("conv_forward", x, y, w, b)
        if empty.has_nothing(x, y):
            return empty.bias_only(self.xp, b, y, relu)
        checks.check_conv("conv_forward", x, w, b, y, geometry, self._room(x, geometry))
        return self._conv_forward(x, w, b, y, geometry, relu)

    def conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        """``dx`` from ``dy``: the adjoint of :meth:`conv_forward` in `x`. Rows that no output reads get 0."""
        self._check_conv_dtypes("conv_backward_data", dx, dy, w, None)
        if empty.has_nothing(dy, dx):
            return empty.filled(0, dx)
        checks.check_conv("conv_backward_data", dx, w, None, dy, geometry)
        return self._conv_backward_data(dy, w, dx, geometry)

    def conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        """``dw`` and, if not None, ``db`` from ``x`` and ``dy``: the adjoint of :meth:`conv_forward` in `w`, `b`."""
        self._check_conv_dtypes("conv_backward_filter", x, dy, dw, db)
        if empty.has_nothing(x, dy):
            return empty.filter_of_nothing(self.xp, dy, dw, db)
        checks.check_conv("conv_backward_filter", x, dw, db, dy, geometry, self._room(x, geometry))
        return self._conv_backward_filter(x, dy, dw, db, geometry)

    def _check_conv_dtypes(self, what: str, x: Any, y: Any, w: Any, b: Any) -> None:
        checks.check_dtypes(what, self.conv_dtypes, self.dtype_remedy, input=x, output=y, weights=w, bias=b)

    # ------------------------------------------------------------------ pooling
    def max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        """Forward and backward of the maximum over windows; of equal elements the first gets the gradient.

        Padding counts as -inf. The backward kernel uses what the forward kernel of the pair remembered.
        Without `dy` and `dx` (None) the backward kernel is None.
        """
        self._check_dtypes("max_pool", x=x, y=y, dy=dy, dx=dx)
        if empty.has_nothing(x, y):
            return empty.pool_of_nothing(float("-inf"), y, dx)
        checks.check_pool("max_pool", x, y, dy, dx, geometry)
        return self._max_pool(x, y, dy, dx, geometry)

    def average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        """Forward and backward of the mean over windows, over all taps or over those inside `x`.

        Without `dy` and `dx` (None) the backward kernel is None.
        """
        self._check_dtypes("average_pool", x=x, y=y, dy=dy, dx=dx)
        if empty.has_nothing(x, y):
            return empty.pool_of_nothing(0.0, y, dx)
        checks.check_pool("average_pool", x, y, dy, dx, geometry)
        return self._average_pool(x, y, dy, dx, geometry, count_include_pad)

    # ------------------------------------------------------------------ batch norm
    def batch_norm(
        self,
        x: Any,
        y: Any,
        dy: Any,
        dx: Any,
        gamma: Any,
        beta: Any,
        mean: Any,
        var: Any,
        sums: Any,
        means: Any,
        eps: float,
        relu: bool,
        local: bool,
        training: BatchNormTraining | None = None,
        residual: Any = None,
        dresidual: Any = None,
    ) -> BatchNormKernels:
        """``y = relu?(gamma * xhat + beta + residual?)``, ``xhat = (x - mean) / sqrt(var + eps)``, with its adjoint.

        Parameters
        ----------
        x, y, dy, dx
            ``(N, *spatial, C)``; `dy` and `dx` are None for a forward that is never differentiated.
        gamma, beta, mean, var
            ``(C,)``, of the dtype of `x` or float32; `var` is the biased variance.
        sums, means
            float64 ``(2, C)``: what this process adds up, and what all processes found.
        local
            False: ``statistics()`` writes ``sums = [sum x, sum x^2]`` (two passes over blocks, combined in
            float64, or no less accurately than the local statistics) and may use `y` as it likes; ``forward()``
            takes `mean` and `var` as they are, and with `dx` these are statistics of `x`; ``backward_sums()`` writes
            ``sums = [sum dy', sum dy' * xhat]`` with ``dy' = dy`` where ``y > 0`` (everywhere without relu), and may
            use `dx` as it likes; ``backward_data()``, to be called after it, writes
            ``dx = gamma / sqrt(var + eps) * (dy' - means[0] - xhat * means[1])``.
            True: ``forward()`` writes `mean` and `var` too, ``backward_sums()`` writes `dx` and `sums`, the
            other two do nothing.
        training
            What the kernels do besides: mean and variance from sums over all processes, running statistics, gradients
            of the parameters. Then ``backward_data()`` divides `sums` by ``training.count`` itself, and may use `means`
            as it likes.
        residual, dresidual
            Of the shape of `x`, or None. With a residual and relu ``backward_sums()`` writes ``dresidual = dy'``,
            which ``backward_data()`` reads; without relu the residual's gradient is `dy`, and `dresidual` None.

        A backward kernel belongs to the last ``forward()`` of the same call.
        """
        self._check_dtypes("batch_norm", x=x, y=y, dy=dy, dx=dx, residual=residual, dresidual=dresidual)
        arrays = BatchNormArrays(
            x, y, dy, dx, gamma, beta, mean, var, sums, means, eps, relu, local, training, residual, dresidual
        )
        if empty.has_nothing(x):
            return with_training(arrays, empty.batch_norm_of_nothing(arrays), self.device)
        vectors = {"gamma": gamma, "beta": beta, "mean": mean, "var": var, **(training.vectors if training else {})}
        checks.check_batch_norm(x, y, dy, dx, vectors, {"sums": sums, "means": means})
        checks.check_residual(arrays)
        if eps <= 0:
            raise KernelError(f"batch_norm: expected eps > 0, got {eps}; 1e-5 is usual")
        if self.fuses_batch_norm:
            return self._batch_norm(arrays)
        alone = self._batch_norm(without_parts(arrays))
        return with_training(arrays, with_residual(arrays, alone, self._add, self._activation), self.device)

    # ------------------------------------------------------------------ elementwise, dense
    def activation(
        self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float = 0.0
    ) -> tuple[Kernel, Kernel | None]:
        """Elementwise ``y = f(x)`` and ``dx = f'(x) * dy``; the arrays may be strided, `x` may be `y`.

        `kind` is relu, leaky_relu (slope `alpha` below 0), sigmoid, tanh or gelu (by erf). With `x` as
        `y` the derivative is formed from the output, which gelu (and leaky_relu of a slope < 0) cannot.
        Without `dy` and `dx` (None) the backward kernel is None.
        """
        if kind not in ACTIVATIONS:
            raise KernelError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {kind!r}; choose one")
        if (dy is None) != (dx is None):
            raise KernelError("activation: expected both dy and dx or neither, got one; pass both for a backward")
        checks.check_same_shape("activation", x=x, y=y, dy=dy, dx=dx)
        self._check_dtypes("activation", x=x, y=y, dy=dy, dx=dx)
        if empty.has_nothing(x):
            return empty.filled(0), None if dx is None else empty.filled(0)
        needs_input = kind == "gelu" or (kind == "leaky_relu" and alpha < 0)
        if dy is not None and checks.same_elements(x, y) and needs_input:
            raise KernelError(f"activation: expected x and y apart for the gradient of {kind}, got one array; use two")
        return self._activation(kind, x, y, dy, dx, alpha)

    def add(self, xs: Sequence[Any], y: Any, relu: bool = False) -> Kernel:
        """``y = relu?(sum of xs)``; the arrays may be strided, and `y` may be one of `xs`."""
        if not xs:
            raise KernelError("add: expected at least one array to add, got none; pass the terms of the sum")
        named = {f"xs[{i}]": x for i, x in enumerate(xs)}
        checks.check_same_shape("add", **named, y=y)
        self._check_dtypes("add", **named, y=y)
        if empty.has_nothing(y):
            return empty.filled(0)
        return self._add(list(xs), y, relu)

    def bias(self, y: Any, b: Any) -> Kernel:
        """``y = y + b`` in place; y ``(..., C)``, b ``(C,)``, or nothing where y is."""
        self._check_bias("bias", y, b)
        return empty.filled(0) if empty.has_nothing(y) else self._bias(y, b)

    def bias_gradient(self, dy: Any, db: Any) -> Kernel:
        """``db`` = sum of dy ``(..., C)`` over all but the channels, of the ranks that have nothing 0."""
        self._check_bias("bias_gradient", dy, db)
        return empty.filled(0, db) if empty.has_nothing(dy) else self._bias_gradient(dy, db)

    def _check_bias(self, what: str, y: Any, b: Any) -> None:
        self._check_dense_gradients(what, y, y, None, b)
        if not empty.has_nothing(y):
            checks.check_bias(what, y, b)

    def dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        """``y = x w^T + b``; x ``(N, F)``, w ``(K, F)``, b ``(K,)`` or None, y ``(N, K)``."""
        self._check_dtypes("dense_forward", x=x, w=w, b=b, y=y)
        if empty.has_nothing(x, y):
            return empty.bias_only(self.xp, b, y, relu=False)
        checks.check_dense("dense_forward", x, w, b, y)
        return self._dense_forward(x, w, b, y)

    def dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        """``dx = dy w``."""
        self._check_dtypes("dense_backward_data", dy=dy, w=w, dx=dx)
        if empty.has_nothing(dy, dx):
            return empty.filled(0, dx)
        checks.check_dense("dense_backward_data", dx, w, None, dy)
        return self._dense_backward_data(dy, w, dx)

    def dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        """``dw = dy^T x`` and, if not None, ``db = sum over samples of dy``."""
        self._check_dense_gradients("dense_backward_filter", x, dy, dw, db)
        if empty.has_nothing(x, dy):
            return empty.filter_of_nothing(self.xp, dy, dw, db)
        checks.check_dense("dense_backward_filter", x, dw, db, dy)
        return self._dense_backward_filter(x, dy, dw, db)

    # ------------------------------------------------------------------ gradients
    def sum_of_squares(self, terms: Sequence[tuple[Any, float]], out: Any) -> Kernel:
        """``out`` = sum over the terms, packed arrays and weights, of weight * sum of squares; out float64 ``(1,)``."""
        arrays = [array for array, _ in terms]
        checks.check_packed("sum_of_squares", **{f"array {i}": a for i, a in enumerate(arrays)})
        checks.check_scalars("sum_of_squares", out=out)
        return self._sum_of_squares(terms, out)

    def clip(self, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
        """``norm = sqrt(squares) * inverse?``, ``factor = min(1, max_norm / (norm + 1e-6))``; all float64 ``(1,)``.

        `inverse` is that of a loss scale, or None. The factor is that of torch.nn.utils.clip_grad_norm_.
        """
        checks.check_scalars("clip", squares=squares, inverse=inverse, norm=norm, factor=factor)
        return self._clip(squares, inverse, max_norm, norm, factor)

    def _sum_of_squares(self, terms: Sequence[tuple[Any, float]], out: Any) -> Kernel:
        return clipping.sum_of_squares(terms, out)

    def _clip(self, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
        return clipping.clip(squares, inverse, max_norm, norm, factor)

    # ------------------------------------------------------------------ checks
    def _check_dense_gradients(self, what: str, x: Any, dy: Any, dw: Any, db: Any) -> None:
        self._check_dtypes(what, x=x, dy=dy, dw=dw, db=db)

    def _room(self, x: Any, geometry: Geometry) -> int:
        """Channels that the input of a convolution may have in memory."""
        return self.padded_channels(x.shape[-1], x.dtype) if geometry.groups == 1 else x.shape[-1]

    def _check_dtypes(self, what: str, **arrays: Any) -> None:
        checks.check_dtypes(what, self.dtypes, self.dtype_remedy, **arrays)

    # ------------------------------------------------------------------ what a backend implements
    @abstractmethod
    def _conv_forward(self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool) -> Kernel: ...

    @abstractmethod
    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel: ...

    @abstractmethod
    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel: ...

    @abstractmethod
    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]: ...

    @abstractmethod
    def _average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]: ...

    @abstractmethod
    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels: ...

    @abstractmethod
    def _activation(
        self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float
    ) -> tuple[Kernel, Kernel | None]: ...

    @abstractmethod
    def _add(self, xs: list[Any], y: Any, relu: bool) -> Kernel: ...

    @abstractmethod
    def _bias(self, y: Any, b: Any) -> Kernel: ...

    @abstractmethod
    def _bias_gradient(self, dy: Any, db: Any) -> Kernel: ...

    @abstractmethod
    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel: ...

    @abstractmethod
    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel: ...

    @abstractmethod
    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel: ...
