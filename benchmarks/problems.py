"""Problems to time: networks, their initial weights and their data, the same for every contestant."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from halograd.layers import BinaryCrossEntropyWithLogits, Conv, Input, Layer, Network, Node
from halograd.models import mesh, mesh_2k, resnet50, unet2d, unet3d

__all__ = ["DEFAULT", "PLAIN", "PROBLEMS", "Problem", "has_relu"]

_WIDTHS = (32, 48, 64, 96, 128, 128)


@dataclass(frozen=True)
class Problem:
    """Network with a batch and a learning rate.

    Attributes
    ----------
    make
        Function that returns the network.
    batch
        Samples per step.
    rate
        Learning rate of plain SGD: large enough that the losses of the first steps differ visibly, small enough
        that rounding errors do not grow beyond what the comparison of losses allows.
    """

    make: Callable[[], Network]
    batch: int
    rate: float

    def weights(self, network: Network) -> dict[str, np.ndarray]:
        """Return the initial parameters of halograd with seed 0 as float32, by ``layer/parameter``."""
        return {name: spec.initial(name, 0).astype(np.float32) for name, spec in network.parameters().items()}

    def data(self, network: Network) -> dict[str, np.ndarray]:
        """Return packed inputs ``(N, *spatial, C)`` by name: normally distributed samples, random targets."""
        result = {}
        for name, node in network.inputs.items():
            draw = np.random.default_rng([7, zlib.crc32(name.encode())])
            shape = (self.batch, *node.shape)
            if name != "target":
                result[name] = draw.standard_normal(shape, np.float32)
            elif node.dtype == "compute":
                result[name] = (draw.random(shape) > 0.5).astype(np.float32)
            else:
                classes = network.outputs["prediction"].shape[-1]
                result[name] = draw.integers(0, classes, shape).astype(node.dtype)
        return result


def has_relu(layer: Layer) -> bool:
    """Return whether a layer's own kernels end with a ReLU. Raises ValueError for another activation."""
    kind = getattr(layer, "activation", None)
    if kind not in (None, "relu"):
        raise ValueError(f"{layer.name}: expected no activation or relu, which peers compute as well, got {kind!r}")
    return kind is not None


def convolutions(extent: int, widths: tuple[int, ...], convs: int, stride: int, channels: int = 18) -> Network:
    """Return a network of only 3 x 3 convolutions with ReLU; the first convolution of each width has a stride."""
    y: Node = Input((extent, extent, channels), name="x")
    for block, width in enumerate(widths):
        for i in range(convs):
            y = Conv(width, 3, 1 if i else stride, padding=1, activation="relu", name=f"conv{block}_{i}")(y)
    logits = Conv(1, 3, padding=1, name="predict")(y)
    loss = BinaryCrossEntropyWithLogits(name="bce")(logits, Input(logits.shape, name="target"))
    return Network({"prediction": logits, "loss": loss}, name="convolutions")


PROBLEMS: dict[str, Problem] = {
    "mesh-256": Problem(lambda: mesh(256, channels=18, widths=_WIDTHS, convs=3), 1, 1e-4),
    "mesh-512": Problem(lambda: mesh(512, channels=18, widths=_WIDTHS, convs=3), 1, 1e-4),
    "resnet50": Problem(lambda: resnet50(), 1, 1e-6),
    "resnet50-b4": Problem(lambda: resnet50(), 4, 1e-6),
    "unet-256": Problem(lambda: unet2d(256, channels=1, classes=2, width=64, levels=4), 1, 3e-3),
    # Operations that every library for cut images supports.
    "convs-512": Problem(lambda: convolutions(512, (32,), 6, 1), 1, 3e-3),
    "blocks-512": Problem(lambda: convolutions(512, (32, 48, 64, 96), 3, 2), 1, 3e-3),
    # Networks whose memory is compared with outputs that are computed again.
    "mesh_2k-256": Problem(lambda: mesh_2k(resolution=256), 1, 1e-8),
    "mesh_2k-1024": Problem(lambda: mesh_2k(resolution=1024), 1, 1e-8),
    "resnet50-1024": Problem(lambda: resnet50(resolution=1024), 1, 1e-6),
    "unet3d-64": Problem(lambda: unet3d(64), 1, 1e-2),
    "unet3d-128": Problem(lambda: unet3d(128), 1, 3e-3),
    # Small problems, to try the benchmark itself.
    "mesh-tiny": Problem(lambda: mesh(64, channels=3, widths=(8, 8), convs=2), 1, 0.05),
    "resnet-tiny": Problem(lambda: resnet50(width=8, resolution=128, classes=10), 2, 1e-6),
    "blocks-tiny": Problem(lambda: convolutions(64, (8, 8), 2, 2), 1, 0.05),
    "unet3d-tiny": Problem(lambda: unet3d(16, width=8, levels=2), 1, 0.05),
    "unet-tiny": Problem(lambda: unet2d(32, width=8, levels=2), 2, 0.05),
}

DEFAULT = ("mesh-256", "mesh-512", "resnet50", "unet-256", "convs-512", "blocks-512")
#: Networks of convolutions only.
PLAIN = ("convs-512", "blocks-512", "blocks-tiny")
