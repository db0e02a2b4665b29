"""`halograd predict`: the predicted time of a step on a machine, for several numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..documents import check_output
from ..errors import UserError
from ..output import bytes_text, time_text, working
from .options import (
    AsJson,
    Memory,
    ModelOptions,
    check_counts,
    parse_grid,
    parse_ranks,
)
from .scaling import Predictor, Series, parts_of

__all__ = ["predict"]


def predict(
    what: ModelOptions,
    ranks: Annotated[str, typer.Option(metavar="P,...", help="Numbers of ranks: 16, or 4,8,...,2048.")],
    batch: Annotated[
        int, typer.Option(help="Samples of a global batch; for weak scaling, on the fewest ranks.")
    ],
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=PARTS,...", help="Cut of all layers; without sample, the other ranks cut the samples."
        ),
    ] = None,
    planner: Annotated[
        str | None, typer.Option(help="Planner or baseline, as of `halograd plan`; default: elimination.")
    ] = None,
    memory: Memory = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the curves.")] = None,
) -> None:
    """Predict the time of a training step without running it: strong and weak scaling.

    Strong scaling keeps the batch, weak scaling the samples per rank. Every number of ranks gets its own plan, or the
    cut of --grid. With one number of ranks, the command prints the parts of the step.

    \b
    Examples:
      halograd predict mesh_2k --machine lassen --ranks 4,8,...,2048 --batch 4 --plot scaling.png
      halograd predict mesh_2k --machine lassen --ranks 16 --batch 2 --grid sample=2,height=4,width=2
      halograd predict resnet50 --machine dgx-h100 --ranks 8,16,32 --batch 1024 --planner data --json
    """
    check_counts(batch=batch)
    from ..planning import check_planner, parse_memory

    if grid is not None and planner is not None:
        raise UserError("--grid: expected no --planner with it, as nothing is planned, got one; remove either")
    planner = planner or "elimination"
    check_planner(planner)
    counts, limit = parse_ranks(ranks), parse_memory(memory)
    cut = None if grid is None else parse_grid(grid)
    if plot is not None:
        # Before predictions, which may take minutes.
        check_output(plot, "--plot", ".png")
    predictor = Predictor(what.plan_request(), what.training(), cut, planner, limit)
    if len(counts) == 1:
        _single(predictor, counts[0], batch, as_json, plot)
        return
    # `predictor.report` becomes the function that changes this text: each prediction is shown when it begins.
    with working("predicting") as predictor.report:
        series = [Series.run(kind, predictor, counts, batch) for kind in ("strong", "weak")]
    if plot is not None:
        from .pictures import draw_scaling

        draw_scaling(series, predictor.title(), plot)
    if as_json:
        print(json.dumps({**predictor.as_dict(), **{s.kind: s.as_list() for s in series}}), flush=True)
        return
    lines = [predictor.title(), f"kernel times: {predictor.source}"]
    for s in series:
        lines += ["", *s.text()]
    print("\n".join(lines))
    if plot is not None:
        print(f"{plot}: written")


def _single(predictor: Predictor, ranks: int, batch: int, as_json: bool, plot: Path | None) -> None:
    """Print the prediction for one number of ranks, with the parts of the step."""
    if plot is not None:
        raise UserError("--plot: expected several numbers of ranks for a curve, got one; write --ranks 4,8,...,64")
    point = predictor.point(ranks, batch)
    p = point.prediction
    if p is None:
        # In a series this is one row, here it is the result of the command.
        raise UserError(point.fault)
    if as_json:
        print(json.dumps({**predictor.as_dict(), **point.as_dict(), "prediction": p.as_dict()}), flush=True)
        return
    print(f"{predictor.title()}: {ranks} ranks, batch {batch}\nkernel times: {predictor.source}\n")
    print(f"step            {time_text(p.step_seconds)} ({p.samples_per_second:.4g} samples/s)")
    for name, seconds in parts_of(p).items():
        if seconds:
            print(f"  {name.replace('_exposed', ', waited'):18}{time_text(seconds)}")
    print(f"memory          {bytes_text(p.memory_bytes)} per rank{'' if point.fits else ': does not fit'}")
    for kind, (messages, nbytes) in p.traffic.items():
        print(f"  {kind:18}{messages} messages, {bytes_text(nbytes)} sent per step by the rank that sends most")
