"""Time of augmentation by smooth maps, against reading alone and `scipy.ndimage.map_coordinates`.

    python benchmarks/warp.py

Per sample, the shortest of several reads of a whole sample, by one thread and from the page cache: ``read`` from HDF5
alone [ms]; ``augmented`` with the changes of the row [ms]; ``x read`` their ratio. ``scipy`` is `map_coordinates` of
order 1 on the sample in memory, with the positions of all elements given [ms] ("-" without scipy); ``x scipy`` is
augmented / scipy. ``MiB`` is the peak of what augmentation allocates, by `tracemalloc`; the sample has the size in
the first column.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import h5py
import numpy as np

from halograd.data import Hdf5Dataset
from halograd.data.warp import Displacement, GridMap, SmoothMap, linear_map, sample_block
from halograd.dtensor import Box

SHAPES = [(512, 512, 1), (512, 512, 3), (1024, 1024, 3), (96, 96, 96, 1), (128, 128, 128, 2)]
#: Changes, and whether they have an elastic displacement.
CHANGES = {"rotation, scale": False, "rotation, scale, elastic": True}
COLUMNS = ("sample", "MiB", "changes", "read", "augmented", "x read", "scipy", "x scipy", "MiB")
WIDTHS = (16, 6, 26, 8, 10, 7, 8, 8, 6)


def shortest(run: Callable[[], Any], times: int) -> float:
    """Return the shortest time of several calls [ms]."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * min(seconds)


def scipy_time(x: np.ndarray, grid: GridMap, times: int) -> float | None:
    """Return the time of `map_coordinates` for a sample ``(*spatial, C)`` [ms]; None without scipy."""
    if importlib.util.find_spec("scipy") is None:
        return None
    from scipy.ndimage import map_coordinates

    positions = np.stack(np.broadcast_arrays(*grid.at([(0, n) for n in grid.extents])))
    channels = [np.ascontiguousarray(x[..., k]) for k in range(x.shape[-1])]
    return shortest(lambda: [map_coordinates(c, positions, order=1, mode="reflect") for c in channels], times)


def map_of(extents: tuple[int, ...], elastic: bool) -> GridMap:
    """Return a map about the centre of a sample."""
    axes = tuple(range(len(extents)))
    matrix = linear_map([0.4] if len(axes) == 2 else [0.4, -0.2, 0.3], [1.2] * len(axes))
    displacement = Displacement.draw(np.random.default_rng(0), extents, 6.0, 32.0) if elastic else None
    return GridMap(SmoothMap(extents, matrix, displacement), axes, (False,) * len(axes), (0,) * len(axes), extents)


def rows(shapes: list[tuple[int, ...]], times: int) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a line per shape and change."""
    with tempfile.TemporaryDirectory() as folder:
        for number, shape in enumerate(shapes):
            path = Path(folder) / f"{number}.h5"
            x = np.random.default_rng(0).standard_normal(shape, np.float32)
            with h5py.File(path, "w") as file:
                file["x"] = x[None]
            dataset, out = Hdf5Dataset(path, {"x": "x"}, {}, layout="NHWC"), np.empty(shape, np.float32)
            read = shortest(partial(dataset.read, "x", [0], Box.of_shape((1, *shape)), out[None]), times)
            for changes, elastic in CHANGES.items():
                grid = map_of(shape[:-1], elastic)
                call = partial(augment, dataset, grid, out)
                tracemalloc.start()
                call()
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                augmented, scipy = shortest(call, times), scipy_time(x, grid, times)
                against = ("-", "-") if scipy is None else (f"{scipy:.1f}", f"{augmented / scipy:.2f}")
                sizes = "x".join(map(str, shape)), f"{x.nbytes / 2**20:.1f}"
                ratio = f"{augmented / read:.1f}"
                yield *sizes, changes, f"{read:.2f}", f"{augmented:.1f}", ratio, *against, f"{peak / 2**20:.1f}"
            dataset.close()


def augment(dataset: Hdf5Dataset, grid: GridMap, out: np.ndarray) -> None:
    """Read sample 0 through a map, as the reading thread of a run does."""

    def read(ranges: Sequence[tuple[int, int]], channels: tuple[int, int], part: np.ndarray) -> None:
        dataset.read("x", [0], Box.of_ranges([(0, 1), *ranges, channels]), part[None])

    extents, box = out.shape[:-1], [(0, n) for n in out.shape]
    sample_block(read, grid, box, out, extents=extents, borders=["reflect"] * len(extents))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="number of reads, of which the shortest counts")
    options = parser.parse_args(arguments)
    for row in itertools.chain([COLUMNS], rows(SHAPES, options.times)):
        print(" ".join(cell.rjust(width) for cell, width in zip(row, WIDTHS)), flush=True)


if __name__ == "__main__":
    main()
