"""Random strategies that cut layers along all axes that they allow, channels included, also on fewer ranks."""

import math

import numpy as np
from hypothesis import strategies as st

from halograd.layers import Loss, Network
from halograd.layers.strategy import AXES, Strategy

#: All axes of images, channels included.
IMAGE = ("sample", "height", "width", "channel", "input_channel")


def axes_of(node):
    """Return the axes along which a node's layer may be cut."""
    spatial = ("depth", "height", "width")[4 - max(len(n.shape) for n in (node, *node.inputs)) :]
    channels = {"no": (), "channelwise": ("channel",), "contracts": ("channel", "input_channel")}
    return ("sample", *spatial, *channels[node.layer.cuts_channels])


def room(node):
    """Return the largest number of parts along each channel axis; their product is at most the first."""
    read = min((n.shape[-1] for n in node.inputs), default=1)
    return {"channel": node.shape[-1], "input_channel": min(read, node.shape[-1])}


def random_parts(node, ranks, rng):
    """Return random parts whose product is `ranks`: each prime factor goes to an axis whose extent permits it."""
    parts, most = dict.fromkeys(axes_of(node), 1), room(node)
    for prime in primes(ranks):
        fits = [axis for axis in parts if _fits(parts, axis, prime, most)]
        parts[fits[int(rng.integers(len(fits)))]] *= prime
    return parts


def _fits(parts, axis, prime, most):
    if axis not in most:
        return True
    blocks = parts.get("channel", 1) * parts.get("input_channel", 1) * prime
    return blocks <= most["channel"] and parts[axis] * prime <= most[axis]


def uneven(parts, rng):
    """Return the parts, with random unequal shares for some of the sample and spatial cuts."""
    for axis, count in parts.items():
        if count > 1 and "channel" not in axis and rng.random() < 0.3:
            parts[axis] = [int(n) for n in rng.integers(1, 4, count)]
    return parts


def random_strategy(network: Network, size: int, seed: int) -> Strategy:
    """Return a strategy with random parts per layer, on all ranks or fewer, with random halo algorithms and buckets."""
    rng, shares = np.random.default_rng([1807, seed]), np.random.default_rng([1808, seed])
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    layers = {}
    for name, node in network.layers.items():
        ranks = size if rng.random() < 0.7 else int(rng.integers(1, size + 1))
        own = {} if isinstance(node.layer, Loss) else {"halo": str(rng.choice(["pad", "overlap"]))}
        layers[name] = {**uneven(random_parts(node, ranks, rng), shares), **own}
        if network.owners[name] != name:  # which has the same blocks of the parameters
            layers[name] = dict(layers[network.owners[name]])
    everyone = {"sample": size // (d := int(rng.choice(divisors))), "height": d}
    return Strategy(everyone, layers, bucket_bytes=int(rng.choice([1, 4096, 4 << 20])))


def primes(n):
    """Return the prime factors of `n`, with repetitions."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


@st.composite
def drawn_parts(draw, made, read, largest=24):
    """Draw parts per axis of a layer with these numbers of input and output channels, on at most `largest` ranks."""
    parts = dict.fromkeys(AXES, 1)
    parts["input_channel"] = draw(st.integers(1, min(read, made, 4)))
    parts["channel"] = draw(st.integers(1, min(made // parts["input_channel"], 5)))
    for axis in ("sample", "height", "width"):
        parts[axis] = draw(st.integers(1, max(1, min(3, largest // math.prod(parts.values())))))
    return parts
