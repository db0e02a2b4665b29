"""Mutants of data files: each must be read into a usable object, or raise a one-line error.

    python -m tests.mutants --count 1250 --first 0 configuration strategy plan machine

tries this number of mutants of every kind of file; the suite tries a few (tests/test_documents.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from halograd.cli.run import run
from halograd.device import as_dtype
from halograd.errors import UserError
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.models import mesh
from halograd.perfmodel.cost import memory_of, program_of
from halograd.perfmodel.machine import FOLDER
from halograd.program.program import Target
from halograd.training.build import make_network, make_strategy
from halograd.training.config import load_config
from halograd.training.schedules import make_schedule
from tests.support.mutants import mutant

#: Time limit for mutants that hang, on the slowest machine [s].
PATIENCE = 120
#: Largest number of ranks to compile for.
RANKS = 64

CONFIG = """
[model]
name = "mesh"
resolution = 32
channels = 2
widths = [4, 6]
convs = 1
decoder = true
pos_weight = 2.0
statistics = "global"
[data]
path = "data.h5"
validation = 0.3
prefetch = 2
rule = "majority"
transforms = {Pressure = "log"}
[strategy]
sample = 1
height = 2
halo = "overlap"
bucket_bytes = 512
[reduction]
name = "two_chunks"
first_layers = 2
payload = "bfloat16"
[optimizer]
kind = "adamw"
weight_decay = 0.01
epsilon = 1e-8
[schedule]
kind = "step"
learning_rate = 0.01
milestones = [1, 2.5]
warmup_epochs = 1
[training]
epochs = 3
batch = 4
seed = 7
clip_norm = 1.0
[backend]
kernels = "numpy"
threads = 1
device = [0, 1]
[output]
directory = "runs/a"
checkpoint_minutes = 20
[run]
stall_minutes = 15
"""
NETWORK = {"resolution": 16, "channels": 2, "widths": [4, 6], "convs": 1}
SMALL = ["mesh", *(word for key, value in NETWORK.items() for word in ("--option", f"{key}={value}"))]
STRATEGY = Strategy(
    {"sample": 2},
    {"conv1_1": {"height": 2, "width": 2, "halo": "pad"}, "conv2_1": {"channel": 2, "input_channel": 2}},
    {"statistics": "sample"},
    4096,
)


def built(network, strategy: Strategy, batch: int, size: int, dtype: str = "float32") -> None:
    """Build everything that a run computes before it allocates memory; raise UserError if the strategy does not fit."""
    strategy.validate(network, size)
    strategy.refuse_empty_blocks(network)
    if size <= RANKS:
        blocks = parameter_blocks(network, strategy, size)
        for rank in {0, size - 1}:
            program = program_of(network, strategy, Target(batch, size, rank, as_dtype(dtype)))
            memory_of(program, blocks)


def use_config(path: Path) -> None:
    config = load_config(path)
    network = make_network(config)
    schedule = make_schedule(config.schedule, config.training.epochs, 5)
    assert all(np.isfinite(schedule(step)) and schedule(step) >= 0 for step in (0, 7, 10**9))
    size = (config.strategy.sample or 1) * config.strategy.depth * config.strategy.height * config.strategy.width
    strategy = make_strategy(config.strategy, min(size, RANKS), network, config.training.batch)
    built(network, strategy, config.training.batch, strategy.ranks, config.training.dtype)


def use_strategy(path: Path) -> None:
    strategy = Strategy.load(path)
    built(mesh(**NETWORK), strategy, 4, strategy.ranks)


def use_plan(path: Path) -> None:
    command("explain", path)


def use_machine(path: Path) -> None:
    command("predict", *SMALL, "--machine", path, "--ranks", 4, "--batch", 2)
    command("plan", *SMALL, "--machine", path, "--ranks", 2, "--batch", 2)


def command(*arguments: object) -> None:
    """Run a command, and raise its one-line error as a UserError."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    if code == 2:
        raise UserError(err.getvalue().removesuffix("\n"))
    assert code == 0 and err.getvalue() == "" and out.getvalue(), err.getvalue()


def _plan() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(["plan", *SMALL, "--machine", "lassen", "--ranks", "4", "--batch", "2", "--json"]) == 0
    return out.getvalue()


def _strategy(folder: Path) -> str:
    STRATEGY.save(folder / "s.json")
    return (folder / "s.json").read_text()


KINDS = {
    "configuration": ("toml", lambda folder: CONFIG, use_config),
    "strategy": ("json", _strategy, use_strategy),
    "plan": ("json", lambda folder: _plan(), use_plan),
    "machine": ("toml", lambda folder: (FOLDER / "lassen.toml").read_text(encoding="utf-8"), use_machine),
}


@contextlib.contextmanager
def patience():
    """Raise TimeoutError if the body takes longer than PATIENCE."""

    def late(*_: object) -> None:
        raise TimeoutError(f"expected an end within {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(use, path: Path) -> str:
    """Return "accepted", "refused", or the description of a fault."""
    try:
        with patience():
            use(path)
    except UserError as error:
        text = str(error)
        return "refused" if text.isprintable() and len(text) < 1500 else f"not one short line: {text[:500]!r}"
    except Exception:
        return traceback.format_exc()
    return "accepted"


def campaign(kind: str, numbers: Iterable[int], folder: Path) -> tuple[Counter[str], list[str]]:
    """Return the counts of the outcomes of the mutants with these numbers, and the faults."""
    form, document_of, use = KINDS[kind]
    document, path = document_of(folder), folder / f"mutant.{form}"
    path.write_text(document)
    found, faults = Counter[str](), list[str]()
    first = outcome(use, path)
    if first != "accepted":
        faults.append(f"the {kind} itself: {first}")
    for number in numbers:
        path.write_bytes(mutant(document, form, number))
        told = outcome(use, path)
        sound = told in ("accepted", "refused")
        found[told if sound else "fault"] += 1
        if not sound:
            faults.append(f"{kind} {number}: {told}")
    return found, faults


def main() -> int:
    """Print the outcomes of the mutants, and every fault; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--count", type=int, default=1250)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for kind in given.kinds or KINDS:
            found, faults = campaign(kind, range(given.first, given.first + given.count), Path(folder))
            print(f"{kind}: {dict(found)}", *faults, sep="\n", flush=True)
            wrong += len(faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
