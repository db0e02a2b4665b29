"""Gather the findings of all ranks and print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from halograd.cli.doctor.compute import probe_numpy, probe_onednn, probe_python, probe_threads
from halograd.cli.doctor.finding import Finding, careful
from halograd.cli.doctor.gpu import probe_gpu
from halograd.cli.doctor.mpi import probe_mpi, probe_ranks, probe_shared_memory
from halograd.cli.doctor.storage import probe_hdf5

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["examine", "merge", "show"]

STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}


def examine() -> int:
    """Examine this machine and print the report on rank 0; return 1 if training cannot run. Collective."""
    findings = [*careful("Python", probe_python), *careful("mpi4py", probe_mpi)]
    world = _world(findings)
    on_node = 1
    if world is not None:
        findings += careful("ranks", lambda: probe_ranks(world))
        on_node = _ranks_on_node(world)
    findings += careful("threads", lambda: probe_threads(on_node))
    findings += careful("shared memory", lambda: probe_shared_memory(on_node))
    findings += careful("numpy", probe_numpy)
    findings += careful("onednn-cpu-gomp", probe_onednn, "warn")
    findings += careful("h5py", probe_hdf5)
    findings += careful("cupy", probe_gpu, "note")
    everyone = [findings] if world is None else world.allgather(findings)
    merged = merge(everyone)
    if world is None or world.rank == 0:
        show(merged)
    return 1 if any(finding.status == "fail" for finding in merged) else 0


def _world(findings: Sequence[Finding]) -> MPI.Intracomm | None:
    if any(finding.status == "fail" for finding in findings):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _ranks_on_node(world: MPI.Intracomm) -> int:
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return size


def merge(everyone: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Of each name the worst finding of all ranks, in the order of rank 0; another rank's is marked as such."""
    worst: dict[str, Finding] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            if finding.name not in worst or finding.severity > worst[finding.name].severity:
                where = f"rank {rank}: " if rank else ""
                worst[finding.name] = Finding(finding.name, finding.status, where + finding.value, finding.remedy)
    return list(worst.values())


def show(findings: Sequence[Finding]) -> None:
    """Print a table on a terminal, plain lines that `grep` can use elsewhere, and the verdict."""
    console = Console(highlight=False)
    if console.is_terminal:
        _show_table(console, findings)
    else:
        width = max(len(finding.name) for finding in findings)
        for f in findings:
            print(f"{f.status:<5} {f.name:<{width}}  {f.value}" + (f"  -> {f.remedy}" if f.remedy else ""))
    failed = [finding.name for finding in findings if finding.status == "fail"]
    print(f"training cannot run: {', '.join(failed)}" if failed else "training can run", flush=True)


def _show_table(console: Console, findings: Sequence[Finding]) -> None:
    table = Table(show_edge=False)
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        style = STYLES[finding.status]
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        table.add_row(f"[{style}]{finding.status}[/]", finding.name, _escape(finding.value + remedy))
    console.print(table)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
