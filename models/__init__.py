"""Registry of the models by name, and construction of networks."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from halograd import schema
from halograd.documents import shown
from halograd.errors import UserError
from halograd.user_code import is_location

from ..layers import Network
from .diffusion import diffusion_unet
from .inception import googlenet, inception_v3
from .mesh import mesh, mesh_1k, mesh_2k
from .own import build_own, options_of_own
from .plain import alexnet, lenet5, vgg, vgg16, vgg128, vgg256, vgg512, vgg_a
from .resnet import resnet, resnet50, resnet152
from .swin import swin, swin_t, swin_unet
from .unet import unet, unet2d, unet3d
from .vit import vit, vit_b_16

__all__ = [
    "MODELS",
    "alexnet",
    "build",
    "diffusion_unet",
    "googlenet",
    "has_option",
    "inception_v3",
    "lenet5",
    "makers",
    "mesh",
    "mesh_1k",
    "mesh_2k",
    "options_of",
    "resnet",
    "resnet50",
    "resnet152",
    "swin",
    "swin_t",
    "swin_unet",
    "unet",
    "unet2d",
    "unet3d",
    "vgg",
    "vgg16",
    "vgg128",
    "vgg256",
    "vgg512",
    "vgg_a",
    "vit",
    "vit_b_16",
]

#: Functions that make a network, by the name used in configurations and on the command line.
MODELS: dict[str, Callable[..., Network]] = {
    f.__name__: f
    for f in (
        *(lenet5, alexnet, vgg_a, vgg16, vgg128, vgg256, vgg512, googlenet, inception_v3, resnet50, resnet152),
        *(mesh, mesh_1k, mesh_2k, unet2d, unet3d, vit_b_16, swin_t, swin_unet, diffusion_unet),
    )
}
#: General model by the model that presets some of its options.
_GENERAL: dict[Callable[..., Network], Callable[..., Network]] = {
    **dict.fromkeys((vgg_a, vgg16, vgg128, vgg256, vgg512), vgg),
    **dict.fromkeys((resnet50, resnet152), resnet),
    **dict.fromkeys((mesh_1k, mesh_2k), mesh),
    **dict.fromkeys((unet2d, unet3d), unet),
    vit_b_16: vit,
    swin_t: swin,
}


def makers(name: str) -> tuple[Callable[..., Network], ...]:
    """Return the functions whose parameters are the options of model `name`; the first takes precedence."""
    model = MODELS[name]
    # A model without a general one is its own, and must be listed once.
    return tuple(dict.fromkeys((model, _GENERAL.get(model, model))))


def _table(name: str) -> type[schema.Table]:
    """Return the schema of a model's options, with types and ranges from the annotations of :func:`makers`."""
    return schema.table_of(*makers(name))


def options_of(name: str) -> tuple[str, ...]:
    """Return the names of the options that the model `name` takes.

    >>> options_of("resnet50")
    ('depths', 'classes', 'channels', 'resolution', 'width', 'statistics', 'name', 'class_weights')
    """
    return tuple(_table(name).model_fields)


def has_option(name: str, option: str) -> bool:
    """Return whether the model `name`, or the function at ``FILE.py:NAME`` or ``MODULE:NAME``, has an option.

    >>> has_option("resnet50", "resolution")
    True
    """
    return option in (options_of_own(name) if is_location(name) else options_of(name))


def build(name: str, /, **options: Any) -> Network:
    """Build the model `name`, or the network of a function at ``FILE.py:NAME`` or ``MODULE:NAME``, with options.

    Raises
    ------
    UserError
        If there is no such model, an option is unknown or invalid, or the options give no valid network.
    """
    if is_location(name):
        return build_own(name, options)
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), MODELS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"model.name: expected one of {', '.join(sorted(MODELS))}, or FILE.py:FUNCTION for your own, got "
            f"{shown(name)}{hint}"
        )
    checked = schema.build(_table(name), options, at="model")
    try:
        # Only options that were given: others keep the default of the model, or of its general model.
        return MODELS[name](**{option: getattr(checked, option) for option in options})
    except ValueError as error:
        raise UserError(f"model: cannot build {name}: {error}") from error
