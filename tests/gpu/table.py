"""The table of docs/gpu.md from the results: checks made, failures and measured values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.gpu.results import BAD, STATES, Result, Results
from tests.gpu.runner import Part

__all__ = ["table"]


def table(results: Results, parts: Sequence[Part]) -> str:
    """Return Markdown: counts per part, failures, and measured values."""
    everything = list(results.all())
    facts = results.facts
    devices = facts.get("devices") or [{}]
    about = [
        f"{name} {facts[name]}" for name in ("cupy", "cudnn", "nccl", "driver", "numpy", "python") if facts.get(name)
    ]
    commits = ", ".join(dict.fromkeys(r.commit for r in everything if r.commit)) or "unknown"
    lines = [f"On {devices[0].get('name', 'no GPU')}; {', '.join(about)}; commits {commits}.", ""]
    lines += ["| part | question | ok | not ok | skipped | seconds |", "|---|---|---|---|---|---|"]
    for part in parts:
        lines.append(_row(part, [result for result in everything if result.part == part.name]))
    wrong = [result for result in everything if result.status in BAD]
    lines += ["", "Not ok:", *_grouped(wrong)] if wrong else []
    left = [result for result in everything if result.status in ("skipped", "missing")]
    lines += ["", "Left out:", *dict.fromkeys(f"- {r.part}: {_first(r.detail)}" for r in left)] if left else []
    measured = [result for result in everything if result.status == "ok" and result.numbers]
    lines += ["", "Measured:", *(f"- {r.check.rpartition('::')[2]}: {r.detail}" for r in measured)] if measured else []
    return "\n".join(lines)


def _row(part: Part, found: Sequence[Result]) -> str:
    if not found:
        return f"| {part.name} | {part.question} | not run | | | |"
    assert {result.status for result in found} <= set(STATES)
    ok, bad = (sum(r.status in states for r in found) for states in (("ok",), BAD))
    seconds = sum(result.seconds for result in found)
    return f"| {part.name} | {part.question} | {ok} | {bad} | {len(found) - ok - bad} | {seconds:.0f} |"


def _grouped(wrong: Sequence[Result]) -> Iterator[str]:
    """Return one line for all checks of a job with the same outcome, which names the first."""
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in wrong:
        why = " ".join(result.detail.strip().splitlines()[-1:])[:300]
        groups.setdefault((result.part, result.job, result.status, why), []).append(result)
    for (part, job, status, why), some in groups.items():
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        yield f"- {part}, {job}: {some[0].check.rpartition('/')[2]}{more} {status}: {why}"


def _first(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]
