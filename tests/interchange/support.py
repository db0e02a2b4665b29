"""Torch modules through a file: exported by both exporters, imported, and run by one process."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Network
from halograd.testing import random_array
from halograd.training.executor import Executor

BATCH = 2
EXPORTERS = ["old", "dynamo"]


def torch():
    """The torch module; skips the test where torch, or what its exporter needs, is not there."""
    pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")
    pytest.importorskip("onnxscript", reason="needs the exporter of torch: pip install 'halograd[oracle]'")
    return pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")


def as_module(function, **layers):
    """Return a torch module that computes ``function(module, x)``; `layers` are its attributes."""

    class FunctionModule(torch().nn.Module):
        def __init__(self):
            super().__init__()
            self.function = function
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, x):
            return self.function(self, x)

    return FunctionModule()


def export(module, x, path: Path, exporter: str, training: bool = False, **options) -> Path:
    """Write a module with the input `x`, called ``x``, as docs/torch.md says it."""
    lib = torch()
    mode = lib.onnx.TrainingMode.TRAINING if training else lib.onnx.TrainingMode.EVAL
    module.train(training)
    if exporter == "dynamo":
        _keep_operators()
        options = {"dynamo": True, "optimize": not training, **options}
    else:
        options = {"dynamo": False, "training": mode, "do_constant_folding": not training, **options}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lib.onnx.export(module, (x,), str(path), input_names=["x"], **options)
    return path


@functools.cache
def _keep_operators() -> None:
    """Let the new exporter keep its table of operators, which it only reads: to make it is half of every export."""
    with contextlib.suppress(ImportError, AttributeError):  # where another torch has none
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))


def predicted(network: Network, x: np.ndarray, dtype: str = "float64") -> dict[str, np.ndarray]:
    """All outputs of a network for one batch, by one process in evaluation."""
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(network, alone, get_backend("numpy"), len(x), dtype=dtype, trainable=False) as executor,
    ):
        executor.set_input(next(iter(network.inputs)), x)
        executor.forward(training=False)
        return {name: executor.gather(network.names[node]) for name, node in network.outputs.items()}


def samples(*shape: int, name: str = "x") -> np.ndarray:
    """A batch ``(N, *spatial, C)``."""
    return random_array((BATCH, *shape), name)


def first(array: np.ndarray):
    """Channels last -> channels first, as a tensor of torch."""
    return torch().tensor(np.ascontiguousarray(np.moveaxis(array, -1, 1)))


def last(tensor) -> np.ndarray:
    """Channels first -> channels last, as an array."""
    return np.moveaxis(tensor.detach().numpy(), 1, -1)


def shake(module) -> None:
    """Give all parameters and running statistics numbers that an error would show in."""
    lib = torch()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.dtype.is_floating_point:
            values = random_array(tensor.shape, name, 3)
            values = 0.5 + np.abs(values) if name.endswith("running_var") else values
            tensor.data = lib.tensor(values)
