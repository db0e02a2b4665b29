"""torch as a contestant: the same graph in eager mode, channels-last, with the fastest settings of torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mpi4py

mpi4py.rc.initialize = False  # only descriptions of layers are used; no communication

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from benchmarks.problems import PROBLEMS, has_relu  # noqa: E402
from halograd import layers as hl  # noqa: E402

__all__ = ["TorchNetwork", "TorchSubject", "library"]

Function = Callable[..., torch.Tensor]
Params = Mapping[str, torch.Tensor]


class TorchNetwork:
    """Graph of a network, evaluated node by node with torch's functions; channels-last activations and weights.

    Parameters
    ----------
    network
        Network with the graph.
    weights, inputs
        Arrays by name, packed with the channels last.
    device
        Device of the tensors.
    regions
        Numbers of the layers with which regions begin, after the first region. Each region but the last runs under
        ``checkpoint(use_reentrant=False)``: torch keeps its inputs, and computes the rest again in the backward pass.
    """

    def __init__(
        self,
        network: hl.Network,
        weights: Mapping[str, np.ndarray],
        inputs: Mapping[str, np.ndarray],
        device: str = "cpu",
        regions: Sequence[int] = (),
    ) -> None:
        self.device = device
        self.params = {k: self._put(v).requires_grad_() for k, v in weights.items()}
        self.inputs = {k: self._put(v) for k, v in inputs.items()}
        self.steps = [self._bind(network, name, node) for name, node in network.layers.items()]
        self._loss = network.names[network.outputs["loss"]]
        ends = [*regions, len(self.steps)]
        self._regions = [range(begin, end) for begin, end in zip([0, *regions], ends)]

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return channels_last(torch.from_numpy(array).to(self.device))

    def _bind(self, network: hl.Network, name: str, node: hl.Node) -> tuple[str, list[str], Function]:
        own = {k.rpartition("/")[2]: v for k, v in self.params.items() if k.rpartition("/")[0] == name}
        function = FUNCTIONS[type(node.layer)](node.layer, own, node.inputs[0].shape)
        return name, [network.names[n] for n in node.inputs], function

    def loss(self) -> torch.Tensor:
        """Return the loss of the inputs."""
        values = dict(self.inputs)
        for region in self._regions:
            later = {i for _, inputs, _ in self.steps[region.stop :] for i in inputs} | {self._loss}
            read = sorted({i for step in region for i in self.steps[step][1]} & values.keys())
            results = [name for step in region if (name := self.steps[step][0]) in later]
            run = partial(self._run, region, read, results)
            if region is not self._regions[-1]:
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            values |= zip(results, run(*(values[name] for name in read)))
            values = {name: value for name, value in values.items() if name in later}
        return values[self._loss]

    def _run(
        self, region: range, read: Sequence[str], results: Sequence[str], *arrays: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the named results of the layers of a region, from the values `read`."""
        values = dict(zip(read, arrays))
        for step in region:
            name, inputs, function = self.steps[step]
            values[name] = function(*(values[i] for i in inputs))
        return [values[name] for name in results]


class TorchSubject:
    """Network trained by torch: in eager mode, by ``torch.compile`` (``"compile"`` in `spec`), or under autocast.

    Activations are in place where autograd allows it, gradients are set to None, SGD is fused, and there is one pool of
    ``threads`` threads. The allocator is tuned by the environment, as for all contestants. With ``"bfloat16"`` in
    `spec`, products and convolutions have 16 bits and master weights 32. ``"regions"`` are those of `TorchNetwork`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        torch.set_num_interop_threads(1)
        problem = PROBLEMS[spec["problem"]]
        network = problem.make()
        arrays = problem.weights(network), problem.data(network)
        self.network = TorchNetwork(network, *arrays, regions=spec.get("regions", ()))
        self.optimizer = torch.optim.SGD(list(self.network.params.values()), lr=problem.rate, fused=True)
        low, compiled = spec.get("bfloat16", False), spec.get("compile", False)
        self.loss = autocast(self.network.loss) if low else self.network.loss
        if compiled:
            self.loss = torch.compile(self.loss)
        how = ", bfloat16 autocast" * low + ", compiled" * compiled
        self.about = f"{library()}, channels-last{how}, {torch.get_num_threads()} threads"

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def clock(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing, because every step is complete when it returns."""

    def close(self) -> None:
        """Do nothing."""


