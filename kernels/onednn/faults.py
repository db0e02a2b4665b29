"""Faulty implementations of oneDNN and the exact cases in which they are refused; the next legal one is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..geometry import Geometry

__all__ = ["FAULTS", "Candidate", "Fault", "margin_of", "reason"]


FORWARD, GRADIENT = "convolution_forward", "convolution_backward_weights"


@dataclass(frozen=True)
class Candidate:
    """A convolution, or a gradient of one, and the oneDNN implementation that would compute it.

    Attributes
    ----------
    kind, impl
        Kind of the primitive, and name of the implementation.
    channels, spatial, outputs
        Number of input channels of a group, spatial extents of input and output.
    geometry
        Window, strides and padding.
    channels_last
        Whether the implementation reads the input as ``(N, *spatial, C)``.
    """

    kind: str
    impl: str
    channels: int
    spatial: Sequence[int]
    outputs: Sequence[int]
    geometry: Geometry
    channels_last: bool

    @property
    def vector(self) -> int:
        """Number of float32 elements per vector register."""
        return 8 if "avx2" in self.impl else 16

    @property
    def nested(self) -> bool:
        """Whether the implementation calls another one, whose name oneDNN does not report."""
        return self.impl.startswith("jit_uni_ncsp_convolution")

    @property
    def gathers(self) -> bool:
        """Whether a gradient of 1 x 1 weights first copies the positions that the strides select to its scratchpad."""
        point = set(self.geometry.kernel) == {1} and set(self.geometry.stride) != {1}
        return self.kind == GRADIENT and point and (self.impl.startswith("jit_1x1") or self.nested)


@dataclass(frozen=True)
class Fault:
    """A fault of an implementation.

    Attributes
    ----------
    impl, where, what, seen
        The implementation, the cases in which it is refused, its wrong behavior, and the versions of oneDNN that showed
        this behavior: for messages and `halograd doctor`. In these cases it is refused in all versions.
    applies
        Function that returns whether a candidate is one of these cases.
    """

    impl: str
    where: str
    what: str
    seen: str
    applies: Callable[[Candidate], bool]

    def __str__(self) -> str:
        return f"{self.impl} where {self.where}: {self.what} (seen in {self.seen})"


def _overruns(candidate: Candidate) -> bool:
    # The copy needs one number per position and channel, and that much is allocated. But each step over the positions
    # starts at a multiple of the channel block, which is one vector (`rp.ws = ... + sp * jcp.ic_block` in
    # jit_avx2_1x1_convolution.cpp and jit_avx512_common_1x1_convolution.cpp, `jcp.is * jcp.ic` in
    # rtus_prepare_space_info). With fewer channels than a vector, later steps start beyond the end. With more they
    # overlap, which is harmless: each step is used before the next one is copied. Blocked images have whole blocks.
    # Whether a second step occurs depends on cache sizes and threads, so the check ignores it.
    return candidate.gathers and candidate.channels < candidate.vector and (candidate.channels_last or candidate.nested)


def _is_wrong(candidate: Candidate) -> bool:
    # Found by comparison with NumPy.
    g = candidate.geometry
    return (
        candidate.kind == GRADIENT
        and candidate.impl.startswith("jit:avx")
        and g.ndim == 3
        and any(
            lo > 2 and n < extent + stride
            for n, (lo, _), extent, stride in zip(candidate.spatial, g.padding, g.extent, g.stride)
        )
    )


def _reads_too_little(candidate: Candidate) -> bool:
    # In 3.7.1, found by comparison with NumPy. In 3.2.0 the implementation is called "brgconv" and is correct. It is
    # wrong where it copies the input first (`exec_trans` in jit_brgemm_conv_utils.cpp): with AMX, and with one channel.
    g, large = candidate.geometry, candidate.impl.startswith(("brg_conv_fwd:avx512", "brg_conv_fwd:avx10"))
    window = candidate.outputs[-1] == 1 and g.kernel[-1] > 1 and g.stride[-1] > 1
    return candidate.kind == FORWARD and (large or candidate.nested) and window


#: All known versions have the first two.
FAULTS = (
    Fault(
        "jit_1x1",
        "a 1 x 1 convolution of a stride above 1 has fewer channels than a vector has numbers (8, AVX-512: 16)",
        "its gradient of weights writes outside of its scratchpad",
        "3.2.0, 3.7.1",
        _overruns,
    ),
    Fault(
        "jit",
        "a 3-D convolution has three rows of padding or more before an axis that ends in the first whole window",
        "its gradient of weights is wrong",
        "3.2.0, 3.7.1",
        _is_wrong,
    ),
    Fault(
        "brg_conv_fwd",
        "a convolution has one output along the last axis, and a stride and a window above 1 there (AVX-512)",
        "its outputs are wrong",
        "3.7.1",
        _reads_too_little,
    ),
)


def reason(candidate: Candidate) -> str:
    """Return the reason why an implementation must not be used; "" if it may be used."""
    return next((fault.what for fault in FAULTS if fault.applies(candidate)), "")


def margin_of(candidate: Candidate) -> int:
    """Return the margin after the scratchpad [B]: a vector per output for implementations of a faulty family, else 0.

    No write into the margin has been observed.
    """
    return 4 * candidate.vector * math.prod(candidate.outputs) if candidate.gathers else 0
