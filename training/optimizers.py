"""Optimizers: one update of a bucket's parameters from its summed gradients, in place.

An optimizer has one kernel of the backend per bucket, on arrays that all exist before the first step. Its state is seen
by checkpoints under ``layer/parameter``, whatever the buckets are.
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


#: Name of the state that holds moving averages of parameters; the last one.
AVERAGE = "average"


class Optimizer(ABC):
    """Base of the optimizers. Local: gradients come summed, every rank updates its own copy alike.

    One step is `begin_step`, then `update` of every bucket, in any order.

    Parameters
    ----------
    store
        Whose parameters.
    weight_decay
        Of the parameters that are subject to it.
    factors
        Factors on the learning rate, by name of a layer or pattern of names (``"encoder/*"``); where several fit, the
        last one counts.
    average
        Of the moving averages of all parameters, the weight that the old ones keep in an update, in [0, 1); 0: there
        are none. In the first steps it is less, ``(1 + step) / (10 + step)``, so that they forget how they began.

    Attributes
    ----------
    step
        Updates begun so far.
    learning_rate
        Of the current step.
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
        #: By layer, of those that have one; and the different ones, which have a row of numbers each.
        self._factor_of = factors_of(factors or {}, store.network)
        self._factors = np.array(sorted({1.0, *self._factor_of.values()}))
        self.step, self.learning_rate = 0, 0.0
        self.gradient_scale: Any = 1.0
        self._device: Device = store.memory.device
        # Learning rate, scale of the gradients, the two corrections of Adam, and the weight of averages.
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
        """Make the views for the buckets that the store has now; the state stays as it is. Local.

        Raises
        ------
        ValueError
            If the state is in shards, or would be: it would have to move.
        """
        if self._owned_ranges() != self._shards:
            raise ValueError("bind(): expected the shards for which the state was made; make a new optimizer")
        self._starts, _ = self._places()
        for kernel in (kernel for kernels in self._kernels.values() for kernel in kernels):
            kernel.close()
        self._kernels = {id(bucket): list(self._kernels_of(bucket)) for bucket in self.store.buckets}

    def _kernels_of(self, bucket: Bucket) -> Iterator[Kernel]:
        """The kernels that update what this rank owns of a bucket, one per run of parameters of one factor."""
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
        """Ranges of a bucket, one behind the other, of parameters whose layers have one factor."""
        starts: list[tuple[int, float]] = []
        for name, where in bucket.slices.items():
            factor = self._factor_of.get(name.rpartition("/")[0], 1.0)
            if not starts or starts[-1][1] != factor:
                starts.append((where.start, factor))
        stops = [start for start, _ in starts[1:]] + [bucket.params.size]
        return [(slice(start, stop), factor) for (start, factor), stop in zip(starts, stops)]

    def _bound(self, bucket: Bucket, part: slice, scalars: Any) -> tuple[UpdateArrays, Any]:
        """What is updated of a part of a bucket; and its averages, if there are any."""
        first, scaling = self._starts[id(bucket)], self.store.loss_scale
        state = [s[first + part.start : first + part.stop] for s in self._arrays[bucket.flat]]
        average = state.pop() if self.average else None
        copy = None if bucket.copies is None else bucket.copies[part]
        skip = None if scaling is None else scaling.skip
        params, grads, decays = bucket.params[part], bucket.grads[part], within(self.ranges(bucket), part)
        return UpdateArrays(params, grads, tuple(state), scalars, decays, copy, skip), average

    def begin_averages(self) -> None:
        """Averages are the parameters of now, as in the first step. Local."""
        for bucket, own, state in self.averages():
            np.copyto(state, bucket.params[own])

    def averages(self) -> Iterator[tuple[Bucket, slice, Any]]:
        """Per bucket, what this rank updates of it, and the averages of that: views. Nothing without averages."""
        for bucket in self.store.buckets if self.average else ():
            own, first = self.store.owned(bucket), self._starts[id(bucket)]
            yield bucket, own, self._arrays[bucket.flat][-1][first + own.start : first + own.stop]

    def ranges(self, bucket: Bucket) -> list[tuple[int, int, bool]]:
        """``(start, stop, decayed)`` of a bucket, for the kernel."""
        return bucket.decays

    def begin_step(self, learning_rate: float, gradient_scale: Any = 1.0) -> None:
        """A step begins: all updates of the last one are done. The scale may be an array ``(1,)`` on the device."""
        if not self.step:
            self.begin_averages()  # parameters may have been read from a file
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
        """Share of the new parameters in their averages, in this step."""
        return 1 - min(self.average, self.step / (9 + self.step))

    def update(self, bucket: Bucket) -> None:
        """Update the parameters of one bucket, whose gradients are summed. Nothing is allocated."""
        for kernel in self._kernels[id(bucket)]:
            kernel()

    def corrections(self) -> tuple[float, float]:
        """What the update divides the two moments by in this step."""
        return 1.0, 1.0

    @abstractmethod
    def kernel(self, arrays: UpdateArrays) -> Kernel:
        """The backend's kernel that updates (a shard of) a bucket."""

    def _places(self) -> tuple[dict[int, int], list[int]]:
        """Per bucket where its first element would lie in the state arrays of its flat; and their sizes.

        A rank has state for what it updates only: where buckets are sharded, one shard lies behind the other.
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
        """Flat, start and stop of what this rank updates where buckets are sharded; None where they are not."""
        if not self.store.scheme.kind.shards:
            return None
        owns = [(b, self.store.owned(b)) for b in self.store.buckets]
        return [(b.flat, b.start + own.start, b.start + own.stop) for b, own in owns]

    def kept_state(self) -> dict[str, dict[str, tuple[slice, Any]]]:
        """By name of the state and ``layer/parameter`` the elements of the flat parameter that this rank has state for,
        and the state: views."""
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
        """State arrays by name of the state and ``layer/parameter``, shaped as the parameters: views.

        Collective over `comm` where shards are updated, else local: then the arrays are whole copies, on the first rank
        that holds a block of the parameter; others have nothing.
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
        """Scalars of the state, for checkpoints."""
        return {"kind": type(self).__name__, "step": self.step}


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, plain or Nesterov's, as torch.optim.SGD.

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
    """Adam (Kingma and Ba 2015, Algorithm 1) with L2 regularisation in the gradient, as torch.optim.Adam."""

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
        """Those of the parameters."""
        return [
            (w.start, w.stop, any(a <= w.start < b and d for a, b, d in bucket.decays)) for w in bucket.slices.values()
        ]

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        return self.store.memory.kernels.lars(arrays, self.momentum, self.trust, self.weight_decay)


def factors_of(factors: Mapping[str, float], network: Network) -> dict[str, float]:
    """Factors on the learning rate by layer, of those by pattern. Local.

    Raises
    ------
    ValueError
        A pattern that fits no layer with parameters, or a factor that is no finite number of at least 0.
    """
    found: dict[str, float] = {}
    for pattern, factor in factors.items():
        if not 0 <= factor < math.inf:
            raise ValueError(f"factors: expected a finite number >= 0 for {pattern!r}, got {factor!r}")
        found |= dict.fromkeys(network.matching(pattern), float(factor))
    return found


def within(ranges: Sequence[tuple[int, int, bool]], own: slice) -> list[tuple[int, int, bool]]:
    """The ranges within a part of the bucket, counted from its beginning.

    >>> within([(0, 10, True), (10, 20, False)], slice(5, 15))
    [(0, 5, True), (5, 10, False)]
    """
    cut = [(max(a, own.start) - own.start, min(b, own.stop) - own.start, kind) for a, b, kind in ranges]
    return [(a, b, kind) for a, b, kind in cut if a < b]
