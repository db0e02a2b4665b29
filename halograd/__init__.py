"""halograd: train convolutional networks on samples that have outgrown one device.

The names a script needs are here; they are loaded when first used, so that ``import halograd`` does not
start MPI. What a name is for stands with it: ``help(halograd.Executor)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for static tools; at run time `__getattr__` finds them
    from .comm import Communicator, boot, leave
    from .dtensor import Box, DistTensor, Exchange, Halo, Layout
    from .errors import UserError
    from .kernels import get_backend
    from .layers import (
        ELU,
        GELU,
        AbsoluteError,
        Add,
        AveragePool,
        BatchNorm,
        BinaryCrossEntropyWithLogits,
        Clamp,
        Concat,
        Conv,
        ConvTranspose,
        Dense,
        Dice,
        Dropout,
        Flatten,
        Focal,
        GivenValues,
        GlobalAveragePool,
        GroupNorm,
        HardSigmoid,
        HardSwish,
        Huber,
        Input,
        InstanceNorm,
        Layer,
        LayerNorm,
        LeakyReLU,
        LocalResponseNorm,
        MaxPool,
        MeanSquaredError,
        Multiply,
        Network,
        Pad,
        Parameter,
        ReLU,
        Resize,
        Sigmoid,
        SiLU,
        Slice,
        Softmax,
        SoftmaxCrossEntropy,
        Stencil,
        Strategy,
        Tanh,
        Tversky,
        training_only,
    )
    from .training.executor import Executor
    from .training.optimizers import LARS, SGD, Adam, AdamW
    from .training.schedules import Constant, Cosine, StepDecay, WarmUp
    from .training.trainer import Trainer

__all__ = [
    "ELU",
    "GELU",
    "LARS",
    "SGD",
    "AbsoluteError",
    "Adam",
    "AdamW",
    "Add",
    "AveragePool",
    "BatchNorm",
    "BinaryCrossEntropyWithLogits",
    "Box",
    "Clamp",
    "Communicator",
    "Concat",
    "Constant",
    "Conv",
    "ConvTranspose",
    "Cosine",
    "Dense",
    "Dice",
    "DistTensor",
    "Dropout",
    "Exchange",
    "Executor",
    "Flatten",
    "Focal",
    "GivenValues",
    "GlobalAveragePool",
    "GroupNorm",
    "Halo",
    "HardSigmoid",
    "HardSwish",
    "Huber",
    "Input",
    "InstanceNorm",
    "Layer",
    "LayerNorm",
    "Layout",
    "LeakyReLU",
    "LocalResponseNorm",
    "MaxPool",
    "MeanSquaredError",
    "Multiply",
    "Network",
    "Pad",
    "Parameter",
    "ReLU",
    "Resize",
    "SiLU",
    "Sigmoid",
    "Slice",
    "Softmax",
    "SoftmaxCrossEntropy",
    "Stencil",
    "StepDecay",
    "Strategy",
    "Tanh",
    "Trainer",
    "Tversky",
    "UserError",
    "WarmUp",
    "__version__",
    "boot",
    "get_backend",
    "leave",
    "training_only",
]

__version__ = "0.1.0"

#: Where these names are; what needs no MPI first.
_MODULES = (
    "errors",
    "dtensor",
    "layers",
    "kernels",
    "training.schedules",
    "training.optimizers",
    "training.trainer",
    "training.executor",
    "comm",
)
_FOLDERS = (
    *("comm", "data", "device", "dtensor", "interchange", "kernels", "layers", "models", "onnx", "perfmodel"),
    *("testing", "training"),
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (importlib.import_module(f"halograd.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if name in module.__all__)
    if name in _FOLDERS:
        return importlib.import_module(f"halograd.{name}")
    raise AttributeError(f"module 'halograd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
