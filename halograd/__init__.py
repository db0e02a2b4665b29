"""halograd: train convolutional networks on samples that have outgrown one device.

This package exports the names that a script needs. They are loaded at first use, so that ``import halograd`` does not
start MPI. Each name has its own documentation: ``help(halograd.Executor)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:  # for static tools; at run time `__getattr__` loads the names
    from .comm import Communicator, boot, leave
    from .dtensor import Box, DistTensor, Exchange, Halo, Layout
    from .errors import UserError
    from .fitting import fit
    from .kernels import get_backend
    from .layers import (
        ELU,
        GELU,
        AbsoluteError,
        AdaptiveAveragePool,
        AdaptiveMaxPool,
        Add,
        Affine,
        AveragePool,
        BatchNorm,
        BinaryCrossEntropyWithLogits,
        BroadcastAdd,
        ChannelShuffle,
        Clamp,
        Concat,
        Conv,
        ConvTranspose,
        Crop,
        Dense,
        Dice,
        Dropout,
        Flatten,
        Focal,
        GivenValues,
        GlobalAveragePool,
        GlobalMaxPool,
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
        LogSoftmax,
        MaxPool,
        MeanSquaredError,
        Mish,
        Multiply,
        Network,
        Pad,
        Parameter,
        PixelShuffle,
        PixelUnshuffle,
        PReLU,
        ReLU,
        Reshape,
        Resize,
        Scale,
        Sequential,
        Sigmoid,
        SiLU,
        Slice,
        Softmax,
        SoftmaxCrossEntropy,
        Softplus,
        Split,
        Stencil,
        StochasticDepth,
        Strategy,
        Tanh,
        Tversky,
        training_only,
    )
    from .training.executor import Executor
    from .training.monitors import Callback
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
    "AdaptiveAveragePool",
    "AdaptiveMaxPool",
    "Add",
    "Affine",
    "AveragePool",
    "BatchNorm",
    "BinaryCrossEntropyWithLogits",
    "Box",
    "BroadcastAdd",
    "Callback",
    "ChannelShuffle",
    "Clamp",
    "Communicator",
    "Concat",
    "Constant",
    "Conv",
    "ConvTranspose",
    "Cosine",
    "Crop",
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
    "GlobalMaxPool",
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
    "LogSoftmax",
    "MaxPool",
    "MeanSquaredError",
    "Mish",
    "Multiply",
    "Network",
    "PReLU",
    "Pad",
    "Parameter",
    "PixelShuffle",
    "PixelUnshuffle",
    "ReLU",
    "Reshape",
    "Resize",
    "Scale",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Slice",
    "Softmax",
    "SoftmaxCrossEntropy",
    "Softplus",
    "Split",
    "Stencil",
    "StepDecay",
    "StochasticDepth",
    "Strategy",
    "Tanh",
    "Trainer",
    "Tversky",
    "UserError",
    "WarmUp",
    "__version__",
    "boot",
    "fit",
    "get_backend",
    "leave",
    "training_only",
]

#: Modules of the exported names; first those that import least: a name loads the modules before its own, too.
_MODULES = (
    "errors",
    "comm",
    "training.schedules",
    "training.monitors",
    "dtensor",
    "kernels",
    "layers",
    "training.optimizers",
    "training.executor",
    "training.trainer",
    "fitting",
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
