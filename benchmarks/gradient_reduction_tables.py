"""Tables of the gradient reduction benchmark, with the papers' results for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halograd.output import table

__all__ = ["LE", "LEE", "tables"]

#: Lee et al. 2017: speedup of VGG-A on 128 nodes with batch 256 without overlap, and with k = 9, f = 2 (Figure 6).
LEE = {"blocking": 19.92, "best": 62.97}
#: Le et al. 2018, Table 2 [ms]: one GPU, four with plain data parallelism, four with their method. Of ResNet-152,
#: Section 5.3: chunks are 1.07 times faster than plain data parallelism, which is faster than chunks of one layer.
LE: Mapping[str, tuple[float, ...]] = {
    "alexnet": (157.4, 202.7, 167.1),
    "googlenet": (140.9, 163.4, 156.7),
    "vgg16": (345.2, 445.6, 369.1),
}


def tables(result: Mapping[str, Any]) -> list[str]:
    """Return all tables of one network."""
    setting = result["setting"]
    head = (
        f"{result['network']}, {setting['paper']} et al.: batch {setting['batch']} on {setting['nodes']} devices of "
        f"{setting['machine']}, for which {result['ranks']} ranks stand"
    )
    lines = ["", head, "", *_schemes(result), ""]
    lines += _lee(result) if setting["paper"] == "Lee" else _le(result)
    return [*lines, *(_search(result) if "search" in result else [])]


def _ms(seconds: float, result: Mapping[str, Any]) -> str:
    return f"{1e3 * seconds / result['setting']['slow']:.1f}"


def _schemes(result: Mapping[str, Any]) -> list[str]:
    heading = ["scheme", "step", "predicted", "", "exposed", "predicted", "communication", "R", "bytes", "speedup"]
    rows = [["", "[ms]", "[ms]", "", "[ms]", "[ms]", "[ms]", "[%]", "[MB]", ""]]
    slowest = result["schemes"][0]["step"]
    for row in result["schemes"]:
        label = row["scheme"] + (f", {row['node']} ranks per node" if row["node"] > 1 else "")
        times = [_ms(row[key], result) for key in ("exposed", "predicted_exposed", "communication")]
        off = f"{100 * (row['step'] / row['predicted'] - 1):+.1f} %"
        ratio = "-" if row["overlap"] is None else f"{row['overlap']:.1f}"
        sent = f"{row['bytes'] / 1e6:.1f}" + ("" if row["as_predicted"] else " !")
        steps = [_ms(row["step"], result), _ms(row["predicted"], result), off]
        rows.append([label, *steps, *times, ratio, sent, f"{slowest / row['step']:.3f}"])
    return table(heading, rows)


def _row(result: Mapping[str, Any], **settings: Any) -> Mapping[str, Any] | None:
    """Return the row of the first scheme with exactly these settings and one rank per node; None if it is missing."""
    plain = {"first_layers": 0, "chunk": 1, "replicated_dense": 0, "payload": "float32", "deterministic": False}
    for row in result["schemes"]:
        if row["node"] == 1 and all(row["settings"][k] == v for k, v in (plain | settings).items()):
            return row
    return None


def _lee(result: Mapping[str, Any]) -> list[str]:
    """Return the table for Figures 6, 10 and 11 of Lee et al.: speedup over one node, and overlap ratio."""
    alone = result["alone"] * result["setting"]["slow"]
    lines = ["speedup over one node (Figures 6, 10 and 11; theirs is k = 9, f = 2, and without overlap)", ""]
    two = {"name": "two_chunks"}
    lines_of: list[tuple[str, dict[str, Any], str]] = [
        ("no overlap", {"name": "blocking"}, f"{LEE['blocking']}"),
        *(
            (f"k = 9, f = {f}", {**two, "first_layers": 9, "replicated_dense": f}, f"{LEE['best']}" if f == 2 else "")
            for f in (0, 1, 2, 3)
        ),
        *((f"k = {k}, f = 2", {**two, "first_layers": k, "replicated_dense": 2}, "") for k in (3, 6, 12)),
    ]
    rows = []
    for label, settings, theirs in lines_of:
        row = _row(result, **settings)
        if row is not None:
            own, model = alone / row["step"], alone / row["predicted"]
            rows.append([label, f"{own:.1f}", f"{model:.1f}", f"{row['overlap']:.1f}", theirs])
    lines += table(["", "speedup", "predicted", "R [%]", "Lee et al."], rows)
    blocking, best = _row(result, name="blocking"), _row(result, **two, first_layers=9, replicated_dense=2)
    if blocking is not None and best is not None:
        factors = [blocking[key] / best[key] for key in ("step", "predicted")]
        theirs = LEE["best"] / LEE["blocking"]
        lines.append(
            f"two_chunks(9) + replicated_dense(2) over blocking: {factors[0]:.3f}, predicted {factors[1]:.3f} "
            f"({100 * (factors[0] / factors[1] - 1):+.1f} %); theirs {theirs:.2f}"
        )
    return [*lines, ""]


def _le(result: Mapping[str, Any]) -> list[str]:
    """Return the table for Table 2 of Le et al.: one device, four without overlap, four with sums on the host."""
    rows, theirs = [], LE.get(result["network"], ("3.5 s / 10", "", ""))
    seconds = [result["compute"]]
    for settings in ({"name": "blocking"}, {"name": "host_accumulate", "chunk": 1}):
        row = _row(result, **settings)
        seconds.append(float("nan") if row is None else row["step"])
    labels = ("one device", "four, blocking (typical data parallel)", "four, host_accumulate(1) (CGDP)")
    for label, own, their in zip(labels, seconds, theirs):
        rows.append([label, _ms(own, result), str(their)])
    return [*table(["step [ms]", "here", "Le et al."], rows), ""]


def _search(result: Mapping[str, Any]) -> list[str]:
    """Return the choice of Algorithm 1, compared with every fixed size."""
    outcome = result["search"]
    fixed: Mapping[str, float] = outcome["fixed"]
    best = min(fixed, key=lambda size: fixed[size])
    chosen = fixed[str(outcome["chosen"])]
    blocking = _row(result, name="blocking")
    lines = [
        f"{outcome['layers']} layers: Algorithm 1 chose {outcome['chosen']} after {outcome['intervals']} intervals, "
        f"{_ms(chosen, result)} ms, {100 * (chosen / fixed[best] - 1):.1f} % more than the best size, {best}"
    ]
    heading = ["chunk", *fixed]
    rows = [["step [ms]", *(_ms(t, result) for t in fixed.values())]]
    rows.append(["predicted", *(_ms(t, result) for t in outcome["predicted"].values())])
    lines += table(heading, rows)
    if blocking is not None:
        lines.append(
            f"chunk 1 over blocking: {blocking['step'] / fixed['1']:.3f}; chosen over blocking: "
            f"{blocking['step'] / chosen:.3f}"
        )
    return [*lines, ""]
