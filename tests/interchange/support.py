"""Functions that export torch modules by both exporters, and run imported networks in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Network
from halograd.testing import random_array
from halograd.training.executor import Executor

BATCH = 2
EXPORTERS = ["old", "dynamo"]


def torch():
    """Return the torch module; skip the test if torch or its exporter's requirements are missing."""
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


def together(*modules):
    """Return one module with the concatenated channels of several modules, so that one export suffices."""
    lib = torch()
    return as_module(lambda m, x: lib.cat([one(x) for one in m.parts], 1), parts=lib.nn.ModuleList(modules))


def export(module, x, path: Path, exporter: str, training: bool = False, **options) -> Path:
    """Export a module with the input `x`, named ``x``, to a file, as docs/torch.md describes."""
    lib = torch()
    mode = lib.onnx.TrainingMode.TRAINING if training else lib.onnx.TrainingMode.EVAL
    module.train(training)
    if exporter == "dynamo":
        keep_operators()
        options = {"dynamo": True, "optimize": not training, **options}
    else:
        options = {"dynamo": False, "training": mode, "do_constant_folding": not training, **options}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lib.onnx.export(module, (x,), str(path), input_names=["x"], **options)
    return path


@functools.cache
def keep_operators() -> None:
    """Make the new exporter cache its table of operators, whose construction takes half of every export."""
    with contextlib.suppress(ImportError, AttributeError):  # other versions of torch have no such table
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        made = functools.cache(ONNXRegistry.from_torchlib)

        def fresh(**version: int) -> ONNXRegistry:  # every export adds the operators of its caller
            registry = copy.copy(made(**version))
            registry.functions = {target: list(found) for target, found in registry.functions.items()}
            return registry

        ONNXRegistry.from_torchlib = staticmethod(fresh)


def predicted(network: Network, x: np.ndarray, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Return all outputs of a network for one batch, computed by one process in evaluation."""
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(network, alone, get_backend("numpy"), len(x), dtype=dtype, trainable=False) as executor,
    ):
        executor.set_input(next(iter(network.inputs)), x)
        executor.forward(training=False)
        return {name: executor.gather(network.names[node]) for name, node in network.outputs.items()}


def check_step(network: Network, module, x: np.ndarray, rate: float = 0.5) -> None:
    """Assert that a network and a module have the same outputs in evaluation, before and after a step of SGD.

    The loss is the mean square of the difference from 1; all values are float64.
    """
    lib = torch()
    (ours,) = network.outputs.values()
    loss = hg.MeanSquaredError()(ours, hg.Input(ours.shape, "target"))
    trained = hg.Network({"y": ours, "loss": loss})
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(trained, alone, get_backend("numpy"), len(x), dtype="float64") as executor,
    ):
        trainer = hg.Trainer(executor, hg.SGD(executor.store), hg.Constant(rate))
        executor.set_input("x", x)
        executor.set_input("target", np.ones((len(x), *ours.shape)))
        found = []
        for _ in range(2):
            executor.forward(training=False)
            found.append(executor.gather(trained.names[ours]))
            trainer.step()
            trainer.synchronize()
    optimizer = lib.optim.SGD(module.parameters(), rate) if list(module.parameters()) else None
    for y in found:
        module.eval()
        want = last(module(first(x)))
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-11 * max(1.0, np.abs(want).max()))
        if optimizer is not None:
            module.train()
            optimizer.zero_grad()
            ((module(first(x)) - 1) ** 2).mean().backward()
            optimizer.step()


def samples(*shape: int, name: str = "x") -> np.ndarray:
    """Return a random batch ``(N, *spatial, C)``."""
    return random_array((BATCH, *shape), name)


def first(array: np.ndarray):
    """Return an array with channels last as a torch tensor with channels first."""
    return torch().tensor(np.ascontiguousarray(np.moveaxis(array, -1, 1)))


def last(tensor) -> np.ndarray:
    """Return a tensor with channels first as an array with channels last."""
    return np.moveaxis(tensor.detach().numpy(), 1, -1)


def shake(module) -> None:
    """Set all parameters and running statistics to random values that reveal errors."""
    lib = torch()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.dtype.is_floating_point:
            values = random_array(tensor.shape, name, 3)
            values = 0.5 + np.abs(values) if name.endswith("running_var") else values
            tensor.data = lib.tensor(values)
