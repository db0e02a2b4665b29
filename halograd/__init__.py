"""halograd: train convolutional networks on samples that have outgrown one device.

This package exports the names that a script needs. They are loaded at first use, so that ``import halograd`` does not
start MPI. Each name has its own documentation: ``help(halograd.Executor)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:  # for static tools; at run time `__getattr__` loads the names
    from . import layers
    from .comm import Communicator, boot, leave
    from .dtensor import Box, DistTensor, Exchange, Halo, Layout
    from .errors import UserError
    from .fitting import fit
    from .kernels import get_backend
    from .layers import *  # noqa: F403  (all layers are exported)
    from .torch_models import from_torch, to_torch
    from .training.executor import Executor
    from .training.monitors import Callback
    from .training.optimizers import LAMB, LARS, SGD, Adam, AdamW, Lion
    from .training.schedules import Constant, Cosine, Linear, OneCycle, Plateau, Polynomial, StepDecay, WarmUp
    from .training.trainer import Trainer

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adam",
    "AdamW",
    "Box",
    "Callback",
    "Communicator",
    "Constant",
    "Cosine",
    "DistTensor",
    "Exchange",
    "Executor",
    "Halo",
    "Layout",
    "Linear",
    "Lion",
    "OneCycle",
    "Plateau",
    "Polynomial",
    "StepDecay",
    "Trainer",
    "UserError",
    "WarmUp",
    "__version__",
    "boot",
    "fit",
    "from_torch",
    "get_backend",
    "leave",
    "to_torch",
]
_NAMES = tuple(__all__)
if TYPE_CHECKING:
    __all__ += layers.__all__
else:  # `__getattr__` adds the layers, which are not loaded yet
    del __all__

#: Modules of the exported names; first those that import least: a name loads the modules before its own, too.
_MODULES = (
    "errors",
    "comm",
    "training.schedules",
    "training.monitors",
    "dtensor",
    "kernels",
    "training.optimizers",
    "training.executor",
    "training.trainer",
    "fitting",
    "torch_models",
)
_FOLDERS = (
    *("comm", "data", "device", "dtensor", "interchange", "kernels", "layers", "models", "onnx", "perfmodel"),
    *("testing", "training"),
)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        modules = (importlib.import_module(f"halograd.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if name in module.__all__)
    if name in _FOLDERS:
        return importlib.import_module(f"halograd.{name}")
    if name == "__all__":
        return sorted([*_NAMES, *importlib.import_module("halograd.layers").__all__])
    if name[0].isupper() or name == "training_only":  # no other name of a module loads the layers
        layers = importlib.import_module("halograd.layers")
        if name in layers.__all__:
            return getattr(layers, name)
    raise AttributeError(f"module 'halograd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
