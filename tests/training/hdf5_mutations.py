"""HDF5 files with one error each in names, links, shapes, types or attributes.

A mutation changes the files of :func:`write` in a folder. Its expected outcome is one of:

``"sound"``   the run trains, without a message
``"warned"``  the run trains, after a line that names the error
``"refused"`` one line, exit code 2
``"any"``     any of these, because bytes were changed at random
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5s, h5t

from tests.training.runs import write_arrays

N, EDGE, CHANNELS = 8, 8, 2
GRID = (N, EDGE, EDGE)
NAMES = ("inputs", "mask")

Mutation = Callable[[Path, np.random.Generator], None]
MUTATIONS: dict[str, tuple[str, Mutation]] = {}
"""Name -> what comes of it, and what changes the files of a folder."""


def write(folder: Path, seed: int = 0) -> Path:
    """Write a valid data set; return its path."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*GRID, CHANNELS)).astype(np.float32)
    write_arrays(folder / "data.h5", {"inputs": x, "mask": (x[..., 0] > 0).astype(np.uint8)}, inputs="NHWC")
    return folder / "data.h5"


def case(name: str, outcome: str, change: Mutation) -> None:
    MUTATIONS[name] = outcome, change


def mutation(outcome: str) -> Callable[[Mutation], Mutation]:
    """Return a decorator that registers a function as a mutation under its name."""

    def note(function: Mutation) -> Mutation:
        case(function.__name__, outcome, function)
        return function

    return note


def opened(folder: Path) -> h5py.File:
    return h5py.File(folder / "data.h5", "r+")


def replaced(folder: Path, name: str, make: Callable[[h5py.File, np.ndarray], Any]) -> None:
    """Replace a dataset by the result of `make(file, values)`; a new dataset keeps the attributes."""
    with opened(folder) as file:
        values, attributes = file[name][()], dict(file[name].attrs)
        del file[name]
        make(file, values)
        if isinstance(file.get(name, getlink=True), h5py.HardLink) and isinstance(file[name], h5py.Dataset):
            file[name].attrs.update(attributes)


def put(name: str, make: Callable[[np.ndarray], Any], under: str | None = None) -> Mutation:
    """Return a mutation that replaces a dataset by `make(values)`, under the same or another name."""

    def change(folder: Path, rng: np.random.Generator) -> None:
        def insert(file: h5py.File, values: np.ndarray) -> None:
            file[under or name] = make(values)

        replaced(folder, name, insert)

    return change


def added(name: str, make: Callable[[], Any]) -> Mutation:
    """Return a mutation that adds an object under a new name."""

    def change(folder: Path, rng: np.random.Generator) -> None:
        with opened(folder) as file:
            file[name] = make()

    return change


def attribute(name: str, make: Callable[[], Any]) -> Mutation:
    """Return a mutation that sets an attribute of the inputs."""

    def change(folder: Path, rng: np.random.Generator) -> None:
        with opened(folder) as file:
            file["inputs"].attrs[name] = make()

    return change


# Names and links

for _name in NAMES:
    case(f"{_name}_missing", "refused", lambda f, r, n=_name: replaced(f, n, lambda file, v: None))
    case(f"{_name}_is_a_group", "refused", lambda f, r, n=_name: replaced(f, n, lambda file, v: file.create_group(n)))
    case(f"{_name}_is_a_type", "refused", put(_name, lambda v: v.dtype))
    case(f"{_name}_renamed", "refused", put(_name, lambda v: v, "other"))

case("soft_link_to_itself", "refused", put("inputs", lambda v: h5py.SoftLink("/inputs")))
case("dangling_soft_link", "refused", put("mask", lambda v: h5py.SoftLink("/nowhere/mask")))
case("link_to_missing_file", "refused", put("inputs", lambda v: h5py.ExternalLink("none.h5", "/inputs")))
case("link_to_device", "refused", put("mask", lambda v: h5py.ExternalLink("/dev/zero", "/mask")))
case("link_to_folder", "refused", put("mask", lambda v: h5py.ExternalLink(".", "/mask")))
case("link_to_text", "refused", put("inputs", lambda v: h5py.ExternalLink("/etc/passwd", "/inputs")))


@mutation("refused")
def link_to_pipe(folder: Path, rng: np.random.Generator) -> None:
    os.mkfifo(folder / "pipe.h5")
    put(str(rng.choice(NAMES)), lambda v: h5py.ExternalLink("pipe.h5", "/x"))(folder, rng)


@mutation("refused")
def links_in_a_circle(folder: Path, rng: np.random.Generator) -> None:
    length = int(rng.integers(2, 40))
    put(str(rng.choice(NAMES)), lambda v: h5py.SoftLink("/link0"))(folder, rng)
    with opened(folder) as file:
        for k in range(length):
            file[f"link{k}"] = h5py.SoftLink(f"/link{(k + 1) % length}")


@mutation("sound")
def links_in_a_row(folder: Path, rng: np.random.Generator) -> None:
    name = str(rng.choice(NAMES))
    with opened(folder) as file:
        file.move(name, "deep/down/there")
        file["deep/first"] = h5py.SoftLink("down/there")
        file[name] = h5py.SoftLink("deep/first")


def moved_out(folder: Path, name: str, target: Path) -> None:
    """Move a dataset to another file, and put an external link in its place."""
    target.parent.mkdir(exist_ok=True)
    with opened(folder) as file, h5py.File(target, "w") as other:
        file.copy(name, other)
        del file[name]
        file[name] = h5py.ExternalLink(os.path.relpath(target, folder), f"/{name}")


@mutation("sound")
def link_into_another_file(folder: Path, rng: np.random.Generator) -> None:
    moved_out(folder, str(rng.choice(NAMES)), folder / "parts" / "other.h5")


