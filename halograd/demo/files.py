"""Settings, folder, configuration and data set of a demonstration.

Only files that the demonstration itself has written are replaced. A data set is reused if it has the same settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..data import DataError, Hdf5Dataset, generate
from ..data.disk import atomic_path, open_to_read
from ..data.mesh_tangling import FORMAT, FORMAT_VERSION, Settings
from ..documents import to_toml, writing
from ..errors import UserError
from ..training.directory import RunLock

__all__ = ["FULL", "QUICK", "DemoSettings", "Files", "make_dataset", "prepare", "replace_run", "write_config"]


@dataclass(frozen=True)
class DemoSettings:
    """Settings of one demonstration.

    Attributes
    ----------
    resolution
        Cells per axis of a sample; a multiple of ``2 ** len(widths)``.
    samples, seed
        Number of samples (two per simulation), and seed of the data set.
    validation
        Fraction of the simulations that is held out.
    widths, convs
        Filters per block of the network, and convolutions per block.
    sample, height
        Parts of the batch and of the rows; their product is the number of ranks.
    epochs, batch, learning_rate, pos_weight
        Options of the training. `pos_weight` is the weight of masked cells in the loss.
    """

    resolution: int
    samples: int
    widths: tuple[int, ...]
    convs: int
    epochs: int
    learning_rate: float
    batch: int = 4
    seed: int = 1
    validation: float = 0.2
    pos_weight: float = 1.5
    sample: int = 2
    height: int = 2

    @property
    def ranks(self) -> int:
        return self.sample * self.height


#: Settings of the usual demo: it takes less than three minutes on two idle cores, half of them for training.
FULL = DemoSettings(128, 192, (24, 32, 48, 64), 1, 18, 0.004)
#: Settings of a demo of some seconds, which checks that everything works; the network learns little.
QUICK = DemoSettings(32, 12, (8, 12), 1, 3, 0.01)


#: Exactly the files that a training run writes.
RUN_FILES = (
    "log.jsonl",
    "run.lock",
    "run.lock.*",
    "timeline.json",
    "timeline.json.new",
    "timeline.json.rank*",
    "checkpoints/step-*.h5",
    "checkpoints/latest.h5",
    "checkpoints/best.h5",
    "checkpoints/.latest.new",  # of older versions
    "checkpoints/.best.new",
    "checkpoints/.*.partial",
)


@dataclass(frozen=True)
class Files:
    """Paths of the files of a demonstration in its folder `out`."""

    out: Path

    @property
    def data(self) -> Path:
        return self.out / "mesh.h5"

    @property
    def config(self) -> Path:
        return self.out / "config.toml"

    @property
    def run(self) -> Path:
        """Folder of the finished run."""
        return self.out / "run"

    @property
    def new_run(self) -> Path:
        """Folder of the run during training; renamed to :attr:`run` when it is finished."""
        return self.out / "run.new"

    @property
    def predictions(self) -> Path:
        return self.out / "predictions.h5"

    @property
    def report(self) -> Path:
        return self.out / "report.html"


def prepare(files: Files) -> None:
    """Create the folder, and remove files that an interrupted demonstration has left. Local.

    Raises
    ------
    UserError
        `out` is not a writable folder, or another demonstration trains there.
    """
    with writing(f"--out {files.out}"):
        files.out.mkdir(parents=True, exist_ok=True)
    # `mkdir` raises no error for an existing folder that is read-only.
    if not os.access(files.out, os.W_OK):
        raise UserError(f"--out: expected a folder that can be written to, got {files.out}; choose another one")
    if files.new_run.exists():
        # Raises UserError if another demonstration trains there.
        with RunLock(files.new_run) as lock:
            lock.acquire()
            clear_run(files.new_run)


def clear_run(folder: Path) -> None:
    """Remove the files of a training run, then its folders if they are empty. Local."""
    for path in _own_files(folder):
        path.unlink()
    for path in (folder / "checkpoints", folder):
        with suppress(OSError):  # does not exist, or has foreign files
            path.rmdir()


def replace_run(new: Path, old: Path) -> None:
    """Move the files of run `new` to `old`, replacing the files of a run there; other files stay. Local."""
    clear_run(old)
    for path in _own_files(new):
        target = old / path.relative_to(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same file system, so each file is replaced at once.
        os.replace(path, target)
    clear_run(new)


def _own_files(folder: Path) -> list[Path]:
    """Return the files in a folder that match `RUN_FILES`, including links to missing files."""
    there = [*folder.glob("*"), *folder.glob("checkpoints/*")]
    return [p for p in there if any(p.relative_to(folder).match(pattern) for pattern in RUN_FILES)]


TEMPLATE = """\
# Written by `halograd demo`. Edit it, and train again into a folder of your own:
#
#   mpiexec -n {ranks} halograd train {config} --set output.directory={mine}
#   mpiexec -n {ranks} halograd evaluate {mine}
#
# Any number of ranks is possible that [strategy] can divide. Paths are relative to the working folder.

