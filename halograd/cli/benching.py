"""`halograd bench`: what sums over ranks take on this machine, by every way of making them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from halograd.comm import Communicator

__all__ = ["METHODS", "allreduce"]

#: Ways of `Communicator.reduction`, and the schemes of gradient reduction that they serve.
METHODS = {
    "allreduce": "blocking, per_layer, bucketed, two_chunks",
    "ordered": "deterministic",
    "rounded": "payload bfloat16",
    "hierarchical": "hierarchical",
    "accumulate": "host_accumulate",
    "reduce_scatter": "sharded, first half",
    "all_gather": "sharded, second half; replicated_dense",
}
SIZES = ("1 KiB", "16 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB")


def allreduce(
    sizes: Annotated[
        list[str] | None, typer.Option("--size", metavar="SIZE", help="Of a sum, such as 4MiB; may be repeated.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help="A way of summing; may be repeated.")
    ] = None,
    transports: Annotated[
        list[str] | None, typer.Option("--transport", metavar="NAME", help="How sums travel; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each sum is made; the best counts.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time sums over all ranks: every size, by every scheme's way of summing, over every transport.

    Each is measured waited for at once, and behind computation that lasts longer: what is left then is the part that
    nothing hides. A line alpha + beta * bytes is laid through the sizes.

    \b
    Examples:
      mpiexec -n 4 halograd bench allreduce
      mpiexec -n 4 halograd bench allreduce --transport auto --size 1MiB --size 64MiB --json
    """
    from halograd.cli.profiling import open_communicator

    nbytes = [_parse_size(text) for text in sizes or SIZES]
    chosen = _check_methods(methods)
    found: list[dict[str, Any]] = []
    told = ""
    for transport in transports or ("auto", "mpi"):
        with open_communicator(transport) as comm:
            found += [_measured(comm, transport, method, nbytes, rounds) for method in chosen]
            nodes = len(set(comm.nodes))  # collective
            where = f"{comm.size} ranks on {nodes} node{'s' * (nodes > 1)}"
            told = where if comm.rank == 0 else ""
    if told and as_json:
        print(json.dumps({"ranks": told, "units": {"bytes": "B", "seconds": "s"}, "sums": found}))
    elif told:
        print("\n".join(_table(told, nbytes, found)))


def _measured(comm: Communicator, transport: str, method: str, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Times of one way of summing; without times where the transport cannot. Collective."""
    from halograd.comm import CommError
    from halograd.perfmodel.profile.messages import fit_reduction, fit_reduction_behind

    row = {"transport": transport, "method": method, "schemes": METHODS[method]}
    if comm.size == 1:
        return row | {"refused": "one rank has nobody to sum with"}
    try:
        waited = fit_reduction(comm, sizes, rounds, method)
        _, left = fit_reduction_behind(comm, waited, sizes, rounds, method)
    except CommError as error:
        return row | {"refused": str(error)}
    return row | {"waited": waited.to_dict(), "left": left.to_dict()}


def _table(told: str, sizes: Sequence[int], found: Sequence[dict[str, Any]]) -> list[str]:
    from halograd.cli.tables import bytes_text, table

    heading = ["transport", "method", *map(bytes_text, sizes), "alpha", "beta", "fit", "left alpha", "beta"]
    units = ["", "", *["[ms]"] * len(sizes), "[us]", "[ns/B]", "", "[us]", "[ns/B]"]
    rows = [units]
    for row in found:
        label = [row["transport"], row["method"]]
        if "refused" in row:
            rows.append([*label, *["-"] * (len(heading) - 2)])
            continue
        waited, left = row["waited"], row["left"]
        times = [f"{1e3 * t:.3f}" for t in waited["seconds"]]
        rows.append([*label, *times, *_line(waited), f"{waited['error']:.0%}", *_line(left)])
    lines = [f"{told}: a sum waited for at once, and what is left of it behind long computation", ""]
    return [*lines, *table(heading, rows, left=2), *_refusals(found)]


def _line(fit: dict[str, Any]) -> tuple[str, str]:
    return f"{1e6 * fit['alpha']:.1f}", f"{1e9 * fit['beta']:.3f}"


def _refusals(found: Sequence[dict[str, Any]]) -> list[str]:
    reasons = dict.fromkeys(f"{row['transport']}: {row['refused']}" for row in found if "refused" in row)
    return ["", *reasons] if reasons else []


# -- arguments ------------------------------------------------------------------------------------


def _parse_size(text: str) -> int:
    """Bytes of float32, at least one."""
    from halograd.cli.plan_options import parse_memory
    from halograd.errors import UserError

    try:
        nbytes = parse_memory(text)
    except UserError:
        nbytes = None
    if nbytes is None or nbytes < 4:
        raise UserError(f"--size: expected a size of at least 4 bytes, such as 256KiB or 4MiB, got {text!r}")
    return int(nbytes) // 4 * 4


def _check_methods(methods: Sequence[str] | None) -> list[str]:
    from halograd.errors import UserError

    for name in methods or ():
        if name not in METHODS:
            raise UserError(f"--method: expected one of {', '.join(METHODS)}, got {name!r}")
    return list(dict.fromkeys(methods or METHODS))
