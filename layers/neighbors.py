"""Losses of neighboring elements: structural similarity, and errors of spatial gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.memory import CHUNK, total
from .layer import Passes, Shape
from .loss import Loss, check_equal_shapes, check_normalization, rows_along
from .needs import Stencil

__all__ = ["GradientError", "StructuralSimilarity"]

#: Factors of the elements of a window along each spatial axis; their product is the factor of an element.
_Taps = Sequence[Sequence[float]]


class _Neighbors(Loss):
    """Mean over all windows inside the samples, and over channels, computed in strips that stay in the cache."""

    takes_weights = weighs_channels = True
    #: Arrays of a strip that :meth:`strip` needs at once, each as large as the strip's prediction.
    arrays: int

    def __init__(self, window: int | Sequence[int], name: str | None, normalization: str) -> None:
        super().__init__(name)
        self.stencil: Stencil = Stencil(window)
        self.normalization = check_normalization(normalization)

    def check(self, *shapes: Shape) -> None:
        check_equal_shapes(self.kind, *shapes)

    def work_size(self, *shape: int) -> int:
        return self.arrays * self._rows(shape[1:])[1] * math.prod(shape[2:])

    def _rows(self, shape: Shape) -> tuple[int, int]:
        """Return the number of rows of windows in a strip, and the number of rows of elements that these windows read.

        A strip has at least as many rows of windows as a window has rows of elements, if the block has that many: then
        strips read at most half of the rows twice.
        """
        extent = self.windows(shape)[0].extent
        # A strip that reads CHUNK elements; at least as many rows as a window has, at most those of the block.
        count = min(max(CHUNK // max(1, math.prod(shape[1:])) - extent + 1, extent), shape[0] - extent + 1)
        return max(0, count), max(0, count + extent - 1)

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict, weights: Any = None) -> Any:
        loss: Any = 0.0
        # The divisor counts windows; the mean is also over channels.
        scale /= prediction.shape[-1]
        count, rows = self._rows(prediction.shape[1:])
        outputs = prediction.shape[1] - rows + count
        if dx is not None:
            dx.fill(0)  # windows overlap, so their gradients are added
        for n, x in enumerate(prediction):
            for first in range(0, outputs, count):
                # At the end of a block a strip may be shorter than its buffers: slices end with the array.
                read, own = slice(first, first + rows), slice(first, min(first + count, outputs))
                w = None if weights is None else weights[n, own]
                gradient = None if dx is None else dx[n, read]
                # Each strip uses the same work space from its beginning.
                loss = loss + self.strip(x[read], target[n, read], gradient, scale, w, _Space(work["space"]))
        return loss * scale

    def strip(self, x: Any, t: Any, dx: Any | None, scale: float, weights: Any | None, space: _Space) -> Any:
        """Return the sum of the loss over the windows in a strip of a sample ``(*spatial, C)``; add `scale` times its
        gradient to `dx` if given. Local.

        `weights` has one number per window, for all channels or for each; `space` has memory for :attr:`arrays` arrays.
        """
        raise TypeError(f"{self.kind} must override strip()")


class _Space:
    """Arrays of a strip in one piece of work space."""

    def __init__(self, array: Any) -> None:
        self._array, self._used = array, 0

    def take(self, shape: Sequence[int]) -> Any:
        """Return an array of this shape, with undefined contents, in a part of the work space that is not in use."""
        first = self._used
        self._used += math.prod(shape)
        return self._array[first : self._used].reshape(shape)


def _fitting(array: Any, shape: Sequence[int]) -> Any:
    """Return the first elements of a packed array as an array of this shape."""
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)


def _filtered(source: Any, taps: _Taps, out: Any, others: Sequence[Any]) -> Any:
    """Return the weighted sums over windows of `source` ``(*spatial, C)``, in `out`.

    `others` are three packed work arrays.
    """
    last, term = len(taps) - 1, others[2]
    # Factors of a window are products, so one axis is summed after another, each from the array of the axis before.
    for axis, factors in enumerate(taps):
        n = source.shape[axis] - len(factors) + 1
        shape = (*source.shape[:axis], n, *source.shape[axis + 1 :])
        target = _fitting(out if axis == last else others[axis % 2], shape)
        terms = [(factor, rows_along(source, axis, k, n)) for k, factor in enumerate(factors) if factor]
        _combine(target, terms, _fitting(term, shape))
        source = target
    return source


def _combine(target: Any, terms: Sequence[tuple[float, Any]], work: Any) -> None:
    (factor, array), *others = terms
    np.multiply(array, factor, out=target)
    for factor, array in others:
        np.multiply(array, factor, out=work)
        target += work


def _spread_back(gradient: Any, taps: _Taps, others: Sequence[Any]) -> Any:
    """Apply the adjoint of :func:`_filtered` to `gradient`; the result is in one of three packed work arrays."""
    for axis in reversed(range(len(taps))):
        factors, n = taps[axis], gradient.shape[axis]
        shape = (*gradient.shape[:axis], n + len(factors) - 1, *gradient.shape[axis + 1 :])
        target, term = _fitting(others[axis % 2], shape), _fitting(others[2], gradient.shape)
        target.fill(0)
        for k, factor in enumerate(factors):
            if factor:
                np.multiply(gradient, factor, out=term)
                part = rows_along(target, axis, k, n)
                part += term
        gradient = target
    return gradient


class StructuralSimilarity(_Neighbors):
    """One minus the mean structural similarity (SSIM) of prediction and target, channel by channel.

    ``loss = mean(1 - (2 m_x m_t + c1) (2 s_xt + c2) / ((m_x^2 + m_t^2 + c1) (s_x + s_t + c2)))`` with the means `m`,
    variances `s` and covariance `s_xt` of the windows under Gaussian weights, ``c1 = (k1 R)^2`` and ``c2 = (k2 R)^2``.
    The mean is over all windows that lie inside the sample ("valid"), over channels and over the batch.

    Parameters
    ----------
    data_range
        Range `R` of the data, largest minus smallest possible value, in the units that the network sees.
    window
        Elements of a window per spatial axis.
    sigma
        Standard deviation of the Gaussian, in elements.
    k1, k2
        Factors of `R` in the constants ``c1`` and ``c2``, > 0.
    normalization
        Divisor of the sum, with weights as a third input: the ``"count"`` of windows or the sum of their ``"weights"``.

    Notes
    -----
    Prediction and target are ``(N, *spatial, C)``, with 1 to 3 spatial axes of at least `window` elements. A window has
    the weight of its middle, or 0 if any of its elements has weight 0. Communication per process: the halo of the
    prediction, ``(window - 1) / 2`` elements on each side, forward and, with the gradient, backward; the sum of the
    loss.

    References
    ----------
    Wang et al., "Image quality assessment: from error visibility to structural similarity", IEEE TIP 2004. They scale
    images down first; we do not.
    """

    # Three work arrays of the filters, one product and eight statistics: see `strip`.
    arrays = 12

    def __init__(
        self,
        data_range: float,
        window: int = 11,
        sigma: float = 1.5,
        k1: float = 0.01,
        k2: float = 0.03,
        name: str | None = None,
        *,
        normalization: str = "count",
    ) -> None:
        super().__init__(window, name, normalization)
        if not 0 < data_range < math.inf:
            raise ValueError(f"data_range: expected a number > 0, got {data_range!r}")
        if not (isinstance(window, int) and window > 0 and sigma > 0):
            raise ValueError(f"window, sigma: expected an integer and a number, both > 0, got {window!r}, {sigma!r}")
        if not (k1 > 0 and k2 > 0):
            raise ValueError(f"k1, k2: expected numbers > 0, got {k1!r}, {k2!r}")
        self.window, self.c1, self.c2 = window, (k1 * data_range) ** 2, (k2 * data_range) ** 2
        weights = [math.exp(-(((k - (window - 1) / 2) / sigma) ** 2) / 2) for k in range(window)]
        self.taps = [w / sum(weights) for w in weights]
        # All in the forward pass, because `local` also writes the gradient.
        self.passes = Passes((30 * window, 0), (0, 0))

    def flops(self, *shapes: Shape) -> int:
        return 20 * self.window * (len(shapes[0]) - 1) * math.prod(shapes[0])

    def strip(self, x: Any, t: Any, dx: Any | None, scale: float, weights: Any | None, space: _Space) -> Any:
        taps = [self.taps] * (x.ndim - 1)
        outputs = (*(n - self.window + 1 for n in x.shape[:-1]), x.shape[-1])
        # Arrays hold several quantities one after the other, so that a strip stays in the cache.
        others, product = [space.take(x.shape) for _ in range(3)], space.take(x.shape)
        mx, mt, xx, tt, xt, a, b, similarity = (space.take(outputs) for _ in range(8))
        for out, first, second in ((xx, x, x), (tt, t, t), (xt, x, t)):
            _filtered(np.multiply(first, second, out=product), taps, out, others)
        for out, source in ((mx, x), (mt, t)):
            np.copyto(product, source)
            _filtered(product, taps, out, others)
        # A work array of the filters, free until the gradients are spread back.
        work = _fitting(others[0], outputs)
        # xt = 2 s_xt + c2, a = 2 m_x m_t + c1; then b = s_x + s_t + c2, xx = m_x^2 + m_t^2 + c1.
        np.multiply(mx, mt, out=a)
        xt -= a
        xt *= 2
        xt += self.c2
        a *= 2
        a += self.c1
        np.add(xx, tt, out=b)
        np.multiply(mx, mx, out=xx)
        xx += np.multiply(mt, mt, out=work)
        b -= xx
        b += self.c2
        xx += self.c1
        np.multiply(xx, b, out=tt)
        np.divide(np.multiply(a, xt, out=similarity), tt, out=similarity)
        np.subtract(1, similarity, out=work)
        if weights is not None:
            work *= weights
        loss = total(work)
        if dx is None:
            return loss
        # With S = a xt / (xx b): dS/dm_x = 2 m_t (xt - a) / (xx b) - 2 m_x S (1 / xx - 1 / b), dS/d(mean of x^2) =
        # -S / b, dS/d(mean of x t) = 2 a / (xx b). The factor of all is -scale times the weight.
        factor = np.multiply(1 if weights is None else weights, -scale, out=work)
        np.subtract(xt, a, out=xt)
        xt *= mt
        xt /= tt
        np.divide(similarity, b, out=b)
        np.divide(similarity, xx, out=xx)
        xx -= b
        xx *= mx
        xt -= xx
        xt *= 2
        np.divide(a, tt, out=a)
        a *= 2
        b *= -2
        for gradient in (xt, a, b):
            gradient *= factor
        dx += _spread_back(xt, taps, others)
        for gradient, values in ((a, t), (b, x)):
            back = _spread_back(gradient, taps, others)
            back *= values
            dx += back
        return loss


#: Name of an operator -> factors along the axis of the derivative, and along the other axes.
OPERATORS = {"difference": ((-1.0, 1.0), (1.0, 0.0)), "sobel": ((-0.5, 0.0, 0.5), (0.25, 0.5, 0.25))}
POWERS = (1, 2)


class GradientError(_Neighbors):
    """Mean difference of the spatial gradients of prediction and target, channel by channel.

    ``loss = mean(|D_a x - D_a t|^power)`` over all spatial axes `a`, windows inside the sample, channels, and samples.

    Parameters
    ----------
    operator
        ``"difference"``: ``D_a x = x[i + 1] - x[i]`` along the axis; the last element of every axis has no window.
        ``"sobel"``: Sobel's operator, the central difference ``(x[i + 1] - x[i - 1]) / 2`` along the axis, averaged
        with the factors 1/4, 1/2, 1/4 along all others; elements at the border have no window.
    power
        1 or 2; with 1, the derivative of ``|d|`` at ``d = 0`` is taken as 0.
    normalization
        Divisor of the sum, with weights as a third input: the ``"count"`` of windows or the sum of their ``"weights"``.

    Notes
    -----
    Prediction and target are ``(N, *spatial, C)``; gradients are per element, whatever its extent in space. A window (2
    or 3 elements along every axis) has the weight of its element `i`, or 0 if any of its elements has weight 0.
    Communication per process: the halo of the prediction, 1 element after (and for ``"sobel"`` before) the block,
    forward and, with the gradient, backward; the sum of the loss.

    References
    ----------
    Mathieu, Couprie and LeCun, "Deep multi-scale video prediction beyond mean square error", ICLR 2016, Section 3.2.
    They compare the absolute values of the gradients, so that a wrong sign costs nothing; we compare the gradients.
    """

    # The error, its derivative and three work arrays of the filters.
    arrays = 5
    passes = Passes((50, 0), (0, 0))

    def __init__(
        self, operator: str = "difference", power: int = 1, name: str | None = None, *, normalization: str = "count"
    ) -> None:
        if operator not in OPERATORS:
            raise ValueError(f"operator: expected one of {tuple(OPERATORS)}, got {operator!r}")
        if power not in POWERS:
            raise ValueError(f"power: expected one of {POWERS}, got {power!r}")
        super().__init__(len(OPERATORS[operator][0]), name, normalization)
        self.operator, self.power = operator, power

    def flops(self, *shapes: Shape) -> int:
        return 8 * (len(shapes[0]) - 1) ** 2 * math.prod(shapes[0])

    def strip(self, x: Any, t: Any, dx: Any | None, scale: float, weights: Any | None, space: _Space) -> Any:
        along, across = OPERATORS[self.operator]
        axes = x.ndim - 1
        outputs = (*(n - len(along) + 1 for n in x.shape[:-1]), x.shape[-1])
        error, d, *others = space.take(x.shape), space.take(outputs), *(space.take(x.shape) for _ in range(3))
        # The operators are linear: D x - D t = D (x - t) needs half of the filters.
        np.subtract(x, t, out=error)
        loss: Any = 0.0
        for axis in range(axes):
            taps = [along if other == axis else across for other in range(axes)]
            _filtered(error, taps, d, others)
            values, slope = (_fitting(array, outputs) for array in others[:2])
            np.sign(d, out=slope)
            # |d| or d^2; below, their derivatives sign(d) and 2 d.
            np.multiply(d, slope if self.power == 1 else d, out=values)
            if weights is not None:
                values *= weights
            loss = loss + total(values)
            if dx is not None:
                np.multiply(slope if self.power == 1 else d, scale * self.power / axes, out=d)
                if weights is not None:
                    d *= weights
                dx += _spread_back(d, taps, others)
        return loss / axes