@mutation("refused")
def link_out_of_the_folder(folder: Path, rng: np.random.Generator) -> None:
    moved_out(folder, str(rng.choice(NAMES)), folder.parent / "outside" / "other.h5")


@mutation("refused")
def symbolic_link_out_of_the_folder(folder: Path, rng: np.random.Generator) -> None:
    moved_out(folder, str(rng.choice(NAMES)), folder / "other.h5")
    (folder.parent / "outside").mkdir()
    (folder / "other.h5").rename(folder.parent / "outside" / "other.h5")
    (folder / "other.h5").symlink_to(folder.parent / "outside" / "other.h5")


# Shapes

SHAPES = {"scalar": (), "empty": (0, EDGE, EDGE, CHANNELS), "no_rows": (N, 0, EDGE, CHANNELS), "flat": (N,)}
SHAPES |= {"few_samples": (N - 1, EDGE, EDGE, CHANNELS), "other_grid": (N, EDGE, EDGE + 1, CHANNELS)}
SHAPES |= {"six_axes": (N, 1, 1, 2, 2, 1), "no_channels": (N, EDGE, EDGE, 0)}
for _name in NAMES:
    for _what, _shape in SHAPES.items():
        case(f"{_name}_{_what}", "refused", put(_name, lambda v, s=_shape: np.ones(s, v.dtype)))
    case(f"{_name}_null", "refused", put(_name, lambda v: h5py.Empty("f4")))


# Types

for _what, _type in {
    "half": "<f2",
    "big": ">f4",
    "double": "f8",
    "big_double": ">f8",
    "int": "i8",
    "extended": "g",
}.items():
    case(f"inputs_of_{_what}", "sound", put("inputs", lambda v, t=_type: (100 * v).astype(t)))
for _what, _type in {"bool": "?", "float": "f4", "big_int": ">i8", "unsigned": "u8"}.items():
    case(f"mask_of_{_what}", "sound", put("mask", lambda v, t=_type: v.astype(t)))


@mutation("sound")
def mask_of_enum(folder: Path, rng: np.random.Generator) -> None:
    kind = h5py.enum_dtype({"good": 0, "bad": 1}, "u1")
    replaced(folder, "mask", lambda file, v: file.create_dataset("mask", data=v, dtype=kind))


BAD_TYPES: dict[str, Any] = {
    "compound": [("a", "f4"), ("b", "i4")],
    "fixed_text": "S5",
    "complex": "c8",
    "opaque": "V6",
}
BAD_TYPES |= {"text": h5py.string_dtype(), "references": h5py.ref_dtype, "ragged": h5py.vlen_dtype("f4")}
BAD_TYPES |= {"arrays": np.dtype(("f4", (2,)))}
for _name in NAMES:
    for _what, _type in BAD_TYPES.items():
        case(
            f"{_name}_of_{_what}", "refused",
            lambda f, r, n=_name, t=_type: replaced(f, n, lambda file, v: file.create_dataset(n, v.shape, t)),
        )  # fmt: skip
for _what, _raw in {"bits": h5t.STD_B8LE, "times": h5t.UNIX_D32LE}.items():

    def _make(folder: Path, rng: np.random.Generator, kind: Any = _raw) -> None:
        replaced(folder, "inputs", lambda file, v: h5d.create(file.id, b"inputs", kind, h5s.create_simple(v.shape)))

    case(f"inputs_of_{_what}", "refused", _make)


# Attributes

ODD: dict[str, Any] = {
    "number": 3,
    "nothing": h5py.Empty("S1"),
    "numbers": np.arange(5.0),
    "bad_utf8": np.bytes_(b"\xff"),
}
ODD |= {"array": np.array(["NHWC"] * 3, h5py.string_dtype()), "two_axes": np.array([["a", "b"]], h5py.string_dtype())}
ODD |= {"table": np.zeros(2, [("a", "i4")])}
for _what, _value in ODD.items():
    for _name in ("layout", "channel_names"):
        case(f"{_name}_is_{_what}", "refused", attribute(_name, lambda v=_value: v))
case("layout_in_bytes", "sound", attribute("layout", lambda: np.bytes_(b"NHWC")))
case("layout_unknown", "refused", attribute("layout", lambda: "HNWC"))
case("names_in_bytes", "sound", attribute("channel_names", lambda: np.array([b"a", b"b"])))
case("names_scalar", "refused", attribute("channel_names", lambda: "density"))
case("names_too_few", "refused", attribute("channel_names", lambda: ["density"]))


@mutation("refused")
def no_layout(folder: Path, rng: np.random.Generator) -> None:
    with opened(folder) as file:
        del file["inputs"].attrs["layout"]


# Samples that belong together

case("simulation_numbers", "sound", added("simulation", lambda: np.arange(N) // 2))
case("simulation_whole_floats", "sound", added("simulation", lambda: np.arange(N) / 1.0))
case("simulation_texts", "refused", added("simulation", lambda: np.array([b"run1", b"run2"] * (N // 2))))
case("simulation_halves", "refused", added("simulation", lambda: np.arange(N) / 2))
case("simulation_nan", "refused", added("simulation", lambda: np.full(N, np.nan)))
case("simulation_of_one", "refused", added("simulation", lambda: np.zeros(N, np.int32)))
case("simulation_tables", "refused", added("simulation", lambda: np.zeros(N, [("a", "i4")])))
case("simulation_too_few", "warned", added("simulation", lambda: np.arange(N - 1)))
case("simulation_two_axes", "warned", added("simulation", lambda: np.zeros((N, 2), np.int64)))
case("simulation_null", "warned", added("simulation", lambda: h5py.Empty("i4")))
case("simulation_in_a_circle", "refused", added("simulation", lambda: h5py.SoftLink("/simulation")))
