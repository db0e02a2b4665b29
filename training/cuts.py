"""Which cuts would fit a number of ranks: for a run that goes on with fewer of them than before. Arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from halograd.errors import UserError
from halograd.layers import Network
from halograd.layers.strategy import Strategy, counts_of
from halograd.training.config import StrategyConfig

__all__ = ["fitting_cuts", "other_cuts"]

AXES = ("sample", "depth", "height", "width")
SHOWN = 3
#: For more ranks there are too many cuts to try them all.
MOST_RANKS = 8192


def fitting_cuts(network: Network, size: int, batch: int, wanted: Mapping[str, int]) -> list[dict[str, int]]:
    """All cuts of samples and space, for all layers alike, that `size` ranks can train with; most like `wanted` first.

    Parameters
    ----------
    batch
        Samples per step: at most so many parts along them.
    wanted
        Parts per axis; axes that are missing have one.
    """
    products = (dict(zip(AXES, parts)) for parts in _products(size, len(AXES)))
    found = [parts for parts in products if parts["sample"] <= batch and _fits(network, parts, size)]
    return sorted(found, key=lambda parts: sum(abs(math.log(parts[a] / wanted.get(a, 1))) for a in AXES))


def _products(size: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Whole numbers whose product is `size`, so many of them."""
    if factors == 1:
        yield (size,)
        return
    for first in (d for d in range(1, size + 1) if size % d == 0):
        yield from ((first, *rest) for rest in _products(size // first, factors - 1))


def _fits(network: Network, parts: dict[str, int], size: int) -> bool:
    strategy = Strategy(parts)
    try:
        strategy.validate(network, size)
        strategy.refuse_empty_blocks(network)
    except UserError:
        return False
    return True


def other_cuts(config: StrategyConfig, size: int, network: Network | None, batch: int | None) -> str:
    """What to put on the command line instead, in words; nothing without a network, or for more than `MOST_RANKS`."""
    if network is None or batch is None or size > MOST_RANKS:
        return ""
    wanted = counts_of({axis: getattr(config, axis) or 1 for axis in AXES})
    named = config.model_fields_set
    cuts = [
        " ".join(f"--set strategy.{axis}={n}" for axis, n in parts.items() if n > 1 or axis in named)
        or "--set strategy.sample=1"
        for parts in fitting_cuts(network, size, batch, wanted)[:SHOWN]
    ]
    text = " or ".join(f"`{cut}`" for cut in [*cuts, "--set strategy=auto"])
    return f"; for {size} rank{'s' if size > 1 else ''}: {text}"
