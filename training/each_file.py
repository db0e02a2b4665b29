"""Predictions of files whose samples differ in size: a folder with a file for each file of samples.

::

    OUT/case_07.h5      predictions of .../case_07.h5, a result of :mod:`halograd.training.applying`
    OUT/site2/x.h5      files of several folders keep their folders
    OUT/sources.json    by file of OUT: its source, the number of samples, and a mark of the job

Files of one size are computed one after another by one executor. A job that was interrupted continues: files of the
same job are complete, and the one in progress is continued.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py

from halograd.documents import replacing
from halograd.errors import UserError

from ..data import FileSet, Hdf5Dataset
from ..data.disk import DataError
from ..data.source import sample_shape
from ..data.windows import SlidingWindows
from ..data.writers import WRITERS, WRITTEN_BY
from .adapting import at_size, grid_of
from .applying import Tell, outputs_of, write_outputs
from .parts import writing
from .root import on_root
from .session import Session, open_loader
from .whole import Sized, open_sized

__all__ = ["check_folder", "write_each"]

#: Name of the table of a folder.
TABLE = "sources.json"


def _table(out: Path) -> dict[str, Any] | None:
    """Return the table of a folder; None if no job has written it."""
    try:
        found = json.loads((out / TABLE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    files = found.get("files") if isinstance(found, dict) and found.get("written_by") == WRITTEN_BY else None
    return files if isinstance(files, dict) else None


def check_folder(out: Path, suffix: str) -> None:
    """Raise UserError unless `out` can be a folder of results. Local."""
    if suffix and out.suffix == suffix:
        raise UserError(
            f"--out: expected a folder, because samples differ in size and every file gets one of its own, got {out}; "
            f"leave out {suffix}"
        )
    empty = out.is_dir() and not any(out.iterdir())
    if os.path.lexists(out) and not empty and (out.is_symlink() or _table(out) is None):
        raise DataError(
            f"cannot write {out}: expected an empty folder, or one of an earlier job, because samples differ in size, "
            "got another; give another path"
        )


def write_each(
    session: Session,
    described: Mapping[str, Mapping[str, Any]],
    what: str,
    out: Path,
    format: str,
    job: Mapping[str, Any],
    tell: Tell,
    flips: Sequence[str] = (),
    steps: int = 0,
) -> int:
    """Compute and write the samples of all files; return the number that this job computed. Collective.

    Arguments as for :func:`halograd.training.applying.outputs_of` and `write_outputs`.

    Raises
    ------
    UserError, DataError
        If the data set is not one of files, the network does not take samples of a size, or a file cannot be written.
    """
    comm, dataset = session.comm, session.samples.dataset
    if not isinstance(dataset, FileSet):
        raise UserError(
            "data.path: expected samples of one size with data.lag or a data set of your own, got several; apply them "
            "one size after another"
        )
    names, grid = _names([part.path for part in dataset.parts], WRITERS.make(format).suffix), grid_of(session.network)
    slides = isinstance(session.samples.windows, SlidingWindows)  # a network of one size
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, part in enumerate(dataset.parts):
        shapes = [sample_shape(part, name, 0)[:-1] for name in (grid, *part.fields)]
        groups.setdefault(tuple(n for shape in shapes for n in shape), []).append(number)
    jobs = [_mark(job, part) for part in dataset.parts]
    table = on_root(comm.mpi, lambda: _table(out) or {})
    done = on_root(comm.mpi, lambda: [_complete(out / n, table.get(n), mark) for n, mark in zip(names, jobs)])
    known = {name: entry for name, entry in table.items() if name in names}
    ready = sum(len(part) for part, complete in zip(dataset.parts, done) if complete)
    computed = 0
    for numbers in groups.values():
        left = [number for number in numbers if not done[number]]
        if not left:
            continue
        extents = sample_shape(dataset.parts[left[0]], grid, 0)[:-1]
        with comm.agreement():
            most = max(len(dataset.parts[number]) for number in numbers)
            made = None if slides else Sized(session, at_size(session.config, extents, most, comm.size))
        with ExitStack() as stack:
            sized = session if made is None else open_sized(session, made, dataset.parts[left[0]], stack)
            for number in left:
                part, path = dataset.parts[number], out / names[number]
                with comm.agreement(), writing(path):
                    if comm.rank == 0:
                        path.parent.mkdir(parents=True, exist_ok=True)
                with ExitStack() as own:
                    samples = replace(sized.samples, dataset=part, windows=sized.samples.windows.over(part))
                    loader, ahead = open_loader(sized.config, sized.executor, samples, own)
                    each = replace(sized, samples=samples, loader=loader, ahead=ahead)
                    outputs = outputs_of(each, what, described, steps)
                    shown = _shown(tell, ready, len(dataset))
                    of_file = {**job, "files": _files(job, part)}
                    computed += write_outputs(each, outputs, path, WRITERS.make(format), of_file, shown, flips)
                part.close()
                ready += len(part)
                known[names[number]] = {"source": str(part.path), "samples": len(part), "job": jobs[number]}
                with comm.agreement(), writing(out / TABLE):
                    if comm.rank == 0:
                        _write(out, {name: known[name] for name in names if name in known})
    return computed


def _shown(tell: Tell, before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: tell(before + done, total)


def _write(out: Path, table: Mapping[str, Any]) -> None:
    with replacing(out / TABLE) as partial:
        partial.write_text(json.dumps({"written_by": WRITTEN_BY, "files": table}, indent=1) + "\n", encoding="utf-8")


def _files(job: Mapping[str, Any], part: Hdf5Dataset) -> list[Any]:
    """Return the entries of a job's files that concern one file of samples."""
    own = {str(part.path), *map(str, part.structure.files)}
    return [entry for entry in job["files"] if entry[0] in own]


def _mark(job: Mapping[str, Any], part: Hdf5Dataset) -> str:
    """Return a text that changes with the job or the file of samples."""
    return hashlib.sha256(json.dumps({**job, "files": _files(job, part)}, sort_keys=True).encode()).hexdigest()


def _complete(path: Path, entry: Any, mark: str) -> bool:
    """Return whether this job has completed a file, with all parts that it refers to. Local."""
    if not isinstance(entry, dict) or entry.get("job") != mark or not path.exists():
        return False
    if not h5py.is_hdf5(path):
        return True
    try:
        with h5py.File(path, "r", locking=False) as file:
            needs = file.attrs.get("needs", "").split("\n")
    except OSError:  # a file that was cut off is written again
        return False
    return all((path.parent / name).exists() for name in needs if name)


def _names(paths: Sequence[Path], suffix: str) -> list[str]:
    """Return the names of the results of files, relative to their folder.

    >>> _names([Path("a/s1.h5"), Path("b/s1.h5")], ".h5")
    ['a/s1.h5', 'b/s1.h5']
    """
    parents = [path.absolute().parent for path in paths]
    common = os.path.commonpath(parents)
    names = [(Path(os.path.relpath(p, common)) / path.stem).as_posix() + suffix for p, path in zip(parents, paths)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"data: expected files that differ in more than their suffix, got two for {twice!r}")
    return names
