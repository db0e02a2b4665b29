"""`halograd explain`: why a plan cuts a layer as it does, and the cost of the next best cuts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..documents import check_output
from ..errors import UserError
from ..output import bytes_text, cut_text, idle_text, mebibytes, milliseconds, table, time_text, working
from .options import Cache

if TYPE_CHECKING:
    from ..layers import Strategy
    from ..perfmodel.cost import Prediction
    from ..perfmodel.plans import LayerRecord, Plan
    from ..planning import PlanRequest
    from ..program.program import Program

__all__ = ["explain"]

#: Number of layers that are explained without --layer: those with the longest times.
FEW = 5
#: Number of other cuts of one layer that are simulated.
OTHER_CUTS = 5
#: Fields of a `LayerRecord`, by the term of the step time that they add up to.
TERMS = {
    "kernels": ("forward", "backward"),
    "computed again": ("again",),
    "halos": ("halo_exposed", "packing"),
    "channel sums": ("channel",),
    "statistics": ("statistics",),
    "redistribution": ("redistribution",),
    "gradients": ("allreduce_exposed",),
}


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json", help="What `halograd plan -o` has written.")],
    layers: Annotated[
        list[str] | None, typer.Option("--layer", metavar="LAYER", help="A layer by name; may be given several times.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option("--picture", metavar="STRIP.png", help="Draw the layers, colored by cut, with times.")
    ] = None,
    cache: Cache = None,
    program: Annotated[
        bool, typer.Option("--program", help="List the operations of a step instead, in the order in which they run.")
    ] = False,
    rank: Annotated[
        int, typer.Option("--rank", metavar="R", min=0, help="Rank whose program, or kept memory, is listed.")
    ] = 0,
) -> None:
    """Explain why a plan cuts layers as it does, and what the next best cuts would cost.

    Without --layer, this explains the layers that take longest. For every other cut, the rest of the network is planned
    again and the step is simulated. If the plan computes outputs again in the backward pass, a table has the memory
    that each layer keeps and frees, and the time that its repetition takes.

    \b
    Examples:
      halograd explain plan.json
      halograd explain plan.json --layer conv3_1 --picture strip.png
      halograd explain plan.json --program --rank 3 --layer conv3_1
    """
    from ..perfmodel.plans import Plan

    if image is not None:
        check_output(image, "--picture", ".png")
    plan = Plan.load(path)
    if rank >= plan.ranks:
        raise UserError(f"--rank: expected one of 0 to {plan.ranks - 1}, got {rank}")
    if program:
        print("\n".join(_program(plan, _plan_request(plan, path, cache), rank, layers or ())))
        return
    with working("pricing every cut of every layer") as report:
        explainer = Explainer(plan, _plan_request(plan, path, cache), report)
        chosen = explainer.check_layers(layers or ())
        lines = explainer.text(chosen, bool(layers), rank)
    print("\n".join(lines))
    if image is not None:
        from .pictures import draw_strip

        draw_strip(plan, image)
        print(f"{image}: written")


def _plan_request(plan: Plan, path: Path, cache: Path | None) -> PlanRequest:
    """Build the network and the machine of a plan from its request.

    Raises
    ------
    UserError
        The plan has no request, or the model has changed since.
    """
    from ..planning import PlanRequest

    request = plan.request
    if request is None:
        raise UserError(
            f"plan {path}: expected one with its model and machine, as `halograd plan -o` writes, got one of "
            "Plan.save; run `halograd plan`"
        )
    machine = request.load_machine()
    plan_request = PlanRequest.of(request.model, request.options, request.machine_file, plan.dtype, cache, machine)
    plan.check(plan_request.network, plan.ranks)
    return plan_request


def _program(plan: Plan, plan_request: PlanRequest, rank: int, layers: Sequence[str]) -> Iterator[str]:
    """Yield the program of one rank as lines of text."""
    from ..program.program import lines_of

    for name in layers:
        _check_layer(plan, name)
    return lines_of(_compiled(plan, plan_request, plan.strategy, rank), frozenset(layers) or None)


def _compiled(plan: Plan, plan_request: PlanRequest, strategy: Strategy, rank: int) -> Program:
    """Return the program of one rank under a strategy, with all other settings of the plan."""
    from ..device import as_dtype
    from ..perfmodel.cost import NetworkModel, program_of
    from ..program.program import Target

    overlaps = NetworkModel(plan_request.machine).waits_for_network
    target = Target(plan.batch, plan.ranks, rank, as_dtype(plan.dtype), overlaps=overlaps)
    return program_of(plan_request.network, strategy, target)


def _check_layer(plan: Plan, name: str) -> None:
    if name not in plan.layers:
        near = difflib.get_close_matches(name, plan.layers, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(plan.layers[:6])}, ..."
        raise UserError(f"--layer: expected a layer of {plan.network!r}, got {name!r}; {hint}")


@dataclass(frozen=True)
class OtherCut:
    """Another cut of one layer, with the best plan for the other layers.

    Attributes
    ----------
    parts
        Number of parts of the layer by axis.
    prediction
        Prediction of the step with this cut.
    """

    parts: dict[str, int]
    prediction: Prediction


class Explainer:
    """Predictions of alternatives to a plan. Local.

    Parameters
    ----------
    plan
        Plan with its request.
    plan_request
        Network and machine of the plan.
    report
        Called with a string about the current work.
    """

    def __init__(
        self, plan: Plan, plan_request: PlanRequest, report: Callable[[str], None] = lambda text: None
    ) -> None:
        from ..perfmodel.cost import NetworkModel, Pricing, Training
        from ..perfmodel.cost.network_costs import network_costs
        from ..planning import AHEAD

        assert plan.request is not None
        self.plan, self.plan_request, self.request, self._report = plan, plan_request, plan.request, report
        self.pricing = plan_request.pricing(plan.batch, plan.ranks)
        self.training = Training(plan.dtype, plan.request.slots, ahead=AHEAD)
        # Candidates are ranked with messages of a few ranks, as in a search; `self.pricing` simulates those chosen.
        quick = Pricing(NetworkModel(plan_request.machine, quick=True), self.pricing.times, plan.dtype, best_halo=True)
        arguments = (plan_request.network, plan.batch, plan.ranks, quick, self.training)
        self.costs = network_costs(*arguments, plan.request.full, plan.strategy.bucket_bytes)
        p = plan.prediction
        # The part of the sums that this plan waits for; candidates are compared as if it were the same for all cuts.
        self.exposed = p.allreduce_exposed / p.allreduce_seconds if p.allreduce_seconds else 0.0
        self.problem = self.costs.problem(self.exposed, plan.limit)
        self.chosen = self._simulate(plan.strategy)

    def check_layers(self, layers: Sequence[str]) -> list[str]:
        """Check names of layers and return them; without any, return the layers that take longest."""
        for name in layers:
            _check_layer(self.plan, name)
        if layers:
            return list(dict.fromkeys(layers))
        slowest: dict[object, str] = {}  # the first one of equal layers
        for record in sorted(self.chosen.layers, key=lambda r: -r.seconds):
            slowest.setdefault(_likeness(record), record.name)
        # In the order of the network again.
        few = set(list(slowest.values())[:FEW])
        return [name for name in self.plan.layers if name in few]

    def other_cuts(self, layer: str, count: int = OTHER_CUTS) -> tuple[list[OtherCut], int]:
        """Return `count` good other cuts of a layer by additive costs, fastest step first; and its number of cuts."""
        import numpy as np

        from ..perfmodel.planners import Elimination, NoneFits, next_best

        v = self.costs.names.index(layer)
        chosen = self.costs.indices(self.plan.strategy)
        # The cut of a baseline may not be among the candidates.
        own = chosen[v] if chosen else self._candidate(v)
        # Ranked without the limit of memory, which the plan for each cut below respects.
        ranking = next_best(self.costs.problem(self.exposed), v)
        other_cuts: list[OtherCut] = []
        for c in np.argsort(ranking, kind="stable"):
            if c == own or not np.isfinite(ranking[c]):
                continue
            kept = [np.arange(size) for size in self.problem.sizes]
            # This layer has the cut `c`; all other layers are planned again.
            kept[v] = np.array([c])
            try:
                indices = list(Elimination().plan(self.problem.restricted(kept)).indices)
            except NoneFits:
                continue
            # The restricted problem has one candidate for this layer, with index 0.
            indices[v] = int(c)
            strategy = self._with_plan_options(self.costs.strategy(indices, self.plan.strategy.bucket_bytes))
            other_cuts.append(OtherCut(strategy.parts_of(layer), self._simulate(strategy)))
            if len(other_cuts) == count:
                break
        return sorted(other_cuts, key=lambda r: r.prediction.step_seconds), len(ranking)

    def _candidate(self, v: int) -> int:
        parts = tuple(self.plan.strategy.cuts_of(self.costs.names[v]).values())
        return self.costs.candidates[v].index(parts) if parts in self.costs.candidates[v] else -1

    def _with_plan_options(self, strategy: Strategy) -> Strategy:
        """Return the cuts and halo algorithms of `strategy`, with the plan's other options and reduction scheme.

        Dense layers are replicated only as far as these cuts permit.
        """
        from ..layers.reduction_chunks import replicable_layers
        from ..layers.strategy import AXES

        chosen, scheme = self.plan.strategy, self.plan.strategy.reduction
        layers = {}
        for name, own in strategy.layers.items():
            options = chosen.layers.get(name, {}).items()
            layers[name] = {**own, **{key: value for key, value in options if key not in (*AXES, "halo")}}
        strategy = replace(strategy, layers=layers, options=chosen.options)
        most = len(replicable_layers(strategy, self.plan_request.network, self.plan.batch))
        return replace(strategy, reduction=replace(scheme, replicated_dense=min(most, scheme.replicated_dense)))

    def _simulate(self, strategy: Strategy) -> Prediction:
        from ..perfmodel.cost import simulate

        plan = self.plan
        return simulate(self.plan_request.network, strategy, plan.batch, self.pricing, self.training, plan.ranks)

    # -- output --------------------------------------------------------------------------------

    def text(self, layers: Sequence[str], details: bool, rank: int = 0) -> list[str]:
        """Return the whole explanation, in lines; `rank` is the one whose kept memory is listed."""
        from ..planning import source_of

        plan = self.plan
        lines = [
            f"{plan.network} on {plan.ranks} ranks of {plan.machine}, batch {plan.batch}: "
            f"a step takes {time_text(plan.step_seconds)}",
            f"planner {plan.planner}; kernel times: {self.request.kernel_times}",
            *idle_text(plan),
        ]
        now = self.chosen.step_seconds
        # Layers may have been measured since the plan was made.
        if abs(now - plan.step_seconds) > 0.02 * plan.step_seconds:
            source = source_of(self.pricing.times, self.plan_request.machine)
            lines.append(f"by current kernel times ({source}) it takes {time_text(now)}; the following uses these")
        if plan.strategy.widens:
            lines.append(self._margins())
        if plan.strategy.recomputes:
            self._report("compiling the step without recomputation")
            lines += ["", *self._recomputation(rank, frozenset(layers if details else plan.layers))]
        for name in layers:
            self._report(f"planning around the cuts of {name}")
            lines += ["", *self._of_layer(name, OTHER_CUTS if details else 1)]
        if not details:
            lines += [
                "",
                f"These layers take longest; --layer NAME shows the {OTHER_CUTS} next best cuts of any other.",
            ]
        return lines

    def _margins(self) -> str:
        """Return a line on the layers that compute margins, with the time of a step that exchanges all halos."""
        plan, strategy = self.plan, self.plan.strategy
        wide = [name for name in plan.layers if strategy.options_of(name).get("wide")]
        before = self._simulate(strategy.exchanging_all).step_seconds
        return (
            f"the outputs of {len(wide)} of {len(plan.layers)} layers are wide (computed with the margin that the next "
            f"layers need); with all halos exchanged a step takes {time_text(before)}"
        )

    def _recomputation(self, rank: int, layers: Collection[str]) -> Iterator[str]:
        """Yield lines on what these layers keep and compute again on a rank, and on the totals of the rank's step."""
        from ..perfmodel.cost.kept import Kept, kept_by_layers

        plan, strategy = self.plan, self.plan.strategy
        program = _compiled(plan, self.plan_request, strategy, rank)
        held, none = kept_by_layers(program), Kept()
        rows = [["", "[MiB]", "[MiB]", "[ms]"]]
        for record in self.chosen.layers:
            own = held.get(record.name, none)
            if record.name in layers and (own.kept or own.again or record.again):
                rows.append([record.name, mebibytes(own.kept), mebibytes(own.again), milliseconds(record.again)])
        sums = sum(own.kept for own in held.values()), sum(own.again for own in held.values())
        rows.append(["all layers", *map(mebibytes, sums), milliseconds(self.chosen.total("again"))])
        yield f"kept for the backward pass, or computed again in it, on rank {rank}:"
        yield from (f"  {line}" for line in table(["layer", "kept |", "again", "time"], rows))
        keeping = strategy.keeping_all
        size, largest = program.placement.size, _compiled(plan, self.plan_request, keeping, rank).placement.size
        now, before = self.chosen.step_seconds, self._simulate(keeping).step_seconds
        yield f"  arena {bytes_text(size)}, {bytes_text(largest)} if all were kept ({_change(size, largest)})"
        yield f"  step {time_text(now)}, {time_text(before)} if all were kept ({_change(now, before)})"

    def _of_layer(self, name: str, count: int) -> list[str]:
        record = next(r for r in self.chosen.layers if r.name == name)
        other_cuts, choices = self.other_cuts(name, count)
        halo = f", halos: {record.halo_algorithm}" if record.halo_algorithm else ""
        share = record.seconds / self.chosen.step_seconds if self.chosen.step_seconds else 0.0
        equal = sum(_likeness(r) == _likeness(record) for r in self.chosen.layers) - 1
        more = f" and {equal} like it" if equal else ""
        took = f"{time_text(record.seconds)}{' each' if equal else ''}, {share:.1%} of the step"
        sent = f", {record.messages} messages of {bytes_text(record.sent)} sent" if record.messages else ""
        lines = [
            f"{name}{more} ({record.kind}): {cut_text(record.parts)} on {record.ranks} ranks{halo}",
            f"  {took}; output {bytes_text(record.output)} per rank{sent}",
            f"  of it {_terms(record)}",
        ]
        if not other_cuts:
            return [*lines, f"  no other cut of it fits (of {choices} examined)"]
        lines += [f"  {choices} cuts were examined; the rest of the network is planned for each of the next best:"]
        lines += [f"    {line}" for line in self._comparison(other_cuts)]
        if other_cuts[0].prediction.step_seconds < self.chosen.step_seconds:
            lines.append(
                "    (planners minimize sums over layers without overlap, so they did not find the faster cut)"
            )
        return lines

    def _comparison(self, other_cuts: Sequence[OtherCut]) -> list[str]:
        """Return lines with the step times under the other cuts, and the terms that differ most."""
        heading = ["cut", "step [ms]", "more [ms]", "", "memory"]
        base = self.chosen.step_seconds
        rows = []
        for other_cut in [OtherCut({}, self.chosen), *other_cuts]:
            p = other_cut.prediction
            more = p.step_seconds - base
            own = p is self.chosen
            rows.append(
                [
                    "the plan" if own else cut_text(other_cut.parts),
                    milliseconds(p.step_seconds),
                    "" if own else f"{1e3 * more:+.3f}",
                    "" if own else f"{more / base:+.1%}" if base else "",
                    bytes_text(p.memory_bytes),
                    "" if own else self._reasons(p),
                ]
            )
        # Reasons have any length, so they follow after the aligned columns.
        reasons = ["because of [ms]", *(row.pop() for row in rows)]
        return [f"{line}  {reason}".rstrip() for line, reason in zip(table(heading, rows), reasons)]

    def _reasons(self, other: Prediction) -> str:
        """Return the terms of the step time that differ most from those of the plan, as a string."""
        differences = {
            term: sum(other.total(f) - self.chosen.total(f) for f in fields) for term, fields in TERMS.items()
        }
        differences["update"] = other.update_seconds - self.chosen.update_seconds
        largest = sorted(differences.items(), key=lambda item: -abs(item[1]))
        # Without terms that are printed as 0.000, or are less than 2 % of the largest.
        named = [f"{term} {1e3 * d:+.3f}" for term, d in largest if abs(d) >= 0.0005e-3 + 0.02 * abs(largest[0][1])]
        return ", ".join(named[:4]) or "no difference"


def _change(value: float, base: float) -> str:
    return f"{value / base - 1:+.1%}" if base else "-"


def _likeness(record: LayerRecord) -> object:
    """Return a key that is equal for layers of equal kind, cut, size and times, apart from sums of gradients."""
    times = record.forward, record.backward, record.again, record.halo
    return record.kind, tuple(record.parts.items()), *times, record.output


def _terms(record: LayerRecord) -> str:
    values = {term: sum(getattr(record, f) for f in fields) for term, fields in TERMS.items()}
    return ", ".join(f"{term} {time_text(value)}" for term, value in values.items() if value)
