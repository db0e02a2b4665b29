"""Parameters, gradients and their buckets: flat arrays in the order in which backward finishes them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.dtensor import Box, Exchange, Layout
from halograd.layers import Network, Parameter, Strategy
from halograd.layers.memory import Memory
from halograd.layers.parameter_blocks import ParameterBlocks, parameter_blocks

__all__ = ["Bucket", "ParameterStore"]

_ALIGN = 64


@dataclass
class Bucket:
    """Parameters whose gradients are summed over the same ranks with one message.

    Attributes
    ----------
    colors
        Color per rank: ranks of one color hold the same blocks (see :class:`ParameterBlocks`).
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
    colors: tuple[int | None, ...]


@dataclass
class ParameterStore:
    """This rank's blocks of all parameters, gradients and states of a network. Local.

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
        A bucket is closed when it holds at least so much [B], on the rank that has most of it.
    blocks
        Which block of each array every rank holds; None: one rank, which holds everything.
    rank
        This rank.
    """

    network: Network
    memory: Memory
    dtype: np.dtype
    seed: int = 0
    bucket_bytes: int = 4 << 20
    blocks: Mapping[str, ParameterBlocks] | None = None
    rank: int = 0
    buckets: list[Bucket] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    grads: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.blocks is None:
            self.blocks = parameter_blocks(self.network, Strategy(), 1)
        specs, states = self.network.parameters(), self.network.state()
        self.shapes: dict[str, tuple[int, ...]] = {n: s.shape for n, s in {**specs, **states}.items()}
        for names in self._groups(specs):
            self.buckets.append(self._bucket(names, specs))
        for name, spec in states.items():
            box = self.box(name)
            self.state[name] = self.memory.keep(box.shape, self.dtype, "parameter")
            self.state[name][...] = spec.initial(name, self.seed)[box.slices()]

    def box(self, name: str) -> Box:
        """Box of a parameter or state that this rank holds."""
        assert self.blocks is not None
        return self.blocks[name].boxes[self.rank]

    @property
    def whole(self) -> bool:
        """Whether this and every other rank holds all of everything."""
        assert self.blocks is not None
        return all(b.whole for b in self.blocks.values())

    def _groups(self, specs: Mapping[str, Parameter]) -> list[list[str]]:
        """Names bucket by bucket, those of the last layers first; the same on all ranks.

        What the same ranks share goes into one bucket, a layer's parameters as far as they do.
        """
        assert self.blocks is not None
        done: list[list[str]] = []
        growing: dict[tuple[int | None, ...], list[str]] = {}
        for layer in reversed(self.network.layers):
            own = [n for n in specs if n.rpartition("/")[0] == layer]
            for name in own:
                growing.setdefault(self.blocks[name].colors, []).append(name)
            for colors in {self.blocks[name].colors: None for name in own}:
                if sum(self.blocks[n].largest for n in growing[colors]) * self.dtype.itemsize >= self.bucket_bytes:
                    done.append(growing.pop(colors))
        return done + list(growing.values())

    def _bucket(self, names: list[str], specs: Mapping[str, Parameter]) -> Bucket:
        assert self.blocks is not None
        names = [n for n in names if specs[n].decay] + [n for n in names if not specs[n].decay]
        step = _ALIGN // self.dtype.itemsize
        slices, end, decayed = {}, 0, 0
        for name in names:
            size = self.box(name).size
            slices[name] = slice(end, end + size)
            end += -(-size // step) * step
            decayed = end if specs[name].decay else decayed
        params = self.memory.keep((end,), self.dtype, "parameter")
        grads = self.memory.keep((end,), self.dtype, "parameter gradient")
        for name in names:
            box = self.box(name)
            self.params[name] = params[slices[name]].reshape(box.shape)
            self.grads[name] = grads[slices[name]].reshape(box.shape)
            if box.size:
                self.params[name][...] = specs[name].initial(name, self.seed)[box.slices()]
        return Bucket(names, params, grads, decayed, slices, self.blocks[names[0]].colors)

    def of_layer(self, layer: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of one layer, by their short names."""
        prefix = f"{layer}/"
        return {n[len(prefix) :]: a for n, a in arrays.items() if n.rpartition("/")[0] == layer}

    @property
    def count(self) -> int:
        """Number of parameters of the network."""
        return self.network.parameter_count

    def gather(self, comm: Communicator, arrays: Mapping[str, Any]) -> dict[str, Any] | None:
        """The whole arrays on rank 0, of this rank's blocks by ``layer/parameter``; None elsewhere.

        Collective over `comm` where something is cut, else local. Arrays that are whole are not copied.
        """
        if self.whole and comm.rank:
            return None
        gathered = {name: self._gather(comm, name, array) for name, array in arrays.items()}
        return None if comm.rank else gathered

    def _gather(self, comm: Communicator, name: str, array: Any) -> Any:
        assert self.blocks is not None
        blocks = self.blocks[name]
        if blocks.whole:
            return array
        target = Layout.on_rank(self.shapes[name], 0, comm.size).boxes
        result = np.empty(target[comm.rank].shape, array.dtype)
        owners = blocks.owners()
        source = array if owners[comm.rank].size else array.reshape(-1)[:0].reshape(owners[comm.rank].shape)
        with closing(Exchange(comm, owners, target, source, result, kind="gather")) as exchange:
            exchange.run()
        return result
