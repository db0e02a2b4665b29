"""Tables and ratios of the step benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from benchmarks.contest import Outcome
from benchmarks.contestants import CONTESTANTS

__all__ = ["ratios", "summary", "table", "worst"]

_OURS = tuple(e.name for e in CONTESTANTS if e.ours and e.equal)
_OURS_LOW = tuple(e.name for e in CONTESTANTS if e.ours and not e.equal)
_PEERS = tuple(e.name for e in CONTESTANTS if e.peer and e.equal)
#: Limits of CPU usage [cores] by others, idle contestants and other machines, above which times are unreliable.
_DISTURBED = {"others": 0.08, "idle": 0.02, "stolen": 0.02}


def ratios(outcome: Outcome) -> dict[str, float]:
    """Return the ratios of medians that :mod:`benchmarks.step` defines, for the contestants that took part."""
    median = {name: times.median for name, times in outcome.times.items()}
    ours = [median[name] for name in _OURS if name in median]
    peers = [median[name] for name in _PEERS if name in median]
    result = {}
    if ours and peers:
        result["ratio to best peer"] = min(ours) / min(peers)
    low = [median[name] for name in _OURS_LOW if name in median]
    if low and "torch-bf16" in median:
        result["ratio in bfloat16"] = min(low) / median["torch-bf16"]
    for label, above, below in (
        ("ratio to raw sum", "halograd-1x2", "raw"),
        ("ratio to gloo", "halograd-2x1", "torch-gloo"),
        ("ratio to ShardTensor", "halograd-2x1", "shardtensor"),
        ("ratio to JAX sharded", "halograd-2x1", "jax-sharded"),
        ("two ranks to one", "halograd-2x1", "halograd-1x2"),
    ):
        if above in median and below in median:
            result[label] = median[above] / median[below]
    return result


def worst(outcomes: Sequence[Outcome]) -> float | None:
    """Return the largest ratio to the best peer over all networks."""
    values = [r["ratio to best peer"] for r in map(ratios, outcomes) if "ratio to best peer" in r]
    return max(values, default=None)


def table(outcome: Outcome) -> str:
    """Return times, ratios and the state of the machine, for one network."""
    lines = [f"  {'':46}{'median ms':>10}{'quarters ms':>20}{'best ms':>10}{'steps':>7}{'faults/step':>13}"]
    for times in outcome.times.values():
        quarters = " .. ".join(f"{1e3 * t:.2f}" for t in times.spread)
        numbers = f"{1e3 * times.median:>10.2f}{quarters:>20}{1e3 * times.best:>10.2f}{len(times.seconds):>7}"
        numbers += f"{times.faults:>13.0f}"
        lines.append(f"  {times.title:46}{numbers}")
    lines += [f"  {label:46}{value:>10.3f}" for label, value in ratios(outcome).items()]
    return "\n".join([*lines, _machine(outcome)])


def _machine(outcome: Outcome) -> str:
    """Return a text on the CPU usage of other processes, with a warning if the usage was high."""
    used = {key: mean(getattr(u, key) for u in outcome.usage) for key in _DISTURBED}
    text = (
        f"  cores used meanwhile: {used['others']:.2f} by others, {used['idle']:.2f} by waiting contestants, "
        f"{used['stolen']:.2f} stolen"
    )
    if any(used[key] > limit for key, limit in _DISTURBED.items()):
        text += "\n  DISTURBED MACHINE: these times are not to be trusted; run again when it is quiet"
    return text


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the last line of the output: the worst ratio to the best peer."""
    largest = worst(outcomes)
    if largest is None:
        return "no peers took part: no ratio to the best peer"
    return f"worst ratio to best peer: {largest:.3f}"
