"""halograd: train convolutional networks on samples that have outgrown one device.

The names a script needs are here; they are loaded when first used, so that ``import halograd`` does not
start MPI. What a name is for stands with it: ``help(halograd.Executor)``.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_FOLDERS = {
    "comm": ("Communicator", "boot", "leave"),
    "kernels": ("get_backend",),
    "dtensor": ("Box", "DistTensor", "Exchange", "Halo", "Layout"),
    "layers": (
        "Add",
        "AuxiliaryCrossEntropy",
        "AveragePool",
        "BatchNorm",
        "BinaryCrossEntropyWithLogits",
        "Concat",
        "Conv",
        "ConvTranspose",
        "Dense",
        "Dice",
        "Dropout",
        "Flatten",
        "GELU",
        "GlobalAveragePool",
        "GroupNorm",
        "Input",
        "InstanceNorm",
        "Layer",
        "LayerNorm",
        "LeakyReLU",
        "LocalResponseNorm",
        "MaxPool",
        "MeanSquaredError",
        "Network",
        "Parameter",
        "ReLU",
        "Resize",
        "Sigmoid",
        "Softmax",
        "SoftmaxCrossEntropy",
        "Stencil",
        "Strategy",
        "Tanh",
    ),
    "training.executor": ("Executor",),
    "training.trainer": ("Trainer",),
    "training.optimizers": ("Adam", "AdamW", "LARS", "SGD"),
    "training.schedules": ("Constant", "Cosine", "StepDecay", "WarmUp"),
    "errors": ("UserError",),
}
_HOME = {name: folder for folder, names in _FOLDERS.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"halograd.{_HOME[name]}"), name)
    if name in ("comm", "data", "device", "dtensor", "kernels", "layers", "models", "perfmodel", "testing", "training"):
        return importlib.import_module(f"halograd.{name}")
    raise AttributeError(f"module 'halograd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
