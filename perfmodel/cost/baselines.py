"""Strategies that need no planner: what others do, and what plans are compared with.

=========  =====================================================================================================
data       samples over all ranks; where the batch is smaller, over as many as there are samples
spatial    every sample cut as finely as the ranks allow, as square as it gets, samples over what is left; layers
           without space, and those too small, as `data`
model      channels cut as finely as the ranks allow; layers whose channels cannot be cut as `data`
owt        one weird trick (Krizhevsky 2014): `data`, but dense layers, and what follows them channel by channel, cut
           along channels
=========  =====================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from halograd.errors import UserError
from halograd.layers import Network, Node, Strategy
from halograd.perfmodel.candidates import candidates, divisors
from halograd.perfmodel.cost.blocks import PARTS, Parts

__all__ = ["BASELINES", "baseline"]


def baseline(name: str, network: Network, batch: int, ranks: int, bucket_bytes: int = 4 << 20) -> Strategy:
    """The strategy called `name`, one of `BASELINES`, legal for the network.

    Parameters
    ----------
    batch
        Global number of samples.
    ranks
        How many there are; some layers may use fewer.

    Raises
    ------
    UserError
        If there is no baseline of that name.
    """
    if name not in BASELINES:
        raise UserError(f"baseline: expected one of {', '.join(BASELINES)}, got {name!r}")
    samples = max(d for d in divisors(ranks) if d <= batch)
    choose = BASELINES[name]
    layers = {}
    for layer, node in network.layers.items():
        parts = choose(node, batch, ranks, samples)
        layers[layer] = {axis: n for axis, n in zip(PARTS, parts) if n > 1} or {"sample": 1}
    return Strategy({}, layers, bucket_bytes=bucket_bytes)


def _data(node: Node, batch: int, ranks: int, samples: int) -> Parts:
    return (samples, 1, 1, 1, 1, 1)


def _spatial(node: Node, batch: int, ranks: int, samples: int) -> Parts:
    some = [p for p in _some(node, batch, ranks) if p[4] * p[5] == 1 and math.prod(p[1:4]) > 1]
    return max(some, key=lambda p: (math.prod(p), -p[0], -max(p[1:4])), default=_data(node, batch, ranks, samples))


def _model(node: Node, batch: int, ranks: int, samples: int) -> Parts:
    some = [p for p in _some(node, batch, ranks) if p[4] > 1 and math.prod(p) == p[4]]
    return max(some, key=lambda p: p[4], default=_data(node, batch, ranks, samples))


def _owt(node: Node, batch: int, ranks: int, samples: int) -> Parts:
    if _behind_dense(node):
        return _model(node, batch, ranks, samples)
    return _data(node, batch, ranks, samples)


def _behind_dense(node: Node) -> bool:
    """A dense layer, or one that treats its channels alike."""
    while node.layer.cuts_channels != "contracts" or node.layer.stencil is not None:
        if node.layer.cuts_channels != "channelwise" or not node.inputs:
            return False
        node = node.inputs[0]
    return True


def _some(node: Node, batch: int, ranks: int) -> Sequence[Parts]:
    return candidates(node.layer, [n.shape for n in node.inputs], node.shape, batch, ranks)


#: Name -> parts of a node, given batch, ranks and the samples that can be cut.
BASELINES: dict[str, Callable[[Node, int, int, int], Parts]] = {
    "data": _data,
    "spatial": _spatial,
    "model": _model,
    "owt": _owt,
}
