"""Optimizers: they update the parameters of a bucket in place from its summed gradients.

An optimizer is a class with a name and settings, which are its table of the configuration; :data:`OPTIMIZERS` has them
by name. It has kernels of the backend for each bucket, on arrays that all exist before the first step: kernels that the
backend has for it, or its rule in operations on arrays. Checkpoints name its state by ``layer/parameter``, independent
of the buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import Below1, NotNegative, Positive, Table, Text, build

from ..device import Device, Event
from ..kernels import Kernel, StepNumbers, UpdateArrays, UpdatePiece

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..layers import Network
    from .store import Bucket, ParameterStore

__all__ = [
    "AVERAGE",
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "Optimizer",
    "OptimizerSettings",
    "groups_of",
]


#: Name of the state with moving averages of parameters; it is the last state.
AVERAGE = "average"


class OptimizerSettings(Table):
    """``[optimizer]``: settings of an optimizer; base class of the settings of your own optimizers."""

    kind: Text
    """Name of the optimizer."""


class Optimizer:
    """Base class of optimizers. Local: gradients are summed already; ranks make the same updates of their copies, or
    each one those of its shard.

    A step is `begin_step`, then `update` of every bucket, in any order. A subclass of your own defines :meth:`rule` and
    its state, by `state_names` or :meth:`states`. The library cuts the state into shards if updates are sharded, stores
    it in checkpoints, and includes it in the memory and the time of a plan.

    Parameters
    ----------
    store
        Store of the parameters.
    factors
        Factors on the learning rate, by name of a layer or pattern of names (``"encoder/*"``); if several match, the
        last one applies.
    average
        Weight of the old values in the moving averages of all parameters, in [0, 1); 0: no averages. In the first steps
        (`step` = 1, 2, ...) the weight is smaller, ``step / (9 + step)``, so that initial values lose their influence.
    settings
        The keys of `Settings` by name, as in the table ``[optimizer]``.

    Attributes
    ----------
    settings
        Settings of this optimizer.
    step
        Number of updates that have begun.
    groups
        Layers, or patterns of layers, with factors; the first entry ``""`` is all other layers.
    learning_rate
        Learning rate of the current step, of layers without a factor.
    gradient_scale
        Factor on all gradients of the current step (clipping).

    Raises
    ------
    UserError
        If a setting is unknown or wrong, if the class has no rule, or if it needs whole parameters and `store` has
        shards or blocks of them.
    """

    #: Name in the configuration, for registered classes.
    name: ClassVar[str] = ""
    #: Class of the settings.
    Settings: ClassVar[type[OptimizerSettings]] = OptimizerSettings
    #: Settings with which plans count the state, where no configuration is given.
    planned: ClassVar[Mapping[str, Any]] = {}
    #: Names of the state arrays: each is as large as the parameters, and zero at the beginning.
    state_names: tuple[str, ...] = ()
    #: Number of scratch arrays that :meth:`rule` gets.
    scratch: ClassVar[int] = 2
    #: Whether :meth:`rule` needs whole parameters, one at a time: then there are no shards, and no layer is cut.
    whole_parameters: ClassVar[bool] = False

    def __init__(
        self,
        store: ParameterStore,
        *,
        factors: Mapping[str, float] | None = None,
        average: float = 0.0,
        **settings: Any,
    ) -> None:
        kind = type(self)
        self.settings: Any = build(kind.Settings, {"kind": kind.name or kind.__name__, **settings})
        if kind.rule is Optimizer.rule and kind.kernel is Optimizer.kernel:
            raise UserError(f"optimizer {kind.__name__}: expected a method rule(self, piece, numbers), got none")
        if kind.whole_parameters:
            self._refuse_cuts(store)
        self.store, self.average = store, average
        self.state_names = _checked_names(kind, kind.states(self.settings))
        if not 0 <= average < 1:
            raise ValueError(f"average: expected a number in [0, 1), got {average!r}")
        if average:
            self.state_names = (*self.state_names, AVERAGE)
        self._group_of = groups_of(factors or {}, store.network)
        #: Groups of layers with one learning rate each, and a row of scalars: first those without a factor.
        self.groups: tuple[str, ...] = ("", *dict.fromkeys(self._group_of.values()))
        self._factors = np.array([1.0, *((factors or {})[group] for group in self.groups[1:])])
        self.step, self.learning_rate = 0, 0.0
        self.gradient_scale: Any = 1.0
        self._device: Device = store.memory.device
        # Learning rate, scale of the gradients, the two bias corrections of Adam, and the weight of averages.
        shape = len(self._factors), 5
        self._scalars = self._device.zeros(shape, np.float64)
        # Two, so that the host may write one while the other is still being uploaded.
        self._pinned = [self._device.pinned(shape, np.float64) for _ in range(2)]
        self._sent: list[Event | None] = [None, None]
        self._shards = self._owned_ranges()
        self._starts, sizes = self._offsets()
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
            If the shards differ from those for which the state was created.
        """
        if self._owned_ranges() != self._shards:
            raise ValueError("bind(): expected the shards for which the state was created; create a new optimizer")
        self._starts, _ = self._offsets()
        for kernel in (kernel for kernels in self._kernels.values() for kernel in kernels):
            kernel.close()
        # By identity: `rechunk` replaces the buckets, and a dataclass of arrays has no hash.
        self._kernels = {id(bucket): list(self._kernels_of(bucket)) for bucket in self.store.buckets}

    def _kernels_of(self, bucket: Bucket) -> Iterator[Kernel]:
        """Yield kernels that update this rank's part of a bucket: one per run of parameters of one group, and one more
        for the averages of the run, if there are any.
        """
        own, scaling = self.store.owned(bucket), self.store.loss_scale
        skip = None if scaling is None else scaling.skip
        for run, group in self._runs(bucket):
            # Empty where the shard of this rank has nothing of the run: every rank makes the same number of kernels.
            part = slice(max(run.start, own.start), max(min(run.stop, own.stop), run.start, own.start))
            params, state, scalars = bucket.params[part], self._state(bucket, part), self._scalars[group]
            # `AVERAGE` is the last state, and no argument of the rule.
            average = state.pop() if self.average else None
            copy = None if bucket.copies is None else bucket.copies[part]
            decays = within(self.ranges(bucket), part)
            rounded = self.store.rounded_ranges(bucket, part)
            arrays = params, bucket.grads[part], tuple(state), scalars, decays, copy, skip, *rounded
            yield self.kernel(UpdateArrays(*arrays))
            if average is not None:
                # One range without weight decay, which the parameters contain already.
                whole = ((0, part.stop - part.start, False),)
                updates = UpdateArrays(average, params, (), scalars, whole, skip=skip)
                yield self.store.memory.kernels.average(updates)

    def _runs(self, bucket: Bucket) -> list[tuple[slice, int]]:
        """Return consecutive ranges of a bucket, each with the index, in `groups`, of the group of its layers."""
        # Names of layers may contain slashes: only the last one separates the parameter.
        names = groupby(bucket.slices, lambda name: self._group_of.get(name.rpartition("/")[0], ""))
        starts = [(bucket.slices[next(members)].start, self.groups.index(group)) for group, members in names]
        # A run ends where the next one begins, so it includes the gaps of zeros for alignment.
        stops = [start for start, _ in starts[1:]] + [bucket.params.size]
        return [(slice(start, stop), group) for (start, group), stop in zip(starts, stops)]

    def _state(self, bucket: Bucket, part: slice) -> list[Any]:
        """Return the state arrays of a part of a bucket that this rank updates: views."""
        first = self._starts[id(bucket)]
        return [array[first + part.start : first + part.stop] for array in self._arrays[bucket.flat]]

    def begin_averages(self) -> None:
        """Set the averages to the current parameters, as in the first step. Local."""
        for bucket, own, state in self.averages():
            np.copyto(state, bucket.params[own])

    def averages(self) -> Iterator[tuple[Bucket, slice, Any]]:
        """Yield each bucket, the range that this rank updates, and its averages (views); nothing without averages."""
        for bucket in self.store.buckets if self.average else ():
            own = self.store.owned(bucket)
            yield bucket, own, self._state(bucket, own)[-1]

    def begin_step(self, learning_rate: float | Sequence[float], gradient_scale: Any = 1.0) -> None:
        """Begin a step, after all updates of the previous one.

        Parameters
        ----------
        learning_rate
            Learning rate of all groups, or of each of `groups`; factors multiply it.
        gradient_scale
            Factor on the gradients; it may be an array ``(1,)`` on the device.
        """
        if not self.step:
            self.begin_averages()  # parameters may be read from a file after construction
        self.step += 1
        self.learning_rate = learning_rate if isinstance(learning_rate, (int, float)) else learning_rate[0]
        self.gradient_scale = gradient_scale
        pinned, sent = self._pinned[self.step % 2], self._sent[self.step % 2]
        if sent is not None:
            sent.wait()  # it was enqueued two steps ago
        known = isinstance(gradient_scale, (int, float))
        # Column 0 follows: the rates differ between groups.
        pinned[:] = (0.0, gradient_scale if known else 1.0, *self.corrections(), self._weight)
        np.multiply(self._factors, learning_rate, out=pinned[:, 0])
        self._device.upload(pinned, self._scalars)
        self._sent[self.step % 2] = self._device.mark()
        scales = self._scalars[:, 1]
        if not known:
            np.copyto(scales, gradient_scale)
        if self.store.loss_scale is not None:
            # The gradients are those of the scaled loss.
            np.multiply(scales, self.store.loss_scale.inverse, out=scales)

    @property
    def _weight(self) -> float:
        """Weight of the new parameters in the averages in this step."""
        return 1 - min(self.average, self.step / (9 + self.step))

    def update(self, bucket: Bucket) -> None:
        """Update the parameters of one bucket, whose gradients are summed. Allocates no memory."""
        for kernel in self._kernels[id(bucket)]:
            kernel()

    # -- what an optimizer defines ------------------------------------------------------------------

    @classmethod
    def states(cls, settings: Any) -> tuple[str, ...]:
        """Return the names of the state arrays that an optimizer with these settings has: `state_names`."""
        return cls.state_names

    def corrections(self) -> tuple[float, float]:
        """Return two scalars of step `step` (1, 2, ...) for the rule: :attr:`StepNumbers.first` and `second`."""
        return 1.0, 1.0

    def rule(self, piece: UpdatePiece, numbers: StepNumbers) -> None:
        """Update a piece of the parameters and of the state in place.

        Write it in array operations with an output, ``np.multiply(a, b, out=c)``: the arrays are on the host or on a
        device, and nothing is allocated. The rule is elementwise, or has `whole_parameters`. On a device it may be
        replayed as a graph, so values that change from step to step may come only from the state and `numbers`.
        """
        raise NotImplementedError

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        """Make the kernel that updates a bucket or its shard: by `rule`, unless the backend has a special kernel."""
        kind = type(self)
        return self.store.memory.kernels.by_rule(
            kind.__name__, arrays, self.rule, max(2, kind.scratch), kind.whole_parameters
        )

    def ranges(self, bucket: Bucket) -> list[tuple[int, int, bool]]:
        """Return the ranges ``(start, stop, decayed)`` of a bucket; with `whole_parameters`, one per parameter."""
        if not self.whole_parameters:
            return bucket.decays
        return [
            (w.start, w.stop, any(a <= w.start < b and d for a, b, d in bucket.decays)) for w in bucket.slices.values()
        ]

    def _refuse_cuts(self, store: ParameterStore) -> None:
        others = [name for name in OPTIMIZERS.names if not OPTIMIZERS[name].whole_parameters]
        known = f"{', '.join(others[:-1])} or {others[-1]}"
        if store.scheme.kind.shards:
            raise UserError(
                f'optimizer.kind: expected {known} with reduction.name = "{store.scheme.name}", got '
                f"{self.settings.kind}, which needs norms of whole gradients; choose one of these, or bucketed, "
                "two_chunks or hierarchical"
            )
        if not store.whole:
            raise UserError(
                f"{type(self).__name__} needs the norm of whole parameters: expected a strategy that cuts no channels "
                f"and no parameters with spatial extents, and uses all ranks in every layer, got one that does not; "
                f"choose {known}, or another strategy"
            )

    # -- state --------------------------------------------------------------------------------------

    def _offsets(self) -> tuple[dict[int, int], list[int]]:
        """Return, per bucket, the offset of its first element in the state arrays of its flat, and the arrays' sizes;
        the offset may be negative if that element is not in this rank's shard.

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
        """Return index of the flat, start and stop of each range that this rank updates if buckets are sharded; else
        None.
        """
        if not self.store.scheme.kind.shards:
            return None
        owns = [(b, self.store.owned(b)) for b in self.store.buckets]
        return [(b.flat, b.start + own.start, b.start + own.stop) for b, own in owns]

    def kept_state(self) -> dict[str, dict[str, tuple[slice, Any]]]:
        """Return, by name of the state and ``layer/parameter``, the range of the flattened parameter for which this
        rank has state, and the state (a view).
        """
        kept: dict[str, dict[str, tuple[slice, Any]]] = {key: {} for key in self.state_names}
        for bucket in self.store.buckets:
            own = self.store.owned(bucket)
            for name, where in bucket.slices.items():
                # If the shard has nothing of the parameter, an empty range within it.
                start = min(max(where.start, own.start), where.stop)
                stop = max(min(where.stop, own.stop), start)
                for key, state in zip(self.state_names, self._state(bucket, slice(start, stop))):
                    kept[key][name] = slice(start - where.start, stop - where.start), state
        return kept

    def named_state(self, comm: Communicator | None = None) -> dict[str, dict[str, Any]]:
        """Return state arrays by name of the state and ``layer/parameter``, shaped as the parameters: views.

        Collective over `comm` if shards are updated, else local. With shards, the arrays are whole copies on the first
        rank that holds a block of the parameter, and empty on other ranks.
        """
        named: dict[str, dict[str, Any]] = {key: {} for key in self.state_names}
        for bucket in self.store.buckets:
            for key, state in zip(self.state_names, self._state(bucket, self.store.owned(bucket))):
                if self.store.is_sharded(bucket) and comm is not None:
                    state = self.store.gather_shards(comm, bucket, state)
                elif len(state) < bucket.params.size:
                    raise ValueError("named_state(): expected the communicator of the ranks that have the other shards")
                # On all ranks but the first that holds the bucket, the gathered array is empty.
                whole = len(state) == bucket.params.size
                for name, where in bucket.slices.items():
                    named[key][name] = state[where].reshape(self.store.params[name].shape) if whole else state[:0]
        return named

    def state_dict(self) -> Mapping[str, Any]:
        """Return the scalar state, for checkpoints."""
        return {"kind": type(self).__name__, "step": self.step}


#: Optimizers by name, or by ``"FILE.py:CLASS"``.
OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", Optimizer, "optimizer.kind")


@OPTIMIZERS.register
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, classical or Nesterov's, as torch.optim.SGD.

    ``v = momentum * v + g; p -= learning_rate * v`` with ``g`` the gradient plus ``weight_decay * p``;
    Nesterov: ``p -= learning_rate * (g + momentum * v)``. Without momentum there is no state.
    """

    name = "sgd"
    planned: ClassVar[Mapping[str, Any]] = {"momentum": 0.9}
    state_names = ("momentum",)

    class Settings(OptimizerSettings):
        """``[optimizer]`` with ``kind = "sgd"``: :class:`halograd.training.SGD`."""

        momentum: Below1 = 0.0
        """Share of the last update that is added to the next one."""
        nesterov: bool = False
        """Nesterov's momentum."""
        weight_decay: NotNegative = 0.0
        """Share of a parameter that is added to its gradient; not for biases and norms."""

        @model_validator(mode="after")
        def _momentum(self) -> SGD.Settings:
            if self.nesterov and not self.momentum:
                raise ValueError("nesterov: expected momentum > 0 with it, got 0")
            return self

    @classmethod
    def states(cls, settings: Any) -> tuple[str, ...]:
        return cls.state_names if settings.momentum else ()

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        own = self.settings
        return self.store.memory.kernels.sgd(arrays, own.momentum, own.nesterov, own.weight_decay)


