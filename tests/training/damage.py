"""Random damage to a checkpoint, and checks that a run resumes from the previous one.

::

    python -m tests.training.damage --count 10000

A worker process resumes, as a run with ``--resume`` does, from a folder of two checkpoints, the newer of which is
damaged. This process detects hangs and crashes of the worker. The outcomes:

detected
    The older checkpoint was read, bit for bit, with one message; the damaged one is set aside.
without effect
    The newer checkpoint was read, and is bit for bit what was written.
accepted, refused, failed, hung, crashed
    Other content was read; no checkpoint was read; an unexpected error; no output in time; the worker died.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import numpy as np

from halograd.errors import UserError
from halograd.layers.reduction_scheme import Scheme
from halograd.training.checkpoint import Snapshot, TrainingProgress, read_checkpoint, read_header, write_checkpoint
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.directory import checkpoint_of
from halograd.training.memory import Memory
from halograd.training.optimizers import Adam
from halograd.training.store import ParameterStore
from tests.harness.limits import scaled
from tests.launch import find_mpiexec
from tests.training.conftest import HOST_KERNELS, small_network

ROOT = Path(__file__).resolve().parent.parent.parent
SECTOR = 512
GOOD = {"detected", "without effect"}
LIMIT = scaled(120.0)  # for one case, against a hang [s]


def make(seed: int) -> tuple[ParameterStore, Adam]:
    """Return a store and an optimizer with random parameters, states, moments and rounding residuals."""
    memory, scheme = Memory(HOST_KERNELS), Scheme(payload="bfloat16")
    store = ParameterStore(small_network(), memory, np.dtype("float32"), scheme=scheme)
    optimizer, rng = Adam(store), np.random.default_rng(seed)
    arrays = [store.params, store.state, store.errors, *optimizer.named_state().values()]
    for array in (array for group in arrays for array in group.values()):
        array[...] = rng.standard_normal(array.shape)
    optimizer.step = seed
    return store, optimizer


def write(path: Path, step: int) -> None:
    """Write a checkpoint with all kinds of content."""
    store, optimizer = make(step)
    sampler = {"epoch": 4, "position": 2, "seed": 7, "batch": 4, "samples": 13, "shuffle": "epoch"}
    progress = TrainingProgress(
        step, 7, sampler, {"mean": [0.7, 0.1], "std": [1.5, 2.0], "count": 9}, loss_scale={"scale": 8}
    )
    write_checkpoint(path, Snapshot.of(store, optimizer), progress, json.dumps({"training": {"epochs": step}}))


def content(path: Path) -> list[object]:
    """Return everything that a run reads from a checkpoint, in a comparable form."""
    store, optimizer = make(0)
    progress = read_checkpoint(path, store, optimizer)
    groups = [store.params, store.state, store.errors, *optimizer.named_state().values()]
    arrays = [(name, array.tobytes()) for group in groups for name, array in sorted(group.items())]
    return [progress, read_header(path), optimizer.step, *arrays]


def damaged(whole: bytes, rng: np.random.Generator) -> bytes:
    """Return the bytes after some damage, most often one flipped bit."""
    data = bytearray(whole)
    kind = rng.choice(["bit", "bits", "ends", "cut", "zeros", "noise", "moved", "longer"], p=_SHARES)
    first = SECTOR * int(rng.integers(-(-len(data) // SECTOR)))
    size = min(SECTOR * int(rng.choice([1, 8])), len(data) - first)
    if kind == "bit" or kind == "bits":
        for at in rng.integers(8 * len(data), size=1 if kind == "bit" else int(rng.integers(2, 9))).tolist():
            data[at // 8] ^= 1 << at % 8
    elif kind == "ends":  # header and table
        at = int(rng.choice([rng.integers(64), len(data) - 1 - rng.integers(16)]))
        data[at] = (data[at] + int(rng.integers(1, 256))) % 256
    elif kind == "cut":
        del data[int(rng.integers(len(data))) :]
    elif kind == "zeros":
        data[first : first + size] = bytes(size)
    elif kind == "noise":
        data[first : first + size] = rng.bytes(size)
    elif kind == "moved":  # a sector that was written to another place
        other = SECTOR * int(rng.integers(-(-len(data) // SECTOR)))
        data[other : other + size] = data[first : first + len(data[other : other + size])]
    else:
        data += rng.bytes(int(rng.integers(1, 5000)))
    return bytes(data)


_SHARES = [0.7, 0.03, 0.05, 0.05, 0.05, 0.04, 0.05, 0.03]


def work(folder: Path, seed: int, first: int, stop: int) -> None:
    """Execute the cases, and print number and outcome of each in a line."""
    older, newer = folder / "step-00000001.h5", folder / "step-00000002.h5"
    for path, step in ((older, 1), (newer, 2)):
        write(path, step)
    wholes, contents = [p.read_bytes() for p in (older, newer)], [content(p) for p in (older, newer)]
    for case in range(first, stop):
        newer.write_bytes(damaged(wholes[1], np.random.default_rng([seed, case])))
        older.write_bytes(wholes[0])
        (folder / "latest.h5").write_text(newer.name)
        print(case, outcome(folder, contents), flush=True)


def outcome(folder: Path, contents: list[list[object]]) -> str:
    """Return the outcome of a resumption from the folder."""
    try:
        found, told = CheckpointFolder(folder).newest_whole()
        assert found is not None
        with found:
            store, optimizer = make(0)
            found.restore(store, optimizer)
        taken, newer = content(found.path), found.path.name == "step-00000002.h5"
    except UserError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    if taken != contents[newer]:
        return "accepted"
    if newer:
        return "without effect" if not told else f"failed: {told}"
    return "detected" if len(told) == 2 and checkpoint_of(folder / "latest.h5") == found.path else f"failed: {told}"


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield lines of the worker, until it ends or prints nothing for LIMIT [s]."""
    assert process.stdout is not None
    while select.select([process.stdout], [], [], LIMIT)[0]:
        line = process.stdout.readline()
        if not line:
            return
        yield line.rstrip("\n")


def campaign(count: int, seed: int = 1, program: str = "tests.training.damage", ranks: int = 1) -> Counter[str]:
    """Run `count` cases of a program such as this one; return the count of each outcome."""
    launch = [find_mpiexec(), "-n", str(ranks)] if ranks > 1 else []
    counted: Counter[str] = Counter()
    case = 0
    while case < count:
        with tempfile.TemporaryDirectory() as folder:
            command = [*launch, sys.executable, "-m", program, "--work", folder]
            command += [str(number) for number in (seed, case, count)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, bufsize=1)
            for line in lines(process):
                number, _, result = line.partition(" ")
                counted[result] += 1
                case = int(number) + 1
            if case < count:
                counted[f"hung: case {case}" if process.poll() is None else f"crashed: case {case}"] += 1
                case += 1
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    return counted


def main(
    work: Callable[[Path, int, int, int], None],
    program: str,
    count: int,
    good: Set[str] = frozenset(GOOD),
    description: str | None = __doc__,
) -> None:
    """Execute the command line of a program of this kind: a campaign, or as its worker the cases of one."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--work", nargs=4, metavar=("FOLDER", "SEED", "FIRST", "STOP"))
    options = parser.parse_args()
    if options.work:
        work(Path(options.work[0]), *map(int, options.work[1:]))
        return
    counted = campaign(options.count, options.seed, program, options.ranks)
    for result, number in counted.most_common():
        print(f"{number:8d}  {result}")
    sys.exit(0 if set(counted) <= good else 1)


if __name__ == "__main__":
    main(work, "tests.training.damage", 10_000)
