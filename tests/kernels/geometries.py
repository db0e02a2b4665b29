"""Geometries of convolutions, among them those on which distributed convolutions often fail."""

from __future__ import annotations

from dataclasses import dataclass

from halograd.kernels import Geometry


@dataclass(frozen=True)
class Case:
    """Convolution to test: its name, geometry and shapes."""

    name: str
    geometry: Geometry
    spatial: tuple[int, ...]
    samples: int = 2
    channels: int = 5
    filters: int = 7

    @property
    def shapes(self):
        """Return the shapes of x, w, b, y."""
        g = self.geometry
        return (
            (self.samples, *self.spatial, self.channels),
            (self.filters, *g.kernel, self.channels // g.groups),
            (self.filters,),
            (self.samples, *g.output_shape(self.spatial), self.filters),
        )

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("k3s1p1", Geometry.of((3, 3), 1, 1), (7, 6)),
    Case("k3s1p1 16 channels", Geometry.of((3, 3), 1, 1), (6, 7), channels=16, filters=32),
    Case("k3s1p1 18 channels", Geometry.of((3, 3), 1, 1), (8, 8), channels=18, filters=32),
    Case("k3s1p0 128 channels", Geometry.of((3, 3)), (5, 6), samples=1, channels=128, filters=64),
    Case("k3s2p0", Geometry.of((3, 3), 2), (9, 7)),
    Case("k3s2p1 odd", Geometry.of((3, 3), 2, 1), (9, 7)),
    Case("k3s2p1 even", Geometry.of((3, 3), 2, 1), (8, 8), channels=18, filters=16),
    Case("7/2/3", Geometry.of((7, 7), 2, 3), (7, 9), channels=3, filters=16),
    Case("5/2/2", Geometry.of((5, 5), 2, 2), (9, 8)),
    Case("2/2/0", Geometry.of((2, 2), 2), (6, 7)),
    Case("4/2/1", Geometry.of((4, 4), 2, 1), (8, 9)),
    Case("1x1", Geometry.of((1, 1)), (5, 4), channels=16, filters=16),
    Case("1x1s2 floor slack", Geometry.of((1, 1), 2), (6, 5)),
    Case("dilation 2", Geometry.of((3, 3), 1, 2, dilation=2), (7, 8)),
    Case("dilation 2 stride 2", Geometry.of((3, 3), 2, 2, dilation=2), (9, 8)),
    Case("asymmetric", Geometry.of((3, 3), 1, ((0, 1), (2, 0))), (6, 5)),
    Case("asymmetric stride 2", Geometry.of((4, 3), 2, ((1, 0), (0, 2))), (8, 7)),
    Case("negative hi", Geometry.of((3, 3), 1, ((1, -2), (0, -1))), (8, 7)),
    Case("negative hi stride 2", Geometry.of((3, 3), 2, ((1, -1), (1, -1))), (8, 8)),
    Case("groups", Geometry.of((3, 3), 1, 1, groups=2), (6, 5), channels=6, filters=8),
    Case("groups 16", Geometry.of((3, 3), 2, 1, groups=2), (6, 5), channels=32, filters=32),
    Case("depthwise", Geometry.of((3, 3), 1, 1, groups=8), (6, 5), channels=8, filters=8),
    Case("depthwise x2", Geometry.of((3, 3), 2, 1, groups=6), (6, 5), channels=6, filters=12),
    Case("one row", Geometry.of((3, 3), 1, ((1, 1), (1, 1))), (1, 5)),
    Case("one channel", Geometry.of((3, 3), 1, 1), (6, 6), channels=1, filters=1),
    Case("1-D", Geometry.of((3,), 1, 1), (9,)),
    Case("1-D stride 2 dilation 2", Geometry.of((4,), 2, ((2, 1),), dilation=2), (11,)),
    Case("1-D groups", Geometry.of((5,), 1, 2, groups=4), (9,), channels=8, filters=4),
    Case("3-D", Geometry.of((3, 3, 3), 1, 1), (4, 3, 5)),
    Case("3-D stride 2", Geometry.of((3, 2, 3), 2, ((1, 1), (0, 0), (1, -1))), (5, 4, 6)),
    Case("3-D dilation", Geometry.of((2, 1, 3), 1, ((0, 0), (0, 0), (2, 2)), dilation=(2, 1, 2)), (4, 3, 5)),
]
