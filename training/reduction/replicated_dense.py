"""Dense layers whose gradients are computed of the whole batch on every rank, beside any other scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halograd.layers.replicated_dense import ReplicatedDense
from halograd.training.reduction.base import Reducer
from halograd.training.store import Bucket

__all__ = ["ReplicatedDenseReducer", "Run"]

Run = Callable[[str, str, Callable[[], None]], None]


class ReplicatedDenseReducer(Reducer):
    """Leaves the first dense layers to their operators, and all others to another reducer. Collective.

    ::

        forward    require(layer): wait for A and E of the last step, gradient of its whole batch, update
                   the layer's operator starts to gather A
        backward   the layer's operator keeps E
        flush      the other reducer starts what is left; the gathers of E start behind it

    so that the gathers of `E` travel during the next forward pass, until the layer is needed. Whoever reads parameters
    calls `finish`, as always, and finds the layers updated.

    Parameters
    ----------
    others
        Sums the other gradients.
    operators
        Of the replicated layers that backward reaches, in order of computation.
    run
        ``run(layer, "backward", call)`` calls and tells the recorder; None: nobody is told.
    delayed
        False: `flush` waits for the gathers and computes the gradients, as a step without any overlap would. Both
        orders give the same bits: what is computed, and of what, is the same.

    Notes
    -----
    Communication per process and step: per layer two all-gathers, of its rows of `A` and of `E`
    (`halograd.layers.row_gather`). Every rank computes ``2 F units N`` flops per layer, however many ranks there are.

    References
    ----------
    Lee et al. 2017, Algorithm 2, lines 7 to 9, 12, 25 to 26. There the gather of `A` is posted by the layer before,
    here behind the update, which reads the activations that it would overwrite.
    """

    def __init__(
        self,
        others: Reducer,
        operators: Sequence[ReplicatedDense],
        run: Run | None = None,
        delayed: bool = True,
    ) -> None:
        self._others, self._run = others, run or _untold
        super().__init__(others.store, others.comm, others.layers, others.scheme)
        self.delayed = delayed
        self._buckets = {_layer(b): b for b in self.store.buckets if b.replicated}
        self._operators = {o.name: o for o in operators if o.name in self._buckets}
        self._due = dict.fromkeys(self._buckets, False)  # the gradient is not computed yet
        self._pending = dict.fromkeys(self._buckets, False)  # the update is still due

    @property
    def update(self) -> Callable[[Bucket], None] | None:
        """Called with a bucket whose gradients are there, of the other reducer too."""
        return self._others.update

    @update.setter
    def update(self, update: Callable[[Bucket], None] | None) -> None:
        self._others.update = update

    def begin(self) -> None:
        self._finish_own()
        self._others.begin()

    def ready(self, layer: str) -> None:
        self._others.ready(layer)

    def flush(self) -> None:
        self._others.flush()
        for layer in self._buckets:
            self._pending[layer] = True
        for layer, operator in self._operators.items():
            operator.gather_errors()
            self._due[layer] = True
        if not self.delayed:
            self._compute_all()

    def require(self, layer: str) -> None:
        if layer in self._buckets:
            self._complete(layer)
        else:
            self._others.require(layer)

    def _complete(self, layer: str) -> None:
        self._compute(layer)
        if self._pending[layer]:
            self._pending[layer] = False
            update = self._others.update
            if update is not None:
                update(self._buckets[layer])

    def _compute(self, layer: str) -> None:
        if not self._due[layer]:
            return
        self._due[layer] = False
        self._run(layer, "backward", self._operators[layer].whole_gradient)

    def _compute_all(self) -> None:
        for layer in self._buckets:
            self._compute(layer)

    def wait(self) -> None:
        self._others.wait()
        self._compute_all()

    def finish(self) -> None:
        self._others.finish()
        self._finish_own()

    def settle(self) -> None:
        self._others.settle()
        self._finish_own()

    def _finish_own(self) -> None:
        for layer in self._buckets:
            self._complete(layer)

    def discard(self) -> None:
        self._others.discard()
        for layer, operator in self._operators.items():
            operator.abandon()
            self._due[layer] = False
        self._pending = dict.fromkeys(self._pending, False)

    def close(self) -> None:
        self._others.close()


def _untold(layer: str, category: str, call: Callable[[], None]) -> None:
    call()


def _layer(bucket: Bucket) -> str:
    return bucket.names[0].rpartition("/")[0]
