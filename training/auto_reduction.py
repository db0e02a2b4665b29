"""``auto``: search for the fastest scheme of gradient reduction by measurement during the first steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from halograd.documents import to_toml

from ..layers.reduction_chunks import gradient_layers
from ..layers.reduction_scheme import Scheme
from ..perfmodel.plan_candidates import candidate_schemes, shortlist
from .executor import Executor

__all__ = ["AutoReduction", "ChunkSearch", "Trial", "Tuner", "Tuning", "pinned"]


@dataclass
class ChunkSearch:
    """Search for a chunk size by the times of intervals of training. Pure arithmetic.

    Sizes increase by 1 up to `step`, then by `step`, until a size exceeds the best one by ``step * range`` or more, or
    exceeds `layers`. ::

        while not search.done:
            train some steps in chunks of search.chunk layers
            search.observe(seconds)
        train on in chunks of search.chunk layers

    Attributes
    ----------
    layers
        Number of layers, and so the largest chunk.
    step, range
        Size of the jumps, and number of jumps beyond the best size, as in the paper.
    chunk
        Size to train with now.
    best
        Best size so far.
    done
        Whether the search is complete, and `chunk` is its result.
    times
        Time that was observed for each size [s].

    Notes
    -----
    With ``(step, range) = (10, 5)`` and a best size of 9, as in the paper, the search takes 15 intervals; with
    ``(10, 10)`` and a best size of 20, 21.

    References
    ----------
    Le et al. 2018, Algorithm 1. As in the paper, the time of an interval that only ends the search is not used. That
    the search ends at `layers` is new: a chunk of more than all layers is the same as chunks of one layer, by the
    paper's rule for layers that fill no chunk.
    """

    layers: int
    step: int = 10
    range: int = 5
    chunk: int = 1
    done: bool = False
    times: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "step", "range"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def best(self) -> int:
        return min(self.times, key=lambda chunk: (self.times[chunk], chunk), default=1)

    def observe(self, seconds: float) -> None:
        """Record the time of an interval in chunks of `chunk` layers [s]; it must be the same on all ranks."""
        if self.done:
            raise ValueError("observe(): expected a search in progress, got one that is done")
        if self.chunk < self.best + self.step * self.range:
            self.times[self.chunk] = seconds
            self.chunk += 1 if self.chunk < self.step else self.step
            if self.chunk <= self.layers:
                return
        # The paper's rule ends the search, or no larger chunk exists.
        self.chunk, self.done = self.best, True

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the search, for a checkpoint: plain data."""
        # Keys are strings, because JSON has no others.
        return {"chunk": self.chunk, "done": self.done, "times": {str(k): v for k, v in self.times.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.times = {int(k): float(v) for k, v in state["times"].items()}
        self.chunk, self.done = int(state["chunk"]), bool(state["done"])


@dataclass(frozen=True)
class Trial:
    """Scheme that was tried for an interval of training, and the time of a step with it [s]."""

    scheme: Scheme
    seconds: float


class Tuner:
    """Search over schemes, then over chunk sizes, for the fastest. Local; all ranks must observe the same times.

    It first tries the `candidates`, which a cost model ranks best, so that measurements correct the model. Then it
    searches the chunk size by Algorithm 1 of Le et al. (:class:`ChunkSearch`), with the number of replicated layers of
    the best candidate. ::

        while not tuner.done:
            train an interval of steps with tuner.scheme
            tuner.observe(seconds)
        train on with tuner.scheme

    Parameters
    ----------
    candidates
        Schemes to try, at least one.
    search
        Search for the chunk size of ``host_accumulate``; None: that scheme is not tried.

    Attributes
    ----------
    scheme
        Scheme to train with now.
    trials
        Measurements so far.
    done
        Whether the search is complete, and `scheme` is its result.
    """

    def __init__(self, candidates: Sequence[Scheme], search: ChunkSearch | None = None) -> None:
        if not candidates:
            raise ValueError("candidates: expected at least one scheme, got none")
        # Each scheme is timed once.
        self.candidates = list(dict.fromkeys(candidates))
        self.search = search
        self.trials: list[Trial] = []

    @property
    def best(self) -> Trial | None:
        """The fastest trial so far; the first of several equally fast trials."""
        return min(self.trials, key=lambda trial: trial.seconds, default=None)

    @property
    def done(self) -> bool:
        return len(self.trials) >= len(self.candidates) and (self.search is None or self.search.done)

    @property
    def scheme(self) -> Scheme:
        if len(self.trials) < len(self.candidates):
            return self.candidates[len(self.trials)]
        if self.search is None or self.search.done:
            assert self.best is not None
            return self.best.scheme
        # Chunks are tried with the number of replicated layers of the best candidate.
        first = min(self.trials[: len(self.candidates)], key=lambda trial: trial.seconds).scheme
        return Scheme("host_accumulate", chunk=self.search.chunk, replicated_dense=first.replicated_dense)

    def observe(self, seconds: float) -> None:
        """Record the time of a step with `scheme` [s]; it must be the same on all ranks."""
        if self.done:
            raise ValueError("observe(): expected a tuner in progress, got one that is done")
        # The scheme that was timed: `self.scheme` is another one as soon as the search has observed the time.
        scheme = self.scheme
        if len(self.trials) >= len(self.candidates):
            assert self.search is not None
            tried = len(self.search.times)
            self.search.observe(seconds)
            if len(self.search.times) == tried:
                return  # this interval ended the search
        self.trials.append(Trial(scheme, seconds))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, for a checkpoint: plain data."""
        return {
            "candidates": [asdict(scheme) for scheme in self.candidates],
            "trials": [{"scheme": asdict(t.scheme), "seconds": t.seconds} for t in self.trials],
            "search": None if self.search is None else self.search.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, with the candidates of the checkpoint."""
        self.candidates = [Scheme.of(scheme) for scheme in state["candidates"]]
        self.trials = [Trial(Scheme.of(t["scheme"]), float(t["seconds"])) for t in state["trials"]]
        # If only the checkpoint has a search (`step` is 0 now), its trials still count.
        if state["search"] is None:
            self.search = None
        elif self.search is not None:
            self.search.load_state_dict(state["search"])


#: Number of steps after a change that are ignored: they use buffers and messages for the first time.
FIRST = 1


@dataclass(frozen=True)
class Tuning:
    """Settings of the search.

    Attributes
    ----------
    interval
        Number of steps per scheme.
    step, range
        Settings of :class:`ChunkSearch`; `step` = 0: no search for a chunk size.
    candidates
        Number of schemes of the cost model's ranking to try.
    """

    interval: int = 10
    step: int = 10
    range: int = 5
    candidates: int = 4

    def __post_init__(self) -> None:
        # At least one step of an interval is timed.
        for name, least in (("interval", FIRST + 1), ("step", 0), ("range", 1), ("candidates", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")


class AutoReduction:
    """Search that changes the scheme of an executor between steps. Collective over the executor's communicator.

    The time of an interval is that of the slowest rank, so all ranks make the same decision.

    Parameters
    ----------
    executor
        Executor that was built with ``Scheme("auto")``.
    apply
        Function that is called with the scheme to train with (:meth:`Trainer.reduce_by`).
    ranked
        Candidates, the most promising first, as a cost model ranks them
        (:func:`halograd.perfmodel.plan_candidates.rank_schemes`); empty: a few typical ones.
    tuning
        Settings of the search; None: the default ones.

    Attributes
    ----------
    on_measured
        Function that is called on every rank with each measured scheme, the time of a step [s], and whether this scheme
        was the last one.
    """

    def __init__(
        self,
        executor: Executor,
        apply: Callable[[Scheme], None],
        ranked: Sequence[Scheme],
        tuning: Tuning | None,
    ) -> None:
        self.executor, self.tuning = executor, tuning or Tuning()
        self._apply = apply
        self.on_measured: Callable[[Scheme, float, bool], None] | None = None
        self.tuner = Tuner(self._candidates(ranked), self._search())
        self._times: list[float] = []
        self._begun = False

    def _candidates(self, ranked: Sequence[Scheme]) -> list[Scheme]:
        executor = self.executor
        if not ranked:
            return shortlist(candidate_schemes(executor.network, executor.strategy, executor.batch))
        most = len(executor.replicable)
        # A change to shards needs another optimizer, and more replicated layers another executor.
        possible = [s for s in ranked if s.replicated_dense <= most and not (s.kind.searches or s.kind.shards)]
        # The default scheme, if none of the ranked ones is possible.
        return possible[: self.tuning.candidates] or [Scheme("bucketed")]

    def _search(self) -> ChunkSearch | None:
        """Create the search for a chunk size; None if `Tuning.step` is 0, if only one size is possible, on one rank, or
        without shared memory.
        """
        store, comm = self.executor.store, self.executor.comm
        assert store.blocks is not None
        layers = sum(x.kind in ("weights", "dense") for x in gradient_layers(store.network, store.blocks))
        # `host_accumulate` adds up chunks in the memory of a node.
        if not self.tuning.step or layers < 2 or comm.size == 1 or not comm.shares_memory:
            return None
        return ChunkSearch(layers, self.tuning.step, self.tuning.range)

    @property
    def done(self) -> bool:
        """Whether the scheme is final."""
        return self.tuner.done

    @property
    def finished(self) -> bool:
        """Whether the final scheme is in use, and the search has ended."""
        return self.done and self._begun

    @property
    def scheme(self) -> Scheme:
        """Scheme of the current step or, between steps, of the next one."""
        return self.tuner.scheme

    def before_step(self) -> None:
        """Apply the first scheme, before the first step; no-op before later steps. Collective."""
        # Not in the constructor: a checkpoint that is loaded after it may replace the first scheme.
        if not self._begun:
            self._begun = True
            self._apply(self.tuner.scheme)

    def after_step(self, seconds: float) -> None:
        """Record the time of a step on this rank [s], and change the scheme if its interval is over. Collective."""
        if self.done:
            return
        self._times.append(seconds)
        if len(self._times) < self.tuning.interval:
            return
        # The median, because a step in which the system does something else would decide for the other schemes.
        scheme, agreed = self.scheme, self.executor.comm.allreduce_scalar(median(self._times[FIRST:]), "max")
        self._times.clear()
        self.tuner.observe(agreed)
        if self.on_measured is not None:
            self.on_measured(scheme, agreed, self.done)
        if self.tuner.scheme != scheme:
            self._apply(self.tuner.scheme)

    @property
    def _conditions(self) -> dict[str, Any]:
        """Number of ranks, transport and replicable layers; a checkpoint with others has no valid measurements."""
        comm = self.executor.comm
        return {"ranks": comm.size, "transport": comm.transport, "replicable": list(self.executor.replicable)}

    def state_dict(self) -> dict[str, Any]:
        """Return measurements and choice, for a checkpoint: plain data."""
        return {**self._conditions, "tuner": self.tuner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; ignore it if the number of ranks, transport or replicable layers differ."""
        if all(state.get(key) == value for key, value in self._conditions.items()):
            self.tuner.load_state_dict(state["tuner"])


def pinned(scheme: Scheme) -> str:
    """Return the TOML table of a configuration with this scheme, in one line.

    >>> pinned(Scheme("two_chunks", first_layers=9, replicated_dense=2))
    'reduction = { name = "two_chunks", first_layers = 9, replicated_dense = 2 }'
    """
    plain = asdict(Scheme())
    settings = {k: v for k, v in asdict(scheme).items() if k == "name" or v != plain[k]}
    return "reduction = { " + ", ".join(f"{k} = {to_toml(v)}" for k, v in settings.items()) + " }"
