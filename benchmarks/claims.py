"""All claims that benchmarks show, with their bounds, in one list that runs.

    python benchmarks/claims.py --list
    python benchmarks/claims.py --only attention,reading --out claims.json
    python benchmarks/claims.py --minutes 30

Each program runs in a process of its own, and its output is kept in the folder of ``--out`` as NAME.txt. A claim takes
all numbers that a pattern finds in the output; the one that is farthest on the wrong side of the bound counts. A claim
without a number has no verdict, and counts as missed. The program ends with the number of claims that hold, and with
exit code 1 if it is not all.

Claims about time come first: they hold only on a machine that is otherwise idle, for the first hour or so. ``others``
is the number of cores that other processes used during a program. Claims of exactness are in the suite of tests, except
those whose cases are too many for it.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.contestants import EntryError, launcher
from benchmarks.machine import Load, describe

#: Line that is added to each output, with the processor time of the program and its children.
CPU = r"^processor seconds: ([\d.]+)"


@dataclass(frozen=True)
class Claim:
    """A bound for the numbers that a pattern finds in an output. `least` <= number <= `most`."""

    text: str
    pattern: str
    most: float = float("inf")
    least: float = float("-inf")

    def numbers(self, output: str) -> list[float]:
        """Return all numbers in an output. Signs of percentages and separators of thousands are understood."""
        found = re.findall(self.pattern, output, re.MULTILINE | re.DOTALL)
        return [float(number.replace(",", "")) for number in found]

    def worst(self, output: str) -> float | None:
        """Return the number that is farthest on the wrong side of the bounds; None: the output has none."""
        return max(self.numbers(output), key=lambda number: max(number - self.most, self.least - number), default=None)

    def holds(self, number: float | None) -> bool:
        """Return whether a number is within the bounds."""
        return number is not None and self.least <= number <= self.most

    @property
    def bound(self) -> str:
        """Bounds as text."""
        bounds = ((">=", self.least), ("<=", self.most))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in bounds if abs(limit) != float("inf"))


@dataclass(frozen=True)
class Program:
    """A benchmark, or a command of halograd, and what it must show.

    Attributes
    ----------
    command
        Arguments of Python; the first is a file of this folder, or ``-m``.
    minutes
        Time that it takes on two cores, roughly.
    ranks
        Number of ranks; 0 for a program that starts its own.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    claims: tuple[Claim, ...]
    ranks: int = 0


def _step(name: str, *arguments: str) -> Program:
    networks = "mesh-256,mesh-512,resnet50,unet-256"
    command = ("step.py", "--networks", networks, "--peers", "torch,torch-bf16", "--budget", "75", *arguments)
    claims = [
        Claim("time of a step / torch's, four networks", r"ratio to best peer +([\d.]+)", 0.95),
        Claim("two ranks of one thread / one rank of two", r"two ranks to one +([\d.]+)", 1.1),
    ]
    if "avx2" not in arguments:  # AVX2 has no products in bfloat16
        claims.append(Claim("the same in bfloat16 / torch's autocast", r"ratio in bfloat16 +([\d.]+)", 0.95))
    return Program(name, command, 8, tuple(claims))


def _recomputed() -> Iterator[Claim]:
    bounds = {
        "mesh_2k": ((48, 4), (57, 36)),
        "resnet50": ((38, 8), (66, 36)),
        "unet3d": ((34, 6), (52, 36)),
    }
    for network, rules in bounds.items():
        for rule, (smaller, longer) in zip(("pointwise", "block"), rules):
            row = rf"^{network} at \d+, \d+ steps[^=]*?^{rule} +\d+ +"
            yield Claim(f"{network}, {rule}: arena smaller [%]", rf"{row}-(\d+) %", least=smaller)
            yield Claim(f"{network}, {rule}: longer [%]", rf"{row}-\d+ % +[\d.]+ +[\d.]+ +(-?[\d.]+) %", longer)


def _bits(ranks: int) -> Program:
    """Return the check of random strategies with recomputation on a number of ranks."""
    claim = Claim("comparisons that differ in a bit", r"comparisons, (\d+) differences", 0)
    return Program(f"bits-{ranks}", ("recompute_bits.py", "--seconds", "90"), 2, (claim,), ranks)


def _planned(name: str, seconds: float, *command: str) -> Program:
    """Return a command that plans on shipped machines in a bounded time."""
    claim = Claim("processor time [s]", CPU, seconds)
    return Program(name, ("-m", "halograd", *command, "--machine", "lassen"), 0.5, (claim,))


