"""Parameters, gradients and their buckets: flat arrays in the order in which backward finishes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halograd.layers import Network, Parameter
from halograd.layers.memory import Memory

__all__ = ["Bucket", "ParameterStore"]

_ALIGN = 64


@dataclass
class Bucket:
    """Parameters whose gradients are summed over the ranks with one message.

    Attributes
    ----------
    names
        ``layer/parameter``, decayed ones first.
    params, grads
        Flat arrays with small gaps (alignment), which hold zeros.
    decayed
        Elements ``[0, decayed)`` are subject to weight decay.
    slices
        Where each parameter lies.
    """

    names: list[str]
    params: Any
    grads: Any
    decayed: int
    slices: dict[str, slice]


@dataclass
class ParameterStore:
    """All parameters, gradients and states of a network, whole on this rank. Local.

    Parameters
    ----------
    network
        Whose parameters.
    memory
        Where the arrays are counted.
    dtype
        Of parameters and gradients.
    seed
        Initial values depend on it and on the names only.
    bucket_bytes
        A bucket is closed when it holds at least so much [B].
    """

    network: Network
    memory: Memory
    dtype: np.dtype
    seed: int = 0
    bucket_bytes: int = 4 << 20
    buckets: list[Bucket] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    grads: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = self.network.parameters()
        for group in self._groups(specs):
            self.buckets.append(self._bucket(group, specs))
        for name, spec in self.network.state().items():
            array = self.memory.keep(spec.shape, self.dtype, "parameter")
            array[...] = spec.initial(name, self.seed)
            self.state[name] = array

    def _groups(self, specs: Mapping[str, Parameter]) -> Iterator[list[str]]:
        """Names bucket by bucket, last layer first; a layer's parameters stay together."""
        group: list[str] = []
        nbytes = 0
        for layer in reversed(self.network.layers):
            own = [n for n in specs if n.rpartition("/")[0] == layer]
            group += own
            nbytes += sum(specs[n].size for n in own) * self.dtype.itemsize
            if nbytes >= self.bucket_bytes:
                yield group
                group, nbytes = [], 0
        if group:
            yield group

    def _bucket(self, names: list[str], specs: Mapping[str, Parameter]) -> Bucket:
        names = [n for n in names if specs[n].decay] + [n for n in names if not specs[n].decay]
        step = _ALIGN // self.dtype.itemsize
        slices, end, decayed = {}, 0, 0
        for name in names:
            slices[name] = slice(end, end + specs[name].size)
            end += -(-specs[name].size // step) * step
            decayed = end if specs[name].decay else decayed
        params = self.memory.keep((end,), self.dtype, "parameter")
        grads = self.memory.keep((end,), self.dtype, "parameter gradient")
        for name in names:
            self.params[name] = params[slices[name]].reshape(specs[name].shape)
            self.grads[name] = grads[slices[name]].reshape(specs[name].shape)
            self.params[name][...] = specs[name].initial(name, self.seed)
        return Bucket(names, params, grads, decayed, slices)

    def of_layer(self, layer: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of one layer, by their short names."""
        prefix = f"{layer}/"
        return {n[len(prefix) :]: a for n, a in arrays.items() if n.rpartition("/")[0] == layer}

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(math.prod(p.shape) for p in self.params.values())
