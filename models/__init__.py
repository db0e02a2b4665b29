"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from halograd.errors import UserError
from halograd.layers import Network
from halograd.models.lenet import lenet5
from halograd.models.mesh import mesh, mesh_1k, mesh_2k
from halograd.models.resnet import resnet, resnet50
from halograd.models.unet import unet, unet2d, unet3d

__all__ = ["MODELS", "build", "lenet5", "mesh", "mesh_1k", "mesh_2k", "resnet", "resnet50", "unet", "unet2d", "unet3d"]

#: Functions that make a network, by the name used in configurations.
MODELS: dict[str, Callable[..., Network]] = {
    f.__name__: f for f in (lenet5, mesh, mesh_1k, mesh_2k, resnet50, unet2d, unet3d)
}


def build(name: str, **options: Any) -> Network:
    """The network called `name`, with its options.

    Raises
    ------
    UserError
        If there is no such model, or it does not take one of the options, or refuses its value.
    """
    if name not in MODELS:
        raise UserError(f"model.name: expected one of {', '.join(sorted(MODELS))}, got {name!r}")
    try:
        return MODELS[name](**options)
    except TypeError as error:
        known = ", ".join(p for p in inspect.signature(MODELS[name]).parameters)
        raise UserError(f"model: {name} was not made: {error}; its options are {known}") from error
    except ValueError as error:
        raise UserError(f"model: {name} was not made: {error}") from error
