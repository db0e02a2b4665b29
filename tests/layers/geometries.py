"""Geometries that are difficult for distributed convolutions and poolings, and cuts that make them harder.

They come from DistDL's tests and PhysicsNeMo's known failures: strides that do not divide the blocks, halos wider than
a block, ranks without elements, even kernels, dilation, asymmetric padding.
"""

import itertools

import numpy as np
from hypothesis import strategies as st

from halograd.dtensor import Layout
from halograd.layers import strategy
from halograd.layers.strategy import layout_of
from halograd.program import compiler

#: name -> (spatial shape, kernel, stride, padding, dilation); every extent is at least 6.
NASTY = {
    "k3 s2 p0": ((13, 9), 3, 2, 0, 1),
    "k3 s2 p1 on 8,8,8,7": ((31, 6), 3, 2, 1, 1),
    "k7 s2 p3 on 7,7,7,7": ((28, 7), 7, 2, 3, 1),
    "even kernel": ((9, 8), 2, 1, 1, 1),
    "even kernel, stride 2": ((11, 10), (4, 2), 2, ((1, 2), (0, 1)), 1),
    "halo wider than a block": ((6, 7), 5, 1, 2, 1),
    "more ranks than outputs": ((6, 8), 3, 4, 0, 1),
    "dilation 2": ((11, 9), 3, 1, 2, 2),
    "dilation 3, stride 2": ((14, 12), (2, 3), 2, 1, 3),
    "asymmetric padding": ((8, 9), 3, 1, ((2, 0), (0, 1)), 1),
    "stride 3 beyond the kernel": ((13, 8), 2, 3, 0, 1),
    "same, stride 2": ((9, 6), 3, 2, "same", 1),
    "negative padding behind": ((9, 8), 3, 1, ((1, -2), (0, -1)), 1),
    "1-D": ((17,), 5, 2, ((2, 1),), 1),
    "3-D": ((6, 7, 6), (3, 2, 3), (1, 2, 1), (1, 0, 1), 1),
}

#: Those for 6 and 8 ranks, where more ranks than rows is the rule.
CROWDED = ("k3 s2 p1 on 8,8,8,7", "halo wider than a block", "more ranks than outputs")


def skewed_boundaries(size, parts):
    """Return the boundaries of an uneven split, possibly with empty blocks; 9, 8, 8, 7 for 32 in 4."""
    if (size, parts) == (32, 4):
        return (0, 9, 17, 25, 32)
    inner = np.random.default_rng([size, parts]).integers(0, size + 1, parts - 1)
    return (0, *sorted(int(i) for i in inner), size)


def skew(monkeypatch):
    """Cut the spatial axes of all arrays unevenly for the rest of the test."""

    def layout(shape, parts, size):
        even = layout_of(shape, parts, size)
        if len(shape) == 2:
            return even
        cuts = [len({box.ranges[axis] for box in even.boxes if box.size}) for axis in range(len(shape))]
        names = ("sample", *("depth", "height", "width")[5 - len(shape) :], "channel")
        counts = [parts.get(name, 1) for name in names]
        counts[-1] *= parts.get("input_channel", 1)
        assert all(found <= wanted for found, wanted in zip(cuts, counts))
        uneven = {axis: skewed_boundaries(shape[axis], counts[axis]) for axis in range(1, len(shape) - 1)}
        return Layout.blocks(shape, counts, size, uneven)

    for module in (compiler, strategy):
        monkeypatch.setattr(module, "layout_of", layout)


@st.composite
def drawn(draw, axes=2, largest=12):
    """Draw spatial shape, kernel, stride, padding and dilation for which the window fits at least once."""
    columns = []
    for _ in range(axes):
        kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        extent = dilation * (kernel - 1) + 1
        lo, hi = draw(st.integers(0, min(3, extent - 1))), draw(st.integers(0, min(3, extent - 1)))
        size = draw(st.integers(max(6, extent - lo - hi), largest))
        columns.append((size, kernel, stride, (lo, hi), dilation))
    return tuple(zip(*columns))


def brute_force_taps(kernel, stride, lo, dilation, o):
    """Return the inputs that output `o` reads on one axis."""
    return [o * stride - lo + dilation * j for j in range(kernel)]


def every(ranges):
    """Return all index tuples of a box, given by its ranges."""
    return itertools.product(*(range(a, b) for a, b in ranges))
