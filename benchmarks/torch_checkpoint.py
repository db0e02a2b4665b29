"""Networks in torch with `torch.utils.checkpoint`, and the peak of their live tensors.

The regions of :class:`benchmarks.subject_torch.TorchNetwork` follow rules like those of ``strategy.recompute``:

pointwise    a region ends with each convolution or dense layer. Torch stops to repeat a region as soon as all that it
             needs is there, before the last layer, so only norms, activations, sums and pooling are repeated
block        regions of several convolutions with about equal bytes; of all numbers of regions, the one with the
             smallest peak
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.subject_torch import TorchNetwork
from halograd.layers import Network

__all__ = ["LiveBytes", "peak_bytes", "regions_of"]

#: Largest number of regions that is tried by the rule "block".
MOST = 8


class LiveBytes(TorchDispatchMode):
    """Tally of the storages that are alive, by all operations of torch in this context.

    Attributes
    ----------
    live, peak
        Bytes now, and at most.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()
        for tensor in tensors:
            self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result


def peak_bytes(network: Network, regions: Sequence[int], batch: int = 1, device: str = "meta") -> int:
    """Return the peak of live tensors in a step of plain SGD [B]. On the device "meta" nothing is computed."""
    weights = {name: np.zeros(spec.shape, np.float32) for name, spec in network.parameters().items()}
    inputs = {
        name: np.zeros((batch, *node.shape), np.float32 if node.dtype == "compute" else node.dtype)
        for name, node in network.inputs.items()
    }
    subject = TorchNetwork(network, weights, inputs, device, regions)
    optimizer = torch.optim.SGD(list(subject.params.values()), lr=1e-3)
    with LiveBytes(*subject.params.values(), *subject.inputs.values()) as tally:
        subject.loss().backward()
        optimizer.step()
    return tally.peak


def regions_of(network: Network, rule: str, batch: int = 1) -> list[int]:
    """Return the first layers of the regions of a rule after the first region."""
    if rule == "none":
        return []
    costly = [i + 1 for i, node in enumerate(network.layers.values()) if node.layer.recomputation == "block"]
    if rule == "pointwise":
        return costly[:-1]
    return min(_balanced(network, costly[:-1]), key=lambda regions: peak_bytes(network, regions, batch))


def _balanced(network: Network, ends: Sequence[int]) -> Iterator[list[int]]:
    """Yield choices of 1 to `MOST` of the possible ends of regions, so that the regions have about equal bytes."""
    sizes = np.cumsum([np.prod(node.shape) for node in network.layers.values()])
    for count in range(1, min(MOST, len(ends)) + 1):
        limits = sizes[-1] * np.arange(1, count + 1) / (count + 1)
        yield sorted({ends[int(np.argmin([abs(sizes[end - 1] - limit) for end in ends]))] for limit in limits})
