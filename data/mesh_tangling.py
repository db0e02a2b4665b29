"""Generate mesh-tangling samples: Lagrangian meshes in an unsteady flow, and the cells about to tangle.

A *simulation* is one random flow and bubble that carries one mesh (:mod:`.lagrangian`). A *sample* is one simulation at
one instant t: 18 channels of state and cell quality at t, and the mask of the cells that need relaxation now: cells
whose scaled Jacobian falls below the limit within the next interval ``[t, t + interval]`` without relaxation. Most of
these cells still have a good quality at t; the shear of the velocity around them will deform them.

The instants are chosen such that about 2 to 30 % of the cells are masked. They are chosen on a coarse copy of the mesh,
so they do not depend on the resolution. Neither the instants nor the flow depend on the number of samples or row
blocks.

File format 1 (HDF5)::

    inputs      (N, R, R, 18) float32, chunks (1, 64, 64, 18); layout "NHWC", channel_names, channel_units
    mask        (N, R, R)     uint8 in {0, 1};                 layout "NHWC"
    simulation  (N,)          int64: samples of one simulation belong on one side of a train/validation split
    time        (N,)          float64 [s]
    attributes  format "halograd mesh-tangling", format_version 1, and every field of Settings

Row i of a sample is the mesh line of initial y = i / R, column j that of initial x = j / R.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from .disk import DataError, atomic_path
from .lagrangian import CHANNELS, UNITS, Bubble, Flow, MeshBlock
from .storage import dataset_of

__all__ = ["FORMAT", "FORMAT_VERSION", "MeshSimulation", "Settings", "generate"]

FORMAT = "halograd mesh-tangling"
FORMAT_VERSION = 1
BLOCK = 64
"""Cell rows computed and written at a time, and the side of a chunk."""
PILOT = 64
"""Cells per axis of the coarse mesh on which the instants are chosen."""


@dataclass(frozen=True)
class Settings:
    """Settings that determine a data set.

    Attributes
    ----------
    resolution : int
        Cells per axis.
    samples, seed : int
        Number of samples, and the seed of all randomness.
    samples_per_simulation : int
        Number of instants per simulation.
    limit : float
        Scaled Jacobian below which a cell needs relaxation.
    time_step : float
        Step of the Runge-Kutta scheme [s]; the quality is computed after every step.
    interval_steps : int
        Length of the interval after an instant, in which a cell that falls below `limit` is masked, in steps.
    most_steps : int
        Largest number of steps of a simulation.
    least_masked, most_masked : float
        Range of the share of masked cells of the coarse mesh at the chosen instants, if possible. A finer mesh has up
        to a fifth fewer masked cells: these values give 2 to 30 % at resolution 128.
    """

    resolution: int
    samples: int
    seed: int = 0
    samples_per_simulation: int = 2
    limit: float = 0.2
    time_step: float = 0.025
    interval_steps: int = 10
    most_steps: int = 80
    least_masked: float = 0.03
    most_masked: float = 0.36

    def __post_init__(self) -> None:
        _check(self.resolution >= 8, "resolution", "at least 8", self.resolution)
        _check(self.samples >= 1, "samples", "at least 1", self.samples)
        _check(0 <= self.seed < 2**63, "seed", f"0 to {2**63 - 1}", self.seed)
        _check(self.samples_per_simulation >= 1, "samples_per_simulation", "at least 1", self.samples_per_simulation)
        _check(0 < self.limit < 1, "limit", "between 0 and 1", self.limit)
        _check(0 < self.time_step <= 0.1, "time_step", "above 0 and at most 0.1 s", self.time_step)
        _check(self.interval_steps >= 1, "interval_steps", "at least 1", self.interval_steps)
        # The instants, none of them at rest (step 0), and the interval after the last one.
        least = self.interval_steps + self.samples_per_simulation + 1
        _check(self.most_steps >= least, "most_steps", f"at least {least}", self.most_steps)
        masked = (self.least_masked, self.most_masked)
        _check(0 <= masked[0] < masked[1] <= 1, "least_masked < most_masked", "within [0, 1]", masked)

    @property
    def simulations(self) -> int:
        return -(-self.samples // self.samples_per_simulation)


class MeshSimulation:
    """One random flow, its mesh, and the instants at which samples are taken. Local.

    Parameters
    ----------
    settings : Settings
    index : int
        Number of the simulation; with the seed, it determines the flow and the mesh.
    """

    def __init__(self, settings: Settings, index: int) -> None:
        self.settings, self.index = settings, index
        # A random stream per simulation, so that its flow does not depend on the number of samples.
        rng = np.random.default_rng([settings.seed, index])
        self.bubble = Bubble.draw(rng)
        self.flow = Flow(rng, self.bubble, settings.time_step, settings.most_steps)
        self.steps = self._choose_steps(rng)

    def mesh(self, first: int = 0, last: int | None = None) -> MeshBlock:
        """Return cell rows ``[first, last)`` of the mesh at rest."""
        last = self.settings.resolution if last is None else last
        return MeshBlock(self.flow, self.settings.resolution, first, last, self.settings.time_step)

    def sample_rows(self, first: int, last: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Compute cell rows ``[first, last)`` of the first `count` samples.

        Returns
        -------
        inputs ``(count, rows, resolution, 18)``, mask ``(count, rows, resolution)``.
        """
        s, steps = self.settings, self.steps[:count]
        mesh = self.mesh(first, last)
        shape = (len(steps), last - first, s.resolution)
        inputs = np.empty((*shape, len(CHANNELS)), np.float32)
        mask = np.zeros(shape, np.uint8)
        for step in range(max(steps) + s.interval_steps + 1):
            watching = [k for k, at in enumerate(steps) if at <= step <= at + s.interval_steps]
            if watching:
                # A cell counts if it is below the limit at any step of the interval, even if it recovers.
                mask[watching] |= mesh.quality() < s.limit
            for k in watching:
                if steps[k] == step:
                    mesh.channels(inputs[k])
            mesh.advance()
        return inputs, mask

    def _choose_steps(self, rng: np.random.Generator) -> list[int]:
        """Choose instants, in order: one from each equal part of the steps whose share of masked cells is in range."""
        s = self.settings
        share = self._pilot()
        eligible = np.flatnonzero((share >= s.least_masked) & (share <= s.most_masked))
        eligible = eligible[eligible > 0]  # no instant at rest, where nothing has moved
        if len(eligible) < s.samples_per_simulation:
            # The flow tangles all cells at once, or hardly any: take the instants nearest to the range.
            # Without step 0, which is at rest; `1 +` turns positions in `off` back into steps.
            off = np.maximum(s.least_masked - share, share - s.most_masked)[1:]
            eligible = 1 + np.sort(np.argsort(off, kind="stable")[: s.samples_per_simulation])
        return [int(rng.choice(part)) for part in np.array_split(eligible, s.samples_per_simulation)]

    def _pilot(self) -> NDArray[np.float64]:
        """Compute the share of masked cells of the coarse mesh, for each step at which an interval may begin.

        Steps after a share above `most_masked` may be missing.
        """
        s = self.settings
        mesh = MeshBlock(self.flow, PILOT, 0, PILOT, s.time_step)
        # The masks of the steps of one interval, with both of its ends.
        recent: deque[NDArray[np.bool_]] = deque(maxlen=s.interval_steps + 1)
        share: list[float] = []
        for _ in range(s.most_steps):
            recent.append(mesh.quality() < s.limit)
            if len(recent) == s.interval_steps + 1:
                share.append(float(np.logical_or.reduce(list(recent)).mean()))
                # Too many cells are masked, and there are enough instants: later ones are not tried.
                if share[-1] > s.most_masked and len(share) > s.samples_per_simulation:
                    break
            mesh.advance()
        return np.array(share)


