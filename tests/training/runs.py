"""A small data set and configuration, for tests of whole runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.training import load_config

SAMPLES, EDGE, CHANNELS = 19, 16, 3

CONFIG = """
[model]
name = "mesh"
resolution = {edge}
channels = {channels}
widths = [4, 6]
convs = 1
decoder = true
pos_weight = 2.0
[data]
path = "{data}"
validation = 0.3
[strategy]
bucket_bytes = 512
[optimizer]
kind = "adamw"
weight_decay = 0.01
[schedule]
kind = "cosine"
learning_rate = 0.01
warmup_epochs = 1
[training]
epochs = 3
batch = 4
seed = 7
dtype = "float64"
[backend]
kernels = "numpy"
[output]
directory = "{out}"
progress = false
"""


def write_data(path: Path) -> None:
    """Write smooth random fields, and a mask of positions at which the first field is larger than the second."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((SAMPLES, EDGE, EDGE, CHANNELS))
    for axis in (1, 2):
        x = (np.roll(x, 1, axis) + 2 * x + np.roll(x, -1, axis)) / 4
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=(10 * x + 3).astype(np.float32)).attrs["layout"] = "NHWC"
        file.create_dataset("mask", data=(x[..., 0] > x[..., 1]).astype(np.uint8))


def write_arrays(path: Path, arrays: Mapping[str, Any], **layouts: str) -> None:
    """Write an HDF5 file with a dataset per array; `layouts` are the orders of axes of some of them, by name."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        for name, layout in layouts.items():
            file[name].attrs["layout"] = layout


def read_array(path: Path | str, name: str = "prediction") -> np.ndarray:
    """Return a dataset of an HDF5 file."""
    with h5py.File(path) as file:
        return file[name][()]


def write_config(folder: Path, out: str = "out", name: str = "run.toml") -> Path:
    """Write data and configuration to `folder`; return the path of the configuration."""
    if not (folder / "data.h5").exists():
        write_data(folder / "data.h5")
    text = CONFIG.format(edge=EDGE, channels=CHANNELS, data=folder / "data.h5", out=folder / out)
    (folder / name).write_text(text)
    return folder / name


def write_own(folder: Path, network: str, data: str | None = None, settings: str = "") -> Path:
    """Write a user's network, a configuration, and data if `data` is None; return the path of the configuration."""
    (folder / "net.py").write_text(network)
    text = CONFIG.format(edge=EDGE, channels=CHANNELS, data="data.h5", out="out")
    if data is None:
        write_data(folder / "data.h5")
        data = text[text.index("[data]") : text.index("[strategy]")]
    text = f'[model]\nfile = "net.py:build"\n{settings}{data}' + text[text.index("[strategy]") :]
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def write_named(folder: Path, network: str, data: str, arrays: Mapping[str, Any], **layouts: str) -> Path:
    """Write a user's network, `arrays` (see `write_arrays`) and a configuration; `data` is its table, without path."""
    write_arrays(folder / "data.h5", arrays, **layouts)
    return write_own(folder, network, f'[data]\npath = "data.h5"\n{data}')


def write_shared(comm: Any, folder: Path, write: Callable[[Path], object] = write_config) -> Path:
    """Let rank 0 write a run to a shared folder; return the path of its configuration. Collective over `comm`."""
    if comm.rank == 0:
        write(folder)
    comm.barrier()
    return folder / "run.toml"


def written(write: Callable[[Path], object]) -> Any:
    """Return a fixture: the path of the configuration that `write` writes, with its data, to a folder of all ranks."""

    @pytest.fixture
    def config(comm: Any, working: Path) -> Path:
        return write_shared(comm, working, write)

    return config


def unet(width=4, name="mine"):
    x = hg.Input((EDGE, EDGE, CHANNELS), name="x")
    y = hg.Conv(width, 3, padding=1, activation="relu")(x)
    logits = hg.Conv(1, 3, padding=1)(y * hg.Sigmoid()(hg.Dense(width)(hg.GlobalAveragePool()(y))))
    loss = hg.BinaryCrossEntropyWithLogits()(logits, hg.Input(logits.shape, "target"))
    return hg.Network({"prediction": logits, "loss": loss}, name=name)


OPTIONS = {
    "epochs": 3,
    "batch": 4,
    "optimizer": {"kind": "adamw", "weight_decay": 0.01},
    "seed": 7,
    "dtype": "float64",
    "backend": {"kernels": "numpy"},
    "output": {"progress": False},
}


def check_refused(overrides: Sequence[str], message: str) -> None:
    """Check that ``run.toml`` with these overrides raises an error of one line that contains this message."""
    with pytest.raises(UserError) as error:
        load_config("run.toml", overrides)
    assert message in str(error.value) and "\n" not in str(error.value)
