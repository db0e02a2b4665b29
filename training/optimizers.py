"""Optimizers: one update of a bucket's parameters from its summed gradients, in place.

An optimizer works on the flat arrays of the buckets, in pieces that stay in the cache, with arrays and
views that all exist before the first step. Its state is seen by checkpoints under ``layer/parameter``,
whatever the buckets are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.errors import UserError
from halograd.training.fused_updates import FusedUpdates
from halograd.training.shards import gather_shards, is_sharded, owned
from halograd.training.store import Bucket, ParameterStore

if TYPE_CHECKING:
    from halograd.comm import Communicator

__all__ = ["LARS", "SGD", "Adam", "AdamW", "Optimizer"]

# Elements per piece: parameter, gradient, two states and two scratch arrays of it fit a 1 MiB cache.
PIECE = 1 << 15
# On a device each piece costs some launches; this bounds the scratch arrays.
DEVICE_PIECE = 1 << 22


@dataclass
class Piece:
    """A range of a bucket that is updated in one go: views made once.

    Attributes
    ----------
    p, g
        Parameters (modified) and summed gradients (read).
    state
        The optimizer's arrays, by their place in `state_names` (modified).
    a, b
        Scratch.
    decayed
        Whether weight decay applies.
    name
        The parameter, where pieces do not mix parameters.
    """

    p: Any
    g: Any
    state: tuple[Any, ...]
    a: Any
    b: Any
    decayed: bool
    name: str = ""


class Optimizer(ABC):
    """Base of the optimizers. Local: gradients come summed, every rank updates its own copy alike.

    One step is `begin_step`, then `update` of every bucket, in any order.

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

    def __init__(self, store: ParameterStore, weight_decay: float = 0.0) -> None:
        self.store, self.weight_decay = store, weight_decay
        self.step, self.learning_rate = 0, 0.0
        self.gradient_scale: Any = 1.0
        self._scaled = False
        self._piece_size = PIECE if store.memory.device.is_host else DEVICE_PIECE
        self._shards = self._owned_ranges()
        self._starts, sizes = self._places()
        self._arrays = [
            tuple(store.memory.keep((size,), store.dtype, "optimizer state") for _ in self.state_names)
            for size in sizes
        ]
        longest = max((p.params.size for p in store.flats), default=0)
        size = PIECE if store.memory.device.is_host else min(DEVICE_PIECE, longest)
        if store.memory.cuda is not None:
            size = 0  # fused updates need none
        self._scratch = [store.memory.keep((size,), store.dtype, "optimizer scratch") for _ in range(2)]
        self._fused: FusedUpdates | None = None
        self.bind()

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
        if self.store.memory.cuda is not None:
            if self._fused is not None:
                self._fused.close()
            self._fused = FusedUpdates(self.store, self._state_of, self.fused)
            return
        self._pieces = {id(b): [self._piece(b, *r) for r in self._ranges(b)] for b in self.store.buckets}

    def _ranges(self, bucket: Bucket) -> list[tuple[int, int, bool, str]]:
        """``(start, stop, decayed, name)`` of the pieces; none holds both decayed and undecayed parameters."""
        own = owned(self.store, bucket)
        ranges = [(max(start, own.start), min(stop, own.stop), decayed) for start, stop, decayed in bucket.decays]
        size = self._piece_size
        return [
            (i, min(i + size, stop), decayed, "") for start, stop, decayed in ranges for i in range(start, stop, size)
        ]

    def _piece(self, bucket: Bucket, start: int, stop: int, decayed: bool, name: str) -> Piece:
        first = self._starts[id(bucket)]
        views = tuple(s[first + start : first + stop] for s in self._arrays[bucket.flat])
        a, b = (s[: stop - start] for s in self._scratch)
        return Piece(bucket.params[start:stop], bucket.grads[start:stop], views, a, b, decayed, name)

    def begin_step(self, learning_rate: float, gradient_scale: Any = 1.0) -> None:
        """A step begins: all updates of the last one are done. The scale may be an array ``(1,)`` on the device."""
        self.step += 1
        self.learning_rate, self.gradient_scale = learning_rate, gradient_scale
        known = isinstance(gradient_scale, (int, float))
        self._scaled = not known or gradient_scale != 1.0
        if self._fused is not None:
            self._fused.begin(self.step, (learning_rate, *self.corrections()), gradient_scale)
        elif not known:
            self.gradient_scale = gradient_scale.astype(self.store.dtype)

    def update(self, bucket: Bucket) -> None:
        """Update the parameters of one bucket, whose gradients are summed. Nothing is allocated."""
        if self._fused is not None:
            self._fused.update(bucket)
            return
        self._update(bucket)
        bucket.refresh()

    def _update(self, bucket: Bucket) -> None:
        """The same in pieces, without copies in 16 bits."""
        for piece in self._pieces[id(bucket)]:
            self._apply(piece)

    def _beside(self, bucket: Bucket) -> dict[str, Any]:
        """What a fused update writes and reads beside parameters, gradients and state."""
        scaling, own = self.store.loss_scale, owned(self.store, bucket)
        copy = None if bucket.copies is None else bucket.copies[own]
        return {"copy": copy, "skip": None if scaling is None else scaling.skip}

    def _state_of(self, bucket: Bucket) -> tuple[Any, ...]:
        """The state arrays of what this rank updates of a bucket."""
        own, first = owned(self.store, bucket), self._starts[id(bucket)]
        return tuple(s[first + own.start : first + own.stop] for s in self._arrays[bucket.flat])

    def corrections(self) -> tuple[float, float]:
        """What the update divides the two moments by in this step."""
        return 1.0, 1.0

    @abstractmethod
    def fused(
        self, p: Any, g: Any, state: tuple[Any, ...], scalars: Any, decays: list[tuple[int, int, bool]], bucket: Bucket
    ) -> Any:
        """The backend's kernel that updates (a shard of) a bucket; `scalars` are those of :class:`FusedUpdates`."""

    @abstractmethod
    def _apply(self, piece: Piece) -> None:
        """Update one piece."""

    def _gradient(self, piece: Piece, weight_decay: float) -> Any:
        """``gradient_scale * g + weight_decay * p``, in `piece.a` where it differs from `g`."""
        g = piece.g
        if self._scaled:
            g = np.multiply(piece.g, self.gradient_scale, out=piece.a)
        if weight_decay and piece.decayed:
            np.multiply(piece.p, weight_decay, out=piece.b)
            g = np.add(g, piece.b, out=piece.a)
        return g

    def _places(self) -> tuple[dict[int, int], list[int]]:
        """Per bucket where its first element would lie in the state arrays of its flat; and their sizes.

        A rank has state for what it updates only: where buckets are sharded, one shard lies behind the other.
        """
        if self._shards is None:
            return {id(b): b.start for b in self.store.buckets}, [f.params.size for f in self.store.flats]
        starts, sizes = {}, [0] * len(self.store.flats)
        for bucket in self.store.buckets:
            own = owned(self.store, bucket)
            starts[id(bucket)] = sizes[bucket.flat] - own.start
            sizes[bucket.flat] += own.stop - own.start
        return starts, sizes

    def _owned_ranges(self) -> list[tuple[int, int, int]] | None:
        """Flat, start and stop of what this rank updates where buckets are sharded; None where they are not."""
        if not self.store.scheme.kind.shards:
            return None
        owns = [(b, owned(self.store, b)) for b in self.store.buckets]
        return [(b.flat, b.start + own.start, b.start + own.stop) for b, own in owns]

    def kept_state(self) -> dict[str, dict[str, tuple[slice, Any]]]:
        """By name of the state and ``layer/parameter`` the elements of the flat parameter that this rank has state for,
        and the state: views."""
        kept: dict[str, dict[str, tuple[slice, Any]]] = {key: {} for key in self.state_names}
        for bucket in self.store.buckets:
            own, first = owned(self.store, bucket), self._starts[id(bucket)]
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
            own, first = owned(self.store, bucket), self._starts[id(bucket)]
            for key, array in zip(self.state_names, self._arrays[bucket.flat]):
                state = array[first + own.start : first + own.stop]
                if is_sharded(self.store, bucket) and comm is not None:
                    state = gather_shards(comm, self.store, bucket, state)
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
        self, store: ParameterStore, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
    ) -> None:
        if nesterov and not momentum:
            raise ValueError("nesterov: expected momentum > 0 with it, got 0")
        if not momentum:
            self.state_names = ()
        self.momentum, self.nesterov = momentum, nesterov
        super().__init__(store, weight_decay)

    def fused(
        self, p: Any, g: Any, state: tuple[Any, ...], scalars: Any, decays: list[tuple[int, int, bool]], bucket: Bucket
    ) -> Any:
        v = state[0] if state else None
        cuda = self.store.memory.cuda
        numbers = (self.momentum, self.nesterov, self.weight_decay, decays)
        return cuda.sgd(p, g, v, scalars, *numbers, **self._beside(bucket))

    def _apply(self, piece: Piece) -> None:
        step = self._gradient(piece, self.weight_decay)
        if self.momentum:
            (v,) = piece.state
            np.multiply(v, self.momentum, out=v)
            np.add(v, step, out=v)
            if self.nesterov:
                np.multiply(v, self.momentum, out=piece.b)
                step = np.add(step, piece.b, out=piece.a)
            else:
                step = v
        np.multiply(step, self.learning_rate, out=piece.b)
        np.subtract(piece.p, piece.b, out=piece.p)


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
    ) -> None:
        self.betas, self.epsilon = betas, epsilon
        super().__init__(store, weight_decay)

    def corrections(self) -> tuple[float, float]:
        beta1, beta2 = self.betas
        return 1 - beta1**self.step, math.sqrt(1 - beta2**self.step)

    def fused(
        self, p: Any, g: Any, state: tuple[Any, ...], scalars: Any, decays: list[tuple[int, int, bool]], bucket: Bucket
    ) -> Any:
        numbers = (self.betas, self.epsilon, self.weight_decay, decays, self._decoupled)
        return self.store.memory.cuda.adam(p, g, *state, scalars, *numbers, **self._beside(bucket))

    def _apply(self, piece: Piece) -> None:
        m, v = piece.state
        a, b = piece.a, piece.b
        beta1, beta2 = self.betas
        g = self._gradient(piece, 0.0 if self._decoupled else self.weight_decay)
        np.subtract(g, m, out=b)
        np.multiply(b, 1 - beta1, out=b)
        np.add(m, b, out=m)
        np.multiply(g, g, out=b)
        np.multiply(b, 1 - beta2, out=b)
        np.multiply(v, beta2, out=v)
        np.add(v, b, out=v)
        if self._decoupled and piece.decayed and self.weight_decay:
            np.multiply(piece.p, 1 - self.learning_rate * self.weight_decay, out=piece.p)
        np.sqrt(v, out=b)
        np.divide(b, math.sqrt(1 - beta2**self.step), out=b)
        np.add(b, self.epsilon, out=b)
        np.divide(m, b, out=a)
        np.multiply(a, self.learning_rate / (1 - beta1**self.step), out=a)
        np.subtract(piece.p, a, out=piece.p)


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
        self, store: ParameterStore, momentum: float = 0.9, trust: float = 1e-3, weight_decay: float = 0.0
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
        super().__init__(store, weight_decay)

    def _ranges(self, bucket: Bucket) -> list[tuple[int, int, bool, str]]:
        size = self._piece_size
        return [
            (i, min(i + size, where.stop), any(a <= where.start < b and d for a, b, d in bucket.decays), name)
            for name, where in bucket.slices.items()
            for i in range(where.start, where.stop, size)
        ]

    def fused(
        self, p: Any, g: Any, state: tuple[Any, ...], scalars: Any, decays: list[tuple[int, int, bool]], bucket: Bucket
    ) -> Any:
        kinds = [(w.start, w.stop, any(a <= w.start < b and d for a, b, d in decays)) for w in bucket.slices.values()]
        numbers = (self.momentum, self.trust, self.weight_decay)
        return self.store.memory.cuda.lars(p, g, state[0], scalars, kinds, *numbers, **self._beside(bucket))

    def _update(self, bucket: Bucket) -> None:
        """Update one bucket: the norms of each parameter first, then its pieces."""
        pieces = self._pieces[id(bucket)]
        rate: Any = 1.0
        current = ""
        for piece in pieces:
            if piece.name != current:
                current = piece.name
                rate = self._rate(current, bucket) if piece.decayed else 1.0
            self._rate_now = self.learning_rate * rate
            self._apply(piece)

    def _rate(self, name: str, bucket: Bucket) -> Any:
        where = bucket.slices[name]
        if not self.store.memory.device.is_host:
            return self._rate_on_device(bucket.params[where], bucket.grads[where])
        p = math.sqrt(float(np.dot(bucket.params[where], bucket.params[where])))
        g = math.sqrt(float(np.dot(bucket.grads[where], bucket.grads[where]))) * self.gradient_scale
        below = g + self.weight_decay * p
        return self.trust * p / below if p > 0 and below > 0 else 1.0

    def _rate_on_device(self, params: Any, grads: Any) -> Any:
        """The same as an array of no axes there: the host does not look."""
        p, g = (np.sqrt(np.dot(a, a).astype(np.float64)) for a in (params, grads))
        below = g * self.gradient_scale + self.weight_decay * p
        rate = np.where((p > 0) & (below > 0), self.trust * p / np.maximum(below, 1e-300), 1.0)
        return rate.astype(params.dtype)

    def _apply(self, piece: Piece) -> None:
        (v,) = piece.state
        g = self._gradient(piece, self.weight_decay)
        np.multiply(v, self.momentum, out=v)
        np.multiply(g, self._rate_now, out=piece.b)
        np.add(v, piece.b, out=v)
        np.subtract(piece.p, v, out=piece.p)
