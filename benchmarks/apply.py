"""Peak memory per rank of `halograd apply` on large samples, compared with one process, and agreement of the outputs.

    python benchmarks/apply.py
    python benchmarks/apply.py --resolution 512 --ranks 2,4

A network of mesh-tangling data is trained for some steps on small samples, then applied to samples of 18 channels, cut
along the height. ``peak`` is the largest resident memory of a rank (VmHWM, shared segments included) minus that with
all libraries loaded, maximum over ranks; ``share`` is the peak of one process, divided by the number of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import h5py
import numpy as np
import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.contestants import launcher
from benchmarks.memory_ranks import peak_bytes, reset_peak, resident_bytes

_CONFIG = """
[model]
name = "mesh"
resolution = 64
channels = 18
widths = [8, 16, 16]
convs = 1
decoder = true
[data]
path = "{data}"
[optimizer]
kind = "sgd"
[schedule]
learning_rate = 0.01
[training]
epochs = 1
batch = 1
[backend]
threads = 1
[output]
directory = "{out}"
progress = false
"""


def write_samples(path: Path, resolution: int, samples: int) -> None:
    """Write random fields, row by row, and a mask. Local."""
    rng = np.random.default_rng(0)
    shape = (samples, resolution, resolution, 18)
    with h5py.File(path, "w") as file:
        inputs = file.create_dataset("inputs", shape, np.float32)
        inputs.attrs["layout"] = "NHWC"
        for n in range(samples):
            for row in range(0, resolution, 64):
                inputs[n, row : row + 64] = rng.standard_normal((min(64, resolution - row), *shape[2:]), np.float32)
        file.create_dataset("mask", data=(np.asarray(rng.random(shape[:3])) < 0.3).astype(np.uint8))


def rank(folder: Path, resolution: int, out: Path) -> None:
    """Predict on one rank and print its memory. Collective."""
    from mpi4py import MPI

    from halograd.kernels import get_backend
    from halograd.training import apply
    from halograd.training.session import Session  # noqa: F401 - all that an application loads

    get_backend("auto").close()  # loads the library, which has the same size on every rank

    world = MPI.COMM_WORLD
    sets = [f"model.resolution={resolution}", f"strategy.height={world.size}"]
    reset_peak()
    before = resident_bytes()
    apply(folder / "run", [str(folder / "large.h5")], out, sets)
    found = world.gather(peak_bytes() - before)
    if world.rank == 0:
        print(json.dumps(found))


def measure(folder: Path, resolution: int, ranks: int) -> list[int]:
    """Return the peak memory of all ranks [B]."""
    out = folder / f"{ranks}.h5"
    arguments = [__file__, "--folder", str(folder), "--resolution", str(resolution), "--out", str(out)]
    done = subprocess.run(
        [*launcher(ranks), sys.executable, *arguments], capture_output=True, text=True, env={**os.environ}, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of two files of predictions, relative to the largest prediction."""
    with h5py.File(one) as a, h5py.File(other) as b:
        found = [np.abs(a["prediction"][n] - b["prediction"][n]).max() for n in range(len(a["prediction"]))]
        return float(max(found) / max(np.abs(a["prediction"][n]).max() for n in range(len(a["prediction"]))))


def main(
    resolution: Annotated[int, typer.Option(help="Of the samples.")] = 2048,
    samples: Annotated[int, typer.Option(help="How many.")] = 3,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "4",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the peak memory of one process and of several ranks."""
    if folder is not None and out is not None:
        rank(folder, resolution, out)
        return
    from halograd.training import train

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_samples(place / "small.h5", 64, 8)
        write_samples(place / "large.h5", resolution, samples)
        (place / "run.toml").write_text(_CONFIG.format(data=place / "small.h5", out=place / "run"))
        train(place / "run.toml")
        (alone,) = measure(place, resolution, 1)
        print(f"{resolution} x {resolution} x 18, 1 process: {alone / 2**20:.0f} MiB")
        for count in map(int, ranks.split(",")):
            peaks: list[Any] = measure(place, resolution, count)
            share, off = alone / count, difference(place / "1.h5", place / f"{count}.h5")
            text = f"{count} ranks: peak {max(peaks) / 2**20:.0f} MiB, share {share / 2**20:.0f} MiB"
            print(f"{text}, ratio {max(peaks) / share:.3f}; outputs differ by {off:.1e}")


if __name__ == "__main__":
    typer.run(main)
