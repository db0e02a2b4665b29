"""Which scheme to train with next, of what steps took under those tried before. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from halograd.layers.reduction_scheme import Scheme
from halograd.training.reduction.chunk_search import ChunkSearch

__all__ = ["Trial", "Tuner"]


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
