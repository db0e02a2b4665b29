"""Runs with damaged and odd HDF5 files: exit code 0 or 2, one line if rejected, never a traceback or a hang.

    python -m tests.training.fuzz_hdf5                        every mutation once, each in a separate process
    python -m tests.training.fuzz_hdf5 --rounds 20            random parts of each drawn twenty times
    python -m tests.training.fuzz_hdf5 --ranks 2 --only virtual

The program prints a line for every failed case, and one with the counts; its exit code is 1 if a case failed.

A mutation changes the files of :func:`write` in a folder, by one error in names, links, shapes, types, attributes,
storage or values. Its expected outcome is one of:

``"sound"``   the run trains, without a message
``"warned"``  the run trains, after a line that names the error
``"refused"`` one line, exit code 2
``"any"``     any of these, because bytes were changed at random
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from tests.harness.limits import scaled
from tests.launch import find_mpiexec
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


CHUNK = (2, EDGE, EDGE)

# Numbers that are not there


def stored(folder: Path, name: str, **options: Any) -> None:
    """Store the same values with other storage options."""
    replaced(folder, name, lambda file, v: file.create_dataset(name, data=v, **options))


def chunk_of(values: np.ndarray) -> tuple[int, ...]:
    return (*CHUNK, *values.shape[3:])


def unwritten(folder: Path, name: str, written: int, fill: float | None = None, chunks: bool = True) -> None:
    """Store a dataset of which only the first `written` samples are written."""

    def make(file: h5py.File, values: np.ndarray) -> None:
        options = {} if fill is None else {"fillvalue": fill}
        made = file.create_dataset(
            name, values.shape, values.dtype, chunks=chunk_of(values) if chunks else None, **options
        )
        if written:
            made[:written] = values[:written]

    replaced(folder, name, make)


for _name in ("inputs", "mask"):
    case(f"{_name}_never_written", "refused", lambda f, r, n=_name: unwritten(f, n, 0, chunks=False))
    case(f"{_name}_no_chunk_written", "refused", lambda f, r, n=_name: unwritten(f, n, 0))
    case(
        f"{_name}_some_chunks",
        "warned",
        lambda f, r, n=_name: unwritten(f, n, int(r.integers(1, N - 1))),
    )
    case(f"{_name}_all_fill_value", "warned", lambda f, r, n=_name: unwritten(f, n, 0, 1.0))
    case(
        f"{_name}_compressed",
        "sound",
        lambda f, r, n=_name: stored(f, n, compression="gzip", shuffle=True, fletcher32=True),
    )
case("a_thousand_million_samples", "refused", lambda f, r: _gigantic(f))


def _gigantic(folder: Path) -> None:
    samples = 10**9
    replaced(folder, "inputs", lambda file, v: file.create_dataset(
        "inputs", (samples, *v.shape[1:]), v.dtype, chunks=(1024, *v.shape[1:])))  # fmt: skip
    replaced(folder, "mask", lambda file, v: file.create_dataset(
        "mask", (samples, *v.shape[1:]), v.dtype, chunks=(1024, *v.shape[1:])))  # fmt: skip


def virtual(
    folder: Path, name: str, parts: int = 2, file_name: str = "part{}.h5", place: Path | None = None, **changes: Any
) -> None:
    """Replace the inputs by a virtual dataset over files with a part of the samples each.

    `changes`: ``missing`` (part that is not written), ``short`` (part that lacks a sample), ``gap`` (part that is not
    mapped), ``dataset`` (its name in the part), ``unlimited`` (a pattern of file names).
    """
    place = folder if place is None else place
    place.mkdir(exist_ok=True)

    def make(file: h5py.File, values: np.ndarray) -> None:
        rows, layout = len(values) // parts, h5py.VirtualLayout(values.shape, values.dtype)
        for k in range(parts):
            path, part = place / file_name.format(k), values[k * rows : (k + 1) * rows]
            if changes.get("missing") != k:
                with h5py.File(path, "w") as other:
                    other["x"] = part[1:] if changes.get("short") == k else part
            if changes.get("gap") != k:
                source = h5py.VirtualSource(os.path.relpath(path, folder), changes.get("dataset", "x"), part.shape)
                layout[k * rows : (k + 1) * rows] = source[:] if k % 2 else source
        if not changes.get("unlimited"):
            file.create_virtual_dataset(name, layout)
            return
        shape, properties = values.shape, h5p.create(h5p.DATASET_CREATE)
        space = h5s.create_simple((0, *shape[1:]), (h5s.UNLIMITED, *shape[1:]))
        ones = (1,) * (len(shape) - 1)
        space.select_hyperslab(
            (0,) * len(shape), (h5s.UNLIMITED, *ones), stride=(rows, *shape[1:]), block=(rows, *shape[1:])
        )
        source_space = h5s.create_simple((rows, *shape[1:]))
        source_space.select_all()
        properties.set_virtual(space, file_name.format("%b").encode(), b"x", source_space)
        whole = h5s.create_simple((0, *shape[1:]), (h5s.UNLIMITED, *shape[1:]))
        h5d.create(file.id, name.encode(), h5t.py_create(values.dtype), whole, properties)

    replaced(folder, name, make)


for _name in ("inputs", "mask"):
    case(f"virtual_{_name}", "sound", lambda f, r, n=_name: virtual(f, n, int(r.choice([1, 2, 4]))))
    case(f"virtual_{_name}_in_a_pattern", "sound", lambda f, r, n=_name: virtual(f, n, 4, unlimited=True))
    case(
        f"virtual_{_name}_source_missing",
        "refused",
        lambda f, r, n=_name: virtual(f, n, 4, missing=int(r.integers(4))),
    )
    case(
        f"virtual_{_name}_source_short",
        "refused",
        lambda f, r, n=_name: virtual(f, n, 4, short=int(r.integers(4))),
    )
    case(f"virtual_{_name}_gap", "warned", lambda f, r, n=_name: virtual(f, n, 4, gap=int(r.integers(4))))
    case(f"virtual_{_name}_other_dataset", "refused", lambda f, r, n=_name: virtual(f, n, 2, dataset="y"))
case("virtual_pattern_with_a_gap", "refused", lambda f, r: virtual(f, "inputs", 4, unlimited=True, missing=2))
case("virtual_outside", "refused", lambda f, r: virtual(f, "inputs", place=f.parent / "outside"))


@mutation("refused")
def virtual_source_is_a_pipe(folder: Path, rng: np.random.Generator) -> None:
    virtual(folder, "inputs", 2)
    (folder / "part1.h5").unlink()
    os.mkfifo(folder / "part1.h5")


@mutation("refused")
def virtual_source_never_written(folder: Path, rng: np.random.Generator) -> None:
    virtual(folder, "inputs", 2)
    with h5py.File(folder / "part1.h5", "w") as file:
        file.create_dataset("x", (N // 2, EDGE, EDGE, CHANNELS), np.float32)


@mutation("refused")
def virtual_source_of_text(folder: Path, rng: np.random.Generator) -> None:
    virtual(folder, "inputs", 2)
    with h5py.File(folder / "part1.h5", "w") as file:
        file["x"] = np.full((N // 2, EDGE, EDGE, CHANNELS), b"text")


@mutation("refused")
def virtual_of_itself(folder: Path, rng: np.random.Generator) -> None:
    """Make a virtual dataset that refers to itself, directly or through another file; HDF5 itself crashes on it."""
    values = (*GRID, CHANNELS)
    virtual(folder, "inputs", 1)
    layout = h5py.VirtualLayout(values, np.float32)
    layout[:] = h5py.VirtualSource("data.h5", "inputs", values)
    if rng.integers(2):
        with h5py.File(folder / "part0.h5", "w") as file:
            file.create_virtual_dataset("x", layout)
    else:
        replaced(folder, "inputs", lambda file, v: file.create_virtual_dataset("inputs", layout))


def external(folder: Path, path: Path, length: int | None = None, offset: int = 0) -> None:
    """Store the inputs in an external file, which contains only `length` bytes."""

    def make(file: h5py.File, values: np.ndarray) -> None:
        content = b"\0" * offset + values.tobytes()
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if length is None else content[:length])
        file.create_dataset("inputs", values.shape, values.dtype, external=[(str(path), offset, values.nbytes)])

    replaced(folder, "inputs", make)


case("external", "sound", lambda f, r: external(f, f / "raw.bin", offset=int(r.integers(64))))
case("external_short", "refused", lambda f, r: external(f, f / "raw.bin", int(r.integers(4000))))
case("external_outside", "refused", lambda f, r: external(f, f.parent / "outside" / "raw.bin"))
case("external_system_file", "refused", lambda f, r: external(f, Path("/etc/passwd")))
case("external_device", "refused", lambda f, r: external(f, Path("/dev/zero")))


@mutation("refused")
def external_missing(folder: Path, rng: np.random.Generator) -> None:
    external(folder, folder / "raw.bin")
    (folder / "raw.bin").unlink()


@mutation("refused")
def external_pipe(folder: Path, rng: np.random.Generator) -> None:
    os.mkfifo(folder / "raw.bin")
    external(folder, folder / "raw.bin")


# Damage


def bytes_changed(path: Path, rng: np.random.Generator, low: int, high: int, count: int) -> None:
    content = bytearray(path.read_bytes())
    for at in rng.integers(low, min(high, len(content)), count):
        content[at] ^= int(rng.integers(1, 256))
    path.write_bytes(content)


def damaged_chunk(folder: Path, rng: np.random.Generator, **options: Any) -> None:
    name = str(rng.choice(NAMES))
    with opened(folder) as file:
        shape = file[name].shape
    stored(folder, name, chunks=(*CHUNK, *shape[3:]), **options)
    with opened(folder) as file:
        chunk = file[name].id.get_chunk_info(int(rng.integers(N // 2)))
    bytes_changed(folder / "data.h5", rng, chunk.byte_offset, chunk.byte_offset + chunk.size, 3)


case("damaged_chunk_gzip", "refused", lambda f, r: damaged_chunk(f, r, compression="gzip"))
case("damaged_chunk_fletcher32", "refused", lambda f, r: damaged_chunk(f, r, fletcher32=True))


@mutation("refused")
def unknown_filter(folder: Path, rng: np.random.Generator) -> None:
    stored(folder, "inputs", chunks=(*CHUNK, CHANNELS), compression="gzip")
    path = folder / "data.h5"
    content = path.read_bytes()
    at = content.index(b"deflate\0")  # its number stands 8 bytes before the name
    path.write_bytes(content[: at - 8] + (31999).to_bytes(2, "little") + content[at - 6 :])


@mutation("refused")
def truncated(folder: Path, rng: np.random.Generator) -> None:
    path = folder / "data.h5"
    path.write_bytes(path.read_bytes()[: int(rng.integers(0, path.stat().st_size))])


@mutation("any")
def changed_in_the_head(folder: Path, rng: np.random.Generator) -> None:
    bytes_changed(folder / "data.h5", rng, 0, 2048, int(rng.integers(1, 5)))


@mutation("any")
def changed_anywhere(folder: Path, rng: np.random.Generator) -> None:
    if rng.integers(2):
        stored(folder, "inputs", chunks=(*CHUNK, CHANNELS), compression="gzip")
    bytes_changed(folder / "data.h5", rng, 0, 1 << 30, int(rng.integers(1, 40)))


@mutation("refused")
def text_file(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").write_text("not HDF5")


@mutation("refused")
def pipe(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").unlink()
    os.mkfifo(folder / "data.h5")


@mutation("refused")
def device(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").unlink()
    (folder / "data.h5").symlink_to("/dev/zero")


@mutation("refused")
def folder_as_file(folder: Path, rng: np.random.Generator) -> None:
    (folder / "data.h5").unlink()
    (folder / "data.h5").mkdir()


@mutation("sound")
def user_block(folder: Path, rng: np.random.Generator) -> None:
    path = folder / "data.h5"
    with h5py.File(path) as old, h5py.File(folder / "new.h5", "w", userblock_size=512) as new:
        for name in old:
            old.copy(name, new)
    (folder / "new.h5").rename(path)


# Values


def valued(name: str, change: Callable[[np.ndarray, np.random.Generator], Any]) -> Mutation:
    def apply(folder: Path, rng: np.random.Generator) -> None:
        with opened(folder) as file:
            values = file[name][()]
            change(values, rng)
            file[name][...] = values

    return apply


def _at(rng: np.random.Generator) -> tuple[int, int, int]:
    sample, row, column = (int(k) for k in rng.integers(0, GRID))
    return sample, row, column


case("nan", "refused", valued("inputs", lambda v, r: v.__setitem__(_at(r), np.nan)))
case("infinite", "refused", valued("inputs", lambda v, r: v.__setitem__(_at(r), -np.inf)))
case("constant_channel", "warned", valued("inputs", lambda v, r: v.__setitem__((..., 1), float(r.integers(5)))))
case("targets_of_one_value", "warned", valued("mask", lambda v, r: v.fill(int(r.integers(2)))))
case("target_out_of_range", "refused", valued("mask", lambda v, r: v.__setitem__(_at(r), 7)))


LIMIT = scaled(60.0)  # [s]: whatever takes longer hangs
CONFIG = """
[model]
name = "mesh"
resolution = 8
channels = 2
widths = [3]
convs = 1
decoder = true
[data]
path = "{folder}/data.h5"
validation = 0.25
normalize = {normalize}
[optimizer]
kind = "sgd"
[schedule]
learning_rate = 0.01
[training]
epochs = 1
batch = 2
[backend]
kernels = "numpy"
[output]
directory = "{folder}/out"
"""


def prepare(folder: Path, name: str, seed: int) -> list[str]:
    """Write the data set and the configuration of a case; return the arguments of the command line."""
    rng = np.random.default_rng([seed, sum(name.encode())])
    write(folder, seed)
    MUTATIONS[name][1](folder, rng)
    normalize = "false" if rng.integers(2) else "true"
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, normalize=normalize))
    return ["train", str(folder / "run.toml")]


def launched(arguments: list[str], ranks: int) -> tuple[int | None, str]:
    """Return exit code and output of a run on several ranks; None if it had to be killed."""
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "halograd", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, errors="replace"
    ) as process:
        try:
            said = process.communicate(timeout=LIMIT)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
    return process.returncode, said


def forked(arguments: list[str], said: Path) -> tuple[int | None, str]:
    """Return exit code and output of a run on one rank, in a fork of this process."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 1
        try:
            from halograd.cli.run import run

            code = run(arguments)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    deadline = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None, said.read_text(errors="replace")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]), said.read_text(errors="replace")


