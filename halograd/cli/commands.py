"""The commands and their help. What a command needs is imported when it is called: help must be instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halograd.cli.benching import allreduce
from halograd.cli.explaining import explain
from halograd.cli.planning import plan
from halograd.cli.predicting import predict
from halograd.cli.profiling import profile
from halograd.cli.submitting import submit
from halograd.cli.watching import report, status

__all__ = ["app"]

app = typer.Typer(
    name="halograd",
    help="Train convolutional networks on samples that do not fit, or do not scale, on one device per sample.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
generate = typer.Typer(help="Make a data set.", rich_markup_mode=None)
app.add_typer(generate, name="generate")
bench = typer.Typer(help="Measure what the library does on this machine.", rich_markup_mode=None)
app.add_typer(bench, name="bench")
bench.command()(allreduce)
app.command()(profile)
app.command()(plan)
app.command()(explain)
app.command()(predict)
app.command()(submit)
app.command()(status)
app.command()(report)

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the configuration; may be given several times."),
]
Threads = Annotated[int | None, typer.Option(help="Threads per rank; the same as --set backend.threads=N.")]
Configuration = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration of the run.")]


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        from halograd import __version__

        typer.echo(f"halograd {__version__}")
        raise typer.Exit


@app.command()
def doctor() -> int:
    """Print what was found on this machine, and whether training can run.

    Exit code 1 if it cannot; the remedy stands beside what is missing.

    \b
    Examples:
      halograd doctor
      mpiexec -n 4 halograd doctor
    """
    from halograd.cli.doctor import examine

    return examine()


@generate.command("mesh-tangling")
def mesh_tangling(
    out: Annotated[Path, typer.Argument(metavar="OUT.h5", help="The HDF5 file to write.")],
    resolution: Annotated[int, typer.Option(help="Cells per axis, up to 2048.")] = 256,
    samples: Annotated[int, typer.Option(help="Number of samples.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
) -> None:
    """Lagrangian meshes in an unsteady flow: 18 channels, and the cells about to tangle.

    \b
    Example:
      halograd generate mesh-tangling mesh.h5 --resolution 256 --samples 32 --seed 1
    """
    from halograd.cli.generating import generate_mesh_tangling

    generate_mesh_tangling(out, resolution, samples, seed)


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
) -> int:
    """Train a network as a configuration says; log, checkpoints and timeline go to its output.directory.

    SIGUSR1 or SIGTERM to any rank: a checkpoint after the next step, and exit code 75 (go on with --resume).

    \b
    Examples:
      halograd train mesh.toml
      mpiexec -n 4 halograd train mesh.toml --set strategy.height=2 --set training.epochs=20
      mpiexec -n 2 halograd train mesh.toml --set strategy.height=1 --resume
      mpiexec -n 4 halograd train mesh.toml --set strategy=auto
      mpiexec -n 16 halograd train mesh.toml --set strategy.file=plan.json
    """
    from halograd.auto import plan_run, rank_schemes_of
    from halograd.training.run import train as run
    from halograd.training.signals import CHECKPOINTED

    result = run(config, _overrides(sets, threads), resume, planner=plan_run, ranker=rank_schemes_of)
    if result["stopped"] is not None:
        print(f"stopped after step {result['steps']} ({result['stopped']}); go on with --resume", flush=True)
        return CHECKPOINTED
    done = "trained" if result["diverged"] is None else "diverged, not trained,"
    print(f"{done} to step {result['steps']}; {result['directory']} holds log.jsonl and checkpoints")
    return 0


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, a checkpoint, or a configuration.")],
    sets: Sets = None,
    samples: Annotated[str, typer.Option(help="validation (those held out), training or all.")] = "validation",
    predictions: Annotated[
        Path | None, typer.Option(metavar="FILE.h5", help="Write predictions and targets to this file.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Loss and metrics of a trained network, on any number of ranks.

    \b
    Examples:
      halograd evaluate runs/mesh
      mpiexec -n 2 halograd evaluate runs/mesh --set strategy.height=2 --predictions predicted.h5
    """
    from halograd.auto import plan_run
    from halograd.training.run import evaluate as judge

    judge(run, _overrides(sets, threads), samples, predictions, planner=plan_run)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of data set, configuration, run and report.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Tiny: to see that everything works here.")] = False,
) -> None:
    """Make a data set, train on 4 MPI ranks, evaluate on held-out simulations, and write a report.

    It starts its ranks itself. A second call uses the data set again and replaces the run.

    \b
    Examples:
      halograd demo
      halograd demo --quick --out /tmp/demo
    """
    from halograd.demo import FULL, QUICK, run_demo

    run_demo(out, QUICK if quick else FULL)


def _overrides(sets: list[str] | None, threads: int | None) -> list[str]:
    return [*(sets or []), *([] if threads is None else [f"backend.threads={threads}"])]
