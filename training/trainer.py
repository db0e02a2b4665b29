"""The training step: forward, backward, and updates that are delayed until they are needed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from halograd.errors import UserError

from ..comm.errors import is_shared, mark_agreed
from ..layers.reduction_scheme import Scheme
from .auto_reduction import AutoReduction, Tuning
from .clipping import Clip
from .executor import Executor
from .gradient_scaling import GradientCheck, OverflowCheck
from .optimizers import Optimizer
from .pass_loss import PendingLoss, mean_of
from .reduction import Reducer
from .schedules import Schedule
from .store import Bucket

__all__ = ["Diverged", "Trainer"]


class Diverged(UserError):
    """Error: a loss, gradient, parameter or running statistic is no longer finite. Raised on all ranks."""


class Trainer:
    """Training of the network of an executor, one batch at a time. Collective over the executor's communicator.

    ::

        trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Cosine(0.1, steps=1000))
        for every batch: fill executor.input("x").array, ...; loss = trainer.step()
        trainer.synchronize()

    For a batch in parts (`Executor.parts`), call :meth:`add` for every part except the last, and :meth:`step` for the
    last. If a loss is divided by its weights (`Executor.counted`), first call :meth:`Executor.count` for every part.

    The gradients of a bucket are summed during the rest of backward, and its parameters are updated before their first
    layer in the next forward pass. Read parameters only after :meth:`synchronize`.

    Parameters
    ----------
    executor
        Executor with ``trainable=True``; its inputs hold the batch when `step` is called.
    optimizer
        Optimizer of the executor's store.
    schedule
        Learning rate of update number 0, 1, ...
    clip_norm
        Global norm to which gradients are scaled down; if set, all sums complete before any update.
    ranked, tuning
        With the scheme ``"auto"``: schemes to try first, and settings of the search (:class:`AutoReduction`).

    Attributes
    ----------
    gradient_norm
        Global norm before clipping in the last step; None without `clip_norm`.
    loss_scale
        With float16, the last factor on the gradient of the loss that is known without waiting; else None.
    ahead
        Number of steps by which the schedule is ahead of the updates: after a run was resumed with another batch, or
        began with the state of another run.
    auto
        Search for a scheme of gradient reduction during the first steps; None if the executor's scheme is fixed.
    """

    def __init__(
        self,
        executor: Executor,
        optimizer: Optimizer,
        schedule: Schedule,
        clip_norm: float | None = None,
        ranked: Sequence[Scheme] = (),
        tuning: Tuning | None = None,
    ) -> None:
        if executor.reducer is None:
            raise ValueError("executor: expected one with trainable=True, got trainable=False")
        self.executor, self.optimizer, self.schedule = executor, optimizer, schedule
        self.clip_norm = clip_norm
        self.ahead = 0
        self.gradient_norm: float | PendingLoss | None = None
        self._last: PendingLoss | None = None
        self._parts = list[float | PendingLoss]()  # losses of the parts of this batch so far
        self._seconds = 0.0  # time of these parts [s]
        self._clip: Clip | None = None
        self._scaling = executor.store.loss_scale
        self.auto: AutoReduction | None = None
        with executor.comm.agreement():
            self._bind(ranked, tuning)

    def _bind(self, ranked: Sequence[Scheme], tuning: Tuning | None) -> None:
        """Create the objects that steps need. Collective."""
        executor = self.executor
        self._reducer.finish()  # an earlier trainer may have an update to make, by its own optimizer
        checks: dict[str, GradientCheck] = {}
        if self._scaling is not None:
            store = executor.store
            shared = store.whole and not store.scheme.kind.shards  # if so, all ranks have the same sums
            grads, comm = [flat.grads for flat in store.flats], None if shared else executor.comm
            checks["loss scale"] = OverflowCheck(self._scaling, grads, store.memory, comm)
        if self.clip_norm is not None:
            self._clip = checks["norm"] = Clip(executor.store, executor.comm, self.clip_norm)
        executor.check_gradients(checks)
        store, alone = executor.store, executor.comm.size == 1 and executor.parts == 1
        # An update reads gradients in 16 bits directly only if no sum, check or residual needs them in `grads`.
        reads = executor.kernels.reads_rounded and not checks and not store.scheme.keeps_errors
        # An earlier trainer of this executor may have chosen otherwise: then its gradients in `grads` are old values.
        before, store.direct = store.direct, bool(store.rounded) and alone and reads
        if before or store.direct:
            self.optimizer.bind()
        self._reducer.update = self._update
        if executor.strategy.reduction.kind.searches:
            self.auto = AutoReduction(executor, self.reduce_by, ranked, tuning)

    def reduce_by(self, scheme: Scheme) -> None:
        """Sum gradients by another scheme from the next step on. Call it between steps. Collective.

        Raises
        ------
        ValueError
            If the change is to or from ``"sharded"``, whose optimizer has state only for its shards, or to more
            replicated layers than the executor was built for.
        """
        now = self.executor.store.scheme
        if scheme != now and (scheme.kind.shards or now.kind.shards):
            raise ValueError(
                f"reduce_by(): expected {now.name!r} to stay, because its optimizer has other state, got {scheme}"
            )
        self.executor.reduce_by(scheme)
        # Its kernels have views of the old buckets.
        self.optimizer.bind()
        if self._clip is not None:
            self._clip.bind()

    @property
    def _reducer(self) -> Reducer:
        assert self.executor.reducer is not None
        return self.executor.reducer

    def _update(self, bucket: Bucket) -> None:
        for call in self.executor.spans.timed("update", "update", [partial(self.optimizer.update, bucket)]):
            call()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step, without the factors of layers."""
        return self.schedule(self.optimizer.step + self.ahead)

    @property
    def loss_scale(self) -> float | None:
        return None if self._scaling is None else self._scaling.known

    def add(self) -> None:
        """Compute the gradients of a part of the batch that is not the last; the part is in the inputs.

        Raises
        ------
        ValueError
            If only the last part is missing, for which :meth:`step` must be called.
        Diverged
            As :meth:`step`.
        """
        executor, part = self.executor, len(self._parts)
        if part + 1 >= executor.parts:
            raise ValueError(
                f"add(): expected {executor.parts - 1} calls before step(), for the executor's {executor.parts} "
                "parts, got one more; call step()"
            )
        begin = self._begin_part()
        self._pass(part)
        self._parts.append(self._loss_of_pass())
        self._check_last()
        self._seconds += time.perf_counter() - begin

    def step(self) -> float | PendingLoss:
        """Train on the batch in the inputs, or on its last part; return the mean loss of the batch before the update.

        On a device, the computation of the loss may still run when this returns: ``float()`` waits for it, on all
        ranks.

        Raises
        ------
        Diverged
            If the loss, or with `clip_norm` the norm of the gradients, is not finite, or if gradients are not finite
            even at the smallest loss scale; the parameters are not changed. On a device this is detected one step
            later, after an update with the gradients of that loss.
        ValueError
            If calls of :meth:`add` are missing.
        """
        begin = self._begin_part()
        loss = self._step()
        if self.auto is None or self.auto.finished:
            return loss
        loss = float(loss)  # waits on a device
        self.auto.after_step(self._seconds + time.perf_counter() - begin)
        return loss

    def _begin_part(self) -> float:
        """Return the start time of a part [s]. The scheme of all parts is chosen before the first part."""
        if not self._parts:
            self._seconds = 0.0
            if self.auto is not None and not self.auto.finished:
                self.auto.before_step()
        return time.perf_counter()

    def _pass(self, part: int) -> None:
        """Run forward and backward on the samples in the inputs; `part` is the number of the part of the batch."""
        executor = self.executor
        executor.mode.step, executor.mode.part = self.optimizer.step, part
        # An evaluation may have left the count of its short last batch.
        executor.mode.valid = executor.batch
        losses, self._parts = self._parts, []  # after an error, the next part is the first of another batch
        executor.forward(training=True)
        try:
            executor.backward()
        except BaseException as error:
            # The sums that have started hold a batch in part: the next forward pass would update parameters by them.
            if executor.comm.size == 1 or is_shared(error, executor.comm.size):
                self._reducer.discard()
            raise
        self._parts = losses

    def _loss_of_pass(self) -> float | PendingLoss:
        """Return the loss of the last pass; on the host, wait for it and check it."""
        executor = self.executor
        if not executor.device.is_host:
            assert executor.pass_loss.pending is not None
            return executor.pass_loss.pending
        loss = executor.loss_value()
        self._check_loss(loss)
        return loss

    def _step(self) -> float | PendingLoss:
        executor, clip, scaling, done = self.executor, self._clip, self._scaling, len(self._parts)
        if done + 1 != executor.parts:
            raise ValueError(
                f"step(): expected {executor.parts - 1} calls of add() before it, for the executor's {executor.parts} "
                f"parts, got {done}; call it for every part of the batch except the last"
            )
        # Before the pass, which replaces it by a norm that a device may still compute.
        before = None if clip is None else clip.norm
        self._pass(done)
        losses, self._parts = [*self._parts, self._loss_of_pass()], []
        self._check_last()
        if scaling is not None and scaling.hopeless:
            raise self._diverged("gradients are not finite, however small the loss scale; lower schedule.learning_rate")
        norm = None if clip is None else clip.norm
        seen = norm if executor.device.is_host else before  # a device may still compute that of this step
        known = None if seen is None else seen.value
        self.gradient_norm = norm if norm is None or norm.value is None else norm.value
        if known is not None and scaling is None and not math.isfinite(known):  # a loss scale skips such steps
            raise self._diverged(f"the norm of the gradients is {known}; lower schedule.learning_rate")
        # The first group has `learning_rate`; a schedule may give the others another rate.
        rates = [self.schedule(self.optimizer.step + self.ahead, group) for group in self.optimizer.groups[1:]]
        self.optimizer.begin_step([self.learning_rate, *rates], 1.0 if clip is None else clip.factor)
        if scaling is not None:
            scaling.adapt()
        loss = mean_of(losses)
        # On the host, the loss has been checked already.
        if isinstance(loss, PendingLoss):
            self._last = loss
        return loss

    def _check_last(self) -> None:
        """Check the loss of the previous step, which is known after this step's forward pass."""
        if self._last is not None:
            self._check_loss(float(self._last))

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}; lower schedule.learning_rate, or set training.clip_norm")

    def synchronize(self) -> None:
        """Finish all updates. Call it before evaluation, checkpoints, or reading of parameters.

        Raises
        ------
        Diverged
            If the last loss, a parameter or a running statistic is not finite: a checkpoint would be useless.
        """
        self._reducer.synchronize()
        self._check_last()
        if self._scaling is not None:
            self._scaling.observe()
        store, comm = self.executor.store, self.executor.comm
        kinds = {"parameter": store.params, "running statistic": store.state}
        kept = ((f"{kind} {n}", array) for kind, arrays in kinds.items() for n, array in arrays.items())
        name = next((n for n, array in kept if not np.isfinite(array).all()), None)
        # Where every rank holds all arrays, all ranks find the same name without a message.
        if not store.whole:
            name = next((n for n in comm.allgather_objects(name) if n is not None), None)
        if name is not None:
            raise self._diverged(
                f"{name} is no longer finite; lower schedule.learning_rate, or set training.clip_norm"
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace parameters by their moving averages in the ``with`` block, if the optimizer keeps them. Collective.

        Call :meth:`synchronize` first. After an error the averages are not swapped back, because the error may be on
        one rank only.
        """
        self._swap_averages()
        yield
        self._swap_averages()

    def _swap_averages(self) -> None:
        for bucket, own, average in self.optimizer.averages():
            # A swap, so that a second one restores both. `own` is this rank's shard, or the whole bucket.
            kept = bucket.params[own].copy()
            np.copyto(bucket.params[own], average)
            np.copyto(average, kept)
        if self.optimizer.average:
            # A rank swaps its own shard only, and the copies in 16 bits are still those of the other values.
            self._reducer.spread()

    def _diverged(self, what: str) -> Diverged:
        self._reducer.discard()
        self._parts = []
        error = Diverged(f"step {self.optimizer.step}: {what}")
        # All ranks raise it: an enclosing `agreement` does not exchange it again, and objects are closed collectively.
        mark_agreed(error, self.executor.comm.rank == 0, self.executor.comm.size)
        return error