PROGRAMS = (
    # Times, of a step, its parts, and its prediction: the machine must be idle.
    _step("step"),
    _step("step-avx2", "--isa", "avx2"),
    Program(
        "attention",
        ("attention.py", "--rounds", "30"),
        1,
        (Claim("time of attention / torch's, three shapes", r"wall ([\d.]+)", 1.1),),
    ),
    *(
        Program(
            f"reading-{extent}",
            ("reading.py", "--resolution", str(extent)),
            0.3,
            (
                Claim("reading / raw read and cast, six types", r"^ +[<>]?[fiu]\d +[\d.]+ ms.*? ([\d.]+)$", 1.5),
                Claim("chunks of 32 samples / of one", r"a rank of \d +([\d.]+)", 1.3),
            ),
        )
        for extent in (512, 1024)
    ),
    Program(
        "recompute",
        ("recompute.py", "--sizes", "mesh_2k=512,resnet50=1024,unet3d=128", "--threads", "1"),
        15,
        tuple(_recomputed()),
    ),
    _planned("plan", 3, "plan", "inception_v3", "--ranks", "64", "--batch", "64"),
    _planned("scaling", 20, "predict", "mesh_2k", "--ranks", "4,8,...,2048", "--batch", "4"),
    Program(
        "wide",
        ("wide.py",),
        4,
        (
            Claim("steps with wide values, 200 us", r"200 us .*? ratio ([\d.]+)", least=1.2),
            Claim("choices that lose", r"^(\d+) of \d+ choices are wrong", 0),
        ),
    ),
    Program(
        "prediction",
        ("prediction.py", "--seconds", "1", "--ranks", "1,2", "--node"),
        12,
        (
            Claim("steps on the node, median error [%]", r"the node.*?: \d+ steps, error median ([\d.]+)%", 4),
            Claim("worst error [%]", r"the node.*?: \d+ steps, error median [\d.]+%, worst ([\d.]+)%", 15),
        ),
    ),
    # Memory, bits, optima and ends of jobs: other processes do no harm.
    Program(
        "process-memory",
        ("process_memory.py",),
        3,
        (Claim("growth of a process / plan, six networks", r"^\w+(?: +[\d,.]+){3} +([\d.]+) ", 1.08, 0.95),),
    ),
    Program(
        "memory-peers",
        ("memory_peers.py",),
        0.5,
        (Claim("memory / torch's, both kept less", r"(?:pointwise|block) +[\d,]+ +[\d,]+ +([\d.]+)", 1.0),),
    ),
    *map(_bits, (1, 2, 3, 4)),
    Program(
        "plan-memory",
        ("plan_memory.py", "--chains", "200"),
        8,
        (
            Claim("limits under which the plan is the optimum [%]", r"the optimum under \d+ \(([\d.]+)%", least=90),
            Claim("largest excess [%]", r"largest excess ([\d.]+)%", 5),
            Claim("limits with nothing found", r"nothing found under (\d+)", 0),
        ),
    ),
    Program(
        "paper-tables",
        ("paper_tables.py",),
        0.2,
        (
            Claim("Dryden I and II: last column [%]", r"Table I{1,2}:[^=]*?N = 128 over .*?\(([-+][\d.]+)%\)", 10, -10),
            Claim("Dryden III: rows above 20 %", r"(\d+) of 17 above 20", 3),
        ),
    ),
    Program(
        "regret",
        ("plan_regret.py", "--robust"),
        7,
        (
            Claim("robust plan, 90th percentile [%]", r"regret of robust .*?90th percentile ([\d.]+)", 5),
            Claim("worst [%]", r"regret of robust .*?worst ([\d.]+)", 10),
        ),
    ),
    Program(
        "faults",
        ("faults.py", "--jobs", "40"),
        7,
        (Claim("jobs of 40 that end in time, name the rank, resume exactly", r"(\d+) of 40 jobs are good", least=40),),
    ),
)


def run(program: Program, folder: Path) -> dict[str, Any]:
    """Run a program; return the row of results. Its output goes to `folder`."""
    here = Path(__file__).resolve().parent
    first, *others = program.command
    command = [sys.executable, *((first, *others) if first == "-m" else (str(here / first), *others))]
    if program.ranks:
        command = [*launcher(program.ranks), *command]
    began, load, own = time.perf_counter(), Load(), _children()
    ended = subprocess.run(command, cwd=here.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds, used = time.perf_counter() - began, _children() - own
    output = f"{ended.stdout}\nprocessor seconds: {used:.2f}\n"
    (folder / f"{program.name}.txt").write_text(output)
    found = [claim.worst(output) for claim in program.claims]
    rows = [
        {"claim": claim.text, "bound": claim.bound, "found": number, "holds": claim.holds(number)}
        for claim, number in zip(program.claims, found)
    ]
    others_cores = max(0.0, load.since()[0] - used) / seconds
    return {"name": program.name, "code": ended.returncode, "seconds": seconds, "others": others_cores, "claims": rows}


def _children() -> float:
    """Return the processor time of all children that have ended [s]."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(
    only: Annotated[str, typer.Option(help="Names of programs, separated by commas; default: all.")] = "",
    minutes: Annotated[float, typer.Option(min=0, help="Begin no program that would end later, roughly.")] = 600.0,
    out: Annotated[Path, typer.Option(help="File for the results (JSON).")] = Path("claims.json"),
    list_: Annotated[bool, typer.Option("--list", help="Print programs and bounds, and run nothing.")] = False,
) -> None:
    """Run programs, and compare what they show with the bounds."""
    known = {program.name: program for program in PROGRAMS}
    if unknown := set(filter(None, only.split(","))) - set(known):
        raise typer.BadParameter(f"expected names of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in only.split(",")] if only else list(PROGRAMS)
    if list_:
        for program in chosen:
            print(f"{program.name} ({program.minutes:g} min): {' '.join(program.command)}")
            print("".join(f"    {claim.text}: {claim.bound}\n" for claim in program.claims), end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for program in chosen:
        if (time.perf_counter() - began) / 60 + program.minutes > minutes:
            print(f"{program.name}: not run, takes {program.minutes:g} min", flush=True)
            continue
        try:
            row = run(program, out.parent)
        except EntryError as error:
            print(f"claims: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        rows.append(row)
        # After each program, so that an interrupted run keeps what it has.
        results = {"date": date.today().isoformat(), "machine": describe(), "programs": rows}
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{row['name']}: {row['seconds']:.0f} s, exit code {row['code']}, others {row['others']:.2f}", flush=True)
        for claim in row["claims"]:
            number = "no number" if claim["found"] is None else f"{claim['found']:g}"
            verdict = "holds " if claim["holds"] else "MISSED"
            print(f"    {verdict} {claim['claim']}: {number} ({claim['bound']})", flush=True)
    holding = [claim["holds"] for row in rows for claim in row["claims"]]
    print(f"{sum(holding)} of {len(holding)} claims hold")
    if not all(holding) or len(rows) < len(chosen):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
