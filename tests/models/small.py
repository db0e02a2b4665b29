"""Small versions of all models, filled by global index, and gradient descent on them."""

from __future__ import annotations

import numpy as np

from halograd.kernels import get_backend
from halograd.layers import Network
from halograd.layers.strategy import Strategy
from halograd.models import build
from halograd.testing import random_array
from halograd.training.executor import Executor

BATCH = 4
CLASSES = 5
SWIN = {"window": 3, "width": 6, "depths": (2, 2), "heads": (2, 3), "patch": 2}
#: Name and options, by label. Resolutions leave several positions for the last batch norm, or it would amplify
#: rounding.
SMALL: dict[str, dict] = {
    "lenet5": {"name": "lenet5", "width": 0.5},
    "alexnet": {"name": "alexnet", "resolution": 67, "width": 1 / 16},
    "alexnet grouped": {"name": "alexnet", "resolution": 70, "width": 1 / 16, "variant": "grouped"},
    "vgg_a": {"name": "vgg_a", "resolution": 36, "width": 1 / 16},
    "vgg16": {"name": "vgg16", "resolution": 33, "width": 1 / 16},
    "vgg128": {"name": "vgg128", "resolution": 32, "width": 1 / 32},
    "vgg256": {"name": "vgg256", "resolution": 32, "width": 1 / 64},
    "vgg512": {"name": "vgg512", "resolution": 32, "width": 1 / 128},
    "googlenet": {"name": "googlenet", "resolution": 50, "width": 1 / 8},
    "googlenet auxiliary": {"name": "googlenet", "resolution": 65, "width": 1 / 8, "auxiliary": True},
    "inception_v3": {"name": "inception_v3", "resolution": 107, "width": 1 / 16},
    "inception_v3 auxiliary": {"name": "inception_v3", "resolution": 299, "width": 1 / 32, "auxiliary": True},
    "resnet50": {"name": "resnet50", "resolution": 64, "width": 2},
    "resnet152": {"name": "resnet152", "resolution": 64, "width": 2},
    "mesh_1k": {"name": "mesh_1k", "resolution": 64, "widths": (4, 6, 8)},
    "mesh_2k": {"name": "mesh_2k", "resolution": 64, "widths": (4, 6, 8)},
    "unet2d": {"name": "unet2d", "resolution": 16, "width": 4, "levels": 2},
    "unet3d": {"name": "unet3d", "resolution": 8, "width": 4, "levels": 2},
    "vit_b_16": {"name": "vit_b_16", "resolution": 16, "patch": 4, "depth": 1, "width": 8, "heads": 2}
    | {"hidden_width": 16},
    "swin_t": {"name": "swin_t", "resolution": 20, **SWIN},
    "swin_unet": {"name": "swin_unet", "resolution": (10, 14), **SWIN},
    "swin_unet 3-D": {"name": "swin_unet", "resolution": (6, 8, 4), **SWIN, "window": 2, "depths": (2, 1)},
    "diffusion_unet": {"name": "diffusion_unet", "resolution": (8, 12), "width": 4, "factors": (1, 2, 2), "groups": 2}
    | {"attention_levels": (1, 2), "heads": 2, "blocks": 1, "dropout": 0.1},
}


def small(label: str) -> Network:
    """Return the network of this label; classifiers have `CLASSES` classes."""
    given = dict(SMALL[label])
    if not given["name"].startswith(("mesh", "unet", "diffusion")):
        given["classes"] = CLASSES
    return build(given.pop("name"), **given)


def executor_of(network: Network, comm, parts=None) -> Executor:
    """Return an executor of `network` in float64 on NumPy, with filled inputs. Collective."""
    executor = Executor(network, comm, get_backend("numpy"), BATCH, Strategy(parts or {}), "float64", seed=3)
    for name, node in network.inputs.items():
        array = random_array((BATCH, *node.shape), name)
        if node.dtype != "compute":
            array = np.floor(np.abs(array) * 1000) % network.outputs["prediction"].shape[-1]
        elif name == "target":
            array = (array > 0.5).astype(float)
        executor.set_input(name, array)
    return executor


def descend(executor: Executor, fraction: float, steps: int) -> np.ndarray:
    """Return the losses before each of `steps` steps and after the last; one batch, one dropout mask. Collective.

    The learning rate is chosen so that, to first order, the loss falls by `fraction` of itself, for any network.
    """
    losses = []
    for _ in range(steps):
        executor.forward(training=True)
        losses.append(executor.loss_value())
        executor.backward()
        executor.reducer.finish()
        # A rank may hold only a part of a gradient.
        whole = executor.store.gather(executor.comm, executor.store.grads) or {}
        squares = executor.comm.bcast(sum(float(np.sum(np.square(array))) for array in whole.values()))
        for bucket in executor.store.buckets:
            bucket.params -= fraction * losses[-1] / squares * bucket.grads
    executor.forward(training=True)
    return np.array([*losses, executor.loss_value()])
