"""The choice of a plan by measurement on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halograd.kernels.cudnn.frontend import one_line
from halograd.kernels.cudnn.graphs import Built, Candidates

__all__ = ["TRIED", "EventTimer", "fastest"]

#: Candidates that are measured, of as many engines as there are; each that needs a compiler takes 0.2-4 s to build.
TRIED = 12
_ROUNDS = 5
_ENOUGH = 2e-3  # [s] per round: a launch takes some microseconds, which a shorter round would mostly measure

Timer = Callable[[Callable[[], Any]], float]


class EventTimer:
    """Times by events on the current stream.

    Parameters
    ----------
    cuda
        ``cupy.cuda``, or what has its ``Event`` and ``get_elapsed_time``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def __call__(self, run: Callable[[], Any]) -> float:
        """Shortest mean time of a call over a few rounds [s], after two calls that are not counted."""
        run()
        once = self._round(run, 1)
        calls = max(1, min(100, int(_ENOUGH / max(once, 1e-7))))
        return min(self._round(run, calls) for _ in range(_ROUNDS))

    def _round(self, run: Callable[[], Any], calls: int) -> float:
        start, stop = self._cuda.Event(), self._cuda.Event()
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        stop.synchronize()
        return float(self._cuda.get_elapsed_time(start, stop)) / 1e3 / calls


def fastest(
    candidates: Candidates, trial: Callable[[Built], Callable[[], Any]], timer: Timer
) -> tuple[Built, dict[str, float]]:
    """The fastest of some candidates of every engine, and the times of all that ran [s], in order of time.

    Parameters
    ----------
    trial
        Makes of a candidate a function that launches it on the arrays of the kernel. Outputs are overwritten, inputs
        are not.

    Raises
    ------
    KernelError
        If none can be built and launched.
    """
    found: dict[int, tuple[float, str]] = {}
    reason = ""
    for built in candidates.each_engine():
        try:
            found[built.index] = (timer(trial(built)), built.name)
        except Exception as error:  # refused by cuDNN when launched, or its workspace does not fit
            reason = one_line(error)
        if len(found) == TRIED:
            break
    for index, (_, _) in sorted(found.items(), key=lambda item: item[1]):
        chosen = candidates.build(index)
        if chosen is not None:
            return chosen, {name: seconds for seconds, name in sorted(found.values())}
    raise candidates.none(reason)