def generate(
    path: str | os.PathLike[str],
    resolution: int,
    samples: int,
    seed: int = 0,
    *,
    samples_per_simulation: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Settings:
    """Write a data set of mesh-tangling samples. Local.

    A temporary file next to `path` is renamed when it is complete. Memory does not grow with the number of samples, and
    only linearly with the resolution. The same arguments give the same data.

    Parameters
    ----------
    path : path
        The HDF5 file to write; an existing file is replaced at the end.
    resolution, samples, seed, samples_per_simulation : int
        See :class:`Settings`.
    progress : callable, optional
        Called as ``progress(done, total)`` after every row block.

    Returns
    -------
    Settings : the settings of the data set.

    Raises
    ------
    DataError
        An argument is out of range, the folder is missing, or the disk is full.
    """
    settings = Settings(resolution, samples, seed, samples_per_simulation)
    # Per cell float32 channels and a byte of the mask, which are not compressed.
    needed = samples * resolution**2 * (4 * len(CHANNELS) + 1)
    with atomic_path(path, needed, remedy="request fewer or smaller samples") as partial, _hdf5(partial) as file:
        _create(file, settings)
        _fill(file, settings, progress)
    return settings


@contextlib.contextmanager
def _hdf5(path: Path) -> Iterator[h5py.File]:
    """Open a new HDF5 file. The first error is raised, and not those of closing a broken file."""
    # No chunk cache: every write reaches the file at once, so the write that fills the disk fails.
    # No lock: nothing else opens a temporary file, and some file systems have no locks (`open_to_read`).
    file = h5py.File(path, "w", libver="v110", rdcc_nbytes=0, locking=False)
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            file.close()
        raise
    file.close()


def _create(file: h5py.File, settings: Settings) -> None:
    n, r = settings.samples, settings.resolution
    side = min(BLOCK, r)
    # Every element is written, so do not write fill values first.
    inputs = file.create_dataset(
        "inputs", (n, r, r, len(CHANNELS)), np.float32, chunks=(1, side, side, len(CHANNELS)), fillvalue=None
    )
    mask = file.create_dataset("mask", (n, r, r), np.uint8, chunks=(1, side, side))
    inputs.attrs["channel_names"] = list(CHANNELS)
    inputs.attrs["channel_units"] = list(UNITS)
    mask.attrs["description"] = "1: the cell needs relaxation now"
    for dataset in (inputs, mask):
        dataset.attrs["layout"] = "NHWC"
    file.create_dataset("simulation", data=np.arange(n) // settings.samples_per_simulation)
    file.create_dataset("time", (n,), np.float64).attrs["units"] = "s"
    file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(settings)})


