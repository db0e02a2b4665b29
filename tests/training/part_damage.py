"""Random damage to the parts of an interrupted `apply`, and checks that the job's predictions stay right.

::

    python -m tests.training.part_damage --count 2000
    python -m tests.training.part_damage --count 400 --ranks 2

A worker (of several ranks, if requested) interrupts a job after three of its four batches, or lets it end, damages a
part, and starts the job again. The outcomes:

anew
    One line named the part, and the predictions are those of an undisturbed job.
without effect
    The predictions are those of an undisturbed job, without a message: the damaged part was not used.
refused
    One line, the same on all ranks.
accepted, failed, hung, crashed
    Other predictions; an unexpected error, several lines, or a change of another file; no output in time; the worker
    died.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import apply, train
from halograd.training.chunk_file import ChunkWriter, VerifiedFile
from halograd.training.session import Session
from tests.training.damage import damaged, main
from tests.training.runs import EDGE, write_arrays, write_own

SAMPLES, BATCH, DONE = 8, 2, 3
GOOD = {"anew", "without effect", "refused"}
NET = f"""
import halograd as hg

def build():
    x = hg.Input(({EDGE}, {EDGE}, 3), name="x")
    y = hg.Conv(2, 3, padding=1)(x)
    logits = hg.Conv(1, 1)(y)
    loss = hg.BinaryCrossEntropyWithLogits()(logits, hg.Input(logits.shape, name="target"))
    return hg.Network({{"prediction": logits, "features": y, "loss": loss}})
