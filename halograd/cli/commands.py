"""The commands and their help. Imports are inside the commands, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .explaining import explain
from .options import PredictionOptions, Several, grouped
from .planning import plan
from .predicting import predict
from .profiling import allreduce, profile
from .submitting import submit

__all__ = ["app"]

app = typer.Typer(
    name="halograd",
    help="Train convolutional networks on samples that do not fit, or do not scale, on one device per sample.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
generators = typer.Typer(help="Make a data set.", rich_markup_mode=None)
app.add_typer(generators, name="generate")
data_files = typer.Typer(help="Change files of data and of predictions.", rich_markup_mode=None)
app.add_typer(data_files, name="data")
bench = typer.Typer(help="Measure what the library does on this machine.", rich_markup_mode=None)
app.add_typer(bench, name="bench")
bench.command()(allreduce)
for command in (profile, plan, explain, predict, submit):
    app.command()(grouped(command))

Sets = Annotated[
    Several,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the configuration; may be given several times."),
]
Threads = Annotated[int | None, typer.Option(help="Threads per rank; the same as --set backend.threads=N.")]
Configuration = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration of the run.")]


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from ..version import __version__

        typer.echo(f"halograd {__version__}")
        raise typer.Exit


@app.command()
def doctor() -> int:
    """Check this machine, and print whether training can run.

    Exit code 1 if it cannot; the report shows a remedy for each missing part.

    \b
    Examples:
      halograd doctor
      mpiexec -n 4 halograd doctor
    """
    from .doctor import examine

    return examine()


@app.command("try-split", hidden=True)
def try_split(job: Path, result: Path) -> None:
    """Run one of the jobs of `halograd plan --cores`."""
    from ..local import try_split as run

    run(job, result)


@generators.command("mesh-tangling")
def mesh_tangling(
    out: Annotated[Path, typer.Argument(metavar="OUT.h5", help="The HDF5 file to write.")],
    resolution: Annotated[int, typer.Option(help="Cells per axis, up to 2048.")] = 256,
    samples: Annotated[int, typer.Option(help="Number of samples.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
) -> None:
    """Generate Lagrangian meshes in an unsteady flow: 18 channels, and a mask of the cells about to tangle.

    \b
    Example:
      halograd generate mesh-tangling mesh.h5 --resolution 256 --samples 32 --seed 1
    """
    if not _alone():
        return
    from ..data.mesh_tangling import generate
    from ..output import progress_bar

    with progress_bar("blocks") as progress:
        generate(out, resolution, samples, seed, progress=progress)
    size = out.stat().st_size / 2**20
    print(f"{out}: {samples} samples of {resolution} x {resolution} cells, seed {seed}, {size:.1f} MiB", flush=True)


def _alone() -> bool:
    """Return whether this process is to run a command for one process: it is rank 0 of a job, or has no launcher."""
    from ..comm.boot import launched_size

    # Without a launcher MPI is not imported, and so not initialized: login nodes may not allow it.
    if launched_size() is None:
        return True
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank == 0


@data_files.command()
def join(
    out: Annotated[list[Path], typer.Argument(metavar="OUT...", help="Files or folders that `halograd apply` wrote.")],
) -> None:
    """Copy the parts of several ranks into the file of predictions that refers to them, and remove them.

    \b
    Example:
      halograd data join predicted.h5
    """
    if not _alone():
        return
    from ..data.writers import join as copy

    for path in [file for own in out for file in (sorted(own.rglob("*.h5")) if own.is_dir() else [own])]:
        # A folder also has the parts themselves, in folders NAME.parts, which `join` reads and removes.
        if not any(parent.name.endswith(".parts") for parent in path.parents):
            print(f"{path}: {'joined' if copy(path) else 'has no parts'}", flush=True)


@data_files.command("repack")
def repack_file(
    source: Annotated[Path, typer.Argument(metavar="DATA.h5", help="An HDF5 or netCDF-4 file.")],
    out: Annotated[Path, typer.Argument(metavar="NEW.h5", help="The copy.")],
    chunk: Annotated[
        list[str], typer.Option(metavar="DATASET=SHAPE", help="Shape of the chunks of a dataset; repeatable.")
    ],
) -> None:
    """Copy a file with other chunks of some datasets.

    A run that warns of slow chunks prints this command for its file.

    \b
    Example:
      halograd data repack data.h5 new.h5 --chunk inputs=1x128x128x4
    """
    if not _alone():
        return
    from ..data.repack import repack
    from ..errors import UserError

    chunks = {}
    for text in chunk:
        # From the right, because the name of a dataset may contain =.
        name, _, shape = text.rpartition("=")
        if not name or not all(part.isdecimal() for part in shape.split("x")):
            raise UserError(f"--chunk: expected DATASET=SHAPE, such as inputs=1x128x128x4, got {text!r}")
        chunks[name] = [int(part) for part in shape.split("x")]
    repack(source, out, chunks)
    print(f"{out}: {source} with other chunks of {', '.join(chunks)}", flush=True)


@app.command()
def train(
    config: Configuration,
    sets: Sets = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest checkpoint, on any number of ranks; from the beginning if there is none.",
        ),
    ] = False,
    threads: Threads = None,
    init: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.safetensors", help="Begin with these weights; the same as --set training.init=FILE."
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Begin with parameters and optimizer of another run; as --set training.init_from=RUN."
        ),
    ] = None,
) -> int:
    """Train a network from a configuration; log, checkpoints and timeline go to its output.directory.

    SIGUSR1 or SIGTERM to any rank writes a checkpoint after the next step; exit code 75 (continue with --resume).

    \b
    Examples:
      halograd train mesh.toml
      mpiexec -n 4 halograd train mesh.toml --set strategy.height=2 --set training.epochs=20
      mpiexec -n 2 halograd train mesh.toml --set strategy.height=1 --resume
      mpiexec -n 4 halograd train mesh.toml --set strategy=auto
      mpiexec -n 16 halograd train mesh.toml --set strategy.file=plan.json
      mpiexec -n 4 halograd train flowers.toml --init resnet50.safetensors --set 'training.init_fresh=["dense"]'
    """
    from ..auto import plan_run, rank_schemes_of
    from ..documents import score_text, to_toml
    from ..training.run import train as run
    from ..training.signals import CHECKPOINTED

    overrides = _overrides(sets, threads)
    if init is not None:
        # In quotes: a path such as 1e3 would be read as a number.
        overrides.append(f"training.init={to_toml(str(init))}")
    if init_from is not None:
        overrides.append(f"training.init_from={to_toml(str(init_from))}")
    # Planners are arguments, because they import `training`, which therefore does not import them.
    result = run(config, overrides, resume, planner=plan_run, ranker=rank_schemes_of)
    if result["stopped"] is not None:
        print(f"stopped after step {result['steps']} ({result['stopped']}); go on with --resume", flush=True)
        return CHECKPOINTED
    done = "trained" if result["diverged"] is None else "diverged, not trained,"
    best, folder = result["best"], Path(result["directory"])
    there = [name for name in ("log.jsonl", "checkpoints") if (folder / name).exists()]
    named = ": best.h5" if (folder / "checkpoints" / "best.h5").exists() else ""
    best_text = ""
    # Step 0: no validation has a score.
    if best["step"]:
        best_text = f" (best {best['name']} {score_text(best['value'])}, of step {best['step']}{named})"
    print(f"{done} to step {result['steps']}; {folder} holds {' and '.join(there) or 'nothing'}{best_text}")
    return 0


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, a checkpoint, or a configuration.")],
    sets: Sets = None,
    samples: Annotated[str, typer.Option(help="validation (those held out), training or all.")] = "validation",
    predictions: Annotated[
        Path | None, typer.Option(metavar="FILE.h5", help="Write predictions and targets to this file.")
    ] = None,
    details: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write confusion, scores by class and calibration to this file."),
    ] = None,
    threads: Threads = None,
) -> None:
    """Print loss and metrics of a trained network, on any number of ranks.

    \b
    Examples:
      halograd evaluate runs/mesh
      mpiexec -n 2 halograd evaluate runs/mesh --set strategy.height=2 --predictions predicted.h5
      halograd evaluate runs/mesh --set data.path=large.h5 --samples all
      halograd evaluate runs/mesh --details runs/mesh/evaluation.json && halograd report runs/mesh
    """
    from ..auto import plan_run
    from ..training.trained import evaluate as run_evaluation

    run_evaluation(run, _overrides(sets, threads), samples, predictions, planner=plan_run, details=details)


@app.command()
@grouped
def apply(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, a checkpoint, or a configuration.")],
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="Files, patterns or folders with inputs.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="File or folder of the predictions.")],
    how: PredictionOptions,
    sets: Sets = None,
    threads: Threads = None,
) -> None:
    """Predict data without labels with a trained network, on any number of ranks.

    The number and the size of samples may differ from training: resolution, batch and cut follow from them and from
    the number of ranks. Each rank writes its own blocks; with several ranks, an OUT of HDF5 is a
    virtual file over these parts. If samples differ in size, OUT is a folder with a file for each of DATA. The same
    command continues a job that was interrupted.

    \b
    Examples:
      halograd apply runs/mesh new.h5 -o predicted.h5 --what classes
      mpiexec -n 4 halograd apply runs/mesh 'new/*.h5' -o out.h5 --set strategy.height=4
      mpiexec -n 4 halograd apply runs/organs patients -o predicted --what classes --flips height,width --one-file
      mpiexec -n 4 halograd apply runs/organs scan.h5 -o predicted.h5 --window 128,128,128 --overlap 0.5
      halograd apply runs/ocean states.nc -o forecast.nc --rollout 12
      halograd apply runs/mesh new.h5 -o predicted --format npy.py:Npy
    """
    from ..auto import plan_run
    from ..comm.boot import boot
    from ..output import progress_bar
    from ..training.trained import apply as predict

    world = boot()
    with progress_bar("samples", world.rank == 0) as progress:
        sets, written = _overrides(sets, threads), how.writer
        parts = how.extents, how.overlap, how.rollout
        result = predict(run, data, out, sets, how.what, world, plan_run, progress, written, how.axes, *parts)
    if world.rank == 0:
        # Samples that an interrupted job had computed already.
        before = result["samples"] - result["computed"]
        more = f", {before} of them before" if before else ""
        if result["settings"]:
            print(f"for these data and ranks: {' '.join(result['settings'])}")
        if "windows" in result:
            # 0.5 is the default of `Slide`.
            overlap = 0.5 if how.overlap is None else how.overlap
            print(f"{result['windows']} windows of {how.window}, overlap {overlap:g}")
        print(f"{out}: {result['samples']} samples{more}, by step {result['step']}", flush=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, a checkpoint, or a configuration.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    to: Annotated[str, typer.Option("--to", help="onnx, or safetensors: weights alone, as torch names them.")] = "onnx",
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Include the normalization, so that inputs are data as on disk.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Write a trained network, as of its last checkpoint, for other programs.

    \b
    Examples:
      halograd export runs/mesh mesh.onnx --normalize
      halograd export runs/mesh mesh.onnx --set model.resolution=2048
      halograd export runs/flowers flowers.safetensors --to safetensors
    """
    if not _alone():
        return
    from ..exporting import export_run

    step = export_run(run, to, out, _overrides(sets, None), normalize)
    print(f"{out}: {to} of step {step}", flush=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of data set, configuration, run and report.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Tiny: only checks that everything works here.")] = False,
) -> None:
    """Make a data set, train on 4 MPI ranks, evaluate on held-out simulations, and write a report.

    The command starts its ranks itself. A second call reuses the data set and replaces the run.

    \b
    Examples:
      halograd demo
      halograd demo --quick --out /tmp/demo
    """
    from ..demo import FULL, QUICK, run_demo

    run_demo(out, QUICK if quick else FULL)


