"""Geometries on which convolutions and poolings go wrong, the same that the tests run on the CPU."""

from __future__ import annotations

from halograd.kernels import Geometry

__all__ = ["CONVOLUTIONS", "POOLINGS"]

#: Name, geometry, spatial extents, channels in and out.
CONVOLUTIONS: list[tuple[str, Geometry, tuple[int, ...], int, int]] = [
    ("3x3", Geometry.of((3, 3), 1, 1), (7, 6), 5, 7),
    ("3x3, 64 channels", Geometry.of((3, 3), 1, 1), (14, 14), 64, 64),
    ("3x3, no padding, 128", Geometry.of((3, 3)), (9, 10), 128, 64),
    ("3x3 stride 2", Geometry.of((3, 3), 2, 1), (9, 8), 18, 16),
    ("7x7 stride 2, 3 channels", Geometry.of((7, 7), 2, 3), (15, 17), 3, 16),
    ("4x4 stride 2", Geometry.of((4, 4), 2, 1), (8, 9), 5, 7),
    ("2x2 stride 2", Geometry.of((2, 2), 2), (6, 7), 5, 7),
    ("1x1", Geometry.of((1, 1)), (5, 4), 16, 16),
    ("1x1 stride 2", Geometry.of((1, 1), 2), (6, 5), 8, 8),
    ("dilation 2", Geometry.of((3, 3), 1, 2, dilation=2), (7, 8), 8, 8),
    ("dilation 2 stride 2", Geometry.of((3, 3), 2, 2, dilation=2), (9, 8), 5, 7),
    ("asymmetric", Geometry.of((3, 3), 1, ((0, 1), (2, 0))), (6, 5), 8, 8),
    ("asymmetric stride 2", Geometry.of((4, 3), 2, ((1, 0), (0, 2))), (8, 7), 5, 7),
    ("rows dropped", Geometry.of((3, 3), 1, ((1, -2), (0, -1))), (8, 7), 5, 7),
    ("rows dropped stride 2", Geometry.of((3, 3), 2, ((1, -1), (1, -1))), (8, 8), 5, 7),
    ("groups", Geometry.of((3, 3), 1, 1, groups=2), (6, 5), 6, 8),
    ("depthwise", Geometry.of((3, 3), 1, 1, groups=8), (6, 5), 8, 8),
    ("one row", Geometry.of((3, 3), 1, 1), (1, 5), 5, 7),
    ("one channel", Geometry.of((3, 3), 1, 1), (6, 6), 1, 1),
    ("1-D stride 2 dilation 2", Geometry.of((4,), 2, ((2, 1),), dilation=2), (11,), 5, 7),
    ("3-D", Geometry.of((3, 3, 3), 1, 1), (4, 3, 5), 5, 7),
    ("3-D stride 2", Geometry.of((3, 2, 3), 2, ((1, 1), (0, 0), (1, -1))), (5, 4, 6), 8, 8),
]

POOLINGS: list[tuple[str, Geometry, tuple[int, ...]]] = [
    ("2x2", Geometry.of((2, 2), 2), (6, 8)),
    ("3x3 stride 2", Geometry.of((3, 3), 2, 1), (9, 8)),
    ("3x3, asymmetric", Geometry.of((3, 3), 2, ((1, 0), (0, 1))), (7, 8)),
    ("dilation 2", Geometry.of((3, 3), 1, 2, dilation=2), (7, 8)),
    ("3-D", Geometry.of((2, 3, 2), (2, 2, 2), ((0, 0), (1, 1), (0, 0))), (4, 7, 6)),
]