"""


class Interrupted(Exception):
    """Exception that ends a job before its last batch."""


class Job:
    """Trained network, data, and files of an interrupted job. Collective over `comm`.

    `states` contains the files of each state: bytes by path from the folder of `out`.
    """

    def __init__(self, folder: Path, comm: Any, others: bool = True) -> None:
        self.folder, self.comm, self.out = folder, comm, folder / "place" / "out.h5"
        self.sets = [f"training.batch={BATCH}", "strategy.sample=1", f"strategy.height={comm.size}"]
        self.root(self._prepare)
        if others:
            self._note()

    def _note(self) -> None:
        self.run(self.folder / "whole.h5")
        self.want = self.read(self.folder / "whole.h5")
        self.interrupt(self.out, DONE)
        self.states = {"interrupted": self.files()}
        self.run(self.out)
        self.states["ended"] = self.files()
        self.others = [self._other("what", what="logits"), self._other("batch", sets=["training.batch=4"])]
        for name in ("files", "seed", "checkpoint"):
            self.others.append(self._other(name))
        self.interrupt(self.out, 1)
        self.states["early"] = self.files()
        self.parts = sorted({path.parent for path in map(Path, self.states["early"])})[-1]

    def _prepare(self) -> None:
        self.out.parent.mkdir()
        rng = np.random.default_rng(11)
        for name in ("far", "other"):
            arrays = {"inputs": rng.standard_normal((SAMPLES, EDGE, EDGE, 3))}
            write_arrays(self.folder / f"{name}.h5", arrays, inputs="NHWC")
        with h5py.File(self.folder / "new.h5", "w") as file:
            file["inputs"] = h5py.ExternalLink("far.h5", "/inputs")
        config = write_own(self.folder, NET)
        for seed, out in ((7, "out"), (8, "second")):
            sets = [f"training.seed={seed}", f"output.directory={out}", "training.epochs=1", "strategy.sample=1"]
            train(config, sets, comm=MPI.COMM_SELF)

    def _other(self, name: str, what: str = "classes", sets: Any = ()) -> dict[str, bytes]:
        """Return the parts of another job, which differs in `name`: another run, other samples, ..."""
        self.root(self.clear)
        data = self.folder / ("other.h5" if name == "files" else "new.h5")
        run = self.folder / ("second" if name in ("seed", "checkpoint") else "out")
        if name == "seed":
            self.root(self.exchange)
            run = self.folder / "out"
        self.interrupt(self.out, 1 if name == "batch" else DONE, what, [*self.sets, *sets], data, run)
        if name == "seed":
            self.root(self.exchange)
        found = self.files()
        self.root(self.clear)
        return found

    def exchange(self) -> None:
        """Replace the run by another one with as many steps."""
        for old, new in (("out", "kept"), ("second", "out"), ("kept", "second")):
            (self.folder / old).rename(self.folder / new)

    def touch(self) -> None:
        """Change the time of the file that contains the samples; the named file only refers to it."""
        os.utime(self.folder / "far.h5", ns=(1, 1))

    def root(self, call: Callable[[], object]) -> None:
        self.comm.barrier()
        if self.comm.rank == 0:
            call()
        self.comm.barrier()

    def run(self, out: Path, what: str = "classes", sets: Any = None, data: Any = None, run: Any = None) -> Any:
        data = [str(data or self.folder / "new.h5")]
        return apply(run or self.folder / "out", data, out, sets or self.sets, what, self.comm)

    def interrupt(self, out: Path, batches: int, *given: Any) -> None:
        feed = Session.feed

        def short(self: Session, wanted: Any) -> Iterator[Any]:
            for number, batch in enumerate(feed(self, wanted)):
                if number == batches:
                    raise Interrupted
                yield batch

        self.root(self.clear)
        with mock.patch.object(Session, "feed", short), suppress(Interrupted):
            self.run(out, *given)
        self.comm.barrier()

    def read(self, out: Path) -> dict[str, np.ndarray]:
        with h5py.File(out) as file:
            return {name: file[name][()] for name in ("features", "prediction")}

    def files(self) -> dict[str, bytes]:
        self.comm.barrier()
        place = self.out.parent
        return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}

    def clear(self) -> None:
        shutil.rmtree(self.out.parent)
        self.out.parent.mkdir()

    def restore(self, files: dict[str, bytes]) -> None:
        self.clear()
        for name, data in files.items():
            (self.out.parent / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out.parent / name).write_bytes(data)


Mutation = Callable[["Case"], None]
MUTATIONS: dict[str, Mutation] = {}


class Case:
    """Files to damage on rank 0: a part `h5` of a rank, and its progress file if there is one."""

    def __init__(self, job: Job, rng: np.random.Generator) -> None:
        self.job, self.rng = job, rng
        self.folder = job.out.parent / job.parts
        self.rank = int(rng.integers(job.comm.size))
        self.h5 = self.folder / f"rank-{self.rank:05d}.h5"
        self.victim = job.folder / "victim.h5"

    def some_file(self) -> Path:
        """Return a random file of the damaged rank."""
        mine = sorted(self.folder.glob(f"rank-{self.rank:05d}.*"))
        return mine[int(self.rng.integers(len(mine)))]

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def name(self) -> str:
        return self.pick(sorted(self.job.want))


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


#: What may stand in place of a number.
ODD: list[Any] = [-1, 0, 1, 2, 4, 8, 99, 2**31, 2**62, -(2**63), 3.0, 2.5, float("nan"), float("inf"), "3", "x", ""]
ODD += [[1, 2], [3], [[3]], None, True, {}, {"batches": 3}, "\ud800", "a" * 10_000]


@mutation
def attribute(case: Case) -> None:
    """Change, add or remove an attribute of the file or of a dataset."""
    odd = [np.array([1, 2]), np.nan, "x", -1, 8, 99, b"\xff", h5py.Empty("i4"), np.zeros((2, 2)), 2.5, True]
    value = case.pick(odd)
    with h5py.File(case.h5, "r+") as file:
        there = file[case.name()] if case.rng.integers(2) else file
        name = case.pick(["batches", "job", "layout", "written_by", "other"])
        if name in there.attrs:
            del there.attrs[name]
        if case.rng.integers(5):
            there.attrs[name] = value


@mutation
def progress(case: Case) -> None:
    """Change the content of the progress record, with a correct checksum."""
    path = case.h5.with_suffix(".progress")
    if not path.exists():  # where progress is an attribute of the part
        with h5py.File(case.h5, "r+") as file:
            del file.attrs["batches"]
            file.attrs["batches"] = case.pick([-1, 8, 99, "x", [1, 2], np.nan, 4, 2.5])
        return
    with closing(VerifiedFile(path)) as file:
        found = json.loads(file.index())
    key = case.pick([*found, "other"])
    found[key] = case.pick(ODD)
    if not case.rng.integers(6):
        del found[key]
    text = json.dumps(found).encode(errors="surrogatepass")
    if not case.rng.integers(12):
        text = case.pick([b"", b"{", b"[]", b"null", b"3", b"[" * 100_000, b"\xff\xfe", b'{"job": 1, "job": 2}'])
    with ChunkWriter(path) as raw:
        raw.finish(text)


@mutation
def dataset(case: Case) -> None:
    """Remove, shorten or replace a dataset, or change its type or storage."""
    name = case.name()
    kind = case.pick(["missing", "short", "long", "type", "group", "external", "soft", "chunks", "renamed", "scalar"])
    with h5py.File(case.h5, "r+") as file:
        values = file[name][()]
        if kind == "renamed":
            file.move(name, "another")
            return
        del file[name]
        if kind == "short":
            file[name] = values[: case.pick([0, 1, SAMPLES // 2, SAMPLES - 1])]
        elif kind == "long":
            file[name] = np.concatenate([values, values])
        elif kind == "type":
            file.create_dataset(name, data=values, dtype=case.pick(["u1", "i1", "f4", ">f8", "f2", "i8", ">i2"]))
        elif kind == "group":
            file.create_group(name)
        elif kind == "external":
            file[name] = h5py.ExternalLink(case.pick(["/etc/passwd", str(case.victim), "/dev/zero", "."]), "/inputs")
        elif kind == "soft":
            file[name] = h5py.SoftLink(case.pick([f"/{name}", "/nowhere", "/"]))
        elif kind == "chunks":
            file.create_dataset(name, data=values, chunks=True, compression=case.pick([None, "gzip"]))
        elif kind == "scalar":
            file[name] = 3.0


@mutation
def numbers(case: Case) -> None:
    """Change one value, a batch or all written values, or exchange two batches."""
    with h5py.File(case.h5, "r+") as file:
        there = file[case.name()]
        values = there[()]
        first = BATCH * int(case.rng.integers(DONE))
        if kind := int(case.rng.integers(4)):
            chosen = [None, slice(first, first + BATCH), slice(0, BATCH * DONE), slice(first, first + 1)][kind]
            values[chosen] = case.pick([values[chosen] + 1, 0 * values[chosen], values[chosen][::-1]])
        else:
            other = (first + BATCH) % (BATCH * DONE)
            mine = values[first : first + BATCH].copy()
            values[first : first + BATCH] = values[other : other + BATCH]
            values[other : other + BATCH] = mine
        there[...] = values


@mutation
def structure(case: Case) -> None:
    """Flip one to three bits in the first bytes, where HDF5 describes the file."""
    path = case.h5
    data = bytearray(path.read_bytes())
    for at in case.rng.integers(8 * min(3000, len(data)), size=int(case.rng.integers(1, 4))).tolist():
        data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


@mutation
def anywhere(case: Case) -> None:
    """Change bits or sectors, write zeros or noise, truncate or extend any file of the rank."""
    path = case.some_file()
    path.write_bytes(damaged(path.read_bytes(), case.rng))


@mutation
def truncated(case: Case) -> None:
    path = case.some_file()
    os.truncate(path, case.pick([0, 1, 100, path.stat().st_size // 2, path.stat().st_size - 1]))


@mutation
def missing(case: Case) -> None:
    case.some_file().unlink()


@mutation
def link(case: Case) -> None:
    """Replace a file by a link (to another file, a copy or nothing), a second name, a pipe, a folder or a device."""
    path = case.some_file()
    copy = case.job.folder / "copy.h5"
    shutil.copy(path, copy)
    path.unlink()
    kind = case.pick(["victim", "copy", "nothing", "hard", "second", "pipe", "folder", "full", "device", "circle"])
    if kind == "victim":
        path.symlink_to(case.victim)
    elif kind == "copy":
        path.symlink_to(copy)
    elif kind == "nothing":
        path.symlink_to(case.job.folder / "nowhere" / "x.h5")
    elif kind == "hard":
        os.link(case.victim, path)
    elif kind == "second":
        os.link(copy, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("folder", "full"):
        path.mkdir()
        if kind == "full":
            (path / "mine").write_text("mine")
    elif kind == "device":
        path.symlink_to(case.pick(["/dev/null", "/dev/zero", "/dev/full"]))
    else:
        path.symlink_to(path.name)


@mutation
def folders(case: Case) -> None:
    """Replace the folder of the job, or of all parts, by a link to another one or by a file."""
    path = case.pick([case.folder, case.folder.parent])
    elsewhere = case.job.folder / "elsewhere"
    path.rename(elsewhere)
    if case.rng.integers(2):
        path.symlink_to(elsewhere)
    else:
        path.write_text("mine")


@mutation
def swapped(case: Case) -> None:
    """Exchange the parts of two ranks, one file of them, or the parts of two attempts."""
    other = case.folder / case.h5.name.replace(f"{case.rank:05d}", f"{(case.rank + 1) % case.job.comm.size:05d}")
    files = case.job.states[case.pick(["early", "interrupted", "ended"])]
    if other != case.h5 and case.rng.integers(3):
        wanted = case.pick([[""], [".h5"], [".progress"], [".h5", ".progress"]])
        for ending in filter(None, wanted):
            pair = case.h5.with_suffix(ending), other.with_suffix(ending)
            if all(path.exists() for path in pair):
                datas = [path.read_bytes() for path in pair]
                pair[0].write_bytes(datas[1])
                pair[1].write_bytes(datas[0])
        return
    path = case.some_file()
    name = str(path.relative_to(case.job.out.parent))
    if name in files:
        path.write_bytes(files[name])


@mutation
def of_another(case: Case) -> None:
    """Put files of other runs, networks, samples, batches and formats under the names of this job."""
    files = case.pick(case.job.others)
    paths = [Path(name) for name in files if Path(name).name.startswith(f"rank-{case.rank:05d}.")]
    if not case.rng.integers(3):
        paths = [case.pick(paths)]
    for path in paths:
        (case.folder / path.name).write_bytes(files[str(path)])


def case_of(job: Job, seed: int, number: int, name: str | None = None) -> str:
    """Damage the parts on rank 0; return the name of the mutation. Collective."""
    rng = np.random.default_rng([seed, number])
    name = name or sorted(MUTATIONS)[number % len(MUTATIONS)]
    state = "interrupted" if job.comm.size == 1 or rng.integers(3) else "ended"

    def damage() -> None:
        for path in (job.folder / "elsewhere", job.folder / "copy.h5"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        job.restore(job.states[state])
        shutil.copy(job.folder / "new.h5", job.folder / "victim.h5")
        MUTATIONS[name](Case(job, rng))

    job.root(damage)
    return name


def outcome(job: Job) -> str:
    """Return the outcome of a restart of the job, the same on all ranks. Collective."""
    with noted() as lines:
        try:
            job.run(job.out)
            found = ""
        except UserError as error:
            found = f"refused: {error}"
        except Exception as error:
            found = f"failed: {type(error).__name__}: {error}"
    everyone = job.comm.allgather(found)
    if len(set(everyone)) > 1:
        return f"failed: ranks differ: {everyone}"
    if found:
        return "refused" if found.startswith("refused: ") and found.isprintable() and len(found) < 600 else found
    return job.comm.bcast(_compared(job, lines) if job.comm.rank == 0 else "")


def _compared(job: Job, lines: list[str]) -> str:
    if (job.folder / "victim.h5").read_bytes() != (job.folder / "new.h5").read_bytes():
        return "failed: another file was changed"
    try:
        got = job.read(job.out)
    except Exception as error:
        return f"accepted: {type(error).__name__}: {error}"
    if any(got[name].tobytes() != job.want[name].tobytes() for name in got):
        return "accepted"
    if any(got[n].dtype != job.want[n].dtype for n in got):
        return "accepted: other types"
    if len(lines) > 1 or not all("rank-0000" in line and line.isprintable() for line in lines):
        return f"failed: expected one line about a part, got {lines}"
    return "anew" if lines else "without effect"


@contextmanager
def noted() -> Iterator[list[str]]:
    """Yield a list to which the warnings of the ``with`` block are added."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halograd").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("halograd").removeHandler(handler)


def work(folder: Path, seed: int, first: int, stop: int) -> None:
    """Execute the cases; rank 0 prints a line for each: its number and its outcome."""
    os.chdir(folder)
    job = Job(folder, MPI.COMM_WORLD)
    for number in range(first, stop):
        name = case_of(job, seed, number)
        found = outcome(job)
        if job.comm.rank == 0:
            print(number, found if found in GOOD else f"{name}: {' '.join(found.split())}", flush=True)


if __name__ == "__main__":
    main(work, "tests.training.part_damage", 2000, GOOD, __doc__)
