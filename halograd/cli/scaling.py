"""Predictions for many numbers of ranks: one by one, and as series of strong and weak scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..output import mebibytes, milliseconds, table
from .options import strategy_of_grid

if TYPE_CHECKING:
    from ..perfmodel.cost import Prediction, Training
    from ..planning import PlanRequest

__all__ = ["Point", "Predictor", "Series", "parts_of"]

#: Relative difference of times above which a table names faster predictions.
VISIBLE = 1e-3


@dataclass(frozen=True)
class Point:
    """Prediction for one number of ranks and one batch.

    Attributes
    ----------
    ranks, batch
        Numbers of ranks and samples.
    prediction
        Prediction of a step; None if nothing fits.
    strategy
        Name of the planner or baseline, or the grid.
    fits
        Whether the step fits into memory.
    fault
        Reason why there is no prediction.
    baselines
        Time of a step [s] and whether it fits, by name.
    """

    ranks: int
    batch: int
    prediction: Prediction | None
    strategy: str = ""
    fits: bool = True
    fault: str = ""
    baselines: Mapping[str, tuple[float, bool]] | None = None

    @property
    def seconds(self) -> float | None:
        """Time of a step [s]; None without a prediction."""
        return None if self.prediction is None else self.prediction.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON; times in [s], memory in [B]."""
        p = self.prediction
        record: dict[str, Any] = {"ranks": self.ranks, "batch": self.batch, "step_seconds": self.seconds}
        record |= {"strategy": self.strategy, "fits": self.fits}
        if p is None:
            return {**record, "fault": self.fault}
        record |= {"samples_per_second": p.samples_per_second, "memory_bytes": p.memory_bytes, "parts": parts_of(p)}
        rows = self.baselines or {}
        record["baselines"] = {name: {"step_seconds": t, "fits": fits} for name, (t, fits) in rows.items()}
        return record


class Predictor:
    """Predictor for any number of ranks and samples: under `grid`, or under plans by `planner` within `limit` [B]."""

    def __init__(
        self,
        plan_request: PlanRequest,
        training: Training,
        grid: Mapping[str, int] | None,
        planner: str,
        limit: float | None,
    ) -> None:
        self.plan_request, self.training, self.grid, self.planner, self.limit = (
            plan_request,
            training,
            grid,
            planner,
            limit,
        )
        self.source = ""
        self.report: Callable[[str], None] = lambda text: None
        self._known: dict[tuple[int, int], Point] = {}

    def title(self) -> str:
        cut = self.planner if self.grid is None else "grid " + ",".join(f"{k}={n}" for k, n in self.grid.items())
        return f"{self.plan_request.network.name} on {self.plan_request.machine.name}, {self.plan_request.dtype}, {cut}"

    def as_dict(self) -> dict[str, Any]:
        plan_request = self.plan_request
        return {
            "network": plan_request.network.name,
            "model": plan_request.model,
            "options": dict(plan_request.options),
            "machine": plan_request.machine.name,
            "dtype": plan_request.dtype,
            "optimizer_arrays": self.training.slots,
            "planner": self.planner if self.grid is None else None,
            "grid": self.grid,
            "kernel_times": self.source,
            "units": {"step_seconds": "s", "memory_bytes": "B", "parts": "s"},
        }

    def point(self, ranks: int, batch: int) -> Point:
        """Return the prediction for this number of ranks and this batch.

        Its time is None if there is no plan; `fault` is the reason. With a given grid it always has a time.
        """
        # Strong and weak scaling have the first point in common.
        key = (ranks, batch)
        if key not in self._known:
            self.report(f"predicting {ranks} ranks, batch {batch}")
            self._known[key] = self._planned(*key) if self.grid is None else self._cut(*key)
        return self._known[key]

    def _cut(self, ranks: int, batch: int) -> Point:
        from ..perfmodel.cost import NetworkModel, Pricing, simulate
        from ..planning import source_of

        plan_request = self.plan_request
        assert self.grid is not None
        strategy = strategy_of_grid(plan_request.network, self.grid, batch, ranks)
        # Halo algorithms are those that a run chooses by itself; only a plan sets the cheapest.
        pricing = Pricing(NetworkModel(plan_request.machine), plan_request.times(batch, ranks), plan_request.dtype)
        simulation = simulate(plan_request.network, strategy, batch, pricing, self.training, ranks)
        self.source = source_of(pricing.times, plan_request.machine)
        limit = plan_request.machine.memory if self.limit is None else self.limit
        return Point(ranks, batch, simulation, "grid", simulation.memory_bytes <= limit)

    def _planned(self, ranks: int, batch: int) -> Point:
        from ..perfmodel.predict import Planning
        from ..planning import baselines_of, make_plan

        planning = Planning(self.planner, self.limit, training=self.training)
        try:
            plan = make_plan(self.plan_request, batch, ranks, planning)
        except UserError as error:
            # A series goes on: the plan may fit on more ranks.
            return Point(ranks, batch, None, fits=False, fault=str(error))
        # The output names one source, that of the last prediction.
        self.source = plan.kernel_times
        rows = {a.name: (a.step_seconds, a.fits) for a in baselines_of(self.plan_request, plan)}
        return Point(ranks, batch, plan.prediction, plan.planner, baselines=rows)


