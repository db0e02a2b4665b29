"""Heat equation in two dimensions on a distributed tensor; halos overlap with the interior; no deep learning.

    mpirun -n 4 python -m examples.heat_equation

Explicit Euler, five-point stencil, fixed temperature outside. Every rank updates its interior while
the halos travel, then the cells at its edge; at the end rank 0 compares with one process.
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import DistTensor, Halo, Layout

ROWS, COLUMNS, STEPS, NUMBER = 200, 160, 100, 0.2
MARGIN = ((0, 0), (1, 1), (1, 1), (0, 0))


def initial() -> np.ndarray:
    """Return a hot disk off the centre, shape ``(1, ROWS, COLUMNS, 1)``."""
    y, x = np.mgrid[:ROWS, :COLUMNS]
    return (np.hypot(y - 60, x - 90) < 30).astype(np.float64)[None, :, :, None]


def update(old: np.ndarray, new: np.ndarray, rows: slice, columns: slice) -> None:
    """Compute one Euler step of the cells ``rows x columns`` of an array with a margin of one cell."""
    r, c = (slice(s.start, s.stop) for s in (rows, columns))
    up, down = slice(r.start - 1, r.stop - 1), slice(r.start + 1, r.stop + 1)
    left, right = slice(c.start - 1, c.stop - 1), slice(c.start + 1, c.stop + 1)
    around = old[up, c] + old[down, c] + old[r, left] + old[r, right]
    new[r, c] = old[r, c] + NUMBER * (around - 4 * old[r, c])


def solve(comm: Communicator) -> np.ndarray | None:
    """Return the field after all steps, on rank 0. Collective."""
    parts = MPI.Compute_dims(comm.size, 2)
    layout = Layout.blocks((1, ROWS + 2, COLUMNS + 2, 1), (1, *parts, 1), comm.size)
    cold = np.pad(initial(), ((0, 0), (1, 1), (1, 1), (0, 0)))
    fields = [DistTensor.scatter(comm, cold, layout, dtype="float64", margin=MARGIN) for _ in range(2)]
    halos = [Halo(f) for f in fields]
    held, box = fields[0].held[comm.rank], fields[0].box
    # The cells this rank updates: its own, but not the fixed frame of the array.
    first = [max(a, 1) - o for a, o in zip(box.start[1:3], held.start[1:3])]
    last = [min(b, n - 1) - o for b, n, o in zip(box.stop[1:3], layout.shape[1:3], held.start[1:3])]
    (r0, c0), (r1, c1) = first, last
    for step in range(STEPS):
        halo, old, new = halos[step % 2], fields[step % 2].local[0, ..., 0], fields[(step + 1) % 2].local[0, ..., 0]
        halo.start()
        update(old, new, slice(r0 + 1, r1 - 1), slice(c0 + 1, c1 - 1))
        halo.finish()
        for rows, columns in (
            (slice(r0, r0 + 1), slice(c0, c1)),
            (slice(r1 - 1, r1), slice(c0, c1)),
            (slice(r0, r1), slice(c0, c0 + 1)),
            (slice(r0, r1), slice(c1 - 1, c1)),
        ):
            update(old, new, rows, columns)
    for halo in halos:
        halo.close()
    return fields[STEPS % 2].gather()


def main() -> int:
    with Communicator(MPI.COMM_WORLD) as comm:
        result = solve(comm)
        if comm.rank:
            return 0
        assert result is not None
        with Communicator(MPI.COMM_SELF) as alone:
            expected = solve(alone)
        error = float(np.max(np.abs(result - expected)))
        print(f"{comm.size} ranks, {STEPS} steps: largest difference from one process {error:.3g}")
        return 0 if error == 0.0 else 1


if __name__ == "__main__":
    sys.exit(main())
