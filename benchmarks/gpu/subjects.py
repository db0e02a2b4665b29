"""Networks to time on a GPU, with weights and data that are the same for halograd and torch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halograd.layers import Network
from halograd.models import build

__all__ = ["MOMENTUM", "RATE", "SUBJECTS", "Subject"]

#: Settings of the optimizer, SGD.
MOMENTUM, RATE = 0.9, 1e-4


@dataclass(frozen=True)
class Subject:
    """Network, by the name of its model and its options, with a batch."""

    title: str
    model: str
    batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def network(self) -> Network:
        return build(self.model, **self.options)

    def weights(self, network: Network) -> dict[str, np.ndarray]:
        """Return the initial parameters of seed 0 in float32, by ``layer/parameter``."""
        return {name: spec.initial(name, 0).astype(np.float32) for name, spec in network.parameters().items()}

    def data(self, network: Network) -> dict[str, np.ndarray]:
        """Return inputs ``(N, *spatial, C)`` by name: normally distributed samples, random targets."""
        result = {}
        for name, node in network.inputs.items():
            draw, shape = np.random.default_rng([7, zlib.crc32(name.encode())]), (self.batch, *node.shape)
            if name != "target":
                result[name] = draw.standard_normal(shape, np.float32)
            elif node.dtype == "compute":
                result[name] = (draw.random(shape, np.float32) > 0.5).astype(np.float32)
            else:
                result[name] = draw.integers(0, network.outputs["prediction"].shape[-1], shape).astype(node.dtype)
        return result


#: Subjects by short name, the most important first.
SUBJECTS: dict[str, Subject] = {
    "mesh-2K": Subject("mesh-2K, batch 1", "mesh_2k"),
    "resnet50": Subject("ResNet-50 224, batch 64", "resnet50", 64),
    "resnet50-b1": Subject("ResNet-50 224, batch 1", "resnet50", 1),
    "mesh-1K": Subject("mesh-1K, batch 1", "mesh_1k"),
    "unet-512": Subject("U-Net 512, batch 1", "unet2d", 1, {"resolution": 512}),
    "unet-3d": Subject("U-Net 128^3, batch 1", "unet3d", 1, {"resolution": 128}),
}