class _Moments(Optimizer):
    """Optimizer with decaying means of gradients and of their squares."""

    state_names = ("first_moment", "second_moment")

    class Settings(OptimizerSettings):
        """Decays of both means."""

        beta1: Below1 = 0.9
        """Decay of the mean of gradients."""
        beta2: Below1 = 0.999
        """Decay of the mean of squared gradients."""

    def corrections(self) -> tuple[float, float]:
        # Algorithm 1 of Adam; the second one divides sqrt(v), not v.
        return 1 - self.settings.beta1**self.step, math.sqrt(1 - self.settings.beta2**self.step)


@OPTIMIZERS.register
class Adam(_Moments):
    """Adam (Kingma and Ba 2015, Algorithm 1) with L2 regularization in the gradient, as torch.optim.Adam."""

    name = "adam"
    _decoupled = False

    class Settings(_Moments.Settings):
        """``[optimizer]`` with ``kind = "adam"``, :class:`halograd.training.Adam`, or ``"adamw"``."""

        epsilon: Annotated[Positive, Field(le=1)] = 1e-8
        """Number that is added to the root of the mean of squares."""
        weight_decay: NotNegative = 0.0
        """Share of a parameter that adam adds to its gradient; adamw subtracts it from the parameter, times the
        learning rate. Biases and norms do not decay."""

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        own = self.settings
        numbers = ((own.beta1, own.beta2), own.epsilon, own.weight_decay, self._decoupled)
        return self.store.memory.kernels.adam(arrays, *numbers)