[model]
name = "mesh"                     # convolution, batch norm and ReLU, as in Dryden et al. 2019
resolution = {resolution}                  # cells per axis
channels = 18                     # state and quality metrics of a cell
widths = {widths}         # filters per block; every block halves the resolution
convs = {convs}                         # convolutions per block
decoder = true                    # and back up again: one prediction per cell
pos_weight = {pos_weight}                  # weight in the loss of the cells that need relaxation

[data]
path = {data}
validation = {validation}                  # share of the simulations held out

[strategy]                        # {ranks} ranks = {sample} x {height}
sample = {sample}                        # parts of the batch
height = {height}                        # parts of the rows of every sample; halos are exchanged between them
halo = "auto"                     # "overlap": compute the inner part while the halo travels; "pad": wait for it
bucket_bytes = 131072             # gradients are summed in parts of this size while the rest is computed

[optimizer]
kind = "adamw"
weight_decay = 0.01

[schedule]
kind = "cosine"
learning_rate = {learning_rate}
warmup_epochs = 1

[training]
epochs = {epochs}
batch = {batch}                         # samples per step, over all ranks
seed = {seed}

[backend]
kernels = "auto"                  # "onednn" or "numpy"
threads = 1                       # per rank

[output]
directory = {run}
timeline = true                   # writes timeline.json, for https://ui.perfetto.dev
"""


def write_config(files: Files, settings: DemoSettings) -> Path | None:
    """Write ``config.toml``. An existing file with another text is renamed; return its new path, else None. Local."""
    text = _text(files, settings)
    kept = None
    if files.config.exists():
        if files.config.read_text(encoding="utf-8", errors="replace") == text:
            return None
        # The user may have edited it.
        kept = _free_name(files.config)
        files.config.rename(kept)
    with atomic_path(files.config) as partial:
        partial.write_text(text, encoding="utf-8")
    return kept


def _text(files: Files, settings: DemoSettings) -> str:
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    values |= {"ranks": settings.ranks, "widths": list(settings.widths), "config": files.config}
    values |= {"data": to_toml(str(files.data)), "run": to_toml(str(files.run)), "mine": files.out / "mine"}
    return TEMPLATE.format(**values)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return free


def make_dataset(path: Path, settings: DemoSettings, progress: Callable[[int, int], None] | None = None) -> bool:
    """Write the data set unless a complete one with these settings exists; return whether it was written. Local.

    Raises
    ------
    UserError
        `path` is a foreign file, which is not replaced.
    """
    if path.exists() and _has_settings(path, settings):
        return False
    generate(path, settings.resolution, settings.samples, settings.seed, progress=progress)
    return True


def _has_settings(path: Path, settings: DemoSettings) -> bool:
    expected = asdict(Settings(settings.resolution, settings.samples, settings.seed))
    expected["format_version"] = FORMAT_VERSION
    try:
        with open_to_read(path) as file:
            attributes = dict(file.attrs)
    except OSError:
        attributes = {}
    if attributes.get("format") != FORMAT:
        raise UserError(f"expected no file or a mesh-tangling data set at {path}, got another file; move it away")
    # Data of other settings, or of another version, are generated again.
    return all(attributes.get(key) == value for key, value in expected.items()) and _is_complete(path, settings)


def _is_complete(path: Path, settings: DemoSettings) -> bool:
    try:
        with Hdf5Dataset(path) as dataset:
            return len(dataset) == settings.samples and dataset.groups is not None
    except DataError:
        return False
