"""Implementations of oneDNN that are refused, and exactly where: the next legal one is used instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..geometry import Geometry

__all__ = ["FAULTS", "Fault", "FilterGradient", "margin_of", "reason"]


@dataclass(frozen=True)
class FilterGradient:
    """A gradient of weights as oneDNN would compute it.

    Attributes
    ----------
    impl
        Name of the implementation.
    channels, spatial, outputs
        Number of input channels, spatial extents of input and output.
    geometry
        Window, strides and padding.
    channels_last
        Whether the implementation reads the input as ``(N, *spatial, C)``.
    """

    impl: str
    channels: int
    spatial: Sequence[int]
    outputs: Sequence[int]
    geometry: Geometry
    channels_last: bool

    @property
    def lanes(self) -> int:
        """Numbers of float32 in a vector."""
        return 16 if "avx512" in self.impl or "avx10" in self.impl else 8

    @property
    def gathers(self) -> bool:
        """Whether a 1 x 1 kernel first copies the positions that the strides hit to its scratchpad."""
        return self.impl.startswith("jit_1x1") and set(self.geometry.stride) != {1}


@dataclass(frozen=True)
class Fault:
    """A fault of an implementation of the gradient of weights.

    Attributes
    ----------
    impl, where, what
        The implementation, where it is refused, and what it does there: for messages and `halograd doctor`.
    applies
        Whether a gradient is among those.
    """

    impl: str
    where: str
    what: str
    applies: Callable[[FilterGradient], bool]

    def __str__(self) -> str:
        return f"{self.impl} where {self.where}: {self.what}"


def _overruns(gradient: FilterGradient) -> bool:
    # The copy has as many numbers per position as there are channels, and so many are booked. But each step over the
    # positions begins at a multiple of the block of channels, which is a vector (`rp.ws = ... + sp * jcp.ic_block` in
    # jit_avx2_1x1_convolution.cpp and jit_avx512_common_1x1_convolution.cpp, `jcp.is * jcp.ic` in
    # rtus_prepare_space_info): with fewer channels than that the later steps begin after the end. With more they
    # overlap, which is harmless: each step is used before the next one is copied. Blocked images have whole blocks.
    # Whether there is a second step depends on sizes of caches and on the threads, so it is not asked for.
    return gradient.gathers and gradient.channels_last and gradient.channels < gradient.lanes


def _is_wrong(gradient: FilterGradient) -> bool:
    # Found by comparison with NumPy.
    g = gradient.geometry
    return (
        gradient.impl.startswith("jit:avx")
        and g.ndim == 3
        and any(
            lo > 2 and n < extent + stride
            for n, (lo, _), extent, stride in zip(gradient.spatial, g.padding, g.extent, g.stride)
        )
    )


#: Faults of 3.2.0 and 3.7.1 alike; no version is known to be without them.
FAULTS = (
    Fault(
        "jit_1x1",
        "a 1 x 1 convolution of a stride above 1 has fewer channels than a vector has numbers (8, AVX-512: 16)",
        "its gradient of weights writes outside of its scratchpad",
        _overruns,
    ),
    Fault(
        "jit",
        "a 3-D convolution has three rows of padding or more before an axis that ends in the first whole window",
        "its gradient of weights is wrong",
        _is_wrong,
    ),
)


def reason(gradient: FilterGradient) -> str:
    """Return why an implementation must not be used; "" if it may be."""
    return next((fault.what for fault in FAULTS if fault.applies(gradient)), "")


def margin_of(gradient: FilterGradient) -> int:
    """Return the bytes to have after the scratchpad: a vector per output for an implementation of a faulty family.

    No write there is known.
    """
    return 4 * gradient.lanes * math.prod(gradient.outputs) if gradient.gathers else 0
