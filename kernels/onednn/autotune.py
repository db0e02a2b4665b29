"""The choice of an algorithm for a convolution: oneDNN's own, or by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from halograd.kernels.kernel import Kernel
from halograd.kernels.onednn.program import Program, ReferenceOnly

__all__ = ["Choice", "measure"]

Candidates = Mapping[str, Callable[[], Program]]

REPEATS = 7
ENOUGH = 0.1  # [s] per candidate


def measure(kernel: Kernel, clock: Callable[[], float]) -> float:
    """Shortest time of a few calls [s], after one that is not counted."""
    kernel()
    best, spent = float("inf"), 0.0
    for _ in range(REPEATS):
        start = clock()
        kernel()
        elapsed = clock() - start
        best, spent = min(best, elapsed), spent + elapsed
        if spent > ENOUGH:
            break
    return best


class Choice:
    """Picks among named candidates: the first one, or (``tune``) the fastest.

    What was found is remembered under a key for the life of this object, so that layers of one shape are
    measured once. Candidates run on the arrays as they are when the kernel is built: outputs are
    overwritten, inputs are not.

    With one thread per kernel its processor time counts, which other processes on the machine disturb little.

    Attributes
    ----------
    found
        Per key the times of the candidates [s], the chosen one first.
    """

    def __init__(self, tune: bool, threads: int) -> None:
        self.tune = tune
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self.found: dict[Any, dict[str, float]] = {}

    def kernel(self, key: Any, candidates: Candidates) -> Kernel:
        """The kernel of the chosen candidate.

        Raises
        ------
        ReferenceOnly
            If no candidate has a fast implementation.
        """
        if not self.tune:
            return self._first(candidates)
        if key not in self.found:
            self.found[key] = self._compare(candidates)
        return candidates[next(iter(self.found[key]))]().kernel()

    @staticmethod
    def _first(candidates: Candidates) -> Kernel:
        reasons = []
        for build in candidates.values():
            try:
                return build().kernel()
            except ReferenceOnly as error:
                reasons.append(error)
        raise reasons[0]

    def _compare(self, candidates: Candidates) -> dict[str, float]:
        times: dict[str, float] = {}
        reasons = []
        for name, build in candidates.items():
            try:
                kernel = build().kernel()
            except ReferenceOnly as error:
                reasons.append(error)
                continue
            times[name] = measure(kernel, self._clock)
            kernel.close()
        if not times:
            raise reasons[0]
        return dict(sorted(times.items(), key=lambda item: item[1]))
