"""Findings about this machine, and the probe of the MPI library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["STATUSES", "Finding", "probe_mpi"]

STATUSES = ("ok", "note", "warn", "fail")
"""From good to bad. ``note``: missing, but not needed here. ``warn``: training runs, but slower or at risk.
``fail``: training cannot run."""


@dataclass(frozen=True)
class Finding:
    """Result of a probe: a value, its status, and a remedy."""

    name: str
    status: str
    value: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"expected a status out of {STATUSES}, got {self.status!r}")

    @property
    def severity(self) -> int:
        """Severity, from 0 for ``ok`` to 3 for ``fail``."""
        return STATUSES.index(self.status)


def probe_mpi() -> Iterator[Finding]:
    """Report the MPI library, its version and thread level, and the version of mpi4py. Local."""
    try:
        # The import of MPI loads the library and initializes MPI, so both errors occur here.
        import mpi4py
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "pip install 'halograd[mpich]', or load the cluster's MPI (MPI4PY_LIBMPI=/path/of/libmpi.so)"
        yield Finding("MPI library", "fail", " ".join(str(error).split()), remedy)
        return
    vendor, version = MPI.get_vendor()
    standard = ".".join(map(str, MPI.Get_version()))
    yield Finding("MPI library", "ok", f"{vendor} {'.'.join(map(str, version))}, standard {standard}")
    yield _thread_level(MPI.Query_thread())
    yield Finding("mpi4py", "ok", mpi4py.__version__)


def _thread_level(level: int) -> Finding:
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    if level == MPI.THREAD_MULTIPLE:
        return Finding("thread level", "ok", names[level])
    remedy = "expected multiple, for the progress thread: unset MPI4PY_RC_THREAD_LEVEL, or build MPI with threads"
    return Finding("thread level", "fail", names.get(level, str(level)), remedy)