def judge(outcome: str, code: int | None, said: str) -> str | None:
    """Return a description of the fault of a run's end; None if there is none."""
    errors = re.findall(r"^halograd: error: .*$", said, re.M)
    warnings = re.findall(r"^(?:halograd: |WARNING:).*data\.h5.*$", said, re.M)
    if code is None:
        return f"hangs for {LIMIT:g} s"
    if code < 0 and outcome == "any":
        return None  # the HDF5 library is not proof against changed bytes; the counts tell of it
    if code not in (0, 2):
        return f"exit code {code}"
    if "Traceback" in said:
        return "a traceback"
    if (code == 2) != (len(errors) == 1):
        return f"exit code {code} with {len(errors)} lines of errors"
    if outcome == "refused" and code != 2:
        return "expected to be refused"
    if outcome in ("sound", "warned") and (code != 0 or bool(warnings) != (outcome == "warned")):
        return f"expected to be {outcome}, got exit code {code} and {len(warnings)} warnings"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--say", action="store_true", help="print what every run has said")
    options = parser.parse_args()
    names = [name for name in MUTATIONS if re.search(options.only, name)]
    import halograd.auto
    import halograd.cli.commands
    import halograd.training.run  # noqa: F401  (once, before the forks)

    ends: Counter[str] = Counter()
    bad = 0
    for seed in range(options.seed, options.seed + options.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "data"
                folder.mkdir()
                arguments = prepare(folder, name, seed)
                said_file = Path(temporary) / "said.txt"
                code, said = forked(arguments, said_file) if options.ranks == 1 else launched(arguments, options.ranks)
            wrong = judge(MUTATIONS[name][0], code, said)
            crashed = code is not None and code < 0
            ends["refused" if code == 2 else "trained" if code == 0 else "crashed" if crashed else "other"] += 1
            if wrong is not None or crashed or options.say:
                bad += wrong is not None
                lines = [f"{name}, seed {seed}: {wrong or 'as it should be'}", *said.splitlines()[-12:]]
                print("\n    ".join(lines), flush=True)
    counts = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
    print(f"{sum(ends.values())} cases on {options.ranks} rank(s): {counts}; {bad} not as they should be")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
