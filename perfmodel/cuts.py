"""Possible cuts of a layer: the candidates of a plan, and the fixed strategies with which plans are compared.

Candidates are legal and by default load-balanced: a rank in use has at most `UNEVEN` times its fair share, and the
number of ranks in use divides the number of ranks. To keep the number of candidates near a hundred for 1,024 ranks:

* space is cut into blocks that are as square as possible, or into slabs along one of its axes;
* channels are cut along the output or along the input, not both, into blocks of at least `CHANNELS`;
* space and channels are cut together with up to `FEW` ranks;
* with less than half of the ranks, one kind of axis is cut (samples, space, or channels).

``full=True`` drops these rules: it gives every legal factorization of every divisor. `grids` are cuts of samples and
space that are the same for all layers (`--grid` of the command line).

=========  =====================================================================================================
baseline   cut
=========  =====================================================================================================
data       samples over all ranks; if the batch is smaller, over as many ranks as there are samples
spatial    every sample cut as finely as the ranks allow, as square as possible, samples over the remaining ranks;
           layers without space, and layers that are too small, as `data`
model      channels cut as finely as the ranks allow; layers whose channels cannot be cut as `data`
owt        one weird trick (Krizhevsky 2014): `data`, but dense layers, and channelwise layers after them, cut along
           channels
=========  =====================================================================================================
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from halograd.errors import UserError

from ..layers import Layer, Network, Node, Strategy
from ..layers.strategy import AXES, held
from .planners import PLANNERS, Chooser, PlanSearch

__all__ = [
    "BASELINES",
    "CHANNELS",
    "GRID",
    "UNEVEN",
    "Baseline",
    "Parts",
    "baseline",
    "candidates",
    "divisors",
    "fits",
    "grids",
    "is_step",
    "shared_candidates",
    "strategy_of",
]

#: Axes, as indices of `AXES`, whose parts together cut an axis of an array, and the extent of that axis.
Extent = tuple[tuple[int, ...], int]
#: Name of the planner that chooses the best of `grids`.
GRID = "grid"
#: Parts per axis of a strategy, in the order of `AXES`.
Parts = tuple[int, ...]
#: Largest ratio of a rank's share to the mean; 4/3, as of 3 rows on 2 ranks, is allowed.
UNEVEN = 1.34
#: Minimum number of channels of a block.
CHANNELS = 4
#: Maximum number of ranks with which space and channels are cut together.
FEW = 16


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, in increasing order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def candidates(
    layer: Layer,
    shapes: Sequence[tuple[int, ...]],
    output: tuple[int, ...],
    batch: int,
    ranks: int,
    full: bool = False,
) -> tuple[Parts, ...]:
    """Return the cuts of a layer on up to `ranks` ranks: parts in the order of `AXES`; a single rank comes first.

    Parameters
    ----------
    shapes, output
        Sample shapes of its inputs and of its output.
    batch
        Global number of samples.
    full
        Whether to return every legal cut, balanced or not.
    """
    if ranks < 1:
        raise ValueError(f"candidates: expected at least one rank, got {ranks}")
    return _candidates(tuple(_extents(layer, shapes, output, batch)), layer.cuts_channels, ranks, full)


def fits(node: Node, parts: Parts, batch: int) -> bool:
    """Return whether a layer can have this cut, with balanced blocks."""
    # The layer cannot cut these axes: their parts must be 1. (1,) refuses nothing.
    refused = {"no": parts[4:], "channelwise": parts[5:], "contracts": (1,)}[node.layer.cuts_channels]
    extents = _extents(node.layer, [source.shape for source in node.inputs], node.shape, batch)
    return max(refused) == 1 and _fits(extents, parts, balanced=True)


def _extents(layer: Layer, shapes: Sequence[tuple[int, ...]], output: tuple[int, ...], batch: int) -> list[Extent]:
    """Return the extents that cuts of a layer have to fit."""
    extents: list[Extent] = [((0,), batch), *spatial_extents((shapes[0], output))]
    if layer.cuts_channels != "no":
        # Both kinds of channel parts cut the channels of the output (`layout_of`).
        extents.append(((4, 5), output[-1]))
    if layer.cuts_channels == "contracts":
        extents.append(((5,), shapes[0][-1]))
    return extents


def spatial_extents(shapes: Iterable[tuple[int, ...]]) -> list[Extent]:
    """Return the extents of the spatial axes of samples.

    If a sample has fewer axes than another, parts along the missing axes cut its first axis too, as in `layout_of`.

    >>> spatial_extents([(6, 4, 2), (24, 2)])
    [((2,), 6), ((3,), 4), ((2, 3), 24)]
    """
    shapes = [shape for shape in shapes if len(shape) > 1]
    # Depth, height and width are 1, 2 and 3 in `AXES`: an image (H, W, C) begins at 2.
    first = 5 - max(map(len, shapes), default=1)
    extents: list[Extent] = []
    for shape in shapes:
        own = 5 - len(shape)
        axes = [tuple(range(first, own + 1)), *((axis,) for axis in range(own + 1, 4))]
        extents += zip(axes, shape[:-1])
    return extents


@lru_cache(maxsize=4096)
def _candidates(extents: tuple[Extent, ...], cuts: str, ranks: int, full: bool) -> tuple[Parts, ...]:
    # Without the extents, so that layers with equal axes share the cached result of `_worthwhile`.
    there = tuple(any(axis in axes for axes, _ in extents) for axis in range(len(AXES)))
    allowed = _legal(there, cuts, ranks) if full else _worthwhile(there, cuts, ranks)
    return tuple(parts for parts in allowed if _fits(extents, parts, balanced=not full))


def _legal(there: Sequence[bool], cuts: str, ranks: int) -> Iterator[Parts]:
    """Yield the cuts that `cuts` (`Layer.cuts_channels`) allows along the axes that exist (`there`).

    Their number of parts divides `ranks`.
    """
    for used in divisors(ranks):
        for parts in _factorizations(there, used):
            if cuts == "contracts" or (parts[5] == 1 and (cuts != "no" or parts[4] == 1)):
                yield parts


@lru_cache(maxsize=1024)
def _worthwhile(there: tuple[bool, ...], cuts: str, ranks: int) -> tuple[Parts, ...]:
    """Return the promising cuts for a layer with these axes, for any extents."""
    worthwhile = []
    for parts in _legal(there, cuts, ranks):
        space, channels = sorted((n for n, has in zip(parts[1:4], there[1:4]) if has), reverse=True), parts[4:]
        used, blocks = math.prod(parts), math.prod(space)
        # Blocks as square as possible, in any order of axes, or slabs along one axis.
        shapely = not space or space[0] == blocks or _squarest(blocks, len(space)) == tuple(space)
        kinds = [parts[0] > 1, blocks > 1, math.prod(channels) > 1]
        few = ranks <= FEW or not (kinds[1] and kinds[2])
        if min(channels) == 1 and shapely and few and (2 * used >= ranks or sum(kinds) < 2):
            worthwhile.append(parts)
    return tuple(worthwhile)


def _factorizations(there: Sequence[bool], used: int) -> Iterator[Parts]:
    """Yield all ways to write `used` as a product over the axes that exist (`there`)."""

    def rest(axis: int, left: int) -> Iterator[Parts]:
        if axis == len(there):
            if left == 1:
                yield ()
            return
        for parts in divisors(left) if there[axis] else (1,):
            for others in rest(axis + 1, left // parts):
                yield (parts, *others)

    yield from rest(0, used)


def _fits(extents: Sequence[Extent], parts: Parts, balanced: bool) -> bool:
    """Return whether every part has elements of each extent.

    If `balanced`, parts also have nearly equal numbers of elements, and at least `CHANNELS` channels.
    """
    for axes, n in extents:
        count = math.prod(parts[axis] for axis in axes)
        if count == 1:
            continue
        # The largest part may have at most `UNEVEN` times the mean, n / count.
        if n < count or (balanced and -(-n // count) * count > UNEVEN * n):
            return False
        # Axes 4 and 5 are channels.
        if balanced and axes[-1] > 3 and n < CHANNELS * count:
            return False
    return True


@lru_cache(maxsize=4096)
def _squarest(product: int, axes: int) -> tuple[int, ...]:
    """Return the `axes` factors of `product` that differ least, the larger ones first.

    >>> _squarest(8, 2), _squarest(8, 3)
    ((4, 2), (2, 2, 2))
    """
    if axes == 1:
        return (product,)
    best = min(
        ((*rest, last) for last in divisors(product) for rest in [_squarest(product // last, axes - 1)]),
        # Among factorizations of one product, the most equal one has the smallest sum.
        key=lambda factors: (sum(factors), [-f for f in factors]),
    )
    return tuple(sorted(best, reverse=True))


def grids(network: Network, batch: int, ranks: int) -> list[Parts]:
    """Return the cuts of samples and space into exactly `ranks` parts that fit the extents of every input."""
    extents: list[Extent] = [((0,), batch), *spatial_extents(node.shape for node in network.inputs.values())]
    there = [any(axis in axes for axes, _ in extents) for axis in range(len(AXES))]
    return [parts for parts in _factorizations(there, ranks) if _fits(extents, parts, balanced=False)]


def shared_candidates(network: Network, candidates: Mapping[str, tuple[Parts, ...]]) -> dict[str, tuple[Parts, ...]]:
    """Return candidates by layer such that all calls of a layer can hold the same blocks of its parameters.

    The candidates of shared layers do not cut channels, nor space if their parameters have spatial extents, and use the
    largest number of ranks for which all calls have candidates; a single rank is always possible.
    """
    groups: dict[str, list[str]] = {}
    for name, owner in network.owners.items():
        groups.setdefault(owner, []).append(name)
    result = dict(candidates)
    for names in groups.values():
        specs = network.own_parameters(names[0]).values()
        if len(names) == 1 or not specs:
            continue
        first = 1 if any(spec.spatial_axes for spec in specs) else 4  # the first axis along which parameters are cut
        whole = {name: [p for p in candidates[name] if math.prod(p[first:]) == 1] for name in names}
        # Never empty: a single rank is a candidate of every call.
        used = max(set.intersection(*({math.prod(p) for p in options} for options in whole.values())))
        result |= {name: tuple(p for p in options if math.prod(p) == used) for name, options in whole.items()}
    return result


def is_step(a: Parts, b: Parts) -> bool:
    """Return whether two grids differ in exactly two axes, so that parts of one axis move to the other.

    >>> is_step((4, 2, 1), (2, 4, 1)), is_step((4, 2, 1), (1, 2, 4)), is_step((4, 2, 1), (2, 2, 2))
    (True, True, True)
    """
    return sum(m != n for m, n in zip(a, b)) == 2


def strategy_of(network: Network, parts: Mapping[str, Parts], bucket_bytes: int = 4 << 20) -> Strategy:
    """Return the strategy with the parts of every layer."""
    layers = {
        name: {axis: n for axis, n in zip(AXES, parts[name]) if n > 1} or {"sample": 1} for name in network.layers
    }
    return Strategy({}, layers, bucket_bytes=bucket_bytes)


class Baseline(Chooser):
    """Baseline: a rule that cuts each layer independently. A subclass has a `name` and defines :meth:`parts`."""

    widens = False

    def look(self, search: PlanSearch) -> None:
        search.compare(self.name, self.strategy)

    @abstractmethod
    def parts(self, node: Node, batch: int, ranks: int, samples: int) -> Parts:
        """Return the parts of a layer, in the order of `AXES`.

        `samples` is the largest number of parts of the batch that divides `ranks`.
        """

    def strategy(self, network: Network, batch: int, ranks: int, bucket_bytes: int = 4 << 20) -> Strategy:
        """Return the strategy, legal for the network.

        Parameters
        ----------
        batch
            Global number of samples.
        ranks
            Number of ranks; some layers may use fewer.
        """
        # A divisor, so that all groups of samples have equally many ranks.
        samples = max(d for d in divisors(ranks) if d <= batch)
        nodes = network.layers
        parts = {layer: tuple(self.parts(node, batch, ranks, samples)) for layer, node in nodes.items()}
        for layer, owner in network.owners.items():
            if layer == owner:
                continue
            specs = network.own_parameters(owner)
            blocks = [held(specs, nodes[member], dict(zip(AXES, parts[member])), ranks) for member in (layer, owner)]
            if blocks[0] != blocks[1]:  # calls of one layer must hold the same blocks of its parameters
                shared = [call for call, its in network.owners.items() if its == owner]
                parts |= {call: _by_samples(samples) for call in shared}
        return strategy_of(network, parts, bucket_bytes)


def baseline(name: str, network: Network, batch: int, ranks: int, bucket_bytes: int = 4 << 20) -> Strategy:
    """Return the strategy of the baseline `name`, one of `BASELINES` or a class of the user.

    Raises
    ------
    UserError
        If there is no baseline of that name.
    """
    planner = PLANNERS.find(name, "baseline")
    if not issubclass(planner, Baseline):
        raise UserError(f"baseline: expected one of {', '.join(BASELINES)}, got {name!r}")
    return planner().strategy(network, batch, ranks, bucket_bytes)


def _by_samples(samples: int) -> Parts:
    return (samples, 1, 1, 1, 1, 1)


def _of_node(node: Node, batch: int, ranks: int) -> tuple[Parts, ...]:
    return candidates(node.layer, [source.shape for source in node.inputs], node.shape, batch, ranks)


@PLANNERS.register
class _Data(Baseline):
    """Baseline that cuts all layers by samples."""

    name = "data"

    def parts(self, node: Node, batch: int, ranks: int, samples: int) -> Parts:
        return _by_samples(samples)


@PLANNERS.register
class _Spatial(Baseline):
    """Baseline that cuts every layer over space as finely as possible, then by samples; a layer that cannot be cut over
    space is cut by samples.
    """

    name = "spatial"

    def parts(self, node: Node, batch: int, ranks: int, samples: int) -> Parts:
        options = [p for p in _of_node(node, batch, ranks) if p[4] * p[5] == 1 and math.prod(p[1:4]) > 1]
        # Most ranks first, then fewest parts of the samples, then the most square blocks.
        return max(options, key=lambda p: (math.prod(p), -p[0], -max(p[1:4])), default=_by_samples(samples))


@PLANNERS.register
class _Model(Baseline):
    """Baseline that cuts every layer by its channels as finely as possible, or by samples if channels cannot be cut."""

    name = "model"

    def parts(self, node: Node, batch: int, ranks: int, samples: int) -> Parts:
        # Cut along output channels only.
        options = [p for p in _of_node(node, batch, ranks) if p[4] > 1 and math.prod(p) == p[4]]
        return max(options, key=lambda p: p[4], default=_by_samples(samples))


@PLANNERS.register
class _OneWeirdTrick(_Model):
    """Baseline that cuts dense layers, and channelwise layers after them, by channels, other layers by samples.

    This is one weird trick of Krizhevsky 2014.
    """

    name = "owt"

    def parts(self, node: Node, batch: int, ranks: int, samples: int) -> Parts:
        before = node
        while before.layer.cuts_channels != "contracts" or before.layer.stencil is not None:  # not a dense layer
            if before.layer.cuts_channels != "channelwise" or not before.inputs:
                return _by_samples(samples)
            before = before.inputs[0]
        return super().parts(node, batch, ranks, samples)


@PLANNERS.register
class _Grid(Chooser):
    """Chooser of the best cut that is the same for all layers."""

    name = GRID

    def look(self, search: PlanSearch) -> None:
        search.compare_grids()


#: Names of the baselines that every plan is compared with.
BASELINES = ("data", "spatial", "model", "owt")