@dataclass(frozen=True)
class _Task:
    simulation: MeshSimulation
    first: int
    last: int
    taken: int


def _tasks(settings: Settings) -> Iterator[_Task]:
    """Yield all row blocks of all simulations, in the order of the file."""
    per = settings.samples_per_simulation
    for index in range(settings.simulations):
        simulation = MeshSimulation(settings, index)
        count = min(per, settings.samples - index * per)
        for first in range(0, settings.resolution, BLOCK):
            yield _Task(simulation, first, min(first + BLOCK, settings.resolution), count)


def _fill(file: h5py.File, settings: Settings, progress: Callable[[int, int], None] | None) -> None:
    total = settings.simulations * -(-settings.resolution // BLOCK)
    for done, task in enumerate(_tasks(settings), start=1):
        _write(file, settings, task)
        if progress is not None:
            progress(done, total)


def _write(file: h5py.File, settings: Settings, task: _Task) -> None:
    inputs, mask = task.simulation.sample_rows(task.first, task.last, task.taken)
    start = task.simulation.index * settings.samples_per_simulation
    samples, rows = slice(start, start + task.taken), slice(task.first, task.last)
    dataset_of(file, "inputs")[samples, rows] = inputs
    dataset_of(file, "mask")[samples, rows] = mask
    dataset_of(file, "time")[samples] = np.array(task.simulation.steps[: task.taken]) * settings.time_step


def _check(valid: bool, name: str, expected: str, got: object) -> None:
    if not valid:
        raise DataError(f"{name}: expected {expected}, got {got}")
