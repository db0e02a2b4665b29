"""Stencils: kernel, stride, padding and dilation of a sliding layer, for any number of spatial axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

from ..dtensor import Window

__all__ = ["Stencil"]

_PerAxis = int | Sequence[int]


@dataclass(frozen=True)
class Stencil:
    """A sliding window over the spatial axes.

    Attributes
    ----------
    kernel, stride, dilation
        One number for all spatial axes or one per axis.
    padding
        ``"same"`` (output size ``ceil(n / stride)``, the odd element behind, as TensorFlow and torch do), one
        number for both sides of all axes, one per axis, or one ``(lo, hi)`` pair per axis.
    rounding
        ``"floor"``: windows lie within the padded array. ``"ceil"``: one more may reach beyond its end, if it begins
        before the padding behind.
    """

    kernel: _PerAxis
    stride: _PerAxis = 1
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0
    dilation: _PerAxis = 1
    rounding: str = "floor"

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "padding", "dilation"):
            object.__setattr__(self, name, _hashable(getattr(self, name)))

    def windows(self, spatial: Sequence[int]) -> tuple[Window, ...]:
        """One window per spatial axis, for inputs of these global spatial sizes."""
        return self._windows(tuple(spatial))

    @lru_cache(maxsize=16384)  # noqa: B019  (small, and asked for many times per layer and cut)
    def _windows(self, spatial: tuple[int, ...]) -> tuple[Window, ...]:
        axes = len(spatial)
        kernel, stride = spread("kernel", self.kernel, axes), spread("stride", self.stride, axes)
        dilation = spread("dilation", self.dilation, axes)
        pads = self._pads(spatial, kernel, stride, dilation)
        found = tuple(Window(k, s, lo, hi, d) for k, s, (lo, hi), d in zip(kernel, stride, pads, dilation))
        return found if self.rounding == "floor" else tuple(map(_reaching_beyond, found, spatial))

    def _pads(self, spatial, kernel, stride, dilation) -> list[tuple[int, int]]:
        padding = self.padding
        if isinstance(padding, str):
            if padding != "same":
                raise ValueError(f"padding: expected 'same', numbers or (lo, hi) pairs, got {padding!r}")
            return [_same(n, k, s, d) for n, k, s, d in zip(spatial, kernel, stride, dilation)]
        if isinstance(padding, int):
            return [(padding, padding)] * len(spatial)
        if len(padding) != len(spatial):
            raise ValueError(f"padding: expected one entry for each of {len(spatial)} spatial axes, got {padding}")
        return [(p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in padding]

    def output_spatial(self, spatial: Sequence[int], what: str) -> tuple[int, ...]:
        """Global spatial output sizes; refuses, naming `what`, a window that does not fit once."""
        windows = self.windows(spatial)
        sizes = tuple(w.output_size(n) for w, n in zip(windows, spatial))
        if min(sizes, default=1) < 1:
            raise ValueError(
                f"{what}: a window of extent {[w.extent for w in windows]} does not fit into {tuple(spatial)} with "
                f"padding {[(w.pad_lo, w.pad_hi) for w in windows]}; enlarge the input or the padding"
            )
        return sizes


def _hashable(value: Any) -> Any:
    """Tuples of Python's numbers for lists and arrays of any."""
    if isinstance(value, Integral):
        return int(value)
    return tuple(map(_hashable, value)) if isinstance(value, Iterable) and not isinstance(value, str) else value


def spread(what: str, value: _PerAxis, axes: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * axes
    if len(value) != axes:
        raise ValueError(f"{what}: expected one number or {axes}, got {tuple(value)}")
    return tuple(value)


def _reaching_beyond(w: Window, size: int) -> Window:
    """The window with room behind for the last one that begins before the padding there.

    >>> _reaching_beyond(Window(3, 2, 1, 1, 1), 6).pad_hi, _reaching_beyond(Window(2, 2, 1, 1, 1), 5).pad_hi
    (2, 1)
    """
    outputs = -(-(size + w.pad_lo + w.pad_hi - w.extent) // w.stride) + 1
    outputs -= (outputs - 1) * w.stride >= size + w.pad_lo
    end = (outputs - 1) * w.stride + w.extent - size - w.pad_lo if outputs > 0 else 0
    return Window(w.kernel, w.stride, w.pad_lo, max(w.pad_hi, end), w.dilation)


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    extent = dilation * (kernel - 1) + 1
    total = max(0, (-(-size // stride) - 1) * stride + extent - size)
    return total // 2, total - total // 2