@app.command()
def status(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run and line, for scripts.")] = False,
) -> int:
    """Print the progress, speed, remaining time, last checkpoint and overlap ratio of runs, from their logs.

    A run may still be running, on any machine: the command reads its directory only.

    \b
    Examples:
      halograd status runs/mesh
      watch halograd status runs/*
    """
    import json
    import sys

    from ..errors import UserError
    from ..report.status import TAIL, read_record, status_of, status_text

    code = 0
    for run in runs:
        try:
            run_status = status_of(read_record(run, TAIL))
        except UserError as error:
            # Of several runs, the others are still printed.
            if len(runs) == 1:
                raise
            print(f"halograd: error: {error}", file=sys.stderr)
            # As for other user errors (`USER_MISTAKE` in run.py).
            code = 2
        else:
            print(json.dumps(run_status.as_dict()) if as_json else "\n".join(status_text(run_status)))
    return code


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page to write; report.html of the run if left out.")
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.h5", help="What `evaluate --predictions` wrote; predictions.h5 of the run if left out."
        ),
    ] = None,
    details: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="What `evaluate --details` wrote; evaluation.json of the run if left out."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: curves, predicted against measured, timeline, masks.

    \b
    Examples:
      halograd report runs/mesh
      mpiexec -n 4 halograd evaluate runs/mesh --predictions runs/mesh/predictions.h5 && halograd report runs/mesh
    """
    import mpi4py

    mpi4py.rc.initialize = False  # login nodes may not allow it
    from ..report.page import write_page
    from ..report.status import read_record

    path = run / "report.html" if out is None else out
    left_out = write_page(read_record(run), path, predictions, details)
    for line in left_out:
        print(f"without {line}")
    print(f"wrote {path}")


def _overrides(sets: Several, threads: int | None) -> list[str]:
    return [*(sets or []), *([] if threads is None else [f"backend.threads={threads}"])]
