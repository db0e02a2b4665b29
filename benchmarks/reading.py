"""Time of reading samples of each type of number, divided by that of a raw read and cast; chunks of many samples.

    python benchmarks/reading.py
    python benchmarks/reading.py --resolution 1024 --samples 8

All files are in the page cache. ``raw`` reads the bytes of a sample with one call and casts them to float32 by NumPy;
``read`` is :meth:`Hdf5Dataset.read` with its check for NaN and infinity, of whole samples. Samples are read in a random
order. Both are the minimum over rounds that alternate. The last lines compare chunks (gzip) of 32 samples with chunks
of one sample, as one rank reads whole samples, and one of two ranks halves of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import h5py
import numpy as np
import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.data import Hdf5Dataset
from halograd.dtensor import Box

TYPES = ("<f4", "<f8", ">f4", "u1", "<u2", "<i2")
CHANNELS = 4


def seconds(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the least time of each function over rounds, in which they alternate [s]."""
    best = dict.fromkeys(runs, np.inf)
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def ratio(path: Path, dtype: str, samples: int, resolution: int, rounds: int) -> tuple[float, float]:
    """Return the time of a sample [s], and its ratio to that of a raw read and cast."""
    shape = (samples, resolution, resolution, CHANNELS)
    numbers = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=numbers).attrs["layout"] = "NHWC"
        offset = file["inputs"].id.get_offset()
    order = np.random.default_rng(1).permutation(samples)
    out, raw = np.empty((1, *shape[1:]), np.float32), np.empty(shape[1:], dtype)
    with Hdf5Dataset(path, targets=None) as dataset, path.open("rb", buffering=0) as plain:

        def read() -> None:
            for k in order:
                dataset.read("x", [k], Box.of_shape(out.shape), out)

        def cast() -> None:
            for k in order:
                plain.seek(offset + int(k) * raw.nbytes)
                plain.readinto(raw.reshape(-1).view(np.uint8))
                np.copyto(out[0], raw, casting="unsafe")

        times = seconds({"raw": cast, "read": read}, rounds)
    return times["read"] / samples, times["read"] / times["raw"]


def chunks(path: Path, at_once: int, ranks: int, rounds: int) -> float:
    """Return the time of an epoch of shuffled samples in gzip chunks of this number of samples, for one rank [s]."""
    shape = (256, 64, 64, CHANNELS)
    with h5py.File(path, "w") as file:
        numbers = np.random.default_rng(0).integers(0, 50, shape).astype(np.float32)
        chunk = (at_once, *shape[1:])
        file.create_dataset("inputs", data=numbers, chunks=chunk, compression=1).attrs["layout"] = "NHWC"
    out = np.empty((1, shape[1] // ranks, *shape[2:]), np.float32)
    order = np.random.default_rng(1).permutation(shape[0])

    def epoch() -> None:
        with Hdf5Dataset(path, targets=None) as dataset:
            for k in order:
                dataset.read("x", [k], Box.of_shape(out.shape), out)

    return seconds({"epoch": epoch}, rounds)["epoch"]


def main(
    samples: Annotated[int, typer.Option(help="Samples of a file.")] = 8,
    resolution: Annotated[int, typer.Option(help="Rows and columns of a sample, of 4 channels.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds, of which the fastest counts.")] = 7,
) -> None:
    """Print the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.h5"
        print(f"{samples} samples ({resolution}, {resolution}, {CHANNELS}): read / (raw + cast)")
        for dtype in TYPES:
            took, times = ratio(path, dtype, samples, resolution, rounds)
            print(f"  {dtype:4} {1e3 * took:8.2f} ms a sample   {times:5.2f}")
        print("gzip chunks of 32 samples / of one sample, shuffled")
        for ranks in (1, 2):
            times = chunks(path, 32, ranks, rounds) / chunks(path, 1, ranks, rounds)
            print(f"  a rank of {ranks}   {times:5.2f}")


if __name__ == "__main__":
    typer.run(main)