@OPTIMIZERS.register
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW."""

    name = "adamw"
    _decoupled = True


@OPTIMIZERS.register
class Lion(Optimizer):
    """Sign of an interpolation of momentum and gradient (Chen et al. 2023, Algorithm 2), with decoupled weight decay.

    ``p -= learning_rate * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``, then
    ``m = beta2 * m + (1 - beta2) * g``. The state is half of Adam's. Usual rates are 3 to 10 times smaller than those
    of AdamW, and the decay is larger by the same factor.
    """

    name = "lion"
    state_names = ("momentum",)

    class Settings(OptimizerSettings):
        """``[optimizer]`` with ``kind = "lion"``: :class:`halograd.training.Lion`."""

        beta1: Below1 = 0.9
        """Share of the momentum in an update."""
        beta2: Below1 = 0.99
        """Decay of the mean of gradients."""
        weight_decay: NotNegative = 0.0
        """Share of a parameter, times the learning rate, that is subtracted from it; not for biases and norms."""

    def rule(self, piece: UpdatePiece, numbers: StepNumbers) -> None:
        own, (m,), (_, b) = self.settings, piece.state, piece.scratch
        g = piece.gradient(numbers.scale)
        # beta1 * m + (1 - beta1) * g, as g + beta1 * (m - g).
        np.subtract(m, g, out=b)
        np.multiply(b, own.beta1, out=b)
        np.add(b, g, out=b)
        np.sign(b, out=b)
        if own.weight_decay and piece.decayed:
            # Decoupled: p -= rate * decay * p, not through the momentum.
            np.multiply(piece.p, 1 - numbers.rate * own.weight_decay, out=piece.p)
        np.multiply(b, numbers.rate, out=b)
        np.subtract(piece.p, b, out=piece.p)
        # beta2 * m + (1 - beta2) * g, as g + beta2 * (m - g).
        np.subtract(m, g, out=m)
        np.multiply(m, own.beta2, out=m)
        np.add(m, g, out=m)


@OPTIMIZERS.register
class LAMB(_Moments):
    """Adam with updates scaled to the norms of their parameters, for large batches (You et al. 2020, Algorithm 2).

    Per parameter array ``u = m / (1 - beta1^k) / (sqrt(v / (1 - beta2^k)) + epsilon) + weight_decay * p`` in step `k`,
    with Adam's moments `m` and `v`; ``p -= learning_rate * |p| / |u| * u``. Biases and norm parameters (no weight
    decay) have the factor 1 in place of ``|p| / |u|``, as with :class:`LARS`; so have arrays where a norm is 0.
    """

    name = "lamb"
    whole_parameters = True

    class Settings(_Moments.Settings):
        """``[optimizer]`` with ``kind = "lamb"``: :class:`halograd.training.LAMB`."""

        epsilon: Annotated[Positive, Field(le=1)] = 1e-6
        """Number that is added to the root of the mean of squares."""
        weight_decay: NotNegative = 0.0
        """Share of a parameter that is added to its update; not for biases and norms."""

    def rule(self, piece: UpdatePiece, numbers: StepNumbers) -> None:
        own, p, (m, v), (a, b) = self.settings, piece.p, piece.state, piece.scratch
        g = piece.gradient(numbers.scale)
        # m += (1 - beta1) * (g - m), then the same for v and g^2.
        np.subtract(g, m, out=b)
        np.multiply(b, 1 - own.beta1, out=b)
        np.add(m, b, out=m)
        np.multiply(g, g, out=b)
        np.subtract(b, v, out=b)
        np.multiply(b, 1 - own.beta2, out=b)
        np.add(v, b, out=v)
        np.sqrt(v, out=b)
        np.divide(b, numbers.second, out=b)
        np.add(b, own.epsilon, out=b)
        np.divide(m, b, out=a)
        np.divide(a, numbers.first, out=a)
        rate = numbers.rate
        # Otherwise `|p| / |u|` counts as 1.
        if piece.decayed:
            if own.weight_decay:
                np.multiply(p, own.weight_decay, out=b)
                np.add(a, b, out=a)
            squares = [np.sum(np.multiply(array, array, out=b)) for array in (p, a)]
            # Without a branch, for which the host would wait for a device.
            defined = np.multiply(squares[0] > 0, squares[1] > 0)
            # Where the ratio is undefined it is not used, but must not divide by 0.
            ratio = np.sqrt(squares[0] / np.maximum(squares[1], np.finfo(p.dtype).tiny))
            rate = (rate * np.where(defined, ratio, 1.0)).astype(p.dtype)
        np.multiply(a, rate, out=a)
        np.subtract(p, a, out=p)


@OPTIMIZERS.register
class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, Algorithm 1), for large batches.

    Per parameter array ``r = trust * |p| / (|g| + weight_decay * |p|)``;
    ``v = momentum * v + learning_rate * r * (g + weight_decay * p); p -= v``.
    Biases and norm parameters (no weight decay) have ``r = 1``, as in all practical implementations, and so have
    parameters of zeros.
    """

    name = "lars"
    state_names = ("momentum",)
    whole_parameters = True

    class Settings(OptimizerSettings):
        """``[optimizer]`` with ``kind = "lars"``: :class:`halograd.training.LARS`."""

        momentum: Below1 = 0.9
        """Share of the last update that is added to the next one."""
        trust: Positive = 1e-3
        """Length of an update relative to that of the parameter, at a learning rate of 1."""
        weight_decay: NotNegative = 0.0
        """Share of a parameter that is added to its gradient; not for biases and norms."""

    def kernel(self, arrays: UpdateArrays) -> Kernel:
        own = self.settings
        return self.store.memory.kernels.lars(arrays, own.momentum, own.trust, own.weight_decay)


