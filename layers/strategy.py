"""Strategies: the cuts of every layer. Plain data, saved as JSON, edited by hand."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from halograd.documents import read_json, shown_path, write_whole
from halograd.errors import UserError
from halograd.schema import STRICT, As, Count, Shares, Size, Table, Text, build, check_fields

from ..comm.boot import start_text
from ..dtensor import Layout, axis_names, shared_boundaries
from .layer import Node
from .loss import Loss
from .network import Network
from .parameter import Parameter, ParameterBlocks, blocks_of
from .reduction_chunks import check_replicated, check_scheme
from .reduction_scheme import Scheme

__all__ = [
    "AXES",
    "Cut",
    "CutField",
    "Strategy",
    "counts_of",
    "cuts_text",
    "layout_of",
    "parameter_blocks",
    "spatial_axes",
]

_log = logging.getLogger(__name__)

#: Axes of the process grid of a layer, the last one fastest. "channel" cuts the output's channels (and their filters).
#: "input_channel" cuts the sum over the input's channels: its partial sums are added up and spread over the output's
#: channels, which are cut into channel * input_channel blocks.
AXES: tuple[str, ...] = ("sample", "depth", "height", "width", "channel", "input_channel")

#: Parts along an axis: the number of equal parts, or the share of each part.
Cut = int | tuple[int, ...]
CutField = Count | Shares


class PartsTable(Table):
    """Parts per axis: their number, or the share of each."""

    sample: CutField = 1
    """Parts of the batch."""
    depth: CutField = 1
    """Parts along the first of three spatial axes."""
    height: CutField = 1
    """Parts of the rows."""
    width: CutField = 1
    """Parts of the columns."""
    channel: Count = 1
    """Parts of the output's channels."""
    input_channel: Count = 1
    """Parts of the input's channels, over which the output is summed."""


class OptionsTable(Table):
    """Options of a layer, or of every layer."""

    halo: Literal["auto", "pad", "overlap"] = "auto"
    """Time at which a convolution waits for its halo: before it computes (``"pad"``), or after its interior
    (``"overlap"``); ``"auto"``: `overlap` if halos cross a network, `pad` between ranks that share memory."""
    attention: Literal["auto", "gather", "ring"] = "auto"
    """Time at which attention over whole samples gets the keys and values of other ranks: all before it computes
    (``"gather"``), or block by block while it computes (``"ring"``: hidden messages, more and smaller
    kernels); ``"auto"`` follows `halo`: a ring for ``"overlap"``."""
    statistics: Literal["local", "sample", "global"] = "global"
    """Statistics of batch norms: of this block, of the ranks that share samples, or of all ranks."""
    wide: bool = False
    """Whether the output is computed with a margin that the next layers need, instead of exchanging its halo: fewer
    messages, more computation. Layers that cannot do this, and those before a layer that cannot read it, exchange."""
    recompute: Literal["none", "pointwise", "block"] = "none"
    """Outputs that are not kept for the backward pass, but computed again in it: none; those of norms, activations,
    sums and other pointwise layers (``"pointwise"``); or those of all layers that can be repeated (``"block"``)."""
    recompute_halo: Literal["keep", "exchange"] = "keep"
    """Halos of an output that is computed again: kept in small arrays (``"keep"``), or exchanged again in the backward
    pass (``"exchange"``: less memory, more messages to wait for)."""


class LayerTable(OptionsTable, PartsTable):
    """Parts and options of one layer that differ from those of the other layers."""


