"""`halograd demo`: data, training, evaluation, baseline and report, in minutes."""

from __future__ import annotations

from pathlib import Path

from ..comm.boot import launched_size
from ..errors import UserError
from ..local import find_mpiexec, run_ranks
from ..output import progress_bar
from .files import FULL, QUICK, DemoSettings, Files, make_dataset, prepare, replace_run, write_config
from .report import Clock, HeldOutResults, draw_pictures, score_held_out, write_report

__all__ = [
    "FULL",
    "QUICK",
    "DemoSettings",
    "run_demo",
]


def run_demo(out: Path, settings: DemoSettings) -> HeldOutResults:
    """Generate, train on several ranks, evaluate, compare with a logistic regression, and report. Local.

    Parameters
    ----------
    out
        Folder, created if missing. A data set with the same settings is reused, and a finished run is replaced.
    settings
        Sizes, and length of the training.

    Returns
    -------
    HeldOutResults
        Scores and masks of the held-out samples.

    Raises
    ------
    UserError, DataError
        If the user can correct the fault; the message is one line.
    """
    if launched_size() is not None:
        raise UserError("demo: expected to be started alone, got a launcher; it starts its ranks itself")
    mpiexec, files, clock = find_mpiexec(), Files(out), Clock()
    prepare(files)
    with clock.stage("generate"):
        _generate(files, settings)
    kept = write_config(files, settings)
    if kept is not None:
        print(f"the existing configuration is now {kept}")
    with clock.stage("train"):
        headline = _train(mpiexec, files, settings)
    with clock.stage("evaluate"):
        # All samples, because the thresholds are chosen on those of the training.
        arguments = ["evaluate", str(files.run), "--samples", "all", "--predictions", str(files.predictions)]
        # The configuration sets output.timeline, but an evaluation would record a timeline and not write it.
        run_ranks(mpiexec, settings.ranks, [*arguments, "--set", "output.timeline=false"], _quiet)
    with clock.stage("logistic regression"):
        results = score_held_out(files, settings)
    with clock.stage("pictures"):
        draw_pictures(files, results)
    write_report(files, settings, results, headline, clock)
    _summarize(files, results, clock)
    return results


def _generate(files: Files, settings: DemoSettings) -> None:
    print(f"1/4 data set {files.data}", flush=True)
    with progress_bar("blocks", transient=True) as progress:
        written = make_dataset(files.data, settings, progress)
    cells = f"{settings.samples} samples of {settings.resolution} x {settings.resolution} cells"
    print(f"    {cells}{'' if written else ', generated before'}", flush=True)


def _train(mpiexec: str, files: Files, settings: DemoSettings) -> str:
    """Train in a new directory, then replace the finished run; return the line that describes the network."""
    print(f"2/4 training on {settings.ranks} ranks, {settings.sample} samples x {settings.height} blocks", flush=True)
    with progress_bar("epochs", transient=True) as progress:
        done = 0

        def print_progress(line: str) -> None:
            nonlocal done
            if not line.startswith("trained to "):  # names the folder, which is renamed afterwards
                print(f"    {line}", flush=True)
            # Progress is counted by the lines of the job, which is another process.
            done += line.startswith("epoch ")
            progress(done, settings.epochs)

        arguments = ["train", str(files.config), "--set", f"output.directory={files.new_run}"]
        lines = run_ranks(mpiexec, settings.ranks, arguments, print_progress)
    # Only now: a training that fails leaves the finished run as it is.
    replace_run(files.new_run, files.run)
    print("3/4 evaluation, and a logistic regression of the same channels", flush=True)
    return next((line for line in lines if " parameters, " in line), "")


def _quiet(line: str) -> None:
    """Print a line of the evaluation, unless it is the line for all samples."""
    if not line.startswith("all: "):
        print(f"    {line}", flush=True)


def _summarize(files: Files, results: HeldOutResults, clock: Clock) -> None:
    print(f"4/4 report {files.report}\n")
    print(f"{'on held-out simulations':42}{'IoU':>7}{'F1':>7}")
    for score in results.scores:
        print(f"{score.name:42}{score.iou:>7.3f}{score.values['f1'] or 0.0:>7.3f}")
    stages = ", ".join(f"{stage.name} {stage.seconds:.0f}" for stage in clock.stages)
    print(f"\n{clock.total.seconds:.0f} s: {stages}")
    print(f"read {files.report}; edit {files.config} and train again")