def library() -> str:
    """Return torch's version, the version of oneDNN in it, and the instruction set of its own kernels."""
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    inside = f", oneDNN {onednn[1]}" if onednn else ""
    return f"torch {torch.__version__}{inside} on {torch.backends.cpu.get_cpu_capability()}"


def autocast(loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return the loss function under autocast to bfloat16."""

    def low() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    return low


def channels_last(array: torch.Tensor) -> torch.Tensor:
    """Return ``(N, H, W, C)`` as ``(N, C, H, W)`` with packed channels, also in 3-D; other arrays unchanged.

    The same permutation turns weights ``(K, h, w, C)`` into torch's ``(K, C, h, w)``, also for transposed convolutions.
    """
    if array.ndim == 5:
        return array.permute(0, 4, 1, 2, 3).contiguous(memory_format=torch.channels_last_3d)
    if array.ndim != 4:
        return array.clone()
    return array.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def _symmetric(layer: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return stride and padding in torch's form."""
    windows = layer.windows(shape)
    if any(w.pad_lo != w.pad_hi for w in windows):
        raise ValueError(f"{layer.name}: expected the same padding on both sides for torch, got {windows}")
    return {
        "stride": tuple(w.stride for w in windows),
        "padding": tuple(w.pad_lo for w in windows),
        "dilation": tuple(w.dilation for w in windows),
    }


def _activated(function: Function, layer: Any) -> Function:
    return (lambda *xs: F.relu(function(*xs), inplace=True)) if has_relu(layer) else function


def _conv(layer: hl.Conv, own: Params, shape: tuple[int, ...]) -> Function:
    options = _symmetric(layer, shape)
    w, b = own["w"], own.get("b")
    conv = (F.conv1d, F.conv2d, F.conv3d)[w.ndim - 3]
    return _activated(lambda x: conv(x, w, b, groups=layer.groups, **options), layer)


def _transposed(layer: hl.ConvTranspose, own: Params, shape: tuple[int, ...]) -> Function:
    options = _symmetric(layer, shape)
    w, b = own["w"], own.get("b")
    conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[w.ndim - 3]
    return lambda x: conv(x, w, b, groups=layer.groups, **options)


def _batch_norm(layer: hl.BatchNorm, own: Params, shape: tuple[int, ...]) -> Function:
    gamma = own["gamma"].detach()
    mean, var = torch.zeros_like(gamma), torch.ones_like(gamma)
    rest = (own["gamma"], own["beta"], True, layer.momentum, layer.eps)

    def run(x: torch.Tensor, *residual: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(x, mean, var, *rest)
        return y + residual[0] if residual else y

    return _activated(run, layer)


def _max_pool(layer: hl.MaxPool, own: Params, shape: tuple[int, ...]) -> Function:
    kernel, options = tuple(w.kernel for w in layer.windows(shape)), _symmetric(layer, shape)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return lambda x: pool(x, kernel, **options)


def _add(layer: hl.Add, own: Params, shape: tuple[int, ...]) -> Function:
    return _activated(torch.add, layer)


#: Builders of a layer's function, from its description, its parameters and the sample shape of its first input.
FUNCTIONS: dict[type, Callable[[Any, Params, tuple[int, ...]], Function]] = {
    hl.Conv: _conv,
    hl.ConvTranspose: _transposed,
    hl.BatchNorm: _batch_norm,
    hl.MaxPool: _max_pool,
    hl.Add: _add,
    # In these networks a separate ReLU follows a sum that no other layer reads.
    hl.ReLU: lambda layer, own, shape: lambda x: F.relu(x, inplace=True),
    hl.Concat: lambda layer, own, shape: lambda *xs: torch.cat(xs, dim=1),
    hl.GlobalAveragePool: lambda layer, own, shape: lambda x: x.mean(dim=tuple(range(2, x.ndim))),
    hl.Dense: lambda layer, own, shape: lambda x: F.linear(x, own["w"], own.get("b")),
    hl.SoftmaxCrossEntropy: lambda layer, own, shape: lambda x, t: F.cross_entropy(x, t[:, 0].long()),
    hl.BinaryCrossEntropyWithLogits: lambda layer, own, shape: F.binary_cross_entropy_with_logits,
}
