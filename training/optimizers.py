"""Optimizers: they update the parameters of a bucket in place from its summed gradients.

An optimizer has one backend kernel per bucket, on arrays that exist before the first step. Checkpoints name its state
by ``layer/parameter``, independent of the buckets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.errors import UserError

from ..device import Device, Ticket
from ..kernels import Kernel, UpdateArrays
from ..layers import Network
from .store import Bucket, ParameterStore

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["AVERAGE", "LARS", "SGD", "Adam", "AdamW", "Optimizer"]


#: Name of the state with moving averages of parameters; it is the last state.
AVERAGE = "average"


class Optimizer(ABC):
    """Base class of optimizers. Local: gradients are summed before, and all ranks make the same update of their copies.

    A step is `begin_step`, then `update` of every bucket, in any order.

    Parameters
    ----------
    store
        Store of the parameters.
    weight_decay
        Factor of the weight decay, for parameters that are subject to it.
    factors
        Factors on the learning rate, by name of a layer or pattern of names (``"encoder/*"``); if several match, the
        last one applies.
    average
        Weight of the old values in the moving averages of all parameters, in [0, 1); 0: no averages. In the first
        steps the weight is smaller, ``(1 + step) / (10 + step)``, so that initial values lose their influence.

    Attributes
    ----------
    step
        Number of updates that have begun.
    learning_rate
        Learning rate of the current step.
    gradient_scale
        Factor on all gradients of the current step (clipping).
    """

    #: Names of the state arrays.
    state_names: tuple[str, ...] = ()

    def __init__(
        self,
        store: ParameterStore,
        weight_decay: float = 0.0,
        factors: Mapping[str, float] | None = None,
        average: float = 0.0,
    ) -> None:
        self.store, self.weight_decay, self.average = store, weight_decay, average
        if not 0 <= average < 1:
            raise ValueError(f"average: expected a number in [0, 1), got {average!r}")
        if average:
            self.state_names = (*self.state_names, AVERAGE)
        #: Factors by layer, where given; and the distinct factors, with a row of scalars each.
        self._factor_of = factors_of(factors or {}, store.network)
        self._factors = np.array(sorted({1.0, *self._factor_of.values()}))
        self.step, self.learning_rate = 0, 0.0
        self.gradient_scale: Any = 1.0
        self._device: Device = store.memory.device
        # Learning rate, scale of the gradients, the two bias corrections of Adam, and the weight of averages.
        shape = len(self._factors), 5
        self._scalars = self._device.zeros(shape, np.float64)
        self._pinned = [self._device.pinned(shape, np.float64) for _ in range(2)]
        self._sent: list[Ticket | None] = [None, None]
        self._shards = self._owned_ranges()
        self._starts, sizes = self._places()
        self._arrays = [
            tuple(store.memory.keep((size,), store.dtype, "optimizer state") for _ in self.state_names)
            for size in sizes
        ]
        self._kernels: dict[int, list[Kernel]] = {}
        self.bind()
        self.begin_averages()

    def bind(self) -> None:
        """Create the kernels for the current buckets of the store; the state does not change. Local.

        Raises
        ------
        ValueError
            If the state is or would be sharded: it would have to move.
        """
        if self._owned_ranges() != self._shards:
            raise ValueError("bind(): expected the shards for which the state was created; create a new optimizer")
        self._starts, _ = self._places()
        for kernel in (kernel for kernels in self._kernels.values() for kernel in kernels):
            kernel.close()
        self._kernels = {id(bucket): list(self._kernels_of(bucket)) for bucket in self.store.buckets}

    def _kernels_of(self, bucket: Bucket) -> Iterator[Kernel]:
        """Yield kernels that update this rank's part of a bucket, one per run of parameters with the same factor."""
        own = self.store.owned(bucket)
        for run, factor in self._runs(bucket):
            part = slice(max(run.start, own.start), max(min(run.stop, own.stop), run.start, own.start))
            scalars = self._scalars[int(np.searchsorted(self._factors, factor))]
            arrays, average = self._bound(bucket, part, scalars)
            yield self.kernel(arrays)
            if average is not None:
                whole = ((0, part.stop - part.start, False),)
                given = UpdateArrays(average, arrays.p, (), scalars, whole, skip=arrays.skip)
                yield self.store.memory.kernels.average(given)

    def _runs(self, bucket: Bucket) -> list[tuple[slice, float]]:
        """Return consecutive ranges of a bucket, each of whose layers have the same factor."""
        starts: list[tuple[int, float]] = []
        for name, where in bucket.slices.items():
            factor = self._factor_of.get(name.rpartition("/")[0], 1.0)
            if not starts or starts[-1][1] != factor:
                starts.append((where.start, factor))
        stops = [start for start, _ in starts[1:]] + [bucket.params.size]
        return [(slice(start, stop), factor) for (start, factor), stop in zip(starts, stops)]

    def _bound(self, bucket: Bucket, part: slice, scalars: Any) -> tuple[UpdateArrays, Any]:
        """Return the arrays of an update of part of a bucket, and its averages, if there are any."""
        first, scaling = self._starts[id(bucket)], self.store.loss_scale
        state = [s[first + part.start : first + part.stop] for s in self._arrays[bucket.flat]]
        average = state.pop() if self.average else None
        copy = None if bucket.copies is None else bucket.copies[part]
        skip = None if scaling is None else scaling.skip
        params, grads, decays = bucket.params[part], bucket.grads[part], within(self.ranges(bucket), part)
        return UpdateArrays(params, grads, tuple(state), scalars, decays, copy, skip), average

    def begin_averages(self) -> None:
        """Set the averages to the current parameters, as in the first step. Local."""
        for bucket, own, state in self.averages():
            np.copyto(state, bucket.params[own])

    def averages(self) -> Iterator[tuple[Bucket, slice, Any]]:
        """Yield each bucket, the range of it that this rank updates, and its averages: views. Empty without averages.
        """
        for bucket in self.store.buckets if self.average else ():
            own, first = self.store.owned(bucket), self._starts[id(bucket)]
            yield bucket, own, self._arrays[bucket.flat][-1][first + own.start : first + own.stop]

    def ranges(self, bucket: Bucket) -> list[tuple[int, int, bool]]:
        """Return the ranges ``(start, stop, decayed)`` of a bucket for the kernel."""
        return bucket.decays

    def begin_step(self, learning_rate: float, gradient_scale: Any = 1.0) -> None:
        """Begin a step, after all updates of the previous one. The scale may be an array ``(1,)`` on the device."""
        if not self.step:
            self.begin_averages()  # parameters may be read from a file after construction
        self.step += 1
        self.learning_rate, self.gradient_scale = learning_rate, gradient_scale
        pinned, sent = self._pinned[self.step % 2], self._sent[self.step % 2]
        if sent is not None:
            sent.wait()  # it was enqueued two steps ago
        known = isinstance(gradient_scale, (int, float))
        pinned[:] = (0.0, gradient_scale if known else 1.0, *self.corrections(), self._weight)
        np.multiply(self._factors, learning_rate, out=pinned[:, 0])
        self._device.upload(pinned, self._scalars)
        self._sent[self.step % 2] = self._device.mark()
        scales = self._scalars[:, 1]
        if not known:
            np.copyto(scales, gradient_scale)
        if self.store.loss_scale is not None:
            np.multiply(scales, self.store.loss_scale.inverse, out=scales)

    @property
    def _weight(self) -> float:
        """Weight of the new parameters in the averages in this step."""
        return 1 - min(self.average, self.step / (9 + self.step))

    def update(self, bucket: Bucket) -> None:
        """Update the parameters of one bucket, whose gradients are summed. Allocates no memory."""
        for kernel in self._kernels[id(bucket)]:
            kernel()

    def corrections(self) -> tuple[float, float]:
        """Return the divisors of the two moments in this step (bias correction)."""
        return 1.0, 1.0

    @abstractmethod
    def kernel(self, arrays: UpdateArrays) -> Kernel:
        """Create the backend kernel that updates a bucket or a shard of it."""

    def _places(self) -> tuple[dict[int, int], list[int]]:
        """Return, per bucket, the offset of its first element in the state arrays of its flat; and their sizes.

        A rank has state only for elements that it updates: the shards of buckets are stored one after another.
        """
        if self._shards is None:
            return {id(b): b.start for b in self.store.buckets}, [f.params.size for f in self.store.flats]
        starts, sizes = {}, [0] * len(self.store.flats)
        for bucket in self.store.buckets:
            own = self.store.owned(bucket)
            starts[id(bucket)] = sizes[bucket.flat] - own.start
            sizes[bucket.flat] += own.stop - own.start
        return starts, sizes

    def _owned_ranges(self) -> list[tuple[int, int, int]] | None:
        """Return flat, start and stop of the ranges that this rank updates if buckets are sharded; else None."""
        if not self.store.scheme.kind.shards:
            return None
        owns = [(b, self.store.owned(b)) for b in self.store.buckets]
        return [(b.flat, b.start + own.start, b.start + own.stop) for b, own in owns]

    def kept_state(self) -> dict[str, dict[str, tuple[slice, Any]]]:
        """Return the elements of flat parameters for which this rank has state, and the state: views.

        Both are given by the name of the state and ``layer/parameter``.
        """
        kept: dict[str, dict[str, tuple[slice, Any]]] = {key: {} for key in self.state_names}
        for bucket in self.store.buckets:
            own, first = self.store.owned(bucket), self._starts[id(bucket)]
            for name, where in bucket.slices.items():
                start = min(max(where.start, own.start), where.stop)
                stop = max(min(where.stop, own.stop), start)
                for key, array in zip(self.state_names, self._arrays[bucket.flat]):
                    part = slice(start - where.start, stop - where.start)
                    kept[key][name] = part, array[first + start : first + stop]
        return kept

    def named_state(self, comm: Communicator | None = None) -> dict[str, dict[str, Any]]:
        """Return state arrays by name of the state and ``layer/parameter``, shaped as the parameters: views.

        Collective over `comm` if shards are updated, else local. With shards, the arrays are whole copies on the first
        rank that holds a block of the parameter, and empty on other ranks.
        """
        named: dict[str, dict[str, Any]] = {key: {} for key in self.state_names}
        for bucket in self.store.buckets:
            own, first = self.store.owned(bucket), self._starts[id(bucket)]
            for key, array in zip(self.state_names, self._arrays[bucket.flat]):
                state = array[first + own.start : first + own.stop]
                if self.store.is_sharded(bucket) and comm is not None:
                    state = self.store.gather_shards(comm, bucket, state)
                elif len(state) < bucket.params.size:
                    raise ValueError("named_state(): expected the communicator of the ranks that have the other shards")
                whole = len(state) == bucket.params.size
                for name, where in bucket.slices.items():
                    named[key][name] = state[where].reshape(self.store.params[name].shape) if whole else state[:0]
        return named

    def settings(self) -> Mapping[str, Any]:
        """Return the scalar state, for checkpoints."""
        return {"kind": type(self).__name__, "step": self.step}


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, classical or Nesterov's, as torch.optim.SGD.

    ``v = momentum * v + g; p -= learning_rate * v`` with ``g`` the gradient plus ``weight_decay * p``;
    Nesterov: ``p -= learning_rate * (g + momentum * v)``.
    """

    state_names: tuple[str, ...] = ("momentum",)

    def __init__(
        self,
        store: ParameterStore,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        factors: Mapping[str, float] | None = None,
        average: float = 0.0,
    ) -> None:
        if nesterov and not momentum:
            raise ValueError("nesterov: expected momentum > 0 with it, got 0")
        if not momentum:
            self.state_names = ()
        self.momentum, self.nesterov = momentum, nesterov
        super().__init__(store, weight_decay, factors, average)

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        return self.store.memory.kernels.sgd(arrays, self.momentum, self.nesterov, self.weight_decay)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, Algorithm 1) with L2 regularization in the gradient, as torch.optim.Adam."""

    state_names: tuple[str, ...] = ("first_moment", "second_moment")
    _decoupled = False

    def __init__(
        self,
        store: ParameterStore,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        factors: Mapping[str, float] | None = None,
        average: float = 0.0,
    ) -> None:
        self.betas, self.epsilon = betas, epsilon
        super().__init__(store, weight_decay, factors, average)

    def corrections(self) -> tuple[float, float]:
        beta1, beta2 = self.betas
        return 1 - beta1**self.step, math.sqrt(1 - beta2**self.step)

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        numbers = (self.betas, self.epsilon, self.weight_decay, self._decoupled)
        return self.store.memory.kernels.adam(arrays, *numbers)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW."""

    _decoupled = True


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, Algorithm 1), for large batches.

    Per parameter array ``r = trust * |p| / (|g| + weight_decay * |p|)``;
    ``v = momentum * v + learning_rate * r * (g + weight_decay * p); p -= v``.
    Biases and norm parameters (no weight decay) have ``r = 1``, as in all practical implementations.
    """

    state_names: tuple[str, ...] = ("momentum",)

    def __init__(
        self,
        store: ParameterStore,
        momentum: float = 0.9,
        trust: float = 1e-3,
        weight_decay: float = 0.0,
        factors: Mapping[str, float] | None = None,
        average: float = 0.0,
    ) -> None:
        if store.scheme.kind.shards:
            raise UserError(
                'optimizer.kind: expected sgd, adam or adamw with reduction.name = "sharded", got lars, which needs '
                "norms of whole gradients; choose one of these, or bucketed, two_chunks or hierarchical"
            )
        if not store.whole:
            raise UserError(
                "LARS needs the norm of whole parameters: expected a strategy that cuts no channels and uses all ranks "
                "in every layer, got one that does not; choose sgd, adam or adamw, or another strategy"
            )
        self.momentum, self.trust = momentum, trust
        super().__init__(store, weight_decay, factors, average)

    def ranges(self, bucket: Bucket) -> list[tuple[int, int, bool]]:
        """Return one range per parameter."""
        return [
            (w.start, w.stop, any(a <= w.start < b and d for a, b, d in bucket.decays)) for w in bucket.slices.values()
        ]

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        return self.store.memory.kernels.lars(arrays, self.momentum, self.trust, self.weight_decay)


def factors_of(factors: Mapping[str, float], network: Network) -> dict[str, float]:
    """Return the factors on the learning rate by layer, from factors by pattern. Local.

    Raises
    ------
    ValueError
        If a pattern matches no layer with parameters, or a factor is no finite number of at least 0.
    """
    found: dict[str, float] = {}
    for pattern, factor in factors.items():
        if not 0 <= factor < math.inf:
            raise ValueError(f"factors: expected a finite number >= 0 for {pattern!r}, got {factor!r}")
        found |= dict.fromkeys(network.matching(pattern), float(factor))
    return found


def within(ranges: Sequence[tuple[int, int, bool]], own: slice) -> list[tuple[int, int, bool]]:
    """Clip ranges to a part of the bucket, relative to the start of the part.

    >>> within([(0, 10, True), (10, 20, False)], slice(5, 15))
    [(0, 5, True), (5, 10, False)]
    """
    cut = [(max(a, own.start) - own.start, min(b, own.stop) - own.start, kind) for a, b, kind in ranges]
    return [(a, b, kind) for a, b, kind in cut if a < b]
