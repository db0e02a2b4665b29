"""HDF5."""

from __future__ import annotations

from collections.abc import Iterator

from halograd.cli.doctor.finding import Finding

__all__ = ["probe_hdf5"]


def probe_hdf5() -> Iterator[Finding]:
    """h5py, HDF5, and whether it writes from several ranks at once. Local."""
    import h5py

    parallel = "parallel" if h5py.get_config().mpi else "serial (each rank reads its own blocks)"
    yield Finding("h5py", "ok", f"{h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {parallel}")
