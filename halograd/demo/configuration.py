"""The configuration of the demonstration: a file to read, to edit and to start from."""

from __future__ import annotations

import json
from pathlib import Path

from halograd.data.atomic import atomic_path
from halograd.demo.files import Files
from halograd.demo.settings import DemoSettings

__all__ = ["write_config"]

TEMPLATE = """\
# Written by `halograd demo`. Edit it, and train again into a folder of your own:
#
#   mpiexec -n {ranks} halograd train {config} --set output.directory={mine}
#   mpiexec -n {ranks} halograd evaluate {mine}
#
# Any number of ranks will do that [strategy] can share out. Paths are relative to where you start from.

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
    """Write ``config.toml``; where one was that has been edited, the new name of that one. Local."""
    text = _text(files, settings)
    kept = None
    if files.config.exists():
        if files.config.read_text(encoding="utf-8", errors="replace") == text:
            return None
        kept = _free_name(files.config)
        files.config.rename(kept)
    with atomic_path(files.config) as partial:
        partial.write_text(text, encoding="utf-8")
    return kept


def _text(files: Files, settings: DemoSettings) -> str:
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    values |= {"ranks": settings.ranks, "widths": list(settings.widths), "config": files.config}
    # A JSON string is a TOML string.
    values |= {"data": json.dumps(str(files.data)), "run": json.dumps(str(files.run)), "mine": files.out / "mine"}
    return TEMPLATE.format(**values)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return free
