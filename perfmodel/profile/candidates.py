"""The local shapes of a network's layers under every cut that a number of ranks allows. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from halograd.dtensor import axis_names
from halograd.layers import Input, Network, Node
from halograd.perfmodel.layer_work import LayerKey, LayerWork
from halograd.perfmodel.profile.cache import Conditions
from halograd.perfmodel.profile.crowd import Crowd
from halograd.perfmodel.profile.layers import last_level_cache

__all__ = ["conditions_of", "cuts", "passing_bytes", "works_of"]

#: Code and objects of one layer, forward and backward: oneDNN makes code for every shape [B]. With it the sum of
#: layers of a network of 142 small ones is 12 % below its step; without, half of it is missing.
CODE = 128 << 10
_CHANNELS = ("channel", "input_channel")


def cuts(node: Node, batch: int, ranks: int) -> Iterator[dict[str, int]]:
    """All ways to cut a layer into `ranks` parts, none of which is empty.

    Parameters
    ----------
    node
        The layer in its network.
    batch
        Global samples.
    ranks
        Parts in all.

    Yields
    ------
    dict
        Parts per axis: sample, the spatial axes of the output, and the channels where the layer allows it.
    """
    names = [*axis_names(len(node.shape) + 1)[:-1]]
    extents = [batch, *node.shape[:-1]]
    for axis in _CHANNELS[: {"channelwise": 1, "contracts": 2}.get(node.layer.cuts_channels, 0)]:
        names.append(axis)
        extents.append(node.shape[-1] if axis == "channel" else node.inputs[0].shape[-1])
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for parts in itertools.product(divisors, repeat=len(names)):
        if math.prod(parts) == ranks and all(p <= n for p, n in zip(parts, extents)):
            yield dict(zip(names, parts))


def passing_bytes(network: Network, batch: int, ranks: int, dtype: str = "float32") -> int:
    """What passes through a rank's cache between two uses of a layer's data, as a power of two [B].

    Values and their gradients of one step, all parameters, and the code of the kernels; not more than the cache
    holds, because more makes no difference. Networks of about the same size have the same, and share measured times.
    """
    values = sum(math.prod(node.shape) for node in network.nodes) * batch // ranks
    nbytes = 2 * (values + network.parameter_count) * np.dtype(dtype).itemsize + CODE * len(network.nodes)
    return min(1 << max(nbytes.bit_length() - 1, 0), last_level_cache())


def conditions_of(
    network: Network,
    batch: int,
    ranks: int,
    kernels: Any,
    crowd: Crowd,
    dtype: str = "float32",
    autotune: bool = False,
) -> Conditions:
    """The conditions under which layers of a run of this network are to be measured, here. Local.

    Parameters
    ----------
    network
        The layers.
    batch
        Global samples.
    ranks, crowd
        Of the run, and those on one host.
    kernels
        Backend.
    dtype
        Of the computation.
    autotune
        Whether the backend was made with it.
    """
    return Conditions.here(kernels, crowd, autotune, passing_bytes(network, batch, ranks, dtype))


def works_of(
    network: Network, batch: int, ranks: int, dtype: str = "float32", trainable: bool = True
) -> dict[LayerKey, LayerWork]:
    """What the fullest rank computes of each layer, under every cut into 1 ... `ranks` parts that divides `ranks`.

    Parameters
    ----------
    network
        The layers.
    batch
        Global samples.
    ranks
        Of the run.
    dtype
        Of the computation.
    trainable
        Whether there is a backward pass.

    Returns
    -------
    dict
        One entry per key; layers and cuts that compute the same have one key.
    """
    found: dict[LayerKey, LayerWork] = {}
    for node in network.layers.values():
        for count in (d for d in range(1, ranks + 1) if ranks % d == 0):
            for parts in cuts(node, batch, count):
                work = _work(node, batch, parts, dtype, trainable)
                if not work.empty:
                    found.setdefault(work.key, work)
    return found


def _work(node: Node, batch: int, parts: Mapping[str, int], dtype: str, trainable: bool) -> LayerWork:
    """The largest block of one layer under a cut."""
    samples = -(-batch // parts["sample"])
    channel, contraction = parts.get("channel", 1), parts.get("input_channel", 1)
    inputs = [(samples, *_local(n.shape, node, parts)) for n in node.inputs]
    contracts = node.layer.cuts_channels == "contracts"
    return LayerWork.of(
        node.layer,
        inputs,
        dtype,
        trainable,
        # Nobody wants the gradient of the samples.
        input_gradient=any(not isinstance(n, Input) for n in node.inputs),
        filters=-(-node.shape[-1] // channel) if contracts and channel * contraction > 1 else None,
        outputs=_spatial(node.shape, parts) or None,
        ranks=math.prod(parts.values()),
    )


def _spatial(shape: tuple[int, ...], parts: Mapping[str, int]) -> tuple[int, ...]:
    """Spatial extents of the largest block of an array."""
    names = axis_names(len(shape) + 1)[1:-1]
    return tuple(-(-n // parts.get(axis, 1)) for n, axis in zip(shape, names))


def _local(shape: tuple[int, ...], node: Node, parts: Mapping[str, int]) -> tuple[int, ...]:
    """Sample shape of the largest block of one input."""
    spatial = _spatial(shape, parts) if len(shape) == len(node.shape) else shape[:-1]
    cut = {"channelwise": "channel", "contracts": "input_channel"}.get(node.layer.cuts_channels, "")
    return (*spatial, -(-shape[-1] // parts.get(cut, 1)))