@dataclass(frozen=True)
class Series:
    """Predictions for increasing numbers of ranks.

    Attributes
    ----------
    kind
        ``"strong"``: constant batch; ``"weak"``: the batch grows with the ranks.
    points
        Predictions in order of ranks.
    """

    kind: str
    points: tuple[Point, ...]

    @classmethod
    def run(cls, kind: str, predictor: Predictor, ranks: Sequence[int], batch: int) -> Series:
        """Predict for each number of ranks; `batch` is the batch on the first of these numbers.

        Raises
        ------
        UserError
            Strong scaling: nothing fits on any number of ranks. Weak scaling: the samples per rank would not be a whole
            number.
        """
        points = [predictor.point(p, _batch(kind, batch, ranks[0], p)) for p in ranks]
        if kind == "strong" and all(point.prediction is None for point in points):
            raise UserError(points[-1].fault)
        return cls(kind, tuple(points))

    def reference(self) -> Point | None:
        """Return the prediction with the fewest ranks that fits into memory; None if there is none."""
        return next((p for p in self.points if p.prediction is not None and p.fits), None)

    def efficiency(self, point: Point) -> tuple[float, float] | None:
        """Return the speed-up over :meth:`reference`, in samples per second, and its ratio to the ideal speed-up; None
        without a prediction of either.
        """
        first = self.reference()
        if first is None or first.prediction is None or point.prediction is None:
            return None
        speed_up = point.prediction.samples_per_second / first.prediction.samples_per_second
        # The ideal speed-up is the ratio of ranks, for strong and weak scaling.
        return speed_up, speed_up * first.ranks / point.ranks

    def faster_on(self, point: Point) -> int | None:
        """Return on how many fewer ranks a step of the same batch is fastest, if it is faster there; else None."""
        if point.seconds is None:
            return None
        fewer = [p for p in self.points if p.ranks < point.ranks and p.batch == point.batch and p.fits]
        steps = {p.ranks: p.seconds for p in fewer if p.seconds is not None}
        ranks = min(steps, key=lambda count: steps[count], default=None)
        return ranks if ranks is not None and steps[ranks] < (1 - VISIBLE) * point.seconds else None

    def as_list(self) -> list[dict[str, Any]]:
        """Return the predictions as plain data, for JSON, with speed-up and efficiency."""
        rows = []
        for point in self.points:
            gain = self.efficiency(point)
            more = {} if gain is None else {"speed_up": gain[0], "efficiency": gain[1]}
            rows.append({**point.as_dict(), **more})
        return rows

    def text(self) -> list[str]:
        """Return the predictions as lines of a table."""
        names = list(dict.fromkeys(name for p in self.points for name in p.baselines or ()))
        heading = ["ranks", "batch", "step", "samples", "speed-up", "efficiency", "memory", *names, ""]
        rows = [["", "", "[ms]", "[1/s]", "", "", "[MiB]", *["[ms]"] * len(names), ""]]
        for point in self.points:
            p, gain = point.prediction, self.efficiency(point)
            row = [str(point.ranks), str(point.batch)]
            if p is None:
                brief = point.fault.removeprefix("plan: ").partition(";")[0]  # without the remedies
                # The columns from step to memory, and of the baselines, stay empty.
                rows.append([*row, *[""] * (5 + len(names)), f"nothing fits: {brief}"])
                continue
            row += [milliseconds(p.step_seconds), f"{p.samples_per_second:.4g}"]
            row += ["", ""] if gain is None else [f"{gain[0]:.2f} x", f"{gain[1]:.0%}"]
            row.append(mebibytes(p.memory_bytes))
            for name in names:
                row.append(_bracketed(point.baselines, name))
            faster, remarks = self.faster_on(point), [] if point.fits else ["does not fit"]
            remarks += [] if faster is None else [f"fewer ranks are faster: {faster}"]
            rows.append([*row, ", ".join(remarks)])
        what = {"strong": "strong scaling: same batch", "weak": "weak scaling: same samples per rank"}[self.kind]
        lines = [what, *table(heading, rows, left=0)]
        if any(not fits for p in self.points for _, fits in (p.baselines or {}).values()):
            lines.append("(in brackets: does not fit into memory)")
        return lines


def _bracketed(baselines: Mapping[str, tuple[float, bool]] | None, name: str) -> str:
    """Return the time of a step, in brackets if it does not fit; empty if there is none."""
    if name not in (baselines or {}):
        return ""
    seconds, fits = (baselines or {})[name]
    return milliseconds(seconds) if fits else f"({milliseconds(seconds)})"


def parts_of(p: Prediction) -> dict[str, float]:
    """Return the parts of a step [s]; ``..._exposed`` is the wait within the full time of halos or gradient sums."""
    terms = ("forward", "backward", "halo", "halo_exposed", "channel", "statistics", "redistribution", "packing")
    parts = {term: p.total(term) for term in terms}
    parts |= {"again": p.total("again")} if p.total("again") else {}
    return {
        **parts,
        "allreduce": p.allreduce_seconds,
        "allreduce_exposed": p.allreduce_exposed,
        "update": p.update_seconds,
    }


def _batch(kind: str, batch: int, first: int, ranks: int) -> int:
    if kind == "strong":
        return batch
    if batch * ranks % first:
        raise UserError(
            f"--batch: expected the same samples per rank to be possible on {first} and {ranks} ranks, got {batch} on "
            f"{first}; use a multiple of {first}"
        )
    return batch * ranks // first
