"""Interface of convolutions, dense layers and bias."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from . import checks
from .base import Base
from .geometry import Geometry
from .kernel import FusedActivation, Kernel, any_empty, bias_only, chain, filled

__all__ = ["Convolutions"]


class Convolutions(Base):
    """Factories of convolutions, dense layers and bias, and of their adjoints."""

    def padded_channels(self, channels: int, dtype: Any) -> int:
        """Return the number of channels that the input of a convolution should have in memory.

        Channels added for this must be zero. `conv_forward` and `conv_backward_filter` then take as `x` a view of the
        leading channels of the packed array.
        """
        return channels

    def conv_forward(
        self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, activation: FusedActivation | None = None
    ) -> Kernel:
        """Build ``y[n, o, k] = f(b[k] + sum_{t, c} w[k, t, c] * x[n, o * stride - lo + dilation * t, c])``.

        f is the `activation`. Positions outside of `x` count as 0. With several groups, c runs over the channels of the
        group that k belongs to.

        Parameters
        ----------
        x, w, b, y
            ``(N, *spatial, C)``, ``(K, *kernel, C / groups)``, ``(K,)`` or None, ``(N, *outputs, K)``; local. With one
            group, `x` may be padded in memory as :meth:`padded_channels` returns.
        """
        self._check_conv_dtypes("conv_forward", x, y, w, b)
        # Before other checks, because the channels of an empty array have no meaning.
        if any_empty(x, y):
            return self.activated(bias_only(b, y), y, activation)
        checks.check_conv("conv_forward", x, w, b, y, geometry, self._stored_channels(x, geometry))
        return self._conv_forward(x, w, b, y, geometry, activation)

    def conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        """Build ``dx`` from ``dy``, the adjoint of :meth:`conv_forward` in `x`. Rows of `dx` that no output reads
        become 0.
        """
        self._check_conv_dtypes("conv_backward_data", dx, dy, w, None)
        if any_empty(dy, dx):
            return filled(0, dx)
        # Only inputs are padded in memory, not their gradients.
        checks.check_conv("conv_backward_data", dx, w, None, dy, geometry)
        return self._conv_backward_data(dy, w, dx, geometry)

    def conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        """Build ``dw`` and, if not None, ``db`` from `x` and `dy`: the adjoint of :meth:`conv_forward` in `w` and `b`.
        """
        self._check_conv_dtypes("conv_backward_filter", x, dy, dw, db)
        if any_empty(x, dy):
            # Written all the same: gradients are summed over the ranks, and others may have inputs.
            return self._filter_without_input(dy, dw, db)
        checks.check_conv("conv_backward_filter", x, dw, db, dy, geometry, self._stored_channels(x, geometry))
        return self._conv_backward_filter(x, dy, dw, db, geometry)

    def _check_conv_dtypes(self, what: str, x: Any, y: Any, w: Any, b: Any) -> None:
        """Check the dtypes of a convolution.

        With images of 16 bits, the weights, the bias and their gradients may be float32: gradients are float32 sums.
        """
        checks.check_dtypes(what, self.conv_dtypes, self.dtype_remedy, input=x, output=y)
        checks.check_parameter_dtypes(what, x, weights=w, bias=b)

    def bias(self, y: Any, b: Any) -> Kernel:
        """Build ``y = y + b`` in place; y ``(..., C)``, b ``(C,)``. A no-op if `y` is empty."""
        self._check_bias("bias", y, b)
        return filled(0) if any_empty(y) else self._bias(y, b)

    def bias_gradient(self, dy: Any, db: Any) -> Kernel:
        """Build ``db = sum of dy`` over all axes but the channels, dy ``(..., C)``. 0 if `dy` is empty."""
        self._check_bias("bias_gradient", dy, db)
        return filled(0, db) if any_empty(dy) else self._bias_gradient(dy, db)

    def _check_bias(self, what: str, y: Any, b: Any) -> None:
        # With `y` of 16 bits, `b` may be float32, as parameters and their gradients.
        self._check_dense_gradients(what, y, y, None, b)
        if not any_empty(y):
            checks.check_bias(what, y, b)

    def _filter_without_input(self, dy: Any, dw: Any, db: Any) -> Kernel:
        """Return the kernel of the gradients of the parameters for an empty input or output."""
        if db is None or any_empty(dy):
            return filled(0, dw, db)
        # There are outputs, of padding alone: the bias has a gradient, the weights have none.
        return chain(filled(0, dw), self._bias_gradient(dy, db))

    def dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        """Build ``y = x w^T + b``; x ``(N, F)``, w ``(K, F)``, b ``(K,)`` or None, y ``(N, K)``."""
        self._check_dtypes("dense_forward", x=x, w=w, b=b, y=y)
        if any_empty(x, y):
            return bias_only(b, y)
        checks.check_dense("dense_forward", x, w, b, y)
        return self._dense_forward(x, w, b, y)

    def dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        """Build ``dx = dy w``."""
        self._check_dtypes("dense_backward_data", dy=dy, w=w, dx=dx)
        if any_empty(dy, dx):
            return filled(0, dx)
        checks.check_dense("dense_backward_data", dx, w, None, dy)
        return self._dense_backward_data(dy, w, dx)

    def dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        """Build ``dw = dy^T x`` and, if not None, ``db = sum over samples of dy``."""
        self._check_dense_gradients("dense_backward_filter", x, dy, dw, db)
        if any_empty(x, dy):
            return self._filter_without_input(dy, dw, db)
        checks.check_dense("dense_backward_filter", x, dw, db, dy)
        return self._dense_backward_filter(x, dy, dw, db)

    def _check_dense_gradients(self, what: str, x: Any, dy: Any, dw: Any, db: Any) -> None:
        """Check the dtypes of the gradients of a dense layer, which may be float32 with activations of 16 bits."""
        self._check_dtypes(what, x=x, dy=dy)
        checks.check_parameter_dtypes(what, x, dw=dw, db=db)

    def _stored_channels(self, x: Any, geometry: Geometry) -> int:
        """Return the number of channels that the input of a convolution may have in memory."""
        # Further channels would change the groups that channels belong to.
        return self.padded_channels(x.shape[-1], x.dtype) if geometry.groups == 1 else x.shape[-1]

    @abstractmethod
    def _conv_forward(
        self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, activation: FusedActivation | None
    ) -> Kernel: ...

    @abstractmethod
    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel: ...

    @abstractmethod
    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel: ...

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