@dataclass(frozen=True)
class Strategy:
    """Parts per axis and options, for all layers and for single layers.

    Attributes
    ----------
    parts
        Parts per axis for every layer: ``{"sample": 2, "height": 2}``; axes not named are not cut. A list gives the
        shares of unequal parts: ``{"height": [2, 1, 1]}`` (half of the rows in the first). Channels are cut evenly.
    layers
        Layer name -> its own parts per axis (they replace all of `parts`) and options, such as ``halo`` ("pad",
        "overlap" or "auto").
    options
        Options of every layer.
    bucket_bytes
        Size of the buckets in which parameter gradients are summed [B].
    reduction
        Scheme of the gradient sums: a :class:`Scheme`, or its fields as a mapping.
    passes
        Names of passes that transform the program of a step (`halograd.program.passes`), in order.
    """

    __pydantic_config__ = STRICT

    parts: Annotated[Mapping[str, int | Sequence[int]], As(PartsTable)] = field(default_factory=dict)
    layers: Mapping[str, Annotated[Mapping[str, Any], As(LayerTable)]] = field(default_factory=dict)
    options: Annotated[Mapping[str, Any], As(OptionsTable)] = field(default_factory=dict)
    bucket_bytes: Size = 4 << 20
    reduction: Scheme = field(default_factory=Scheme)
    passes: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduction", Scheme.of(self.reduction))
        # Shares become tuples, as those from a file, because strategies are compared. `validate` reports other types.
        if isinstance(self.parts, Mapping):
            object.__setattr__(self, "parts", _hashable(self.parts))
        if isinstance(self.layers, Mapping):
            own = {k: _hashable(v) if isinstance(v, Mapping) else v for k, v in self.layers.items()}
            object.__setattr__(self, "layers", own)

    def with_reduction(self, scheme: Scheme, bucket_bytes: int) -> Strategy:
        """Return the same cuts with another scheme of gradient reduction, and buckets of this size [B]."""
        other = copy.copy(self)  # not `replace`: the copy keeps the cached cuts, which searches need
        object.__setattr__(other, "reduction", scheme)
        object.__setattr__(other, "bucket_bytes", bucket_bytes)
        return other

    def cuts_of(self, layer: str) -> Mapping[str, Cut]:
        """Return the parts per axis of one layer, as shares if the parts are unequal; every axis is named."""
        if layer not in self._cuts:
            own = {k: v for k, v in self.layers.get(layer, {}).items() if k in AXES}
            # Parts of a layer replace all those of the strategy: along axes that it does not name it is whole.
            chosen = own or self.parts
            self._cuts[layer] = {axis: _cut(chosen.get(axis, 1)) for axis in AXES}
        return self._cuts[layer]

    @cached_property
    def _cuts(self) -> dict[str, Mapping[str, Cut]]:
        """Cache of `cuts_of`."""
        # A cached property, because the class is frozen.
        return {}

    def parts_of(self, layer: str) -> dict[str, int]:
        """Return the number of parts per axis of one layer; every axis is named."""
        if layer not in self._counts:
            self._counts[layer] = counts_of(self.cuts_of(layer))
        return self._counts[layer]

    @cached_property
    def _counts(self) -> dict[str, dict[str, int]]:
        """Cache of `parts_of`."""
        return {}

    def options_of(self, layer: str) -> dict[str, Any]:
        """Return the options of one layer."""
        own = {k: v for k, v in self.layers.get(layer, {}).items() if k not in AXES}
        return {**self.options, **own}

    @cached_property
    def recomputes(self) -> bool:
        """Whether outputs of some layers are computed again in the backward pass."""
        return any(own.get("recompute", "none") != "none" for own in (self.options, *self.layers.values()))

    @cached_property
    def widens(self) -> bool:
        """Whether outputs of some layers are computed with a margin."""
        return any(own.get("wide", False) for own in (self.options, *self.layers.values()))

    @property
    def exchanging_all(self) -> Strategy:
        """The same strategy without margins: all halos are exchanged."""
        layers = {name: _without(own, "wide") for name, own in self.layers.items()}
        return replace(self, layers=layers, options=_without(self.options, "wide"))

    @property
    def keeping_all(self) -> Strategy:
        """The same strategy without recomputation: all outputs are kept for the backward pass."""
        layers = {name: _without(own, "recompute") for name, own in self.layers.items()}
        return replace(self, layers=layers, options=_without(self.options, "recompute"))

    @property
    def ranks(self) -> int:
        """Number of ranks that the parts need: the maximum over all layers; a layer may use fewer."""
        # No layer is named "": its parts are those of layers without parts of their own.
        return max(math.prod(self.parts_of(name).values()) for name in ("", *self.layers))

    def validate(self, network: Network, size: int) -> None:
        """Validate the strategy for a network and a number of ranks. Local, the same on every rank.

        Raises
        ------
        UserError
            For unknown layers or options, axes that are unknown or that a layer lacks, parts that do not match the
            number of ranks, calls of one layer with different blocks of its parameters, and a gradient reduction that
            does not fit the network.
        """
        check_fields(self, "", "strategy")
        unknown = set(self.layers) - set(network.layers)
        if unknown:
            names = ", ".join(list(network.layers)[:6])
            raise UserError(
                f"strategy: layer {sorted(unknown)[0]!r} is not in network {network.name!r} (it has {names}, ...); "
                "is this the strategy of another network?"
            )
        # A plan for every layer may leave ranks unused; a single grid for all layers that does so is a mistake.
        if self.ranks > size or (self.ranks < size and not self._is_plan):
            raise UserError(
                f"strategy: {self._largest()} needs {self.ranks} ranks, the run has {size}; {start_text(self.ranks)} "
                f"or choose parts whose product is {size}"
            )
        spatial = spatial_axes(network)
        for name, node in network.layers.items():
            _check_axes(name, node, self.parts_of(name), spatial)
        self._check_shared(network, size)
        check_scheme(self.reduction, network)
        check_replicated(self, network)

    def _check_shared(self, network: Network, size: int) -> None:
        """Check that all calls of one layer have the same blocks of its parameters. Raises UserError."""
        for name, owner in network.owners.items():
            if name == owner or self.cuts_of(name) == self.cuts_of(owner):
                continue
            # Other cuts are right too if they give the same blocks: whole parameters on as many ranks.
            specs = network.own_parameters(owner)
            mine, others = (held(specs, network.layers[layer], self.cuts_of(layer), size) for layer in (name, owner))
            if mine != others:
                raise UserError(
                    f"strategy: expected {name!r}, which has the parameters of {owner!r}, on as many ranks and with as "
                    f"many parts of channels, got {cuts_text(self.cuts_of(name))} after "
                    f"{cuts_text(self.cuts_of(owner))}; cut both in the same way"
                )

    def _largest(self) -> str:
        """Return the cut with the most parts, as text."""
        most = max(("", *self.layers), key=lambda name: math.prod(self.parts_of(name).values()))
        return f"{cuts_text(self.cuts_of(most))}{f' of layer {most!r}' if most else ''}"

    def refuse_empty_blocks(self, network: Network) -> None:
        """Check that no axis of a sample has more parts than elements, because some ranks would read nothing. Local.

        Blocks without elements are computed correctly, and deep layers may have some. For whole samples they are a
        mistake.
        """
        read = {n for node in network.layers.values() if not isinstance(node.layer, Loss) for n in node.inputs}
        for name, node in network.inputs.items():
            if node in read:
                # An input has the cut of its first reader.
                reader = next(other for other, layer in network.layers.items() if node in layer.inputs)
                self._check_extent(name, node.shape, reader)

    def _check_extent(self, name: str, shape: tuple[int, ...], reader: str) -> None:
        # zip() ends before the channels.
        for axis, cut, extent in zip(*_folded(len(shape) + 1, self.cuts_of(reader)), shape):
            parts = counts_of({axis: cut})[axis]
            if parts > extent:
                raise UserError(
                    f"strategy: {parts} parts along {axis!r}, but input {name!r} has an extent of {extent} "
                    f"there; use at most {extent} parts"
                )
            if isinstance(cut, tuple) and 0 in _extents(shared_boundaries(extent, cut)):
                raise UserError(
                    f"strategy: shares {list(cut)} along {axis!r} leave a part of input {name!r}, which has an extent "
                    f"of {extent} there, without elements; use shares that differ less"
                )

    def warn_of_idle_ranks(self, network: Network, batch: int, size: int) -> None:
        """Log a warning if ranks own nothing of any layer's output: this is correct, but a waste. Local; once per
        process.

        There is no warning if only single layers have parts, as in a plan, which may leave ranks idle on purpose.
        """
        idle = [] if self._is_plan else self._idle_ranks(network, batch, size)
        if idle:
            listed = ", ".join(map(str, idle[:4])) + (", ..." if len(idle) > 4 else "")
            _warn_once(
                f"strategy: {len(idle)} of {size} ranks (rank {listed}) have nothing to compute in network "
                f"{network.name!r} with a batch of {batch} ({self._largest()}); start fewer ranks, or choose parts "
                "that have samples and rows for all"
            )

    @property
    def _is_plan(self) -> bool:
        """Whether single layers have parts, but there are none for all layers, as in a plan."""
        return not self.parts and any(axis in own for own in self.layers.values() for axis in AXES)

    def _idle_ranks(self, network: Network, batch: int, size: int) -> list[int]:
        idle = list(range(size))
        for name, node in network.layers.items():
            # A loss computes on blocks of its prediction; its output is one number.
            shape = node.inputs[0].shape if isinstance(node.layer, Loss) else node.shape
            boxes = layout_of((batch, *shape), self.cuts_of(name), size).boxes
            idle = [rank for rank in idle if not boxes[rank].size]
            if not idle:  # in most cases no rank is idle after the first layer
                break
        return idle

    def save(self, path: str | Path) -> None:
        """Write the strategy as JSON."""
        data = {"parts": dict(self.parts), "layers": {k: dict(v) for k, v in self.layers.items()}}
        data |= {"options": dict(self.options), "bucket_bytes": self.bucket_bytes, "reduction": asdict(self.reduction)}
        data |= {"passes": self.passes} if self.passes else {}
        write_whole(path, json.dumps(data, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a strategy that `save` wrote.

        Raises
        ------
        UserError
            If the file cannot be read or holds no strategy; one line with the key, the expected and the given value.
        """
        return build(cls, read_json(path, "strategy"), f"strategy {shown_path(path)}")


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def held(specs: Mapping[str, Parameter], node: Node, cuts: Mapping[str, Cut], size: int) -> dict[str, ParameterBlocks]:
    """Return the blocks of arrays of a layer under a cut, by their names. Local."""
    if not specs:
        return {}
    # One sample stands for any batch: blocks of parameters do not depend on the cut of the samples.
    output, parts = layout_of((1, *node.shape), cuts, size), counts_of(cuts)
    return {key: blocks_of(spec, parts, output) for key, spec in specs.items()}


def spatial_axes(network: Network) -> list[str]:
    """Return the names of the spatial axes that a value of the network has."""
    names = {name for node in network.nodes for name in axis_names(len(node.shape) + 1)[1:-1]}
    return [axis for axis in AXES if axis in names]


def _check_axes(name: str, node: Node, parts: Mapping[str, int], spatial: Sequence[str]) -> None:
    """Check that the network has the spatial axes of a layer's cut, that the layer allows a cut of channels if there is
    one, and that every part has channels. Raises UserError.

    A layer may be cut along any of the `spatial` axes of the network: see `layout_of` for those that it lacks.
    """
    layer = node.layer
    channels = {"no": (), "channelwise": ("channel",), "contracts": ("channel", "input_channel")}[layer.cuts_channels]
    allowed = ("sample", *spatial, *channels)
    refused = [axis for axis, n in parts.items() if n > 1 and axis not in allowed]
    if refused:
        raise UserError(
            f"strategy: layer {name!r} ({layer.kind}) cannot be cut along {refused[0]!r}; use {' or '.join(allowed)}"
        )
    blocks = parts["channel"] * parts["input_channel"]
    if blocks == 1:
        return
    written, read = node.shape[-1], min(n.shape[-1] for n in node.inputs)
    if blocks > written:
        raise UserError(f"strategy: layer {name!r}: {blocks} blocks of {written} channels; use at most {written}")
    if parts["input_channel"] > read:
        raise UserError(f"strategy: layer {name!r}: {parts['input_channel']} parts of {read} input channels")


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def cuts_text(cuts: Mapping[str, Cut]) -> str:
    """Return a string of the axes that are cut, with their parts.

    >>> cuts_text({"sample": 2, "height": (3, 1, 1), "width": 1}), cuts_text({})
    ('2 sample x 3:1:1 height', 'no cut')
    """
    named = {axis: ":".join(map(str, n)) if isinstance(n, tuple) else str(n) for axis, n in cuts.items()}
    return " x ".join(f"{text} {axis}" for axis, text in named.items() if text != "1") or "no cut"


def _hashable(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _cut(parts: int | Sequence[int]) -> Cut:
    """Return the number of parts for equal shares, else the shares."""
    if isinstance(parts, int) or not isinstance(parts, Sequence):  # the first is much faster
        return int(parts)
    shares = tuple(int(n) for n in parts)
    return len(shares) if len(set(shares)) == 1 else shares


def counts_of(cuts: Mapping[Any, Cut]) -> dict[Any, int]:
    """Return the number of parts per axis."""
    return {axis: len(n) if isinstance(n, tuple) else n for axis, n in cuts.items()}


def _extents(boundaries: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(boundaries)]


def layout_of(shape: tuple[int, ...], cuts: Mapping[str, Cut], size: int) -> Layout:
    """Return the layout of an array ``(N, *spatial, C)`` with these parts.

    Channels are cut into ``channel * input_channel`` blocks. The parts along spatial axes that the array lacks, but
    other arrays of the network have, cut its first spatial axis further: tokens ``(N, L, C)`` under 2 x 2 have 4 blocks
    of positions, in the order of the ranks. The samples of an array without spatial axes are spread over all other
    parts, one block each. So every element has one owner, the layers after a spatial trunk are computed once, and every
    parameter gradient is a sum over the ranks.
    """
    return _layout(tuple(shape), tuple([cuts.get(axis, 1) for axis in AXES]), size)


@lru_cache(maxsize=65536)
def _layout(shape: tuple[int, ...], requested: tuple[Cut, ...], size: int) -> Layout:
    cuts = dict(zip(AXES, requested))
    parts = counts_of(cuts)
    channel = parts["channel"] * parts["input_channel"]
    if len(shape) == 2:  # at most one block per sample: further ranks have none
        return Layout.blocks(shape, (min(shape[0], math.prod(parts.values()) // channel), channel), size)
    shares = dict(enumerate((cuts["sample"], *_folded(len(shape), cuts)[1])))
    uneven = {d: shared_boundaries(shape[d], cut) for d, cut in shares.items() if isinstance(cut, tuple)}
    return Layout.blocks(shape, (*counts_of(shares).values(), channel), size, uneven)


def _folded(ndim: int, cuts: Mapping[str, Cut]) -> tuple[tuple[str, ...], list[Cut]]:
    """Return the spatial axes of an array with `ndim` axes, and the cut of each.

    The cuts of axes that the array lacks are folded into its first axis: they precede it in `AXES`, so its blocks are
    in the row-major order of the ranks.

    >>> _folded(3, {"height": 2, "width": (2, 1)}), _folded(4, {"depth": 2, "height": 2})
    ((('height x width',), [(2, 1, 2, 1)]), (('depth x height', 'width'), [4, 1]))
    """
    names = axis_names(ndim)[1:-1]
    if not names:
        return (), []
    first = AXES.index(names[0])
    folded = [name for name in AXES[1:first] if cuts.get(name, 1) != 1]
    joined: Cut = 1
    for name in (*folded, names[0]):
        joined = _product(joined, cuts.get(name, 1))
    return (" x ".join((*folded, names[0])), *names[1:]), [joined, *(cuts.get(name, 1) for name in names[1:])]


def _product(outer: Cut, inner: Cut) -> Cut:
    """Return the cut of every part of `outer` into the parts of `inner`."""
    if isinstance(outer, int) and isinstance(inner, int):
        return outer * inner
    first, second = ((1,) * n if isinstance(n, int) else n for n in (outer, inner))
    return tuple(a * b for a, b in itertools.product(first, second))


def parameter_blocks(network: Network, strategy: Strategy, size: int) -> dict[str, ParameterBlocks]:
    """Return the blocks of all parameters and states by ``layer/parameter``, on `size` ranks. Local.

    A rank that a layer does not use holds none of its parameters. If channels are cut, a rank holds its block of
    filters, of input channels, or of both. Biases belong to the first part of the sum over the input channels. Of
    parameters with spatial extents, a rank holds the box of its output block.
    """
    result: dict[str, ParameterBlocks] = {}
    for name, node in network.layers.items():
        specs = {**network.own_parameters(name), **network.own_states(name)}
        held_blocks = held(specs, node, strategy.cuts_of(name), size)
        result |= {f"{name}/{key}": blocks for key, blocks in held_blocks.items()}
    return result
