"""``auto``: measures schemes of gradient reduction while training, and settles on the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from ..layers.reduction_chunks import gradient_layers
from ..layers.reduction_scheme import Scheme
from ..perfmodel.reduction_choice import candidate_schemes, shortlist
from .executor import Executor
from .log import RunLog

__all__ = ["AutoReduction", "ChunkSearch", "Trial", "Tuner", "Tuning", "pinned", "report_to"]


@dataclass
class ChunkSearch:
    """Which chunk size to train the next interval with, of the times that intervals took.

    Sizes rise by 1 up to `step` and by `step` from there, until `range` of them in a row beyond the best were no
    better. ::

        while not search.done:
            train some steps in chunks of search.chunk layers
            search.observe(seconds)
        train on in chunks of search.chunk layers

    Attributes
    ----------
    layers
        How many layers there are to make chunks of; larger chunks do not exist.
    step, range
        As in the paper: of what size the jumps are, and how many are made beyond the best.
    chunk
        To train with now.
    best, least
        The best size so far, and the time of its interval [s].
    done
        Whether `chunk` is the answer.
    times
        Size -> time of its interval [s].

    Notes
    -----
    At most ``step + range + 1`` intervals beyond the last improvement below `step`; 15 for the paper's
    ``(step, range, best) = (10, 5, 9)``, 21 for ``(10, 10, 20)``.

    References
    ----------
    Le et al. 2018, Algorithm 1. There, the last interval is trained and its time not looked at; here it ends the
    search in the same place. What is added is the end at `layers`: the paper's rule for layers that fill no chunk
    makes a longer chunk the same as chunks of one layer.
    """

    layers: int
    step: int = 10
    range: int = 5
    chunk: int = 1
    best: int = 1
    least: float = math.inf
    done: bool = False
    times: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "step", "range"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def observe(self, seconds: float) -> None:
        """An interval of training in chunks of `chunk` layers took so long [s], on all ranks the same number."""
        if self.done:
            raise ValueError("observe(): expected a search that goes on, got one that is done")
        if self.chunk >= self.best + self.step * self.range:
            self._end()
            return
        self.times[self.chunk] = seconds
        if seconds < self.least:
            self.least, self.best = seconds, self.chunk
        self.chunk += 1 if self.chunk < self.step else self.step
        if self.chunk > self.layers:
            self._end()

    def _end(self) -> None:
        self.chunk, self.done = self.best, True

    def state_dict(self) -> dict[str, Any]:
        """Where the search stands, for a checkpoint: plain data."""
        return {"chunk": self.chunk, "done": self.done, "times": {str(k): v for k, v in self.times.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.times = {int(k): float(v) for k, v in state["times"].items()}
        self.best = min(self.times, key=lambda k: (self.times[k], k), default=1)
        self.least = self.times.get(self.best, math.inf)
        self.chunk, self.done = int(state["chunk"]), bool(state["done"])


@dataclass(frozen=True)
class Trial:
    """A scheme that was trained with for an interval, and what its steps took [s]."""

    scheme: Scheme
    seconds: float


class Tuner:
    """Tries schemes, then chunk sizes, and settles on what was fastest. Local: ranks give the same times to theirs.

    First the `candidates` one by one: what a cost model thinks best, so that measurement corrects it. Then, with as
    many replicated layers as the best of them, chunks of layers by Algorithm 1 of Le et al. (:class:`ChunkSearch`). ::

        while not tuner.done:
            train an interval of steps with tuner.scheme
            tuner.observe(seconds)
        train on with tuner.scheme

    Parameters
    ----------
    candidates
        Schemes to try, at least one.
    search
        Of the chunk size of ``host_accumulate``; None: no such scheme here.

    Attributes
    ----------
    scheme
        To train with now.
    trials
        What was measured so far.
    done
        Whether `scheme` is the answer.
    """

    def __init__(self, candidates: Sequence[Scheme], search: ChunkSearch | None = None) -> None:
        if not candidates:
            raise ValueError("candidates: expected at least one scheme, got none")
        self.candidates = list(dict.fromkeys(candidates))
        self.search = search
        self.trials: list[Trial] = []

    @property
    def best(self) -> Trial | None:
        """The fastest so far, of equals the first."""
        return min(self.trials, key=lambda trial: trial.seconds, default=None)

    @property
    def _tried(self) -> int:
        return min(len(self.trials), len(self.candidates))

    @property
    def done(self) -> bool:
        return self._tried == len(self.candidates) and (self.search is None or self.search.done)

    @property
    def scheme(self) -> Scheme:
        if self._tried < len(self.candidates):
            return self.candidates[self._tried]
        best = self.best
        assert best is not None
        if self.search is None or self.search.done:
            return best.scheme
        return self._chunked(self.search.chunk)

    def _chunked(self, chunk: int) -> Scheme:
        """With as many replicated layers as the best candidate: the search may not change its mind about that."""
        first = min(self.trials[: len(self.candidates)], key=lambda trial: trial.seconds)
        return replace(Scheme("host_accumulate", chunk=chunk), replicated_dense=first.scheme.replicated_dense)

    def observe(self, seconds: float) -> None:
        """A step of the interval with `scheme` took so long [s], on all ranks the same number."""
        if self.done:
            raise ValueError("observe(): expected a tuner that still tries, got one that is done")
        scheme = self.scheme
        if self._tried == len(self.candidates):
            assert self.search is not None
            tried = len(self.search.times)
            self.search.observe(seconds)
            if len(self.search.times) == tried:
                return  # the interval that ended the search
        self.trials.append(Trial(scheme, seconds))

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, for a checkpoint: plain data."""
        return {
            "candidates": [asdict(scheme) for scheme in self.candidates],
            "trials": [{"scheme": asdict(t.scheme), "seconds": t.seconds} for t in self.trials],
            "search": None if self.search is None else self.search.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; candidates are those of the state."""
        self.candidates = [Scheme.of(scheme) for scheme in state["candidates"]]
        self.trials = [Trial(Scheme.of(t["scheme"]), float(t["seconds"])) for t in state["trials"]]
        if state["search"] is None:
            self.search = None
        elif self.search is not None:
            self.search.load_state_dict(state["search"])


#: Steps after a change that are not counted: buffers and messages are used for the first time.
FIRST = 1


@dataclass(frozen=True)
class Tuning:
    """How schemes are tried.

    Attributes
    ----------
    interval
        Steps per scheme.
    step, range
        Of the search for a chunk size, as in Le et al. 2018, Algorithm 1; `step` = 0: no such search.
    candidates
        Of the cost model's ranking, how many are tried.
    """

    interval: int = 10
    step: int = 10
    range: int = 5
    candidates: int = 4

    def __post_init__(self) -> None:
        for name, least in (("interval", FIRST + 1), ("step", 0), ("range", 1), ("candidates", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")


class AutoReduction:
    """Changes the scheme of an executor between steps until the fastest is found. Collective over its communicator.

    Ranks decide alike: an interval counts as what it took on the slowest rank, on which all agree.

    Parameters
    ----------
    executor
        Built with ``Scheme("auto")``.
    apply
        Called with a scheme to train on with; by default `Executor.reduce_by` (a trainer binds its optimizer too).
    ranked
        Candidates, the most promising first, as a cost model ranks them
        (:func:`halograd.perfmodel.reduction_choice.rank_schemes`); without any, a few typical ones.
    tuning
        How schemes are tried.

    Attributes
    ----------
    on_measured
        Called on every rank with each scheme that was measured, the time of a step [s], and whether it was the last.
    """

    def __init__(
        self,
        executor: Executor,
        apply: Callable[[Scheme], None] | None = None,
        ranked: Sequence[Scheme] = (),
        tuning: Tuning | None = None,
    ) -> None:
        self.executor, self.tuning = executor, tuning or Tuning()
        self._apply = apply or executor.reduce_by
        self.on_measured: Callable[[Scheme, float, bool], None] | None = None
        self.tuner = Tuner(self._candidates(ranked), self._search())
        self._times: list[float] = []
        self._begun = False

    def _candidates(self, ranked: Sequence[Scheme]) -> list[Scheme]:
        executor = self.executor
        if not ranked:
            return shortlist(candidate_schemes(executor.network, executor.strategy, executor.batch))
        most = len(executor.replicable)
        possible = [s for s in ranked if s.replicated_dense <= most and not (s.kind.searches or s.kind.shards)]
        return possible[: self.tuning.candidates] or [Scheme("bucketed")]

    def _search(self) -> ChunkSearch | None:
        """Over chunks of the layers with weights; None if there is nothing to choose, or no memory is shared."""
        store, comm = self.executor.store, self.executor.comm
        assert store.blocks is not None
        layers = sum(x.kind in ("weights", "dense") for x in gradient_layers(store.network, store.blocks))
        if not self.tuning.step or layers < 2 or comm.size == 1 or comm.transport == "mpi":
            return None
        return ChunkSearch(layers, self.tuning.step, self.tuning.range)

    @property
    def done(self) -> bool:
        """Whether the scheme is final."""
        return self.tuner.done

    @property
    def settled(self) -> bool:
        """Whether the final scheme is in use: there is nothing to do any more."""
        return self.done and self._begun

    @property
    def scheme(self) -> Scheme:
        """What is trained with, or will be from the next step on."""
        return self.tuner.scheme

    def before_step(self) -> None:
        """A step begins. Collective."""
        if not self._begun:
            self._begun = True
            self._apply(self.tuner.scheme)

    def after_step(self, seconds: float) -> None:
        """A step took so long on this rank [s]. Collective."""
        if self.done:
            return
        self._times.append(seconds)
        if len(self._times) < self.tuning.interval:
            return
        scheme, agreed = self.scheme, self.executor.comm.allreduce_scalar(median(self._times[FIRST:]), "max")
        self._times.clear()
        self.tuner.observe(agreed)
        if self.on_measured is not None:
            self.on_measured(scheme, agreed, self.done)
        if self.tuner.scheme != scheme:
            self._apply(self.tuner.scheme)

    @property
    def _conditions(self) -> dict[str, Any]:
        """Under which measurements hold, and schemes can be had."""
        comm = self.executor.comm
        return {"ranks": comm.size, "transport": comm.transport, "replicable": list(self.executor.replicable)}

    def state_dict(self) -> dict[str, Any]:
        """What was measured and chosen, for a checkpoint: plain data."""
        return {**self._conditions, "tuner": self.tuner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what was measured on other ranks, by another transport or for other layers is forgotten."""
        if all(state.get(key) == value for key, value in self._conditions.items()):
            self.tuner.load_state_dict(state["tuner"])


def report_to(log: RunLog, auto: AutoReduction, step: Callable[[], int]) -> None:
    """Have `auto` write every scheme that was measured, and what it settled on; `step` gives the step's number."""

    def write(scheme: Scheme, seconds: float, last: bool) -> None:
        log.write("reduction", step=step(), scheme=str(scheme), seconds=seconds, chosen=False)
        if last:
            best = auto.tuner.best
            assert best is not None
            chosen = asdict(best.scheme)
            log.write(
                "reduction", step=step(), scheme=str(best.scheme), seconds=best.seconds, chosen=True, table=chosen
            )
            log.say(
                f"gradient reduction: {best.scheme}, {1e3 * best.seconds:.2f} ms/step, the best of "
                f"{len(auto.tuner.trials)}; to pin it: {pinned(best.scheme)}"
            )

    auto.on_measured = write


def pinned(scheme: Scheme) -> str:
    """The table of a configuration that asks for this scheme, in a line.

    >>> pinned(Scheme("two_chunks", first_layers=9, replicated_dense=2))
    'reduction = { name = "two_chunks", first_layers = 9, replicated_dense = 2 }'
    """
    plain = asdict(Scheme())
    settings = {k: v for k, v in asdict(scheme).items() if k == "name" or v != plain[k]}
    return "reduction = { " + ", ".join(f"{k} = {_toml(v)}" for k, v in settings.items()) + " }"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
