"""What a run tells of schemes that it tries: a line in the log for each, and at the end how to pin the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from halograd.layers.reduction_scheme import Scheme
from halograd.training.log import RunLog
from halograd.training.reduction.auto import AutoReduction

__all__ = ["pinned", "report_to"]


def report_to(log: RunLog, auto: AutoReduction, step: Callable[[], int]) -> None:
    """Have `auto` write every scheme that was measured, and what it settled on; `step` gives the step's number."""

    def told(scheme: Scheme, seconds: float, last: bool) -> None:
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

    auto.told = told


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
