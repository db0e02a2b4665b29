"""Parameters and gradients: flat arrays in the order in which backward finishes the gradients, and buckets, which are
ranges of these arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import shards
from ..device import device_of, is_low, wide
from ..dtensor import Box, End, Exchange, Groups, Layout, group_of
from ..layers import Network, Parameter, Strategy
from ..layers.parameter import ParameterBlocks
from ..layers.reduction_chunks import GradientChunk, chunks_of, gradient_layers, replicated_layers
from ..layers.reduction_scheme import Scheme
from ..layers.settings import fingerprint
from ..layers.strategy import parameter_blocks
from .gradient_scaling import LossScale
from .memory import Memory

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["Bucket", "Flat", "ParameterStore"]

#: Alignment of parameters and buckets [B]: a cache line, and a vector of AVX-512.
_ALIGN = 64


def _nothing() -> None:
    """Do nothing; used where no array needs a conversion."""


@dataclass
class Flat:
    """Parameters that the same ranks share, in the order in which backward finishes their gradients: a group of
    :attr:`ParameterStore.flats`.

    Attributes
    ----------
    params, grads
        One array each, with small gaps of zeros for alignment. They are never reallocated: layers hold views of them.
    slices
        Range of each parameter in the arrays, by ``layer/parameter``.
    errors
        Residuals of the rounding of gradients, to be added to the next gradients, on the host; None if the scheme keeps
        none.
    copies
        The parameters in 16 bits, as most layers read them; None where they read `params`.
    rounded
        Gradients that layers compute in 16 bits, at the same offsets as in `grads`; None without such gradients.
    sums
        Sums of the gradients of the parts of a batch so far; None where batches are computed as a whole.
    """

    params: Any
    grads: Any
    slices: dict[str, slice]
    errors: np.ndarray | None = None
    copies: Any = None
    rounded: Any = None
    sums: Any = None


@dataclass
class Bucket:
    """Parameters whose gradients are summed over the same ranks with one message: a range of a :class:`Flat`.

    Attributes
    ----------
    names
        Names of the parameters, ``layer/parameter``.
    params, grads, errors, copies, sums
        Views of the arrays of the :class:`Flat`.
    decays
        Ranges of elements ``(start, stop, decayed)``, with or without weight decay.
    slices
        Range of each parameter, relative to the start of the bucket.
    chunk
        Description of the bucket on all ranks.
    flat, start
        Index in :attr:`ParameterStore.flats`, and offset of the bucket in those arrays.
    widen
        Function that enqueues the conversion of all gradients that are computed in 16 bits, in one launch; called
        before their sum.
    refresh
        Function that enqueues the update of `copies`, after `params` were written by anything other than a fused
        update.
    """

    names: list[str]
    params: Any
    grads: Any
    decays: list[tuple[int, int, bool]]
    slices: dict[str, slice]
    chunk: GradientChunk
    flat: int = 0
    start: int = 0
    errors: np.ndarray | None = None
    copies: Any = None
    sums: Any = None
    widen: Callable[[], None] = _nothing
    refresh: Callable[[], None] = _nothing

    @property
    def holders(self) -> Groups:
        """Groups of ranks that hold the same blocks (see :class:`ParameterBlocks`)."""
        return self.chunk.sharing

    @property
    def replicated(self) -> bool:
        """Whether every rank computes the gradients of the whole batch, so that they are not summed."""
        return self.chunk.replicated

    def add_part(self, part: int, parts: int) -> None:
        """Add the gradients of part number `part` of a batch in `parts` parts; after the last part, `grads` has the
        mean over the batch.
        """
        if parts == 1:
            return
        if not part:
            np.copyto(self.sums, self.grads)
        elif part + 1 < parts:
            np.add(self.sums, self.grads, out=self.sums)
        else:
            np.add(self.grads, self.sums, out=self.grads)
            # The loss of a part is a mean over its samples, and all parts have as many.
            np.multiply(self.grads, 1 / parts, out=self.grads)


@dataclass
class ParameterStore:
    """Blocks of this rank of all parameters, gradients and states of a network. Local.

    Parameters
    ----------
    network
        Network of the parameters.
    memory
        Allocator of the arrays, which counts them.
    dtype
        Dtype of activations. Parameters and gradients have the same dtype, or float32 if activations have 16 bits: then
        there are copies of the parameters in 16 bits, written with every update.
    seed
        Seed of the initial values, which do not depend on the strategy.
    bucket_bytes
        Minimum size of a bucket, on the rank with its largest block [B].
    blocks
        Block of each array that every rank holds; None: one rank, which holds everything.
    rank
        This rank.
    scheme
        Scheme of gradient reduction, which decides the buckets.
    separate
        Layers with separate arrays, because they may be replicated now or later; None: the layers that are replicated
        now.
    parts
        Number of parts of a batch that are computed one after the other, and whose gradients are added.
    rounds
        Whether the kernels write gradients of `Parameter.rounded` in 16 bits, if activations have 16 bits.

    Attributes
    ----------
    errors
        Residuals by ``layer/parameter``, as in :class:`Flat`; empty if the scheme keeps none.
    dtype
        Dtype of parameters, gradients and states.
    low
        Dtype of the copies; None without copies.
    direct
        Whether updates read the gradients in `rounded`, which are then not converted: `grads` has old values for them.
    copies, rounded
        Arrays by ``layer/parameter``, as in :class:`Flat`; empty without 16 bits.
    loss_scale
        With float16, the factor on the gradient of the loss; else None.
    reducer
        The reducer that summed gradients last, whose updates may be pending; None before the first backward pass.
    flats
        The arrays: one set per way in which ranks share parameters, one for replicated layers, one for untrained ones.
    untrained
        Names of parameters that the loss does not depend on (`Network.trained`): no bucket holds them.
    buckets
        Buckets, in the order in which backward finishes them (`layers/reduction_chunks.py`); changed by
        :meth:`rechunk` only.
    """

    network: Network
    memory: Memory
    dtype: np.dtype
    seed: int = 0
    bucket_bytes: int = 4 << 20
    blocks: Mapping[str, ParameterBlocks] | None = None
    rank: int = 0
    scheme: Scheme = field(default_factory=Scheme)
    separate: frozenset[str] | None = None
    parts: int = 1
    rounds: bool = True
    direct: bool = field(default=False, init=False)
    reducer: Any = field(default=None, init=False)
    flats: list[Flat] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    grads: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, np.ndarray] = field(default_factory=dict)
    copies: dict[str, Any] = field(default_factory=dict)
    rounded: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The argument `dtype` is that of activations; from here on it is that of parameters.
        self.low = self.dtype if is_low(self.dtype) else None
        self.dtype = wide(self.dtype)
        self.loss_scale = LossScale(self.memory) if self.low is not None and self.low.name == "float16" else None
        if self.blocks is None:
            self.blocks = parameter_blocks(self.network, Strategy(), 1)
        specs, states = self.network.parameters(), self.network.state()
        #: Taken before the first pass: layers of the user's own may store more in themselves when they compute.
        self.fingerprint = fingerprint(self.network)
        self.shapes: dict[str, tuple[int, ...]] = {n: s.shape for n, s in {**specs, **states}.items()}
        self._decays = {n: s.decay for n, s in specs.items()}
        self._layers = gradient_layers(self.network, self.blocks)
        if self.separate is None:
            self.separate = replicated_layers(self._layers, self.scheme)
        self._flat_numbers: dict[str, int] = {}
        together = self._together()
        # The loss does not depend on the other parameters, so they have no gradient layer.
        trained = {name for names in together for name in names}
        self.untrained = [name for name in specs if name not in trained]
        for names in filter(None, [*together, self.untrained]):
            # Gradients of untrained parameters are zero in every part, and need no sum.
            self._allocate(names, specs, self.parts > 1 and names is not self.untrained)
        self.buckets = self._chunked(self.scheme)
        for name, spec in states.items():
            box = self.box(name)
            self.state[name] = self.memory.keep(box.shape, self.dtype, "parameter")
            self.memory.device.assign(self.state[name], spec.initial(name, self.seed)[box.slices()])
        self.refresh()

    def refresh(self) -> None:
        """Update all copies in 16 bits, after a write to parameters outside of a step. Enqueued."""
        for flat in self.flats:
            self._copying(flat.copies, flat.params)()

    def _copying(self, copies: Any, params: Any) -> Callable[[], None]:
        """Return a call that enqueues the rounding of parameters to 16 bits."""
        if copies is None or not params.size:
            return _nothing
        return self.memory.device.copies([(copies, params)])

    def box(self, name: str) -> Box:
        """Return the box of a parameter or state that this rank holds."""
        assert self.blocks is not None
        return self.blocks[name].boxes[self.rank]

    @property
    def whole(self) -> bool:
        """Whether every rank holds all parameters and states whole."""
        assert self.blocks is not None
        return all(b.whole for b in self.blocks.values())

    def is_sharded(self, bucket: Bucket) -> bool:
        """Return whether every rank that holds the bucket updates a shard of it only. Local."""
        return self.scheme.kind.shards and not bucket.replicated

    def owned(self, bucket: Bucket) -> slice:
        """Return the elements of a bucket that this rank updates: all, or its shard of a sharded bucket. Local."""
        size = bucket.params.size
        color = bucket.holders.color(self.rank)
        # A rank without a group holds nothing of the bucket: its size is 0.
        if color is None or not self.is_sharded(bucket):
            return slice(0, size)
        holders = bucket.holders.members(color)
        return shards(size, len(holders), self.dtype.itemsize)[holders.index(self.rank)]

    def gather_shards(self, comm: Communicator, bucket: Bucket, shard: Any) -> Any:
        """Gather an array as long as a bucket from the shards that the ranks own; `shard` is that of this rank.
        Collective over `comm`.

        Returns
        -------
        The array, ``(bucket,)``, on the first rank that holds the bucket; an empty array elsewhere.
        """
        group = group_of(comm, bucket.holders)
        if group is None:
            return self.memory.device.empty((0,), self.dtype)
        # Gathers run in place: each rank fills its shard of the whole array first.
        whole = self.memory.device.zeros((bucket.params.size,), self.dtype)
        whole[self.owned(bucket)] = shard
        with closing(group.reduction(whole, kind="gather", method="all_gather")) as gather:
            gather.run()
        # Every rank of the group has gathered the array; only the first one returns it.
        return whole[:0] if group.rank else whole

    def rechunk(self, scheme: Scheme) -> None:
        """Divide the same arrays into other buckets. Local, the same on all ranks.

        Only layers in `separate` can be replicated, and payload and error feedback cannot change, else ValueError is
        raised. Reducers and optimizers hold views of the buckets: make a new reducer, and call `Optimizer.bind`.
        """
        assert self.separate is not None
        others = replicated_layers(self._layers, scheme) - self.separate
        if others:
            raise ValueError(
                f"rechunk(): expected replicated layers among {sorted(self.separate)}, for which the arrays were made, "
                f"got {sorted(others)[0]!r}"
            )
        # Residuals of rounding, which only some payloads have, are allocated with the arrays.
        kinds = [f"payload {s.payload}, error_feedback {s.error_feedback}" for s in (self.scheme, scheme)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"rechunk(): expected {kinds[0]}, for which the arrays were made, got {kinds[1]}")
        self.buckets, self.scheme = self._chunked(scheme), scheme

    def clear_untrained(self) -> None:
        """Zero the gradients that the backward pass does not write."""
        for name in self.untrained:
            self.grads[name].fill(0)

    def _together(self) -> list[list[str]]:
        """Group the names of parameters by array, in the order in which backward finishes them."""
        assert self.separate is not None
        groups: dict[tuple, list[str]] = {}
        for layer in self._layers:
            for gradient in layer.gradients:
                groups.setdefault((gradient.sharing, layer.name in self.separate), []).append(gradient.name)
        return list(groups.values())

    def _allocate(self, names: list[str], specs: Mapping[str, Parameter], sums: bool) -> None:
        step = _ALIGN // self.dtype.itemsize
        slices, end = {}, 0
        for name in names:
            size = self.box(name).size
            slices[name] = slice(end, end + size)
            # Rounded up, so that the next parameter is aligned too.
            end += -(-size // step) * step
        params = self.memory.keep((end,), self.dtype, "parameter")
        grads = self.memory.keep((end,), self.dtype, "parameter gradient")
        copies = None if self.low is None else self.memory.keep((end,), self.low, "parameter")
        rounds = self.low is not None and self.rounds and any(specs[name].rounded for name in names)
        rounded = self.memory.keep((end,), self.low, "parameter gradient") if rounds and self.low is not None else None
        for name in names:
            box = self.box(name)
            self.params[name] = params[slices[name]].reshape(box.shape)
            self.grads[name] = grads[slices[name]].reshape(box.shape)
            self._flat_numbers[name] = len(self.flats)
            if copies is not None:
                self.copies[name] = copies[slices[name]].reshape(box.shape)
            if rounded is not None and specs[name].rounded:
                self.rounded[name] = rounded[slices[name]].reshape(box.shape)
            # Initial values are drawn for the whole array: not if this rank holds nothing of it.
            if box.size:
                # The block is cut from the whole initial array, so values do not depend on the strategy.
                self.memory.device.assign(self.params[name], specs[name].initial(name, self.seed)[box.slices()])
        # Each part overwrites `grads`; sums over the parts need an array of their own.
        added = self.memory.keep((end,), self.dtype, "gradient sum") if sums else None
        self.flats.append(Flat(params, grads, slices, self._errors(slices, end), copies, rounded, added))

    def _errors(self, slices: Mapping[str, slice], size: int) -> np.ndarray | None:
        if not self.scheme.keeps_errors:
            return None
        errors = np.zeros(size, self.dtype)
        self.memory.count(errors.nbytes, "gradient error")
        self.errors |= {name: errors[where].reshape(self.box(name).shape) for name, where in slices.items()}
        return errors

    def _chunked(self, scheme: Scheme) -> list[Bucket]:
        assert self.separate is not None
        chunks = chunks_of(self._layers, scheme, self.bucket_bytes, self.dtype.itemsize, self.separate)
        return [self._bucket(chunk) for chunk in chunks]

    def _bucket(self, chunk: GradientChunk) -> Bucket:
        names = [gradient.name for gradient in chunk.gradients]
        number = self._flat_numbers[names[0]]
        flat, step = self.flats[number], _ALIGN // self.dtype.itemsize
        start, last = flat.slices[names[0]].start, flat.slices[names[-1]]
        stop = start + -(-(last.stop - start) // step) * step  # with the gap, so that the next bucket is aligned too
        slices, decays = {}, []
        for name in names:
            begin, end = flat.slices[name].start - start, flat.slices[name].stop - start
            slices[name] = slice(begin, end)
            # With the gap of zeros: adjacent parameters of one kind become one range.
            decays.append((begin, begin + -(-(end - begin) // step) * step, self._decays[name]))
        return Bucket(
            names,
            flat.params[start:stop],
            flat.grads[start:stop],
            _joined(decays),
            slices,
            chunk,
            number,
            start,
            None if flat.errors is None else flat.errors[start:stop],
            None if flat.copies is None else flat.copies[start:stop],
            None if flat.sums is None else flat.sums[start:stop],
            self._widening(flat, names),
            self._copying(None if flat.copies is None else flat.copies[start:stop], flat.params[start:stop]),
        )

    def _widening(self, flat: Flat, names: list[str]) -> Callable[[], None]:
        """Return a function that converts those gradients of `names` that have 16 bits to the dtype of `grads`."""
        where = [flat.slices[name] for name in names if name in self.rounded]
        pairs = [(flat.grads[at], flat.rounded[at]) for at in where if at.stop > at.start]
        return self.memory.device.copies(pairs) if pairs else _nothing

    def rounded_ranges(self, bucket: Bucket, part: slice) -> tuple[Any, list[tuple[int, int]]]:
        """Return the array of 16-bit gradients of a part of a bucket, and its ranges that updates read; ``(None, [])``
        if updates do not read it.
        """
        array = self.flats[bucket.flat].rounded
        if array is None or not self.direct:
            return None, []
        ranges = [(at.start - part.start, at.stop - part.start) for n, at in bucket.slices.items() if n in self.rounded]
        inside = [(a, b) for a, b in ranges if 0 <= a < b <= part.stop - part.start]
        return array[bucket.start + part.start : bucket.start + part.stop], inside

    @property
    def count(self) -> int:
        """Number of parameters of the network."""
        return self.network.parameter_count

    def gather(self, comm: Communicator, arrays: Mapping[str, Any]) -> dict[str, Any] | None:
        """Gather whole arrays on rank 0 from the blocks of all ranks, by ``layer/parameter``; None elsewhere.

        Collective over `comm` where arrays are cut, else local. Arrays that are whole are not copied.
        """
        # Nothing is cut: rank 0 has all arrays, and no rank communicates.
        if self.whole and comm.rank:
            return None
        gathered = {name: self._gather(comm, name, array) for name, array in arrays.items()}
        return None if comm.rank else gathered

    def _gather(self, comm: Communicator, name: str, array: Any) -> Any:
        assert self.blocks is not None
        blocks = self.blocks[name]
        if blocks.whole:  # every rank has the whole array
            return array
        target = Layout.on_rank(self.shapes[name], 0, comm.size).boxes
        result = device_of(array).empty(target[comm.rank].shape, array.dtype)
        with closing(Exchange(comm, End(blocks.boxes, array), End(target, result), kind="gather")) as exchange:
            exchange.run()
        return result


def _joined(ranges: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Merge successive ranges of one kind, each of which begins where the one before ends, and drop empty ranges."""
    result: list[tuple[int, int, bool]] = []
    for start, stop, kind in ranges:
        if result and result[-1][2] == kind:
            result[-1] = (result[-1][0], stop, kind)
        elif stop > start:
            result.append((start, stop, kind))
    return result