def _checked_names(kind: type[Optimizer], names: Any) -> tuple[str, ...]:
    """Return the names of state arrays, which checkpoints use. Raises UserError unless they are distinct words."""
    fit = isinstance(names, tuple) and all(isinstance(name, str) and name.isidentifier() for name in names)
    if not fit or len({AVERAGE, *names}) != len(names) + 1:
        raise UserError(
            f'optimizer {kind.__name__}: state_names: expected a tuple of different words other than "{AVERAGE}", got '
            f"{names!r}"
        )
    return names


def groups_of(factors: Mapping[str, float], network: Network) -> dict[str, str]:
    """Return the last matching pattern of each layer, from factors by pattern. Local.

    Raises
    ------
    ValueError
        If a pattern matches no layer with parameters, or a factor is not a finite number of at least 0.
    """
    groups: dict[str, str] = {}
    for pattern, factor in factors.items():
        if not 0 <= factor < math.inf:
            raise ValueError(f"factors: expected a finite number >= 0 for {pattern!r}, got {factor!r}")
        groups |= dict.fromkeys(network.matching(pattern), pattern)
    return groups


def within(ranges: Sequence[tuple[int, int, bool]], own: slice) -> list[tuple[int, int, bool]]:
    """Clip ranges to the part `own` of a bucket, relative to the start of the part.

    >>> within([(0, 10, True), (10, 20, False)], slice(5, 15))
    [(0, 5, True), (5, 10, False)]
    """
    cut = [(max(a, own.start) - own.start, min(b, own.stop) - own.start, kind) for a, b, kind in ranges]
    return [(a, b, kind) for a, b, kind in cut if a < b]
