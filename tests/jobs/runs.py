"""Files of a small run: configuration, data and log."""

from __future__ import annotations

from pathlib import Path

from halograd.training.log import read_log

CONFIG = """\
[model]
name = "mesh"
resolution = 32
widths = [8, 12]
convs = 1
decoder = true

[data]
path = "mesh.h5"
validation = 0.2

[strategy]
sample = 2
height = 2

[optimizer]
kind = "adamw"

[schedule]
kind = "cosine"
learning_rate = 0.01

[training]
epochs = 6
batch = 4

[output]
directory = "run"
checkpoint_steps = 2
progress = false
"""


def write_config(folder: Path) -> Path:
    """Write a smaller configuration of the mesh-tangling demo."""
    path = folder / "mesh.toml"
    path.write_text(CONFIG)
    return path


def losses(run: Path) -> dict[int, float]:
    """Return the logged losses by step."""
    path = run / "log.jsonl"
    return {entry["step"]: entry["loss"] for entry in read_log(path, "step")} if path.exists() else {}
